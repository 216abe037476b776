"""Running out of memory in a training step: halve the micro-batch, and try again.

A step is taken in two compiled functions: one computes the gradients of the batch, the
other updates the weights. Only the first is tried again, and only the first depends on
the micro-batch; so an update is never made twice. What it may have moved before it
failed (seeds, moving statistics, metrics) is put back, so that the second attempt draws
the same numbers as the first would have.
"""

import dataclasses
import functools
import logging
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from .._backend.private.data import without_optional
from .._backend.private.models import build_for, state_of_layers
from .._core.loop import compiles_loop, rows_of
from .settings import Settings
from .train_step import compute_gradients, update

# After so many steps without a failure, the size before is tried once more.
PATIENCE = 100

_MEMORY = re.compile(r"\bOOM\b|out of memory|\bto allocate\b", re.IGNORECASE)

logger = logging.getLogger("keras_accum")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out. Other things run out too: files, queues, quotas."""
    if not isinstance(error, tf.errors.ResourceExhaustedError):
        return False
    # TensorFlow adds a hint about memory to anything that is exhausted.
    return bool(_MEMORY.search(str(error).partition("\nHint:")[0]))


@dataclasses.dataclass
class _Size:
    """The current micro-batch size, and the state of trying a larger one again.

    Attributes:
        settings: how batches are taken apart now.
        before: the settings that ran out of memory and are to be tried again; None if
            there are none, or they have been tried already.
        steps: steps in a row without a failure.
        tried: whether growing back has been tried.
    """

    settings: Settings
    before: Settings | None = None
    steps: int = 0
    tried: bool = False

    def halve(self, rows: int) -> bool:
        """Take half the size for batches of `rows`; whether that was possible."""
        size = self.settings.micro_batch_size
        if size is None:
            size = math.ceil(rows / (self.settings.accum_steps or 1))
        size = min(size, rows)
        if size < 2:
            return False
        if not self.tried and self.before is None:
            self.before = self.settings
        self.settings = self.settings.in_micro_batches_of(size // 2)
        self.steps = 0
        return True

    def next(self) -> Settings:
        """The settings for the next step: after enough steps, those before, once."""
        if self.before is not None and self.steps >= PATIENCE:
            logger.info("Trying %s again.", _describe(self.before))
            self.settings, self.before, self.tried = self.before, None, True
            self.steps = 0
        self.steps += 1
        return self.settings


class RetryingStep:
    """A train function of Keras's that survives running out of memory.

    Called with an iterator of batches, it takes `steps_per_execution` of them and returns
    the metrics. A batch that fails is kept, and taken apart into smaller micro-batches.

    Args:
        model: a compiled model.
        settings: how to take a batch apart at first.
    """

    def __init__(self, model: keras.Model, settings: Settings) -> None:
        if model.distribute_strategy.num_replicas_in_sync > 1:
            raise ValueError(
                "`on_oom='halve'` was asked for on several replicas. One of them would "
                "run out of memory and start anew while the others wait for it. Plan the "
                "size before instead, with `plan`, or pass `on_oom='raise'`."
            )
        self._model = model
        self._size = _Size(settings)
        self._functions: dict[Settings, Callable[[Any], Any]] = {}
        self._apply = _compiled(
            model, functools.partial(update, model), model.jit_compile
        )

    @property
    def micro_batch_size(self) -> int | None:
        """The size in use, if it is given as one."""
        return self._size.settings.micro_batch_size

    def __call__(self, iterator: Iterator[Any]) -> dict[str, Any]:
        """Train on the next batches; raises what `iterator` does at its end."""
        logs: dict[str, Any] = {}
        for done in range(self._model.steps_per_execution):
            try:
                data = tf.nest.map_structure(without_optional, next(iterator))
            except (StopIteration, tf.errors.OutOfRangeError):
                if not done:
                    raise
                break
            logs = self._step(data)
        return logs

    def _step(self, data: Any) -> dict[str, Any]:
        build_for(self._model, data)
        state = [(v, tf.identity(v.value)) for v in state_of_layers(self._model)]
        settings = self._size.next()
        while True:
            try:
                window, logs = self._gradients(settings)(data)
                break
            except tf.errors.ResourceExhaustedError as error:
                rows = int(rows_of(keras.utils.unpack_x_y_sample_weight(data)))
                if not is_out_of_memory(error) or not self._size.halve(rows):
                    raise
                logger.warning(
                    "Out of memory with %s. The same batch is tried with %s.",
                    _describe(settings),
                    _describe(self._size.settings),
                )
            settings = self._size.settings
            for variable, value in state:
                variable.assign(value)
        self._apply(window)
        return logs

    def _gradients(self, settings: Settings) -> Callable[[Any], Any]:
        if settings not in self._functions:

            def gradients(data: Any) -> Any:
                window = compute_gradients(self._model, data, settings)
                return window, self._model.get_metrics_result()

            jit_compile = compiles_loop(self._model)
            self._functions[settings] = _compiled(self._model, gradients, jit_compile)
        return self._functions[settings]


def _compiled(
    model: keras.Model, function: Callable[[Any], Any], jit_compile: bool
) -> Callable[[Any], Any]:
    if model.run_eagerly:
        return function
    return tf.function(
        function, jit_compile=jit_compile, reduce_retracing=True, autograph=False
    )


def _describe(settings: Settings) -> str:
    if settings.micro_batch_size is not None:
        return f"micro-batches of {settings.micro_batch_size}"
    return f"{settings.accum_steps} micro-batches"
