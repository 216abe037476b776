"""Regularizers where gradients are added up: they count once, not in each micro-batch."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf


class _Scaled(keras.regularizers.Regularizer):
    """A regularizer of the same value, whose gradient is multiplied by a factor."""

    def __init__(self, regularizer: Callable[[Any], Any], factor: tf.Tensor) -> None:
        self._regularizer, self._factor = regularizer, factor

    def __call__(self, value: Any) -> tf.Tensor:
        found = tf.convert_to_tensor(self._regularizer(value))
        free = tf.stop_gradient(found)
        return free + tf.cast(self._factor, found.dtype) * (found - free)


def is_regularized(model: keras.Model) -> bool:
    """Whether a trained weight of `model` has a regularizer."""
    return any(v.regularizer is not None for v in model.trainable_variables)


@contextlib.contextmanager
def regularizers_times(model: keras.Model, factor: tf.Tensor | None) -> Iterator[None]:
    """Multiply the gradients of the regularizers of `model`, not their values.

    Whoever asks for them: a `compute_loss` of the user's may add them, or not.

    Args:
        model: the model.
        factor: scalar tensor; None for 1.
    """
    if factor is None:
        yield
        return
    with _replaced(model, lambda regularizer: _Scaled(regularizer, factor)):
        yield


def without_regularizers(model: keras.Model) -> contextlib.AbstractContextManager[None]:
    """Leave the regularizers of `model` out of what is computed inside."""
    return _replaced(model, lambda _: None)


@contextlib.contextmanager
def _replaced(model: keras.Model, new: Callable[[Any], Any]) -> Iterator[None]:
    variables = [v for v in model.trainable_variables if v.regularizer is not None]
    before = [v.regularizer for v in variables]
    try:
        for variable, regularizer in zip(variables, before):
            variable.regularizer = new(regularizer)
        yield
    finally:
        for variable, regularizer in zip(variables, before):
            variable.regularizer = regularizer
