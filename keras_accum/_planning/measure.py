"""How much memory a training step needs, and how long it takes: measured, not modelled.

Under XLA the compiler tells the memory, by its own assignment of buffers, without a run.
Elsewhere the step runs, and the allocator of the device tells its peak. Both count what
is there for the time of the step; variables and batch are added by their sizes.
"""

import dataclasses
import functools
import gc
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from .._backend.private.compiled import compiled_bytes
from .._backend.private.models import build_for
from .._core.loop import compiles_loop, rows_of, take
from .._step.model import accumulate
from .._step.retry import is_out_of_memory
from .budget import device
from .search import Trial
from .transaction import variables

# The first step tunes and warms up. After it, at least so many are run, and not more once
# they have taken so many seconds. In a graph the order of operations is not the same each
# time, and neither is the peak: the largest counts.
LEAST_STEPS, MOST_STEPS, SECONDS = 2, 5, 1.0


@dataclasses.dataclass(frozen=True)
class BaselineMemory:
    """Bytes that are there before a step and after it.

    Attributes:
        parameters: the weights of the model, and its other state.
        optimizer: the variables of the optimizer: slots, averages, accumulators.
        batch: the samples of one update, on one replica.
    """

    parameters: int
    optimizer: int
    batch: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.optimizer + self.batch


class StepProfiler:
    """Measures the training step of a model for micro-batches of any size.

    Changes the model: to be used inside of `preserving_state`.

    Args:
        model: built and compiled.
        batch: what `train_step` takes, as tensors: the samples of one replica.
        recompute: switches recomputation on as its argument says, and gives a function
            that switches it off.
    """

    def __init__(
        self,
        model: keras.Model,
        batch: Any,
        recompute: Callable[[keras.Model, Any], Callable[[], None]],
    ) -> None:
        build_for(model, batch)
        self.model = model
        self.batch = batch
        self.held = held(model, batch)
        self._switch_on = recompute
        self._compiled: dict[Any, Any] = {}

    @property
    def method(self) -> str:
        """How memory is measured here, in words."""
        return "XLA's buffer assignment" if self.compiles else f"allocator of {device()}"

    @property
    def gradient_sum_bytes(self) -> int:
        """The bytes of the sums of gradients, of float32 at least."""
        trained = self.model.trainable_variables
        return sum(
            int(np.prod(v.shape)) * max(tf.as_dtype(v.dtype).size, 4) for v in trained
        )

    @property
    def compiles(self) -> bool:
        """Whether the compiler tells the memory."""
        return compiles_loop(self.model) and not self.model.run_eagerly

    def measure(self, size: int, recompute: Any, timed: bool) -> Trial:
        """Measure one micro-batch size, and time its step if asked to.

        Where the step has to run and is not timed, it gets two micro-batches only: what
        comes after them needs no more memory.

        Raises:
            ValueError: if the device does not tell what is in use.
        """
        try:
            if self.compiles:
                peak, seconds = self._compile(size, recompute, timed)
            else:
                peak, seconds = self._run(size, recompute, timed)
        except tf.errors.ResourceExhaustedError as error:
            if not is_out_of_memory(error):
                raise
            return Trial(size, recompute, None)
        finally:
            gc.collect()
        return Trial(size, recompute, peak + self.held.total, seconds=seconds)

    def _compile(
        self, size: int, recompute: Any, timed: bool
    ) -> tuple[int, float | None]:
        key = (size, recompute)
        if key not in self._compiled:
            step = self._step(size, recompute, self.batch)
            self._compiled[key] = step, compiled_bytes(step, self.batch)
        step, peak = self._compiled[key]
        return peak, run(step, self.batch, count=False)[1] if timed else None

    def _run(self, size: int, recompute: Any, timed: bool) -> tuple[int, float | None]:
        batch = self.batch if timed else _first(self.batch, 2 * size)
        # Before the trace: constants of a graph are in memory from then on.
        level = _memory_info()["current"]
        step = self._step(size, recompute, batch)
        peak, seconds = run(step, batch, count=True)
        return peak - level, seconds if timed else None

    def _step(self, size: int, recompute: Any, batch: Any) -> Any:
        """The step, traced for a batch with recomputation on."""
        undo = self._switch_on(self.model, recompute) if recompute else None
        try:
            accumulate(self.model, micro_batch_size=size)
            step = compiled_step(self.model)
            if not self.model.run_eagerly:
                step.get_concrete_function(batch)
            return step
        finally:
            if undo is not None:
                undo()


def held(model: keras.Model, batch: Any) -> BaselineMemory:
    """The bytes of a model's variables and of a batch."""
    everything = {id(v): v for v in variables(model)}
    own = {id(v): v for v in model.variables}
    parameters = sum(_bytes(v) for v in own.values())
    rest = sum(_bytes(v) for key, v in everything.items() if key not in own)
    leaves = tf.nest.flatten(batch, expand_composites=True)
    samples = sum(_bytes(leaf) for leaf in leaves if leaf is not None)
    return BaselineMemory(parameters, rest, samples)


def _bytes(value: Any) -> int:
    return int(np.prod(value.shape)) * tf.as_dtype(value.dtype).size


def compiled_step(model: keras.Model) -> Any:
    """The training step as `fit` runs it: eagerly, in a graph, or compiled by XLA."""
    strategy, train_step = model.distribute_strategy, model.train_step

    def step(data: Any) -> Any:
        return strategy.run(train_step, args=(data,))

    if model.run_eagerly:
        return step
    return tf.function(
        step, jit_compile=compiles_loop(model), reduce_retracing=True, autograph=False
    )


def run(step: Any, batch: Any, count: bool) -> tuple[int, float]:
    """The most bytes in use during a step, if they are to be counted; and its seconds."""
    if hasattr(step, "get_concrete_function"):
        step = step.get_concrete_function(batch)
    _wait_for(step(batch))
    peaks: list[int] = []
    seconds: list[float] = []
    while len(seconds) < LEAST_STEPS or (
        len(seconds) < MOST_STEPS and sum(seconds) < SECONDS
    ):
        if count:
            tf.config.experimental.reset_memory_stats(device())
        start = time.perf_counter()
        _wait_for(step(batch))
        seconds.append(time.perf_counter() - start)
        peaks.append(_memory_info()["peak"] if count else 0)
    return max(peaks), min(seconds)


def _first(batch: Any, rows: int) -> Any:
    return take(batch, 0, min(rows, int(rows_of(batch))))


@functools.cache
def _hint() -> str:
    return (
        f"{device()} does not tell how much of its memory is in use, so that nothing can "
        "be measured. On a CPU it does with TF_ENABLE_ONEDNN_OPTS=1 or "
        "TF_CPU_ALLOCATOR_USE_BFC=1 in the environment, set before TensorFlow is "
        "imported; or compile the model with `jit_compile=True`."
    )


def _memory_info() -> dict[str, int]:
    try:
        return tf.config.experimental.get_memory_info(device())
    except ValueError as error:
        raise ValueError(_hint()) from error


def _wait_for(logs: Any) -> None:
    for value in tf.nest.flatten(logs):
        np.asarray(value)
