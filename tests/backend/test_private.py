"""What the package needs of Keras's and TensorFlow's private parts is still there.

A failure here names the part that has moved, before anything else fails for it.
"""

import inspect
import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_close, data, dense_model
from keras.src.backend import random as keras_random
from keras.src.backend.tensorflow import trainer as tf_trainer
from keras.src.layers.rnn.dropout_rnn_cell import DropoutRNNCell
from keras.src.losses import loss as keras_loss
from keras.src.trainers import compile_utils
from keras.src.trainers.trainer import Trainer
from tensorflow.python.eager import context

from keras_accum._backend.private import (
    compiled,
    functions,
    graphs,
    layers,
    losses,
    models,
    randomness,
    strategies,
    tapes,
)


def parameters(function):
    return list(inspect.signature(inspect.unwrap(function)).parameters)


def test_keras_reduces_losses_in_a_function_that_loss_looks_up_by_name():
    assert parameters(keras_loss.reduce_weighted_values) == [
        "values",
        "sample_weight",
        "mask",
        "reduction",
        "dtype",
    ]
    source = inspect.getsource(keras.losses.Loss.__call__)
    assert "return reduce_weighted_values(" in source


def test_keras_computes_the_training_loss_in_these_methods():
    expected = ["self", "x", "y", "y_pred", "sample_weight", "training"]
    assert parameters(Trainer.compute_loss) == expected
    assert parameters(Trainer._compute_loss) == expected
    assert "self._compute_loss(" in inspect.getsource(keras.Model.train_step)


def test_listening_hears_each_reduction_and_changes_none():
    heard = []
    _, y = data(4)
    loss = keras.losses.MeanSquaredError()
    plain = loss(y, y + 1)

    def listener(*reduced):
        heard.append(reduced)
        return reduced[-1]

    with losses.listen_to_reductions(listener):
        listened = loss(y, y + 1)
    loss(y, y + 1)
    assert float(plain) == float(listened) == 1.0
    assert [reduction for _, _, _, reduction, _ in heard] == ["sum_over_batch_size"]
    assert not losses.is_listening()


def test_layers_at_any_depth_are_found():
    inner = dense_model()
    model = keras.Sequential([keras.Input((5,)), inner])
    found = layers.flatten_layers(model)
    assert set(inner.layers) <= set(found)
    assert model not in inner.layers


@pytest.mark.parametrize("jit_compile", [True, False])
def test_xla_is_noticed_while_tracing(jit_compile):
    seen = []

    @tf.function(jit_compile=jit_compile)
    def step(x):
        seen.append(compiled.compiled_by_xla())
        return x

    step(tf.constant(1.0))
    assert seen == [jit_compile]
    assert compiled.compiled_by_xla() is False


def test_optimizers_leave_to_the_caller_what_they_do_across_replicas():
    """Entered twice, as two replicas do in turns: the last to leave restores."""
    optimizer = keras.optimizers.SGD(use_ema=True, ema_overwrite_frequency=3)
    reduce = optimizer._all_reduce_sum_gradients
    assert parameters(reduce) == ["grads_and_vars"]
    pairs = [(tf.constant(1.0), keras.Variable(1.0))]
    first, second = (strategies.replicas_left_to_caller(optimizer) for _ in range(2))
    with first:
        second.__enter__()
    assert optimizer._all_reduce_sum_gradients(iter(pairs)) == pairs
    assert optimizer.ema_overwrite_frequency is None
    second.__exit__(None, None, None)
    assert optimizer._all_reduce_sum_gradients == reduce
    assert optimizer.ema_overwrite_frequency == 3


def test_the_parts_of_an_optimizer_are_found_inside_of_wrappers():
    sgd, adam = keras.optimizers.SGD(), keras.optimizers.Adam()
    assert strategies._parts(keras.optimizers.LossScaleOptimizer(sgd)) == [sgd]
    assert strategies._parts(adam) == [adam]


def test_averages_overwrite_weights_in_a_method_of_the_optimizer():
    weights = keras.Variable([1.0, 2.0])
    optimizer = keras.optimizers.SGD(
        1.0, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
    )
    optimizer.build([weights])
    for due in (False, True):
        with strategies.replicas_left_to_caller(optimizer):
            optimizer.apply([tf.constant([1.0, 1.0])], [weights])
        ((is_due, overwrite, variables),) = strategies.overwriting_by_averages(optimizer)
        assert bool(is_due) is due
    assert variables == [weights]
    (average,) = optimizer._model_variables_moving_average
    before = weights.numpy()
    overwrite()
    np.testing.assert_array_equal(weights.numpy(), average.numpy())
    assert (before != weights.numpy()).all()


def test_keras_divides_losses_by_the_replicas_in_functions_of_one_module():
    for name in ("scale_loss_for_distribution", "unscale_loss_for_distribution"):
        assert parameters(getattr(keras_loss, name)) == ["value"]
    source = inspect.getsource(keras_loss.reduce_values)
    assert "scale_loss_for_distribution(" in source
    for trainer in (tf_trainer, compile_utils):
        source = inspect.getsource(trainer)
        assert "loss_module.unscale_loss_for_distribution(" in source
        assert "import scale_loss_for_distribution" not in source


def test_keras_builds_and_logs_under_strategies_where_they_are_mended():
    build = tf_trainer.TensorFlowTrainer._maybe_symbolic_build
    assert parameters(build) == ["self", "iterator", "data_batch"]
    assert parameters(tf_trainer.reduce_per_replica) == [
        "values",
        "strategy",
        "reduction",
    ]
    source = inspect.getsource(tf_trainer.TensorFlowTrainer)
    assert "= reduce_per_replica(" in source
    assert "self._maybe_symbolic_build(iterator=epoch_iterator)" in source
    assert parameters(tf_trainer._collective_all_reduce_multi_worker) == ["strategy"]


# --- What recomputation needs.


def test_variables_and_scopes_can_be_read():
    variable = keras.Variable(2.0)
    frozen = keras.Variable(2.0, trainable=False)
    assert float(layers.read(variable)) == 2.0
    assert layers.is_watched(variable) and not layers.is_watched(frozen)
    assert layers.current_scope() is None and not layers.is_symbolic()
    with keras.StatelessScope([(variable, tf.constant(3.0))]) as scope:
        assert layers.current_scope() is scope
        assert float(variable.value) == 3.0
        # The name by which the passes of `_passes` are found to read and write.
        assert scope.get_current_value(variable) is scope.state_mapping[id(variable)]
        variable.assign(4.0)
        assert float(scope.get_current_value(variable)) == 4.0
    assert float(layers.read(variable)) == 2.0
    with keras.SymbolicScope():
        assert layers.is_symbolic()


def test_the_context_of_a_call_can_be_saved_and_restored():
    class Seen(keras.layers.Layer):
        def call(self, inputs):
            saved.append(layers.save_context())
            seen.append(layers.inherited("training"))
            return inputs

    saved, seen = [], []
    model = keras.Sequential([keras.Input((2,)), Seen(dtype="mixed_float16")])
    model(np.ones((1, 2)), training=True)
    assert seen[-1] is True
    variable = keras.Variable(1.0)
    with saved[-1]():
        assert layers.inherited("training") is True
        assert variable.value.dtype == tf.float16
    assert layers.inherited("training") is None
    assert variable.value.dtype == tf.float32


def test_tapes_can_be_asked_and_paused():
    x = tf.constant(3.0)
    assert not tapes.could_record()
    with tf.GradientTape() as tape:
        tape.watch(x)
        assert tapes.could_record() and tapes.is_recorded([x])
        with tapes.unrecorded():
            y = x * 2
        assert not tapes.is_recorded([y])
        value_with_gradient_of = tapes.value_with_gradient_of(tf.constant(7.0), x * 5)
    assert (
        float(value_with_gradient_of) == 7.0
        and float(tape.gradient(value_with_gradient_of, x)) == 5.0
    )


def test_loops_and_functions_are_told_apart_and_what_they_read_is_found():
    variable = keras.Variable(2.0)
    function = tf.function(lambda x: x * variable._value, autograph=False)
    seen = {}

    def look(name, outer):
        graph = tf.compat.v1.get_default_graph()
        seen[name] = functions.is_in_function(graph, outer)
        return tf.constant(1.0)

    @tf.function(autograph=False)
    def step(x):
        outer = tf.compat.v1.get_default_graph()
        look("here", outer)
        tf.while_loop(lambda i: i < 2.0, lambda i: i + look("loop", outer), [x])
        tf.cond(x < 9.0, lambda: look("branch", outer), lambda: x)
        tf.function(lambda: look("function", outer), autograph=False)()
        result = tf.cond(x < 9.0, lambda: function(x), lambda: x)
        inputs = [x for op in outer.get_operations() for x in op.inputs]
        taken = [functions.captured(x) for x in inputs if x.dtype == tf.resource]
        (handle,) = layers.handles_of(variable)
        seen["reads it"] = any(x is handle for x in taken)
        return result

    assert float(step(tf.constant(3.0))) == 6.0
    expected = {"here": False, "loop": False, "branch": False, "function": True}
    assert seen == {**expected, "reads it": True}


def test_losses_of_a_scope_have_an_owner():
    class Adds(keras.layers.Layer):
        def call(self, inputs):
            self.add_loss(keras.ops.sum(inputs))
            return inputs

    layers = [Adds(), Adds()]
    with keras.StatelessScope(collect_losses=True) as scope:
        layers[1](tf.ones(3))
    assert losses.take_loss(layers, scope.losses[0]) is layers[1]
    assert not layers[1]._loss_ids


def test_what_a_layer_holds_is_told_from_the_losses_of_its_last_call():
    layer = keras.layers.Dense(3, activity_regularizer="l2")
    layer(tf.ones((2, 4)))
    (loss,) = layer.losses

    def holders(attributes):
        lists = {n: x for n, x in attributes.items() if isinstance(x, list)}
        return [n for n, values in lists.items() if any(x is loss for x in values)]

    assert len(holders(vars(layer))) == 1
    assert holders(layers.attributes_without_losses(layer)) == []
    assert layers.attributes_without_losses(layer)["units"] == 3


def test_layers_keep_logits_build_and_arguments_where_they_are_looked_for():
    probabilities = keras.activations.softmax(tf.constant([[1.0, 2.0]]))
    logits = layers.keras_logits(probabilities)
    assert logits.numpy().tolist() == [[1.0, 2.0]]
    assert layers.with_keras_logits(tf.ones(2), logits)._keras_logits is logits
    dense = keras.layers.Dense(3)
    assert layers.has_build(dense) and not layers.has_build(keras.layers.Flatten())
    layers.build_by_call(dense, tf.ones((2, 4)))
    assert dense.kernel.shape == (4, 3)
    assert layers.call_method(dense) == "call"
    assert not layers.is_in_remat_scope(dense)
    wrapper = keras.layers.Wrapper(keras.layers.Dropout(0.5))
    layers.take_arguments(wrapper, wrapper.layer)
    assert wrapper.call_signature_parameters == ["inputs", "training"]


def test_a_graph_of_layers_can_be_taken_apart():
    model = dense_model()
    assert graphs.graph_of(model) is model
    sequential = keras.Sequential([keras.Input((5,)), model])
    graph = graphs.graph_of(sequential)
    assert [node.operation for node in graphs.nodes_of(graph)] == [model]
    assert graphs.graph_of(keras.Sequential()) is None
    assert layers.children(sequential)[-1] is model
    # What calls the layers, and how Keras calls it.
    keras_own = graphs.runner_of(graph)
    assert parameters(keras_own) == ["inputs", "operation_fn", "call_fn"]
    seen = []
    patch = graphs.run_by(graph, lambda *args, **kwargs: seen.append(args) or tf.ones(2))
    assert sequential(tf.ones((1, 5))).shape == (2,)
    assert len(seen) == 1
    patch.undo()
    assert graphs.runner_of(graph) == keras_own
    assert sequential(tf.ones((1, 5))).shape == (1, 3)
    two = keras.Model(model.inputs, {"a": model.outputs[0], "b": model.outputs})
    assert graphs.pack_outputs(two, [1, 2]) == {"a": 1, "b": [2]}


def test_the_compiler_tells_the_memory_of_a_program():
    weights = tf.Variable(tf.ones((256, 256)))

    @tf.function(jit_compile=True)
    def step(x):
        # One temporary of the size of x, which a product cannot absorb.
        weights.assign_sub(tf.matmul(tf.tanh(x), tf.tanh(x), transpose_a=True))
        return tf.constant(0.0)

    def needed(rows):
        return compiled.compiled_bytes(step, tf.ones((rows, 256)))

    # The update takes place, and the argument is the caller's: neither counts.
    assert needed(4096) - needed(1024) == 3072 * 256 * 4
    assert needed(1024) < 2 * 1024 * 256 * 4


def test_the_limit_of_a_device_is_known():
    assert compiled.device_limit("CPU:0") > 0
    with pytest.raises(ValueError, match="There is no device 'GPU:7'"):
        compiled.device_limit("GPU:7")


def test_stand_ins_are_made_for_what_is_not_built_and_for_nothing_else():
    model = dense_model()
    metric = keras.metrics.MeanSquaredError()
    model.compile("adam", loss="mae", loss_weights=0.5, metrics=[metric])
    parts = models.unbuilt_parts(model)
    assert set(parts) == {"optimizer", "_compile_loss", "_compile_metrics"}
    assert parts["optimizer"].get_config() == model.optimizer.get_config()
    vars(model).update(parts)
    x, y = data(4)
    logs = model.train_on_batch(x, y, return_dict=True)
    assert set(logs) == {"loss", "mean_squared_error"}
    expected = 0.5 * np.abs(dense_model().predict(x, verbose=0) - y).mean()
    assert_close(logs["loss"], expected, rtol=1e-5)  # float32 sums in another order
    assert models.unbuilt_parts(model) == {}


def test_all_metrics_are_found_before_and_after_they_are_built():
    model = dense_model()
    metric = keras.metrics.MeanSquaredError()
    model.compile("sgd", "mse", metrics=[metric], weighted_metrics=["mae"])
    assert metric in models.all_metrics(model)
    model.train_on_batch(*data(4))
    names = [m.name for m in models.all_metrics(model)]
    assert {"loss", "mean_squared_error"} <= set(names)


def test_what_a_layer_passed_to_add_loss_is_in_these_containers():
    class Adds(keras.layers.Layer):
        def call(self, x):
            self.add_loss(keras.ops.mean(x))
            return x

    model = keras.Sequential([keras.Input((3,)), Adds()])
    model(np.ones((2, 3), "float32"))
    assert sum(len(c) for c in models.call_traces(model) if isinstance(c, list)) == 1


def test_dropout_draws_in_one_function_that_layers_look_up_by_name():
    expected = ["inputs", "rate", "noise_shape", "seed"]
    assert parameters(keras_random.dropout) == expected
    for caller in (
        keras.layers.Dropout.call,
        keras.layers.SpatialDropout1D.call,
        keras.layers.Attention._apply_scores,
        DropoutRNNCell._create_dropout_mask,
        keras.random.dropout,
    ):
        assert "backend.random.dropout(" in inspect.getsource(caller)


def test_a_seed_is_drawn_without_the_numbers():
    seeds = [keras.random.SeedGenerator(3) for _ in range(2)]
    keras.random.dropout(np.ones(4, "float32"), 0.5, seed=seeds[0])
    randomness.MaskDrawing(tf.ones(4), None, seeds[1]).skip()
    assert_close(seeds[1].state, seeds[0].state)


def test_the_state_of_layers_is_what_is_not_trained():
    model = keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(4, name="frozen"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
        ]
    )
    model.get_layer("frozen").trainable = False
    model.compile("sgd", "mse", metrics=["mae"])
    model.train_on_batch(np.ones((2, 5)), np.ones((2, 4)))
    names = [v.path for v in models.state_of_layers(model)]
    assert not any("frozen" in name for name in names)
    assert sum("moving" in name for name in names) == 2
    assert sum("seed" in name for name in names) >= 1


def test_random_state_is_put_back():
    tf.random.set_seed(1)
    keras.random.uniform(())

    def draw():
        # The seed of TensorFlow's next eager operation: its kernels keep a state too,
        # which nothing can put back.
        return [
            random.random(),
            float(np.random.random()),
            context.internal_operation_seed(),
            float(keras.random.uniform(())),
        ]

    with randomness.random_state_kept():
        inside = draw()
    assert draw() == inside
    assert draw() != inside
