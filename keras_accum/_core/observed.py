"""What the gradients of micro-batches show besides their sum: norms, and infinities.

Let micro-batch i of k have the gradient g_i of its mean loss and the part p_i of the N
samples of an update, whose gradient is the mean Σ p_i g_i. With

    small = Σ p_i |g_i|^2        large = |Σ p_i g_i|^2

the two-batch-size estimator of McCandlish et al. (2018, "An Empirical Model of Large-Batch
Training", appendix A.1) gives, also for micro-batches of unlike sizes,

    |G|^2     = (k large - small) / (k - 1)        of the true gradient
    tr(C) / N = (small - large) / (k - 1)          of the noise in the update's gradient

for small is |G|^2 + k tr(C) / N on average, and large |G|^2 + tr(C) / N. The quotient
tr(C) / |G|^2, averaged apart over updates, is the gradient noise scale: the batch size, in
samples, from which on a larger one brings little.
"""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from .gradients import Gradient, sum_of_squares, values_of
from .layer_watch import LayerWatch


class Observed(NamedTuple):
    """What was seen of some micro-batches. All are float32 tensors, and add up from zero.

    Attributes:
        squares: scalar, the sum of p_i |g_i|^2, in units of whoever keeps it.
        count: scalar, the micro-batches that weigh anything.
        taken: scalar, all micro-batches.
        bad: of shape (variables,), 1 where the gradient of a variable was not finite, in
            the first micro-batch where one was not.
        step: scalar, the number of that micro-batch, from 1; 0 if there was none.
        layer: scalar, what `LayerWatch` has seen in it.
    """

    squares: tf.Tensor
    count: tf.Tensor
    taken: tf.Tensor
    bad: tf.Tensor
    step: tf.Tensor
    layer: tf.Tensor


class Observer:
    """Sees the gradients of micro-batches. Sparse ones count for infinities alone.

    Their rows may repeat, so that their norm is not that of their values.

    Args:
        layers: watches the layers, to name the first one that gave an infinity.
    """

    def __init__(self, layers: LayerWatch | None = None) -> None:
        self.layers = layers
        self.dense: set[int] = set()

    def begin(self) -> None:
        """Forget what layers gave in passes that are not the one of a gradient."""
        if self.layers is not None:
            self.layers.clear()

    def see(
        self,
        seen: Observed,
        gradients: Sequence[Gradient],
        indices: Sequence[int],
        factor: tf.Tensor,
        weighs: tf.Tensor,
    ) -> Observed:
        """Add one micro-batch to what was seen.

        Args:
            seen: of the micro-batches before.
            gradients: as they came.
            indices: of their variables, as in `seen.bad`.
            factor: scalar, what the squares of their numbers are multiplied by.
            weighs: scalar bool; what weighs nothing may be NaN.
        """
        size = int(seen.bad.shape[0])
        squares, bad = tf.zeros(()), [tf.zeros(())] * size
        for gradient, index in zip(gradients, indices):
            if gradient is None:
                continue
            square = sum_of_squares(tf.cast(values_of(gradient), "float32"))
            if not isinstance(gradient, tf.IndexedSlices):
                self.dense.add(index)
                squares += square
            bad[index] = tf.cast(~tf.math.is_finite(square), "float32")
        layer = tf.zeros(()) if self.layers is None else self.layers.take()
        mine, factor = tf.cast(weighs, "float32"), tf.cast(factor, "float32")
        one = Observed(
            tf.math.multiply_no_nan(squares, factor),
            tf.where(factor > 0, mine, 0.0),
            tf.ones(()),
            tf.stack(bad) * mine if size else seen.bad,
            mine * tf.reduce_max(tf.stack([tf.zeros(()), *bad])),
            layer,
        )
        return join(seen, one)


def nothing(count: int) -> Observed:
    """What was seen of no micro-batch, for so many variables."""
    zero = tf.zeros(())
    return Observed(zero, zero, zero, tf.zeros((count,)), zero, zero)


def join(seen: Observed, after: Observed) -> Observed:
    """What was seen of some micro-batches, and of those after them."""
    is_first = tf.logical_and(tf.equal(seen.step, 0.0), after.step > 0)
    return Observed(
        seen.squares + after.squares,
        seen.count + after.count,
        seen.taken + after.taken,
        tf.where(is_first, after.bad, seen.bad),
        tf.where(is_first, seen.taken + after.step, seen.step),
        tf.where(is_first, after.layer, seen.layer),
    )
