"""The variables of a window: what it holds so far, and how it gives and forgets it.

The sum is kept in units of the window's first micro-batch: with w_i the weight of
micro-batch i, w_1 that of the first one that weighs anything, and g_i its gradient,

    sum   = Σ (w_i / w_1) g_i
    total = Σ (w_i / w_1)             mean = sum / total

so that micro-batches of equal weight are added as they are, a window of one is its own
gradient bit for bit, and token counts do not reach into the range of the gradients.

A micro-batch that weighs nothing may still have a regularizer. It counts by `NOTHING`
times its samples: nothing beside a weight, and everything in a window without one.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from .._backend import replica
from .._backend.private.compiled import compiled_by_xla
from .._backend.private.strategies import local_component
from .._core.gradients import Gradient, divide_no_nan, sum_dtype, values_of, weigh
from .._core.variables import own_variable, read, shared_variable

# A power of two, so that multiplying and dividing by it is exact.
NOTHING = 2.0**-64


class Weight(NamedTuple):
    """What a micro-batch weighs.

    Attributes:
        value: scalar float tensor, the denominator of its mean loss.
        samples: scalar float tensor, what counts instead in a window that weighs nothing
            at all: its samples if its loss has more terms (a regularizer), else 0.
    """

    value: tf.Tensor
    samples: tf.Tensor


class Reduced(NamedTuple):
    """What a window holds, summed over replicas.

    Attributes:
        sums: of the gradients, one for each variable that was asked for; maxima among
            them.
        total: scalar, the sum of the weights.
        dropped: scalar, the micro-batches left out.
        further: what else was to be summed.
    """

    sums: list[tf.Tensor]
    total: tf.Tensor
    dropped: tf.Tensor
    further: list[tf.Tensor]


class Accumulator:
    """The running sum of the gradients of one window.

    Variables: one sum per trained variable, and a few scalars. What each replica adds
    for itself (`sums`, `total`, `dropped`, `gradient_count`) is its own until the window's
    end, and saved as the sum over replicas; what they hold together (`micro_step`,
    `length`, `reference_weight`) is the same on all. Several replicas cannot agree on a
    first weight without talking to each other: their reference is 1. Nothing else depends
    on how many they are, so that a window may go on with another number of them.

    Args:
        variables: the trained variables, in the order of their gradients.
        dtype: of the sums; None for each variable's own, but float32 at least.
        weighted: whether the micro-batches weigh differently ("mean"), or all 1 ("sum").
    """

    def __init__(
        self,
        variables: Sequence[keras.Variable],
        dtype: str | None,
        weighted: bool,
    ) -> None:
        self.weighted = weighted
        self.trained = list(variables)
        # float8 scales and the like: not gradients, but the variable's next value.
        self.overwrites = [
            getattr(v, "overwrite_with_gradient", False) for v in variables
        ]
        dtypes = [sum_dtype(v, dtype) for v in variables]
        self.sums = [
            own_variable(f"sum_{i}", v.shape, sum_type)
            for i, (v, sum_type) in enumerate(zip(variables, dtypes))
        ]
        # Names are those that files have.
        scalar = self.scalar_dtype = "float64" if "float64" in dtypes else "float32"
        self.total = own_variable("total_weight", (), scalar)
        self.dropped = own_variable("dropped", (), "float32")
        self.micro_step = shared_variable("micro_step", (), "int64")
        self.length = shared_variable("window_length", (), "int64")
        self.reference_weight = shared_variable("unit_weight", (), scalar)
        self.gradient_count = own_variable("reached", (len(variables),), "float32")

    @property
    def variables(self) -> list[keras.Variable]:
        """All variables, the scalars first."""
        scalars = [self.micro_step, self.length, self.total, self.reference_weight]
        return [*scalars, self.dropped, self.gradient_count, *self.sums]

    # On each replica.

    def add(
        self,
        gradients: Sequence[Gradient],
        indices: Sequence[int],
        weight: Weight,
        share: tf.Tensor,
        kept: tf.Tensor | None,
    ) -> tf.Tensor:
        """Add the gradients of one micro-batch; gives what it weighs, in units of `total`.

        No scalar moves before every gradient is there. In a graph, an operation without
        inputs runs even when the data have ended, so every assignment waits.

        Args:
            gradients: one for each of `indices`; None leaves a variable's sum alone.
            indices: positions of the trained variables.
            weight: what the micro-batch weighs; 0 adds nothing, even from a NaN.
            share: scalar float tensor, what the loss was multiplied by before it was
                differentiated, besides the loss scale.
            kept: scalar bool tensor, False to drop the micro-batch, or None.
        """
        given = [g for g in gradients if g is not None]
        relative, reference = self._relative_weight(weight, kept)
        # Keras's mean losses are divided by the number of replicas, which is undone here.
        factor = relative * replica.count() if self.weighted else relative
        factor /= tf.cast(share, factor.dtype)
        for gradient, index in zip(gradients, indices):
            if gradient is None:
                continue
            if self.overwrites[index]:
                self._update_maximum(gradient, index, relative)
            else:
                _add_to(self.sums[index], weigh(gradient, factor, self.sums[index].dtype))
        with tf.control_dependencies(after(given)):
            self.total.assign_add(relative)
            if replica.count() == 1:
                self.reference_weight.assign(reference)
            counts = tf.ones(()) if kept is None else tf.cast(kept, "float32")
            if kept is not None:
                self.dropped.assign_add(1.0 - counts)
            held = {i for i, g in zip(indices, gradients) if g is not None}
            marks = [float(i in held) for i in range(len(self.sums))]
            # A maximum has no value yet from what weighs nothing; a sum has its zero.
            weighs = tf.cast(tf.not_equal(relative, 0.0), "float32")
            each = [weighs if overwrites else counts for overwrites in self.overwrites]
            self.gradient_count.assign_add(marks * tf.stack(each))
        return relative

    def _relative_weight(
        self, weight: Weight, kept: tf.Tensor | None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """The weight in units of the window's first, and that first weight."""
        value, samples = (tf.cast(part, self.scalar_dtype) for part in weight)
        if not self.weighted:
            value = tf.cast(tf.not_equal(value, 0.0), value.dtype)
        if kept is not None:
            value, samples = (tf.where(kept, x, 0.0) for x in (value, samples))
        reference = read(self.reference_weight)
        first = value if replica.count() == 1 else tf.ones((), value.dtype)
        reference = tf.where(tf.equal(reference, 0.0), first, reference)
        relative = tf.math.divide_no_nan(value, reference)
        return tf.where(value > 0, relative, samples * NOTHING), reference

    def _update_maximum(self, value: tf.Tensor, index: int, relative: tf.Tensor) -> None:
        """Keep the largest value of the window, of micro-batches that weigh anything."""
        held, value = read(self.sums[index]), tf.cast(value, self.sums[index].dtype)
        larger = tf.where(self._has_value(index), tf.maximum(held, value), value)
        self.sums[index].assign(tf.where(tf.equal(relative, 0.0), held, larger))

    def _has_value(self, index: int) -> tf.Tensor:
        """Whether a micro-batch that weighs anything had a gradient for a variable."""
        return read(self.gradient_count)[index] > 0

    def reduce(
        self, indices: Sequence[int], further: Sequence[tf.Tensor] = ()
    ) -> Reduced:
        """The sums of `indices` over all replicas, and those of `further` float tensors.

        In one reduction, for all have the dtype of a sum.
        """
        added = [i for i in indices if not self.overwrites[i]]
        sums = [read(self.sums[i]) for i in added]
        others = [tf.cast(tensor, self.scalar_dtype) for tensor in further]
        total, dropped, *rest = replica.sum_over_replicas(
            [read(self.total), read(self.dropped), *sums, *others]
        )
        held = dict(zip(added, rest))
        return Reduced(
            [held[i] if i in held else self._maximum(i) for i in indices],
            total,
            dropped,
            [tf.cast(x, y.dtype) for x, y in zip(rest[len(added) :], further)],
        )

    def _maximum(self, index: int) -> tf.Tensor:
        """The window's maximum over all replicas; the variable's own without one."""
        value = read(self.sums[index])
        nothing = tf.constant(float("-inf"), value.dtype)
        value = replica.all_reduce_max(tf.where(self._has_value(index), value, nothing))
        own = tf.cast(tf.convert_to_tensor(self.trained[index]), value.dtype)
        return tf.where(tf.equal(value, nothing), own, value)

    def divide(
        self, indices: Sequence[int], sums: Sequence[tf.Tensor], divisor: tf.Tensor
    ) -> list[tf.Tensor]:
        """The `sums` of `indices`, reduced, over `divisor`; maxima as they are.

        The means take the place of the sums, one after the other: a second copy of them
        all is never in memory. XLA divides where it uses a mean, without a copy.
        """
        in_place = not compiled_by_xla()
        means: list[tf.Tensor] = []
        previous: list[tf.Tensor] = []
        for index, total in zip(indices, sums):
            if not self.overwrites[index]:
                with tf.control_dependencies(previous):
                    total = divide_no_nan(total, divisor)
                    if in_place:
                        self.sums[index].assign(total)
                        total = read(self.sums[index])
                previous = [] if tf.executing_eagerly() else [total]
            means.append(total)
        return means

    def clear(self, updated: bool = False) -> None:
        """Forget the sums and their weight, by assignment: 0 times NaN is NaN.

        Args:
            updated: whether the variables have just been updated by the sums.
        """
        for variable in [self.total, self.dropped, self.gradient_count]:
            variable.assign(tf.zeros(variable.shape, variable.dtype))
        for trained, variable in zip(self.trained, self.sums):
            if updated:
                variable.assign(self._zeros_after(trained, variable))
            else:
                variable.assign(tf.zeros(variable.shape, variable.dtype))

    def _zeros_after(self, updated: keras.Variable, like: keras.Variable) -> tf.Tensor:
        """Zeros for a sum, made only when the variable that it updates has its value.

        Zeros that depend on nothing are made early, all of them at once: one more copy
        of the parameters. XLA, which minds no control dependencies, even keeps a copy of
        each sum, lest it be overwritten before it is read.
        """
        value = tf.convert_to_tensor(updated)
        # In a window, which only run time knows: a graph would keep constant zeros.
        outside = tf.less_equal(self.micro_step.value, 0)
        if compiled_by_xla():
            value = tf.cast(value, like.dtype)
            return tf.where(outside, value, tf.zeros((), like.dtype))
        with tf.control_dependencies([] if tf.executing_eagerly() else [value]):
            return tf.fill(like.shape, tf.cast(outside, like.dtype))

    # For all replicas together.

    def count(self, length: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Count one micro-step; True if it is the window's last.

        Args:
            length: gives the number of micro-steps of a window that begins now.
        """
        taken = tf.convert_to_tensor(self.micro_step.value)
        held = tf.convert_to_tensor(self.length.value)
        # A length counts from the start of a window: no change can misalign one.
        held = tf.where(tf.equal(taken, 0), length(), held)
        taken += 1
        self.length.assign(held)
        self.micro_step.assign(taken)
        if replica.count() > 1:
            held_weight = read(self.reference_weight)
            one = tf.ones((), held_weight.dtype)
            first = tf.equal(held_weight, 0.0)
            self.reference_weight.assign(tf.where(first, one, held_weight))
        return tf.greater_equal(taken, held)

    def forget_reference(self) -> None:
        """Have the next micro-batch weigh as much as those that are held, each."""
        self.reference_weight.assign(tf.zeros((), self.scalar_dtype))

    def end_with_next(self) -> None:
        """Have the next micro-step end the window, whatever its length is."""
        self.micro_step.assign(1)
        self.length.assign(1)

    def restart(self) -> None:
        """Begin a new window."""
        self.micro_step.assign(tf.zeros((), "int64"))
        self.reference_weight.assign(tf.zeros((), self.scalar_dtype))


def _add_to(variable: keras.Variable, amount: tf.Tensor | tf.IndexedSlices) -> None:
    if isinstance(amount, tf.IndexedSlices):
        # What replicas hold for themselves refuses a scatter; the part on one does not.
        local_component(variable.value).scatter_add(amount)
    else:
        variable.value.assign_add(amount)


def after(gradients: Sequence[tf.Tensor | tf.IndexedSlices]) -> list[tf.Tensor]:
    """What has to be there before anything moves: in a graph, all the gradients."""
    return [] if tf.executing_eagerly() else [values_of(g) for g in gradients]
