"""The kinds of terms that a training loss has, and what a micro-batch weighs.

Keras adds up four kinds of terms, and keeps no record of which is which:

    mean           Σ losses / denominator: samples, tokens that the mask lets through, or
                   the sum of sample weights, as the loss's `reduction` says
    sum            Σ losses (`reduction="sum"`, and `add_loss` of more than one value, or
                   of one that is a sum over samples: `added_losses` finds out)
    regularizer    of the weights alone; the same for every micro-batch
    unknown        a scalar, reduced by a loss function or layer itself: taken for a mean
                   over the samples

The large batch has, over its micro-batches i, Σ w_i L_i / Σ w_i of a mean with denominators
w_i, Σ L_i of a sum, and R of a regularizer. A training step that splits its batch gives
each term what it needs (`Terms.factor`). An optimizer gets one gradient for all terms of a
micro-batch, and can weigh it by one number only (`optimizer_weight`).
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import keras
import tensorflow as tf

from .._backend.private.losses import has_own_compute_loss, listen_to_reductions
from .._backend.warn import warn


@dataclasses.dataclass(frozen=True)
class LossTerm:
    """One Keras loss of a batch.

    Attributes:
        kind: what Keras made of the losses of the samples.
        weight: scalar tensor, the denominator of a mean; None for other kinds.
        per_sample: how many entries of the denominator each sample has, where that is the
            same for all samples; None if it depends on the data.
    """

    kind: Literal["mean", "sum", "apart", "unknown"]
    weight: tf.Tensor | None = None
    per_sample: float | None = None

    @property
    def varies(self) -> bool:
        """Whether the denominator of a mean depends on more than the number of samples."""
        return self.kind == "mean" and self.per_sample is None


def describe(
    values: Any, sample_weight: Any, mask: Any, reduction: Any, *, rows: int | None = None
) -> LossTerm:
    """The term that Keras's reduction of `values` makes, by the rule that it follows.

    Args:
        values: the losses of the samples, as Keras's `reduce_weighted_values` gets them.
        sample_weight: likewise.
        mask: likewise.
        reduction: likewise.
        rows: the number of samples, where it is known when tracing.
    """
    values = tf.convert_to_tensor(values)
    if values.shape.rank == 0:
        return LossTerm("unknown")
    if reduction in (None, "none"):
        return LossTerm("apart")
    if reduction == "sum":
        return LossTerm("sum")
    dtype = values.dtype if values.dtype.size >= 4 else tf.float32
    if reduction == "mean_with_sample_weight" and (
        sample_weight is not None or mask is not None
    ):
        return LossTerm("mean", _total(sample_weight, mask, dtype))
    # Counted in int64: float32 loses count beyond 2^24.
    weight = tf.cast(tf.size(values, out_type=tf.int64), dtype)
    if mask is not None:
        # Keras divides by the entries that the mask lets through.
        entries = tf.cast(tf.size(mask, out_type=tf.int64), dtype)
        weight *= tf.math.divide_no_nan(_count(mask, dtype), entries)
    each = values.shape[1:].num_elements()
    same = mask is None and each is not None and values.shape[0] == rows
    return LossTerm("mean", weight, float(each) if same else None)


def _count(mask: Any, dtype: tf.DType) -> tf.Tensor:
    return tf.cast(tf.math.count_nonzero(mask, dtype=tf.int64), dtype)


def _total(sample_weight: Any, mask: Any, dtype: tf.DType) -> tf.Tensor:
    if sample_weight is None:
        return _count(mask, dtype)
    weights = tf.cast(sample_weight, dtype)
    if mask is not None:
        weights *= _with_rank_of(weights, tf.cast(mask, dtype))
    return tf.reduce_sum(weights)


def _with_rank_of(weights: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    """`mask` with a last axis of 1 added or removed, as Keras matches the two."""
    if weights.shape.rank == mask.shape.rank + 1:
        return keras.ops.expand_dims(mask, -1)
    if mask.shape.rank == weights.shape.rank + 1 and mask.shape[-1] == 1:
        return keras.ops.squeeze(mask, -1)
    return mask


def loss_of_none(loss: tf.Tensor) -> tf.Tensor:
    """`loss`, but 0 in place of the empty vector that Keras gives for no values."""
    return tf.reduce_sum(loss) if loss.shape.rank == 1 and loss.shape[0] == 0 else loss


@contextlib.contextmanager
def record_terms(rows: int | None = None) -> Iterator[list[LossTerm]]:
    """Record a `LossTerm` for each Keras loss that is computed inside the context."""
    terms: list[LossTerm] = []

    def note(*reduced: Any) -> tf.Tensor:
        *described, loss = reduced
        terms.append(describe(*described, rows=rows))
        return loss_of_none(loss)

    with listen_to_reductions(note):
        yield terms


class Terms(NamedTuple):
    """All terms of a model's training loss.

    Attributes:
        compiled: the Keras losses, in the order in which they are computed.
        added: what layers passed to `add_loss`.
        understood: indices of those of `compiled` that the loss is a plain sum of; all of
            them, but for a `compute_loss` of the user's (`own_loss.understand`).
        complete: whether nothing else is in the loss.
        adds_up: whether it adds up over micro-batches, if all terms are sums.
    """

    compiled: tuple[LossTerm, ...]
    added: tuple[Any, ...]
    understood: frozenset[int]
    complete: bool
    adds_up: bool = True

    @property
    def vectors(self) -> list[Any]:
        """What was added that is a sum over samples."""
        return [value for value in self.added if value.shape.rank != 0]

    @property
    def scalars(self) -> list[Any]:
        """What was added that is a mean over samples, or taken for one."""
        return [value for value in self.added if value.shape.rank == 0]

    @property
    def varying(self) -> list[int]:
        """Indices of the means whose denominators have to be summed before."""
        return [i for i in sorted(self.understood) if self.compiled[i].varies]

    @property
    def weigh_by_first(self) -> bool:
        """Whether a batch weighs what its first loss divides by; else, its samples."""
        kinds = [term.kind for term in self.compiled]
        return self.complete and kinds[:1] == ["mean"] and "unknown" not in kinds

    def factor(
        self, index: int, term: LossTerm, inverse: tf.Tensor, totals: dict[int, tf.Tensor]
    ) -> Any:
        """What loss `index` of a micro-batch is multiplied by, in a split batch.

        Args:
            index: of the loss.
            term: the loss, as this micro-batch has it.
            inverse: the samples of the batch over those of the micro-batch.
            totals: the denominators of the batch, of those in `varying`.
        """
        if index not in self.understood:
            return 1.0
        if self.compiled[index].kind == "sum":
            return inverse
        if index not in totals:
            return 1.0
        weight = tf.cast(term.weight, inverse.dtype)
        return inverse * tf.math.divide_no_nan(weight, totals[index])


# --- What one gradient, of all terms of a micro-batch, can be weighted by.


def optimizer_weight(terms: Terms, rows: Any, owner: Any) -> tf.Tensor:
    """The weight of a micro-batch in a window that takes the weighted mean.

    Args:
        terms: of its loss.
        rows: its number of samples.
        owner: the model, of which each thing is said once.

    Raises:
        ValueError: if a compiled loss is a sum.
    """
    refuse_sums(terms)
    if not terms.complete:
        _warn_of_users_loss(owner)
        return rows
    if terms.vectors:
        sums_alone = not (terms.compiled or terms.scalars)
        warn(_VECTORS + (_SUM_REMEDY if sums_alone else _STEP_REMEDY), about=owner)
    if terms.scalars and any(term.varies for term in terms.compiled[:1]):
        warn(_ADDED, about=owner)
    if any(term.kind == "unknown" for term in terms.compiled):
        warn(f"{_SCALAR} {_SCALAR_REMEDY}", about=owner)
    else:
        warn_of_several(terms, owner)
    return terms.compiled[0].weight if terms.weigh_by_first else rows


def check_sums(terms: Terms, owner: Any) -> None:
    """Refuse, or warn of, what a window that adds up cannot take.

    Raises:
        ValueError: if a compiled loss is a mean.
    """
    if not terms.complete:
        _warn_of_users_loss(owner)
    elif any(term.kind == "mean" for term in terms.compiled):
        raise ValueError(
            "Received a loss that is a mean in an optimizer with `reduction='sum'`, which "
            "would add up the means of the micro-batches. Leave `reduction` out: "
            "`AccumOptimizer(..., reduction='mean')` takes their weighted mean; or give "
            "the loss `reduction='sum'`."
        )
    elif any(term.kind == "unknown" for term in terms.compiled):
        warn(_SCALAR_ADDED_UP, about=owner)
    elif terms.scalars:
        warn(_ADDED_TO_SUM, about=owner)
    elif not terms.adds_up:
        warn(_CONSTANT, about=owner)


def refuse_sums(terms: Terms) -> None:
    """Refuse a compiled sum where a weighted mean is taken."""
    if any(terms.compiled[i].kind in ("sum", "apart") for i in terms.understood):
        raise ValueError(
            "Received a loss with `reduction='sum'` (or None) in an optimizer with "
            "`reduction='mean'`, which would divide the sum by the window's length. For "
            "the sum over the window, as the large batch has it, write "
            "`AccumOptimizer(..., reduction='sum')`; for the mean, give the loss "
            "`reduction='sum_over_batch_size'`."
        )


def warn_of_several(terms: Terms, owner: Any) -> None:
    """Warn of several losses whose denominators may differ."""
    if len(terms.compiled) > 1 and any(term.varies for term in terms.compiled):
        warn(_SEVERAL, about=owner)


def warn_of_unknown(terms: Terms, owner: Any) -> None:
    """Warn of what a step that splits its batch cannot know."""
    if not terms.complete:
        _warn_of_users_loss(owner)
    elif any(term.kind == "unknown" for term in terms.compiled):
        warn(f"{_SCALAR} {_SCALAR_REMEDY}", about=owner)


def warn_of_coupled(owner: Any) -> None:
    """Warn of a Keras loss, called in a loop, that is not one of its samples alone."""
    warn(_COUPLED_IN_A_LOOP, about=owner)


def warn_of_unsaid(
    optimizer: Any, kinds: Sequence[str], variables: Sequence[keras.Variable]
) -> None:
    """Warn of a micro-batch, in a loop of the user's, of which nothing was said.

    Args:
        optimizer: of which each thing is said once.
        kinds: of the Keras losses that were differentiated since the last `apply`.
        variables: that are trained.
    """
    if optimizer.reduction == "mean":
        warn(_SUM_IN_A_LOOP if "sum" in kinds else _UNSAID, about=optimizer)
        return
    if "mean" in kinds:
        warn(_MEAN_IN_A_LOOP, about=optimizer)
    if any(getattr(v, "regularizer", None) is not None for v in variables):
        warn(_REGULARIZERS_IN_A_LOOP, about=optimizer)


def warn_of_a_loop(
    optimizer: Any, terms: Sequence[LossTerm], added: Sequence[str], scaled: bool
) -> None:
    """Warn of what else is in the loss of a loop, beside one Keras loss.

    Args:
        optimizer: of which each thing is said once.
        terms: the Keras losses.
        added: the kinds of what layers add.
        scaled: whether the Keras loss counts differently in each micro-batch.
    """
    if scaled:
        warn(_SCALED_IN_A_LOOP, about=optimizer)
    if optimizer.reduction == "sum":
        wrong = any(kind != "sum" for kind in added)
    else:
        varies = any(term.varies for term in terms)
        wrong = any(kind != "mean" or varies for kind in added)
    if wrong:
        warn(_ADDED_IN_A_LOOP[optimizer.reduction], about=optimizer)


def _warn_of_users_loss(owner: Any) -> None:
    own = isinstance(owner, keras.Model) and has_own_compute_loss(owner)
    warn(_OWN_LOSS if own else _COUPLED, about=owner)


_COUPLED = (
    "A loss of this model is not made of losses of its samples alone: its values depend on "
    "the batch as a whole, are not one or more of each sample, or are reduced by the loss "
    "itself. Micro-batches weigh by their samples. Return values of each sample from "
    "`call`, and let Keras reduce them; or use `accumulate(model, ..., two_pass=True)`, "
    "which is exact for any loss of the predictions."
)
_COUPLED_IN_A_LOOP = (
    "A Keras loss of this loop is not made of losses of its samples alone: its values "
    "depend on the batch as a whole, are not one or more of each sample, or are reduced by "
    "the loss itself. Micro-batches do not add up to the large batch. Return values of "
    "each sample from `call`, and let Keras reduce them; or let Keras's own `train_step` "
    "compute it, with `accumulate(model, ..., two_pass=True)`, which is exact for any loss "
    "of the predictions."
)
_UNSAID = (
    "The weight of a micro-batch is not known: no Keras loss, or more than one, was "
    "differentiated since the last `apply`. Each counts as 1, which is the large batch if "
    "all divide by the same. Else pass what the loss divides by: "
    "`optimizer.apply(gradients, variables, weight=...)`."
)
_SUM_IN_A_LOOP = (
    "A Keras loss with `reduction='sum'` was differentiated since the last `apply`. This "
    "optimizer takes the mean over the micro-batches. For the sum, as the large batch has "
    "it, write `AccumOptimizer(..., reduction='sum')`. If the loss is divided afterwards, "
    "pass by what: `optimizer.apply(gradients, variables, weight=...)`."
)
_MEAN_IN_A_LOOP = (
    "A Keras loss that is a mean was differentiated since the last `apply`. This "
    "optimizer, with `reduction='sum'`, adds up the means of the micro-batches. Give the "
    "loss `reduction='sum'`; or leave `reduction` out of `AccumOptimizer`, which takes "
    "their weighted mean. If the loss is multiplied by its samples, it is a sum: say so by "
    "`optimizer.apply(gradients, variables, weight=1)`."
)
_REGULARIZERS_IN_A_LOOP = (
    "Weights have regularizers, and this optimizer, with `reduction='sum'`, adds up. If "
    "the loss of this loop contains `model.losses`, they count in each micro-batch, where "
    "the large batch has them once. Take the loss from `model.compute_loss`, in which they "
    "count once in a window. If they are not in the loss, say so by "
    "`optimizer.apply(gradients, variables, weight=1)`."
)
_SCALED_IN_A_LOOP = (
    "The Keras loss of this loop is multiplied by something else in each micro-batch, as "
    "in `loss * samples` or `sqrt(loss)`. A window weighs a micro-batch by what its Keras "
    "loss was divided by, which is not the large batch then. Pass what the loss that you "
    "differentiate is divided by: `optimizer.apply(gradients, variables, weight=...)`; or "
    "let Keras's own `train_step` compute it, with `accumulate(model, ..., "
    "two_pass=True)`, which is exact for any loss of the predictions."
)
_ADDED_IN_A_LOOP = {
    "mean": (
        "Layers add losses in this loop (`add_loss`, an activity regularizer), and the "
        "window weighs them as the Keras loss: by samples, as a mean over samples. It is "
        "not the large batch if they are sums, or if masks or sample weights give the "
        "Keras loss another denominator. `accumulate(model, ...)` is exact for both. If "
        "they are right as they are, say so by `optimizer.apply(gradients, variables, "
        "weight=...)`, with what the Keras loss is divided by."
    ),
    "sum": (
        "Layers add losses in this loop (`add_loss`, an activity regularizer) that may be "
        "means over samples, and this optimizer, with `reduction='sum'`, adds up the means "
        "of the micro-batches. `accumulate(model, ...)` is exact. If they are sums over "
        "samples, say so by `optimizer.apply(gradients, variables, weight=1)`."
    ),
}
_SEVERAL = (
    "This model has several losses, and masks, sample weights or variable lengths may give "
    "each of them another denominator. One gradient for all of them can be weighted by one "
    "denominator only: the first loss's is used. It is exact if the others are "
    "proportional to it from micro-batch to micro-batch. `accumulate(model, ...)` is exact "
    "for all."
)
_OWN_LOSS = (
    "This model has a `compute_loss` of its own, and what it divides by cannot be known. "
    "Micro-batches weigh by their samples, a mean over samples. "
    "For another denominator, define `compute_loss_weight(self, x, y, y_pred, "
    "sample_weight)` on the model; for any loss of the predictions, "
    "`accumulate(model, ..., two_pass=True)` is exact."
)
_SCALAR = (
    "A loss function returns a scalar, and what it divides by cannot be known. "
    "Micro-batches weigh by their samples, a mean over samples."
)
_SCALAR_REMEDY = (
    "Return one value per sample and let Keras take the mean; or use `accumulate(model, "
    "..., two_pass=True)`, which is exact for any loss of the predictions."
)
_SCALAR_ADDED_UP = (
    "A loss function returns a scalar, which an optimizer with `reduction='sum'` adds up "
    "over the micro-batches. It is the large batch if it is a sum over samples, and there "
    "are no sample weights: of a scalar, Keras takes the mean by them. Return one value "
    "per sample, from a loss with `reduction='sum'`."
)
_CONSTANT = (
    "The `compute_loss` of this model adds something to sums over samples that does not "
    "grow with them, such as a penalty on weights. An optimizer with `reduction='sum'` "
    "adds it up over the micro-batches. Give the weights a `kernel_regularizer`, which "
    "counts once in a window; or use `accumulate(model, ...)` and a plain optimizer."
)
_VECTORS = (
    "A layer of this model passes to `add_loss` what adds up over samples: several values, "
    "or their sum. The optimizer takes it for a mean. "
)
_STEP_REMEDY = "`accumulate(model, ...)` is exact for both."
_SUM_REMEDY = "Write `AccumOptimizer(..., reduction='sum')`."
_ADDED = (
    "A layer of this model adds a loss (`add_loss`, an activity regularizer), a mean over "
    "samples, and the compiled loss has another denominator: a mask, sample weights or "
    "variable lengths. One gradient for both can be weighted by one denominator only: the "
    f"compiled loss's is used. {_STEP_REMEDY}"
)
_ADDED_TO_SUM = (
    "A layer of this model adds a loss (`add_loss`, an activity regularizer), a mean over "
    "samples, which an optimizer with `reduction='sum'` adds up over the micro-batches. "
    f"{_STEP_REMEDY}"
)
