"""An optimizer that keeps the gradients that it gets, and trains nothing."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from .._core.gradients import Gradient, add, sum_dtype


class Recorder(keras.optimizers.SGD):
    """Adds up the gradients that `apply` gets; the weights stay as they are.

    It stands where an optimizer does: in a model, in a `LossScaleOptimizer`, in an
    `AccumOptimizer`. Gradients come to it finished, unscaled and not yet clipped.

    Args:
        variables: those that may get a gradient.
        learning_rate: what a training step may read of it.
    """

    def __init__(
        self, variables: Sequence[keras.Variable], learning_rate: float = 0.0
    ) -> None:
        super().__init__(learning_rate=learning_rate)
        self._recorded = list(variables)
        self._place = {id(v): i for i, v in enumerate(self._recorded)}
        self.build(self._recorded)
        with tf.init_scope():
            self.sums = [
                keras.Variable(
                    "zeros", shape=v.shape, dtype=sum_dtype(v, None), trainable=False
                )
                for v in variables
            ]
            count = len(self._recorded)
            self.norms, self.counts = (
                keras.Variable("zeros", shape=(count,), dtype="float32", trainable=False)
                for _ in range(2)
            )

    def apply(
        self,
        grads: Sequence[Gradient],
        trainable_variables: Sequence[keras.Variable] | None = None,
    ) -> None:
        """Add gradients, dense or sparse, to what was recorded; None is left out."""
        variables = trainable_variables or self._recorded
        norms, counts = tf.zeros(len(self.sums)), tf.zeros(len(self.sums))
        for gradient, variable in zip(grads, variables):
            if gradient is None:
                continue
            place = self._place[id(variable)]
            total = self.sums[place]
            if isinstance(gradient, tf.Tensor):
                dense = tf.cast(gradient, total.dtype)
            else:
                dense = add(tf.zeros(total.shape, total.dtype), gradient)
            total.assign_add(dense)
            one = tf.one_hot(place, len(self.sums))
            norms += one * tf.cast(tf.norm(dense), "float32")
            counts += one
        self.norms.assign_add(norms)
        self.counts.assign_add(counts)
        self.iterations.assign_add(1)

    def clear(self) -> None:
        """Forget what was recorded."""
        for variable in [*self.sums, self.norms, self.counts]:
            variable.assign(tf.zeros(variable.shape, variable.dtype))

    def stateless_apply(self, *args: Any, **kwargs: Any) -> Any:
        """Not for functional training loops: what they get is not kept."""
        raise NotImplementedError
