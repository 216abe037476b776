"""Windows of k micro-batches to time: as `fit` runs them, and the floor beneath.

A window is a function that trains on k micro-batches once. The names that the benchmarks
give them end in how Python calls them: `@1`, a step at a time, or `@k`, k steps to a call
(`steps_per_execution=k`).

The floor is k forward and backward passes and one update, and nothing else: no metric,
no counter, no sum. A pass is a compiled function that returns all its gradients, so that
none can be pruned; the update, a second compiled function, takes the last ones. `floor@1`
dispatches the passes one by one; in `floor@k` one `tf.while_loop` fetches and runs them.
Its iterations follow one another, as those of `fit` do; side by side they would hold the
activations of several micro-batches at once, which accumulation is there to avoid.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from common import WORKLOADS, Workload, endless_batches, make_model
from timing import Timing

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
        applies: says for which case.
    """

    method: str
    versus: str
    limit: float
    applies: Callable[[Case], bool]


def compile_model(
    case: Case,
    optimizer: keras.optimizers.Optimizer,
    steps: int = 1,
    prepare: Callable[[keras.Model], object] | None = None,
) -> keras.Model:
    """Returns a compiled model, `prepare`d before, whose optimizer is built."""
    model = make_model(case.workload)
    if prepare is not None:
        prepare(model)
    model.compile(
        optimizer,
        case.workload.loss,
        jit_compile=case.xla,
        steps_per_execution=steps,
    )
    optimizer.build(model.trainable_variables)
    return model


def fit_window(model: keras.Model, case: Case, rows: int) -> Window:
    """Returns a window as `fit` runs it, on batches of `rows` samples."""
    batches = iter(endless_batches(case.workload, rows))
    model.make_train_function()
    calls = case.k * case.workload.micro_batch // rows // model.steps_per_execution

    def window() -> None:
        for _ in range(calls):
            model.train_function(batches)

    return window


def micro_window(case: Case, optimizer: keras.optimizers.Optimizer, steps: int) -> Window:
    """Returns a window of `fit` steps on micro-batches, `steps` of them to a call."""
    model = compile_model(case, optimizer, steps)
    return fit_window(model, case, case.workload.micro_batch)


def large_window(
    case: Case, prepare: Callable[[keras.Model], object] | None = None
) -> Window:
    """Returns a window of a single `fit` step on all its rows."""
    model = compile_model(case, keras.optimizers.Adam(), prepare=prepare)
    return fit_window(model, case, case.k * case.workload.micro_batch)


def passes_of(model: keras.Model) -> Callable[[tf.Tensor, tf.Tensor], list[Any]]:
    """Returns a function that makes the gradients of a micro-batch."""

    def gradients(x: tf.Tensor, y: tf.Tensor) -> list[Any]:
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True))
        return tape.gradient(loss, model.trainable_variables)

    return gradients


def floor_window(case: Case, steps: int) -> Window:
    """Returns k passes and one update, in the form that `steps` chooses."""
    model = compile_model(case, keras.optimizers.Adam())
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
        # The loop carries the gradients of the last pass: each pass has to make them.
        grads = gradients(*next(iterator))
        _, grads = tf.while_loop(
            lambda i, _: i < case.k,
            lambda i, _: (i + 1, gradients(*next(iterator))),
            (1, grads),
            parallel_iterations=1,
        )
        update(grads)

    return dispatched if steps == 1 else lambda: in_graph(batches)


def bare_window(case: Case) -> Window:
    """Returns the least that a step over k micro-batches does: a loop that sums, no more.

    The batch is known to divide, all samples weigh alike, and no loss is logged.
    """
    model = compile_model(case, keras.optimizers.Adam())
    rows = case.workload.micro_batch
    batches = iter(endless_batches(case.workload, case.k * rows))
    gradients, variables = passes_of(model), model.trainable_variables

    @tf.function(jit_compile=case.xla)
    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        def body(i: tf.Tensor, sums: list[tf.Tensor]) -> tuple[tf.Tensor, list[Any]]:
            part = [
                tf.slice(t, [i * rows] + [0] * (t.shape.rank - 1), [rows, *t.shape[1:]])
                for t in (x, y)
            ]
            found = [tf.convert_to_tensor(g) for g in gradients(*part)]
            return i + 1, [s + g for s, g in zip(sums, found, strict=True)]

        start = (0, [tf.zeros(v.shape) for v in variables])
        _, sums = tf.while_loop(
            lambda i, _: i < case.k, body, start, parallel_iterations=1
        )
        model.optimizer.apply([s / case.k for s in sums], variables)

    return lambda: step(*next(batches))


def ratio(timings: dict[str, Timing], method: str, versus: str) -> float:
    """Returns the ratio of two medians of CPU time."""
    return timings[method].median / timings[versus].median


def wall_ratio(timings: dict[str, Timing], method: str, versus: str) -> float:
    """Returns the ratio of two medians of wall time."""
    return timings[method].wall_median / timings[versus].wall_median


def find_misses(
    case: Case, targets: Sequence[Target], timings: dict[str, Timing]
) -> list[str]:
    """Returns a line for each target that the case misses."""
    misses = []
    for target in targets:
        names = target.method, target.versus
        if not target.applies(case) or not set(names) <= set(timings):
            continue
        if (value := ratio(timings, *names)) > target.limit:
            misses.append(
                f"{case}: {target.method} / {target.versus} = {value:.3f}, more than "
                f"{target.limit:.2f}"
            )
    return misses


def show(timing: Timing) -> str:
    """Returns a median in ms and its spread."""
    return f"{1e3 * timing.median:.1f} ±{100 * timing.spread:.0f}%"
