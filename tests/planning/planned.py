"""Models to plan for, and what planning must not change."""

import random

import keras
import numpy as np
import tensorflow as tf
from helpers import data

import keras_accum as ka
from keras_accum._backend.private.models import all_metrics, call_traces
from keras_accum._backend.private.randomness import global_seed_generator
from keras_accum._planning.search import Trial
from keras_accum._planning.transaction import variables

ROWS = 2


class CountsCalls(keras.layers.Layer):
    """Draws from Keras's global seed, counts its calls, and adds a loss."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), trainable=False, initializer="zeros")

    def call(self, x):
        self.calls.assign_add(1.0)
        self.add_loss(1e-3 * keras.ops.mean(x))
        return x + 0.01 * keras.random.normal(keras.ops.shape(x))


class Late(keras.metrics.Metric):
    """Has no variable before its first update."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        if not self.variables:
            self.last = self.add_variable((), initializer="zeros", name="last")
        self.last.assign(keras.ops.max(y_pred))

    def result(self):
        return 1.0 * self.last


def eventful_model():
    """A model with every kind of state that a step can move."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((5,))
    x = keras.layers.Dense(8, kernel_regularizer="l2")(inputs)
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.Dropout(0.5)(CountsCalls()(x))
    return keras.Model(inputs, keras.layers.Dense(3, "sigmoid")(x))


def compiled(mode="graph", optimizer=None, metrics=None, model=None):
    """`eventful_model`, or another one, compiled to run in `mode`."""
    model = model or eventful_model()
    model.compile(
        optimizer or keras.optimizers.Adam(0.05),
        loss="mse",
        metrics=["mae", Late()] if metrics is None else metrics,
        run_eagerly=mode == "eager",
        jit_compile=mode == "xla",
    )
    return model


def batch(rows=ROWS):
    x, y = data(rows)
    return x, (y > 0).astype("float32")


def plan(model, samples=None, budget="1GiB", **options):
    samples = batch() if samples is None else samples
    return ka.plan(model, samples, memory_budget=budget, verbose=0, **options)


def everything(model):
    """All state that a step of `model`, or planning, could move."""
    generators = [tf.random.get_global_generator(), global_seed_generator()]
    return {
        "variables": [v.numpy() for v in variables(model)],
        "paths": [v.path for v in variables(model)],
        "built": [
            part is None or part.built
            for part in (model.optimizer, model._compile_metrics, model._compile_loss)
        ],
        "metrics": [[v.path for v in m.variables] for m in all_metrics(model)],
        "parts": [
            id(part)
            for part in (model.optimizer, model._compile_metrics, model.train_function)
        ],
        "class": type(model),
        "step": vars(model).get("train_step"),
        "settings": vars(model).get("_settings"),
        "accumulation": getattr(model, "accumulation", None),
        "traces": [list(container) for container in call_traces(model)],
        "random": (
            random.getstate(),
            str(np.random.get_state()),
            [g and g.state.numpy().tolist() for g in generators],
        ),
    }


class Invented:
    """Takes the place of `StepProfiler.measure`: memory and time by formulas.

    Attributes:
        asked: the sizes, what was recomputed, and whether a time was asked for.
        batches: what the step would have got.
    """

    def __init__(self, peak=lambda size, recompute: 2**20 * size, seconds=1.0):
        self.peak, self.seconds = peak, seconds
        self.asked, self.batches = [], []

    def __get__(self, profiler, kind):
        return lambda *asked: self.measure(profiler, *asked)

    def measure(self, profiler, size, recompute, timed):
        self.asked.append((size, recompute, timed))
        self.batches.append(profiler.batch)
        peak = self.peak(size, recompute)
        return Trial(size, recompute, peak, seconds=self.seconds if timed else None)
