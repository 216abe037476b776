"""What a model's training loss is made of, found out once, before a step is taken.

The loss is traced with a number of samples that is known, so that a denominator that
does not depend on the data can be told from one that does.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from .._backend import replica
from .._backend.private.layers import call
from .._backend.private.losses import (
    call_losses,
    compute_loss,
    has_own_compute_loss,
    listen_to_reductions,
)
from .._backend.private.models import OfCompilation, scalar_metrics
from .._backend.warn import warn
from .._core.added_losses import learn_kinds
from .._core.loop import rows_of, take
from .._core.loss import (
    LossTerm,
    Terms,
    check_sums,
    describe,
    loss_of_none,
    optimizer_weight,
    warn_of_unknown,
)
from .._core.moving_state import warn_of_moved
from .._core.own_loss import Understanding, nothing_moves, what_is_known
from .._optimizer.wrapper import AccumOptimizer

# Even, and not a size that much else has.
_SAMPLES = 12


class Found(NamedTuple):
    """What was found out about a model's loss and metrics.

    Attributes:
        terms: of its loss; without tensors.
        scalar_metrics: names of metrics that reduce a batch to one number.
        batch_counters: names of further metrics that count a batch of any size as 1.
        lost_logs: names that `compute_metrics` returns, of no metric of the model.
    """

    terms: Terms
    scalar_metrics: tuple[str, ...]
    batch_counters: tuple[str, ...]
    lost_logs: tuple[str, ...]


def loss_weight_function(model: keras.Model) -> Any:
    """What the user has defined to say what a loss of the user's was divided by."""
    return getattr(model, "compute_loss_weight", None)


def find(model: keras.Model, batch: Any) -> Found:
    """The terms of the loss of `model`, as far as they are known before anything runs.

    Raises:
        ValueError: for a compiled loss that leaves one value per sample.
    """
    known = _known(model)
    key = _kind_of(batch)
    if key not in known:
        known[key] = _find(model, batch)
    return known[key]


# By the kind of batch.
_known: OfCompilation[dict[Any, Found]] = OfCompilation(dict)


def _kind_of(batch: Any) -> Any:
    leaves = tf.nest.flatten(batch, expand_composites=False)
    return tuple(
        None if x is None else (type(x), x.dtype, tuple(x.shape[1:])) for x in leaves
    )


def _find(model: keras.Model, batch: Any) -> Found:
    for samples in (_SAMPLES, None):
        try:
            found = _traced(model, batch, samples)
            break
        except Exception:
            if samples is None and not _eager_with_samples(batch):
                raise
    else:
        # Eager code, which cannot be traced, tells by one sample what kinds there are.
        found = _computed(model, take(batch, 0, 1), None)
    if any(term.kind == "apart" for term in found.terms.compiled) and not (
        has_own_compute_loss(model)
    ):
        raise ValueError(
            "Received a loss with `reduction=None`: it leaves one value per sample, "
            "which is no loss to minimise. Give it `reduction='sum_over_batch_size'` "
            "or `reduction='sum'`."
        )
    return found


def _eager_with_samples(batch: Any) -> bool:
    return tf.executing_eagerly() and rows_of(batch) > 0


def _traced(model: keras.Model, batch: Any, samples: int | None) -> Found:
    found: list[Found] = []

    def look(micro_batch: Any) -> None:
        found.append(_computed(model, micro_batch, samples))

    specs = tf.nest.map_structure(
        lambda leaf: _spec(leaf, samples), batch, expand_composites=False
    )
    tf.function(look, autograph=False).get_concrete_function(specs)
    return found[0]


def _spec(leaf: Any, samples: int | None) -> Any:
    if leaf is None or not isinstance(leaf, tf.Tensor):
        return leaf if leaf is None else tf.type_spec_from_value(leaf)
    return tf.TensorSpec([samples, *leaf.shape[1:]], leaf.dtype)


def _computed(model: keras.Model, micro_batch: Any, samples: int | None) -> Found:
    """What a training loss is made of, without an effect on any state of the model."""
    x, y, sample_weight = micro_batch
    reduced: list[tf.Tensor] = []
    compiled: list[LossTerm] = []

    def note(*described: Any) -> tf.Tensor:
        *description, loss = described
        term = describe(*description, rows=samples)
        compiled.append(dataclasses.replace(term, weight=None))
        reduced.append(loss_of_none(loss))
        return reduced[-1]

    with nothing_moves(model) as scope:
        y_pred = call(model, x)
        warn_of_moved(model, scope)
        learn_kinds(model, x)
        with listen_to_reductions(note):
            total = compute_loss(model, x, y, y_pred, sample_weight)
        added = call_losses(model)
        with scalar_metrics(model, samples) as scalars:
            logs = model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        lost = lost_logs(model, logs)
        each = [m for held in model.metrics for m in getattr(held, "metrics", [held])]
        ones = dict.fromkeys(m.name for m in each if _counts_one(m, scope))
    known = Understanding(frozenset(range(len(compiled))), True)
    if loss_weight_function(model) is None:
        arguments = (x, y, y_pred, sample_weight)
        known = what_is_known(model, arguments, compiled, (total, reduced, added))
    kinds = tuple(tf.TensorSpec(value.shape, value.dtype) for value in added)
    terms = Terms(tuple(compiled), kinds, *known)
    return Found(terms, tuple(scalars), tuple(n for n in ones if n not in scalars), lost)


def _counts_one(metric: keras.metrics.Metric, scope: keras.StatelessScope) -> bool:
    """Whether a metric has counted 1 for all of a batch, which has more samples."""
    for variable in metric.variables:
        value = scope.get_current_value(variable)
        if tf.is_symbolic_tensor(value) and value.op.type.startswith("Add"):
            added = map(tf.get_static_value, value.op.inputs)
            if any(each is not None and np.all(each == 1.0) for each in added):
                return True
    return False


def lost_logs(model: keras.Model, logs: Any) -> tuple[str, ...]:
    """The names in what `compute_metrics` has returned that are of no metric."""
    own = type(model).compute_metrics is not keras.Model.compute_metrics
    if not own or not isinstance(logs, dict):
        return ()
    known = model.get_metrics_result()
    return tuple(name for name in logs if name not in known)


def accumulates(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether an optimizer takes a batch for a micro-batch of a window of its own."""
    return isinstance(optimizer, AccumOptimizer)


def adds_up(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether an optimizer adds batches up, so that a regularizer is to count once."""
    return accumulates(optimizer) and optimizer.reduction == "sum"


def check_terms(model: keras.Model, terms: Terms) -> None:
    """Refuse, or warn of, what this step, and a further window, cannot have exactly."""
    if loss_weight_function(model) is not None:
        return
    if not accumulates(model.optimizer):
        warn_of_unknown(terms, model)
    elif model.optimizer.reduction == "sum":
        check_sums(terms, model)
    else:
        optimizer_weight(terms, None, model)


def warn_of_scalar_metrics(
    model: keras.Model, names: Sequence[str], two_pass: bool
) -> None:
    """Say whose value will not be that of the large batch, and what would be."""
    way_out = "Return one value per sample"
    if not two_pass:
        whole = "the whole batch" if replica.count() == 1 else "all samples of a replica"
        way_out += f"; or pass `two_pass=True`, with which metrics see {whole}"
    part = "replica" if two_pass else "micro-batch"
    warn(
        f"The metric {', '.join(map(repr, names))} returns one number for a batch. It is "
        f"computed for each {part}, and the mean of those is shown, not the value of "
        f"the batch. {way_out}.",
        about=model,
    )


def warn_of_batch_counters(model: keras.Model, names: Sequence[str]) -> None:
    """Say which metrics count a micro-batch of one sample as much as one of a hundred."""
    warn(
        f"The metric {', '.join(map(repr, names))} counts each micro-batch as 1, as "
        "`keras.metrics.Mean` does when it is given one number. The mean of micro-batches "
        "is shown, not the value of the batch. Give `update_state` one value per sample; "
        "or pass `sample_weight=`, the number of samples.",
        about=model,
    )


def warn_of_lost_logs(model: keras.Model, names: Sequence[str]) -> None:
    """Say what `compute_metrics` returns in vain."""
    warn(
        f"`compute_metrics` of this model returns {', '.join(map(repr, names))}, which is "
        "no metric of the model: a step that accumulates does not show it. Keep it in a "
        "`keras.metrics.Metric` that the model has.",
        about=model,
    )


def window_weight(
    terms: Terms, rows: tf.Tensor, totals: dict[int, tf.Tensor]
) -> tf.Tensor:
    """What a further window, in the optimizer, has to weigh this batch by."""
    if not terms.weigh_by_first:
        return rows
    first = terms.compiled[0]
    return totals[0] if first.per_sample is None else rows * first.per_sample
