"""What `check_equivalence` costs, in steps on the large batch, once all is traced.

In turns, in one process, in a graph (the check leaves XLA out), on a batch of k
micro-batches:

- `large`: one plain step, with Adam, through the function that `fit` calls
- `window`: the window alone, a step over micro-batches or with an `AccumOptimizer`
- `check`: all steps of the check and its report, with what is saved and put back

    PYTHONPATH=. python benchmarks/check_equivalence.py --check
"""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
from common import WORKLOADS, Timing, format_table, in_own_process, measure, write_json
from windows import Case, Target, compile_model, find_misses, large_window, ratio, show

import keras_accum
from keras_accum._backend.private.data import first_batch
from keras_accum._backend.private.replay import RandomBySample
from keras_accum._core.loop import check_batch
from keras_accum._insight.equivalence import _Measurement
from keras_accum._insight.steps import Steps
from keras_accum._planning.transaction import preserving_state

ROUTES = ("step", "optimizer")
TARGETS = [Target("check", "large", 6.0, lambda case: True)]


def run_case(
    case: Case, route: str, rounds: int, turn_seconds: float
) -> dict[str, Timing]:
    """Measures one case; called in a process of its own."""
    optimizer: keras.optimizers.Optimizer = keras.optimizers.Adam()
    if route == "optimizer":
        optimizer = keras_accum.AccumOptimizer(optimizer, accum_steps=case.k)
    model = compile_model(case, optimizer)
    rows = case.k * case.workload.micro_batch
    arrays = case.workload.sample(rows, np.random.default_rng(0))
    data = keras.utils.unpack_x_y_sample_weight(first_batch(arrays))
    batch, _ = check_batch(data)
    with RandomBySample() as random, preserving_state(model):
        steps = Steps(model, batch, case.k, False, random)
        methods: dict[str, Callable[[], object]] = {
            "large": large_window(case),
            "window": steps.window,
            "check": lambda: whole_check(model, steps),
        }
        return measure(methods, rounds=rounds, turn_seconds=turn_seconds)


def whole_check(model: keras.Model, steps: Steps) -> None:
    """Takes all steps that a check takes, and reports."""
    with preserving_state(model):
        report = _Measurement(steps).report([])
    assert report.equal, report


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--models", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    add("--k", nargs="+", type=int, default=[8])
    add("--rounds", type=int, default=9)
    add("--turn-seconds", type=float, default=0.05, help="least CPU time of a turn")
    add("--json", type=Path, help="write every figure of every round here")
    add("--check", action="store_true", help="fail if a target is missed")
    return parser.parse_args()


def main() -> None:
    """Measures all cases, prints the table and judges the target."""
    arguments = parse_arguments()
    rows, misses = [], []
    records: list[dict[str, object]] = []
    for model, k, route in itertools.product(arguments.models, arguments.k, ROUTES):
        case = Case(model, False, k)
        timings = in_own_process(
            run_case, case, route, arguments.rounds, arguments.turn_seconds
        )
        ratios = [f"{ratio(timings, name, 'large'):.1f}" for name in ("window", "check")]
        shown = [show(timings[name]) for name in ("large", "window", "check")]
        rows.append([model, str(k), route, *shown, *ratios])
        misses += find_misses(case, TARGETS, timings)
        seconds = {name: dataclasses.asdict(t) for name, t in timings.items()}
        records.append({**dataclasses.asdict(case), "route": route, "seconds": seconds})
        print(f"measured {case}, {route}", file=sys.stderr)
        if arguments.json:
            write_json(arguments.json, records)
    header = ["model", "k", "route", "large", "window", "check"]
    print("CPU time, ms: median ± half the distance of the quartiles\n")
    print(format_table([*header, "window/large", "check/large"], rows))
    if arguments.check and misses:
        sys.exit("\n".join(["targets missed:", *misses]))


if __name__ == "__main__":
    main()
