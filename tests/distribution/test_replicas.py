"""One update over several replicas is one step on the large batch on one device.

The scenarios of `replicas.py` run in processes of their own, a group in each.
"""

import itertools
import os
import pathlib

import forks
import pytest
from groups import Ended, passed_in, run_group
from replicas import GROUPS, MODES, SLOW

SECONDS = 1200
HELPERS = str(pathlib.Path(__file__).parents[1])
PATHS = os.pathsep.join([HELPERS, os.environ.get("PYTHONPATH", "")])
ENVIRONMENT = {**os.environ, "PYTHONPATH": PATHS}


def run(names, replicas=2, *options):
    """Run scenarios in turn, up to the first that fails or takes too long."""
    script = pathlib.Path(__file__).with_name("replicas.py")
    arguments = [*names, "--replicas", replicas, *options]
    code, printed = forks.run(
        script, *arguments, timeout=SECONDS, environment=ENVIRONMENT
    )
    code = f"none after {SECONDS} seconds" if code is None else code
    return Ended(code == 0, passed_in(printed), f"code: {code}\n{printed[-5000:]}")


# What shares a process: each new one imports TensorFlow for seconds.
PROCESSES = [
    ["short batches"],  # Alone, for `tests/matrix.py`.
    ["weights", "losses", "custom loops"],
    ["optimizers", "state"],
    ["reductions", "coupled", "planning"],
]


@pytest.mark.parametrize("groups", PROCESSES, ids=", ".join)
def test_on_two_replicas(groups):
    run_group([name for group in groups for name in GROUPS[group] if MODES[name]], run)


@pytest.mark.slow  # In the other mode; or what the step shows on one device.
def test_the_rest_on_two_replicas():
    slow = [name for name in SLOW if SLOW[name]]
    run_group(slow, lambda names: run(names, 2, "--slow"))


def test_each_group_has_its_process():
    assert sorted([*itertools.chain(*PROCESSES), "invariance"]) == sorted(GROUPS)


@pytest.mark.slow  # Two replicas are above.
@pytest.mark.parametrize("replicas", [1, 4])
def test_invariance(replicas):
    run_group(GROUPS["invariance"], lambda names: run(names, replicas))


def test_a_scenario_that_fails_is_seen():
    with pytest.raises(AssertionError, match=r"(?s)no_such fails:.*KeyError: 'no_such'"):
        run_group(["no_such"], run)


def test_the_scenarios_after_one_that_fails_run_too():
    ran = []

    def process(names):
        ran.append(names)
        bad = [n for n in names if n == "broken" or (n == "late" and len(names) > 1)]
        good = names[: names.index(bad[0])] if bad else names
        return Ended(not bad, good, "what was printed")

    with pytest.raises(AssertionError) as caught:
        run_group(["first", "broken", "other", "late", "last"], process)
    assert "broken fails:" in str(caught.value)
    assert "late passes alone, but fails after ['other']:" in str(caught.value)
    assert ran == [
        ["first", "broken", "other", "late", "last"],
        ["broken"],
        ["other", "late", "last"],
        ["late"],
        ["last"],
    ]
    run_group(["first", "last"], process)
    with pytest.raises(AssertionError, match=r"not run: \{'first'\}"):
        run_group(["first"], lambda names: Ended(True, [], ""))
