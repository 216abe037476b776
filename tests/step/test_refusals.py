"""What an accumulating model refuses before its first step, and what was meant by it."""

import keras
import numpy as np
import pytest
from helpers import (
    assert_close,
    assert_differ,
    assert_refused,
    data,
    dense_model,
    fit,
    since_keras,
)

import keras_accum as ka

ACCUMULATING = (
    "This model accumulates in its step, which makes one update. Received an optimizer "
    "that accumulates the gradients of several steps: {}(gradient_accumulation_steps=2). "
    "Leave that argument out; for windows of several steps, write "
    "`AccumOptimizer(optimizer, accum_steps=2)`."
)


def sgd(**options):
    return keras.optimizers.SGD(0.1, **options)


def accumulated(how="accumulate"):
    model = dense_model()
    if how == "accumulate":
        return ka.accumulate(model, micro_batch_size=4)
    if how == "halving":
        return ka.accumulate(model, micro_batch_size=4, on_oom="halve")
    return ka.GradientAccumulationModel(model.inputs, model.outputs, micro_batch_size=4)


@pytest.mark.slow_in("False", "class")
@pytest.mark.parametrize(
    "how, run_eagerly",
    [("accumulate", False), ("accumulate", True), ("halving", True), ("class", True)],
)
def test_an_optimizer_that_keras_has_accumulate_is_refused(how, run_eagerly):
    model = accumulated(how)
    options = {"loss": "mse", "run_eagerly": run_eagerly, "jit_compile": False}
    model.compile(sgd(gradient_accumulation_steps=2), **options)
    before = model.get_weights()
    for train in (lambda: fit(model, *data(), 13), lambda: model.train_on_batch(*data())):
        assert_refused(train, ValueError, ACCUMULATING.format("SGD"))
    assert_close(model.get_weights(), before)
    model.compile(sgd(), **options)
    fit(model, *data(), 13)
    assert_differ(model.get_weights(), before)


multi_optimizer = since_keras("3.15", "MultiOptimizer")


@pytest.mark.parametrize(
    "inside",
    [
        "scaler",
        pytest.param("parts", marks=multi_optimizer),
        pytest.param("chosen", marks=multi_optimizer),
    ],
)
def test_one_inside_of_another_is_refused_too(inside):
    accumulating = keras.optimizers.Adam(gradient_accumulation_steps=2)
    optimizers = keras.optimizers
    optimizer = {
        "scaler": lambda: optimizers.LossScaleOptimizer(accumulating),
        "parts": lambda: optimizers.MultiOptimizer(
            optimizers.OptimizerMap(sgd(), {"bias": accumulating})
        ),
        "chosen": lambda: optimizers.MultiOptimizer(
            lambda variable: accumulating if variable.name == "bias" else sgd()
        ),
    }[inside]()
    model = accumulated()
    model.compile(optimizer, loss="mse", run_eagerly=True)
    assert_refused(
        lambda: fit(model, *data(), 13), ValueError, ACCUMULATING.format("Adam")
    )


def test_windows_of_windows_are_what_the_refusal_says():
    model = accumulated()
    model.compile(ka.AccumOptimizer(sgd(), accum_steps=2), loss="mse", run_eagerly=True)
    fit(model, *data(), 13)
    large = dense_model()
    large.compile(sgd(), loss="mse", run_eagerly=True)
    fit(large, *data(), 26)
    assert_close(model.get_weights(), large.get_weights())
    assert_differ(model.get_weights(), dense_model().get_weights())


def model_of_its_own(**options):
    inputs = keras.Input((5,))
    outputs = keras.layers.Dense(1)(inputs)
    return ka.GradientAccumulationModel(inputs, outputs, **options)


def gradients(**options):
    return ka.accumulate_gradients(lambda batch: batch, [], np.ones((2, 1)), **options)


@pytest.mark.parametrize(
    "name, function",
    [
        ("accumulate", lambda **o: ka.accumulate(dense_model(), **o)),
        ("GradientAccumulationModel", model_of_its_own),
        ("accumulate_gradients", gradients),
    ],
)
@pytest.mark.parametrize(
    "received, meant",
    [
        ("accumulation_steps", "accum_steps"),
        ("gradient_accumulation_steps", "accum_steps"),
        ("steps", "accum_steps"),
        ("batch_size", "micro_batch_size"),
    ],
)
def test_the_names_of_other_libraries_are_told_ours(name, function, received, meant):
    message = (
        f"`{name}` has no argument `{received}`. Received: {received}=8. Did you mean "
        f"`{meant}=8`?"
    )
    assert_refused(lambda: function(**{received: 8}), TypeError, message)
    assert_refused(lambda: function(accum_steps=2, **{received: 8}), TypeError, message)


def test_a_misspelt_argument_is_told_its_name():
    message = (
        "`accumulate` has no argument `accum_step`. Received: accum_step=8. Did you mean "
        "`accum_steps=8`?"
    )
    assert_refused(lambda: ka.accumulate(dense_model(), accum_step=8), TypeError, message)


def test_arguments_of_keras_models_are_left_to_keras():
    assert model_of_its_own(accum_steps=2, name="mine").name == "mine"
