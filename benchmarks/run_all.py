"""Measures this package beside others, and writes docs/evidence.md from what it measured.

Three groups, each of which writes its figures to benchmarks/results/:

- `equality`: small trainings of every peer against a plain step on the large batch
- `time`: CPU time of one update over 8 micro-batches
- `memory`: the peak of the heap in such an update (Linux, a C compiler)

From these files alone come the page, its figures and README's tables
(`evidence_page.py`). Peers that need an environment of their own get one in `--folder`.
Methods take turns, round by round, across processes; a figure is the median over rounds.

    PYTHONPATH=. python benchmarks/run_all.py                  # all, on a quiet machine
    PYTHONPATH=. python benchmarks/run_all.py --only equality --methods keras
    PYTHONPATH=. python benchmarks/run_all.py --from-json      # the page alone
"""

import argparse
import contextlib
import dataclasses
import datetime
import itertools
import json
import os
import platform
import re
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import evidence_page
from cases import CASES
from evidence_page import RESULTS
from heap import compile_library, counting_heap
from peers import ENVIRONMENTS, PeerError, Worker
from timing import Timing

K = 8
MODELS = ("mlp", "cnn", "transformer")
EQUALITY = {
    "keras": ("accumulate", "AccumOptimizer", "keras", "mean of means"),
    "tf_keras": ("GradientAccumulateModel", "GradientAccumulateOptimizer"),
    "jax": ("MultiSteps",),
}
TIME = {
    "keras": ("large", "floor", "accumulate", "AccumOptimizer", "keras"),
    "tf_keras": ("large", "GradientAccumulateModel", "GradientAccumulateOptimizer"),
    "jax": ("large", "scan", "MultiSteps"),
}
MEMORY = {**TIME, "keras": ("plain", *(m for m in TIME["keras"] if m != "floor"))}


def describe_machine() -> dict[str, Any]:
    """Returns what figures depend on."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": cpu[1] if cpu else platform.processor(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(pages / 2**30, 1),
        "python": platform.python_version(),
        "system": platform.system(),
    }


def versions_of(folder: Path) -> dict[str, Any]:
    """Returns the versions in each environment, or why there are none."""
    found = {}
    for name in ENVIRONMENTS:
        try:
            with Worker(name, folder) as worker:
                found[name] = worker.call("versions")
        except PeerError as error:
            found[name] = {"error": str(error)}
    return found


def measure_equality(folder: Path, quick: bool) -> dict[str, Any]:
    """Returns what every method makes of every case. Environments work side by side."""
    with ThreadPoolExecutor() as pool:
        parts = pool.map(lambda name: equality_in(name, folder), EQUALITY)
        outcomes = {key: value for part in parts for key, value in part.items()}
    cases = [
        {
            "case": name,
            "title": case.title,
            "tolerance": case.tolerance,
            "methods": {
                label(environment, method): outcomes[environment, method, name]
                for environment, methods in EQUALITY.items()
                for method in methods
            },
        }
        for name, case in CASES.items()
    ]
    return {"cases": cases}


def equality_in(environment: str, folder: Path) -> dict[Any, dict[str, Any]]:
    """Returns the outcomes in one environment; a worker that dies is replaced."""
    outcomes = {}
    worker = None
    for method, name in itertools.product(EQUALITY[environment], CASES):
        try:
            worker = worker or Worker(environment, folder)
            outcome = worker.call("equality", case=name, method=method)
        except PeerError as error:
            outcome = {"crash": str(error)}
            if worker and not worker.alive:
                worker = None
        outcomes[environment, method, name] = outcome
        print(f"{environment} {method} {name}: {outcome}", file=sys.stderr, flush=True)
    if worker:
        worker.__exit__()
    return outcomes


def label(environment: str, method: str) -> str:
    """Returns the name of a method in the files; each framework has a large batch."""
    return f"{method} ({environment})" if method == "large" else method


def measure_time(folder: Path, quick: bool) -> dict[str, Any]:
    """Returns the times of a window, for each model, compiled by XLA and not."""
    rounds, seconds = (3, 0.05) if quick else (11, 0.1)
    cases = []
    for model, xla in itertools.product(MODELS, (True, False)):
        methods = time_case(model, xla, folder, rounds, seconds)
        cases.append({"model": model, "xla": xla, "methods": methods})
        print(f"measured {model} xla={xla}", file=sys.stderr)
    return {"k": K, "rounds": rounds, "cases": cases}


def time_case(
    model: str, xla: bool, folder: Path, rounds: int, seconds: float
) -> dict[str, Any]:
    """Returns the times of each method; all of JAX is compiled."""
    names = [name for name in TIME if xla or name != "jax"]
    with contextlib.ExitStack() as stack:

        def make_ready(name: str) -> tuple[list[Ready], dict[str, Any]]:
            return ready_in(name, model, xla, folder, stack)

        with ThreadPoolExecutor() as pool:
            parts = list(pool.map(make_ready, names))
        ready = [each for part, _ in parts for each in part]
        found = {key: error for _, errors in parts for key, error in errors.items()}
        cheapest = min((each.seconds for each in ready), default=seconds)
        windows = max(1, round(seconds / cheapest))
        timings = {each.label: Timing([], []) for each in ready}
        # A round before, unmeasured: those that waited for others to compile are cold.
        for turn in range(-1, rounds):
            first = turn % max(1, len(ready))
            for each in ready[first:] + ready[:first]:
                if each.label in found:
                    continue
                try:
                    times = each.worker.call("time", method=each.method, windows=windows)
                except PeerError as error:
                    found[each.label] = {"error": str(error)}
                    continue
                if turn >= 0:
                    timings[each.label].cpu.append(times[0])
                    timings[each.label].wall.append(times[1])
    return {key: summary(timing) for key, timing in timings.items()} | found


@dataclasses.dataclass(frozen=True)
class Ready:
    """A method that is traced and compiled in a worker; CPU seconds of a window."""

    label: str
    worker: Worker
    method: str
    seconds: float


def ready_in(
    name: str, model: str, xla: bool, folder: Path, stack: contextlib.ExitStack
) -> tuple[list[Ready], dict[str, Any]]:
    """Returns the methods of an environment that run, and the errors of the others."""
    ready: list[Ready] = []
    errors = {}
    worker = None
    for method in TIME[name]:
        key = label(name, method)
        try:
            if worker is None or not worker.alive:
                worker = stack.enter_context(Worker(name, folder))
            cost = worker.call("prepare", method=method, model=model, xla=xla, k=K)
            ready.append(Ready(key, worker, method, cost))
        except PeerError as error:
            errors[key] = {"error": str(error)}
    return ready, errors


def summary(timing: Timing) -> dict[str, Any]:
    """Returns milliseconds: medians, spread, and CPU time of each round."""
    if len(timing.cpu) < 2:
        return {"error": "too few rounds"}
    return {
        "cpu_ms": round(1e3 * timing.median, 2),
        "spread": round(timing.spread, 4),
        "wall_ms": round(1e3 * timing.wall_median, 2),
        "rounds_cpu_ms": [round(1e3 * value, 2) for value in timing.cpu],
    }


def measure_memory(folder: Path, quick: bool) -> dict[str, Any]:
    """Returns what a window holds, for each model, compiled by XLA."""

    def one(key: tuple[str, str, str]) -> dict[str, Any]:
        model, name, method = key
        try:
            with Worker(name, folder) as worker:
                return worker.call("memory", method=method, model=model, xla=True, k=K)
        except PeerError as error:
            return {"error": str(error)}
        finally:
            print(f"measured memory: {' '.join(key)}", file=sys.stderr, flush=True)

    keys = [
        (model, name, method)
        for model in MODELS
        for name, methods in MEMORY.items()
        for method in methods
    ]
    with (
        tempfile.TemporaryDirectory() as place,
        counting_heap(compile_library(place)),
        ThreadPoolExecutor(2) as pool,
    ):
        found = dict(zip(keys, pool.map(one, keys), strict=True))
    cases = [
        {
            "model": model,
            "methods": {
                label(name, method): value
                for (of, name, method), value in found.items()
                if of == model
            },
        }
        for model in MODELS
    ]
    return {"k": K, "cases": cases}


GROUPS = {"equality": measure_equality, "time": measure_time, "memory": measure_memory}


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    add = parser.add_argument
    add("--only", nargs="+", choices=GROUPS, default=list(GROUPS), metavar="GROUP")
    add(
        "--methods", nargs="+", help="these alone; the files keep what they say of others"
    )
    add("--from-json", action="store_true", help="measure nothing; write the page")
    add("--quick", action="store_true", help="few rounds; the page then says so")
    add("--folder", type=Path, default=cache / "keras_accum" / "peers")
    return parser.parse_args()


def main() -> None:
    """Measures, and writes files and page."""
    arguments = parse_arguments()
    folder = arguments.folder.expanduser().resolve()
    if not arguments.from_json:
        about = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "command": command(arguments),
            "quick": arguments.quick,
            "machine": describe_machine(),
            "versions": versions_of(folder),
        }
        RESULTS.mkdir(exist_ok=True)
        if arguments.methods:
            select(arguments.methods)
        for group in arguments.only:
            result = about | GROUPS[group](folder, arguments.quick)
            path = RESULTS / f"{group}.json"
            if arguments.methods:
                result = merge(json.loads(path.read_text()), result)
            path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    evidence_page.write()


def select(methods: Sequence[str]) -> None:
    """Leaves out all other methods."""
    for table in (EQUALITY, TIME, MEMORY):
        for name in table:
            table[name] = tuple(m for m in table[name] if m in methods)


def merge(before: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Returns a file with the methods of `new` in the place of those of the same name."""
    cases = [
        {**old, **case, "methods": old["methods"] | case["methods"]}
        for old, case in zip(before["cases"], new["cases"], strict=True)
    ]
    quick = before["quick"] or new["quick"]
    command = f"{before['command']}\n{new['command']}"
    return before | new | {"cases": cases, "quick": quick, "command": command}


def command(arguments: argparse.Namespace) -> str:
    """Returns the command, without the folder: where the peers are changes nothing."""
    words = ["PYTHONPATH=. python benchmarks/run_all.py"]
    if set(arguments.only) != set(GROUPS):
        words += ["--only", *arguments.only]
    if arguments.methods:
        words += ["--methods", *arguments.methods]
    return " ".join(words + ["--quick"] * arguments.quick)


if __name__ == "__main__":
    main()
