"""Gradient tapes, which can be asked but not found."""

import contextlib
from collections.abc import Callable, Sequence

import tensorflow as tf
from tensorflow.python.eager import record


def could_record() -> bool:
    """Whether any tape records at all; a tape can be asked, but not found."""
    return record.could_possibly_record()


def is_recorded(tensors: Sequence[tf.Tensor]) -> bool:
    """Whether some tape would differentiate by one of `tensors`; likewise."""
    return record.should_record_backprop(list(tensors))


def unrecorded() -> contextlib.AbstractContextManager[None]:
    """A context that no tape sees; `GradientTape.stop_recording` is for one tape."""
    return record.stop_recording()


def value_with_gradient_of(value: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
    """`value`, with the gradient of `tensor`, which then need not be computed.

    `tf.custom_gradient` would make `tensor` an input of an operation, and so compute it.
    """
    return recorded(value, tensor, lambda gradient: gradient)


def recorded(
    value: tf.Tensor, tensor: tf.Tensor, gradient: Callable[[tf.Tensor], tf.Tensor]
) -> tf.Tensor:
    """`value`, from whose gradient `gradient` makes that of `tensor`.

    In a graph, TensorFlow would keep a `tf.custom_gradient` for ever, and so the graph.
    """
    value = tf.identity(value)
    record.record_operation("StandIn", [value], [tensor], lambda g: [gradient(g)])
    return value
