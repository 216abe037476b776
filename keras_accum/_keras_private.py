"""Private parts of Keras and TensorFlow that there is no public way around.

Each function says why it is needed. `tests/test_keras_private.py` fails by name when
one of them has moved.
"""

import contextlib
import copy
import functools
import inspect
import random
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend import compute_output_spec
from keras.src.backend import random as keras_random
from keras.src.backend.common.global_state import (
    get_global_attribute,
    set_global_attribute,
)
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.backend.tensorflow import trainer
from keras.src.losses import loss as keras_loss
from keras.src.models.functional import Functional as Functional
from keras.src.models.model import functional_init_arguments
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR, draw_seed
from keras.src.trainers.trainer import Trainer
from keras.src.utils.python_utils import is_default
from tensorflow.compiler.xla.service import hlo_pb2
from tensorflow.python.client import device_lib
from tensorflow.python.eager import context as tf_context
from tensorflow.python.eager import record
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
) -> list[tuple[tf.Tensor, Callable[[], None], list[keras.Variable]]]:
    """For each part of `optimizer` that does it: if it is due, how, and to what.

    To be called for all replicas together, after an update.
    """
    parts = [p for p in _parts(optimizer) if p.use_ema and p.ema_overwrite_frequency]
    found: list[tuple[tf.Tensor, Callable[[], None], list[keras.Variable]]] = []
    for part in parts:
        due = tf.equal(part.iterations.value % part.ema_overwrite_frequency, 0)
        variables = list(part._trainable_variables)
        overwrite = part._overwrite_model_variables_with_average_value
        found.append((due, functools.partial(overwrite, variables), variables))
    return found


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
        # All logs of a step in one reduction, instead of one for each.
        pairs = [(value, value) for value in tf.nest.flatten(values)]
        means = strategy.extended.batch_reduce_to("MEAN", pairs)
        local = [strategy.experimental_local_results(mean)[0] for mean in means]
        return tf.nest.pack_sequence_as(values, local)

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


def drop_keras_mask(tensor: tf.Tensor) -> None:
    """Have no mask travel with `tensor` any longer."""
    tensor._keras_mask = None


# --- What planning reads, and what it has to put back.


def device_limit(device: str) -> int:
    """The bytes of a device that TensorFlow may use, for "GPU:0" and the like.

    `get_memory_info` tells what is in use, and nothing public tells of how much.
    """
    for found in device_lib.list_local_devices():
        if found.name.endswith(device):
            return int(found.memory_limit)
    raise ValueError(f"There is no device {device!r}.")


def compiled_bytes(function: Any, *args: Any) -> int:
    """The memory that XLA has assigned to a compiled function beyond its arguments.

    Temporaries, results that do not overwrite an argument, and constants. The compiler
    tells it in the buffer assignment of the program, of which TensorFlow gives the
    serialised form and not the class to read it with. Nothing runs.
    """
    program = hlo_pb2.HloProto()
    compiler = function.experimental_get_compiler_ir(*args)
    program.ParseFromString(compiler(stage="optimized_hlo_proto_serialized"))
    allocations = program.buffer_assignment.buffer_allocations
    return sum(
        a.size
        for a in allocations
        if not (a.is_entry_computation_parameter or a.is_thread_local)
    )


def unbuilt_parts(model: keras.Model) -> dict[str, Any]:
    """Stand-ins for the compiled parts of a model that a first step would build.

    A part that Keras has built cannot be made unbuilt again.

    Returns:
        By the name of the model's attribute.
    """
    parts: dict[str, Any] = {}
    optimizer = model.optimizer
    if not optimizer.built:
        parts["optimizer"] = type(optimizer).from_config(optimizer.get_config())
    loss, metrics = model._compile_loss, model._compile_metrics
    if loss is not None and not loss.built:
        parts["_compile_loss"] = type(loss)(
            loss._user_loss,
            loss._user_loss_weights,
            loss.reduction,
            output_names=loss.output_names,
        )
    if metrics is not None and not metrics.built:
        parts["_compile_metrics"] = type(metrics)(
            metrics._user_metrics,
            metrics._user_weighted_metrics,
            output_names=metrics.output_names,
        )
    return parts


def all_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """The metrics of a model, also those that it was compiled with and has not built."""
    compiled = model._compile_metrics
    given = (
        []
        if compiled is None
        else [compiled._user_metrics, compiled._user_weighted_metrics]
    )
    found = [*model.metrics, *keras.tree.flatten(given)]
    found = [metric for metric in found if isinstance(metric, keras.metrics.Metric)]
    return list({id(metric): metric for metric in found}.values())


def state_of_layers(model: keras.Model) -> list[keras.Variable]:
    """What a pass through a model may assign: moving statistics, seeds, metrics.

    A weight that is frozen is none of it, however large. Keras tells it from a moving
    statistic only by the list that a layer keeps it in.
    """
    layers = [model, *flatten_layers(model)]
    found = [variable for layer in layers for variable in layer._non_trainable_variables]
    found += [seed.state for layer in layers for seed in layer._seed_generators]
    found += [v for metric in all_metrics(model) for v in metric.variables]
    if (generator := get_global_attribute(GLOBAL_SEED_GENERATOR)) is not None:
        found.append(generator.state)
    return list({id(variable): variable for variable in found}.values())


def call_traces(model: keras.Model) -> list[Any]:
    """The containers in which layers keep what their last call passed to `add_loss`."""
    return [
        container
        for layer in [model, *flatten_layers(model)]
        for container in (layer._losses, layer._loss_ids)
    ]


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Put back, afterwards, all random state that is outside of a model.

    Python's, from which Keras draws its seeds; NumPy's; Keras's global seed generator,
    or that there was none; and the generator from which TensorFlow seeds its operations.
    """
    operations = vars(tf_context.context())
    seeds = operations.get("_rng")  # not there until `tf.random.set_seed`
    kept = (random.getstate(), np.random.get_state(), seeds and seeds.getstate())
    generator = get_global_attribute(GLOBAL_SEED_GENERATOR)
    seed = None if generator is None else np.array(generator.state.value)
    try:
        yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        operations.pop("_rng", None)
        if seeds is not None:
            seeds.setstate(kept[2])
            operations["_rng"] = seeds
        set_global_attribute(GLOBAL_SEED_GENERATOR, generator)
        if generator is not None:
            generator.state.assign(seed)


# --- What a second run of a layer's call needs to be the same as the first.


def read(variable: keras.Variable) -> tf.Tensor | None:
    """The value outside of any `StatelessScope`; None before it is initialised.

    Unlike `Variable.value`, not cast to the type that a layer around computes in.
    """
    return None if variable._value is None else tf.convert_to_tensor(variable._value)


def is_watched(variable: keras.Variable) -> bool:
    """Whether tapes watch `variable` by themselves: weights, frozen later or not.

    `Variable.trainable` is what is frozen; what TensorFlow was told is inside.
    """
    return bool(getattr(variable._value, "trainable", False))


def current_scope() -> Any:
    """The innermost `StatelessScope`, or None; Keras has its class only."""
    return get_stateless_scope()


def is_symbolic() -> bool:
    """Whether Keras calls only to learn shapes; `keras.SymbolicScope` cannot be asked."""
    return in_symbolic_scope()


class MaskDrawing:
    """What a call of dropout is about to draw.

    Attributes:
        inputs: what it drops of; the mask has their shape.
        draw: draws the mask, True where something stays.
        skip: moves the seed on as if it had been drawn.
    """

    def __init__(
        self, inputs: tf.Tensor, draw: Callable[[], tf.Tensor], seed: Any
    ) -> None:
        self.inputs, self.draw = inputs, draw
        self.skip = functools.partial(draw_seed, seed)


@functools.cache
def take_dropout_masks_from(source: Callable[[MaskDrawing], tf.Tensor | None]) -> None:
    """Have dropout in Keras use the mask that `source` gives, if it gives one.

    Keras draws a mask and applies it in one function, which its layers and `keras.random`
    look up by name. With a mask that was drawn as told, the result is that function's,
    bit for bit.
    """
    dropout = keras_random.dropout

    @functools.wraps(dropout)
    def dropout_by_mask(
        inputs: Any, rate: float, noise_shape: Any = None, seed: Any = None
    ) -> tf.Tensor:
        inputs = tf.convert_to_tensor(inputs)

        def draw() -> tf.Tensor:
            return dropout(tf.ones_like(inputs), rate, noise_shape, seed) > 0

        mask = source(MaskDrawing(inputs, draw, seed)) if 0 < rate < 1 else None
        if mask is None:
            return dropout(inputs, rate, noise_shape, seed)
        return tf.where(mask, inputs * (1 / (1 - rate)), tf.zeros((), inputs.dtype))

    keras_random.dropout = dropout_by_mask


def save_context() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """What is around a call now, as a context manager to have it there again.

    That is the type that weights are cast to, and the arguments that layers pass down
    (`training`). Keras keeps both in attributes of the thread, without an interface.
    """
    names = ("autocast_scope", "current_call_ctx")
    saved = {name: copy.copy(get_global_attribute(name)) for name in names}

    @contextlib.contextmanager
    def restored() -> Iterator[None]:
        outer = {name: get_global_attribute(name) for name in names}
        try:
            for name in names:
                # A copy: layers change the arguments that they pass down.
                set_global_attribute(name, copy.copy(saved[name]))
            yield
        finally:
            for name in names:
                set_global_attribute(name, outer[name])

    return restored


def inherited(name: str) -> Any:
    """The argument `name` that the layer around passes down, None if there is none."""
    context = get_global_attribute("current_call_ctx")
    return None if context is None else context.get_value(name)


def take_loss(layers: Sequence[keras.layers.Layer], loss: Any) -> keras.layers.Layer:
    """The one of `layers` that added `loss` in a scope that ends; it forgets about it.

    Keras remembers losses of a scope by their `id`, which another tensor may get.
    """
    owners = (layer for layer in layers if id(loss) in layer._loss_ids)
    owner = next(owners, layers[0])  # One from elsewhere in the model is in none.
    owner._loss_ids.discard(id(loss))
    return owner


def could_record() -> bool:
    """Whether any tape records at all; a tape can be asked, but not found."""
    return record.could_possibly_record()


def is_recorded(tensors: Sequence[tf.Tensor]) -> bool:
    """Whether some tape would differentiate by one of `tensors`; likewise."""
    return record.should_record_backprop(list(tensors))


def unrecorded() -> contextlib.AbstractContextManager[None]:
    """A context that no tape sees; `GradientTape.stop_recording` is for one tape."""
    return record.stop_recording()


def stand_in(value: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
    """`value`, with the gradient of `tensor`, which then need not be computed.

    `tf.custom_gradient` would make `tensor` an input of an operation, and so compute it.
    """
    value = tf.identity(value)
    record.record_operation("StandIn", [value], [tensor], lambda gradient: [gradient])
    return value


def keras_logits(tensor: Any) -> tf.Tensor | None:
    """What went into the softmax or sigmoid that `tensor` came out of, for the loss."""
    return getattr(tensor, "_keras_logits", None)


def with_keras_logits(tensor: tf.Tensor, logits: tf.Tensor | None) -> tf.Tensor:
    """`tensor` with the logits that losses look for."""
    if logits is not None:
        tensor._keras_logits = logits
    return tensor


def build_by_call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Have the layers that `function` calls create their variables, without a value.

    As `Layer.__call__` does with a layer that has no `build`.
    """

    def spec(value: Any) -> Any:
        is_tensor = isinstance(value, tf.Tensor)
        return keras.KerasTensor(value.shape, value.dtype.name) if is_tensor else value

    with tf.init_scope():
        args, kwargs = tf.nest.map_structure(spec, (args, kwargs))
        compute_output_spec(function, *args, **kwargs)


def call_method(layer: keras.layers.Layer) -> str:
    """The method of `layer` that its `__call__` calls."""
    return "call" if layer.quantization_mode is None else "quantized_call"


def is_in_remat_scope(layer: keras.layers.Layer) -> bool:
    """Whether `layer` was created in a `keras.RematScope`, which it remembers."""
    return layer._remat_mode is not None


def children(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """The layers directly inside of `layer`; only models have `layers`."""
    return list(layer._layers)


def has_build(layer: keras.layers.Layer) -> bool:
    """Whether `layer` has a `build` of its own; else Keras builds it by calling it."""
    return not is_default(layer.build)


def take_arguments(wrapper: keras.layers.Layer, layer: keras.layers.Layer) -> None:
    """Give `wrapper` the arguments of `layer`, passed on as they come.

    Keras reads them off the signatures of `call` and `build`, which a wrapper of any
    layer cannot write down.
    """
    wrapper.build.__signature__ = inspect.signature(layer.build)
    for name in (
        "_call_signature",
        "call_signature_parameters",
        "_call_has_training_arg",
        "_call_has_mask_arg",
        "_call_context_args",
        "_call_has_context_arg",
        "_allow_non_tensor_positional_args",
    ):
        setattr(wrapper, name, getattr(layer, name))
    wrapper._convert_input_args = False  # `layer` converts them.


def graph_of(model: keras.Model) -> Functional | None:
    """The graph of layers that `model` is made of, None for any other kind of model."""
    if isinstance(model, keras.Sequential):
        return model._functional
    return model if isinstance(model, Functional) else None


def nodes_of(graph: Functional) -> list[Any]:
    """The calls that `graph` is made of, inputs apart, in the order Keras does them."""
    depths = sorted(graph._nodes_by_depth, reverse=True)
    nodes = [node for depth in depths for node in graph._nodes_by_depth[depth]]
    return [node for node in nodes if node.operation and not node.is_input]
