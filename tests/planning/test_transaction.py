"""Planning leaves a model, and all random state, to the bit as it found them."""

import pickle
import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_differ, assert_equal, compile_in, dense_model, fit
from keras.src.backend.common import global_state
from planned import ROWS, batch, compiled, everything, plan
from tensorflow.python.eager import context

import keras_accum as ka
from keras_accum._planning.measure import StepProfiler
from keras_accum._planning.search import Patience
from keras_accum._planning.transaction import preserving_state, variables


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    """Take the largest size that fits: looking for a faster one is for test_search.py."""
    monkeypatch.setattr(Patience, "lasts", lambda self, best: False)


def assert_same_state(found, expected):
    assert_equal(found.pop("variables"), expected.pop("variables"))
    assert found == expected


@pytest.mark.slow_in("True")
@pytest.mark.slow_in("xla")
@pytest.mark.parametrize(
    ("mode", "trained"), [("eager", False), ("graph", True), ("xla", False)]
)
def test_everything_is_what_it_was(mode, trained):
    model = compiled(mode)
    if trained:
        fit(model, *batch(), batch_size=ROWS)
    before = everything(model)
    plan(model, batch(1) if mode == "xla" else batch(), recompute=False)
    assert_same_state(everything(model), before)


def test_a_step_would_have_moved_all_of_it():
    # The control: without the transaction.
    model = compiled("eager")
    model.train_on_batch(*batch())
    before = everything(model)
    profiler = StepProfiler(model, tuple(map(tf.constant, batch())), None)
    profiler.measure(1, False, timed=False)
    after = everything(model)
    moved = [
        not np.array_equal(a, b) for a, b in zip(after["variables"], before["variables"])
    ]
    assert sum(moved) >= len(moved) - 1  # but for the learning rate
    assert after["random"] != before["random"]


@pytest.mark.parametrize(
    ("end", "trained"), [(KeyboardInterrupt, False), (ValueError, True)]
)
def test_everything_is_what_it_was_after_a_failure(end, trained, monkeypatch):
    model = compiled("eager")
    if trained:
        model.train_on_batch(*batch())
    before = everything(model)
    measure = StepProfiler.measure

    def measure_then_fail(profiler, size, recompute, timed):
        measure(profiler, size, recompute, timed)
        raise end("stop")

    monkeypatch.setattr(StepProfiler, "measure", measure_then_fail)
    with pytest.raises(end, match="stop"):
        plan(model)
    assert_same_state(everything(model), before)


def test_nothing_is_different_where_nothing_fits():
    model = compiled("eager")
    before = everything(model)
    with pytest.raises(ValueError, match="No micro-batch size fits"):
        plan(model, budget="100B")
    assert_same_state(everything(model), before)


def draws():
    """The next numbers of all generators outside of a model."""
    return [
        random.random(),
        np.random.random(),
        float(tf.random.uniform(())),
        float(keras.random.uniform(())),
    ]


@pytest.mark.slow
def test_training_goes_on_as_if_nothing_had_been_planned():
    def run(between):
        # To Keras 3.12 a new seed does not reach the generator that is there already.
        keras.backend.clear_session()
        keras.utils.set_random_seed(5)
        tf.random.set_seed(5)
        model = compiled("eager")
        fit(model, *batch(), batch_size=ROWS)
        between(model)
        found = draws()
        history = fit(model, *batch(), batch_size=ROWS, epochs=2).history
        found += [v.numpy() for v in variables(model)]
        return found + [np.array(history[key]) for key in sorted(history)]

    expected = run(lambda model: None)
    assert_equal(run(plan), expected)
    # The control: one step in between.
    assert_differ(run(lambda model: model.train_on_batch(*batch())), expected)


def test_random_state_that_was_not_there_is_not_there_afterwards(monkeypatch):
    model = compiled("eager")
    keras.backend.clear_session()
    # As before any `tf.random.set_seed`.
    monkeypatch.delattr(context.context(), "_rng")
    with preserving_state(model):
        model.train_on_batch(*batch())
        keras.random.uniform(())
        tf.random.set_seed(3)
    assert not hasattr(context.context(), "_rng")
    assert global_state.get_global_attribute("global_seed_generator") is None


@pytest.mark.slow
def test_an_accumulating_model_keeps_its_own_step():
    model = ka.accumulate(compiled("eager"), accum_steps=2)
    before = everything(model)
    plan(model)
    assert_same_state(everything(model), before)


def functional(**settings):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((5,))
    outputs = keras.layers.Dense(3)(inputs)
    model = ka.GradientAccumulationModel(inputs, outputs, **settings)
    return compile_in(model, "eager", keras.optimizers.SGD(0.1))


def test_a_model_of_the_class_is_what_it_was_and_so_are_its_clones():
    model = functional(accum_steps=8, two_pass=True, on_oom="halve")
    before = everything(model)
    plan(model)
    assert_same_state(everything(model), before)
    clone = keras.models.clone_model(model)
    loaded = pickle.loads(pickle.dumps(model))
    for each in (
        model,
        clone,
        loaded,
        ka.GradientAccumulationModel.from_config(model.get_config()),
    ):
        assert type(each) is type(model)
        assert (each.accum_steps, each.micro_batch_size) == (8, None)
        assert (each.two_pass, each.on_oom) == (True, "halve")
    # The control: what a plan is for.
    plan(model).apply()
    assert (model.accum_steps, model.micro_batch_size) == (None, ROWS)
    assert keras.models.clone_model(model).micro_batch_size == ROWS
    assert (model.two_pass, model.on_oom) == (True, "halve")


@pytest.mark.slow
def test_an_open_window_of_an_optimizer_stays_open():
    optimizer = ka.AccumOptimizer(keras.optimizers.Adam(0.05), 4)
    model = compiled("eager", optimizer)
    model.train_on_batch(*batch())
    before = everything(model)
    plan(model)
    assert_same_state(everything(model), before)
    assert int(optimizer.micro_step) == 1


def test_a_model_with_a_step_of_its_own_is_refused_and_unchanged():
    class Own(keras.Model):
        def train_step(self, data):
            return {}

    inner = dense_model()
    model = Own(inner.inputs, inner.outputs, name="mine")
    model.compile("sgd", "mse", run_eagerly=True)
    before = everything(model)
    with pytest.raises(ValueError, match="'mine' has a `train_step` of its own"):
        plan(model)
    assert_same_state(everything(model), before)
