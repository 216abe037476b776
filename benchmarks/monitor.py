"""What `AccumulationMonitor` costs: CPU time of a window with it, against the one without.

A window is one update over k micro-batches, through the function that `model.fit` calls,
with the callbacks that `fit` calls around it, `History` among them. In both routes:

- `plain`: no monitor
- `callback`: a callback that does nothing, but at each batch: Keras then waits for each
  step, whose logs it passes on
- `monitor`: `AccumulationMonitor()`
- `noise`: `AccumulationMonitor(noise_scale=True)`, which takes norms

    PYTHONPATH=. python benchmarks/monitor.py --check --json monitor.json
"""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import keras
from common import (
    WORKLOADS,
    Timing,
    endless_batches,
    format_table,
    in_own_process,
    measure,
    write_json,
)
from windows import Case, Target, Window, compile_model, find_misses, ratio, show

import keras_accum


class Nothing(keras.callbacks.Callback):
    """Is called at each batch, and does nothing."""

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        """Does nothing."""


ROUTES = ("optimizer", "step")
MONITORS: dict[str, Callable[[], list[keras.callbacks.Callback]]] = {
    "plain": list,
    "callback": lambda: [Nothing()],
    "monitor": lambda: [keras_accum.AccumulationMonitor(verbose=0)],
    "noise": lambda: [keras_accum.AccumulationMonitor(noise_scale=True, verbose=0)],
}
TARGETS = [
    Target(f"{route}, {method}", f"{route}, plain", limit, lambda case: True)
    for route in ROUTES
    for method, limit in (("monitor", 1.01), ("noise", 1.03))
]
HEADER = ["model", "XLA", "k", "route", *MONITORS]
HEADER += [f"{method}/plain" for method in MONITORS if method != "plain"]


def make_window(case: Case, route: str, method: str) -> Window:
    """Returns a window of steps with the callbacks around them, as `fit` has them."""
    rows, calls, prepare = case.workload.micro_batch, case.k, None
    optimizer: keras.optimizers.Optimizer = keras.optimizers.Adam()
    if route == "optimizer":
        optimizer = keras_accum.AccumOptimizer(optimizer, accum_steps=case.k)
    else:
        rows, calls = rows * case.k, 1

        def prepare(model: keras.Model) -> object:
            return keras_accum.accumulate(model, accum_steps=case.k)

    model = compile_model(case, optimizer, prepare=prepare)
    batches = iter(endless_batches(case.workload, rows))
    callbacks = keras.callbacks.CallbackList(
        MONITORS[method](), add_history=True, model=model, epochs=1, steps=None, verbose=0
    )
    model.make_train_function()
    callbacks.on_train_begin()
    callbacks.on_epoch_begin(0)
    steps = itertools.count()

    def window() -> None:
        for _ in range(calls):
            step = next(steps)
            callbacks.on_train_batch_begin(step)
            logs = model.train_function(batches)
            callbacks.on_train_batch_end(step, logs)

    return window


def run_case(case: Case, rounds: int, turn_seconds: float) -> dict[str, Timing]:
    """Measures one case; called in a process of its own."""
    windows = {
        f"{route}, {method}": make_window(case, route, method)
        for route in ROUTES
        for method in MONITORS
    }
    return measure(windows, rounds=rounds, turn_seconds=turn_seconds)


def table_rows(case: Case, timings: dict[str, Timing]) -> list[list[str]]:
    """Returns rows under `HEADER`: medians in ms with their spread, and ratios."""
    return [
        [
            case.model,
            "on" if case.xla else "off",
            str(case.k),
            route,
            *(show(timings[f"{route}, {method}"]) for method in MONITORS),
            *(
                f"{ratio(timings, f'{route}, {method}', f'{route}, plain'):.3f}"
                for method in MONITORS
                if method != "plain"
            ),
        ]
        for route in ROUTES
    ]


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--models", nargs="+", choices=WORKLOADS, default=["mlp", "cnn"])
    add("--k", nargs="+", type=int, default=[8])
    add("--xla", nargs="+", choices=["on", "off"], default=["on", "off"])
    add("--rounds", type=int, default=25)
    add("--turn-seconds", type=float, default=0.1, help="least CPU time of a turn")
    add("--json", type=Path, help="write every figure of every round here")
    add("--check", action="store_true", help="fail if a target is missed")
    return parser.parse_args()


def main() -> None:
    """Measures all cases, prints the table and judges the targets."""
    arguments = parse_arguments()
    rows, misses = [], []
    records: list[dict[str, object]] = []
    for model, xla, k in itertools.product(arguments.models, arguments.xla, arguments.k):
        case = Case(model, xla == "on", k)
        timings = in_own_process(run_case, case, arguments.rounds, arguments.turn_seconds)
        rows += table_rows(case, timings)
        misses += find_misses(case, TARGETS, timings)
        seconds = {name: dataclasses.asdict(t) for name, t in timings.items()}
        records.append({**dataclasses.asdict(case), "seconds": seconds})
        print(f"measured {case}", file=sys.stderr)
        if arguments.json:
            write_json(arguments.json, records)
    print("CPU time of a window, ms: median ± half the distance of the quartiles\n")
    print(format_table(HEADER, rows))
    if arguments.check and misses:
        sys.exit("\n".join(["targets missed:", *misses]))


if __name__ == "__main__":
    main()
