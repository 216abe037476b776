"""Convolutions under XLA on a CPU: compiled step by step, the loop left to the graph.

XLA makes convolutions in a loop ten times as slow there (`benchmarks/window_time.py`).
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_close, assert_equal, compile_in, fit, train_twice
from test_train_step import STEPS, check, sgd
from text_models import uneven

import keras_accum as ka
from keras_accum._backend.private.compiled import compiled_by_xla
from keras_accum._core.loop import compiles_loop

SAMPLES = 11


class Spy(keras.metrics.Mean):
    """A metric that notes where XLA compiles it."""

    def __init__(self):
        super().__init__(name="spy")
        self.step, self.results = [], []

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.step.append(compiled_by_xla())
        super().update_state(y_pred)

    def result(self):
        self.results.append(compiled_by_xla())
        return super().result()


def conv_model(layer=None, last=keras.layers.Dense):
    keras.utils.set_random_seed(5)
    layer = layer or keras.layers.Conv2D(4, 3, strides=2, activation="tanh")
    pool = keras.layers.GlobalAveragePooling2D()
    return keras.Sequential([keras.Input((8, 8, 2)), layer, pool, last(3)])


def no_convolution():
    return conv_model(layer=keras.layers.AveragePooling2D(2))


def images(samples=SAMPLES):
    rng = np.random.default_rng(7)
    x = rng.normal(size=(samples, 8, 8, 2)).astype("float32")
    return x, rng.normal(size=(samples, 3)).astype("float32")


@pytest.mark.slow_in("halve", "no_convolution")
@pytest.mark.parametrize(
    ("make", "mode", "step", "outside", "how"),
    [
        (conv_model, "xla", True, False, "accumulate"),
        pytest.param(conv_model, "xla", True, False, "class", marks=pytest.mark.slow),
        (conv_model, "xla", True, False, "halve"),
        (no_convolution, "xla", True, True, "accumulate"),
        (conv_model, "graph", False, False, "accumulate"),
    ],
)
def test_micro_steps_with_convolutions_are_compiled_without_their_loop(
    make, mode, step, outside, how
):
    model, spy = make(), Spy()
    if how == "class":
        model = ka.GradientAccumulationModel(model.inputs, model.outputs, **STEPS)
    else:
        on_oom = "halve" if how == "halve" else "raise"
        ka.accumulate(model, **STEPS, on_oom=on_oom)
    compile_in(model, mode, sgd(), metrics=[spy])
    model.train_on_batch(*images())  # Builds the metrics, in a graph of its own.
    spy.step.clear(), spy.results.clear()
    model.make_train_function(force=True)
    fit(model, *images(), batch_size=SAMPLES)
    assert set(spy.step) == {step}
    # Asked in each micro-step, after all of them, and at the end of the epoch.
    assert set(spy.results[:-1]) == {step, outside}
    assert model.jit_compile == (mode == "xla")


def watched_sgd(compiled):
    """SGD that notes in a list whether XLA compiles its updates."""

    class Watched(keras.optimizers.SGD):
        def update_step(self, *args):
            compiled.append(compiled_by_xla())
            super().update_step(*args)

    return Watched(0.1)


def test_the_update_is_compiled():
    compiled = []

    model = ka.accumulate(conv_model(), **STEPS)
    compile_in(model, "xla", watched_sgd(compiled))
    fit(model, *images(), batch_size=SAMPLES)
    assert set(compiled) == {True}


@pytest.mark.slow
def test_nothing_else_is_compiled():
    model = ka.accumulate(conv_model(), **STEPS)
    compile_in(model, "xla", sgd())
    model.train_on_batch(*images())
    compiled = []

    def loss(micro_batch):
        compiled.append(compiled_by_xla())
        return tf.reduce_mean(model(micro_batch))

    @tf.function
    def gradients(x):
        return ka.accumulate_gradients(loss, model.trainable_variables, x, accum_steps=3)

    gradients(images()[0])
    model.compile(watched_sgd(compiled), "mse", jit_compile=True)
    model.train_step(images())  # By hand, in eager mode.
    assert set(compiled) == {False}


@pytest.mark.parametrize("name", [n for n in dir(keras.layers) if "Conv" in n])
def test_every_layer_that_convolves_is_known(name):
    layer = object.__new__(getattr(keras.layers, name))
    model = keras.Sequential([keras.layers.Dense(1)])
    model.jit_compile = True
    assert compiles_loop(model)
    model._flatten_layers = lambda *args, **kwargs: [model, layer]
    assert not compiles_loop(model)


def test_a_convolution_inside_of_a_model_inside_is_found():
    model = keras.Sequential([conv_model()])
    model.jit_compile = True
    assert not compiles_loop(model)


def test_on_a_gpu_the_loop_is_compiled_too(monkeypatch):
    model = conv_model()
    model.jit_compile = True
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [kind])
    assert compiles_loop(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "split", [STEPS, pytest.param({"micro_batch_size": 4}, marks=pytest.mark.slow)]
)
def test_uneven_weights_equal_the_large_batch(split):
    def options():
        loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
        return {"loss": loss, "metrics": ["mae"], "weighted_metrics": ["mse"]}

    check(conv_model, (*images(), uneven(SAMPLES)), "xla", options, split=split)


def test_two_passes_equal_the_large_batch():
    def options():
        return {"loss": "cosine_similarity"}

    check(conv_model, images(), "xla", options, control=False, two_pass=True)


def slow(parameter):
    return pytest.param(parameter, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "layer",
    [
        slow(lambda: keras.layers.SeparableConv2D(4, 3, activation="tanh")),
        slow(lambda: keras.layers.DepthwiseConv2D(3, depth_multiplier=2, use_bias=False)),
        lambda: keras.layers.Conv2DTranspose(4, 3, strides=2, use_bias=False),
    ],
)
def test_every_kind_of_convolution_equals_the_large_batch(layer):
    check(lambda: conv_model(layer()), images(), "xla", control=False)


@pytest.mark.slow
def test_windows_in_the_optimizer_equal_the_large_batch():
    x, y = images(24)

    def train(optimizer, batch_size, split=None):
        model = conv_model()
        if split is not None:
            ka.accumulate(model, **split)
        compile_in(model, "xla", optimizer)
        fit(model, x, y, batch_size=batch_size, epochs=2)
        return model

    oracle = train(sgd(), 12)
    found = train(ka.AccumOptimizer(sgd(), accum_steps=2), 6, {"accum_steps": 3})
    assert_close(found.get_weights(), oracle.get_weights(), rtol=1e-6)


@pytest.mark.slow
def test_a_loss_scale_moves_as_for_the_large_batch():
    def scaled():
        return keras.optimizers.LossScaleOptimizer(
            sgd(), initial_scale=64.0, dynamic_growth_steps=2
        )

    how = {"optimizer": scaled}
    oracle, _ = train_twice(conv_model, images(), "xla", **how)
    found, _ = train_twice(conv_model, images(), "xla", STEPS, **how)
    assert float(found.optimizer.dynamic_scale.numpy()) == 128.0
    assert float(oracle.optimizer.dynamic_scale.numpy()) == 128.0
    assert_close(found.get_weights(), oracle.get_weights(), rtol=1e-6)
    bad = images()[0], np.full((SAMPLES, 3), np.inf, "float32")
    before = found.get_weights()
    found.train_on_batch(*bad)
    assert float(found.optimizer.dynamic_scale.numpy()) == 64.0
    assert_equal(found.get_weights(), before)


@pytest.mark.slow
def test_random_numbers_and_moving_statistics_are_those_of_the_graph():
    def make():
        keras.utils.set_random_seed(5)
        return keras.Sequential(
            [
                keras.Input((8, 8, 2)),
                keras.layers.Conv2D(4, 3),
                ka.AccumBatchNormalization(),
                keras.layers.Dropout(0.5, seed=3),
                keras.layers.Flatten(),
                keras.layers.Dense(3),
            ]
        )

    # XLA draws other numbers from a seed than TensorFlow: no weight is to move.
    how = {"optimizer": lambda: keras.optimizers.SGD(0.0)}
    found, _ = train_twice(make, images(), "xla", STEPS, **how)
    graph, _ = train_twice(make, images(), "graph", STEPS, **how)
    norm, expected = found.layers[1], graph.layers[1]
    assert_close(norm.moving_mean.numpy(), expected.moving_mean.numpy())
    seeds = [m.layers[2].seed_generator.state.numpy().tolist() for m in (found, graph)]
    assert seeds[0] == seeds[1]


def test_one_trace_and_two_compilations_for_batches_of_two_sizes():
    traces = []

    class Conv(keras.layers.Conv2D):
        def call(self, inputs, training=None):
            if training:
                traces.append(inputs.shape)
            return super().call(inputs)

    model = conv_model(Conv(4, 3))
    ka.accumulate(model, micro_batch_size=4)
    compile_in(model, "xla", sgd())
    fit(model, *images(), batch_size=SAMPLES, epochs=1)
    once = len(traces)
    fit(model, *images(), batch_size=SAMPLES, epochs=3)
    assert len(traces) == once
