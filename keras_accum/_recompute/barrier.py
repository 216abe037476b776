"""Holding a computation back until others are done, whatever compilers make of it."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from .._backend.private.compiled import compiled_by_xla


def optimization_barrier(
    tensors: Sequence[tf.Tensor], to: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """`tensors`, unchanged, but not there before those in `to` are.

    Without it a compiler finds that the second pass computes what the first did, and
    does it once, which keeps everything. Control dependencies hold TensorFlow back. XLA
    ignores them, and on CPUs removes its own barrier before it looks for such repetitions
    the last time; what it cannot see through is a 0.0 made of the values themselves. Of
    each one's: a constant among them (the gradient of a result that nothing uses) could
    be folded away.
    """
    if tf.executing_eagerly() or not tensors:
        return list(tensors)
    if not (compiled_by_xla() or tf.config.optimizer.get_jit()):
        with tf.control_dependencies(to):
            return [tf.identity(tensor) for tensor in tensors]
    # No number is both: false, without a compiler knowing.
    never = tf.reduce_any(
        [tf.reduce_any(tf.math.is_nan(x) & tf.math.is_finite(x)) for x in map(_one, to)]
    )
    return [_after(tensor, never) for tensor in tensors]


def release_together(tensors: Sequence[Any]) -> list[Any]:
    """Gradients, None among them, none of which is there before all are.

    A weight that the second pass reads must not be updated before it has been used there.
    In a plain step the gradient depends on every use of it; here only TensorFlow's order
    of reads and writes says so, and its dependency optimizer loses that now and then.
    """
    if tf.executing_eagerly() or compiled_by_xla():
        return list(tensors)
    given = [t for t in tf.nest.flatten(tensors, expand_composites=True) if t is not None]
    with tf.control_dependencies(given):
        return [t if t is None else tf.identity(t) for t in tensors]


def _one(tensor: tf.Tensor) -> tf.Tensor:
    return tf.math.real(tf.reshape(tensor, [-1])[:1])


def _after(tensor: tf.Tensor, never: tf.Tensor) -> tf.Tensor:
    if tensor.dtype.is_bool:
        return tensor | never
    return tensor + tf.cast(never, tensor.dtype)
