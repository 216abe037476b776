"""Dropout inside of what is recomputed: its mask is kept, in bits, not drawn again.

A mask is a thirty-second of the float32 tensor that it is for. To draw one costs as much
as a product of matrices under XLA on a CPU (`benchmarks/recompute.py`).
"""

import math

import tensorflow as tf

from .._backend.private.layers import current_scope
from .._backend.private.randomness import DropoutByMask, MaskDrawing
from .passes import Pass


def _mask(drawing: MaskDrawing) -> tf.Tensor | None:
    """The mask of a call of dropout inside of a pass; None anywhere else."""
    scope = current_scope()
    if not (isinstance(scope, Pass) and scope.is_here()):
        return None
    # Out of the bits in the first pass, too: what was drawn is not needed any longer.
    bits = scope.draw(lambda: pack(drawing.draw()), drawing.skip)
    return unpack(bits, drawing.inputs)


# Around a pass: what it drops is drawn in the first one only.
dropout_masks_kept = DropoutByMask(_mask)


def pack(mask: tf.Tensor) -> tf.Tensor:
    """A bool tensor of n elements as a uint8 vector of ⌈n / 8⌉, eight to each."""
    flat = tf.cast(tf.reshape(mask, [-1]), "uint8")
    padded = tf.pad(flat, [[0, -_size(flat) % 8]])
    # Bit i of all of them is one stretch of the mask, which fills a vector unit.
    bits, *stretches = tf.unstack(tf.reshape(padded, [8, -1]))
    for i, stretch in enumerate(stretches, 1):
        shifted = tf.bitwise.left_shift(stretch, tf.constant(i, "uint8"))
        bits = tf.bitwise.bitwise_or(bits, shifted)
    return bits


def unpack(bits: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """The bool tensor, of the shape of `like`, that `pack` made `bits` of."""
    place = tf.constant([[1 << i] for i in range(8)], "uint8")
    flat = tf.reshape(tf.bitwise.bitwise_and(bits, place), [-1])
    shape = like.shape if like.shape.is_fully_defined() else tf.shape(like)
    return tf.reshape(flat[: _size(like)] > 0, shape)


def _size(tensor: tf.Tensor) -> int | tf.Tensor:
    defined = tensor.shape.is_fully_defined()
    return math.prod(tensor.shape) if defined else tf.size(tensor)
