"""What is seen of the micro-batches of a step, for who wants to know: the monitor."""

import weakref
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from .._backend import replica
from .._core.accumulate import BatchGradients
from .._core.gradients import all_finite, global_norm
from .._core.layer_watch import LayerWatch
from .._core.observed import Observer
from .._optimizer.observer import (
    Seen,
    UpdateLog,
    looks_at_each,
    norm_after_clipping,
    to_reduce,
)

# Of models that step by themselves; a step that is traced before does not know of it.
_observers: "weakref.WeakKeyDictionary[keras.Model, StepObserver]"
_observers = weakref.WeakKeyDictionary()


class StepObserver(Observer):
    """Sees the micro-batches of each step, and notes the update that they make.

    Args:
        layers: as for `Observer`.
    """

    def __init__(self, layers: LayerWatch | None = None) -> None:
        super().__init__(layers)
        self.log = UpdateLog()

    def to_reduce(self, found: BatchGradients) -> Seen:
        """What is to be summed over replicas, with the gradients."""
        assert found.observed is not None  # `value_and_gradients` had this observer.
        return to_reduce(found.observed, tf.cast(found.share, "float32"))

    def end(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: Sequence[tf.Tensor | None],
        variables: Sequence[keras.Variable],
        reduced: Seen,
    ) -> None:
        """Note the update that is about to be made.

        Args:
            optimizer: a plain one.
            gradients: summed over replicas, scaled as the optimizer takes them.
            variables: theirs.
            reduced: what `to_reduce` gave, summed.
        """
        self.log.build(len(variables))
        given = [i for i, g in enumerate(gradients) if g is not None]
        factor = 1.0 / _scale_of(optimizer)
        means = [g * tf.cast(factor, g.dtype) for g in gradients if g is not None]
        dense = [g for i, g in zip(given, means) if i in self.dense]
        inner, usable = optimizer, tf.constant(True)
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            inner, usable = optimizer.inner_optimizer, all_finite(means)
            self.log.note_infinity(~usable, reduced)
        norm, own = global_norm(means), [variables[i] for i in given]
        self.log.note(
            usable,
            norm=norm,
            clipped_norm=norm_after_clipping(inner, means, own, norm),
            squares=reduced.squares * tf.square(factor),
            part=reduced.part,
            count=reduced.count,
            large=tf.square(norm if len(dense) == len(means) else global_norm(dense)),
            steps=tf.ones(()),
        )


def observe(model: keras.Model, layers: LayerWatch | None = None) -> StepObserver:
    """Have the steps of `model` observed, once they are traced anew."""
    return _observers.setdefault(model, StepObserver(layers))


def stop_observing(model: keras.Model) -> None:
    """Have them observed no longer, once they are traced anew."""
    _observers.pop(model, None)


def observer_of(model: keras.Model) -> Any:
    """Who observes the micro-batches of `model`: of its step, or of its window; or None."""
    found = _observers.get(model) or getattr(model.optimizer, "observer", None)
    if found is not None:
        found.each = looks_at_each(found, model.optimizer)
    return found


def note_update(
    model: keras.Model, found: BatchGradients, gradients: Sequence[tf.Tensor | None]
) -> list[tf.Tensor | None]:
    """The gradients summed over replicas, noted if the step is observed."""
    observer = _observers.get(model)
    given = [i for i, g in enumerate(gradients) if g is not None]
    further = () if observer is None else observer.to_reduce(found)
    reduced = replica.sum_over_replicas([*(gradients[i] for i in given), *further])
    held = dict(zip(given, reduced))
    sums = [held.get(i) for i in range(len(gradients))]
    if observer is not None:
        variables = model.trainable_weights
        seen = Seen(*reduced[len(given) :])
        observer.end(model.optimizer, sums, variables, seen)
    return sums


def _scale_of(optimizer: keras.optimizers.Optimizer) -> tf.Tensor:
    """What the loss was multiplied by before it was differentiated."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return tf.cast(tf.convert_to_tensor(optimizer.dynamic_scale), "float32")
    return tf.cast(optimizer.loss_scale_factor or 1.0, "float32")
