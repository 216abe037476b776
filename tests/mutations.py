"""Breaks the package in the ways of `mutations.toml`, to see the tests notice.

    python tests/mutations.py [WORD...] [--check]

Each mutation is applied to a copy of the package, and the tests that should fail with it
run there; the working tree is never touched. One that survives is a missing test. With
words, only mutations whose names have one of them; with `--check`, none is run, only
looked up, and whether its tests are among those that run by default: one that is marked
slow does not count. Not for CI: some minutes of CPU.
"""

import argparse
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest

# Private: nothing public says what `-k` would choose.
from _pytest.mark import KeywordMatcher
from _pytest.mark.expression import Expression

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = "keras_accum"
SECONDS = 1800
TESTS_FAILED = 1  # What pytest and a scenario end with; else they could not run.


class Mutation(NamedTuple):
    """A change of one file, and what has to fail with it."""

    name: str
    file: str
    old: str
    new: str
    tests: str = ""
    scenarios: str = ""

    def problem(self, package: pathlib.Path) -> str | None:
        """Why it cannot be applied, or None."""
        path = package / self.file
        if not path.exists():
            return f"no such file: {self.file}"
        found = path.read_text().count(self.old)
        if found != 1:
            return f"old text found {found} times in {self.file}: {self.old.strip()}"
        try:
            compile(path.read_text().replace(self.old, self.new), path, "exec")
        except SyntaxError as error:
            return f"no Python: {error}"
        return None

    def apply(self, package: pathlib.Path) -> None:
        path = package / self.file
        path.write_text(path.read_text().replace(self.old, self.new))


def read() -> list[Mutation]:
    """The mutations of the list."""
    text = pathlib.Path(__file__).with_suffix(".toml").read_text()
    return [Mutation(**each) for each in tomllib.loads(text)["mutation"]]


@contextmanager
def copied() -> Iterator[pathlib.Path]:
    """A folder with the package and its tests, for a while."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for part in (PACKAGE, "tests", "benchmarks", "examples"):
            shutil.copytree(ROOT / part, folder / part)
        for part in ("pyproject.toml", "README.md", "CHANGELOG.md"):
            shutil.copy(ROOT / part, folder / part)
        yield folder


def run(mutation: Mutation, apply: bool) -> str:
    """What becomes of the tests of a mutation, where it is applied or not."""
    with copied() as folder:
        if apply:
            mutation.apply(folder / PACKAGE)
        paths = [str(folder), str(folder / "tests")]
        if mutation.scenarios:
            code, printed = run_scenarios(mutation.scenarios, folder, paths)
        else:
            code, printed = run_pytest(mutation.tests, folder, paths)
    if code == 0:
        return "passed"
    lines = printed.splitlines()
    if code == TESTS_FAILED:
        failed = [x for x in lines if x.startswith(("FAILED", "AssertionError"))]
        return f"failed: {(failed or lines[-1:])[0][:100]}"
    return f"did not run ({code}): {lines[-3:]}"


def run_scenarios(names: str, folder: pathlib.Path, paths: list[str]) -> tuple[int, str]:
    ended = subprocess.run(
        [sys.executable, "tests/distribution/replicas.py", *shlex.split(names)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    return ended.returncode, ended.stdout


def run_pytest(tests: str, folder: pathlib.Path, paths: list[str]) -> tuple[int, str]:
    """Run pytest in a fork, which has imported TensorFlow already."""
    output = folder / "output.txt"
    child = os.fork()
    if child == 0:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.chdir(folder)
        sys.path[:0] = paths
        code = pytest.main(["-n", "0", "-x", *shlex.split(tests)])
        sys.stdout.flush()
        os._exit(code)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), output.read_text()
        time.sleep(0.1)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return -9, f"not ended after {SECONDS} seconds"


class Collected:
    """A plugin of pytest that keeps what has been collected and not deselected."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = session.items


def without_tests(mutations: list[Mutation]) -> list[str]:
    """The mutations of which no test runs by default; one marked slow does not count."""
    found = Collected()
    paths = {a for m in mutations for a in m.tests.split() if a.startswith("tests/")}
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    os.chdir(ROOT)
    pytest.main(["-n", "0", "--collect-only", "-qq", *sorted(paths)], plugins=[found])
    scenarios = (ROOT / "tests/distribution/replicas.py").read_text()

    def chosen(mutation: Mutation) -> bool:
        if mutation.scenarios:
            names = mutation.scenarios.split()
            return all(f"def {name}(" in scenarios for name in names)
        files, words = [], None
        arguments = iter(shlex.split(mutation.tests))
        for argument in arguments:
            if argument == "-k":
                words = Expression.compile(next(arguments))
            elif argument.startswith("tests/"):
                files.append(argument)
        return any(
            item.nodeid.startswith(tuple(files))
            and (words is None or words.evaluate(KeywordMatcher.from_item(item)))
            for item in found.items
        )

    return [mutation.name for mutation in mutations if not chosen(mutation)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--check", action="store_true")
    wanted = parser.parse_args()
    words = wanted.words
    mutations = [m for m in read() if not words or any(w in m.name for w in words)]
    problems = {m.name: m.problem(ROOT / PACKAGE) for m in mutations}
    for name, problem in problems.items():
        if problem:
            print(f"NOT APPLIED: {name}: {problem}")
    bad = any(problems.values())
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import keras  # noqa: F401 - once, for all forks.

    if wanted.check:
        without = without_tests(mutations)
        for name in without:
            print(f"NO TEST: {name}: none of its tests runs by default")
        sys.exit(bad or bool(without))
    width = max(len(m.name) for m in mutations)
    unmutated: dict[tuple[str, str], str] = {}
    for mutation in mutations:
        if problems[mutation.name]:
            continue
        tests = mutation.tests, mutation.scenarios
        if tests not in unmutated:
            unmutated[tests] = run(mutation, apply=False)
        found = unmutated[tests]
        if found == "passed":
            found = run(mutation, apply=True)
            killed = found.startswith("failed")
            found = f"killed    {found}" if killed else f"SURVIVED  {found}"
        else:
            # They would fail with any mutation.
            killed, found = False, f"NO TEST   without it: {found}"
        bad = bad or not killed
        print(f"{mutation.name:{width}}  {found}", flush=True)
    sys.exit(bad)


if __name__ == "__main__":
    main()
