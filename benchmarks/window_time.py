"""What accumulation inside the step costs: CPU time of a window, against its bounds.

A window is one update over k micro-batches. Through the function that `model.fit` calls:

- `ours`: `keras_accum.accumulate(model, accum_steps=k)`, one step on the whole batch
- `route1`: `keras_accum.AccumOptimizer`, a step for each micro-batch
- `keras`: the optimizer's `gradient_accumulation_steps=k`, a step for each micro-batch
- `none`: no accumulation, an update for each micro-batch
- `large`: one plain step on the whole batch

and beneath them two bounds (`windows.py`):

- `floor`: k forward and backward passes and one update, dispatched one by one, with
  nothing summed
- `bare`: a loop in the graph that sums, with none of this package in it: what a loop
  costs at least

In `masked`, a transformer on padded tokens, the denominator of the loss has to be known
before the loop: by a pass of which nothing but the mask is used, and of which the rest is
pruned from the graph.

    PYTHONPATH=. python benchmarks/window_time.py --check --json window_time.json
"""

import argparse
import dataclasses
import functools
import itertools
import sys
from pathlib import Path

import keras
from common import (
    WORKLOADS,
    format_table,
    in_own_process,
    measure,
    write_json,
)
from timing import Timing
from windows import (
    Case,
    Target,
    Window,
    bare_window,
    find_misses,
    floor_window,
    large_window,
    micro_window,
    ratio,
    show,
    wall_ratio,
)

import keras_accum


def is_other(case: Case) -> bool:
    """Says whether arithmetic rules."""
    return case.model in ("cnn", "transformer", "masked")


TARGETS = [
    Target("ours", "floor", 0.90, lambda case: case.model == "mlp" and case.xla),
    Target("ours", "floor", 0.97, lambda case: case.model == "mlp" and not case.xla),
    Target("ours", "keras", 0.40, lambda case: case.model == "mlp" and case.xla),
    Target("ours", "floor", 1.02, is_other),
    Target("ours", "large", 1.05, lambda case: case.model == "small"),
]
METHODS = ("floor", "bare", "ours", "route1", "keras", "none", "large")
HEADER = ["model", "XLA", "k", *METHODS, "ours/floor", "(wall)", "ours/keras"]
HEADER += ["ours/large", "bare/large"]


def make_windows(case: Case) -> dict[str, Window]:
    """Returns the methods of a case by their name."""
    split = functools.partial(keras_accum.accumulate, accum_steps=case.k)
    adam = keras.optimizers.Adam
    route1 = keras_accum.AccumOptimizer(adam(), accum_steps=case.k)
    return {
        "floor": floor_window(case, steps=1),
        "bare": bare_window(case),
        "ours": large_window(case, prepare=split),
        "route1": micro_window(case, route1, steps=1),
        "keras": micro_window(case, adam(gradient_accumulation_steps=case.k), steps=1),
        "none": micro_window(case, adam(), steps=1),
        "large": large_window(case),
    }


def run_case(case: Case, rounds: int, turn_seconds: float) -> dict[str, Timing]:
    """Measures one case; called in a process of its own."""
    return measure(make_windows(case), rounds=rounds, turn_seconds=turn_seconds)


def table_row(case: Case, timings: dict[str, Timing]) -> list[str]:
    """Returns a row under `HEADER`: medians in ms with their spread, and ratios."""
    return [
        case.model,
        "on" if case.xla else "off",
        str(case.k),
        *(show(timings[method]) for method in METHODS),
        f"{ratio(timings, 'ours', 'floor'):.2f}",
        f"{wall_ratio(timings, 'ours', 'floor'):.2f}",
        f"{ratio(timings, 'ours', 'keras'):.2f}",
        f"{ratio(timings, 'ours', 'large'):.2f}",
        f"{ratio(timings, 'bare', 'large'):.2f}",
    ]


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--models", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    add("--k", nargs="+", type=int, default=[8])
    add("--xla", nargs="+", choices=["on", "off"], default=["on", "off"])
    add("--rounds", type=int, default=15)
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
        rows.append(table_row(case, timings))
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
