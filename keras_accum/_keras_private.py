"""Private parts of Keras and TensorFlow that there is no public way around.

Each function says why it is needed. `tests/test_keras_private.py` fails by name when
one of them has moved.
"""

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer
from keras.src.losses import loss as keras_loss
from keras.src.models.functional import Functional as Functional
from keras.src.models.model import functional_init_arguments
from keras.src.trainers.trainer import Trainer
from tensorflow.python.framework import ops
from tensorflow.python.ops import control_flow_util


def compiled_by_xla() -> bool:
    """Whether the function that is being traced will be compiled by XLA.

    XLA leaves assertions out without a word; what relies on one must know.
    """
    if tf.executing_eagerly():
        return False
    return control_flow_util.GraphOrParentsInXlaContext(ops.get_default_graph())


def flatten_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """The layers of `model` at any depth.

    `Model.layers` shows the first level only, and not what a layer holds inside.
    """
    return list(model._flatten_layers())


@contextlib.contextmanager
def replicas_left_to_caller(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Keep `optimizer` from what it does across replicas: the caller does it.

    Keras sums gradients over replicas after it has clipped each one's, and overwrites
    weights by their averages in a conditional of each replica's, which cannot be traced.
    """
    parts = _parts(optimizer)
    for part in parts:
        # Replicas enter and leave in turns, in threads: the last to leave restores.
        entered, frequency = _left.get(part, (0, part.ema_overwrite_frequency))
        _left[part] = (entered + 1, frequency)
        part._all_reduce_sum_gradients = list
        part.ema_overwrite_frequency = None
    try:
        yield
    finally:
        for part in parts:
            entered, frequency = _left.pop(part)
            if entered > 1:
                _left[part] = (entered - 1, frequency)
            else:
                del part._all_reduce_sum_gradients
                part.ema_overwrite_frequency = frequency


# How often each optimizer is inside of `replicas_left_to_caller`, and its
# `ema_overwrite_frequency` outside.
_left: weakref.WeakKeyDictionary[Any, tuple[int, Any]] = weakref.WeakKeyDictionary()


def overwriting_by_averages(
    optimizer: keras.optimizers.Optimizer,
) -> list[tuple[tf.Tensor, Callable[[], None]]]:
    """For each part of `optimizer` that does it: whether it is due, and how to do it.

    To be called for all replicas together, after an update.
    """
    parts = [p for p in _parts(optimizer) if p.use_ema and p.ema_overwrite_frequency]
    return [
        (
            tf.equal(p.iterations.value % p.ema_overwrite_frequency, 0),
            functools.partial(
                p._overwrite_model_variables_with_average_value, p._trainable_variables
            ),
        )
        for p in parts
    ]


def _parts(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """The optimizers that update weights: inside of wrappers, and of a MultiOptimizer."""
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        return _parts(inner)
    return [optimizer, *getattr(optimizer, "optimizers", [])]


def restore_deferred(optimizer: keras.optimizers.Optimizer) -> None:
    """Give variables just created the values of a checkpoint that was restored before.

    TensorFlow does so where an attribute is set. An optimizer that names its children
    itself has to ask for it.
    """
    for name, child in optimizer._trackable_children().items():
        optimizer._handle_deferred_dependencies(name=name, trackable=child)


def functional_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether these arguments of `keras.Model` make a functional model."""
    return functional_init_arguments(args, kwargs)


# --- What a loss divides by. Keras reduces a loss to its mean and forgets the
# denominator; `Loss.__call__` and `Trainer.compute_loss` have no hook. Two functions
# are therefore extended, once, without a change to what they return.

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
def undivided_losses() -> Iterator[None]:
    """Have Keras compute losses in this context, and thread, as it does on one device.

    Under a strategy it divides means, but not sums, by the number of replicas.
    """
    _extend_keras()
    outer = getattr(_listening, "undivided", False)
    _listening.undivided = True
    try:
        yield
    finally:
        _listening.undivided = outer


@functools.cache
def _extend_keras() -> None:
    for name in ("scale_loss_for_distribution", "unscale_loss_for_distribution"):
        setattr(keras_loss, name, _dividing(getattr(keras_loss, name)))
    keras_loss.reduce_weighted_values = _audible(keras_loss.reduce_weighted_values)


def _dividing(scale: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(scale)
    def scale_unless_told(value: Any) -> Any:
        return value if getattr(_listening, "undivided", False) else scale(value)

    return scale_unless_told


def _audible(reduce: Callable[..., Any]) -> Callable[..., Any]:
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


# --- What Keras 3 cannot do under a strategy (keras#20585).


@functools.cache
def mend_strategies() -> None:
    """Have `fit` build and log under any strategy.

    To build a model, Keras takes the mean of a batch over replicas, which fails where
    they hold unlike shapes, or are on several machines; one replica's part will do. To
    log, it takes the mean of scalars over their first axis, which they do not have, on
    several machines.
    """
    trainer.TensorFlowTrainer._maybe_symbolic_build = _building_from_one(
        trainer.TensorFlowTrainer._maybe_symbolic_build
    )
    trainer.reduce_per_replica = _reducing_scalars(trainer.reduce_per_replica)


def _building_from_one(build: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(build)
    def build_from_one(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
        if iterator is None or self._distribute_strategy is None:
            build(self, iterator=iterator, data_batch=data_batch)
            return
        _, _, batches = next(iter(iterator))
        local = self._distribute_strategy.experimental_local_results
        batch = tf.nest.map_structure(lambda value: local(value)[0], next(batches))
        build(self, data_batch=batch)

    return build_from_one


def _reducing_scalars(reduce: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(reduce)
    def reduce_scalars(values: Any, strategy: Any, reduction: str) -> Any:
        several = trainer._collective_all_reduce_multi_worker(strategy)
        if not several or reduction not in ("auto", "mean"):
            return reduce(values, strategy, reduction)
        return tf.nest.map_structure(
            lambda value: strategy.reduce("MEAN", value, axis=None), values
        )

    return reduce_scalars


# --- What a train_step of Keras's does, for one that does it in parts.


def compute_loss(
    model: keras.Model, x: Any, y: Any, y_pred: Any, weight: Any
) -> tf.Tensor:
    """The training loss, by the user's `compute_loss` whatever arguments it takes."""
    return model._compute_loss(x, y, y_pred, weight, training=True)


def call(model: keras.Model, x: Any) -> Any:
    """The predictions of `model` in training, with the argument if `call` takes it."""
    return model(x, training=True) if model._call_has_training_arg else model(x)


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


def build_for(model: keras.Model, data: Any) -> None:
    """Create what `model`, its metrics and its optimizer need for a batch like `data`.

    Keras creates it while tracing the first step; in a loop nothing can be created.
    """
    parts = [model, model._compile_metrics, model._compile_loss, model.optimizer]
    if all(part is None or part.built for part in parts):
        return
    with tf.init_scope():
        model._symbolic_build(data_batch=data)


def call_losses(model: keras.Model) -> list[tf.Tensor]:
    """What the layers passed to `add_loss` in their last call, without regularisers."""
    layers = [model, *flatten_layers(model)]
    unique = {id(layer): layer for layer in layers}.values()
    return [loss for layer in unique for loss in layer._get_own_losses()]


def forget_call_losses(model: keras.Model) -> None:
    """Drop what layers passed to `add_loss` before; it may belong to another graph."""
    model._clear_losses()


def keras_mask(tensor: Any) -> tf.Tensor | None:
    """The mask that travels with a tensor through a model."""
    return getattr(tensor, "_keras_mask", None)


def with_keras_mask(tensor: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor:
    """`tensor` with a mask that travels with it."""
    if mask is not None:
        tensor._keras_mask = mask
    return tensor
