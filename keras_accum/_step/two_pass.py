"""A step for losses that couple the samples of a batch, at the memory of a micro-batch.

A contrastive loss, a Dice loss over the batch or a ranking loss is no mean over samples:
no weighting of micro-batches gives it. But it depends on the samples through their
predictions alone, which are small, and perhaps through losses that layers add in their
call, which are numbers. Both are its arguments here. So:

    1. forward: the arguments, of all micro-batches, without a tape;
    2. the loss of the whole batch, and its gradient by the arguments;
    3. forward again with a tape, each micro-batch fed its part of that gradient.

As gradient caching does for retrieval (Gao et al., 2021, "Scaling Deep Contrastive
Learning Batch Size under Memory Limited Setup"). The first pass runs on a copy of the
state: the second draws the same random numbers, and moves statistics once.

On several replicas, the predictions, targets and sample weights of all are gathered on
each before 2, once per step: the loss sees the effective batch. It costs their memory,
times the number of replicas, and the loss is computed on each replica.
"""

from typing import Any

import keras
import tensorflow as tf

from .._backend import replica
from .._backend.kept_tensors import KeptTensors
from .._backend.private.layers import (
    call,
    flatten_layers,
    keras_mask,
    with_keras_mask,
)
from .._backend.private.losses import (
    call_losses,
    compute_loss,
    forget_call_losses,
    has_own_compute_loss,
    listen_to_reductions,
)
from .._backend.private.models import scalar_metrics
from .._batch_norm import forget_calls, pool_calls
from .._core.accumulate import BatchGradients, value_and_gradients
from .._core.added_losses import learn_kinds
from .._core.gradients import add_or_none, scalar_dtype
from .._core.loop import Split, for_each_micro_batch, rows_of, take
from .._core.loss import LossTerm, describe, loss_of_none
from .._core.moving_state import warn_of_moved
from .._core.regularizers import regularizers_times
from .observer import observer_of
from .terms import (
    accumulates,
    adds_up,
    check_terms,
    find,
    loss_weight_function,
    lost_logs,
    warn_of_lost_logs,
    warn_of_scalar_metrics,
)


def accumulate_coupled(
    model: keras.Model, batch: Any, split: Split, jit_compile: bool | None
) -> BatchGradients:
    """The loss and the gradients of `model` for `batch`, whatever its loss couples.

    On several replicas the loss sees the samples of all of them. The gradients of each
    are its part of a sum over replicas.
    """
    x, y, sample_weight = batch
    variables, replicas = model.trainable_weights, replica.count()
    optimizer = model.optimizer
    kept = KeptTensors(flatten_layers(model))
    y_pred, sums, kinds = predict(model, x, split, jit_compile)
    seen = _of_all_replicas(model, x, y, y_pred, sample_weight)
    outputs = tf.nest.flatten(seen[2])
    dtype = scalar_dtype(variables)
    own_rows, all_rows = rows_of(batch), tf.cast(rows_of(outputs), dtype)
    # What layers add is a mean over samples if it is one value, else a sum.
    sums = replica.sum_over_replicas(sums)
    is_mean = [value.shape.rank == 0 for value in kinds]
    added = [s / tf.cast(all_rows, s.dtype) if m else s for s, m in zip(sums, is_mean)]
    parts: list[tf.Tensor] = []
    compiled: list[LossTerm] = []

    def note(*reduced: Any) -> tf.Tensor:
        *described, part = reduced
        compiled.append(describe(*described))
        parts.append(loss_of_none(part))
        return parts[-1]

    with tf.GradientTape() as tape:
        tape.watch([outputs, added])
        forget_call_losses(model)
        for value in added:
            # Keras adds losses up in one dtype.
            wide = keras.backend.result_type(value.dtype, keras.config.floatx())
            keras.layers.Layer.add_loss(model, tf.cast(value, wide))
        once = tf.cast(optimizer.is_first, dtype) if adds_up(optimizer) else None
        # Nobody else is to listen: this is no micro-batch.
        once_each = regularizers_times(model, once)
        with listen_to_reductions(note), once_each, kept.out_of_reach():
            loss = compute_loss(model, *seen)
        target = optimizer.scale_loss(loss)
    forget_call_losses(model)
    values = [v.value for v in variables]
    cotangents, factors, direct = tape.gradient(target, (outputs, added, values))
    with kept.out_of_reach():
        _compute_metrics(model, x, y, y_pred, sample_weight)
    cotangents = take(cotangents, replica.first_row(own_rows), own_rows)

    def loss_of(micro_batch: Any, micro_rows: tf.Tensor) -> Any:
        x, cotangents = micro_batch
        forget_calls(model)
        predictions = tf.nest.flatten(call(model, x))
        pool_calls(model)
        share = tf.cast(micro_rows, dtype) / all_rows
        pairs = [*zip(predictions, cotangents)]
        pairs += [
            (value, factor * tf.cast(share, factor.dtype) if mean else factor)
            for value, factor, mean in zip(_added(model), factors, is_mean)
            if factor is not None
        ]
        carried = [
            tf.reduce_sum(tf.cast(p, dtype) * tf.cast(c, dtype))
            for p, c in pairs
            if c is not None
        ]
        return tf.add_n(carried) if carried else tf.zeros((), dtype), None, []

    found = value_and_gradients(
        loss_of,
        variables,
        (x, cotangents),
        split,
        "sum",
        jit_compile=jit_compile,
        observer=observer_of(model),
    )
    # What does not pass through the arguments is the same on all replicas.
    direct = [d if d is None else tf.convert_to_tensor(d) / replicas for d in direct]
    gradients = [add_or_none(g, d) for g, d in zip(found.gradients, direct)]
    loss = tf.cast(loss, dtype)
    weight = _weight(model, batch, compiled, seen, all_rows) / replicas
    return found._replace(
        loss=loss,
        gradients=gradients,
        weight=weight,
        parts=parts,
        divisor=all_rows,
        rest=1.0,
    )


def _compute_metrics(
    model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any
) -> None:
    """Update the metrics, each replica by its own samples: Keras adds replicas up."""
    with scalar_metrics(model, tf.nest.flatten(y_pred)[0].shape[0]) as names:
        logs = model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
    if lost := lost_logs(model, logs):
        warn_of_lost_logs(model, lost)
    if names and replica.count() > 1:
        warn_of_scalar_metrics(model, names, two_pass=True)


def _weight(
    model: keras.Model,
    batch: Any,
    compiled: list[LossTerm],
    arguments: Any,
    rows: tf.Tensor,
) -> tf.Tensor:
    """What a further window, in the optimizer, has to weigh the whole batch by."""
    if not accumulates(model.optimizer):
        return rows
    if (weight_of := loss_weight_function(model)) is not None:
        return tf.cast(weight_of(*arguments), rows.dtype)
    terms = find(model, batch).terms
    check_terms(model, terms)
    return tf.cast(compiled[0].weight, rows.dtype) if terms.weigh_by_first else rows


def _added(model: keras.Model) -> list[tf.Tensor]:
    """The losses that layers added in the last call, scalars in the layers' order."""
    return [
        tf.reduce_sum(tf.cast(value, _wide(value.dtype))) for value in call_losses(model)
    ]


def _wide(dtype: tf.DType) -> tf.DType:
    """`dtype`, but float32 at least."""
    return dtype if dtype.size >= 4 else tf.float32


def _of_all_replicas(
    model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any
) -> tuple[Any, Any, Any, Any]:
    """The arguments of `compute_loss`, with the samples of all replicas.

    Inputs are gathered for an overridden `compute_loss` alone: Keras's does not use them.
    """
    if has_own_compute_loss(model):
        x = tf.nest.map_structure(_gather, x)
    y, y_pred, sample_weight = tf.nest.map_structure(_gather, (y, y_pred, sample_weight))
    return x, y, y_pred, sample_weight


def _gather(tensor: Any) -> Any:
    if tensor is None or replica.count() == 1:
        return tensor
    mask = keras_mask(tensor)
    if mask is not None:
        mask = replica.all_gather(mask)
    return with_keras_mask(replica.all_gather(tensor), mask)


def predict(
    model: keras.Model, x: Any, split: Split, jit_compile: bool | None = None
) -> tuple[Any, list[tf.Tensor], list[tf.Tensor]]:
    """The training predictions for `x`, without an effect on any state of the model.

    And what layers added to them, summed: one value times the samples of its micro-batch,
    several values as they are. Last, of what kind each is.
    """
    spec, masks, moved, kinds = _describe(model, x)
    rows = rows_of(x)
    buffers = [tf.zeros(tf.concat([[rows], s], 0), t.dtype) for t, s in spec]
    # The state that a call moves travels through the loop instead.
    values = [tf.convert_to_tensor(v.value) for v in moved]
    start = (buffers, values, [tf.zeros((), _wide(value.dtype)) for value in kinds])

    def step(micro_batch: Any, rows: tf.Tensor, state: Any) -> Any:
        (x, positions), (buffers, values, sums) = micro_batch, state
        known = list(zip(moved, values))
        with keras.StatelessScope(known, collect_losses=True) as scope:
            forget_call_losses(model)
            found, added = _unpack(call(model, x)), _added(model)
            values = [scope.get_current_value(v) for v in moved]
        positions = tf.expand_dims(positions, -1)
        buffers = [
            tf.tensor_scatter_nd_update(b, positions, f) for b, f in zip(buffers, found)
        ]
        times = [
            tf.cast(rows, value.dtype)
            if kind.shape.rank == 0
            else tf.ones((), value.dtype)
            for value, kind in zip(added, kinds)
        ]
        sums = [s + value * n for s, value, n in zip(sums, added, times)]
        return buffers, values, sums

    buffers, _, sums = for_each_micro_batch(
        step, (x, tf.range(rows)), start, split, jit_compile
    )
    return masks.pack(buffers), sums, kinds


class _Masks:
    """Which of the predictions have a mask, and how they are nested."""

    def __init__(self, y_pred: Any) -> None:
        self.structure = tf.nest.map_structure(lambda _: 0, y_pred)
        self.masked = [keras_mask(p) is not None for p in tf.nest.flatten(y_pred)]

    def pack(self, flat: list[tf.Tensor]) -> Any:
        """Predictions nested as they were, from the list of them and of their masks."""
        count = len(self.masked)
        rest = iter(flat[count:])
        masks = [next(rest) if masked else None for masked in self.masked]
        values = [with_keras_mask(p, m) for p, m in zip(flat[:count], masks)]
        return tf.nest.pack_sequence_as(self.structure, values)


def _unpack(y_pred: Any) -> list[tf.Tensor]:
    """The predictions, and behind them the masks of those that have one."""
    predictions = tf.nest.flatten(y_pred)
    masks = [keras_mask(p) for p in predictions]
    return [*predictions, *[mask for mask in masks if mask is not None]]


def _describe(
    model: keras.Model, x: Any
) -> tuple[list[Any], _Masks, list[keras.Variable], list[tf.Tensor]]:
    """Types and shapes of the predictions and masks; what else a call leaves.

    That is: the variables that it moves, and the losses that layers add in it.
    """
    found: dict[str, Any] = {}

    def look(x: Any) -> list[tf.Tensor]:
        with keras.StatelessScope(collect_losses=True) as scope:
            forget_call_losses(model)
            y_pred = call(model, x)
            learn_kinds(model, x)
            found["added"] = call_losses(model)
            found["masks"] = _Masks(y_pred)
            found["all"] = _unpack(y_pred)
            found["moved"] = [
                v for v in model.variables if scope.get_current_value(v) is not None
            ]
            warn_of_moved(model, scope)
        return [tf.shape(tensor)[1:] for tensor in found["all"]]

    one = take(x, 0, tf.minimum(1, rows_of(x)))
    if tf.executing_eagerly():
        shapes = look(one)
    else:
        looked = tf.function(look, autograph=False)
        looked.get_concrete_function(one)
        static = [tensor.shape[1:] for tensor in found["all"]]
        if all(shape.is_fully_defined() for shape in static):
            shapes = [tf.constant(shape.as_list(), "int32") for shape in static]
        else:
            # Sizes that only data tell: one sample tells them.
            shapes = looked(one)
    spec = list(zip(found["all"], shapes))
    return spec, found["masks"], found["moved"], found["added"]
