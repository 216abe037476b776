"""What a loss that Keras computes announces to the optimizer: its denominator."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from .._backend import replica
from .._backend.private.losses import (
    call_losses,
    is_a_part,
    listen_to_reductions,
    take_heard_losses,
)
from .._backend.private.models import build_compiled
from .._batch_norm import pool_first_or_next
from .._core.added_losses import learn_kinds
from .._core.loop import rows_of
from .._core.loss import (
    LossTerm,
    Terms,
    check_sums,
    describe,
    loss_of_none,
    optimizer_weight,
    warn_of_coupled,
)
from .._core.moving_state import layers_that_moved, moving_layers, warn_of_moving
from .._core.own_loss import couples_samples, what_is_known
from .._core.regularizers import is_regularized, regularizers_times
from .accumulator import Weight
from .pending import PendingWeight


def announce_weight(
    model: keras.Model, arguments: tuple[Any, ...], compute: Callable[[], tf.Tensor]
) -> tf.Tensor:
    """Compute a training loss of `model`, and tell its optimizer what it weighs.

    Args:
        model: any model.
        arguments: `x, y, y_pred, sample_weight`, of which the loss is computed.
        compute: computes it.
    """
    optimizer: Any = getattr(model, "optimizer", None)
    if not isinstance(getattr(optimizer, "_pending_weight", None), PendingWeight):
        return compute()
    build_compiled(model, *arguments)
    if optimizer.accum_steps != 1 and not is_a_part():
        warn_of_moving(model, [*moving_layers(model), *layers_that_moved(model)])
    loss, weight = _weighted(model, optimizer, arguments, compute)
    # Data that have ended leave no loss, and must leave no weight.
    with tf.control_dependencies([] if tf.executing_eagerly() else [loss]):
        if not is_a_part():
            optimizer._pending_weight.set(weight)
            optimizer._announces = True
        pool_first_or_next(model, tf.equal(optimizer.micro_step, 0))
    optimizer.enable_scaling_if_float16(model)
    return loss


def _weighted(
    model: keras.Model, optimizer: Any, arguments: Any, compute: Callable[[], tf.Tensor]
) -> tuple[tf.Tensor, Weight | None]:
    reductions: list[tuple[Any, ...]] = []
    reduced: list[tf.Tensor] = []

    def note(*described: Any) -> tf.Tensor:
        *description, loss = described
        reductions.append(tuple(description))
        reduced.append(loss_of_none(loss))
        return reduced[-1]

    adds_up = optimizer.reduction == "sum"
    once = tf.cast(optimizer.is_first, "float32") if adds_up else None
    with listen_to_reductions(note), regularizers_times(model, once):
        loss = compute()
    learn_kinds(model, arguments[0])
    static, rows = _rows(arguments)
    compiled = tuple(describe(*each, rows=static) for each in reductions)
    added = tuple(call_losses(model))
    # A window that weighs nothing still has what is no mean of weighted samples.
    rest = rows if added else tf.constant(float(is_regularized(model)))
    hook = getattr(model, "compute_loss_weight", None)
    if hook is not None:
        return loss, Weight(tf.convert_to_tensor(hook(*arguments)), rest)
    known = what_is_known(model, arguments, compiled, (loss, reduced, added))
    terms = Terms(compiled, added, *known)
    if adds_up:
        check_sums(terms, model)
        if terms.complete and replica.count() > 1:
            loss += _undivided(terms.vectors, loss.dtype)
        return loss, None
    return loss, Weight(optimizer_weight(terms, rows, model), rest)


def _undivided(sums: list[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
    """What makes up for Keras's division of added losses by the number of replicas."""
    added = [tf.cast(tf.reduce_sum(value), dtype) for value in sums]
    rest = 1.0 - 1.0 / replica.count()
    return tf.add_n([tf.zeros((), dtype), *added]) * tf.cast(rest, dtype)


def _rows(arguments: Any) -> tuple[int | None, tf.Tensor]:
    """The number of samples, where it is known when tracing, and as a float32 scalar."""
    x, y, y_pred, _ = arguments
    rows = rows_of((y_pred, y, x))
    return rows if isinstance(rows, int) else None, tf.cast(rows, "float32")


class Heard(NamedTuple):
    """What was differentiated in a loop, or a `train_step`, of the user's.

    Attributes:
        terms: of the Keras losses.
        added: the kinds of what layers added: "sum", "mean" or "unknown".
        factors: scalar tensors, what the Keras losses were multiplied by.
    """

    terms: list[LossTerm]
    added: list[str]
    factors: list[tf.Tensor]


def _term(values: Any, *described: Any) -> LossTerm:
    values = tf.convert_to_tensor(values)
    # All losses of the samples, as far as can be known.
    rows = values.shape[0] if values.shape.rank else None
    return describe(values, *described, rows=rows)


def heard_losses(owner: Any) -> Heard:
    """What was differentiated since the last call.

    Args:
        owner: of whom it is said, once, that a loss couples samples; None: it may.
    """
    heard = take_heard_losses()
    losses = [loss for loss in heard if loss.reduction is not None]
    calls = [loss.call for loss in losses if loss.call is not None]
    if owner is not None and any(map(couples_samples, calls)):
        warn_of_coupled(owner)
    return Heard(
        [_term(*(loss.reduction or ())) for loss in losses],
        [loss.added for loss in heard if loss.added is not None],
        [loss.upstream for loss in losses],
    )
