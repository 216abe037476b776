"""A model that is recomputed trains as the plain one does, and keeps less.

The oracle is the plain model, from the same seed. The controls are `keras.remat` on the
same model, and passes that do not share what they have to.
"""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from blocks import Busy, Pair, X, Y, gradients, holder, model_of, state, switched
from helpers import (
    assert_close,
    assert_differ,
    assert_equal,
    assert_same_step,
    train_twice,
)

import keras_accum as ka
from keras_accum._recompute import block as _recompute_core
from keras_accum._recompute.passes import FirstPass

layers = keras.layers


# Graphs fuse operations of one pass that stand apart in two; XLA reorders sums.
RTOL = {"eager": 1e-7, "graph": 1e-6, "xla": 2e-6}


def assert_trains_alike(make, plain, arrays=(X, Y), mode="eager", **how):
    """Raise unless two steps of both leave the same weights, state, loss and slots."""
    rtol = how.pop("rtol", RTOL[mode])
    how.setdefault("optimizer", lambda: keras.optimizers.SGD(0.02, momentum=0.9))
    found = train_twice(make, arrays, mode, **how)
    oracle = train_twice(plain, arrays, mode, **how)
    assert_same_step(found, oracle, rtol)
    assert_close(state(found[0]), state(oracle[0]), rtol, "state")
    return found[0], oracle[0]


WAYS = {
    "blocks": switched("block_*"),
    "class": switched(Busy),
    "segments": switched(segments=3),
    "kept": switched("block_*", keep="last"),
    "layer": switched(lambda layer: layer.name == "first"),
    "wrapper": lambda: model_of(ka.Recompute),
}


@pytest.mark.slow_but("layer-eager", "wrapper-eager")
@pytest.mark.parametrize(
    "way, mode",
    [
        *[(way, "eager") for way in WAYS],
        *[(way, "graph") for way in ("blocks", "segments", "kept")],
        ("segments", "xla"),
        *[
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *itertools.product(["class", "layer", "wrapper"], ["graph"]),
                *itertools.product(["blocks", "kept"], ["xla"]),
            )
        ],
    ],
)
def test_a_step_is_that_of_the_plain_model(way, mode):
    model, plain = assert_trains_alike(WAYS[way], model_of, mode=mode)
    # It did train, and its state did move.
    assert_differ(model.get_weights(), model_of().get_weights())
    assert_differ(state(model), state(model_of()))
    assert_equal([v.shape for v in model.weights], [v.shape for v in plain.weights])


class Remat(layers.Wrapper):
    """What Keras offers: its own function around a layer."""

    def call(self, inputs):
        return keras.remat(lambda x: self.layer(x, training=True))(inputs)


def assert_same_gradients(make, plain, rtol=1e-6, **how):
    for found, expected in zip(gradients(make(), **how), gradients(plain(), **how)):
        assert_close(found, expected, rtol)


def only(kind, **options):
    """A model of one kind of layer between dense ones, wrapped or not."""

    def make(wrap=lambda layer: layer):
        keras.utils.set_random_seed(5)
        inputs = keras.Input((8,))
        hidden = layers.Dense(8, "tanh")(inputs)
        inner = keras.Sequential([layers.Dense(8, "tanh"), kind(**options)], name="inner")
        inner.build((None, 8))
        return keras.Model(inputs, layers.Dense(3)(wrap(inner)(hidden)))

    return make


@pytest.mark.slow_in("eager")
def test_bert4keras_521_and_tensorflow_30265_dropout_is_not_drawn_anew(mode):
    make = only(layers.Dropout, rate=0.5, seed=3)
    loss, expected, moved = gradients(make(), mode=mode)
    found = gradients(switched("inner", make=make)(), mode=mode)
    assert_close(found[0], loss)
    assert_close(found[1], expected)
    assert_equal(found[2], moved)
    # Keras's own has the same loss, and the gradient of something else.
    theirs = gradients(make(Remat), mode=mode)
    assert_close(theirs[0], loss)
    assert_differ(theirs[1], expected, by=0.1)
    assert_differ(theirs[2], moved)


@pytest.mark.slow_in("eager")
@pytest.mark.slow_in("xla")
def test_pfn_extras_pr117_statistics_move_once(mode):
    make = only(layers.BatchNormalization, momentum=0.5)
    _, expected, moved = gradients(make(), mode=mode)
    _, found, state_of_ours = gradients(switched("inner", make=make)(), mode=mode)
    assert_close(found, expected)
    assert_close(state_of_ours, moved)
    assert_differ(gradients(make(Remat), mode=mode)[2], moved, by=0.1)


class Doubles(layers.Layer):
    """Its output depends on a state that each call moves."""

    def __init__(self, start, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(8, "tanh")
        self.scale = self.add_weight(
            shape=(), initializer=keras.initializers.Constant(start), trainable=False
        )

    def build(self, input_shape):
        self.dense.build(input_shape)

    def call(self, inputs):
        hidden = self.dense(inputs) * self.scale
        self.scale.assign(2.0 * self.scale)
        return hidden


@pytest.mark.slow_in("eager")
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_state_that_a_call_reads_and_moves_is_the_same_in_both_passes(mode):
    def make(start=0.3):
        keras.utils.set_random_seed(5)
        held = Doubles(start, name="held")
        return keras.Sequential([keras.Input((8,)), held, layers.Dense(3)])

    _, expected, moved = gradients(make(), mode=mode)
    _, found, state_of_ours = gradients(switched("held", make=make)(), mode=mode)
    assert_close(found, expected)
    assert_close(state_of_ours, moved)
    # A second pass would read this, if it read what the first has left.
    assert_differ(gradients(make(0.6), mode=mode)[1][0], expected[0], by=0.1)


@pytest.mark.slow_but("state")
@pytest.mark.parametrize("lost", ["state", "context"])
def test_what_the_passes_share_matters(lost, monkeypatch):
    """The control: without it, the tests above would find something else."""
    expected = gradients(model_of())[1]
    if lost == "state":
        monkeypatch.setattr(FirstPass, "_value_of", lambda self, v: v._value + 0)
    else:
        monkeypatch.setattr(
            _recompute_core, "save_context", lambda: _recompute_core.unrecorded
        )
    with pytest.raises((AssertionError, ValueError, TypeError)):
        assert_close(gradients(switched("block_*")())[1], expected)


def test_keras_21207_keyword_arguments_in_a_graph():
    class Scaled(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.dense = layers.Dense(8, "tanh")

        def call(self, inputs, *, scale, shift=None, exact=True, training=None):
            hidden = self.dense(inputs) * tf.cast(scale, inputs.dtype)
            hidden = hidden if shift is None else hidden + shift
            return hidden if exact else inputs

    @tf.function
    def step(layer, x, scale):
        with tf.GradientTape() as tape:
            outputs = layer(x, scale=scale, shift=x, exact=True, training=True)
            loss = tf.reduce_sum(outputs**2)
        return tape.gradient(loss, [v.value for v in layer.trainable_variables])

    keras.utils.set_random_seed(1)
    layer = Scaled()
    model = holder(layer)
    arguments = (layer, tf.constant(X), tf.constant(3))
    layer(X, scale=3)
    expected = step(*arguments)
    ka.recompute(model, layer)
    assert_close(tf.function(step.python_function)(*arguments), expected)


@pytest.mark.slow_in("graph")
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_transformers_21381_frozen_first_layers_leave_the_others_their_gradients(mode):
    def frozen(make):
        def made():
            model = make()
            for name in ("stem", "block_0"):
                model.get_layer(name).trainable = False
            model.get_layer("block_1").first.trainable = False
            return model

        return made

    make, plain = frozen(switched("block_*")), frozen(model_of)
    found, expected = gradients(make(), mode=mode), gradients(plain(), mode=mode)
    assert len(found[1]) == len(expected[1]) == 6
    assert all(np.abs(g).max() > 0 for g in found[1][:2])
    assert_close(found[1], expected[1], RTOL[mode])


def test_frozen_weights_have_a_gradient_for_who_asks():
    def gradient(model):
        kernel = model.get_layer("block_0").first.kernel
        model.get_layer("block_0").first.trainable = False
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(X, training=True) ** 2)
        return tape.gradient(loss, kernel.value)

    assert_close(gradient(switched("block_*")()), gradient(model_of()))


@pytest.mark.slow_in("xla")
def test_arguments_of_every_kind(mode):
    class Kinds(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.table = layers.Embedding(7, 8)
            self.dense = layers.Dense(8, "tanh")

        def build(self, input_shape):
            self.table.build()
            self.dense.build((None, 8))

        def call(self, inputs, rows, flags, nothing=None, pair=None):
            hidden = self.dense(inputs) + self.table(rows)
            hidden = tf.where(flags, hidden, inputs)
            assert nothing is None
            return {"out": hidden * pair[0], "rows": rows + 1, "list": [pair[1], flags]}

    keras.utils.set_random_seed(2)
    layer = Kinds()
    layer.build((None, 8))
    rows = tf.constant(np.arange(len(X)) % 7)
    flags = tf.constant(np.arange(len(X))[:, None] % 3 > 0)
    values = [v.value for v in layer.trainable_variables]

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            out = layer(x, rows, flags, pair=(x[:, :1], 2 * x), training=True)
            loss = tf.reduce_sum(out["out"] ** 2) + tf.reduce_sum(out["list"][0])
        found = tape.gradient(loss, [x, *values])
        return [tf.convert_to_tensor(g) for g in found], out["rows"], out["list"][1]

    def run():
        compiled = {"eager": step, "graph": tf.function(step)}.get(mode)
        compiled = compiled or tf.function(step, jit_compile=True)
        return compiled(tf.constant(X))

    expected = run()
    with ka.recompute(holder(layer), layer):
        found = run()
    assert_close(found[0], expected[0])
    assert_equal(found[1:], expected[1:])
    assert_differ(found[0][1:], [0 * g for g in found[0][1:]])


def test_sparse_gradients_stay_sparse():
    keras.utils.set_random_seed(2)
    inner = keras.Sequential([layers.Embedding(50, 4), layers.Dense(3)], name="inner")
    model = keras.Sequential([keras.Input((3,), dtype="int32"), inner])
    rows = tf.constant([[1, 2, 2], [4, 1, 0]])

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(rows, training=True) ** 2)
        return tape.gradient(loss, inner.layers[0].embeddings.value)

    expected = step()
    ka.recompute(model, "inner")
    found = step()
    assert isinstance(found, tf.IndexedSlices) and isinstance(expected, tf.IndexedSlices)
    assert_close(tf.convert_to_tensor(found), tf.convert_to_tensor(expected))


@pytest.mark.slow_in("graph-1")
@pytest.mark.slow_in("xla")
@pytest.mark.parametrize("used", [0, 1])
def test_a_result_that_nothing_uses(used, mode):
    def make():
        keras.utils.set_random_seed(5)
        inputs = keras.Input((8,))
        return keras.Model(inputs, layers.Dense(3)(Pair(name="pair")(inputs)[used]))

    _, found, _ = gradients(switched("pair", make=make)(), mode=mode)
    _, expected, _ = gradients(make(), mode=mode)
    unused = [2, 3] if used == 0 else [0, 1]
    # As documented: zeros, where the plain model has None.
    assert [expected[i] for i in unused] == [None, None]
    assert all(np.all(found[i].numpy() == 0) for i in unused)
    reached = [i for i in range(6) if i not in unused]
    assert_close([found[i] for i in reached], [expected[i] for i in reached])


def test_a_part_that_the_loss_does_not_reach_has_no_gradient():
    model = switched("block_*")()
    with tf.GradientTape() as tape:
        model(X, training=True)
        loss = tf.reduce_sum(model.get_layer("head").kernel.value ** 2)
    value = model.get_layer("block_1").first.kernel.value
    assert tape.gradient(loss, value) is None


class Attends(layers.Layer):
    """Takes no mask: the layers inside find it on what they are called with."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.norm, self.add = layers.LayerNormalization(), layers.Add()
        # No bias: the gradient of a key's is rounding.
        self.attention = layers.MultiHeadAttention(2, 4, dropout=0.2, use_bias=False)

    def build(self, input_shape):
        self.norm.build(input_shape)
        self.attention.build(input_shape, input_shape)

    def call(self, inputs):
        normed = self.norm(inputs)
        return self.add([inputs, self.attention(normed, normed)])


def masked_model(wrap=lambda layer: layer):
    keras.utils.set_random_seed(5)
    tokens = keras.Input((6,), dtype="int32")
    # The mask comes out of the first block.
    embedding = layers.Embedding(9, 8, mask_zero=True)
    hidden = keras.Sequential([embedding], name="block_0")(tokens)
    for i in (1, 2):
        hidden = wrap(Attends(name=f"block_{i}"))(hidden)
    hidden = layers.GRU(5)(hidden)
    return keras.Model(tokens, layers.Dense(3)(hidden))


TOKENS = np.random.default_rng(3).integers(0, 3, (10, 6)).astype("int32")


# Not under XLA, where Keras's GRU does not take a mask.
@pytest.mark.slow_in("blocks")
@pytest.mark.parametrize(
    "way, mode",
    [
        ("blocks", "eager"),
        ("segments", "graph"),
        pytest.param("segments", "eager", marks=pytest.mark.slow),
        pytest.param("wrapper", "eager", marks=pytest.mark.slow),
    ],
)
def test_masks_travel_through(way, mode):
    make = {
        "blocks": switched("block_*", make=masked_model),
        "segments": switched(segments=3, make=masked_model),
        "wrapper": lambda: masked_model(ka.Recompute),
    }[way]
    arrays = (TOKENS, Y[:10])
    assert_trains_alike(make, masked_model, arrays, mode, rtol=2e-6)
    # The control: the mask changes what the model computes.
    visible = np.where(TOKENS == 0, 3, TOKENS)
    assert_differ(make()(visible), make()(TOKENS))


class TakesMasksOff(layers.Layer):
    """Attention to what it is called with, which then has no mask any longer."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.attention = layers.MultiHeadAttention(2, 4, use_bias=False)

    def build(self, input_shape):
        self.attention.build(input_shape, input_shape)

    def call(self, inputs):
        return inputs + self.attention(inputs, inputs)


class Unmasked(keras.Model):
    """Not functional: there the graph holds the masks."""

    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(9, 8, mask_zero=True)
        self.block = TakesMasksOff(name="block_0")
        self.pool, self.head = layers.GlobalAveragePooling1D(), layers.Dense(3)

    def call(self, tokens, training=None):
        embedded = self.embedding(tokens)
        hidden = self.block(embedded, training=training)
        return self.head(self.pool(hidden) + self.pool(embedded))


def unmasking_model():
    keras.utils.set_random_seed(5)
    model = Unmasked()
    model(TOKENS)
    return model


@pytest.mark.slow_in("True")
@pytest.mark.slow_in("xla", "graph")
@pytest.mark.parametrize("verify", [False, True])
def test_masks_are_taken_off_the_arguments_as_often_as_in_the_plain_model(verify, mode):
    make = switched("block_*", make=unmasking_model, verify=verify)
    assert_trains_alike(make, unmasking_model, (TOKENS, Y[:10]), mode, rtol=2e-6)
    # The control: the mask matters, where the attention sees it.
    visible = np.where(TOKENS == 0, 3, TOKENS)
    assert_differ(make()(visible), make()(TOKENS))


@pytest.mark.slow_but("False")
@pytest.mark.parametrize("training", [True, False, None])
def test_training_is_what_the_caller_says(training):
    def step(model):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(X, training=training) ** 2)
        found = tape.gradient(loss, [v.value for v in model.trainable_variables])
        return [tf.convert_to_tensor(g) for g in found]

    assert_equal(step(switched("block_*")()), step(model_of()))
    assert_equal(step(switched(segments=2)()), step(model_of()))


# Half precision rounds to 1e-3 (float16) or 8e-3 (bfloat16); a graph rounds in other
# places once passes are separate.
@pytest.mark.slow
@pytest.mark.slow_in("xla")
@pytest.mark.parametrize(
    "policy, mode, rtol",
    [
        ("mixed_float16", "eager", 1e-7),
        pytest.param("mixed_float16", "graph", 2e-3, marks=pytest.mark.slow),
        ("mixed_bfloat16", "eager", 1e-7),
        ("mixed_bfloat16", "xla", 2e-2),
    ],
)
def test_mixed_precision(policy, mode, rtol):
    keras.config.set_dtype_policy(policy)
    assert_trains_alike(switched("block_*"), model_of, mode=mode, rtol=rtol)
    with pytest.raises(AssertionError):
        assert_trains_alike(lambda: model_of(Remat), model_of, mode=mode, rtol=rtol)


def test_a_layer_of_its_own_precision_inside_of_another():
    def make():
        keras.utils.set_random_seed(5)
        inputs = keras.Input((8,))
        inner = keras.Sequential(
            [
                layers.Dense(8, "tanh", dtype="mixed_bfloat16"),
                layers.Dropout(0.3, dtype="mixed_bfloat16"),
                layers.Dense(8, dtype="float32"),
            ],
            name="block_0",
        )
        return keras.Model(inputs, layers.Dense(3, dtype="float32")(inner(inputs)))

    assert_trains_alike(switched("block_*", make=make), make)


@pytest.mark.slow_in("graph")
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_nested_blocks(mode):
    def make():
        keras.utils.set_random_seed(5)
        outer = keras.Sequential(
            [Busy(8, name=f"inner_{i}") for i in range(2)], name="out"
        )
        outer.build((None, 8))
        inputs = keras.Input((8,))
        return keras.Model(inputs, layers.Dense(3)(outer(inputs)))

    def twice():
        model = make()
        ka.recompute(model, "inner_*")
        ka.recompute(model, "out")
        return model

    model, _ = assert_trains_alike(twice, make, mode=mode)
    if mode == "eager":
        # First pass; second of the outer, first of the inner; second of the inner.
        steps, looked = 2, 2  # Each block looks once at what its call draws, see below.
        calls = model.get_layer("out").layers[0].calls
        assert 3 * steps <= calls <= 3 * steps + looked + 1


@pytest.mark.slow_in("True")
@pytest.mark.slow_in("xla", "graph")
@pytest.mark.parametrize("quantized", [False, True])
def test_low_rank_adaptation(quantized, mode):
    def adapted(make):
        def made():
            model = make()
            keras.utils.set_random_seed(9)
            for block in ("block_0", "block_1"):
                model.get_layer(block).first.enable_lora(2)
            for variable in model.get_layer("block_0").first.trainable_variables:
                variable.assign(keras.random.normal(variable.shape, seed=4))
            if quantized:  # Keras then calls another method of the layer.
                model.get_layer("block_0").first.quantize("int8")
            return model

        return made

    make, plain = adapted(switched("block_*")), adapted(model_of)
    model, _ = assert_trains_alike(make, plain, mode=mode)
    assert_differ(
        model.get_layer("block_0").first.lora_kernel_a,
        plain().get_layer("block_0").first.lora_kernel_a,
    )


@pytest.mark.slow_in("eager")
@pytest.mark.slow_in("xla")
def test_a_softmax_at_the_end_of_a_block_gives_the_loss_its_logits(mode):
    def make():
        keras.utils.set_random_seed(5)
        inputs = keras.Input((8,))
        last = keras.Sequential(
            [layers.Dense(8), layers.Dense(3, "softmax")], name="last"
        )
        return keras.Model(inputs, last(layers.Dense(8)(inputs)))

    def options():
        return {"loss": "sparse_categorical_crossentropy"}

    labels = np.arange(len(X)) % 3
    # So large that probabilities alone are 0 and 1.
    assert_trains_alike(
        switched("last", make=make), make, (30 * X, labels), mode, options=options
    )


@pytest.mark.slow_in("graph")
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_gradients_of_gradients(mode):
    """A penalty on the gradient by the inputs, as adversarial training has it."""

    def step(model, x):
        values = [v.value for v in model.trainable_variables]
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                tape.watch(x)
                outputs = tf.reduce_sum(model(x, training=True) ** 2)
            slope = tape.gradient(outputs, x)
            loss = tf.reduce_mean(tf.square(slope))
        found = outer.gradient(loss, values)
        return [tf.zeros(()) if g is None else g for g in found]

    def run(model):
        function = (
            step
            if mode == "eager"
            else tf.function(step, jit_compile=mode == "xla", autograph=False)
        )
        return function(model, tf.constant(X))

    found, expected = run(switched("block_*")()), run(model_of())
    # The head's bias does not reach the slope.
    pairs = [(f, e) for f, e in zip(found, expected) if np.shape(e) == np.shape(f)]
    assert_close([f for f, _ in pairs], [e for _, e in pairs], 1e-5)
