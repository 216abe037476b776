"""How much memory a training step needs, and how long it takes: measured, not modelled.

Under XLA the compiler tells the memory, by its own assignment of buffers, without a run.
Elsewhere the step runs, and its peak is measured. Both count what the step adds;
variables and the batch are added by their sizes.
"""

import contextlib
import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from .._backend.identity import unique
from .._backend.private.compiled import compiled_bytes
from .._backend.private.models import build_for
from .._backend.sizes import bytes_of
from .._core.gradients import sum_dtype
from .._core.loop import compiles_loop, rows_of, take
from .._optimizer.wrapper import AccumOptimizer
from .._step.model import settings_of, trained_by
from .._step.retry import is_out_of_memory
from .._step.settings import Settings
from .memory import ALLOCATOR_FLOOR, PeakMemory
from .search import Trial
from .transaction import variables

# After a first step, which tunes and warms up, at least LEAST_STEPS are measured. More
# follow, up to MOST_STEPS, until they have taken SECONDS; and further ones, up to
# MOST_SHORT_STEPS, until they have taken SHORT_SECONDS: a short step is timed worse.
LEAST_STEPS, MOST_STEPS, SECONDS = 2, 5, 1.0
MOST_SHORT_STEPS, SHORT_SECONDS = 25, 0.05


@dataclasses.dataclass(frozen=True)
class BaselineMemory:
    """Bytes that are in use before a step and after it, on one device.

    Attributes:
        parameters: the weights of the model, and its other state.
        optimizer: the variables of the optimizer: slots, averages, accumulators.
        batch: the samples of one step.
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

    Trains the model: use it inside of `preserving_state`, in the scope of the model's
    strategy.

    Args:
        model: built and compiled.
        batch: what `train_step` takes, as tensors: the samples of one replica.
        recompute: switches recomputation on as its argument says, and returns a function
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
        self._settings = settings_of(model) or Settings(accum_steps=1)
        self._steps: dict[Any, Any] = {}

    @functools.cached_property
    def memory(self) -> PeakMemory:
        """What measures the memory of a step that runs."""
        return PeakMemory(self.model.distribute_strategy.num_replicas_in_sync)

    @property
    def method(self) -> str:
        """How memory is measured here, in words."""
        return "XLA's buffer assignment" if self.compiles else self.memory.method

    @property
    def floor(self) -> int:
        """The least bytes of a step that are told from none."""
        return ALLOCATOR_FLOOR if self.compiles else self.memory.floor

    @property
    def gradient_sum_bytes(self) -> int:
        """The bytes of the sums of gradients, of float32 at least."""
        trained = self.model.trainable_variables
        return sum(bytes_of(v, sum_dtype(v, None)) for v in trained)

    @property
    def compiles(self) -> bool:
        """Whether the compiler tells the memory."""
        return compiles_loop(self.model) and not self.model.run_eagerly

    def measure(self, size: int, recompute: Any, timed: bool) -> Trial:
        """Measure one micro-batch size, and time its step if asked to.

        Where the step has to run and is not timed, it gets two micro-batches only: more
        need no more memory, and one would need no sums of gradients.

        Args:
            size: int, the samples of a micro-batch.
            recompute: what to recompute; False for nothing.
            timed: bool.

        Raises:
            ValueError: if nothing tells how much memory is in use.
        """
        try:
            with self.configured(size, recompute):
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

    @contextlib.contextmanager
    def configured(self, size: int, recompute: Any) -> Iterator[None]:
        """Have the model train on micro-batches of `size`, with `recompute` on."""
        undo = self._switch_on(self.model, recompute) if recompute else None
        try:
            with trained_by(self.model, self._settings.in_micro_batches_of(size)):
                yield
        finally:
            if undo is not None:
                undo()

    def _compile(
        self, size: int, recompute: Any, timed: bool
    ) -> tuple[int, float | None]:
        key = (size, recompute)
        if key not in self._steps:
            step = compiled_step(self.model)
            self._steps[key] = step, compiled_bytes(step, self.batch)
        step, peak = self._steps[key]
        return peak, self._time(step, self.batch) if timed else None

    def _run(self, size: int, recompute: Any, timed: bool) -> tuple[int, float | None]:
        rows = int(rows_of(self.batch))
        if not timed:
            rows = min(rows, 2 * size)
        batch = take(self.batch, 0, rows)
        # Before the trace: constants of a graph are in memory from then on.
        self.memory.set_level()
        step = self.step(size, recompute, batch)
        peak = self._peak(step, batch)
        return peak, self._time(step, batch) if timed else None

    def step(self, size: int, recompute: Any, batch: Any) -> Any:
        """The step, traced for `batch`; to be called where it is `configured`."""
        key = (size, recompute, int(rows_of(batch)))
        if key not in self._steps:
            step = compiled_step(self.model)
            if not self.model.run_eagerly:
                step = step.get_concrete_function(batch)
            self._steps[key] = step
        return self._steps[key]

    def _peak(self, step: Any, batch: Any) -> int:
        """The most bytes that a step needs.

        In a graph the order of operations is not the same each time, and neither is the
        peak: the largest counts.
        """
        self._call(step, batch)
        peaks: list[int] = []
        start = time.perf_counter()
        while _more(len(peaks), MOST_STEPS, time.perf_counter() - start):
            self.memory.start()
            self._call(step, batch)
            peaks.append(self.memory.peak())
        return max(peaks)

    def _time(self, step: Any, batch: Any) -> float:
        """The seconds of the fastest of several steps."""
        self._call(step, batch)
        seconds: list[float] = []
        while _more(len(seconds), MOST_STEPS, sum(seconds)) or (
            len(seconds) < MOST_SHORT_STEPS and sum(seconds) < SHORT_SECONDS
        ):
            start = time.perf_counter()
            self._call(step, batch)
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    def _call(self, step: Any, batch: Any) -> None:
        """Take one step to its end, and with it the window of an `AccumOptimizer`."""
        if isinstance(self.model.optimizer, AccumOptimizer):
            self.model.optimizer._accumulator.end_with_next()
        strategy = self.model.distribute_strategy
        for value in tf.nest.flatten(step(batch)):
            for part in strategy.experimental_local_results(value):
                np.asarray(part)


def _more(done: int, most: int, seconds: float) -> bool:
    return done < LEAST_STEPS or (done < most and seconds < SECONDS)


def held(model: keras.Model, batch: Any) -> BaselineMemory:
    """The bytes of a model's variables and of a batch."""
    own = unique(model.variables)
    parameters = sum(map(bytes_of, own))
    rest = sum(map(bytes_of, variables(model))) - parameters
    leaves = tf.nest.flatten(batch, expand_composites=True)
    samples = sum(bytes_of(leaf) for leaf in leaves if leaf is not None)
    return BaselineMemory(parameters, rest, samples)


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
