"""What the gradients of micro-batches show besides their sum: norms, and infinities.

Let micro-batch i have the gradient g_i of its mean loss and the part p_i of the N samples
of an update, whose gradient is the mean Σ p_i g_i. Of some of them, o in number and p =
Σ p_i in their parts together, the norms are taken: of the first one, mostly, for a norm
reads all of a gradient, and one tells as much on average as all. With

    small = Σ p_i |g_i|^2 / p        large = |Σ p_i g_i|^2        k = o / p

(for equal micro-batches, k is how many an update has) the two-batch-size estimator of
McCandlish et al. (2018, "An Empirical Model of Large-Batch Training", appendix A.1) gives

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
        squares: scalar, the sum of p_i |g_i|^2 of those whose norm was taken, in units of
            whoever keeps it.
        part: scalar, the sum of their p_i, in the same units.
        count: scalar, how many they are.
        taken: scalar, all micro-batches.
        bad: of shape (variables,), 1 where the gradient of a variable was not finite, in
            the first micro-batch where one was not.
        step: scalar, the number of that micro-batch, from 1; 0 if there was none.
        layer: scalar, what `LayerWatch` has seen in it.
    """

    squares: tf.Tensor
    part: tf.Tensor
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
        # Whether each micro-batch may be one to name, as not finite. Else the norm of
        # the first one that weighs anything is enough.
        self.each = True

    def begin(self) -> None:
        """Forget what layers gave in passes that are not the one of a gradient."""
        if self.layers is not None:
            self.layers.clear()

    def see(
        self,
        seen: Observed,
        gradients: Sequence[Gradient],
        indices: Sequence[int],
        part: tf.Tensor,
        factor: tf.Tensor | float = 1.0,
        *,
        weighs: tf.Tensor,
    ) -> Observed:
        """Add one micro-batch to what was seen.

        Args:
            seen: of the micro-batches before.
            gradients: as they came.
            indices: of their variables, as in `seen.bad`.
            part: scalar, its part of the update, in units of `seen.part`.
            factor: scalar, from the squares of their numbers to those of its gradient.
            weighs: scalar bool; what weighs nothing may be NaN.
        """
        size = int(seen.bad.shape[0])

        def look() -> tuple[tf.Tensor, tf.Tensor]:
            return self._look(gradients, indices, size)

        needed = tf.logical_and(weighs, self.each or tf.equal(seen.count, 0.0))
        if tf.executing_eagerly():
            found = look() if bool(needed) else (tf.zeros(()), tf.zeros((size,)))
        else:
            for gradient, index in zip(gradients, indices):
                if isinstance(gradient, tf.Tensor):
                    self.dense.add(index)
            found = tf.cond(needed, look, lambda: (tf.zeros(()), tf.zeros((size,))))
        squares, bad = found
        part, factor = (tf.cast(x, "float32") for x in (part, factor))
        # What is left out as not finite has no part.
        taken = tf.cast(tf.logical_and(needed, part > 0), "float32")
        layer = tf.zeros(()) if self.layers is None else self.layers.take()
        one = Observed(
            tf.math.multiply_no_nan(squares * factor, part),
            part * taken,
            taken,
            tf.ones(()),
            bad,
            tf.reduce_max(tf.concat([[0.0], bad], 0)),
            layer,
        )
        return join(seen, one)

    def _look(
        self, gradients: Sequence[Gradient], indices: Sequence[int], size: int
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """The squares of all numbers of dense gradients, and which are not finite."""
        squares, bad = tf.zeros(()), [tf.zeros(())] * size
        for gradient, index in zip(gradients, indices):
            if gradient is None:
                continue
            square = sum_of_squares(tf.cast(values_of(gradient), "float32"))
            if not isinstance(gradient, tf.IndexedSlices):
                self.dense.add(index)
                squares += square
            bad[index] = tf.cast(~tf.math.is_finite(square), "float32")
        return squares, tf.stack(bad) if size else tf.zeros((0,))


def nothing(count: int) -> Observed:
    """What was seen of no micro-batch, for so many variables."""
    zero = tf.zeros(())
    return Observed(zero, zero, zero, zero, tf.zeros((count,)), zero, zero)


def pack(seen: Observed) -> tf.Tensor:
    """All of it in one vector: each variable costs a step some time."""
    scalars = [seen.squares, seen.part, seen.count, seen.taken, seen.step, seen.layer]
    return tf.concat([tf.stack(scalars), seen.bad], 0)


def unpack(vector: tf.Tensor) -> Observed:
    """What `pack` was given."""
    squares, part, count, taken, step, layer = tf.unstack(vector[:SCALARS], SCALARS)
    return Observed(squares, part, count, taken, vector[SCALARS:], step, layer)


# How many numbers there are beside one for each variable.
SCALARS = 6


def join(seen: Observed, after: Observed) -> Observed:
    """What was seen of some micro-batches, and of those after them."""
    is_first = tf.logical_and(tf.equal(seen.step, 0.0), after.step > 0)
    return Observed(
        seen.squares + after.squares,
        seen.part + after.part,
        seen.count + after.count,
        seen.taken + after.taken,
        tf.where(is_first, after.bad, seen.bad),
        tf.where(is_first, seen.taken + after.step, seen.step),
        tf.where(is_first, after.layer, seen.layer),
    )
