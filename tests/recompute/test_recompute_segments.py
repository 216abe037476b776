"""Where a graph is cut, and what memory the cuts leave."""

import functools
import gc
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from blocks import gradients, model_of, switched
from helpers import assert_close, assert_equal, assert_refused

import keras_accum as ka
from keras_accum._backend.private.compiled import compiled_bytes
from keras_accum._backend.private.graphs import nodes_of
from keras_accum._recompute.segments import place

layers = keras.layers
MIB = 2.0**20


def cost(sizes, last_uses, cuts):
    """What is kept at the cuts, and the largest segment: by the definition."""
    bounds = [0, *cuts, len(sizes)]
    kept = {k for c in cuts for k in range(c) if last_uses[k] >= c}
    segments = [sum(sizes[i:j]) for i, j in itertools.pairwise(bounds)]
    return sum(sizes[k] for k in kept) + max(segments)


def outputs(sizes, last_uses):
    """One tensor of each step, as `place` takes them."""
    return [(k, used, size) for k, (used, size) in enumerate(zip(last_uses, sizes))]


def least(sizes, last_uses, count):
    """The least cost of all ways to cut."""
    ways = itertools.combinations(range(1, len(sizes)), count - 1)
    return min(cost(sizes, last_uses, cuts) for cuts in ways)


@pytest.mark.parametrize("seed", range(8))
def test_cuts_are_the_best_of_all(seed):
    rng = np.random.default_rng(seed)
    steps = int(rng.integers(4, 11))
    sizes = rng.integers(1, 50, steps).tolist()
    # Chains with skip connections, some of them to the end.
    last_uses = [int(min(steps, k + rng.choice([1, 1, 1, 3, 9]))) for k in range(steps)]
    for count in range(1, steps + 1):
        cuts = place(sizes, outputs(sizes, last_uses), count)
        assert len(cuts) == count - 1 and cuts == sorted(set(cuts))
        best = least(sizes, last_uses, count)
        assert best <= cost(sizes, last_uses, cuts) <= 1.02 * best


def test_cuts_go_through_the_cheapest_tensors():
    # A bottleneck at every fourth step of a chain.
    sizes = [8, 8, 8, 1] * 4
    chain = list(range(1, 17))
    assert place(sizes, outputs(sizes, chain), 4) == [4, 8, 12]
    # A tensor that is needed until the end costs at each cut, but once.
    assert cost([5, 1, 1, 1], [4, 2, 3, 4], [1, 2]) == 5 + 1 + 5


def unet(wrap=None):
    """Two levels with skip connections, and an operation that is no layer."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((8,))
    a = layers.Dense(16, "tanh")(inputs)
    b = layers.Dropout(0.3)(layers.Dense(8, "tanh")(a))
    c = layers.Dense(4, "tanh")(b)
    up = keras.ops.concatenate([layers.Dense(8)(c), b], axis=-1)
    up = layers.BatchNormalization()(up) * 2.0
    up = layers.Add()([layers.Dense(16, "tanh")(up), a])
    return keras.Model(inputs, [layers.Dense(3)(up), layers.Dense(2)(c)])


def step_of(model, mode):
    x = np.random.default_rng(0).normal(size=(20, 8)).astype("float32")
    y = [np.ones((20, 3), "float32"), np.zeros((20, 2), "float32")]

    def step(x):
        with tf.GradientTape() as tape:
            loss = sum(
                tf.reduce_mean((o - t) ** 2) for o, t in zip(model(x, training=True), y)
            )
        return tape.gradient(loss, [v.value for v in model.trainable_variables])

    return (
        [*tf.function(step, jit_compile=mode == "xla")(x)]
        if mode != "eager"
        else (step(tf.constant(x)))
    )


@pytest.mark.slow_but("5")
@pytest.mark.parametrize("segments", [2, 5, "sqrt", 7])
def test_skip_connections_are_respected(segments):
    model = unet()
    expected = step_of(unet(), "eager")
    handle = ka.recompute(model, segments=segments)
    count = 3 if segments == "sqrt" else segments
    assert len(handle.layers) == count - 1
    assert_close(step_of(model, "eager"), expected)


def test_each_operation_runs_in_one_segment():
    model = unet()
    handle = ka.recompute(model, segments=4)
    names = [node.operation.name for node in nodes_of(model)]
    pairs = [name.split("..") for name in handle.layers]
    bounds = [(names.index(a), names.index(b)) for a, b in pairs]
    assert bounds[0][0] == 0
    assert all(b + 1 == c for (_, b), (c, _) in itertools.pairwise(bounds))
    assert bounds[-1][1] < len(names) - 1  # The last segment is not recomputed.


def test_a_model_within_a_model_is_cut_by_itself():
    def make():
        keras.utils.set_random_seed(3)
        inner = keras.Sequential(
            [keras.Input((8,)), *[layers.Dense(8, "tanh") for _ in range(6)]]
        )
        model = keras.Sequential([keras.Input((8,)), inner, layers.Dense(3)])
        return model, inner

    model, inner = make()
    assert ka.recompute(inner, segments=3).layers[0].startswith("dense")
    assert_equal(gradients(model)[1], gradients(make()[0])[1])


def test_what_cannot_be_cut():
    class Own(keras.Model):
        def call(self, x):
            return x

    message = (
        "'{}' has no graph of layers to cut into segments: it is subclassed, or a "
        "Sequential model that is not built. Build it first, or give the layers to "
        "recompute, as in `recompute(model, 'block_*')`."
    )
    for model in (Own(name="own"), keras.Sequential([layers.Dense(3)], name="unbuilt")):
        assert_refused(
            lambda: ka.recompute(model, segments=2),  # noqa: B023
            ValueError,
            message.format(model.name),
        )
    for segments in (1, 0, 5):
        assert_refused(
            lambda: ka.recompute(model_of(), segments=segments),  # noqa: B023
            ValueError,
            "`segments` must be at least 2, since the last one is not recomputed, and at "
            f"most the number of layers, 4. Received: {segments}",
        )
    for segments, kind in ((2.0, "float"), (True, "bool"), ("root", "str")):
        assert_refused(
            lambda: ka.recompute(model_of(), segments=segments),  # noqa: B023
            TypeError,
            f"`segments` must be 'sqrt' or an int. Received: {segments!r} of type {kind}",
        )


# --- What is inside of models and layers, and what a step keeps.


def chain(inputs, units, count, name):
    """Blocks of three layers, each a `Sequential` of its own."""
    hidden = inputs
    for i in range(count):
        inner = [layers.Dense(units, "tanh") for _ in range(3)]
        hidden = keras.Sequential(inner, name=f"{name}_{i}")(hidden)
    return hidden


class Stack(layers.Layer):
    """Blocks that no graph shows."""

    def __init__(self, count=5, heavy=0, **kwargs):
        super().__init__(**kwargs)
        self.blocks = [
            keras.Sequential(
                [layers.Dense(8, "tanh") for _ in range(3)], name=f"part_{i}"
            )
            for i in range(count)
        ]
        self.heavy = [layers.Dense(8, "tanh") for _ in range(heavy)]

    def build(self, shape):
        for layer in [*self.blocks, *self.heavy]:
            layer.build(shape)

    def call(self, x):
        for layer in [*self.heavy, *self.blocks]:
            x = x + layer(x)
        return x


def around_a_model():
    keras.utils.set_random_seed(3)
    inputs = keras.Input((8,))
    backbone = keras.Model(inputs, chain(inputs, 8, 6, "block"), name="backbone")
    return keras.Sequential([keras.Input((8,)), backbone, layers.Dense(3, name="head")])


def around_layers(**kwargs):
    keras.utils.set_random_seed(3)
    inputs = keras.Input((8,))
    hidden = Stack(name="stack", **kwargs)(inputs)
    return keras.Model(inputs, layers.Dense(3, name="head")(hidden), name="outer")


def twice_around_a_model():
    keras.utils.set_random_seed(3)
    inputs = keras.Input((8,))
    backbone = keras.Model(inputs, chain(inputs, 8, 6, "block"), name="backbone")
    both = layers.Concatenate()([backbone(inputs), backbone(-inputs)])
    return keras.Model(inputs, layers.Dense(3)(both))


@pytest.mark.slow_in("names1")
@pytest.mark.parametrize(
    ("make", "names"),
    [
        (around_a_model, ["block_0..block_0", "block_1..block_1", "block_2..block_3"]),
        (around_layers, [f"part_{i}" for i in range(4)]),
        (twice_around_a_model, [f"block_{i}..block_{i}" for i in range(6)]),
    ],
)
def test_what_is_inside_is_cut(make, names):
    expected = gradients(make())[1]
    model = make()
    with ka.recompute(model, segments="sqrt") as handle:
        assert list(handle.layers) == names
        assert_equal(gradients(model)[1], expected)
        # The control: the layers are called in what was switched on.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "keras_accum._recompute.block._TwoPasses.run", lambda self: 1 / 0
            )
            with pytest.raises(ZeroDivisionError):
                gradients(model)
    assert_equal(gradients(model)[1], expected)


def test_what_is_cut_already_is_not_cut_again():
    model = around_a_model()
    ka.recompute(model.get_layer("backbone"), segments=3)
    message = (
        "Cutting '{}' into segments saves nothing: 100% of what its backward pass needs "
        "would stay in memory. No layers that repeat would save more: recompute nothing."
    )
    assert_refused(
        lambda: ka.recompute(model, segments="sqrt"),
        ValueError,
        message.format(model.name),
    )
    again = "is already recomputed, or its outputs are already kept"
    with pytest.raises(ValueError, match=again):
        ka.recompute(model.get_layer("backbone"), segments=3)


def test_what_saves_more_is_named():
    """The layer holds as much beside its blocks, which therefore do not stand for it."""
    assert_refused(
        lambda: ka.recompute(around_layers(heavy=8), segments="sqrt"),
        ValueError,
        "Cutting 'outer' into segments saves nothing: 100% of what its backward pass "
        "needs would stay in memory. Recompute the layers that repeat, which leaves 76%: "
        "`recompute(model, 'part_*')`.",
    )
    # One segment for each layer keeps what there was: as many as asked for, and a warning.
    with pytest.warns(UserWarning, match="into segments saves nothing: 99% of what"):
        handle = ka.recompute(unet(), segments=11)
    assert len(handle.layers) == 10


def test_a_step_weighs_what_its_backward_pass_keeps():
    """Not what it returns: attention keeps its scores, a product with few units less."""

    def make():
        keras.utils.set_random_seed(3)
        inputs = hidden = keras.Input((128, 8))
        hidden = layers.MultiHeadAttention(4, 2, name="attention")(hidden, hidden)
        for i in range(5):
            hidden = layers.Dense(8, "tanh", name=f"dense_{i}")(hidden)
        return keras.Model(inputs, hidden)

    assert ka.recompute(make(), segments=2).layers == ("attention..attention",)


class Conditioned(keras.Model):
    """Blocks that no graph shows, called with two arguments."""

    def __init__(self):
        super().__init__(name="conditioned")
        self.blocks = [
            keras.Sequential(
                [layers.Dense(8, "tanh") for _ in range(3)], name=f"part_{i}"
            )
            for i in range(4)
        ]

    def build(self, x_shape, context_shape):
        for block in self.blocks:
            block.build(x_shape)

    def call(self, x, context, training=None):
        for block in self.blocks:
            x = block(x + context)
        return x


def test_a_model_with_two_arguments_is_traced_with_both():
    model = Conditioned()
    model(np.ones((2, 8)), np.ones((2, 8)))
    with ka.recompute(model, segments="sqrt") as handle:
        assert handle.layers == ("part_0", "part_1", "part_2")
    unbuilt = Conditioned()
    with pytest.raises(ValueError, match="The shapes of its arguments are not known"):
        ka.recompute(unbuilt, segments="sqrt")


def test_a_model_that_cannot_be_traced_is_named():
    class Unknown(layers.Layer):
        def call(self, x, training=None):
            if training:
                raise NotImplementedError("not in a trace")
            return x

    inputs = keras.Input((3,))
    model = keras.Model(
        inputs, layers.Dense(3)(Unknown(name="unknown")(inputs)), name="m"
    )
    with pytest.raises(ValueError) as caught:
        ka.recompute(model, segments=2)
    text = str(caught.value)
    assert text.startswith(
        "The layers of 'm' are weighed by a trace of a training step, which failed: "
    )
    assert "not in a trace" in text and text.endswith(
        "Select layers by name instead, without `share`, as in "
        "`recompute(model, 'block_*')`."
    )


# --- Memory, by TensorFlow's allocator in a graph, and in XLA's program.


def residual(depth=24, width=128):
    keras.utils.set_random_seed(3)
    inputs = hidden = keras.Input((width,))
    for _ in range(depth):
        inner = layers.Dropout(0.1)(layers.Dense(width, "gelu")(hidden))
        hidden = layers.Add()([hidden, inner])
    return keras.Model(inputs, hidden)


SQRT = switched(make=residual, segments="sqrt")


@functools.cache
def peak(make, xla=False, rows=1024, steps=5):
    """The median over steps of the peak of one, in MiB above the level before it."""
    model = make()
    values = [v.value for v in model.trainable_variables]
    x = tf.random.stateless_normal((rows, 128), (1, 2))

    @tf.function(jit_compile=xla, autograph=False)
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - 1.0))
        return tape.gradient(loss, values)

    step(), step()
    found = []
    for _ in range(steps):
        gc.collect()
        tf.config.experimental.reset_memory_stats("CPU:0")
        before = tf.config.experimental.get_memory_info("CPU:0")["current"]
        step()
        after = tf.config.experimental.get_memory_info("CPU:0")["peak"]
        found.append((after - before) / MIB)
    return float(np.median(found))


# Under XLA, `test_memory_under_xla_grows_with_the_root_of_the_depth` shows the same.
@pytest.mark.slow
@pytest.mark.parametrize("xla", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_memory_falls_to_a_quarter(xla):
    plain, ours = peak(residual, xla), peak(SQRT, xla)
    assert ours <= 0.25 * plain
    if not xla:
        # The control: one segment of two is all there is at a time.
        assert peak(switched(make=residual, segments=2), xla) > 0.45 * plain


@pytest.mark.slow  # What is assigned shows it too, in the control of the test below.
def test_jax_7100_repeated_computations_are_not_undone():
    """XLA finds what is computed twice, if nothing ties the second to the gradient."""
    tied = peak(SQRT, xla=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "keras_accum._recompute.passes.optimization_barrier",
            lambda tensors, to: tensors,
        )
        untied = peak(switched(make=residual, segments="sqrt"), xla=True)
    assert untied > 2 * tied


def assigned(depth, width=64):
    """What XLA assigns for the activations of a recomputed chain, in MiB."""
    model = residual(depth, width)
    ka.recompute(model, segments="sqrt")
    values = [v.value for v in model.trainable_variables]

    @tf.function(jit_compile=True, autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - 1.0))
        return tape.gradient(loss, values)

    x = tf.ones((2048, width))
    gradients = sum(4 * value.shape.num_elements() for value in values)
    return (compiled_bytes(step, x) - gradients) / MIB


@pytest.mark.slow
def test_memory_under_xla_grows_with_the_root_of_the_depth(monkeypatch):
    """Chen et al. 2016. Not with it: the random numbers of all blocks, drawn first."""
    assert assigned(16) / assigned(4) < 2.0
    monkeypatch.setattr(
        "keras_accum._recompute.passes.optimization_barrier", lambda tensors, to: tensors
    )
    assert assigned(16) / assigned(4) > 3.5


def test_tensorflow_57205_a_single_layer_saves_little_and_a_block_does():
    def blocks():
        keras.utils.set_random_seed(3)
        inputs = hidden = keras.Input((128,))
        for i in range(6):
            inner = [layers.Dense(128, "relu", name=f"dense_{i}_{k}") for k in range(4)]
            hidden = keras.Sequential(inner, name=f"block_{i}")(hidden)
        return keras.Model(inputs, hidden)

    plain = peak(blocks, steps=15)
    assert peak(switched("dense_*", make=blocks), steps=15) > 0.7 * plain
    assert peak(switched("block_*", make=blocks)) < 0.5 * plain
