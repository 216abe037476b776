"""Nested values, taken apart into tensors that have a gradient, others, and the rest."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from .._backend.private.layers import (
    drop_keras_mask,
    keras_logits,
    keras_mask,
    with_keras_logits,
    with_keras_mask,
)


class Nest:
    """Nested values, taken apart.

    The masks and logits that Keras attaches to tensors count as tensors of the nest.
    """

    def __init__(self, values: Any) -> None:
        self.values = values
        self.leaves = tf.nest.flatten(values, expand_composites=True)
        tensors = [(i, x) for i, x in enumerate(self.leaves) if isinstance(x, tf.Tensor)]
        self._masks = {i: m for i, x in tensors if (m := keras_mask(x)) is not None}
        self._logits = {i: z for i, x in tensors if (z := keras_logits(x)) is not None}
        self._floats = [i for i, x in tensors if _has_gradient(x)]
        self._others = [
            i for i, x in tensors if _is_nondifferentiable(x) and not _has_gradient(x)
        ]

    @property
    def differentiable(self) -> list[tf.Tensor]:
        """The tensors that may have a gradient: floating and complex ones, and logits."""
        return [*[self.leaves[i] for i in self._floats], *self._logits.values()]

    @property
    def nondifferentiable(self) -> list[tf.Tensor]:
        """The integer and bool tensors, and masks."""
        return [*[self.leaves[i] for i in self._others], *self._masks.values()]

    def pack(self, floats: Sequence[tf.Tensor], others: Sequence[tf.Tensor]) -> Any:
        """The nested values, with `floats` and `others` in place of their tensors."""
        floats_left, others_left = iter(floats), iter(others)
        leaves = list(self.leaves)
        for i in self._floats:
            leaves[i] = next(floats_left)
        for i in self._others:
            leaves[i] = next(others_left)
        for i, mask in zip(self._masks, others_left):
            leaves[i] = with_keras_mask(leaves[i], mask)
        for i, logits in zip(self._logits, floats_left):
            leaves[i] = with_keras_logits(leaves[i], logits)
        return tf.nest.pack_sequence_as(self.values, leaves, expand_composites=True)

    def copied(self) -> Any:
        """The nested values, with copies of their tensors.

        A call may change its arguments: `MultiHeadAttention` removes their masks.
        """
        others = [tf.identity(tensor) for tensor in self.nondifferentiable]
        return self.pack([tf.identity(tensor) for tensor in self.differentiable], others)

    def drop_masks_of(self, packed: Any) -> None:
        """Remove the masks that a call has removed from `packed`, a copy of the nest."""
        leaves = tf.nest.flatten(packed, expand_composites=True)
        for i in self._masks:
            if keras_mask(leaves[i]) is None:
                drop_keras_mask(self.leaves[i])


def _has_gradient(tensor: tf.Tensor) -> bool:
    return tensor.dtype.is_floating or tensor.dtype.is_complex


def _is_nondifferentiable(tensor: tf.Tensor) -> bool:
    return tensor.dtype.is_bool or tensor.dtype.is_integer
