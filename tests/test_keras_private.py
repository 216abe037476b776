"""What the package needs of Keras's and TensorFlow's private parts is still there.

A failure here names the part that has moved, before anything else fails for it.
"""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import data, dense_model
from keras.src.backend.tensorflow import trainer as tf_trainer
from keras.src.losses import loss as keras_loss
from keras.src.trainers import compile_utils
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


def test_optimizers_leave_to_the_caller_what_they_do_across_replicas():
    """Entered twice, as two replicas do in turns: the last to leave restores."""
    optimizer = keras.optimizers.SGD(use_ema=True, ema_overwrite_frequency=3)
    reduce = optimizer._all_reduce_sum_gradients
    assert parameters(reduce) == ["grads_and_vars"]
    pairs = [(tf.constant(1.0), keras.Variable(1.0))]
    first, second = (private.replicas_left_to_caller(optimizer) for _ in range(2))
    with first:
        second.__enter__()
    assert optimizer._all_reduce_sum_gradients(iter(pairs)) == pairs
    assert optimizer.ema_overwrite_frequency is None
    second.__exit__(None, None, None)
    assert optimizer._all_reduce_sum_gradients == reduce
    assert optimizer.ema_overwrite_frequency == 3


def test_the_parts_of_an_optimizer_are_found_inside_of_wrappers():
    sgd, adam = keras.optimizers.SGD(), keras.optimizers.Adam()
    assert private._parts(keras.optimizers.LossScaleOptimizer(sgd)) == [sgd]
    assert private._parts(adam) == [adam]


def test_averages_overwrite_weights_in_a_method_of_the_optimizer():
    weights = keras.Variable([1.0, 2.0])
    optimizer = keras.optimizers.SGD(
        1.0, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
    )
    optimizer.build([weights])
    for due in (False, True):
        with private.replicas_left_to_caller(optimizer):
            optimizer.apply([tf.constant([1.0, 1.0])], [weights])
        ((is_due, overwrite),) = private.overwriting_by_averages(optimizer)
        assert bool(is_due) is due
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
