"""A micro-step whose gradients were never computed did not happen.

In a graph the end of a data set of unknown length, and an error in it, is met inside of
the step, and what depends on no data runs all the same.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_close, assert_differ

import keras_accum as ka

# Keras says so of data that are shorter than the epoch before.
pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data")

X = np.arange(20, dtype="float32").reshape(20, 1) / 10


def data_set():
    """Five batches of 4; how many, only reading them tells."""
    pairs = tf.data.Dataset.from_tensor_slices((X, 2 * X))
    return pairs.filter(lambda x, y: True).batch(4, drop_remainder=True)


def broken():
    """Two batches, and then an error."""
    for i in range(3):
        if i == 2:
            raise ValueError("a bad file")
        yield X[4 * i : 4 * i + 4], 2 * X[4 * i : 4 * i + 4]


def broken_data_set():
    return tf.data.Dataset.from_generator(
        broken, output_signature=(tf.TensorSpec((4, 1)), tf.TensorSpec((4, 1)))
    )


def model_of(optimizer, **options):
    keras.utils.set_random_seed(0)
    layer = keras.layers.Dense(1, kernel_regularizer=options.pop("regularizer", None))
    model = keras.Sequential([keras.Input((1,)), layer])
    if split := options.pop("split", None):
        ka.accumulate(model, **split)
    model.compile(optimizer, "mse", **{"jit_compile": False, **options})
    return model


def left(model):
    """Every number that a micro-step moves."""
    optimizer = model.optimizer
    return [*model.get_weights(), *[v.numpy() for v in optimizer.variables]]


SETTINGS = {
    "plain": {},
    "skips": {"on_nonfinite": "skip_micro_batch"},
    "momentum": {"inner": keras.optimizers.SGD(0.01, momentum=0.9)},
    "scaled": {"inner": keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01))},
}


@pytest.mark.slow_but("scaled-3")
@pytest.mark.parametrize("accum_steps", [1, 3])
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_end_of_data_of_unknown_length_is_no_micro_step(setting, accum_steps):
    def train(**options):
        settings = dict(SETTINGS[setting])
        inner = settings.pop("inner", keras.optimizers.SGD(0.01))
        inner = type(inner).from_config(inner.get_config())
        optimizer = ka.AccumOptimizer(inner, accum_steps, **settings)
        model = model_of(optimizer, **options)
        model.fit(data_set(), epochs=3, shuffle=False, verbose=0)
        return model

    graph, eager = train(), train(run_eagerly=True)
    assert int(graph.optimizer.iterations) == 15 // accum_steps
    assert int(graph.optimizer.micro_step) == 15 % accum_steps
    assert_close(left(graph), left(eager))


def test_a_regularizer_is_no_gradient_of_data_that_have_ended():
    """Its gradient needs no data, so that only the others' can hold it back."""
    trained = []
    for eager in (False, True):
        optimizer = ka.AccumOptimizer(keras.optimizers.SGD(0.01), 3)
        model = model_of(optimizer, regularizer="l2", run_eagerly=eager)
        model.fit(data_set(), epochs=3, shuffle=False, verbose=0)
        trained.append(left(model))
    assert_close(*trained)


def test_several_steps_an_execution_stop_where_the_data_do():
    optimizer = ka.AccumOptimizer(keras.optimizers.SGD(0.01), 3)
    model = model_of(optimizer, steps_per_execution=4)
    model.fit(data_set(), epochs=3, shuffle=False, verbose=0)
    assert (int(optimizer.iterations), int(optimizer.micro_step)) == (5, 0)


def test_an_error_in_the_data_leaves_the_window_as_it_was():
    optimizer = ka.AccumOptimizer(keras.optimizers.SGD(0.01), 3)
    model = model_of(optimizer)
    with pytest.raises(tf.errors.InvalidArgumentError, match="a bad file"):
        model.fit(broken_data_set(), shuffle=False, verbose=0)
    assert int(optimizer.micro_step) == 2
    # What it holds are the two micro-batches: the next one completes their window.
    model.fit(X[8:12], 2 * X[8:12], batch_size=4, verbose=0)
    plain = model_of(keras.optimizers.SGD(0.01))
    before = plain.get_weights()
    plain.fit(X[:12], 2 * X[:12], batch_size=12, verbose=0)
    assert_close(model.get_weights(), plain.get_weights())
    assert_differ(plain.get_weights(), before)


def test_a_step_that_splits_its_batch_makes_no_update_without_one():
    inner = keras.optimizers.SGD(0.01, momentum=0.9)
    model = model_of(inner, split={"accum_steps": 2})
    history = model.fit(data_set(), epochs=3, shuffle=False, verbose=0)
    assert int(inner.iterations) == 15
    eager = model_of(
        keras.optimizers.SGD(0.01, momentum=0.9),
        split={"accum_steps": 2},
        run_eagerly=True,
    )
    expected = eager.fit(data_set(), epochs=3, shuffle=False, verbose=0)
    assert_close(left(model), left(eager))
    assert_close(history.history["loss"], expected.history["loss"])


def test_a_loop_of_the_users_that_runs_out_of_data():
    """With a weight that depends on no data: it has to wait all the same."""
    optimizer = ka.AccumOptimizer(keras.optimizers.SGD(0.01), 3)
    model = model_of(optimizer)
    optimizer.build(model.trainable_variables)
    batches = iter(data_set())

    def train_on(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables, weight=4.0)

    @tf.function(autograph=False)
    def step():
        train_on(*next(batches))

    for _ in range(5):
        step()
    with pytest.raises(tf.errors.OutOfRangeError):
        step()
    assert (int(optimizer.iterations), int(optimizer.micro_step)) == (1, 2)
    # The window holds two micro-batches, and what they weigh.
    train_on(X[:4], 2 * X[:4])
    plain = model_of(keras.optimizers.SGD(0.01))
    for x in (X[:12], np.concatenate([X[12:], X[:4]])):
        before = plain.get_weights()
        plain.fit(x, 2 * x, batch_size=12, verbose=0)
    assert_close(model.get_weights(), plain.get_weights())
    assert_differ(plain.get_weights(), before)
