"""Runs scenarios in one process, and finds out which of them fail.

Importing TensorFlow takes longer than most scenarios: a group shares a process. The
first scenario that fails ends its process, for what comes after it may fail by that
alone. It is then run by itself, and the rest of the group goes on in a new process.
"""

from collections.abc import Callable
from typing import NamedTuple

from replicas import PASSED


class Ended(NamedTuple):
    """How a process that ran scenarios in turn has ended."""

    succeeded: bool
    passed: list[str]
    printed: str


def passed_in(printed: str) -> list[str]:
    """The scenarios that a process says have passed."""
    lines = printed.splitlines()
    return [line.split()[1] for line in lines if line.startswith(PASSED)]


def run_group(names: list[str], run: Callable[[list[str]], Ended]) -> None:
    """Run scenarios in turn; raise with what was printed by those that fail.

    Args:
        names: of the scenarios.
        run: runs scenarios in one new process, up to the first that fails.
    """
    left, failures = list(names), []
    while left:
        ended = run(left)
        if ended.succeeded:
            assert ended.passed == left, f"not run: {set(left) - set(ended.passed)}"
            break
        failed = left[len(ended.passed)]
        alone = len(left) == 1 or not run([failed]).succeeded
        how = "fails" if alone else f"passes alone, but fails after {ended.passed}"
        failures.append(f"{failed} {how}:\n{ended.printed}")
        left = left[len(ended.passed) + 1 :]
    assert not failures, "\n\n".join(failures)
