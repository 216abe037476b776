"""What accumulation in the optimizer costs: CPU time and state, against its bounds.

A window is k micro-batches and the update that they make together. Four methods train,
through the function that `model.fit` calls, on an endless iterator without callbacks:

- `ours`: `keras_accum.AccumOptimizer(inner, accum_steps=k)`
- `keras`: the inner optimizer with `gradient_accumulation_steps=k`
- `none`: no accumulation, k updates
- `large`: one step on a batch of k times the rows

Two are bounds, each in both forms (`windows.py` says which):

- `floor`: k forward and backward passes and one update. Nothing is summed.
- `sum`: the same, but a pass adds its gradients in place to variables, which the update
  takes and clears. What any method pays that keeps a sum.

    PYTHONPATH=. python benchmarks/optimizer_overhead.py --check --json overhead.json
"""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import keras
import tensorflow as tf
from common import (
    WORKLOADS,
    endless_batches,
    format_table,
    in_own_process,
    make_model,
    measure,
    write_json,
)
from timing import Timing
from windows import (
    Case,
    Target,
    Window,
    compile_model,
    find_misses,
    floor_window,
    large_window,
    micro_window,
    passes_of,
    ratio,
    show,
    wall_ratio,
)

import keras_accum


def is_wide(case: Case) -> bool:
    """Says whether memory traffic rules: the MLP under XLA."""
    return case.model == "mlp" and case.xla and case.k == 8


def is_narrow(case: Case) -> bool:
    """Says whether arithmetic rules: another model."""
    return case.model != "mlp"


TARGETS = [
    Target("ours@k", "floor@1", 1.05, is_wide),
    Target("ours@k", "keras@k", 0.52, is_wide),
    Target("ours@k", "none@k", 0.85, is_wide),
    Target("ours@k", "floor@1", 1.10, is_narrow),
    Target("ours@k", "none@k", 1.03, lambda case: True),
    Target("ours@1", "none@1", 1.03, lambda case: True),
]


def make_optimizer(method: str, k: int) -> keras.optimizers.Optimizer:
    """Returns Adam as `method` wants it."""
    if method == "ours":
        return keras_accum.AccumOptimizer(keras.optimizers.Adam(), accum_steps=k)
    if method == "keras":
        return keras.optimizers.Adam(gradient_accumulation_steps=k)
    return keras.optimizers.Adam()


def sum_window(case: Case, steps: int) -> Window:
    """Returns k passes that add their gradients up, and one update with the mean."""
    model = compile_model(case, keras.optimizers.Adam())
    batches = iter(endless_batches(case.workload, case.workload.micro_batch))
    gradients = passes_of(model)
    sums = [tf.Variable(tf.zeros(v.shape)) for v in model.trainable_variables]

    @tf.function(jit_compile=case.xla)
    def add(x: tf.Tensor, y: tf.Tensor) -> None:
        for held, gradient in zip(sums, gradients(x, y), strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                held.scatter_add(gradient)
            else:
                held.assign_add(gradient)

    @tf.function(jit_compile=case.xla)
    def update() -> None:
        means = [held / case.k for held in sums]
        model.optimizer.apply(means, model.trainable_variables)
        for held in sums:
            held.assign(tf.zeros(held.shape))

    def dispatched() -> None:
        for _ in range(case.k):
            add(*next(batches))
        update()

    @tf.function
    def in_graph(iterator: tf.data.Iterator) -> None:
        def body(i: tf.Tensor) -> tuple[tf.Tensor]:
            add(*next(iterator))
            return (i + 1,)

        tf.while_loop(lambda i: i < case.k, body, (0,), parallel_iterations=1)
        update()

    return dispatched if steps == 1 else lambda: in_graph(batches)


def make_windows(case: Case, forms: Sequence[str]) -> dict[str, Window]:
    """Returns the methods of a case by their name, `method@1` or `method@k`."""
    windows = {"large@1": large_window(case)}
    for form in forms:
        steps = case.k if form == "k" else 1
        for method in ("ours", "keras", "none"):
            optimizer = make_optimizer(method, case.k)
            windows[f"{method}@{form}"] = micro_window(case, optimizer, steps)
        windows[f"floor@{form}"] = floor_window(case, steps)
        windows[f"sum@{form}"] = sum_window(case, steps)
    return windows


def state_bytes(case: Case, method: str) -> int:
    """Returns the bytes of all variables of a method's optimizer."""
    optimizer = compile_model(case, make_optimizer(method, case.k)).optimizer
    values = [variable.value for variable in optimizer.variables]
    return sum(v.dtype.size * v.shape.num_elements() for v in values)


def extra_state(case: Case) -> dict[str, int]:
    """Returns the bytes of the parameters, and what is kept beyond plain Adam's."""
    plain = state_bytes(case, "none")
    return {
        "parameters": 4 * make_model(case.workload).count_params(),
        "keras": state_bytes(case, "keras") - plain,
        "ours": state_bytes(case, "ours") - plain,
    }


def run_case(
    case: Case, forms: Sequence[str], rounds: int, turn_seconds: float
) -> tuple[dict[str, Timing], dict[str, int]]:
    """Measures one case; called in a process of its own."""
    windows = make_windows(case, forms)
    timings = measure(windows, rounds=rounds, turn_seconds=turn_seconds)
    return timings, extra_state(case)


METHODS = ("floor", "sum", "ours", "keras", "none")
VERSUS = ("sum", "keras", "none")
HEADER = ["model", "XLA", "k", "form", *METHODS, "large", "ours/floor@1", "(wall)"]
HEADER += [f"ours/{versus}" for versus in VERSUS]


def table_row(case: Case, form: str, timings: dict[str, Timing]) -> list[str]:
    """Returns a row under `HEADER`: medians in ms with their spread, and ratios."""
    ours, floor = f"ours@{form}", "floor@1" if "floor@1" in timings else f"floor@{form}"
    return [
        case.model,
        "on" if case.xla else "off",
        str(case.k),
        f"@{form}",
        *(show(timings[f"{method}@{form}"]) for method in METHODS),
        show(timings["large@1"]),
        f"{ratio(timings, ours, floor):.2f}",
        f"{wall_ratio(timings, ours, floor):.2f}",
        *(f"{ratio(timings, ours, f'{versus}@{form}'):.2f}" for versus in VERSUS),
    ]


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--models", nargs="+", choices=WORKLOADS, default=["mlp", "cnn", "transformer"])
    add("--k", nargs="+", type=int, default=[4, 8, 32])
    add("--xla", nargs="+", choices=["on", "off"], default=["on", "off"])
    add("--forms", nargs="+", choices=["1", "k"], default=["1", "k"])
    add("--rounds", type=int, default=25)
    add("--turn-seconds", type=float, default=0.1, help="least CPU time of a turn")
    add("--json", type=Path, help="write every figure of every round here")
    add("--quick", action="store_true", help="a smoke test: k=4 in 3 short rounds")
    add("--check", action="store_true", help="fail if a target is missed")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.k, arguments.rounds, arguments.turn_seconds = [4], 3, 0.05
    return arguments


def main() -> None:
    """Measures all cases, prints the tables and judges the targets."""
    arguments = parse_arguments()
    rows, misses = [], []
    states: dict[str, list[str]] = {}
    records: list[dict[str, object]] = []
    for model, xla, k in itertools.product(arguments.models, arguments.xla, arguments.k):
        case = Case(model, xla == "on", k)
        timings, state = in_own_process(
            run_case, case, arguments.forms, arguments.rounds, arguments.turn_seconds
        )
        rows += [table_row(case, form, timings) for form in arguments.forms]
        misses += find_misses(case, TARGETS, timings)
        states[model] = [model, *(f"{size:,}" for size in state.values())]
        seconds = {name: dataclasses.asdict(t) for name, t in timings.items()}
        records.append(
            {**dataclasses.asdict(case), "state_bytes": state, "seconds": seconds}
        )
        print(f"measured {case}", file=sys.stderr)
        if arguments.json:
            write_json(arguments.json, records)
    print("CPU time of a window, ms: median ± half the distance of the quartiles\n")
    print(format_table(HEADER, rows))
    print("\nBytes of the parameters, and of state beyond the inner optimizer's\n")
    print(format_table(["model", "parameters", "keras", "ours"], list(states.values())))
    if arguments.check and misses:
        sys.exit("\n".join(["targets missed:", *misses]))


if __name__ == "__main__":
    main()
