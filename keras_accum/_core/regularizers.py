"""Regularizers where gradients are added up: they count once, not in each micro-batch."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf


class _GradientTimes(keras.regularizers.Regularizer):
    """A regularizer of the same value, whose gradient is multiplied by a factor."""

    def __init__(self, regularizer: Callable[[Any], Any], factor: tf.Tensor) -> None:
        self._regularizer, self._factor = regularizer, factor

    def __call__(self, value: Any) -> tf.Tensor:
        found = tf.convert_to_tensor(self._regularizer(value))
        free = tf.stop_gradient(found)
        return free + tf.cast(self._factor, found.dtype) * (found - free)


class _Times(_GradientTimes):
    """A regularizer that is multiplied by a factor."""

    def __call__(self, value: Any) -> tf.Tensor:
        found = tf.convert_to_tensor(self._regularizer(value))
        return tf.cast(self._factor, found.dtype) * found


def is_regularized(model: keras.Model) -> bool:
    """Whether a trained weight of `model` has a regularizer."""
    return any(v.regularizer is not None for v in model.trainable_variables)


def regularizers_times(
    model: keras.Model, factor: tf.Tensor | None
) -> contextlib.AbstractContextManager[None]:
    """Multiply the gradients of the regularizers of `model`, not their values.

    Whoever asks for them: a `compute_loss` of the user's may add them, or not.

    Args:
        model: the model.
        factor: scalar tensor; None for 1.
    """
    if factor is None:
        return contextlib.nullcontext()
    return _replaced(model.trainable_variables, lambda old: _GradientTimes(old, factor))


@tf.autograph.experimental.do_not_convert
def share_regularizers(
    variables: Sequence[Any], share: tf.Tensor | None
) -> contextlib.AbstractContextManager[None]:
    """Multiply the regularizers of `variables` by a scalar; None for 1."""
    if share is None:
        return contextlib.nullcontext()
    return _replaced(variables, lambda old: _Times(old, share))


def without_regularizers(model: keras.Model) -> contextlib.AbstractContextManager[None]:
    """Leave the regularizers of `model` out of what is computed inside."""
    return _replaced(model.trainable_variables, lambda _: None)


@contextlib.contextmanager
def _replaced(variables: Sequence[Any], new: Callable[[Any], Any]) -> Iterator[None]:
    regularized = [v for v in variables if getattr(v, "regularizer", None) is not None]
    before = [v.regularizer for v in regularized]
    try:
        for variable, regularizer in zip(regularized, before):
            variable.regularizer = new(regularizer)
        yield
    finally:
        for variable, regularizer in zip(regularized, before):
            variable.regularizer = regularizer
