"""One update over several replicas is one step on the large batch on one device.

Each scenario of `replicas.py` runs in a process of its own, in a graph and in eager mode.
"""

import os
import pathlib
import subprocess
import sys

import pytest
from replicas import SCENARIOS

SECONDS = 300
HELPERS = str(pathlib.Path(__file__).parents[1])
ENVIRONMENT = {**os.environ, "PYTHONPATH": HELPERS}


def run(name, replicas=2):
    """Run a scenario; raise with what it printed if it fails, or takes too long."""
    script = pathlib.Path(__file__).with_name("replicas.py")
    command = [sys.executable, str(script), name, str(replicas)]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS, env=ENVIRONMENT
    )
    assert ended.returncode == 0, f"{ended.stdout[-1000:]}\n{ended.stderr[-4000:]}"


@pytest.mark.parametrize("name", SCENARIOS)
def test_on_two_replicas(name):
    run(name)


@pytest.mark.parametrize("replicas", [1, 4])
def test_invariance(replicas):
    run("one_two_and_four_replicas_give_the_same_weights", replicas)


def test_a_scenario_that_fails_is_seen():
    with pytest.raises(AssertionError, match="KeyError: 'no_such_scenario'"):
        run("no_such_scenario")
