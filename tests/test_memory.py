"""Memory: one copy of the parameters for the sums, and no second one while updating.

Measured by TensorFlow's allocator, above the level before the step; the second step of
its kind, so that tracing and constant folding are over.
"""

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_accum as ka

LAYERS = 8
MIB = 2.0**20


def model_of():
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(512, use_bias=False) for _ in range(LAYERS)]
    return keras.Sequential([keras.Input((512,)), *layers])


def peaks(optimizer, xla, steps=4):
    """The peak of each of the last `steps` steps, in MiB above the level before it."""
    model = model_of()
    model.compile(optimizer, "mse", jit_compile=xla)
    x = np.ones((4, 512), "float32")
    for _ in range(4):
        model.train_on_batch(x, x)
    found = []
    for _ in range(steps):
        gc.collect()
        tf.config.experimental.reset_memory_stats("CPU:0")
        before = tf.config.experimental.get_memory_info("CPU:0")["current"]
        model.train_on_batch(x, x)
        peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
        found.append((peak - before) / MIB)
    return found


def test_an_update_in_a_graph_needs_no_second_copy():
    parameters = model_of().count_params() * 4 / MIB
    plain = max(peaks(keras.optimizers.SGD(), xla=False))
    ours = max(peaks(ka.AccumOptimizer("sgd", 2), xla=False))
    assert ours < plain + 0.5 * parameters
    # The control: Keras's own holds all means at a time.
    builtin = max(peaks(keras.optimizers.SGD(gradient_accumulation_steps=2), xla=False))
    assert builtin > plain + 0.5 * parameters


def test_a_micro_step_in_a_graph_needs_what_a_plain_one_does():
    plain = max(peaks(keras.optimizers.SGD(), xla=False))
    between = peaks(ka.AccumOptimizer("sgd", 1000), xla=False)
    assert max(between) < plain + 0.25 * model_of().count_params() * 4 / MIB


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_an_update_under_xla_needs_no_second_copy(name):
    parameters = model_of().count_params() * 4 / MIB
    plain = max(peaks(keras.optimizers.get(name), xla=True))
    assert max(peaks(ka.AccumOptimizer(name, 2), xla=True)) < plain + 0.1 * parameters


def test_keras_itself_needs_one_under_xla():
    parameters = model_of().count_params() * 4 / MIB
    plain = max(peaks(keras.optimizers.Adam(), xla=True))
    builtin = keras.optimizers.Adam(gradient_accumulation_steps=2)
    assert max(peaks(builtin, xla=True)) > plain + 0.5 * parameters
