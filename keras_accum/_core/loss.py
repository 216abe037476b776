"""What a micro-batch weighs: the denominator of its mean loss.

Keras reduces the losses of a batch to one number and keeps no record of what it divided
by. A window needs it: the mean over a window is the mean of the micro-batches' means,
each weighted by its own denominator (samples, tokens that the mask lets through, or the
sum of sample weights, as the loss's `reduction` says).
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import keras
import tensorflow as tf

from .._backend.private.losses import listen_to_reductions
from .._backend.warn import warn


@dataclasses.dataclass(frozen=True)
class LossTerm:
    """One loss of a batch, as Keras reduced it.

    Attributes:
        reduction: Keras's name of how the losses of the samples became one.
        weight: scalar float32 tensor, what their sum was divided by; None if the loss
            function had reduced them itself, so that it cannot be known.
        per_sample: the weight is the number of samples times a constant.
    """

    reduction: str | None
    weight: tf.Tensor | None
    per_sample: bool

    @property
    def summed(self) -> bool:
        """Whether the losses of the samples were added up, or left apart."""
        return self.reduction in ("sum", "none", None)

    @property
    def weighted(self) -> bool:
        """Whether its denominator depends on more than the number of samples."""
        return not (self.per_sample or self.summed or self.weight is None)


@contextlib.contextmanager
def record_terms() -> Iterator[list[LossTerm]]:
    """Record a `LossTerm` for each Keras loss that is computed inside the context."""
    terms: list[LossTerm] = []

    def note(
        values: Any, sample_weight: Any, mask: Any, reduction: Any, loss: Any
    ) -> Any:
        terms.append(describe(values, sample_weight, mask, reduction))
        return loss

    with listen_to_reductions(note):
        yield terms


_parts: ContextVar[bool] = ContextVar("parts", default=False)


@contextlib.contextmanager
def parts_of_a_window() -> Iterator[None]:
    """What is computed inside are losses of parts; no gradient of one reaches `apply`."""
    token = _parts.set(True)
    try:
        yield
    finally:
        _parts.reset(token)


def is_a_part() -> bool:
    """Whether a loss that is computed now is inside of `parts_of_a_window`."""
    return _parts.get()


def describe(values: Any, sample_weight: Any, mask: Any, reduction: Any) -> LossTerm:
    """The term that Keras's reduction of `values` makes, by the rule that it follows."""
    values = tf.convert_to_tensor(values)
    if values.shape.rank == 0:
        return LossTerm(reduction, None, per_sample=False)
    if reduction == "mean_with_sample_weight" and (
        sample_weight is not None or mask is not None
    ):
        return LossTerm(reduction, _total(sample_weight, mask), per_sample=False)
    weight = tf.cast(tf.size(values), "float32")
    if mask is not None:
        # Keras divides by the entries that the mask lets through.
        entries = tf.cast(tf.size(mask), "float32")
        valid = tf.reduce_sum(tf.cast(mask, "float32"))
        weight *= tf.math.divide_no_nan(valid, entries)
    constant = mask is None and values.shape[1:].is_fully_defined()
    return LossTerm(reduction, weight, per_sample=constant)


def batch_weight(
    terms: Sequence[LossTerm], added: Sequence[tf.Tensor], summed: bool
) -> tf.Tensor | None:
    """The weight of a micro-batch whose gradient is that of all its terms together.

    Args:
        terms: the losses of the micro-batch.
        added: what its layers added to them.
        summed: whether the window adds gradients up instead of averaging them.

    Returns:
        A scalar float32 tensor, or None if every micro-batch has to count the same.

    Raises:
        ValueError: if a loss is a sum, and the window takes the mean.
    """
    if summed:
        return None
    check_mean(terms)
    if warn_if_unknown(terms, _ALL_THE_SAME):
        return None
    if added and terms[0].weighted:
        warn(
            "A layer of this model adds a loss (`add_loss`, an activity regularizer), "
            "a mean over samples, and the compiled loss has another denominator: a mask, "
            "sample weights or variable lengths. One gradient for both can be weighted "
            "by one denominator only: the compiled loss's is used. `accumulate(model, "
            "...)` is exact for both."
        )
    return terms[0].weight


def check_mean(terms: Sequence[LossTerm]) -> None:
    """Refuse, or warn of, losses of which a window cannot take one weighted mean."""
    if any(term.summed for term in terms):
        raise ValueError(
            "Received a loss with `reduction='sum'` (or None) in an optimizer with "
            "`reduction='mean'`, which would divide the sum by the window's length. For "
            "the sum over the window, as the large batch has it, write "
            "`AccumOptimizer(..., reduction='sum')`; for the mean, give the loss "
            "`reduction='sum_over_batch_size'`."
        )
    if len(terms) > 1 and any(term.weighted for term in terms):
        warn(
            "This model has several losses, and masks, sample weights or variable "
            "lengths may give each of them another denominator. One gradient for all of "
            "them can be weighted by one denominator only: the first loss's is used. It "
            "is exact if the others are proportional to it from micro-batch to "
            "micro-batch."
        )


_ALL_THE_SAME = (
    "Every micro-batch of a window will count the same, which is the large batch only if "
    "all have the same number of samples. Return one value per sample and let Keras take "
    "the mean, or call `optimizer.apply(gradients, variables, weight=...)`."
)


def warn_if_unknown(terms: Sequence[LossTerm], consequence: str) -> bool:
    """Warn if the denominator of some loss cannot be known; whether that is so."""
    if not terms:
        reason = (
            "no Keras loss was computed (by a `compute_loss` that does without, or in a "
            "model that trains by `add_loss` alone)"
        )
    elif any(term.weight is None for term in terms):
        reason = "a loss function returns a scalar, whose denominator is lost"
    else:
        return False
    warn(
        f"The weight of a micro-batch cannot be known, because {reason}. {consequence}",
    )
    return True


def _total(sample_weight: Any, mask: Any) -> tf.Tensor:
    if sample_weight is None:
        return tf.reduce_sum(tf.cast(mask, "float32"))
    weights = tf.cast(sample_weight, "float32")
    if mask is not None:
        weights *= _with_rank_of(weights, tf.cast(mask, "float32"))
    return tf.reduce_sum(weights)


def _with_rank_of(weights: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    """`mask` with a last axis of 1 added or removed, as Keras matches the two."""
    if weights.shape.rank == mask.shape.rank + 1:
        return keras.ops.expand_dims(mask, -1)
    if mask.shape.rank == weights.shape.rank + 1 and mask.shape[-1] == 1:
        return keras.ops.squeeze(mask, -1)
    return mask
