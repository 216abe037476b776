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
from keras.src.losses import loss as keras_loss
from keras.src.trainers.trainer import Trainer
from tensorflow.python.eager import context

from keras_accum import _keras_private as private


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

    with private.listen_to_reductions(listener):
        listened = loss(y, y + 1)
    loss(y, y + 1)
    assert float(plain) == float(listened) == 1.0
    assert [reduction for _, _, _, reduction, _ in heard] == ["sum_over_batch_size"]
    assert not private.is_listening()


def test_layers_at_any_depth_are_found():
    inner = dense_model()
    model = keras.Sequential([keras.Input((5,)), inner])
    found = private.flatten_layers(model)
    assert set(inner.layers) <= set(found)
    assert model not in inner.layers


@pytest.mark.parametrize("compiled", [True, False])
def test_xla_is_noticed_while_tracing(compiled):
    seen = []

    @tf.function(jit_compile=compiled)
    def step(x):
        seen.append(private.compiled_by_xla())
        return x

    step(tf.constant(1.0))
    assert seen == [compiled]
    assert private.compiled_by_xla() is False


def test_optimizers_reduce_gradients_in_a_method_that_can_be_shadowed():
    optimizer = keras.optimizers.SGD()
    assert parameters(optimizer._all_reduce_sum_gradients) == ["grads_and_vars"]
    private.leave_reduction_to_caller(optimizer)
    pairs = [(tf.constant(1.0), keras.Variable(1.0))]
    assert optimizer._all_reduce_sum_gradients(iter(pairs)) == pairs


def test_the_compiler_tells_the_memory_of_a_program():
    weights = tf.Variable(tf.ones((256, 256)))

    @tf.function(jit_compile=True)
    def step(x):
        # One temporary of the size of x, which a product cannot absorb.
        weights.assign_sub(tf.matmul(tf.tanh(x), tf.tanh(x), transpose_a=True))
        return tf.constant(0.0)

    def needed(rows):
        return private.compiled_bytes(step, tf.ones((rows, 256)))

    # The update takes place, and the argument is the caller's: neither counts.
    assert needed(4096) - needed(1024) == 3072 * 256 * 4
    assert needed(1024) < 2 * 1024 * 256 * 4


def test_the_limit_of_a_device_is_known():
    assert private.device_limit("CPU:0") > 0
    with pytest.raises(ValueError, match="There is no device 'GPU:7'"):
        private.device_limit("GPU:7")


def test_stand_ins_are_made_for_what_is_not_built_and_for_nothing_else():
    model = dense_model()
    metric = keras.metrics.MeanSquaredError()
    model.compile("adam", loss="mae", loss_weights=0.5, metrics=[metric])
    parts = private.unbuilt_parts(model)
    assert set(parts) == {"optimizer", "_compile_loss", "_compile_metrics"}
    assert parts["optimizer"].get_config() == model.optimizer.get_config()
    vars(model).update(parts)
    x, y = data(4)
    logs = model.train_on_batch(x, y, return_dict=True)
    assert set(logs) == {"loss", "mean_squared_error"}
    expected = 0.5 * np.abs(dense_model().predict(x, verbose=0) - y).mean()
    assert_close(logs["loss"], expected, rtol=1e-5)  # float32 sums in another order
    assert private.unbuilt_parts(model) == {}


def test_all_metrics_are_found_before_and_after_they_are_built():
    model = dense_model()
    metric = keras.metrics.MeanSquaredError()
    model.compile("sgd", "mse", metrics=[metric], weighted_metrics=["mae"])
    assert metric in private.all_metrics(model)
    model.train_on_batch(*data(4))
    names = [m.name for m in private.all_metrics(model)]
    assert {"loss", "mean_squared_error"} <= set(names)


def test_what_a_layer_passed_to_add_loss_is_in_these_containers():
    class Adds(keras.layers.Layer):
        def call(self, x):
            self.add_loss(keras.ops.mean(x))
            return x

    model = keras.Sequential([keras.Input((3,)), Adds()])
    model(np.ones((2, 3), "float32"))
    assert sum(len(c) for c in private.call_traces(model) if isinstance(c, list)) == 1


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
    names = [v.path for v in private.state_of_layers(model)]
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

    with private.random_state_kept():
        inside = draw()
    assert draw() == inside
    assert draw() != inside
