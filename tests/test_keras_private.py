"""What the package needs of Keras's and TensorFlow's private parts is still there.

A failure here names the part that has moved, before anything else fails for it.
"""

import inspect

import keras
import pytest
import tensorflow as tf
from helpers import data, dense_model
from keras.src.losses import loss as keras_loss
from keras.src.trainers.trainer import Trainer

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
