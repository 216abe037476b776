"""One update is one step on the large batch where TensorFlow needs no `merge_call`."""

import os
import pathlib

import forks

SECONDS = 300
HELPERS = str(pathlib.Path(__file__).parents[1])
PATHS = [HELPERS, os.environ.get("PYTHONPATH", "")]


def test_without_merge_call():
    script = pathlib.Path(__file__).with_name("no_merge_call.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS)}
    code, printed = forks.run(script, timeout=SECONDS, environment=environment)
    assert code == 0, printed[-5000:]
