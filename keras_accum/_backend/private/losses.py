"""How Keras reduces, adds and tracks losses. It forgets what it divided by.

`Loss.__call__` and `Trainer.compute_loss` have no hook. So functions of Keras are replaced,
by ones that give what they gave, while somebody needs it: inside of a context that
listens, and for as long as an `AccumOptimizer` that has met a model is alive. After that
Keras has its own functions again.
"""

import contextlib
import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras.src.losses import loss as keras_loss
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.trainers.trainer import Trainer

from ..attribute_patch import AttributePatch, Installation
from .layers import flatten_layers
from .tapes import could_record, recorded


class LossCall(NamedTuple):
    """A call of a Keras loss.

    Attributes:
        loss: the loss.
        y_true: what it was called with.
        y_pred: likewise.
    """

    loss: keras.losses.Loss
    y_true: Any
    y_pred: Any


class HeardLoss(NamedTuple):
    """A loss whose gradient was computed.

    Attributes:
        reduction: its values, sample weight, mask and reduction; or None, if a layer has
            added it.
        call: the call that computed it, with specs of its arguments; None if there was
            none, but a reduction alone.
        added: what a layer passed to `add_loss`: a "sum" over samples, a "mean", or
            "unknown"; None if it is no such loss.
        upstream: the gradient that reached it.
    """

    reduction: tuple[Any, ...] | None
    call: LossCall | None
    added: str | None = None
    upstream: Any = None


class Differentiated:
    """Notes the gradient that reaches a tensor, when it is computed."""

    upstream: tf.Tensor | None = None

    def noted(self, value: tf.Tensor) -> tf.Tensor:
        """`value`, of which that is noted."""

        def note(upstream: tf.Tensor) -> tf.Tensor:
            self.upstream = upstream
            return upstream

        return recorded(value, value, note)


class _Heard(NamedTuple):
    """A loss that a tape has recorded, and whether it was differentiated."""

    loss: HeardLoss
    differentiated: Differentiated


class _HeardLosses(threading.local):
    """The last losses that a tape recorded with nobody listening.

    Since an optimizer of Keras's was applied, in this thread and in one graph.
    """

    last: tuple[_Heard, ...] = ()


class _Listening(threading.local):
    """What is listened to in this thread; a strategy runs each replica in its own.

    Attributes:
        listener: gets each reduction; None if nobody listens.
        undivided: means that Keras computes as on one device; None if it divides them.
        is_part: whether losses are those of parts, whose gradients never reach `apply`.
        call: the loss that is being computed, as it was called.
        added: the kinds of what layers add, of which somebody wants to know.
    """

    listener: Callable[..., Any] | None = None
    undivided: list[Any] | None = None
    is_part = False
    call: LossCall | None = None
    added: list[str] | None = None


_listening = _Listening()


@contextlib.contextmanager
def _set(name: str, value: Any) -> Iterator[None]:
    outer = getattr(_listening, name)
    setattr(_listening, name, value)
    try:
        yield
    finally:
        setattr(_listening, name, outer)


# --- Installing, and taking back.


def _patch_reductions() -> list[AttributePatch]:
    # `Loss.__call__` looks these up by name.
    wrappers = {
        "reduce_weighted_values": _with_listener,
        "scale_loss_for_distribution": _unless_undivided,
        "unscale_loss_for_distribution": _unless_undivided,
    }
    call = keras.losses.Loss.__call__
    return [
        AttributePatch(keras.losses.Loss, "__call__", _noted(call)),
        *(
            AttributePatch(keras_loss, name, wrap(getattr(keras_loss, name)))
            for name, wrap in wrappers.items()
        ),
    ]


def _patch_additions() -> list[AttributePatch]:
    add_loss = keras.layers.Layer.add_loss
    return [AttributePatch(keras.layers.Layer, "add_loss", _judging(add_loss))]


def _patch_training_losses() -> list[AttributePatch]:
    # `compute_loss` is what a train_step of the user's calls; `_compute_loss` is what
    # Keras's own calls, also when the user has overridden `compute_loss`.
    return [
        *(
            AttributePatch(Trainer, name, _observed(getattr(Trainer, name)))
            for name in ("compute_loss", "_compute_loss")
        ),
        AttributePatch(BaseOptimizer, "apply", _forgetting(BaseOptimizer.apply)),
    ]


_reductions = Installation(_patch_reductions)
_additions = Installation(_patch_additions)
_training_losses = Installation(_patch_training_losses)


def hear_losses() -> Callable[[], None]:
    """Let `take_heard_losses` and the observer hear of losses; returns what ends it."""
    parts = (_reductions, _additions, _training_losses)
    for part in parts:
        part.hold()

    def end() -> None:
        for part in reversed(parts):
            part.release()

    return end


# --- Listening to reductions.


@contextlib.contextmanager
def listen_to_reductions(listener: Callable[..., Any]) -> Iterator[None]:
    """Pass each loss that Keras reduces in this context, and thread, through `listener`.

    It is called with `values` (the losses per sample, not yet weighted), `sample_weight`,
    `mask`, `reduction` and the reduced `loss`, and returns what stands for the loss.
    """
    with _reductions.held(), _set("listener", listener):
        yield


@contextlib.contextmanager
def listen_to_added_losses() -> Iterator[list[str]]:
    """Note of what layers pass to `add_loss` in this context, and thread, what it is.

    A "sum" over samples, a "mean", or "unknown".
    """
    found: list[str] = []
    with _additions.held(), _set("added", found):
        yield found


@functools.cache
def tell_activity_losses() -> None:
    """Have `call_losses` give vectors for activity regularizers that Keras adds up."""
    if _ACTIVITY_IS_SUM:
        _additions.hold()


def is_listening() -> bool:
    """Whether a caller up the stack listens to reductions already."""
    return _listening.listener is not None


def take_heard_losses() -> list[HeardLoss]:
    """The losses that were differentiated, with nobody listening, since the last call.

    At most a few; those of other graphs are left out.
    """
    here = _heard_here()
    found = [
        heard.loss._replace(upstream=heard.differentiated.upstream)
        for heard in here.last
        if heard.differentiated.upstream is not None
    ]
    here.last = ()
    return found


def _hear(loss: HeardLoss, value: tf.Tensor) -> tf.Tensor:
    """`value`, from which it is known that its gradient was computed."""
    heard, here = _Heard(loss, Differentiated()), _heard_here()
    here.last = (*here.last[-_MOST_HEARD:], heard)
    return heard.differentiated.noted(value)


def _heard_here() -> _HeardLosses:
    if tf.executing_eagerly():
        return _heard_eagerly
    # With the graph, the tensors that are remembered go, and the graph goes with them.
    graph = tf.compat.v1.get_default_graph()
    heard: _HeardLosses | None = getattr(graph, "_keras_accum_heard", None)
    if heard is None:
        heard = graph._keras_accum_heard = _HeardLosses()
    return heard


_heard_eagerly = _HeardLosses()
_MOST_HEARD = 15  # As many as layers of a model may add, and some.


def _judging(add_loss: Callable[..., Any]) -> Callable[..., Any]:
    """`add_loss` of a layer, which says whether it is a sum over samples."""

    @functools.wraps(add_loss)
    def add_loss_judged(self: Any, loss: Any) -> None:
        of_activity = sys._getframe(1).f_code is _LAYER_CALL
        values = keras.tree.flatten(loss)
        if not all(isinstance(value, tf.Tensor) for value in values):
            add_loss(self, loss)
            return
        for value in values:
            add_loss(self, _judged(value, of_activity))

    return add_loss_judged


def _judged(value: tf.Tensor, of_activity: bool) -> tf.Tensor:
    """What a layer adds, which a loop of the user's may differentiate."""
    is_a_sum = is_sum(value) or (of_activity and _ACTIVITY_IS_SUM)
    kind = "mean" if of_activity else "unknown"
    if is_a_sum or value.shape.rank != 0:
        kind = "sum"
    if _listening.added is not None:
        _listening.added.append(kind)
    if not is_listening() and could_record():
        value = _hear(HeardLoss(None, None, kind), value)
    if is_a_sum:
        mark_as_sum(value)
    return value


# There, and not in a `call`, Keras adds what an activity regularizer gives.
_LAYER_CALL = inspect.unwrap(keras.layers.Layer.__call__).__code__
# To Keras 3.13 that is a sum over the samples of a batch, as losses of several values
# are; from 3.14 on Keras divides it by the number of samples.
_ACTIVITY_IS_SUM = tuple(map(int, keras.__version__.split(".")[:2])) < (3, 14)


def _forgetting(apply: Callable[..., Any]) -> Callable[..., Any]:
    """`apply` of an optimizer, which forgets the losses heard so far, for the next step."""

    @functools.wraps(apply)
    def apply_and_forget(self: Any, *args: Any, **kwargs: Any) -> Any:
        _heard_here().last = ()
        return apply(self, *args, **kwargs)

    return apply_and_forget


def loss_call() -> LossCall | None:
    """The call of a Keras loss whose reduction a listener is told of."""
    return _listening.call


def _noted(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def call_noted(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        with _set("call", LossCall(self, y_true, y_pred)):
            return call(self, y_true, y_pred, sample_weight)

    return call_noted


def _specs_of(call: LossCall | None) -> LossCall | None:
    """`call` without the data of its arguments."""
    if call is None:
        return None
    loss, *arguments = call
    return LossCall(loss, *keras.tree.map_structure(_spec_of, arguments))


def _spec_of(value: Any) -> tf.TensorSpec | None:
    if value is None:
        return None
    if not hasattr(value, "dtype"):
        value = np.asarray(value)
    return tf.TensorSpec(value.shape, value.dtype)


@contextlib.contextmanager
def undivided_losses() -> Iterator[list[Any]]:
    """Have Keras compute losses in this context, and thread, as it does on one device.

    Under a strategy it divides means, but not sums, by the number of replicas. Gives a
    list of the losses that would have been divided, which grows.
    """
    found: list[Any] = []
    with _reductions.held(), _set("undivided", found):
        yield found


def _unless_undivided(scale: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(scale)
    def scale_unless_undivided(value: Any) -> Any:
        if _listening.undivided is None:
            return scale(value)
        _listening.undivided.append(value)
        return value

    return scale_unless_undivided


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
        reduced = (values, sample_weight, mask, reduction)
        if (listener := _listening.listener) is not None:
            return listener(*reduced, loss)
        if could_record():  # Else it is validation's, for example.
            return _hear(HeardLoss(reduced, _specs_of(_listening.call)), loss)
        return loss

    return reduce_and_tell


# --- Observing training losses.

# From a model, the arguments of `compute_loss` and what computes it, to the loss.
Observer = Callable[[keras.Model, tuple[Any, ...], Callable[[], Any]], Any]


def observe_training_losses(observer: Observer) -> None:
    """Have `observer` compute each training loss while `hear_losses` is in force.

    It is called for training losses only, and only for the outermost call: an override
    that calls `super()` is one.
    """
    global _observer
    _observer = observer


_observer: Observer | None = None


def _observed(compute: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compute)
    def compute_observed(
        self: Any,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        arguments = (x, y, y_pred, sample_weight)

        def result() -> Any:
            return compute(self, *arguments, training)

        if is_listening() or _observer is None:
            return result()
        if not training:
            with _set("listener", lambda *reduced: reduced[-1]):
                return result()
        return _observer(self, arguments, result)

    return compute_observed


@contextlib.contextmanager
def parts_of_a_window() -> Iterator[None]:
    """What is computed inside are losses of parts; no gradient of one reaches `apply`."""
    with _set("is_part", True):
        yield


def is_a_part() -> bool:
    """Whether a loss that is computed now is inside of `parts_of_a_window`."""
    return _listening.is_part


# --- What a train_step of Keras's does with losses, for one that does it in parts.


def has_own_compute_loss(model: keras.Model) -> bool:
    """Whether the user has overridden `compute_loss`."""
    own = getattr(type(model).compute_loss, "__wrapped__", type(model).compute_loss)
    plain = getattr(Trainer.compute_loss, "__wrapped__", Trainer.compute_loss)
    return own is not plain or "compute_loss" in vars(model)


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


class AddedLoss(NamedTuple):
    """What a layer passed to `add_loss` in its last call.

    Attributes:
        layer: the layer.
        value: a tensor of any shape; Keras adds it up.
        is_sum: whether what it comes to is a sum over samples, else a mean; None if that
            was not found out.
    """

    layer: keras.layers.Layer
    value: tf.Tensor
    is_sum: bool | None


def added_losses(model: keras.Model) -> list[AddedLoss]:
    """What the layers passed to `add_loss` in their last call, without regularisers."""
    layers = flatten_layers(model)
    return [
        AddedLoss(layer, value, _kinds.get(layer, {}).get(index, is_sum(value) or None))
        for layer in layers
        for index, value in enumerate(layer._get_own_losses())
    ]


# By layer, whether a value that it adds in a call, by its position, is a sum over samples.
_kinds: "weakref.WeakKeyDictionary[keras.layers.Layer, dict[int, bool]]"
_kinds = weakref.WeakKeyDictionary()


def remember_kinds(model: keras.Model, kinds: Sequence[bool]) -> None:
    """Note of each of `added_losses(model)` whether it is a sum over samples."""
    positions: dict[int, int] = {}
    for added, is_a_sum in zip(added_losses(model), kinds):
        index = positions.get(id(added.layer), 0)
        positions[id(added.layer)] = index + 1
        _kinds.setdefault(added.layer, {})[index] = is_a_sum


def call_losses(model: keras.Model) -> list[tf.Tensor]:
    """What the layers passed to `add_loss` in their last call, without regularisers.

    Sums over samples have an axis, means have none.
    """

    def by_kind(added: AddedLoss) -> tf.Tensor:
        if added.is_sum:
            return added.value if added.value.shape.rank else added.value[None]
        return tf.reduce_sum(added.value) if added.value.shape.rank else added.value

    return [by_kind(added) for added in added_losses(model)]


@contextlib.contextmanager
def call_losses_kept(model: keras.Model) -> Iterator[None]:
    """Put back, afterwards, what layers had passed to `add_loss`."""
    layers = flatten_layers(model)
    kept = [(x, list(x._losses), set(x._loss_ids)) for x in layers]
    try:
        yield
    finally:
        for layer, added, ids in kept:
            layer._losses[:] = added
            layer._loss_ids.clear()
            layer._loss_ids.update(ids)


def mark_as_sum(loss: tf.Tensor) -> None:
    """Have `added_losses` know that `loss` is a sum over samples."""
    loss._keras_accum_sum = True


def is_sum(loss: tf.Tensor) -> bool:
    """Whether `loss` is marked as a sum over samples."""
    return getattr(loss, "_keras_accum_sum", False)


def multiply_summed_losses(model: keras.Model, factor: tf.Tensor) -> None:
    """Multiply what layers passed to `add_loss` that is a sum over samples.

    Keras adds it up when it computes the loss; before, it is in lists.
    """
    values: dict[int, list[tf.Tensor]] = {}
    layers = {}
    for layer, value, is_a_sum in added_losses(model):
        layers[id(layer)] = layer
        changed = value * tf.cast(factor, value.dtype) if is_a_sum else value
        values.setdefault(id(layer), []).append(changed)
    for key, layer in layers.items():
        layer._losses[:] = values[key]


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
