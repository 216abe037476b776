"""Dropout in a recomputed block: its mask is kept in bits instead of drawn twice.

A bit for each element is a thirty-second of a float32 tensor. Drawing a mask again costs
as much as a product of matrices under XLA on a CPU (`benchmarks/recompute.py`).
"""

import math

import tensorflow as tf

from .._backend.private.layers import current_scope
from .._backend.private.randomness import DropoutByMask, MaskDrawing
from .passes import Pass


def _mask(drawing: MaskDrawing) -> tf.Tensor | None:
    """The mask of a call of dropout in a pass; None for a call anywhere else."""
    scope = current_scope()
    if not (isinstance(scope, Pass) and scope.is_here()):
        return None
    # The first pass unpacks the bits too, so that nothing needs the mask any longer.
    bits = scope.draw(lambda: pack(drawing.draw()), drawing.skip)
    return unpack(bits, drawing.inputs)


# A context for a pass: dropout draws its masks in the first pass only.
dropout_masks_kept = DropoutByMask(_mask)


def pack(mask: tf.Tensor) -> tf.Tensor:
    """A bool tensor of n elements as a uint8 vector of ⌈n / 8⌉, eight bits in each."""
    flat = tf.cast(tf.reshape(mask, [-1]), "uint8")
    padded = tf.pad(flat, [[0, -_size(flat) % 8]])
    # Bit i of all bytes is one stretch of the mask, which fills a vector unit.
    bits, *stretches = tf.unstack(tf.reshape(padded, [8, -1]))
    for i, stretch in enumerate(stretches, 1):
        shifted = tf.bitwise.left_shift(stretch, tf.constant(i, "uint8"))
        bits = tf.bitwise.bitwise_or(bits, shifted)
    return bits


def unpack(bits: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """The bool tensor that `pack` packed into `bits`, in the shape of `like`."""
    place = tf.constant([[1 << i] for i in range(8)], "uint8")
    flat = tf.reshape(tf.bitwise.bitwise_and(bits, place), [-1])
    shape = like.shape if like.shape.is_fully_defined() else tf.shape(like)
    return tf.reshape(flat[: _size(like)] > 0, shape)


def _size(tensor: tf.Tensor) -> int | tf.Tensor:
    defined = tensor.shape.is_fully_defined()
    return math.prod(tensor.shape) if defined else tf.size(tensor)
