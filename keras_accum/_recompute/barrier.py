"""Computing tensors only when others are there, whatever a compiler makes of it."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from .._backend.private.compiled import compiled_by_xla


def optimization_barrier(
    tensors: Sequence[tf.Tensor], to: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """`tensors`, unchanged, available only when all tensors in `to` are.

    Without it a compiler sees that the second pass repeats the first. It computes both
    once and keeps everything in between. In TensorFlow control dependencies are enough.
    XLA ignores them. On CPUs it also removes its own barrier before it looks for repeated
    computations the last time. It cannot see through a 0.0 that is made of the values in
    `to` and then added. Every tensor in `to` takes part: a constant alone (the gradient
    of a result that nothing uses) would be folded away.

    Args:
        tensors: of floating, complex, integer or bool dtype.
        to: of floating or complex dtype; not empty.
    """
    if tf.executing_eagerly() or not tensors:
        return list(tensors)
    if not (compiled_by_xla() or tf.config.optimizer.get_jit()):
        with tf.control_dependencies(to):
            return [tf.identity(tensor) for tensor in tensors]
    # No number is NaN and finite. A compiler does not know that.
    never = tf.reduce_any(
        [
            tf.reduce_any(tf.math.is_nan(x) & tf.math.is_finite(x))
            for x in map(_first_element, to)
        ]
    )
    return [_plus_zero(tensor, never) for tensor in tensors]


def release_together(tensors: Sequence[Any]) -> list[Any]:
    """Gradients (None included), each available only when all of them are.

    No weight may be updated before the second pass has read it. In a plain step its
    gradient depends on each use of it. Here only the order in which TensorFlow reads and
    writes variables says so, and its dependency optimizer loses that order now and then.
    """
    if tf.executing_eagerly() or compiled_by_xla():
        return list(tensors)
    given = [t for t in tf.nest.flatten(tensors, expand_composites=True) if t is not None]
    with tf.control_dependencies(given):
        return [t if t is None else tf.identity(t) for t in tensors]


def _first_element(tensor: tf.Tensor) -> tf.Tensor:
    """A vector of one element, or of none; a real number."""
    return tf.math.real(tf.reshape(tensor, [-1])[:1])


def _plus_zero(tensor: tf.Tensor, never: tf.Tensor) -> tf.Tensor:
    if tensor.dtype.is_bool:
        return tensor | never
    return tensor + tf.cast(never, tensor.dtype)
