"""A training that ends without any update is told so: once, and only then."""

import gc
import inspect
import linecache
import warnings

import keras
import numpy as np
import pytest
from helpers import compile_in, data, dense_model

import keras_accum as ka
from keras_accum._backend.private import fits

HELD = (
    "This training has made no update: the open window holds {} of {} micro-batches. The "
    "next `fit` goes on with them. For an update with them, call `optimizer.flush()`, or "
    "pass the callback `AccumulationMonitor(tail='flush_end')`."
)
LINE = "model.fit(x, y, batch_size=4, verbose=0, shuffle=False, **options)"


def accumulating(mode="eager", steps=4, inner="sgd", **options):
    return compile_in(dense_model(), mode, ka.AccumOptimizer(inner, steps, **options))


def said_by(function, *args, **options):
    """What `function` warns of, all of it."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", UserWarning)
        function(*args, **options)
    for warning in found:
        line = linecache.getline(warning.filename, warning.lineno).strip()
        assert (warning.filename, line) == (__file__, LINE)
    return [str(warning.message) for warning in found]


def train(model, samples, **options):
    x, y = data(samples)
    model.fit(x, y, batch_size=4, verbose=0, shuffle=False, **options)


@pytest.mark.slow_in("eager")
@pytest.mark.slow_in("xla")
def test_a_fit_shorter_than_a_window_is_told(mode):
    model = accumulating(mode)
    assert said_by(train, model, 10) == [HELD.format(3, 4)]
    assert int(model.optimizer.iterations) == 0
    assert said_by(train, model, 10) == []
    assert int(model.optimizer.iterations) == 1


def test_it_is_told_of_each_fit_whatever_was_before():
    model = accumulating("graph")
    assert said_by(train, model, 16) == []
    assert said_by(train, model, 8) == [HELD.format(2, 4)]
    model.optimizer.reset()
    for _ in range(4):
        assert said_by(model.train_on_batch, *data(4)) == []
    assert int(model.optimizer.iterations) == 2
    assert said_by(train, model, 4, epochs=3) == [HELD.format(3, 4)]
    assert said_by(train, model, 4, epochs=3) == []


def test_loops_that_are_not_fit_are_not_told():
    model = accumulating()
    for _ in range(3):
        assert said_by(model.train_on_batch, *data(4)) == []
    finalize = model.optimizer.finalize_variable_values
    assert said_by(finalize, model.trainable_variables) == []
    assert said_by(train, model, 8) == []
    model.train_on_batch(*data(4))
    assert said_by(finalize, model.trainable_variables) == []


def test_a_fit_whose_epochs_are_all_over_is_not_told():
    model = accumulating()
    assert said_by(train, model, 8) == [HELD.format(2, 4)]
    assert said_by(train, model, 8, epochs=2, initial_epoch=2) == []


def test_other_calls_are_not_told():
    model = accumulating()
    model.train_on_batch(*data(4))
    assert said_by(model.evaluate, *data(4), verbose=0) == []
    assert said_by(model.predict, data(4)[0], verbose=0) == []


@pytest.mark.parametrize("tail", ["carry", "drop", "flush_epoch", "flush_end"])
def test_it_is_told_once_with_the_monitor_too(tail):
    model = accumulating()
    said = said_by(train, model, 8, callbacks=[ka.AccumulationMonitor(tail)])
    expected = {
        "carry": [HELD.format(2, 4)],
        "drop": [
            "This training has made no update: 2 micro-batches were dropped before they "
            "filled a window of 4."
        ],
    }
    assert said == expected.get(tail, [])


def test_micro_batches_that_a_callback_drops_are_counted():
    class Drop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.optimizer.reset()

    assert said_by(train, accumulating(), 12, epochs=2, callbacks=[Drop()]) == [
        "This training has made no update: 6 micro-batches were dropped before they "
        "filled a window of 4."
    ]
    assert said_by(train, accumulating(), 20, callbacks=[Drop()]) == []


class NotANumber(keras.layers.Layer):
    def call(self, inputs):
        return inputs * np.nan


def skipping(policy, **options):
    keras.config.set_dtype_policy(policy)
    keras.utils.set_random_seed(1)
    layers = [keras.Input((5,)), keras.layers.Dense(3), NotANumber()]
    optimizer = ka.AccumOptimizer("sgd", 2, **options)
    return compile_in(keras.Sequential(layers), "eager", optimizer)


def test_windows_that_are_all_skipped_are_told_with_the_scale_and_the_policy():
    model = skipping("mixed_float16")
    assert said_by(train, model, 24, epochs=2) == [
        "This training has made no update: 6 windows were skipped, and no other was "
        "filled. Each held an infinity or a NaN. The loss scale has fallen to 512 (dtype "
        "policy 'mixed_float16'). If no scale is small enough, the loss itself is not "
        "finite: look at the data, the loss and the learning rate."
    ]
    assert float(model.optimizer.dynamic_scale) == 512


def test_the_policy_is_that_of_the_model():
    keras.config.set_dtype_policy("float32")
    layers = [
        keras.Input((5,)),
        keras.layers.Dense(3, dtype="mixed_float16"),
        NotANumber(dtype="float32"),
    ]
    model = compile_in(keras.Sequential(layers), "eager", ka.AccumOptimizer("sgd", 2))
    (said,) = said_by(train, model, 8)
    assert "The loss scale has fallen to 16384 (dtype policy 'mixed_float16')." in said


@pytest.mark.slow_but("skip_window")
@pytest.mark.parametrize("on_nonfinite", ["skip_window", "skip_micro_batch"])
def test_windows_that_are_all_skipped_without_a_scale_are_told_why(on_nonfinite):
    model = skipping("float32", on_nonfinite=on_nonfinite)
    assert said_by(train, model, 24) == [
        "This training has made no update: 3 windows were skipped, and no other was "
        f"filled. Each held an infinity or a NaN (on_nonfinite='{on_nonfinite}'). Look at "
        "the data, the loss and the learning rate."
    ]


@pytest.mark.slow_in("halve")
@pytest.mark.parametrize("on_oom", ["raise", "halve"])
def test_windows_of_steps_over_micro_batches_are_told_of_too(on_oom):
    model = ka.accumulate(dense_model(), micro_batch_size=2, on_oom=on_oom)
    compile_in(model, "eager", ka.AccumOptimizer("sgd", 4))
    assert said_by(train, model, 8) == [HELD.format(2, 4)]
    assert said_by(train, model, 8) == []


def test_keras_has_its_own_functions_again_when_the_optimizer_is_gone():
    # Optimizers of other tests may still be there.
    plain, held = inspect.unwrap(keras.Model._assert_compile_called), fits._fits._holders
    model = accumulating()
    assert fits._fits._holders == held + 1
    assert keras.Model._assert_compile_called is not plain
    del model
    keras.backend.clear_session()
    gc.collect()
    assert fits._fits._holders <= held
    if not fits._fits._holders:
        assert keras.Model._assert_compile_called is plain
