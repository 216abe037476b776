"""One update is one step on the large batch where TensorFlow needs no `merge_call`."""

import os
import pathlib
import subprocess
import sys

SECONDS = 300
HELPERS = str(pathlib.Path(__file__).parents[1])
PATHS = [HELPERS, os.environ.get("PYTHONPATH", "")]


def test_without_merge_call():
    script = pathlib.Path(__file__).with_name("no_merge_call.py")
    ended = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(PATHS)},
    )
    assert ended.returncode == 0, f"{ended.stdout[-1000:]}\n{ended.stderr[-4000:]}"
