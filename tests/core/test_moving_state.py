"""Layers that move state at each call are named: three of them, and a count."""

import logging
import pathlib
import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import compile_in, data, dense_model, fit

import keras_accum as ka
from keras_accum._core.moving_state import describe_moving, moving_layers

MOVES = (
    "State moves at each call of {}, per micro-batch instead of per update, so that a "
    "window is not the large batch: {}."
)
OF_BATCHES = (
    " BatchNormalization also normalizes each micro-batch by itself. "
    "AccumBatchNormalization moves its statistics per update; GroupNormalization and "
    "LayerNormalization do not depend on the batch."
)


class Codebook(keras.layers.Layer):
    """Keeps a moving average of what passes, as the codes of a VQ-VAE do."""

    def build(self, shape):
        self.codes = self.add_weight(shape=(shape[-1],), trainable=False, name="codes")
        self.table = self.add_weight(shape=(shape[-1],), trainable=False, name="table")

    def call(self, inputs, training=False):
        if training:
            self.codes.assign(0.9 * self.codes + 0.1 * tf.reduce_mean(inputs, 0))
        return inputs + self.table


class Table(Codebook):
    """Has the same variables, and lets them be."""

    def call(self, inputs, training=False):
        return inputs + self.table + self.codes


def model_of(*layers):
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((5,)), *layers, keras.layers.Dense(3)])


def said_by(function, *args, **options):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", UserWarning)
        function(*args, **options)
    tests = pathlib.Path(__file__).parents[1]
    assert all(pathlib.Path(w.filename).is_relative_to(tests) for w in found)
    return [str(warning.message) for warning in found]


def normalizing(name, **options):
    return keras.layers.BatchNormalization(name=name, **options)


def test_what_moves_is_known_by_class():
    frozen = normalizing("frozen", trainable=False)
    spectral = keras.layers.SpectralNormalization(keras.layers.Dense(5), name="spectral")
    pooled = ka.AccumBatchNormalization(name="pooled")
    others = [keras.layers.LayerNormalization(), keras.layers.Dropout(0.5), Table()]
    inner = keras.Sequential([normalizing("deep")])
    model = model_of(normalizing("first"), inner, frozen, spectral, pooled, *others)
    assert [layer.name for layer in moving_layers(model)] == ["first", "deep", "spectral"]


def test_three_are_named_and_the_others_counted():
    layers = [normalizing(f"bn{i}") for i in range(5)]
    three = ", ".join(f"bn{i} (BatchNormalization)" for i in range(3))
    for count, named in [(1, three[:24]), (3, three), (5, f"{three}, and 2 more")]:
        subject = "1 layer" if count == 1 else f"{count} layers"
        assert (
            describe_moving(layers[:count]) == MOVES.format(subject, named) + OF_BATCHES
        )
    assert describe_moving([Codebook(name="codes")]) == MOVES.format(
        "1 layer", "codes (Codebook)"
    )


def test_accumulate_names_what_it_knows_at_once_and_once():
    model = model_of(normalizing("first"))
    expected = MOVES.format("1 layer", "first (BatchNormalization)") + OF_BATCHES
    assert said_by(ka.accumulate, model, accum_steps=2) == [expected]
    assert said_by(ka.accumulate, model, accum_steps=3) == []
    compile_in(model, "eager", keras.optimizers.SGD())
    assert said_by(fit, model, *data(6), 6) == []


@pytest.mark.slow_but("graph-False")
@pytest.mark.parametrize("two_pass", [False, True])
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_step_names_whatever_has_moved(two_pass, mode):
    model = model_of(Table(name="table"), Codebook(name="codes"), normalizing("first"))
    expected = MOVES.format("1 layer", "first (BatchNormalization)") + OF_BATCHES
    assert said_by(ka.accumulate, model, accum_steps=2, two_pass=two_pass) == [expected]
    compile_in(model, mode, keras.optimizers.SGD())
    expected = MOVES.format("1 layer", "codes (Codebook)")
    assert said_by(fit, model, *data(6), 6) == [expected]
    assert said_by(fit, model, *data(6), 6) == []


def test_a_model_of_the_class_names_them_in_its_first_step():
    plain = model_of(Codebook(name="codes"), normalizing("first"))
    model = ka.GradientAccumulationModel(plain.inputs, plain.outputs, accum_steps=2)
    compile_in(model, "eager", keras.optimizers.SGD())
    named = "codes (Codebook), first (BatchNormalization)"
    expected = MOVES.format("2 layers", named) + OF_BATCHES
    assert said_by(fit, model, *data(6), 6) == [expected]


def test_a_model_whose_state_stays_is_not_warned_of():
    model = model_of(
        Table(), normalizing("bn", trainable=False), keras.layers.Dropout(0.5)
    )
    assert said_by(ka.accumulate, model, accum_steps=2) == []
    compile_in(model, "graph", keras.optimizers.SGD())
    assert said_by(fit, model, *data(6), 6) == []


@pytest.mark.slow_in("nan")
@pytest.mark.parametrize("initial", [0.5, np.nan])
def test_the_monitor_sees_whatever_has_moved_after_the_first_step(initial, caplog):
    caplog.set_level(logging.WARNING, "keras_accum")
    model = model_of(Table(name="table"), Codebook(name="codes"), normalizing("first"))
    model.layers[0].table.assign([initial] * 5)
    compile_in(model, "eager", ka.AccumOptimizer("sgd", 2))
    fit(model, *data(12), 3, callbacks=[ka.AccumulationMonitor()])
    assert [record.getMessage() for record in caplog.records] == [
        MOVES.format("1 layer", "first (BatchNormalization)") + OF_BATCHES,
        MOVES.format("1 layer", "codes (Codebook)"),
    ]


def test_the_monitor_says_nothing_of_a_model_whose_state_stays(caplog):
    caplog.set_level(logging.WARNING, "keras_accum")
    model = compile_in(dense_model(), "eager", ka.AccumOptimizer("sgd", 2))
    fit(model, *data(12), 3, callbacks=[ka.AccumulationMonitor()])
    assert caplog.records == []


@pytest.mark.slow_in("eager")
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_an_optimizer_that_accumulates_names_them_too(mode):
    def said(*layers, accum_steps=2, callbacks=()):
        model = model_of(*layers)
        compile_in(model, mode, ka.AccumOptimizer("sgd", accum_steps))
        x, y = data(8, outputs=3)
        fit_twice = lambda: [  # noqa: E731
            model.fit(x, y, batch_size=2, verbose=0, callbacks=[*callbacks])
            for _ in range(2)
        ]
        return said_by(fit_twice)

    normalizes = lambda: keras.layers.BatchNormalization(name="bn")  # noqa: E731
    expected = MOVES.format("1 layer", "bn (BatchNormalization)") + OF_BATCHES
    assert said(normalizes()) == [expected]
    assert said(normalizes(), accum_steps=1) == []
    moves = MOVES.format("1 layer", "codes (Codebook)")
    assert said(Table(), Codebook(name="codes")) == [moves]
    assert said(Codebook(), accum_steps=1) == []
    frozen = normalizes()
    frozen.trainable = False
    assert said(frozen, ka.AccumBatchNormalization(), keras.layers.Dropout(0.5)) == []
    # The monitor says it in its log, and once is enough.
    assert said(normalizes(), callbacks=[ka.AccumulationMonitor(verbose=0)]) == []


def stateful(rows, wrapper=lambda layer: layer):
    """A model of an RNN that goes on from the states of its last call."""
    inputs = keras.Input(batch_shape=(rows, 4, 3))
    rnn = keras.layers.GRU(3, stateful=True, name="rnn")
    return keras.Model(inputs, wrapper(rnn)(inputs))


TEXTS = np.random.default_rng(0).normal(size=(6, 4, 3)).astype("float32")


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_stateful_rnn_is_named(mode):
    model = compile_in(stateful(2), mode, ka.AccumOptimizer("sgd", 3))
    expected = MOVES.format("1 layer", "rnn (GRU)")
    assert said_by(fit, model, TEXTS, TEXTS[:, 0], 2) == [expected]
    plain = model_of(keras.layers.Reshape((5, 1)), keras.layers.GRU(3))
    compile_in(plain, mode, ka.AccumOptimizer("sgd", 2))
    assert said_by(fit, plain, *data(6), 3) == []


@pytest.mark.parametrize("rows", [2, 6])
@pytest.mark.parametrize("two_pass", [False, True])
def test_a_step_does_not_split_the_batch_of_a_stateful_rnn(rows, two_pass):
    model = stateful(rows, keras.layers.Bidirectional)
    told = said_by(ka.accumulate, model, micro_batch_size=2, two_pass=two_pass)
    named = "forward_rnn (GRU), backward_rnn (GRU)"
    assert sorted(told[0].rpartition(": ")[2].strip(".").split(", ")) == sorted(
        named.split(", ")
    )
    compile_in(model, "eager", keras.optimizers.SGD())
    before = [v.numpy() for v in model.variables]
    y = np.zeros((6, 6), "float32")
    message = (
        "it keeps a state for each row of its batch, and goes on from it. A step that "
        "splits its batch would have a micro-batch go on from the states of other rows. "
        "Use `stateful=False`, or accumulate in the optimizer, with `AccumOptimizer`: "
        "there, each batch that `fit` gets is a micro-batch."
    )
    with pytest.raises(ValueError, match="has `stateful=True`: " + re.escape(message)):
        fit(model, TEXTS, y, 6)
    for variable, value in zip(model.variables, before):
        np.testing.assert_array_equal(variable, value)
    # The control: one micro-batch is no part of a batch.
    if rows == 6 and not two_pass:
        ka.accumulate(model, accum_steps=1)
        fit(model, TEXTS, y, 6)
        assert np.abs(model.variables[0].numpy() - before[0]).max() > 0


def test_in_eager_mode_the_second_micro_batch_tells_what_has_moved():
    def said(layer):
        model = model_of(layer)
        compile_in(model, "eager", ka.AccumOptimizer("sgd", 2))
        return said_by(fit, model, *data(8), 2)

    assert said(Codebook(name="codes")) == [MOVES.format("1 layer", "codes (Codebook)")]
    assert said(Table()) == []
