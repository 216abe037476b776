"""What a window is seen to hold besides its sum: norms, and where infinities came from.

From the gradients of the k micro-batches of a window, with squared norms s_i, and the
squared norm S of their mean, the two-batch-size estimator of McCandlish et al. (2018, "An
Empirical Model of Large-Batch Training", appendix A.1) gives

    |G|^2 = (k S - mean s_i) / (k - 1)         of the true gradient
    tr(C) = (mean s_i - S) / (1 - 1 / k)       of the noise, for one micro-batch

and their quotient, averaged apart over windows, is the gradient noise scale, in
micro-batches: the batch size from which on a larger one brings little.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from .._core.gradients import Gradient, global_norm, values_of


class WindowObserver:
    """Keeps the norms of a window's gradients, in variables that are never saved.

    Micro-batches are taken to be equally large. Sparse gradients are left out of the noise:
    their rows may repeat.
    """

    def __init__(self) -> None:
        self._built = False
        self._dense: set[int] = set()

    def _build(self, count: int) -> None:
        if self._built:
            return

        def zeros(*shape: int) -> keras.Variable:
            return keras.Variable("zeros", shape=shape, trainable=False, autocast=False)

        with tf.init_scope():
            self.squares, self.count = zeros(), zeros()
            self.small, self.large, self.length = zeros(), zeros(), zeros()
            self.clipped_norm = zeros()
            self.bad, self.bad_step = zeros(count), zeros()
        self._built = True

    @property
    def built(self) -> bool:
        """Whether a micro-batch was seen."""
        return self._built

    def add(
        self,
        gradients: Sequence[Gradient],
        indices: Sequence[int],
        factor: tf.Tensor,
        window: Any,
    ) -> None:
        """Note one micro-batch, before it is counted.

        Args:
            gradients: as they came, scaled.
            indices: of their variables.
            factor: what takes the scale out of them.
            window: the `Accumulator` that they are added to.
        """
        self._build(len(window.sums))
        begins = tf.equal(window.micro_step.value, 0)
        step = tf.cast(window.micro_step.value, "float32") + 1.0
        zero = tf.zeros(())
        squares = tf.where(begins, zero, tf.convert_to_tensor(self.squares))
        bad_step = tf.where(begins, zero, tf.convert_to_tensor(self.bad_step))
        bad = [zero] * len(window.sums)
        for gradient, index in zip(gradients, indices):
            if gradient is None or window.overwrites[index]:
                continue
            values = tf.cast(values_of(gradient), "float32") * factor
            square = 2.0 * tf.nn.l2_loss(values)
            if not isinstance(gradient, tf.IndexedSlices):
                self._dense.add(index)
                squares += square
            bad[index] = tf.cast(~tf.math.is_finite(square), "float32")
        here = tf.stack(bad)
        first = tf.logical_and(tf.equal(bad_step, 0.0), tf.reduce_any(here > 0))
        self.bad.assign(tf.where(first, here, tf.where(begins, 0.0, self.bad.value)))
        self.bad_step.assign(tf.where(first, step, bad_step))
        self.squares.assign(squares)
        self.count.assign(step)

    def end(
        self, indices: Sequence[int], means: Sequence[tf.Tensor], clipped: tf.Tensor
    ) -> None:
        """Note an update: the mean gradients, and the norm of what is left of them."""
        self._build(0)
        dense = [mean for i, mean in zip(indices, means) if i in self._dense]
        self.small.assign(self.squares.value / tf.maximum(self.count.value, 1.0))
        self.large.assign(tf.square(global_norm(dense)))
        self.length.assign(self.count.value)
        self.clipped_norm.assign(clipped)


def norm_after_clipping(optimizer: Any, gradients: Sequence[tf.Tensor]) -> tf.Tensor:
    """The norm that the clipping of a Keras optimizer leaves of `gradients`."""
    norm = global_norm(gradients)
    if (most := getattr(optimizer, "global_clipnorm", None)) is not None:
        return tf.minimum(norm, most)
    if (most := getattr(optimizer, "clipnorm", None)) is not None:
        norms = [tf.minimum(global_norm([g]), most) for g in gradients]
        return global_norm(norms)
    if (most := getattr(optimizer, "clipvalue", None)) is not None:
        return global_norm([tf.clip_by_value(g, -most, most) for g in gradients])
    return norm
