"""Dropout in a block that is recomputed draws its mask once, and keeps it in bits.

The oracle is the same block, not recomputed: the same mask, from the same seed.
"""

import collections
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_close, assert_differ, assert_equal, data, in_mode
from keras.src.backend import random as keras_random

import keras_accum as ka
from keras_accum._recompute import dropout as _dropout

layers = keras.layers
X, _ = data(features=8)


@pytest.mark.slow_in("graph-False-shape0", "graph-False-shape1")
@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (8,), (3, 3), (2, 3, 5), ()])
@pytest.mark.parametrize("known", [True, False])
def test_bits_are_the_mask(shape, known, mode):
    mask = np.random.default_rng(sum(shape)).random(shape) < 0.4

    def there_and_back(mask):
        bits = _dropout.pack(mask)
        return bits, _dropout.unpack(bits, mask)

    function = in_mode(there_and_back, mode)
    if not known and mode != "eager":
        given = tf.TensorSpec([None] * len(shape), "bool")
        function = tf.function(there_and_back, [given], jit_compile=mode == "xla")
    bits, found = function(tf.constant(mask))
    assert bits.dtype == "uint8"
    assert bits.shape == -(-mask.size // 8)
    assert_equal(found, mask)


class Noisy(layers.Layer):
    """Calls `noise(x, seed)` between two products."""

    def __init__(self, noise, units=8, dtype=None):
        super().__init__(dtype=dtype, name="noisy")
        self.noise, self.seed = noise, keras.random.SeedGenerator(3)
        self.first = layers.Dense(units, "tanh")
        self.last = layers.Dense(units)

    def build(self, input_shape):
        self.first.build(input_shape)
        self.last.build((*input_shape[:-1], self.first.units))

    def call(self, inputs):
        return self.last(self.noise(self.first(inputs), self.seed))


def gradients(block, x=X, mode="eager", signature=None):
    """The loss, the gradients of `block` and the state that a step leaves."""
    values = [v.value for v in block.trainable_variables]

    def step(x):
        with tf.GradientTape() as tape:
            outputs = tf.cast(block(x, training=True), "float32")
            loss = tf.reduce_mean(tf.square(outputs - 1.0))
        return loss, tape.gradient(loss, values)

    if mode != "eager":
        jit_compile = mode == "xla"
        step = tf.function(step, signature, jit_compile=jit_compile, autograph=False)
    loss, found = step(tf.constant(x))
    return loss, found, [v.numpy() for v in block.non_trainable_variables]


def compare(make, x=X, mode="eager", signature=None):
    """Raise unless a block recomputed is the block; gives one of each."""
    made = []
    for recomputed in (False, True):
        keras.utils.set_random_seed(2)
        block = make()
        block(x)
        model = keras.Model()
        model.block = block
        if recomputed:
            ka.recompute(model, [block])
        made.append(block)
    plain, ours = made
    loss, expected, moved = gradients(plain, x, mode, signature)
    again, found, moved_too = gradients(ours, x, mode, signature)
    assert_equal(moved_too, moved)
    # XLA rounds otherwise where two passes are not one.
    compare = assert_equal if mode == "eager" else assert_close
    compare([again, *found], [loss, *expected])
    assert_differ(gradients(plain, x, mode, signature)[1], expected)  # Another mask.
    return plain, ours


def dropped(rate, noise_shape=None):
    return lambda x, seed: keras.random.dropout(x, rate, noise_shape, seed)


def shared_seed(x, seed):
    """Draws other numbers from the generator that dropout draws from."""
    x = keras.random.dropout(x, 0.5, seed=seed)
    x = x * keras.random.uniform((8,), seed=seed)
    return keras.random.dropout(x, 0.2, seed=seed) + keras.random.normal((8,), seed=seed)


def in_loop(x, seed):
    """Drops in each trip of a loop, whose masks cannot leave it, and after it."""
    _, x = tf.while_loop(
        lambda i, _: i < 3,
        lambda i, x: (i + 1, keras.random.dropout(x, 0.3, seed=5)),
        (tf.constant(0), x),
        maximum_iterations=3,
    )
    return keras.random.dropout(x, 0.3, seed=seed)


NOISES = {
    "all": dropped(0.5),
    "columns": dropped(0.3, (None, 1)),
    "rows": dropped(0.3, (1, 8)),
    "shared seed": shared_seed,
    "loop": in_loop,
}


@pytest.mark.slow_but(
    "eager-all",
    "eager-columns",
    "eager-shared seed",
    "eager-loop",
    "graph-rows",
    "xla-all",
)
@pytest.mark.parametrize("noise", NOISES)
def test_gradients_are_those_of_the_mask_that_was_drawn(noise, mode):
    compare(lambda: Noisy(NOISES[noise]), mode=mode)


SEQUENCES = np.stack([X] * 4, axis=1) * np.arange(1, 5)[:, None].astype("float32")
KINDS = {
    "Dropout": lambda: layers.Dropout(0.4, seed=1),
    "SpatialDropout1D": lambda: layers.SpatialDropout1D(0.4, seed=1),
    "MultiHeadAttention": lambda: SelfAttention(2, 4, dropout=0.4, seed=1),
    "GRU": lambda: layers.GRU(8, dropout=0.3, recurrent_dropout=0.2, seed=1),
    "GaussianDropout": lambda: layers.GaussianDropout(0.4, seed=1),
}


class SelfAttention(layers.Layer):
    """Attention of a sequence to itself: a layer of one argument."""

    def __init__(self, *args, **kwargs):
        super().__init__()
        self.inner = layers.MultiHeadAttention(*args, **kwargs)

    def build(self, input_shape):
        self.inner.build(input_shape, input_shape)

    def call(self, inputs, training=None):
        return self.inner(inputs, inputs, training=training)


def block_of(*inside, shape=SEQUENCES.shape[1:]):
    return keras.Sequential(
        [keras.Input(shape), layers.Dense(8, "tanh"), *inside, layers.Dense(3)]
    )


@pytest.mark.slow_but("eager-SpatialDropout1D", "eager-GaussianDropout", "graph-Dropout")
@pytest.mark.slow_in("xla")
@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_drop(kind, mode):
    compare(lambda: block_of(KINDS[kind]()), SEQUENCES, mode)


@pytest.mark.slow_in("eager-mixed_bfloat16", "graph-float64", "graph-mixed_float16")
@pytest.mark.slow_in("xla")
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float64"])
def test_the_mask_is_that_of_the_type_computed_in(policy, mode):
    """The numbers that a mask is made of differ from type to type."""
    keras.config.set_dtype_policy(policy)
    compare(lambda: block_of(layers.Dropout(0.5, seed=1)), SEQUENCES, mode)


@pytest.mark.slow_in("xla")
@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_shapes_that_are_not_known_before(mode):
    signature = [tf.TensorSpec((None, None, 8), "float32")]
    compare(lambda: Noisy(dropped(0.5)), SEQUENCES, mode, signature)


@pytest.mark.slow_in("eager")
@pytest.mark.slow_in("xla")
def test_a_block_inside_of_a_block_takes_the_masks_of_the_outer_one(mode):
    def make():
        first = Noisy(dropped(0.5))
        return keras.Sequential(
            [keras.Input((8,)), layers.Dropout(0.2, seed=4), first, layers.Dropout(0.4)]
        )

    def nested():
        block = make()
        ka.recompute(block, [block.layers[1]])
        return block

    keras.utils.set_random_seed(2)
    plain = make()
    expected = gradients(plain, mode=mode)
    keras.utils.set_random_seed(2)
    found = gradients(holding(nested()), mode=mode)
    for a, b in zip(found, expected):
        assert_close(a, b)
    assert_differ(gradients(plain, mode=mode)[1], expected[1])  # Other masks.


def holding(block):
    model = keras.Model()
    model.block = block
    ka.recompute(model, [block])
    return block


def drawings(block):
    """How often the graph of a step draws uniform numbers, and normal ones."""
    values = [v.value for v in block.trainable_variables]

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(block(x, training=True) ** 2)
        return tape.gradient(loss, values)

    function = tf.function(step, autograph=False)
    graph = function.get_concrete_function(tf.constant(SEQUENCES)).graph
    found = collections.Counter(op.type for op in graph.get_operations())
    return found["StatelessRandomUniformV2"], found["StatelessRandomNormalV2"]


def test_a_mask_is_drawn_once():
    plain, ours = compare(
        lambda: block_of(*[layers.Dropout(0.4) for _ in range(3)]), SEQUENCES
    )
    assert drawings(plain) == drawings(ours) == (3, 0)
    # The control: numbers that are no mask are drawn in both passes.
    plain, ours = compare(lambda: block_of(layers.GaussianDropout(0.4)), SEQUENCES)
    assert drawings(plain) == (0, 1)
    assert drawings(ours) == (0, 2)


def test_another_mask_would_be_noticed(monkeypatch):
    unpack = _dropout.unpack
    monkeypatch.setattr(_dropout, "unpack", lambda bits, like: ~unpack(bits, like))
    with pytest.raises(AssertionError):
        compare(lambda: Noisy(dropped(0.5)))


@pytest.mark.parametrize(("rate", "draws"), [(0.0, 0), (1.0, 0), (0.5, 1)])
def test_rates_that_draw_nothing(rate, draws):
    block = holding(Noisy(lambda x, seed: x + keras.random.dropout(x, rate, seed=seed)))
    block(X)
    before = int(block.seed.state.numpy()[1])
    gradients(block)
    assert int(block.seed.state.numpy()[1]) - before == draws


def functions_of_keras():
    """What Keras looks up when it calls a layer, draws, reads and assigns."""
    owners = [keras_random, keras.random, keras.layers.Layer, keras.layers.Dropout]
    owners += [keras.Variable, keras.StatelessScope, keras.random.SeedGenerator]
    return {
        (owner, name): value for owner in owners for name, value in vars(owner).items()
    }


def test_keras_is_changed_only_while_a_block_runs():
    before = functions_of_keras()
    seen = []

    def noise(x, seed):
        changed = {k for k, v in functions_of_keras().items() if before.get(k) is not v}
        seen.append(changed)
        if len(seen) == 4:
            raise ArithmeticError("seen")
        return keras.random.dropout(x, 0.5, seed=seed)

    block = Noisy(noise)
    block(X)
    holding(block)
    ka.Recompute(layers.Dropout(0.5))
    assert functions_of_keras() == before
    gradients(block, mode="graph")
    with pytest.raises(ArithmeticError):
        gradients(block, mode="graph")
    assert functions_of_keras() == before
    assert seen == [set(), *[{(keras_random, "dropout")}] * 3]


def test_keras_is_changed_once_and_restored_by_the_last_of_several_threads():
    original = keras_random.dropout
    inside, leave = threading.Barrier(9), threading.Barrier(9)

    def run():
        with _dropout.dropout_masks_kept, _dropout.dropout_masks_kept:
            inside.wait()
            leave.wait()

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    inside.wait()
    assert keras_random.dropout.__wrapped__ is original
    leave.wait()
    for thread in threads:
        thread.join()
    assert keras_random.dropout is original


def test_dropout_outside_of_a_block_is_keras_own_while_one_runs():
    seeds = [keras.random.SeedGenerator(3) for _ in range(2)]
    expected = keras.random.dropout(X, 0.5, seed=seeds[0])
    with _dropout.dropout_masks_kept:
        found = keras.random.dropout(X, 0.5, seed=seeds[1])
    assert_equal(found, expected)
    assert_equal(seeds[0].state, seeds[1].state)
    # The control: another draw.
    assert_differ(keras.random.dropout(X, 0.5, seed=seeds[0]), found)
