"""How Keras reduces, adds and tracks losses. Keras forgets what it divided by."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.losses import loss as keras_loss
from keras.src.trainers.trainer import Trainer

from .layers import flatten_layers

_listening = threading.local()


@contextlib.contextmanager
def listen_to_reductions(listener: Callable[..., Any]) -> Iterator[None]:
    """Pass each loss that Keras reduces in this context, and thread, through `listener`.

    It is called with `values` (the losses per sample, not yet weighted), `sample_weight`,
    `mask`, `reduction` and the reduced `loss`, and returns what stands for the loss.
    """
    _extend_keras()
    outer = getattr(_listening, "listener", None)
    _listening.listener = listener
    try:
        yield
    finally:
        _listening.listener = outer


def is_listening() -> bool:
    """Whether a caller up the stack listens to reductions already."""
    return getattr(_listening, "listener", None) is not None


@functools.cache
def observe_training_losses(
    around: Callable[[keras.Model], contextlib.AbstractContextManager[None]],
) -> None:
    """Have Keras compute each training loss of any model inside of `around(model)`.

    Args:
        around: gives the context manager for a model; called for training losses only,
            and only for the outermost call (an override that calls `super()` is one).
    """
    # `compute_loss` is what a train_step of the user's calls; `_compute_loss` is what
    # Keras's own calls, also when the user has overridden `compute_loss`.
    for name in ("compute_loss", "_compute_loss"):
        setattr(Trainer, name, _inside(around, getattr(Trainer, name)))


@contextlib.contextmanager
def undivided_losses() -> Iterator[list[Any]]:
    """Have Keras compute losses in this context, and thread, as it does on one device.

    Under a strategy it divides means, but not sums, by the number of replicas. Gives a
    list of the losses that would have been divided, which grows.
    """
    _extend_keras()
    outer = getattr(_listening, "undivided", None)
    _listening.undivided = []
    try:
        yield _listening.undivided
    finally:
        _listening.undivided = outer


@functools.cache
def _extend_keras() -> None:
    for name in ("scale_loss_for_distribution", "unscale_loss_for_distribution"):
        setattr(keras_loss, name, _unless_undivided(getattr(keras_loss, name)))
    keras_loss.reduce_weighted_values = _with_listener(keras_loss.reduce_weighted_values)


def _unless_undivided(scale: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(scale)
    def scale_unless_told(value: Any) -> Any:
        undivided = getattr(_listening, "undivided", None)
        if undivided is None:
            return scale(value)
        undivided.append(value)
        return value

    return scale_unless_told


def _with_listener(reduce: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(reduce)
    def reduce_and_tell(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: Any = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        loss = reduce(values, sample_weight, mask, reduction, dtype)
        if not is_listening():
            return loss
        return _listening.listener(values, sample_weight, mask, reduction, loss)

    return reduce_and_tell


def _inside(
    around: Callable[..., Any], compute: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(compute)
    def compute_inside(
        self: Any,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        arguments = (self, x, y, y_pred, sample_weight, training)
        if not training or is_listening():
            return compute(*arguments)
        with around(self):
            return compute(*arguments)

    return compute_inside


def compute_loss(
    model: keras.Model, x: Any, y: Any, y_pred: Any, weight: Any
) -> tf.Tensor:
    """The training loss, by the user's `compute_loss` whatever arguments it takes."""
    return model._compute_loss(x, y, y_pred, weight, training=True)


def track_loss(model: keras.Model, loss: tf.Tensor, rows: Any) -> None:
    """Add the loss of `rows` samples to what `fit` shows as `loss`."""
    model._loss_tracker.update_state(loss, sample_weight=rows)


@contextlib.contextmanager
def tracked_apart(model: keras.Model) -> Iterator[Callable[..., None]]:
    """Keep the metrics that `fit` shows as losses from counting inside of the context.

    With several outputs Keras follows each loss where it computes it; of a part of a
    batch, it does not know how many samples it has. Gives a function of the loss, the
    losses of the outputs and the number of samples of a batch, to call afterwards.
    """
    apart = model._compile_loss.metrics if model._compile_loss is not None else []
    before = [(m, tf.identity(m.total.value), tf.identity(m.count.value)) for m in apart]

    def track(loss: tf.Tensor, outputs: Sequence[tf.Tensor], rows: Any) -> None:
        for metric, total, count in before:
            metric.total.assign(total)
            metric.count.assign(count)
        track_loss(model, loss, rows)
        for (metric, _, _), value in zip(before, outputs):
            metric.update_state(value, sample_weight=rows)

    yield track


def call_losses(model: keras.Model) -> list[tf.Tensor]:
    """What the layers passed to `add_loss` in their last call, without regularisers."""
    layers = [model, *flatten_layers(model)]
    unique = {id(layer): layer for layer in layers}.values()
    return [loss for layer in unique for loss in layer._get_own_losses()]


def forget_call_losses(model: keras.Model) -> None:
    """Drop what layers passed to `add_loss` before; it may belong to another graph."""
    model._clear_losses()


def take_loss(layers: Sequence[keras.layers.Layer], loss: Any) -> keras.layers.Layer:
    """The one of `layers` that added `loss` in a scope that ends; it forgets about it.

    Keras remembers losses of a scope by their `id`, which another tensor may get.
    """
    owners = (layer for layer in layers if id(loss) in layer._loss_ids)
    owner = next(owners, layers[0])  # One from elsewhere in the model is in none.
    owner._loss_ids.discard(id(loss))
    return owner
