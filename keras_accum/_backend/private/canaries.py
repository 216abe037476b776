"""What would be wrong without a word if a private part moved: tried once, before use.

Most parts that move away end in an AttributeError. These may not: an attribute that is
set and that nobody reads, a function in whose place another is called, a mark that
tensors no longer carry. So each part is used once as the package uses it, on a few
numbers whose result is known, when the first object is made.

All of it runs in a thread of its own: names, seeds, scopes and strategies of Keras and
TensorFlow belong to a thread, so that the caller's stay as they are. `tests/renames.py`
hides each private name in turn, and prints who notices.
"""

import functools
import random
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer
from keras.src.random.seed_generator import draw_seed
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from tensorflow.python.client import device_lib
from tensorflow.python.distribute.values import DistributedVariable
from tensorflow.python.eager import context as tf_context
from tensorflow.python.framework import ops as tf_ops

from . import (
    compiled,
    functions,
    graphs,
    layers,
    losses,
    models,
    optimizers,
    randomness,
    strategies,
    tapes,
)
from .versions import Moved, explained_if_moved


@functools.cache
def check() -> None:
    """Try all canaries, once in a process.

    Raises:
        RuntimeError: if one fails, with the versions found and tested, and what to do.
    """
    failed: list[Exception] = []

    def run() -> None:
        try:
            with explained_if_moved(RuntimeError):
                model = _model()
                for canary in CANARIES:
                    canary(model)
        except RuntimeError as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="keras_accum canaries")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def losses_are_heard(_: keras.Model) -> None:
    """Each reduction of a loss passes the listener, with the mask of the predictions."""
    heard: list[Any] = []

    def listener(
        values: Any, sample_weight: Any, mask: Any, reduction: Any, loss: Any
    ) -> Any:
        heard.append((values.shape[0], sample_weight is None, mask is None, reduction))
        called = losses.loss_call()
        _expect(called is not None and called.y_pred is y_pred, "calls of losses")
        return loss + 1.0

    y_pred = layers.with_keras_mask(tf.constant([[1.0], [3.0]]), tf.constant([1, 0]) > 0)
    loss = keras.losses.MeanSquaredError(name="loss", dtype="float32")
    with losses.listen_to_reductions(listener), losses.undivided_losses() as left_out:
        value = loss(tf.zeros((2, 1)), y_pred)
    _expect(heard == [(2, True, False, "sum_over_batch_size")], "reductions of losses")
    _expect(abs(float(value) - 2.0) < 1e-5, "what losses are reduced to")
    _expect(len(left_out) == 1, "the division of losses by the number of replicas")


def training_steps_are_seen(model: keras.Model) -> None:
    """`Model.train_step` takes the methods that are extended, and the parts replaced."""
    model.compile(
        keras.optimizers.SGD(0.5, name="sgd"),
        "mse",
        metrics=[_mean_of_batch],
        weighted_metrics=["mae"],
    )
    _expect(set(models.unbuilt_parts(model)) == set(_COMPILED), "compiled parts")
    _expect(hasattr(model, "_symbolic_build"), "`Model._symbolic_build`")
    x, y = tf.constant([[1.0], [3.0]]), tf.zeros((2, 1))
    compute, computed, applied = model._compute_loss, [], []

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        computed.append(compute(*args, **kwargs))
        return computed[-1]

    reduce = model.optimizer._all_reduce_sum_gradients

    def all_reduce(grads_and_vars: Any) -> Any:
        applied.extend(grads_and_vars)
        return reduce(applied)

    object.__setattr__(model, "_compute_loss", compute_loss)
    object.__setattr__(model.optimizer, "_all_reduce_sum_gradients", all_reduce)
    with losses.undivided_losses() as left_out, losses.tracked_apart(model) as track:
        model.train_step((x, y))
    _expect(len(computed) == 1, "`Model._compute_loss`")
    _expect(len(applied) == 2, "`Optimizer._all_reduce_sum_gradients`")
    # Of the mean, and of what is logged of it.
    _expect(len(left_out) >= 2, "the division of losses by the number of replicas")
    (tracker,) = [m for m in models.all_metrics(model) if m.name == "loss"]
    tracker.reset_state()
    track(tf.constant(7.0), [], 2)
    _expect(float(tracker.result()) == 7.0, "the metric that `fit` shows as `loss`")
    _expect(len(models.all_metrics(model)) == 2, "compiled metrics")
    with models.scalar_metrics(model, 2) as scalars:
        model.compute_metrics(x, y, x)
    _expect(scalars == [_mean_of_batch.__name__], "the function of a metric")
    _expect(len(models.state_of_layers(model)) == 6, "the state of layers")


def regularizers_are_asked(model: keras.Model) -> None:
    """Losses are asked of the regularizers that weights have then.

    In its place stands another one where gradients are added up.
    """
    kernel = model.get_layer("dense").kernel
    kernel.assign([[3.0]])
    kernel.regularizer = keras.regularizers.L2(0.5)
    found = [float(loss) for loss in model.losses]
    kernel.regularizer = None
    _expect(4.5 in found, "the regularizers of weights")


def compile_asks_an_optimizer(model: keras.Model) -> None:
    """`compile` asks what an optimizer is, which tells the optimizer of its model."""
    optimizer = _Asked(name="asked")
    optimizer.seen.clear()
    model.compile(optimizer, "mse", auto_scale_loss=False)
    _expect((model, False) in optimizer.seen, "what `compile` asks of an optimizer")


_COMPILED = ("optimizer", "_compile_loss", "_compile_metrics")


def tensors_carry_masks_and_logits(_: keras.Model) -> None:
    """Layers and activations hang on tensors what losses look for there."""
    x = tf.constant([[[0.0, 0.0], [1.0, 2.0]]])
    masked = keras.layers.Masking(name="masking", dtype="float32")(x)
    _expect(layers.keras_mask(masked) is not None, "the mask of `Masking`")
    layers.drop_keras_mask(masked)
    _expect(layers.keras_mask(masked) is None, "the mask of `Masking`")
    for activation in (keras.activations.softmax, keras.activations.sigmoid):
        logits = layers.keras_logits(activation(x))
        _expect(logits is not None, f"the logits of `{activation.__name__}`")
    # Of these probabilities no logarithm can be taken; of their logits it need not be.
    logits, y = tf.constant([[0.0, 200.0]]), tf.constant([[1.0, 0.0]])
    y_pred = layers.with_keras_logits(tf.constant([[0.0, 1.0]]), logits)
    loss = float(keras.losses.categorical_crossentropy(y, y_pred)[0])
    _expect(abs(loss - 200.0) < 1e-3, "the logits that a loss looks for")


def calls_have_their_context(model: keras.Model) -> None:
    """What layers pass down, and the type that weights are cast to, can be had again."""
    variable = keras.Variable(1.0, name="variable", dtype="float32")
    looks = model.get_layer("looks")
    layers.call(model, tf.ones((1, 1)))
    _expect(looks.seen[-1:] == [True], "the arguments that layers pass down")
    with looks.contexts[-1]():
        _expect(layers.inherited("training") is True, "the context of a call")
        _expect(variable.value.dtype == tf.float16, "the type that weights are cast to")
    _expect(layers.inherited("training") is None, "the context of a call")
    _expect(variable.value.dtype == tf.float32, "the type that weights are cast to")


def scopes_are_asked(_: keras.Model) -> None:
    """Variables are read and assigned through the methods that `_recompute` overrides."""

    class Scope(keras.StatelessScope):
        def get_current_value(self, variable: keras.Variable) -> tf.Tensor:
            return tf.constant(7.0)

        def add_update(self, update: Any) -> None:
            updates.append(update)
            super().add_update(update)

    updates: list[Any] = []
    variable = keras.Variable(2.0, name="variable", dtype="float32")
    frozen = keras.Variable(1.0, name="frozen", dtype="float32", trainable=False)
    with Scope() as scope:
        _expect(layers.current_scope() is scope, "the innermost `StatelessScope`")
        _expect(float(variable.value) == 7.0, "how a `StatelessScope` is read")
        variable.assign(3.0)
        outside: Any = layers.read(variable)
        _expect(float(outside) == 2.0, "the value outside of scopes")
    _expect(len(updates) == len(scope.state_mapping) == 1, "how one is assigned to")
    watched = layers.is_watched(variable), layers.is_watched(frozen)
    _expect(watched == (True, False), "which variables tapes watch")
    with keras.SymbolicScope():
        _expect(layers.is_symbolic(), "`SymbolicScope`")
    layer, other = _Adds(name="adds"), _Adds(name="other")
    with keras.StatelessScope(collect_losses=True) as scope:
        layer(tf.ones(2))
    _expect(
        losses.take_loss([other, layer], scope.losses[0]) is layer, "the owners of losses"
    )
    layer(tf.ones(2))
    _expect(len(losses.call_losses(layer)) == 1, "the losses that layers add")
    _expect(sum(map(len, models.call_traces(layer))) == 1, "where layers keep losses")
    losses.forget_call_losses(layer)
    _expect(not losses.call_losses(layer), "the losses that layers add")


def graphs_run_where_they_are_replaced(model: keras.Model) -> None:
    """A functional model runs its layers in the method that segments replace."""
    graph: Any = graphs.graph_of(model)
    _expect(len(graphs.nodes_of(graph)) == 2, "graphs of layers")
    plain, ran = graph._run_through_graph, []

    def run_through_graph(*args: Any, **kwargs: Any) -> Any:
        ran.append(args)
        return plain(*args, **kwargs)

    object.__setattr__(graph, "_run_through_graph", run_through_graph)
    graph(tf.ones((1, 1)))
    _expect(len(ran) == 1, "`Functional._run_through_graph`")
    _expect(hasattr(graph, "_outputs_struct"), "the outputs of a graph of layers")
    _expect(hasattr(graph, "_inputs_struct"), "the inputs of a graph of layers")


def layers_can_be_wrapped(_: keras.Model) -> None:
    """`Recompute` takes over what Keras has read off the signatures of a layer."""
    inner = keras.layers.Dropout(0.5, seed=0, name="inner", dtype="float32")
    wrapper = keras.layers.Wrapper(inner, name="wrapper")
    _expect(hasattr(wrapper, "_convert_input_args"), "how layers convert arguments")
    layers.take_arguments(wrapper, inner)
    _expect(layers.call_method(inner) == "call", "the method that a layer's call calls")
    _expect(hasattr(keras.layers.Dense, "quantized_call"), "`Layer.quantized_call`")
    _expect(not layers.is_in_remat_scope(inner), "`RematScope`")
    _expect(not layers.has_build(inner), "`build` of `Layer`")
    _expect(layers.children(wrapper) == [inner], "the layers inside of a layer")
    norm = keras.layers.BatchNormalization.call.__code__
    _expect("_moments" in norm.co_names, "`BatchNormalization._moments`")
    built = _Adds(name="built")
    built(tf.ones(2))
    with layers.taking_more_weights(built):
        built.add_weight((), "zeros", name="further")
    _expect(len(built.weights) == 1, "the lock of a layer's weights")


def randomness_is_found(_: keras.Model) -> None:
    """The generators behind layers and operations without a seed are where they were."""
    # Keras draws the seed of the first generator of a thread from Python's.
    state = random.getstate()
    try:
        draw_seed(None)
    finally:
        random.setstate(state)
    _expect(randomness.global_seed_generator() is not None, "the global seed generator")
    # A generator would be made by seeding TensorFlow, which is the user's to do.
    seeding = tf_context.Context._set_global_seed.__code__
    _expect("_rng" in seeding.co_names, "TensorFlow's generator of operations' seeds")
    dropout = keras.layers.Dropout.call.__code__.co_names
    _expect({"random", "dropout"} <= set(dropout), "how `Dropout` draws its mask")


def optimizers_can_be_steered(_: keras.Model) -> None:
    """What is replaced, overridden or called of optimizers across replicas and saves."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5, name="schedule")
    optimizer = keras.optimizers.SGD(
        schedule, use_ema=True, ema_overwrite_frequency=1, name="sgd"
    )
    _expect(optimizers.schedule_of(optimizer) is schedule, "schedules of optimizers")
    variable = keras.Variable([2.0], name="variable", dtype="float32")
    optimizer.build([variable])
    _expect(optimizers.index_of(optimizer, variable) == 0, "the order of variables")
    _expect(optimizers.trained_by(optimizer) == [variable], "the variables trained")
    optimizers.track_variable(optimizer, variable)
    _expect(optimizer.variables[-1] is variable, "the variables of an optimizer")
    with strategies.replicas_left_to_caller(optimizer):
        optimizer.apply([tf.constant([0.0])], [variable])
    ((due, overwrite, variables),) = strategies.overwriting_by_averages(optimizer)
    variable.assign([5.0])
    overwrite()
    _expect(bool(due) and len(variables) == 1, "when averages overwrite weights")
    _expect(float(variable[0]) == 2.0, "how averages overwrite weights")
    if hasattr(keras.optimizers, "MultiOptimizer"):  # From Keras 3.15 on.
        part = keras.optimizers.SGD(name="part")
        parts = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(part))
        parts.build([variable])
        places = optimizers.optimizers_of(parts, [variable])
        _expect(places == [(part, [0])], "the parts of a `MultiOptimizer`")
    for name in (
        "_trackable_children",
        "_handle_deferred_dependencies",
        "_lookup_dependency",
    ):
        _expect(hasattr(optimizer, name), f"`Optimizer.{name}`")
    local = hasattr(DistributedVariable, "_get_on_device_or_primary")
    _expect(local, "the part of a variable that is on one replica")


def fit_can_be_listened_to_and_mended(model: keras.Model) -> None:
    """What is replaced while models fit, and under strategies, and what is asked there."""
    for name in (
        "_assert_compile_called",
        "_distribute_strategy",
        "_maybe_symbolic_build",
    ):
        _expect(hasattr(model, name), f"`Model.{name}`")
    for name in ("_collective_all_reduce_multi_worker", "reduce_per_replica"):
        _expect(hasattr(trainer, name), f"`{name}`")
    _expect(hasattr(DataAdapter, "get_tf_dataset"), "`DataAdapter.get_tf_dataset`")
    _expect(hasattr(device_lib, "list_local_devices"), "`list_local_devices`")


def graphs_and_tapes_can_be_asked(_: keras.Model) -> None:
    """XLA is noticed while tracing, and tapes while they record."""
    compiles: list[bool] = []
    for jit_compile in (True, False):

        def trace() -> None:
            compiles.append(compiled.compiled_by_xla())

        tf.function(
            trace, jit_compile=jit_compile, autograph=False
        ).get_concrete_function()
    _expect(compiles == [True, False], "what XLA compiles")
    _expect(
        _in_function() == [False, True], "what is in a function, and what in a branch"
    )
    x = tf.constant(3.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        recorded = tapes.could_record() and tapes.is_recorded([x])
        with tapes.unrecorded():
            y = x * 2.0
        z = tapes.value_with_gradient_of(tf.constant(7.0), x * 5.0)
        _expect(recorded and not tapes.is_recorded([y]), "what tapes record")
    _expect(float(z) == 7.0 and float(tape.gradient(z, x)) == 5.0, "what tapes record")


CANARIES: tuple[Callable[[keras.Model], None], ...] = (
    losses_are_heard,
    training_steps_are_seen,
    regularizers_are_asked,
    compile_asks_an_optimizer,
    tensors_carry_masks_and_logits,
    calls_have_their_context,
    scopes_are_asked,
    graphs_run_where_they_are_replaced,
    layers_can_be_wrapped,
    randomness_is_found,
    optimizers_can_be_steered,
    fit_can_be_listened_to_and_mended,
    graphs_and_tapes_can_be_asked,
)


def _in_function() -> list[bool]:
    """Whether a branch, and a function, are told to be in a function of their own."""
    found: list[bool] = []

    def trace() -> tf.Tensor:
        outer = tf_ops.get_default_graph()

        def branch() -> tf.Tensor:
            found.append(functions.is_in_function(tf_ops.get_default_graph(), outer))
            return tf.constant(0.0)

        tf.cond(tf.constant(True), branch, lambda: tf.constant(1.0))
        return tf.function(branch, autograph=False)()

    tf.function(trace, autograph=False).get_concrete_function()
    return found


def _mean_of_batch(y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(y_pred - y_true)


class _Asked(keras.optimizers.SGD):
    """Notes what compiles a model whenever it is asked for its class."""

    seen: ClassVar[list[Any]] = []

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        self.seen.append(optimizers.compiling())
        return type(self)


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise Moved(f"{what}.")


class _Looks(keras.layers.Layer):
    """Notes what is around its call, which takes no `training`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seen: list[Any] = []
        self.contexts: list[Any] = []

    def call(self, inputs: Any) -> Any:
        self.seen.append(layers.inherited("training"))
        self.contexts.append(layers.save_context())
        return inputs


class _Adds(keras.layers.Layer):
    """Adds a loss."""

    def call(self, inputs: Any) -> Any:
        self.add_loss(keras.ops.sum(inputs))
        return inputs


def _model() -> keras.Model:
    """A model that computes in float16 first, and then 1 times what it is given."""
    dense = keras.layers.Dense(
        1, kernel_initializer="ones", name="dense", dtype="float32"
    )
    return keras.Sequential(
        [
            keras.Input((1,), name="input", dtype="float32"),
            _Looks(name="looks", dtype="mixed_float16"),
            dense,
        ],
        name="canary",
    )
