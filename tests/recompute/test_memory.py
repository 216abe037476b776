"""Memory: one copy of the parameters for the sums, and no second one while updating.

Measured by TensorFlow's allocator, above the level before the step, when tracing and
constant folding are over. In a graph operations run in another order now and then, and
need more: hence medians there. XLA's programs run as they are written.
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


def peak(optimizer, xla, k=1, windows=7):
    """What a window of `k` steps needs, in MiB above the level before."""
    model = model_of()
    model.compile(optimizer, "mse", jit_compile=xla)
    x = np.ones((4, 512), "float32")
    for _ in range(4):
        model.train_on_batch(x, x)
    found = []
    for _ in range(k * windows):
        gc.collect()
        tf.config.experimental.reset_memory_stats("CPU:0")
        before = tf.config.experimental.get_memory_info("CPU:0")["current"]
        model.train_on_batch(x, x)
        after = tf.config.experimental.get_memory_info("CPU:0")["peak"]
        found.append((after - before) / MIB)
    over_windows = np.max if xla else np.median
    return over_windows(np.reshape(found, (windows, k)).max(axis=1))


def test_an_update_in_a_graph_needs_no_second_copy():
    # Without a chain, a plain step holds two to five of the eight gradients, by chance.
    parameters = model_of().count_params() * 4 / MIB
    assert peak(ka.AccumOptimizer("sgd", 2), False, k=2) < 0.8 * parameters
    # The control: Keras's own holds all means at a time.
    builtin = keras.optimizers.SGD(gradient_accumulation_steps=2)
    assert peak(builtin, False, k=2) > 0.95 * parameters


def test_a_micro_step_in_a_graph_needs_what_a_plain_one_does():
    plain = peak(keras.optimizers.SGD(), xla=False)
    between = peak(ka.AccumOptimizer("sgd", 1000), xla=False)
    assert between < plain + 0.25 * model_of().count_params() * 4 / MIB


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_an_update_under_xla_needs_no_second_copy(name):
    parameters = model_of().count_params() * 4 / MIB
    plain = peak(keras.optimizers.get(name), xla=True)
    assert peak(ka.AccumOptimizer(name, 2), True, k=2) < plain + 0.1 * parameters


@pytest.mark.slow
def test_keras_itself_needs_one_under_xla():
    parameters = model_of().count_params() * 4 / MIB
    plain = peak(keras.optimizers.Adam(), xla=True)
    builtin = keras.optimizers.Adam(gradient_accumulation_steps=2)
    assert peak(builtin, True, k=2) > plain + 0.5 * parameters
