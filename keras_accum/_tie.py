"""Holding a computation back until others are done, whatever compilers make of it."""

from collections.abc import Sequence

import tensorflow as tf

from ._keras_private import compiled_by_xla


def tie(tensors: Sequence[tf.Tensor], to: Sequence[tf.Tensor]) -> list[tf.Tensor]:
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


def _one(tensor: tf.Tensor) -> tf.Tensor:
    return tf.math.real(tf.reshape(tensor, [-1])[:1])


def _after(tensor: tf.Tensor, never: tf.Tensor) -> tf.Tensor:
    if tensor.dtype.is_bool:
        return tensor | never
    return tensor + tf.cast(never, tensor.dtype)
