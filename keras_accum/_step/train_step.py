"""One training step of a Keras model over the micro-batches of a batch.

The loss of the batch is Σ_o λ_o (Σ_i w_oi L_oi / W_o) + R, over the losses o of the
model and the micro-batches i: L_oi is a mean with denominator w_oi, and W_o = Σ_i w_oi.
Micro-batch i with n_i of the n samples computes

    L_i = Σ_o λ_o f_oi L_oi + R,    f_oi = (n / n_i) (w_oi / W_o)

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
from .._backend.private.layers import call
from .._backend.private.losses import (
    compute_loss,
    listen_to_reductions,
    tracked_apart,
    undivided_losses,
)
from .._backend.private.models import build_for
from .._backend.warn import warn
from .._batch_norm import begin_windows, check_statistics, pool_calls
from .._core.accumulate import BatchGradients, LossFunction, value_and_gradients
from .._core.gradients import sum_dtype
from .._core.loop import (
    Split,
    check_batch,
    compiled_micro_steps,
    compiles_in_parts,
    for_each_micro_batch,
    leaves,
    rows_of,
    take,
)
from .._core.loss import LossTerm, check_mean, describe, record_terms, warn_if_unknown
from .._optimizer.arguments import check_step_optimizer
from .._optimizer.wrapper import (
    GradientAccumulationOptimizer,
    apply_reduced,
    overwrite_by_averages,
)
from .settings import Settings
from .two_pass import accumulate_coupled

_BY_SAMPLES = (
    "Micro-batches will weigh by their samples. Return one value per sample and let "
    "Keras take the mean, or define `compute_loss_weight(self, x, y, y_pred, "
    "sample_weight)` on the model."
)
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
    apply(compute_window(model, data, settings))
    return model.get_metrics_result()


def compute_window(model: keras.Model, data: Any, settings: Settings) -> BatchGradients:
    """All of a training step but its update: the loss, the gradients, the metrics."""
    replica.check_compilable()
    check_statistics(model)
    check_step_optimizer(model.optimizer)
    build_for(model, data)
    batch, checks = check_batch(keras.utils.unpack_x_y_sample_weight(data))
    checks += _check_weights(batch[2])
    optimizer, first = model.optimizer, True
    if _accumulates(optimizer):
        optimizer.enable_scaling_if_float16(model)
        first = tf.equal(optimizer.micro_step, 0)
    # In a graph, what does not depend on a check does not wait for it.
    with (
        tf.control_dependencies(checks),
        undivided_losses(),
        compiled_micro_steps(model),
    ):
        begin_windows(model, first)
        with tracked_apart(model) as track:
            accumulate_parts = (
                accumulate_coupled if settings.two_pass else accumulate_model
            )
            window = accumulate_parts(model, batch, settings.split)
        track(window.loss, window.parts, rows_of(batch))
    return window


def _check_weights(sample_weight: Any) -> list[tf.Tensor]:
    return [
        tf.debugging.check_numerics(weight, _BAD_WEIGHT)
        for weight in leaves(sample_weight)
        if weight is not None and weight.dtype.is_floating
    ]


def accumulate_model(model: keras.Model, batch: Any, split: Split) -> BatchGradients:
    """The loss and the gradients of `model` for `batch`; its metrics are updated."""
    terms, optimizer = probe(model, batch), model.optimizer
    if _accumulates(optimizer) and optimizer.reduction == "mean":
        check_mean(terms)
    rows, totals = _denominators(model, batch, split, terms)
    window = value_and_gradients(
        _loss_function(model, rows, totals),
        model.trainable_weights,
        batch,
        split,
        scale_loss=optimizer.scale_loss,
        parts=len(terms),
        divisor_of=_divisor(model, rows),
    )
    if _loss_weight_function(model) is not None and _divides_together(model):
        # Losses are logged by samples, on each replica by its own.
        own = window.weight * tf.math.divide_no_nan(rows, window.divisor)
        own = tf.math.divide_no_nan(own, tf.cast(rows_of(batch), "float32"))
        window = window._replace(
            loss=window.loss * own, parts=[part * own for part in window.parts]
        )
    if len(terms) == len(totals) == 1:
        # What a further window, in the optimizer, has to weigh this one by.
        window = window._replace(weight=totals[0])
    return window


def _accumulates(optimizer: keras.optimizers.Optimizer) -> bool:
    return isinstance(optimizer, GradientAccumulationOptimizer)


def _divides_together(model: keras.Model) -> bool:
    """Whether gradients are divided by what all replicas hold, and reduced at once."""
    return replica.count() > 1 and not _accumulates(model.optimizer)


def _divisor(
    model: keras.Model, rows: tf.Tensor
) -> Callable[[tf.Tensor], tf.Tensor] | None:
    """From the weight of a replica's micro-batches to what to divide its gradients by."""
    if replica.count() == 1:
        return None
    if _accumulates(model.optimizer):
        # As Keras's losses make them: the mean, divided by the number of replicas.
        return lambda weight: weight * replica.count()
    if _loss_weight_function(model) is None:
        return lambda _: rows
    return lambda weight: replica.sum_over_replicas([weight])[0]


def update(model: keras.Model, window: BatchGradients) -> None:
    """Apply the gradients of a window; one in an `AccumOptimizer` is weighted by it."""
    replica.check_compilable()
    optimizer, variables = model.optimizer, model.trainable_weights
    if not variables:
        warn("The model does not have any trainable weights.", about=model)
        return
    # What does not read the gradients, as the count of updates, waits for the checks too.
    with tf.control_dependencies([] if tf.executing_eagerly() else [window.loss]):
        _apply(
            optimizer,
            _zeros_where_others_have_gradients(window.gradients, variables),
            variables,
            window.weight,
        )


def _apply(
    optimizer: keras.optimizers.Optimizer,
    gradients: list[tf.Tensor | None],
    variables: list[keras.Variable],
    weight: tf.Tensor,
) -> None:
    if _accumulates(optimizer):
        optimizer.apply(gradients, variables, weight=weight)
        return
    given = [i for i, g in enumerate(gradients) if g is not None]
    reduced = replica.sum_over_replicas([gradients[i] for i in given])
    held = dict(zip(given, reduced))
    apply_reduced(optimizer, [held.get(i) for i in range(len(variables))], variables)
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


def probe(model: keras.Model, batch: Any) -> list[LossTerm]:
    """The loss terms of `model`, as far as they are known before anything runs."""
    found: list[LossTerm] = []

    def terms_of(micro_batch: Any) -> None:
        found.extend(_terms(model, micro_batch))

    # Of no samples, as a replica may have, Keras computes no loss: traced, of any number.
    if tf.executing_eagerly() and rows_of(batch) > 0:
        terms_of(take(batch, 0, 1))
    else:
        specs = tf.nest.map_structure(_spec, batch, expand_composites=False)
        tf.function(terms_of, autograph=False).get_concrete_function(specs)
    for term in found:
        if term.reduction in (None, "none"):
            raise ValueError(
                "Received a loss with `reduction=None`: it leaves one value per sample, "
                "which is no loss to minimise. Give it `reduction='sum_over_batch_size'` "
                "or `reduction='sum'`."
            )
    return found


def _spec(leaf: Any) -> Any:
    if leaf is None or not isinstance(leaf, tf.Tensor):
        return leaf if leaf is None else tf.type_spec_from_value(leaf)
    return tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype)


def _terms(model: keras.Model, micro_batch: Any) -> list[LossTerm]:
    """The terms of a training loss, without an effect on any state of the model."""
    x, y, sample_weight = micro_batch
    # A stateless scope does not look outside for what a regulariser reads.
    weights = [(v, v) for v in model.trainable_variables if v.regularizer is not None]
    with keras.StatelessScope(weights, collect_losses=True):
        y_pred = call(model, x)
        with record_terms() as terms:
            compute_loss(model, x, y, y_pred, sample_weight)
    return terms


def _loss_function(
    model: keras.Model, rows: tf.Tensor, totals: dict[int, tf.Tensor]
) -> LossFunction:
    """From a micro-batch and its samples to its loss, its weight, and its loss terms."""
    hook = _loss_weight_function(model)

    def loss_of(micro_batch: Any, micro_rows: tf.Tensor) -> Any:
        x, y, sample_weight = micro_batch
        inverse = rows / tf.cast(micro_rows, "float32")
        met: list[LossTerm] = []
        values: list[tf.Tensor] = []

        def adjust(*reduced: Any) -> tf.Tensor:
            *described, loss = reduced
            term = describe(*described)
            if hook is None:
                factor = _factor(term, inverse, totals.get(len(met)))
                loss *= tf.cast(factor, loss.dtype)
            met.append(term)
            values.append(loss)
            return loss

        y_pred = call(model, x)
        with listen_to_reductions(adjust):
            loss = compute_loss(model, x, y, y_pred, sample_weight)
        model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        pool_calls(model)
        return loss, hook and hook(x, y, y_pred, sample_weight), values

    return loss_of


def _factor(term: LossTerm, inverse: tf.Tensor, total: tf.Tensor | None) -> Any:
    """f_oi above, with `inverse` for n / n_i and `total` for W_o."""
    if term.summed:
        return inverse
    if total is None:
        return 1.0
    return inverse * tf.math.divide_no_nan(term.weight, total)


def _loss_weight_function(model: keras.Model) -> Callable[..., Any] | None:
    """What the user has defined to say what a loss of the user's was divided by."""
    return getattr(model, "compute_loss_weight", None)


def _denominators(
    model: keras.Model, batch: Any, split: Split, terms: list[LossTerm]
) -> tuple[tf.Tensor, dict[int, tf.Tensor]]:
    """N above, and W_o for the terms that need it, by their index."""
    rows = tf.cast(rows_of(batch), "float32")
    weighted = [i for i, term in enumerate(terms) if term.weighted]
    if _loss_weight_function(model) is None:
        warn_if_unknown(terms, _BY_SAMPLES)
    else:
        weighted = []

    def step(micro_batch: Any, rows: tf.Tensor, totals: Any) -> Any:
        terms = _terms(model, micro_batch)
        return [total + terms[i].weight for total, i in zip(totals, weighted)]

    totals = [tf.zeros(())] * len(weighted)
    if weighted:
        totals = for_each_micro_batch(step, batch, totals, split)
    if _divides_together(model):
        rows, *totals = replica.sum_over_replicas([rows, *totals])
    return rows, dict(zip(weighted, totals))
