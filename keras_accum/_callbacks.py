"""`AccumulationMonitor`: what accumulation does in `fit`, said and logged.

It also decides what becomes of a window that an epoch, or the training, leaves open.
"""

import logging
import math
from typing import Any, Literal

import keras
import numpy as np

from ._backend.private.layers import flatten_layers
from ._core.checks import check_option
from ._optimizer.wrapper import GradientAccumulationOptimizer

TAILS = ("carry", "flush_epoch", "flush_end", "drop")

logger = logging.getLogger("keras_accum")


class AccumulationMonitor(keras.callbacks.Callback):
    """Logs the updates of `AccumOptimizer`, and closes windows that an epoch leaves open.

    ```python
    model.fit(x, y, batch_size=16, callbacks=[AccumulationMonitor(tail="flush_epoch")])
    ```

    At the start of training it writes one line to the logger `keras_accum`, at INFO:
    the effective batch, the updates per epoch, the memory of the accumulators. It warns
    of BatchNormalization, whose statistics see one micro-batch at a time, and of
    micro-batches that no update will use.

    After each batch and each epoch it adds to the logs, and so to `History`,
    TensorBoard and the progress bar:

    - `updates`: updates made since the optimizer was constructed;
    - `gradient_norm`: L2 norm of the last update's mean gradient, before clipping;
    - `loss_scale`: where the loss is scaled dynamically;
    - `skipped_windows`: windows skipped because of an overflow, an infinity or a NaN;
      where one can be skipped.

    Put it first in the list of callbacks, so that the others find these values, and the
    weights that a flush has updated. Reading the values waits for the step to finish.

    Args:
        tail: What to do with a window that is open at the end of an epoch:
            `"carry"` it into the next epoch; `"flush_epoch"`, update with it, before
            validation; `"flush_end"`, carry it, but update with it at the end of
            training; `"drop"` it. An update with a short window is divided by what the
            window really holds.

    Raises:
        ValueError: for another `tail`; and at the start of training, if the model was
            not compiled with an `AccumOptimizer`.
    """

    def __init__(
        self, tail: Literal["carry", "flush_epoch", "flush_end", "drop"] = "carry"
    ) -> None:
        super().__init__()
        check_option("tail", tail, TAILS)
        self.tail = tail
        self._before = self._left = 0
        self._in_epoch = False
        self._announced = False

    @property
    def optimizer(self) -> GradientAccumulationOptimizer:
        """The optimizer of the model that is trained."""
        return self.model.optimizer

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Refuse a model without accumulation, and warn of BatchNormalization."""
        if not isinstance(self.optimizer, GradientAccumulationOptimizer):
            raise ValueError(
                "AccumulationMonitor watches an AccumOptimizer. Received a model "
                f"compiled with {type(self.optimizer).__name__}: write `model.compile("
                "optimizer=AccumOptimizer(optimizer, accum_steps=...))`, or leave the "
                "callback out."
            )
        self._announced = False
        normalizing = [layer.name for layer in _batch_normalizations(self.model)]
        if normalizing:
            logger.warning(
                "BatchNormalization normalizes each micro-batch by itself, so that a "
                "window is not the large batch: %s. GroupNormalization and "
                "LayerNormalization have no such dependence.",
                ", ".join(normalizing),
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Note where the updates of this epoch begin."""
        # Between epochs only: an epoch that an error ends leaves its window open.
        self.optimizer.flushes_at_end = False
        self._before = self._closed_windows()
        self._left = 0
        self._in_epoch = True

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the values of the last update to the logs."""
        if not self._announced:
            # Only now is the size of a micro-batch known, and the optimizer built.
            self._announced = True
            self._announce(batches=batch + 1)
        _add(logs, self._values())

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Close the window before the validation that ends an epoch."""
        self._end_epoch()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Close the window, and add the values of the last update to the logs."""
        self._end_epoch()
        self.optimizer.flushes_at_end = self.tail == "flush_end"
        if self.tail == "flush_end" and epoch == self.params.get("epochs", 0) - 1:
            self.optimizer.flush()  # Here already, for the logs of the last epoch.
        if self._closed_windows() == self._before:
            logger.warning(
                "Epoch %d has made no update: it has fewer micro-batches than a window "
                "(%d held).",
                epoch + 1,
                self._left,
            )
        _add(logs, self._values())

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Close the window, or warn that it stays open."""
        self.optimizer.flushes_at_end = False
        if self.tail == "flush_end":
            self.optimizer.flush()  # For a loop that is not `fit`, which has flushed.
        left = _number(self.optimizer.micro_step)
        if left:
            logger.warning(
                "%d micro-batches are left over in an open window: no update has used "
                "them. The next `fit` goes on with them; `tail='flush_end'` updates "
                "with them.",
                left,
            )

    def _end_epoch(self) -> None:
        if not self._in_epoch:
            return
        self._in_epoch = False
        self._left = _number(self.optimizer.micro_step)
        if self.tail == "flush_epoch":
            self.optimizer.flush()
        elif self.tail == "drop" and self._left:
            self.optimizer.reset()
            logger.warning(
                "%d micro-batches at the end of the epoch dropped.", self._left
            )

    def _closed_windows(self) -> int:
        """Windows that have made an update, or were skipped, so far."""
        optimizer = self.optimizer
        return _number(optimizer.iterations) + _number(optimizer.skipped_windows)

    def _announce(self, batches: int) -> None:
        window, steps = self.optimizer.window_length, self.params.get("steps")
        replicas = self.model.distribute_strategy.num_replicas_in_sync
        rows = self._micro_batch_rows(batches, replicas)
        logger.info(
            "%s samples x %d accum_steps x %d replicas = effective batch %s; %s updates "
            "per epoch; accumulators: %.1f MiB",
            rows or "?",
            window,
            replicas,
            rows * window * replicas or "?",
            f"{self._updates(steps / window):g}" if steps else "?",
            self.optimizer.accumulator_bytes / 2**20,
        )

    def _updates(self, windows: float) -> float:
        """How many updates an epoch of so many windows makes."""
        whole = {"flush_epoch": math.ceil, "drop": math.floor}
        return whole[self.tail](windows) if self.tail in whole else windows

    def _micro_batch_rows(self, batches: int, replicas: int) -> int:
        """The samples of one micro-batch on one replica, by what the loss has seen."""
        for metric in self.model.metrics:
            if metric.name == "loss" and isinstance(metric, keras.metrics.Mean):
                return round(_number(metric.count) / batches / replicas)
        return 0

    def _values(self) -> dict[str, float]:
        optimizer = self.optimizer
        values = {
            "updates": _number(optimizer.iterations),
            "gradient_norm": _number(optimizer.last_gradient_norm),
        }
        if optimizer.scales_dynamically or optimizer.on_nonfinite.startswith("skip"):
            values["skipped_windows"] = _number(optimizer.skipped_windows)
        if optimizer.scales_dynamically:
            values["loss_scale"] = _number(optimizer.dynamic_scale)
        return values


def _add(logs: dict[str, Any] | None, values: dict[str, float]) -> None:
    if logs is not None:
        logs.update(values)


def _number(value: keras.Variable | int) -> Any:
    """The Python number that a scalar variable holds, under a strategy too."""
    return np.asarray(keras.ops.convert_to_numpy(value)).item()


def _batch_normalizations(model: keras.Model) -> list[keras.layers.Layer]:
    return [
        layer
        for layer in flatten_layers(model)
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
    ]
