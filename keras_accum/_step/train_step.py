"""One training step of a Keras model over the micro-batches of a batch.

The loss of the batch is Σ_o λ_o (Σ_i w_oi L_oi / W_o) + Σ_i S_i + R, over the losses o of
the model and the micro-batches i: L_oi is a mean with denominator w_oi, W_o = Σ_i w_oi, and
S_i is a sum. Micro-batch i with n_i of the n samples computes

    L_i = Σ_o λ_o f_oi L_oi + (n / n_i) S_i + R,    f_oi = (n / n_i) (w_oi / W_o)

so that Σ_i (n_i / n) L_i is the loss of the batch, and regularisation R counts once.
Where a loss has one denominator per sample, f is 1 and nothing has to be known before.
Else the W_o come from a pass before, of which only the masks are used: the rest of it is
pruned from the graph (but for recurrent layers, outside of XLA), and paid in eager mode.

On several replicas, n and the W_o are sums over all of them, and the gradients of each
are its part of the sum above: they are reduced once, then clipped and applied. In an
`AccumOptimizer` both are each replica's own; it reduces at the end of its window.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from .._backend import replica
from .._backend.private.layers import call, flatten_layers, is_stateful
from .._backend.private.losses import (
    compute_loss,
    has_own_compute_loss,
    listen_to_reductions,
    multiply_summed_losses,
    tracked_apart,
    undivided_losses,
)
from .._backend.private.models import build_for
from .._backend.warn import warn
from .._batch_norm import begin_windows, check_statistics, forget_calls, pool_calls
from .._core.accumulate import BatchGradients, LossFunction, value_and_gradients
from .._core.gradients import scalar_dtype, sum_dtype
from .._core.loop import (
    Split,
    check_batch,
    compiles_in_parts,
    for_each_micro_batch,
    leaves,
    rows_of,
)
from .._core.loss import (
    Terms,
    describe,
    loss_of_none,
    record_terms,
)
from .._core.own_loss import nothing_moves
from .._core.regularizers import is_regularized, regularizers_times
from .._optimizer.accumulator import Weight
from .._optimizer.arguments import check_step_optimizer
from .._optimizer.averages import apply_reduced, overwrite_by_averages
from .observer import note_update, observer_of
from .settings import Settings
from .terms import (
    accumulates,
    adds_up,
    check_terms,
    find,
    loss_weight_function,
    warn_of_batch_counters,
    warn_of_lost_logs,
    warn_of_scalar_metrics,
    window_weight,
)
from .two_pass import accumulate_coupled

_BAD_WEIGHT = (
    "A sample weight is NaN or infinite. Sample weights must be finite numbers: replace "
    "it, by 0 to leave the sample out."
)


def train_step(model: keras.Model, data: Any, settings: Settings) -> dict[str, Any]:
    """Update `model` once with `data`, one micro-batch in memory at a time.

    Args:
        model: a compiled model.
        data: a batch as `fit` passes it to `Model.train_step`.
        settings: how to take it apart.

    Returns:
        The metrics of the model, by name.
    """
    apply = functools.partial(update, model)
    if compiles_in_parts(model):
        apply = tf.function(apply, jit_compile=True, autograph=False)
    apply(compute_gradients(model, data, settings))
    return model.get_metrics_result()


def compute_gradients(
    model: keras.Model, data: Any, settings: Settings
) -> BatchGradients:
    """All of a training step but its update: the loss, the gradients, the metrics."""
    replica.check_compilable()
    check_statistics(model)
    check_states(model, settings.split, data)
    check_step_optimizer(model.optimizer)
    build_for(model, data)
    batch, checks = check_batch(keras.utils.unpack_x_y_sample_weight(data))
    checks += _check_weights(batch[2])
    optimizer, first = model.optimizer, True
    if accumulates(optimizer):
        optimizer.enable_scaling_if_float16(model)
        first = tf.equal(optimizer.micro_step, 0)
    accumulate_parts = accumulate_coupled if settings.two_pass else accumulate_model
    jit_compile = compiles_in_parts(model) or None
    # In a graph, operations wait for the checks only if told to.
    with tf.control_dependencies(checks), undivided_losses():
        begin_windows(model, first)
        with tracked_apart(model) as track:
            found = accumulate_parts(model, batch, settings.split, jit_compile)
        with tf.control_dependencies([] if tf.executing_eagerly() else [found.loss]):
            track(found.loss, found.parts, rows_of(batch))
    return found


def check_states(model: keras.Model, split: Split, data: Any) -> None:
    """Refuse layers that keep a state for each row of a batch, which is to be split.

    Raises:
        ValueError: for a stateful RNN.
    """
    for layer in flatten_layers(model):
        if is_stateful(layer) and not _is_one(split, data):
            raise ValueError(
                f"The layer '{layer.name}' has `stateful=True`: it keeps a state for each "
                "row of its batch, and goes on from it. A step that splits its batch "
                "would have a micro-batch go on from the states of other rows. Use "
                "`stateful=False`, or accumulate in the optimizer, with `AccumOptimizer`: "
                "there, each batch that `fit` gets is a micro-batch."
            )


def _check_weights(sample_weight: Any) -> list[tf.Tensor]:
    return [
        tf.debugging.check_numerics(weight, _BAD_WEIGHT)
        for weight in leaves(sample_weight)
        if weight is not None and weight.dtype.is_floating
    ]


def accumulate_model(
    model: keras.Model, batch: Any, split: Split, jit_compile: bool | None
) -> BatchGradients:
    """The loss and the gradients of `model` for `batch`; its metrics are updated."""
    terms, scalar_metrics, batch_counters, lost_logs = find(model, batch)
    check_terms(model, terms)
    if scalar_metrics and not _is_one(split, batch):
        warn_of_scalar_metrics(model, scalar_metrics, two_pass=False)
    if batch_counters and not split.is_even(rows_of(batch)):
        warn_of_batch_counters(model, batch_counters)
    if lost_logs:
        warn_of_lost_logs(model, lost_logs)
    rows, totals = _denominators(model, batch, split, terms, jit_compile)
    hook = loss_weight_function(model)
    found = value_and_gradients(
        _loss_function(model, terms, rows, totals),
        model.trainable_weights,
        batch,
        split,
        scale_loss=model.optimizer.scale_loss,
        parts=len(terms.compiled),
        divisor_of=_divisor(model, rows),
        jit_compile=jit_compile,
        observer=observer_of(model),
    )
    if hook is None:
        weight = window_weight(terms, rows, totals)
        found = found._replace(weight=weight, rest=_rest(model, terms, rows))
    elif _divides_together(model):
        # Losses are logged by samples, on each replica by its own.
        own = found.weight * tf.math.divide_no_nan(rows, found.divisor)
        own = tf.math.divide_no_nan(own, tf.cast(rows_of(batch), own.dtype))
        parts = [part * own for part in found.parts]
        found = found._replace(loss=found.loss * own, parts=parts)
    return found


def _rest(model: keras.Model, terms: Terms, rows: tf.Tensor) -> tf.Tensor | float:
    """What the batch counts by in a window whose losses all weigh nothing."""
    if terms.added:
        return rows
    regularized = any(v.regularizer is not None for v in model.trainable_variables)
    return 1.0 if regularized else 0.0


def _is_one(split: Split, batch: Any) -> bool:
    """Whether the batch is known to make one micro-batch."""
    rows = rows_of(batch)
    size = split.micro_batch_size
    return split.accum_steps == 1 or (
        size is not None and isinstance(rows, int) and rows <= size
    )


def _divides_together(model: keras.Model) -> bool:
    """Whether gradients are divided by what all replicas hold, and reduced at once."""
    return replica.count() > 1 and not accumulates(model.optimizer)


def _divisor(
    model: keras.Model, rows: tf.Tensor
) -> Callable[[tf.Tensor], tf.Tensor] | None:
    """From the weight of a replica's micro-batches to what to divide its gradients by."""
    if replica.count() == 1:
        return None
    if adds_up(model.optimizer):
        return None
    if accumulates(model.optimizer):
        # As Keras's losses make them: the mean, divided by the number of replicas.
        return lambda weight: weight * replica.count()
    if loss_weight_function(model) is None:
        return lambda _: rows
    return lambda weight: replica.sum_over_replicas([weight])[0]


def update(model: keras.Model, found: BatchGradients) -> None:
    """Apply the gradients of a batch; an `AccumOptimizer` weighs them by it."""
    replica.check_compilable()
    if not model.trainable_weights:
        warn("The model does not have any trainable weights.")
        return
    # What does not read the gradients, as the count of updates, waits for them too.
    there = [g for g in (found.loss, *found.gradients) if g is not None]
    with tf.control_dependencies([] if tf.executing_eagerly() else there):
        _apply(model, found)


def _apply(model: keras.Model, found: BatchGradients) -> None:
    optimizer, variables = model.optimizer, model.trainable_weights
    gradients = _zeros_where_others_have_gradients(found.gradients, variables)
    if accumulates(optimizer):
        weight = Weight(found.weight, tf.convert_to_tensor(found.rest))
        optimizer.apply_weighted(gradients, variables, weight, found.observed)
        return
    reduced = note_update(model, found, gradients)
    apply_reduced(optimizer, reduced, variables)
    replica.in_cross_replica(lambda: overwrite_by_averages(optimizer))


def _zeros_where_others_have_gradients(
    gradients: list[tf.Tensor | None], variables: list[keras.Variable]
) -> list[tf.Tensor | None]:
    """`gradients`, with zeros in place of None where another replica has a gradient.

    In eager mode a replica without any sample has none. In a graph all trace the same.
    """
    if replica.count() == 1 or not tf.executing_eagerly():
        return gradients
    given = tf.constant([float(g is not None) for g in gradients])
    (somewhere,) = replica.sum_over_replicas([given])
    return [
        tf.zeros(v.shape, sum_dtype(v, None)) if g is None and anywhere else g
        for g, v, anywhere in zip(gradients, variables, somewhere.numpy() > 0)
    ]


def _loss_function(
    model: keras.Model, terms: Terms, rows: tf.Tensor, totals: dict[int, tf.Tensor]
) -> LossFunction:
    """From a micro-batch and its samples to its loss, its weight, and its loss terms."""
    hook = loss_weight_function(model)
    share = _share_of_regularizers(model, rows)
    # What layers add is in the loss as it is, whatever the compiled losses are.
    keras_adds_up = terms.complete or not has_own_compute_loss(model)

    def loss_of(micro_batch: Any, micro_rows: tf.Tensor) -> Any:
        x, y, sample_weight = micro_batch
        inverse = rows / tf.cast(micro_rows, rows.dtype)
        values: list[tf.Tensor] = []

        def adjust(*reduced: Any) -> tf.Tensor:
            *described, loss = reduced
            loss = loss_of_none(loss)
            if hook is None:
                term = describe(*described)
                factor = terms.factor(len(values), term, inverse, totals)
                loss *= tf.cast(factor, loss.dtype)
            # A loss that is left unreduced, for `compute_loss_weight`, is logged as 0.
            values.append(loss if loss.shape.rank == 0 else tf.zeros((), loss.dtype))
            return loss

        forget_calls(model)
        y_pred = call(model, x)
        if terms.vectors and keras_adds_up and hook is None:
            multiply_summed_losses(model, inverse)
        with listen_to_reductions(adjust), regularizers_times(model, share):
            loss = compute_loss(model, x, y, y_pred, sample_weight)
        model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        pool_calls(model)
        return loss, hook and hook(x, y, y_pred, sample_weight), values

    return loss_of


def _share_of_regularizers(model: keras.Model, rows: tf.Tensor) -> tf.Tensor | None:
    """The factor on this replica's regularizers, if a window is to count them once.

    It is the replica's share of the samples: without samples it has no micro-batch.
    """
    optimizer = model.optimizer
    if not adds_up(optimizer) or not is_regularized(model):
        return None
    (all_rows,) = replica.sum_over_replicas([rows])
    share = tf.math.divide_no_nan(rows, all_rows)
    return tf.where(optimizer.is_first, share, tf.zeros_like(share))


def _denominators(
    model: keras.Model,
    batch: Any,
    split: Split,
    terms: Terms,
    jit_compile: bool | None,
) -> tuple[tf.Tensor, dict[int, tf.Tensor]]:
    """The n above, and W_o for the terms that need it, by their index."""
    dtype = scalar_dtype(model.trainable_variables)
    rows = tf.cast(rows_of(batch), dtype)
    varying = terms.varying if loss_weight_function(model) is None else []

    def step(micro_batch: Any, rows: tf.Tensor, totals: Any) -> Any:
        x, y, sample_weight = micro_batch
        with nothing_moves(model):
            y_pred = call(model, x)
            with record_terms() as recorded:
                compute_loss(model, x, y, y_pred, sample_weight)
        weights = [tf.cast(recorded[i].weight, dtype) for i in varying]
        return [total + weight for total, weight in zip(totals, weights)]

    totals = [tf.zeros((), dtype)] * len(varying)
    if varying:
        totals = for_each_micro_batch(step, batch, totals, split, jit_compile)
    if _divides_together(model):
        rows, *totals = replica.sum_over_replicas([rows, *totals])
    return rows, dict(zip(varying, totals))
