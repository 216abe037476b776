"""What a window makes of gradients that are sparse, missing, weighted, or do not fit."""

import keras
import numpy as np
import pytest
import reference
import tensorflow as tf
from helpers import (
    Batches,
    assert_close,
    assert_differ,
    assert_equal,
    assert_refused,
    compile_in,
    data,
    dense_model,
    in_mode,
    since_keras,
    slots,
    state,
    variable,
)

import keras_accum as ka
from keras_accum._core.gradients import global_norm

without_xla = pytest.mark.parametrize("mode", ["eager", "graph"])

# --- sparse gradients

ROWS, WIDTH, LENGTH = 7, 4, 3
SIZES = [4, 2, 3]


def embedding_model():
    keras.utils.set_random_seed(3)
    inputs = keras.Input((LENGTH,), dtype="int32")
    embedded = keras.layers.Embedding(ROWS, WIDTH)(inputs)
    return keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Flatten()(embedded)))


def tokens(updates):
    """Indices that repeat within a sample, a micro-batch and a window; row 0 never."""
    rng = np.random.default_rng(4)
    samples = updates * sum(SIZES)
    x = rng.integers(1, ROWS, (samples, LENGTH)).astype("int32")
    return x, rng.normal(size=(samples, 2)).astype("float32") * 3


def train_on_large_batches(optimizer, updates, dense):
    """The plain optimizer on gradients made dense, or on those of `tf.GradientTape`."""
    x, y = tokens(updates)
    model = embedding_model()
    variables = model.trainable_variables
    for rows in np.split(np.arange(len(x)), updates):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y[rows] - model(x[rows])))
        gradients = tape.gradient(loss, variables)
        assert isinstance(gradients[0], tf.IndexedSlices)
        if dense:
            gradients = [tf.convert_to_tensor(g) for g in gradients]
        optimizer.apply(gradients, variables)
    return model, optimizer


# Adam divides by the root of its own second moment, which turns rounding into 2e-5.
INNER = {
    "sgd": (keras.optimizers.SGD, {"momentum": 0.9, "clipnorm": 0.5}, 1e-6),
    "sgd-all": (keras.optimizers.SGD, {"momentum": 0.9, "global_clipnorm": 0.5}, 1e-6),
    "adam": (keras.optimizers.Adam, {}, 2e-5),
    "adamw": (keras.optimizers.AdamW, {"global_clipnorm": 0.5}, 2e-5),
}


@pytest.mark.slow_but("graph-sgd-all")
@pytest.mark.slow_in("xla")
@pytest.mark.parametrize(
    ("mode", "name"),
    [
        ("eager", "sgd-all"),
        ("eager", "adam"),
        ("graph", "sgd"),
        ("graph", "sgd-all"),
        ("graph", "adam"),
        ("graph", "adamw"),
        ("xla", "adamw"),
    ],
)
def test_an_embedding_equals_the_large_batch_with_dense_gradients(mode, name):
    make, options, rtol = INNER[name]
    x, y = tokens(2)
    optimizer = ka.AccumOptimizer(make(0.05, **options), len(SIZES))
    model = compile_in(embedding_model(), mode, optimizer)
    model.fit(Batches(SIZES * 2, x, y), shuffle=False, verbose=0)

    oracle, plain = train_on_large_batches(make(0.05, **options), 2, dense=True)
    assert_close(model.get_weights(), oracle.get_weights(), rtol, "weights")
    assert_close(slots(optimizer), slots(plain), max(rtol, 1e-5), "slots")
    # Plain Keras clips and squares the rows of an index that repeats one by one. It is
    # Keras that is off here, by what the documentation says.
    sparse, _ = train_on_large_batches(make(0.05, **options), 2, dense=False)
    assert_differ(sparse.get_weights(), oracle.get_weights(), by=2e-3)


def test_an_embedding_with_plain_sgd_equals_plain_keras_too():
    x, y = tokens(2)
    optimizer = ka.AccumOptimizer(keras.optimizers.SGD(0.5), len(SIZES))
    model = compile_in(embedding_model(), "graph", optimizer)
    model.fit(Batches(SIZES * 2, x, y), shuffle=False, verbose=0)
    sparse, _ = train_on_large_batches(keras.optimizers.SGD(0.5), 2, dense=False)
    assert_close(model.get_weights(), sparse.get_weights())
    once, _ = train_on_large_batches(keras.optimizers.SGD(0.5), 1, dense=False)
    assert_differ(model.get_weights(), once.get_weights())


def apply_rows(optimizer, table):
    return lambda values, indices, weight: optimizer.apply(
        [tf.IndexedSlices(values, indices, tf.constant(list(table.shape)))],
        [table],
        weight,
    )


def test_rows_of_an_index_that_repeats_are_added(mode):
    table = keras.Variable(np.zeros((4, 2), "float32"))
    optimizer = ka.AccumOptimizer(keras.optimizers.SGD(1.0), 2)
    optimizer.build([table])
    apply = in_mode(apply_rows(optimizer, table), mode)
    values = [[[1.0, 2.0], [10.0, 20.0], [5.0, 7.0]], [[100.0, 0.0]] * 3]
    indices = [[2, 2, 0], [3, 2, 3]]
    dense = np.zeros((2, 4, 2))
    for i, weight in enumerate([3.0, 1.0]):
        apply(tf.constant(values[i]), tf.constant(indices[i]), tf.constant(weight))
        for row, index in zip(values[i], indices[i], strict=True):
            dense[i][index] += row
    assert_close([table], [-(3 * dense[0] + dense[1]) / 4])
    assert_differ([table], [-(dense[0] + dense[1]) / 2])


def test_dense_and_sparse_gradients_of_one_variable_add_up():
    table = keras.Variable(np.zeros((4, 2), "float32"))
    optimizer = ka.AccumOptimizer(keras.optimizers.SGD(1.0), 3)
    dense = np.arange(8, dtype="float32").reshape(4, 2)
    rows = apply_rows(optimizer, table)
    rows(tf.constant([[1.0, 2.0]]), tf.constant([1]), 2.0)
    optimizer.apply([tf.constant(dense)], [table], 5.0)
    rows(tf.constant([[3.0, 4.0], [5.0, 6.0]]), tf.constant([1, 3]), 1.0)
    sparse = np.array([[0, 0], [2 + 3, 4 + 4], [0, 0], [5, 6]])
    assert_close([table], [-(sparse + 5 * dense) / 8])


def makes_dense(apply, table):
    """Whether `apply`, traced, has a tensor of the table's shape, and its operations.

    Outside of the loop, that is, which runs at the end of a window.
    """
    traced = tf.function(apply, autograph=False).get_concrete_function(
        tf.TensorSpec((None, 2)), tf.TensorSpec((None,), "int32"), tf.TensorSpec(())
    )
    operations = traced.graph.get_operations()
    shapes = [out.shape for op in operations for out in op.outputs]
    return table.shape in [tuple(s) for s in shapes if s.rank is not None], operations


def test_no_micro_step_makes_a_sparse_gradient_dense():
    table = keras.Variable(np.zeros((11, 2), "float32"))
    optimizer = ka.AccumOptimizer("adam", 3)
    optimizer.build([table])
    dense, operations = makes_dense(apply_rows(optimizer, table), table)
    types = {op.type for op in operations}
    assert not dense
    assert "ResourceScatterAdd" in types
    assert "UnsortedSegmentSum" not in types
    assert types & {"While", "StatelessWhile"}, "the end of the window is not in a loop"

    def densely(values, indices, weight):
        rows = tf.IndexedSlices(values, indices, tf.constant(list(table.shape)))
        optimizer.apply([tf.convert_to_tensor(rows)], [table], weight)

    dense, operations = makes_dense(densely, table)
    assert dense
    assert "ResourceScatterAdd" not in {op.type for op in operations}


@pytest.mark.slow_in("xla")
def test_a_sparse_nan_of_weight_zero_contributes_nothing(mode):
    table = keras.Variable(np.zeros((4, 2), "float32"))
    optimizer = ka.AccumOptimizer(keras.optimizers.SGD(1.0), 2)
    optimizer.build([table])
    apply = in_mode(apply_rows(optimizer, table), mode)
    apply(tf.constant([[np.nan, np.inf]]), tf.constant([1]), tf.constant(0.0))
    apply(tf.constant([[1.0, 2.0]]), tf.constant([1]), tf.constant(7.0))
    assert_equal([table], [np.array([[0, 0], [-1, -2], [0, 0], [0, 0]])])


# --- gradients that are None


def inner():
    """What moves a variable even without a gradient: momentum and weight decay."""
    return keras.optimizers.SGD(0.5, momentum=0.9, weight_decay=0.1)


def two_variables():
    return [variable(1.0, -2.0, name="a"), variable(0.5, 3.0, -1.5, name="b")]


def gradients(seed, count):
    """Of both variables, in `count` micro-batches: all different."""
    rng = np.random.default_rng(seed)
    return [
        [rng.normal(1.0 + i, 1.0, size).astype("float32") for size in (2, 3)]
        for i in range(count)
    ]


def constants(micro_batch):
    return [None if g is None else tf.constant(g, "float32") for g in micro_batch]


def plain_steps(*steps, make=inner):
    """The plain optimizer on lists of gradients, None among them left out."""
    variables, optimizer = two_variables(), make()
    optimizer.build(variables)
    for grads in steps:
        pairs = [(g, v) for g, v in zip(constants(grads), variables) if g is not None]
        optimizer.apply_gradients(pairs)
    return variables, optimizer


WEIGHTS = [2.0, 5.0, 1.0, 3.0]


@pytest.mark.slow_in("first-eager", "last-graph", "middle-graph")
@without_xla
@pytest.mark.parametrize(
    ("missing", "of"), [(0, 0), (1, 1), (3, 0)], ids=["first", "middle", "last"]
)
def test_a_gradient_that_is_none_keeps_what_has_accumulated(mode, missing, of):
    variables = two_variables()
    optimizer = ka.AccumOptimizer(inner(), 4)
    optimizer.build(variables)
    apply = in_mode(lambda g, w: optimizer.apply(g, variables, w), mode)
    windows, means, controls = [gradients(s, 4) for s in (1, 2)], [], []
    for window in windows:
        zeroed = [list(micro_batch) for micro_batch in window]
        zeroed[missing][of] = np.zeros_like(zeroed[missing][of])
        means.append(reference.weighted_mean(zeroed, WEIGHTS))
        lost = [list(micro_batch) for micro_batch in zeroed]
        for micro_batch in lost[:missing]:
            micro_batch[of] = np.zeros_like(micro_batch[of])
        window[missing][of] = None
        controls.append(reference.weighted_mean(lost, WEIGHTS))
        for micro_batch, weight in zip(window, WEIGHTS, strict=True):
            apply(constants(micro_batch), tf.constant(weight))
    oracle, plain = plain_steps(*means)
    assert_close(variables, oracle)
    assert_close(slots(optimizer), slots(plain))
    # The sum is divided by the weight of the whole window, and starts at its beginning.
    if missing:
        assert_differ(variables, plain_steps(*controls)[0])
    if mode == "graph":
        assert apply.experimental_get_tracing_count() == 2


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_kerass_own_accumulation_throws_away_what_stands_before_a_none():
    variables = two_variables()
    optimizer = keras.optimizers.SGD(0.5, gradient_accumulation_steps=2)
    optimizer.apply([tf.ones(2), tf.ones(3)], variables)
    optimizer.apply([tf.ones(2), None], variables)
    assert_equal([variables[1]], [two_variables()[1]])
    assert_differ([variables[0]], [two_variables()[0]])


@pytest.mark.slow_in("eager")
@without_xla
def test_a_gradient_that_is_always_none_leaves_the_variable_alone(mode):
    variables = two_variables()
    optimizer = ka.AccumOptimizer(inner(), 2)
    optimizer.build(variables)
    apply = in_mode(lambda g: optimizer.apply(g, variables), mode)
    (full, more), (half, rest) = gradients(1, 2), gradients(2, 2)
    for micro_batch in (full, more, [None, half[1]], [None, rest[1]]):
        apply(constants(micro_batch))
    mean = reference.weighted_mean
    second = [None, *mean([half[1:], rest[1:]], [1, 1])]
    oracle, plain = plain_steps(mean([full, more], [1, 1]), second)
    # Without decay, without momentum: as Keras treats None.
    assert_close(variables, oracle)
    assert_close(slots(optimizer), slots(plain))
    zeroed, _ = plain_steps(mean([full, more], [1, 1]), [np.zeros(2), second[1]])
    assert_differ([variables[0]], [zeroed[0]])


def three_variables():
    return [*two_variables(), variable(4.0, 5.0, name="c")]


def test_a_variable_never_reached_is_left_alone_while_others_alternate(mode="eager"):
    a, b, c = three_variables()
    optimizer = ka.AccumOptimizer(inner(), 2)
    optimizer.build([a, b, c])
    apply = in_mode(lambda g: optimizer.apply(g, [a, b, c]), mode)
    apply([tf.constant([1.0, 2.0]), None, None])
    apply([None, tf.constant([1.0, 2.0, 3.0]), None])
    oracle, _ = plain_steps([[0.5, 1.0], [0.5, 1.0, 1.5]])
    assert_close([a, b], oracle)
    assert_equal([c], [three_variables()[2]])


def test_a_flush_leaves_alone_what_the_window_has_not_reached(mode="eager"):
    a, b, c = three_variables()
    optimizer = ka.AccumOptimizer(inner(), 4)
    optimizer.build([a, b, c])
    optimizer.apply([tf.constant([1.0, 2.0]), None, None], [a, b, c])
    in_mode(optimizer.flush, mode)()
    oracle, _ = plain_steps([[1.0, 2.0], None])
    assert_close([a, b], oracle)
    assert_equal([c], [three_variables()[2]])


@since_keras("3.15", "MultiOptimizer")
@without_xla
def test_a_multi_optimizer_takes_gradients_that_are_none(mode):
    def make(a):
        slow, fast = keras.optimizers.SGD(0.1), keras.optimizers.SGD(1.0)
        return keras.optimizers.MultiOptimizer(lambda v: slow if v is a else fast)

    a, b, c = three_variables()
    optimizer = ka.AccumOptimizer(make(a), 2)
    optimizer.build([a, b, c])
    apply = in_mode(lambda g: optimizer.apply(g, [a, b, c]), mode)
    with pytest.warns(UserWarning, match="Gradients do not exist"):  # as Keras does
        for scale in (1.0, 3.0):
            apply([tf.constant([scale, scale]), None, tf.constant([scale, scale])])
    assert_close([a, c], [np.array([0.8, -2.2]), np.array([2.0, 3.0])])
    assert_equal([b], [three_variables()[1]])


@pytest.mark.slow_in("eager")
@pytest.mark.slow_in("xla")
def test_two_players_alternate_within_a_window(mode):
    """As a GAN trains: each call brings the gradients of one of the two."""
    (a, b), optimizer = two_variables(), ka.AccumOptimizer(inner(), 4)
    optimizer.build([a, b])
    players = [
        in_mode(lambda g, w: optimizer.apply([g], [a], w), mode),
        in_mode(lambda g, w: optimizer.apply([g], [b], w), mode),
    ]
    means = []
    for seed in (1, 2):
        window = gradients(seed, 4)
        for i, weight in enumerate(WEIGHTS):
            window[i][1 - i % 2] *= 0
            players[i % 2](tf.constant(window[i][i % 2]), tf.constant(weight))
        means.append(reference.weighted_mean(window, WEIGHTS))
    oracle, plain = plain_steps(*means)
    assert_close([a, b], oracle)
    assert_close(slots(optimizer), slots(plain))
    assert int(optimizer.iterations) == 2
    only_the_last = [[m * i for i, m in enumerate(mean)] for mean in means]
    assert_differ([a, b], plain_steps(*only_the_last)[0])
    if mode != "eager":
        assert [p.experimental_get_tracing_count() for p in players] == [1, 1]


def test_variables_may_come_in_another_order_than_they_were_built_in():
    (a, b), optimizer = two_variables(), ka.AccumOptimizer(inner(), 2)
    optimizer.build([a, b])
    first, second = gradients(1, 2)
    optimizer.apply(constants(first[::-1]), [b, a])
    optimizer.apply(constants(second))
    oracle, plain = plain_steps(reference.weighted_mean([first, second], [1, 1]))
    assert_close([a, b], oracle)
    assert_close(slots(optimizer), slots(plain))


# --- variables that are overwritten with their gradient


def overwritten(*values):
    scale = variable(*values, name="scale")
    scale.overwrite_with_gradient = True
    return scale


@pytest.mark.slow_in("eager-positive", "graph-negative")
@pytest.mark.slow_in("xla")
@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["positive", "negative"])
def test_a_variable_to_be_overwritten_becomes_the_largest_value(mode, sign):
    weight, scale = variable(1.0), overwritten(0.0, 0.0)
    inner = keras.optimizers.SGD(1.0, global_clipnorm=0.1, weight_decay=0.5)
    optimizer = ka.AccumOptimizer(keras.optimizers.LossScaleOptimizer(inner), 3)
    optimizer.build([weight, scale])
    apply = in_mode(lambda g, w: optimizer.apply(g, [weight, scale], w), mode)
    windows = [[[3.0, 2.0], [7.0, 1.0], [5.0, 9.0]], [[0.5, 0.1], [0.2, 0.3], [0.4, 0.2]]]
    for values in windows:
        for value, share in zip(values, [4.0, 1.0, 2.0], strict=True):
            slope = tf.constant([2.0**15])
            apply([slope, tf.constant(value) * sign], tf.constant(share))
        # Not unscaled, weighted, clipped, decayed or divided; and not the last, or the
        # largest of the window before, or a zero that the window began with.
        assert_equal([scale], [(sign * np.array(values, "float32")).max(axis=0)])
        # The norm is the gradient's alone.
        assert_close([optimizer.last_gradient_norm], [1.0])


@pytest.mark.slow_in("eager")
@without_xla
def test_a_variable_to_be_overwritten_that_was_not_reached_keeps_its_value(mode):
    a, b, scale = *two_variables(), overwritten(5.0)
    optimizer = ka.AccumOptimizer("sgd", 2)
    optimizer.build([a, b, scale])
    apply = in_mode(lambda g: optimizer.apply(g, [a, b, scale]), mode)
    apply([tf.constant([1.0, 2.0]), None, None])
    apply([None, tf.constant([1.0, 2.0, 3.0]), None])
    assert_equal([scale], [np.array([5.0])])
    apply([None, tf.constant([1.0, 2.0, 3.0]), tf.constant([-7.0])])
    apply([tf.constant([1.0, 2.0]), None, None])
    assert_equal([scale], [np.array([-7.0])])


@without_xla
def test_a_nan_of_weight_zero_does_not_overwrite(mode):
    weight, scale = variable(1.0), overwritten(5.0)
    optimizer = ka.AccumOptimizer("sgd", 2)
    optimizer.build([weight, scale])
    apply = in_mode(lambda g, w: optimizer.apply(g, [weight, scale], w), mode)
    apply([tf.constant([np.nan]), tf.constant([np.nan])], tf.constant(0.0))
    apply([tf.constant([1.0]), tf.constant([2.0])], tf.constant(3.0))
    assert_equal([scale], [np.array([2.0])])


@pytest.mark.slow_in("eager")
@without_xla
def test_a_value_of_weight_zero_is_none_of_the_window(mode):
    """Nor is the zero that the window began with, which is larger than -7."""

    def overwrite(weights):
        weight, scale = variable(1.0), overwritten(5.0)
        optimizer = ka.AccumOptimizer("sgd", 2)
        optimizer.build([weight, scale])
        apply = in_mode(lambda g, w: optimizer.apply(g, [weight, scale], w), mode)
        for value, share in zip([-3.0, -7.0], weights, strict=True):
            apply([tf.constant([1.0]), tf.constant([value])], tf.constant(share))
        return scale.numpy()

    assert_equal(overwrite([0.0, 2.0]), [-7.0])
    assert_equal(overwrite([1.0, 2.0]), [-3.0])


def test_adaptive_clipping_leaves_a_variable_to_be_overwritten_alone():
    weight, scale = variable(1.0), overwritten(5.0)
    optimizer = ka.AccumOptimizer("sgd", 2, adaptive_clip_factor=0.01)
    for value in (3.0, 2.0):
        optimizer.apply([tf.constant([10.0]), tf.constant([value])], [weight, scale])
    assert_equal([scale], [np.array([3.0])])
    assert_close([weight], [np.array([1.0 - 0.01 * 0.01])])
    assert_close([optimizer.last_gradient_norm], [10.0])


@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have")
def test_a_float8_layer_keeps_the_largest_scales_of_the_window():
    def quantized():
        model = dense_model(features=16, outputs=16)
        model.quantize("float8")
        return model

    x, y = data(10, features=16, outputs=16)
    model = compile_in(quantized(), "graph", ka.AccumOptimizer("sgd", 2))
    model.fit(Batches([6, 4], x, y), shuffle=False, verbose=0)

    other = quantized()
    variables = other.trainable_variables

    @tf.function(autograph=False)  # Keras's float8 layers have no gradient in eager mode
    def gradients_of(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - other(x, training=True)))
        return tape.gradient(loss, variables)

    scales = [i for i, v in enumerate(variables) if v.overwrite_with_gradient]
    assert len(scales) == 12
    first, second = (
        [gradients_of(x[rows], y[rows])[i].numpy() for i in scales]
        for rows in (slice(0, 6), slice(6, 10))
    )
    largest = [np.maximum(f, s) for f, s in zip(first, second, strict=True)]
    assert_close([model.trainable_variables[i] for i in scales], largest)
    assert_differ(first, largest)
    assert_differ(second, largest)


# --- weights


@pytest.mark.slow_in("eager")
@pytest.mark.slow_in("xla")
def test_uneven_weights_give_the_weighted_mean(mode):
    variables, optimizer = two_variables(), ka.AccumOptimizer(inner(), 4)
    optimizer.build(variables)
    apply = in_mode(lambda g, w: optimizer.apply(g, variables, w), mode)
    means, controls = [], []
    # The unit that a window counts in is its first weight, so it differs too.
    for seed, weights in [(1, WEIGHTS), (2, [0.001, 1000.0, 0.0, 2.0])]:
        window = gradients(seed, 4)
        for micro_batch, weight in zip(window, weights, strict=True):
            apply(constants(micro_batch), tf.constant(weight))
        means.append(reference.weighted_mean(window, weights))
        controls.append(reference.weighted_mean(window, [1.0] * 4))
    oracle, plain = plain_steps(*means)
    assert_close(variables, oracle)
    assert_close(slots(optimizer), slots(plain))
    assert_differ(variables, plain_steps(*controls)[0])


@without_xla
def test_in_a_window_of_one_the_weight_does_not_touch_a_bit(mode):
    """A window counts in units of its first weight, and forgets the one before."""
    w = keras.Variable(np.zeros(50, "float32"))
    optimizer = ka.AccumOptimizer(keras.optimizers.SGD(1.0), 1)
    optimizer.build([w])
    apply = in_mode(lambda g, share: optimizer.apply([g], [w], share), mode)
    values = np.random.default_rng(1).normal(size=(3, 50)).astype("float32")
    for gradient, weight in zip(values, [7.0, 3.0, 0.1], strict=True):
        w.assign(np.zeros(50))
        apply(tf.constant(gradient), tf.constant(weight))
        assert_equal([w], [-gradient])
    share = np.float32(3) / np.float32(7)
    assert (values[1] * share / share != values[1]).any()


def test_a_micro_batch_of_weight_zero_contributes_nothing_even_a_nan(mode):
    variables, optimizer = two_variables(), ka.AccumOptimizer(inner(), 4)
    optimizer.build(variables)
    apply = in_mode(lambda g, w: optimizer.apply(g, variables, w), mode)
    means, controls = [], []
    for seed, zero in enumerate([0, 1, 3]):
        window = gradients(seed, 4)
        weights = [w * (i != zero) for i, w in enumerate(WEIGHTS)]
        controls.append(reference.weighted_mean(window, WEIGHTS))
        means.append(reference.weighted_mean(window, weights))
        window[zero] = [g * np.nan for g in window[zero]]
        for micro_batch, weight in zip(window, weights, strict=True):
            apply(constants(micro_batch), tf.constant(weight))
        oracle, plain = plain_steps(*means)
        assert_close(variables, oracle)
        assert_close(slots(optimizer), slots(plain))
    assert_differ(variables, plain_steps(*controls)[0])


@pytest.mark.slow_in("eager")
@pytest.mark.slow_in("xla")
def test_a_window_of_weight_zero_updates_with_zero(mode):
    """As the large batch does: it decays, its momentum runs on, iterations advance."""
    variables, optimizer = two_variables(), ka.AccumOptimizer(inner(), 2)
    optimizer.build(variables)
    apply = in_mode(lambda g, w: optimizer.apply(g, variables, w), mode)
    first = gradients(1, 2)
    for micro_batch in first:
        apply(constants(micro_batch), tf.constant(1.0))
    for _ in range(2):
        apply([tf.constant([np.nan] * 2), tf.constant([np.inf] * 3)], tf.constant(0.0))
    mean = reference.weighted_mean(first, [1.0, 1.0])
    oracle, plain = plain_steps(mean, [np.zeros(2), np.zeros(3)])
    assert_close(variables, oracle)
    assert_close(slots(optimizer), slots(plain))
    assert_differ(variables, plain_steps(mean)[0])
    assert int(optimizer.iterations) == 2


def test_weight_zero_leaves_a_micro_batch_out_of_a_sum_too():
    a = variable(1.0, 2.0)
    optimizer = ka.AccumOptimizer(keras.optimizers.SGD(1.0), 3, reduction="sum")
    for gradient, weight in [(4.0, 2.0), (np.nan, 0.0), (1.0, 1.0)]:
        optimizer.apply([tf.constant([gradient, gradient])], [a], weight)
    assert_close([a], [np.array([-4.0, -3.0])])


def test_a_weight_may_be_a_python_numpy_or_tensorflow_number():
    a, optimizer = variable(0.0), ka.AccumOptimizer(keras.optimizers.SGD(1.0), 5)
    optimizer.build([a])
    weights = [2, np.float64(5), tf.constant(1, "int64"), keras.Variable(3.0), None]
    for i, weight in enumerate(weights):
        optimizer.apply([tf.constant([float(i)])], [a], weight)
    assert_close(
        [a], [-np.array([(5 * 1 + 1 * 2 + 3 * 3 + 1 * 4) / (2 + 5 + 1 + 3 + 1)])]
    )


def refused(optimizer, variables, function, message, error=ValueError):
    """Raise unless `function()` is refused word for word, and nothing has changed."""
    held, weights = state(optimizer), [v.numpy() for v in variables]
    built = optimizer.built
    assert_refused(function, error, message)
    assert optimizer.built == built
    assert_equal(state(optimizer), held, "state")
    assert_equal(variables, weights, "weights")


def in_mid_window(accum_steps=4):
    variables, optimizer = two_variables(), ka.AccumOptimizer(inner(), accum_steps)
    for micro_batch in gradients(1, 2):
        optimizer.apply(constants(micro_batch), variables)
    return variables, optimizer


NEGATIVE = "`weight` must be a finite number of at least 0. Received: "


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (-1.0, NEGATIVE + "-1.0"),
        (float("nan"), NEGATIVE + "nan"),
        (
            [1.0, 2.0, 3.0],
            "`weight` must be a scalar, the denominator of the micro-batch's mean loss. "
            "Received a tensor of shape (3,): pass its sum.",
        ),
    ],
    ids=["negative", "nan", "vector"],
)
def test_a_weight_that_cannot_be_one_is_refused(weight, message):
    variables, optimizer = in_mid_window()
    grads = constants(gradients(2, 1)[0])
    refused(
        optimizer, variables, lambda: optimizer.apply(grads, variables, weight), message
    )
    # In a graph too, where the number is known when tracing.
    traced = in_mode(lambda: optimizer.apply(grads, variables, weight), "graph")
    refused(optimizer, variables, traced, message)


def test_a_refused_weight_leaves_an_optimizer_unbuilt():
    variables, optimizer = two_variables(), ka.AccumOptimizer(inner(), 2)
    grads = constants(gradients(2, 1)[0])
    refused(
        optimizer,
        variables,
        lambda: optimizer.apply(grads, variables, -1.0),
        NEGATIVE + "-1.0",
    )


# --- gradients that do not fit


def test_a_variable_that_comes_twice_is_refused():
    weight = variable(1.0, 2.0, name="weight")
    optimizer = ka.AccumOptimizer(keras.optimizers.SGD(0.1), 2)
    optimizer.build([weight])
    grads = [tf.constant([1.0, 1.0])] * 2
    refused(
        optimizer,
        [weight],
        lambda: optimizer.apply(grads, [weight, weight]),
        "Received the variable 'weight' twice. Add its gradients up, and pass it once.",
    )


ALL_NONE = (
    "No gradients provided for any variable. Every gradient received is None: the loss "
    "does not depend on the variables, or was computed outside of the `tf.GradientTape`."
)


def test_gradients_of_another_number_are_refused():
    variables, optimizer = in_mid_window()
    for grads in (constants(gradients(2, 1)[0])[:1], [tf.zeros(2)] * 3):
        message = (
            f"Received {len(grads)} gradients for 2 variables. There must be one "
            "gradient, or None, for each variable, in the same order: "
            "`optimizer.apply(tape.gradient(loss, variables), variables)`."
        )
        refused(optimizer, variables, lambda g=grads: optimizer.apply(g), message)
        refused(
            optimizer, variables, lambda g=grads: optimizer.apply(g, variables), message
        )


def test_a_gradient_of_another_shape_is_refused():
    variables, optimizer = in_mid_window()
    a, b = constants(gradients(2, 1)[0])
    message = (
        "Received a gradient of shape (3,) for the variable 'a' of shape (2,). Shapes "
        "must be equal: pass gradients in the order of their variables."
    )
    refused(optimizer, variables, lambda: optimizer.apply([b, a], variables), message)
    traced = in_mode(lambda: optimizer.apply([b, a], variables), "graph")
    refused(optimizer, variables, traced, message)
    rows = tf.IndexedSlices(tf.zeros((1, 3)), tf.constant([0]), tf.constant([2, 3]))
    refused(
        optimizer,
        variables,
        lambda: optimizer.apply([rows, b], variables),
        "Received a gradient of shape (2, 3) for the variable 'a' of shape (2,). Shapes "
        "must be equal: pass gradients in the order of their variables.",
    )


def test_gradients_that_are_all_none_are_refused():
    variables, optimizer = in_mid_window()
    refused(
        optimizer, variables, lambda: optimizer.apply([None, None], variables), ALL_NONE
    )
    new = ka.AccumOptimizer(inner(), 2)
    refused(new, variables, lambda: new.apply([None, None], variables), ALL_NONE)


def test_a_variable_that_was_not_there_is_refused():
    variables, optimizer = in_mid_window()
    late = variable(1.0, name="late")
    refused(
        optimizer,
        [*variables, late],
        lambda: optimizer.apply([tf.ones(2), tf.ones(1)], [variables[0], late]),
        UNKNOWN.format("late"),
    )


UNKNOWN = (
    "Received a gradient for '{}', which was not among the variables that this "
    "optimizer was built with (a layer that was frozen then, perhaps). After a change of "
    "`trainable`, compile the model with a new optimizer: `model.compile(optimizer="
    "AccumOptimizer.from_config(model.optimizer.get_config()), ...)`."
)


def test_gradients_without_variables_need_a_built_optimizer():
    variables, optimizer = two_variables(), ka.AccumOptimizer(inner(), 2)
    refused(
        optimizer,
        variables,
        lambda: optimizer.apply(constants(gradients(1, 1)[0])),
        "Received gradients without variables, and the optimizer is not built yet. Pass "
        "the variables too, or call `optimizer.build(variables)` before.",
    )
    optimizer.build(variables)
    for micro_batch in gradients(1, 2):
        optimizer.apply(constants(micro_batch))
    mean = reference.weighted_mean(gradients(1, 2), [1.0, 1.0])
    assert_close(variables, plain_steps(mean)[0])


def test_an_empty_list_of_gradients_is_no_micro_step():
    variables, optimizer = in_mid_window()
    held = state(optimizer)
    optimizer.apply([], [])
    assert_equal(state(optimizer), held)
    optimizer.apply(constants(gradients(2, 1)[0]), variables)
    assert int(optimizer.micro_step) == 3


def test_unfreezing_a_layer_asks_for_the_new_optimizer_that_then_works():
    x, y = data(12)
    model = dense_model()
    model.layers[1].trainable = False
    model.compile(ka.AccumOptimizer(keras.optimizers.SGD(0.1), 3), "mse")
    frozen = model.layers[1].get_weights()
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    assert_equal(model.layers[1].get_weights(), frozen)

    model.layers[1].trainable = True
    model.compile(model.optimizer, "mse")
    held, weights = state(model.optimizer), model.get_weights()
    with pytest.raises(ValueError) as caught:
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    assert str(caught.value).endswith(UNKNOWN.format(model.layers[1].kernel.path))
    assert_equal(state(model.optimizer), held)
    assert_equal(model.get_weights(), weights)

    oracle = keras.models.clone_model(model)
    oracle.set_weights(weights)
    oracle.compile(keras.optimizers.SGD(0.1), "mse")
    oracle.train_on_batch(x, y)
    # What the message says to write.
    config = model.optimizer.get_config()
    model.compile(optimizer=ka.AccumOptimizer.from_config(config), loss="mse")
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    assert_close(model.get_weights(), oracle.get_weights())
    assert_differ(model.layers[1].get_weights(), frozen)


def test_autograph_has_nothing_to_warn_of_in_a_custom_loop(caplog):
    variables, optimizer = two_variables(), ka.AccumOptimizer(inner(), lambda update: 2)
    optimizer.build(variables)

    @tf.function
    def step(a, b):
        optimizer.scale_loss(tf.reduce_sum(a))
        optimizer.apply([a, b], variables)
        optimizer.apply_gradients(zip([a, None], variables))
        optimizer.flush()
        optimizer.reset()

    step(*constants(gradients(1, 1)[0]))
    assert "AutoGraph could not transform" not in caplog.text

    @tf.function
    def unconvertible(a):
        return (b := a) + b

    unconvertible(tf.constant(1.0))
    assert "AutoGraph could not transform" in caplog.text


@pytest.mark.parametrize("shape", [(1,), (7,), (13,), (16,), (5, 7), (8, 3, 3)])
def test_the_norm_counts_every_number_of_tensors_of_any_size(shape, mode):
    rng = np.random.default_rng(3)
    values = [rng.normal(size=shape).astype("float32"), np.array([2.0], "float32")]
    expected = np.sqrt(sum((v.astype("float64") ** 2).sum() for v in values))
    norm = in_mode(lambda *tensors: global_norm(tensors), mode)
    assert_close(norm(*map(tf.constant, values)), np.float32(expected))
    # The control: the last number counts.
    values[0].flat[-1] += 5.0
    assert_differ(norm(*map(tf.constant, values)), np.float32(expected))
