"""Clip rules of the package's own, applied to the finished mean gradient of a window.

`clipnorm`, `global_clipnorm` and `clipvalue` are the inner optimizer's, which applies
them itself. This file adds adaptive gradient clipping (Brock et al. 2021, "High-
Performance Large-Scale Image Recognition Without Normalization", section 4.1).
"""

from collections.abc import Sequence

import tensorflow as tf

# The smallest weight norm that is reckoned with, so that zero-initialised weights can
# move at all; the value of the paper.
MINIMAL_NORM = 1e-3


def clip_adaptively(
    gradients: Sequence[tf.Tensor], weights: Sequence[tf.Tensor], factor: float
) -> list[tf.Tensor]:
    """Clip each unit's gradient to `factor` times the norm of that unit's weights.

    A unit is what feeds one output: a column of a dense kernel `(in, out)`, a filter of
    a convolution kernel `(..., in, out)`; a vector or a scalar is one unit.

    Args:
        gradients: dense tensors, finite, of any floating dtype.
        weights: tensors of the same shapes.
        factor: the largest allowed ratio of the two norms, above 0. The paper uses
            0.01 for a batch of 4,096 and larger values for smaller batches.

    Returns:
        The clipped gradients, in the dtypes that they came in.
    """
    return [_clip_units(g, w, factor) for g, w in zip(gradients, weights)]


def _clip_units(gradient: tf.Tensor, weight: tf.Tensor, factor: float) -> tf.Tensor:
    wide = tf.cast(gradient, "float32")
    norm = _unit_norm(wide)
    limit = factor * tf.maximum(_unit_norm(tf.cast(weight, "float32")), MINIMAL_NORM)
    # The maximum keeps the untaken branch of a zero gradient free of a division by 0.
    clipped = wide * (limit / tf.maximum(norm, 1e-6))
    return tf.cast(tf.where(norm > limit, clipped, wide), gradient.dtype)


def _unit_norm(tensor: tf.Tensor) -> tf.Tensor:
    axes = list(range(max(tensor.shape.rank - 1, 0))) if tensor.shape.rank > 1 else None
    return tf.sqrt(tf.reduce_sum(tf.square(tensor), axis=axes, keepdims=True))
