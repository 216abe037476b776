"""What the loss computed last weighs, from where it is computed to where it is used."""

import tensorflow as tf

from .._core.variables import own_variable, read
from .accumulator import Weight


class PendingWeight:
    """The weight of a micro-batch between `compute_loss` and `apply`.

    A variable, for these may be two functions, traced at different times. On each replica
    its own, and never saved.
    """

    def __init__(self) -> None:
        self._state = own_variable("pending_weight", (3,), "float64")
        self._share = own_variable("pending_share", (), "float32")

    def set(self, weight: Weight | None) -> None:
        """Note a weight; None if there is none."""
        state = [tf.zeros((), "float64")] * 3
        if weight is not None:
            state = [
                tf.ones((), "float64"),
                *(tf.cast(part, "float64") for part in weight),
            ]
        self._state.assign(tf.stack(state))

    def get(self) -> tuple[tf.Tensor, Weight]:
        """Whether there is a weight, and what it is; 1 if there is none."""
        known, value, samples = tf.unstack(read(self._state))
        return known > 0, Weight(tf.where(known > 0, value, 1.0), samples)

    def set_share(self, share: tf.Tensor) -> None:
        """Note by what share of the window a loss has been multiplied."""
        self._share.assign(share)

    def share(self) -> tf.Tensor:
        """That share; 1 if nothing was noted."""
        share = read(self._share)
        return tf.where(share > 0, share, 1.0)

    def clear(self) -> None:
        """Forget all, which is used once."""
        self._state.assign(tf.zeros((3,), "float64"))
        self._share.assign(tf.zeros(()))
