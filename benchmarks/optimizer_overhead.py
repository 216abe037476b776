"""What accumulation in the optimizer costs: CPU time and state, against its bounds.

A window is k micro-batches and the update that they make together. Four methods train,
through the function that `model.fit` calls, on an endless iterator without callbacks:

- `ours`: `keras_accum.AccumOptimizer(inner, accum_steps=k)`
- `keras`: the inner optimizer with `gradient_accumulation_steps=k`
- `none`: no accumulation, k updates
- `large`: one step on a batch of k times the rows

Two are bounds, and do nothing else than their line says: no metric, no counter.

- `floor`: k forward and backward passes and one update. A pass is a compiled function
  that returns all its gradients, so that none can be pruned; the update, a second
  compiled function, takes the last ones. Nothing is summed.
- `sum`: the same, but a pass adds its gradients in place to variables, which the update
  takes and clears. What any method pays that keeps a sum.

The bounds come in both forms in which `fit` calls its steps, and each is compared with
methods of its own form only: with `steps_per_execution=1` Python fetches every
micro-batch and calls the pass on it; with `steps_per_execution=k` one `tf.while_loop`
does both, around the same compiled pass. Its iterations follow one another, as those of
`fit` do; side by side they would hold the activations of several micro-batches at once,
which accumulation is there to avoid.

    PYTHONPATH=. python benchmarks/optimizer_overhead.py --check --json overhead.json
"""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from common import (
    WORKLOADS,
    Timing,
    Workload,
    endless_batches,
    format_table,
    in_own_process,
    make_model,
    measure,
    write_json,
)

import keras_accum

Window = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Case:
    """One combination to measure: all methods of a case share a process."""

    model: str
    xla: bool
    k: int

    @property
    def workload(self) -> Workload:
        """The model and data of this case."""
        return WORKLOADS[self.model]

    def __str__(self) -> str:
        return f"{self.model} xla={'on' if self.xla else 'off'} k={self.k}"


@dataclasses.dataclass(frozen=True)
class Target:
    """A bound on the ratio of two methods' medians of CPU time.

    Attributes:
        method, versus: the two methods.
        limit: the largest ratio that passes.
        applies: says for which case, and for which steps per execution.
    """

    method: str
    versus: str
    limit: float
    applies: Callable[[Case, int], bool]


def is_wide(case: Case, steps: int) -> bool:
    """Says whether memory traffic rules: the MLP under XLA, k micro-batches a call."""
    return case.model == "mlp" and case.xla and case.k == 8 and steps == case.k


def is_narrow(case: Case, steps: int) -> bool:
    """Says whether arithmetic rules: another model, k micro-batches a call."""
    return case.model != "mlp" and steps == case.k


TARGETS = [
    Target("ours", "floor", 1.05, is_wide),
    Target("ours", "keras", 0.52, is_wide),
    Target("ours", "none", 0.85, is_wide),
    Target("ours", "floor", 1.10, is_narrow),
    Target("ours", "none", 1.03, lambda case, steps: True),
]


def make_optimizer(method: str, k: int) -> keras.optimizers.Optimizer:
    """Returns Adam as `method` wants it."""
    if method == "ours":
        return keras_accum.AccumOptimizer(keras.optimizers.Adam(), accum_steps=k)
    if method == "keras":
        return keras.optimizers.Adam(gradient_accumulation_steps=k)
    return keras.optimizers.Adam()


def compile_model(
    case: Case, optimizer: keras.optimizers.Optimizer, steps: int
) -> keras.Model:
    """Returns a compiled model whose optimizer is built."""
    model = make_model(case.workload)
    model.compile(
        optimizer,
        case.workload.loss,
        jit_compile=case.xla,
        steps_per_execution=steps,
    )
    optimizer.build(model.trainable_variables)
    return model


def fit_window(case: Case, method: str, steps: int) -> Window:
    """Returns a window as `fit` runs it, `steps` micro-batches to a call."""
    model = compile_model(case, make_optimizer(method, case.k), steps)
    batches = iter(endless_batches(case.workload, case.workload.micro_batch))
    model.make_train_function()

    def window() -> None:
        for _ in range(case.k // steps):
            model.train_function(batches)

    return window


def large_window(case: Case) -> Window:
    """Returns a window of a single step on all its rows."""
    model = compile_model(case, make_optimizer("large", case.k), 1)
    rows = case.k * case.workload.micro_batch
    batches = iter(endless_batches(case.workload, rows))
    model.make_train_function()
    return lambda: model.train_function(batches)


def passes_of(model: keras.Model) -> Callable[[tf.Tensor, tf.Tensor], list[Any]]:
    """Returns a function that makes the gradients of a micro-batch."""

    def gradients(x: tf.Tensor, y: tf.Tensor) -> list[Any]:
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True))
        return tape.gradient(loss, model.trainable_variables)

    return gradients


def floor_window(case: Case, steps: int) -> Window:
    """Returns k passes and one update; `steps` chooses the form (see the file's head).

    The loop carries the gradients of the last pass, so each pass has to make them.
    """
    model = compile_model(case, make_optimizer("floor", case.k), steps)
    batches = iter(endless_batches(case.workload, case.workload.micro_batch))
    gradients = tf.function(passes_of(model), jit_compile=case.xla)

    @tf.function(jit_compile=case.xla)
    def update(grads: list[Any]) -> None:
        model.optimizer.apply(grads, model.trainable_variables)

    def dispatched() -> None:
        for _ in range(case.k):
            grads = gradients(*next(batches))
        update(grads)

    @tf.function
    def in_graph(iterator: tf.data.Iterator) -> None:
        grads = gradients(*next(iterator))
        _, grads = tf.while_loop(
            lambda i, _: i < case.k,
            lambda i, _: (i + 1, gradients(*next(iterator))),
            (1, grads),
            parallel_iterations=1,
        )
        update(grads)

    return dispatched if steps == 1 else lambda: in_graph(batches)


def sum_window(case: Case, steps: int) -> Window:
    """Returns k passes that add their gradients up, and one update with the mean."""
    model = compile_model(case, make_optimizer("sum", case.k), steps)
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


def make_windows(case: Case, steps_list: Sequence[int]) -> dict[str, Window]:
    """Returns the methods of a case by the name `method@steps`."""
    windows = {"large@1": large_window(case)}
    for steps in steps_list:
        for method in ("ours", "keras", "none"):
            windows[f"{method}@{steps}"] = fit_window(case, method, steps)
        windows[f"floor@{steps}"] = floor_window(case, steps)
        windows[f"sum@{steps}"] = sum_window(case, steps)
    return windows


def state_bytes(case: Case, method: str) -> int:
    """Returns the bytes of all variables of a method's optimizer."""
    optimizer = compile_model(case, make_optimizer(method, case.k), 1).optimizer
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
    case: Case, steps_list: Sequence[int], rounds: int, turn_seconds: float
) -> tuple[dict[str, Timing], dict[str, int]]:
    """Measures one case; called in a process of its own."""
    windows = make_windows(case, steps_list)
    timings = measure(windows, rounds=rounds, turn_seconds=turn_seconds)
    return timings, extra_state(case)


def ratio(timings: dict[str, Timing], method: str, versus: str, steps: int) -> float:
    """Returns the ratio of two medians at the same steps per execution."""
    return timings[f"{method}@{steps}"].median / timings[f"{versus}@{steps}"].median


def find_misses(
    case: Case, steps_list: Sequence[int], timings: dict[str, Timing]
) -> list[str]:
    """Returns a line for each target that the case misses."""
    misses = []
    for steps, target in itertools.product(steps_list, TARGETS):
        if target.applies(case, steps):
            value = ratio(timings, target.method, target.versus, steps)
            if value > target.limit:
                misses.append(
                    f"{case} steps_per_execution={steps}: {target.method} / "
                    f"{target.versus} = {value:.3f}, more than {target.limit:.2f}"
                )
    return misses


METHODS = ("floor", "sum", "ours", "keras", "none")
VERSUS = ("floor", "sum", "keras", "none")
HEADER = ["model", "XLA", "k", "steps", *METHODS, "large"]
HEADER += [f"ours/{versus}" for versus in VERSUS]


def table_row(case: Case, steps: int, timings: dict[str, Timing]) -> list[str]:
    """Returns a row under `HEADER`: medians in ms with their spread, and ratios."""
    names = [*(f"{method}@{steps}" for method in METHODS), "large@1"]
    shown = [timings[name] for name in names]
    return [
        case.model,
        "on" if case.xla else "off",
        str(case.k),
        str(steps),
        *(f"{1e3 * t.median:.1f} ±{100 * t.spread:.0f}%" for t in shown),
        *(f"{ratio(timings, 'ours', versus, steps):.2f}" for versus in VERSUS),
    ]


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--models", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    add("--k", nargs="+", type=int, default=[4, 8, 32])
    add("--xla", nargs="+", choices=["on", "off"], default=["on", "off"])
    add("--steps-per-execution", nargs="+", choices=["1", "k"], default=["1", "k"])
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
        steps_list = [k if s == "k" else 1 for s in arguments.steps_per_execution]
        timings, state = in_own_process(
            run_case, case, steps_list, arguments.rounds, arguments.turn_seconds
        )
        rows += [table_row(case, steps, timings) for steps in steps_list]
        misses += find_misses(case, steps_list, timings)
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
