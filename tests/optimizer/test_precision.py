"""Loss scaling, and the number formats that a window is summed in."""

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
    slots,
    state,
    variable,
)
from keras.optimizers import LossScaleOptimizer

import keras_accum as ka

SIZES = [4, 2, 3]

# --- Four ways to a scaled loss. It is so small that its gradients vanish in float16
# where it is not scaled (TensorFlow#47884).

TINY = 1e-8


def tiny_loss(y, prediction):
    return TINY * tf.reduce_mean(tf.square(y - prediction), axis=-1)


def sgd():
    return keras.optimizers.SGD(0.05 / TINY, momentum=0.5)


class Block(keras.layers.Layer):
    """A layer that holds others: only what it holds says float16."""

    def __init__(self, held):
        super().__init__()
        self.held = held

    def call(self, inputs):
        return self.held(inputs)


def nested_model():
    keras.utils.set_random_seed(1)
    inputs = keras.Input((5,))
    hidden = keras.layers.Dense(8, "tanh", dtype="mixed_float16")
    hidden = Block(Block(hidden))(inputs)
    return keras.Model(inputs, keras.layers.Dense(3)(hidden))


def global_policy():
    keras.config.set_dtype_policy("mixed_float16")
    return dense_model(), ka.AccumOptimizer(sgd(), 3)


def own_policy():
    return dense_model(dtype="mixed_float16"), ka.AccumOptimizer(sgd(), 3)


def nested_policy():
    return nested_model(), ka.AccumOptimizer(sgd(), 3)


def scaler_inside():
    model = dense_model(dtype="mixed_float16")
    return model, ka.AccumOptimizer(LossScaleOptimizer(sgd()), 3)


def train(model, optimizer, sizes, mode="graph", loss=tiny_loss, x=None, y=None):
    if x is None:
        x, y = data(2 * sum(SIZES))
    # Keras would add a scaler to a plain optimizer of its own accord.
    ours = isinstance(optimizer, ka.AccumOptimizer)
    compile_in(model, mode, optimizer, loss, auto_scale_loss=ours)
    model.fit(Batches(sizes, x, y), shuffle=False, verbose=0)
    return model


@pytest.mark.slow_but("global_policy-eager")
@pytest.mark.slow_in("xla")
@pytest.mark.parametrize(
    ("way", "mode"),
    [
        (global_policy, "eager"),
        (global_policy, "graph"),
        (global_policy, "xla"),
        (own_policy, "eager"),
        (own_policy, "graph"),
        (nested_policy, "eager"),
        (nested_policy, "graph"),
        (scaler_inside, "graph"),
    ],
)
def test_a_loss_that_vanishes_in_float16_trains_as_the_large_batch(way, mode):
    model, optimizer = way()
    train(model, optimizer, SIZES * 2, mode)
    assert int(optimizer.iterations) == 2
    assert float(optimizer.dynamic_scale) == 2.0**15

    copy, _ = way()
    start = copy.get_weights()
    oracle = train(copy, LossScaleOptimizer(sgd()), [sum(SIZES)] * 2)
    # The scaled gradients are around 1e-5, where float16 has steps of 6e-8.
    assert_close(model.get_weights(), oracle.get_weights(), rtol=2e-2)
    assert_differ(model.get_weights(), start, by=0.1)

    copy, _ = way()
    control = train(copy, sgd(), [sum(SIZES)] * 2)
    assert_equal(control.get_weights()[:2], start[:2], "not scaled")


def test_compile_does_not_put_a_scaler_around():
    keras.config.set_dtype_policy("mixed_float16")
    model, optimizer = dense_model(), ka.AccumOptimizer("sgd", 2)
    model.compile(optimizer, "mse")
    assert model.optimizer is optimizer
    assert type(optimizer.inner_optimizer) is keras.optimizers.SGD
    plain = dense_model()
    plain.compile("sgd", "mse")
    assert type(plain.optimizer) is LossScaleOptimizer


def test_a_train_step_of_ones_own_scales_for_a_float16_layer_too():
    class Model(keras.Model):
        def train_step(self, batch):
            x, y = batch
            with tf.GradientTape() as tape:
                prediction = tf.cast(self(x, training=True), "float32")
                loss = tf.reduce_mean(tiny_loss(y, prediction))
                loss = self.optimizer.scale_loss(loss)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    layers = dense_model(dtype="mixed_float16")
    start = layers.get_weights()
    train(Model(layers.inputs, layers.outputs), ka.AccumOptimizer(sgd(), 3), SIZES)
    assert_differ(layers.get_weights(), start, by=0.01)


def test_the_settings_of_the_scaler_inside_are_taken_over():
    scaler = LossScaleOptimizer(keras.optimizers.SGD(), 64.0, 3)
    optimizer = ka.AccumOptimizer(scaler, 2)
    assert type(optimizer.inner_optimizer) is keras.optimizers.SGD
    assert float(optimizer.dynamic_scale) == optimizer.initial_scale == 64.0
    assert optimizer.dynamic_growth_steps == 3
    # By the scale, and by the share that a loss has of its window.
    assert float(optimizer.scale_loss(tf.constant(3.0))) == 192.0 / 2
    copy = ka.AccumOptimizer.from_config(optimizer.get_config())
    assert float(copy.scale_loss(tf.constant(3.0))) == 192.0 / 2
    assert copy.dynamic_growth_steps == 3
    default = ka.AccumOptimizer(LossScaleOptimizer(keras.optimizers.SGD()), 2)
    assert (default.initial_scale, default.dynamic_growth_steps) == (2.0**15, 2000)


def test_a_scaler_outside_is_refused():
    optimizer = ka.AccumOptimizer("sgd", 2)
    assert_refused(
        lambda: LossScaleOptimizer(optimizer),
        ValueError,
        "Another optimizer was put around AccumOptimizer. A "
        "LossScaleOptimizer there would drop single micro-batches from a window, and "
        "count its growth in micro-steps. Write "
        "`AccumOptimizer(LossScaleOptimizer(inner), accum_steps=...)`, or leave it out: "
        "under mixed_float16 AccumOptimizer scales the loss by itself.",
    )


def test_two_scalers_inside_are_refused():
    scalers = LossScaleOptimizer(LossScaleOptimizer(keras.optimizers.SGD()))
    assert_refused(
        lambda: ka.AccumOptimizer(scalers, 2),
        ValueError,
        "Received a LossScaleOptimizer inside of another wrapper. One wrapper "
        "accumulates and scales the loss: pass the innermost optimizer to it, "
        "`AccumOptimizer(inner, accum_steps=...)`.",
    )


# --- the same scale for all of a window, and one decision at its end


def inner():
    """All that must stand still when a window is skipped: slots, decay, schedule, EMA."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    return keras.optimizers.SGD(
        schedule, momentum=0.9, weight_decay=0.1, use_ema=True, ema_momentum=0.5
    )


def two_variables(dtype="float32"):
    return [variable(1.0, -2.0, dtype=dtype), variable(0.5, 3.0, -1.5, dtype=dtype)]


WEIGHTS = [2.0, 5.0, 1.0, 3.0]


def gradients(seed, count=4):
    """Of both variables, in `count` micro-batches: all different."""
    rng = np.random.default_rng(seed)
    return [
        [rng.normal(1.0 + i, 1.0, size).astype("float32") for size in (2, 3)]
        for i in range(count)
    ]


def constants(micro_batch, scale=1.0):
    return [tf.constant(g * scale, "float32") for g in micro_batch]


FIRST, MIDDLE, LAST = 0, 1, 3
SCRIPT = [(), (), (FIRST,), (), (MIDDLE,), (LAST,), (), (FIRST, LAST), (), (), ()]


@pytest.mark.slow_in("eager")
@pytest.mark.slow_in("xla")
def test_scale_growth_and_iterations_follow_the_large_batch(mode):
    variables, plain_variables = two_variables(), two_variables()
    optimizer = ka.AccumOptimizer(LossScaleOptimizer(inner(), 8.0, 2), 4)
    plain = LossScaleOptimizer(inner(), 8.0, 2)
    optimizer.build(variables)
    plain.build(plain_variables)
    apply = in_mode(lambda g, w: optimizer.apply(g, variables, w), mode)
    scales = []
    for seed, overflows in enumerate(SCRIPT):
        window, scale = gradients(seed), float(optimizer.dynamic_scale)
        held = [v.numpy() for v in variables], slots(optimizer)
        for i, (micro_batch, weight) in enumerate(zip(window, WEIGHTS, strict=True)):
            assert float(optimizer.dynamic_scale) == scale, "changed within a window"
            scaled = [g * scale for g in micro_batch]
            if i in overflows:
                scaled[1][2] = np.inf
            apply(constants(scaled), tf.constant(weight))
        mean = reference.weighted_mean(window, WEIGHTS)
        if overflows:
            mean[1][2] = np.inf
        plain.apply(constants(mean, float(plain.dynamic_scale)), plain_variables)

        assert float(optimizer.dynamic_scale) == float(plain.dynamic_scale)
        assert int(optimizer.step_counter) == int(plain.step_counter)
        assert int(optimizer.iterations) == int(plain.iterations)
        assert int(optimizer.micro_step) == 0
        scales.append(float(optimizer.dynamic_scale))
        if overflows:
            assert_equal(variables, held[0], "weights")
            assert_equal(slots(optimizer), held[1], "slots")
        else:
            assert_differ(variables, held[0])
        assert_close(variables, plain_variables, what="weights")
        assert_close(slots(optimizer), slots(plain.inner_optimizer), what="slots")
        rates = optimizer.learning_rate, plain.learning_rate
        assert float(rates[0]) == float(rates[1])
    # Doubled after two updates, halved once by each window with an overflow.
    assert scales == [8, 16, 8, 8, 4, 2, 2, 1, 1, 2, 2]
    assert int(optimizer.skipped_windows) == 4


def test_fit_skips_a_window_with_an_overflow_as_the_large_batch():
    """The overflow comes out of the layers: 1e6 is beyond float16."""
    x, y = data(4 * sum(SIZES))
    x[sum(SIZES) + 5, 2] = 1e6
    model = dense_model(dtype="mixed_float16")
    optimizer = ka.AccumOptimizer(keras.optimizers.SGD(0.1, momentum=0.5), 3)
    train(model, optimizer, SIZES * 4, "graph", "mse", x, y)

    scaler = LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.5))
    oracle = dense_model(dtype="mixed_float16")
    train(oracle, scaler, [sum(SIZES)] * 4, "graph", "mse", x, y)
    assert int(optimizer.iterations) == int(scaler.iterations) == 3
    assert int(optimizer.step_counter) == int(scaler.step_counter) == 2
    assert float(optimizer.dynamic_scale) == float(scaler.dynamic_scale) == 2.0**14
    assert int(optimizer.skipped_windows) == 1
    # Each gradient is rounded to float16, 5e-4 of it: once for the large batch, three
    # times here.
    assert_close(model.get_weights(), oracle.get_weights(), rtol=1e-3)
    x[sum(SIZES) + 5, 2] = 1.0
    control = dense_model(dtype="mixed_float16")
    train(control, LossScaleOptimizer(sgd()), [sum(SIZES)] * 4, "graph", "mse", x, y)
    assert_differ(model.get_weights(), control.get_weights())


@pytest.mark.slow_in("graph")
@pytest.mark.slow_in("xla")
def test_in_float32_a_scaler_inside_changes_nothing_but_the_overflow(mode):
    model = dense_model()
    optimizer = ka.AccumOptimizer(LossScaleOptimizer(inner()), 3)
    train(model, optimizer, SIZES * 2, mode, "mse")
    oracle = dense_model()
    train(oracle, LossScaleOptimizer(inner()), [sum(SIZES)] * 2, "graph", "mse")
    assert_close(model.get_weights(), oracle.get_weights())
    plain_slots = slots(oracle.optimizer.inner_optimizer)
    assert_close(slots(optimizer), plain_slots, rtol=1e-5)
    control = train(dense_model(), LossScaleOptimizer(inner()), SIZES * 2, loss="mse")
    assert_differ(model.get_weights(), control.get_weights())


def test_an_overflow_skips_the_window_by_name_too():
    variables = two_variables()
    scaler = LossScaleOptimizer(inner(), 8.0)
    optimizer = ka.AccumOptimizer(scaler, 4, on_nonfinite="skip_window")
    for i, micro_batch in enumerate(gradients(1)):
        bad = [g * (np.nan if i == MIDDLE else 1.0) for g in micro_batch]
        optimizer.apply(constants(bad), variables)
    assert_equal(variables, two_variables())
    assert float(optimizer.dynamic_scale) == 4.0
    assert int(optimizer.skipped_windows) == 1
    assert int(optimizer.skipped_micro_batches) == 0


def test_a_sparse_overflow_skips_the_window():
    table = keras.Variable(np.ones((4, 2), "float32"))
    optimizer = ka.AccumOptimizer(LossScaleOptimizer(keras.optimizers.SGD(1.0), 8.0), 2)
    optimizer.build([table])
    apply = in_mode(
        lambda v, i: optimizer.apply(
            [tf.IndexedSlices(v, i, tf.constant([4, 2]))], [table]
        ),
        "graph",
    )
    for value in (np.inf, 2.0):
        apply(tf.constant([[1.0, value]]), tf.constant([1]))
    assert_equal([table], [np.ones((4, 2))])
    assert float(optimizer.dynamic_scale) == 4.0
    for value in (4.0, 6.0):
        apply(tf.constant([[2.0, value]]), tf.constant([1]))
    assert_close([table], [np.array([[1, 1], [0.5, -0.25], [1, 1], [1, 1]])])


def test_a_flush_counts_as_an_update_or_as_an_overflow():
    variables = two_variables()
    optimizer = ka.AccumOptimizer(LossScaleOptimizer(inner(), 8.0, 2), 4)
    seen = []
    for bad in (1.0, 1.0, np.inf):
        micro_batch = gradients(1, 1)[0]
        optimizer.apply(constants(micro_batch, 8.0 * bad), variables)
        optimizer.flush()
        now = optimizer.dynamic_scale, optimizer.step_counter, optimizer.iterations
        seen.append([float(value) for value in now])
    assert seen == [[8, 1, 1], [16, 0, 2], [8, 0, 2]]


def test_a_reset_forgets_an_overflow():
    variables = two_variables()
    optimizer = ka.AccumOptimizer(LossScaleOptimizer(keras.optimizers.SGD(1.0), 8.0), 2)
    first, second = gradients(1, 2)
    optimizer.apply(constants(first, np.inf), variables)
    optimizer.reset()
    for micro_batch in (first, second):
        optimizer.apply(constants(micro_batch, 8.0), variables)
    assert float(optimizer.dynamic_scale) == 8.0
    mean = reference.weighted_mean([first, second], [1.0, 1.0])
    moved = [v.numpy() - m for v, m in zip(two_variables(), mean, strict=True)]
    assert_close(variables, moved)


@pytest.mark.slow_in("own")
@pytest.mark.parametrize("way", ["global", "own"])
def test_a_window_loaded_from_a_file_is_still_known_to_be_scaled(way, tmp_path):
    if way == "global":
        keras.config.set_dtype_policy("mixed_float16")
    model = dense_model(dtype="mixed_float16")
    model.compile(ka.AccumOptimizer(keras.optimizers.SGD(0.1), 4), "mse")
    x, y = data(8)
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    before = model.get_weights()
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    model.optimizer.flush()
    loaded.optimizer.flush()
    assert_differ(model.get_weights(), before)
    assert_close(loaded.get_weights(), model.get_weights())


# --- what a custom loop does


def test_a_loss_scaled_twice_is_refused():
    optimizer = ka.AccumOptimizer(LossScaleOptimizer(keras.optimizers.SGD()), 2)

    def twice(loss):
        return optimizer.scale_loss(optimizer.scale_loss(loss))

    for mode in ("eager", "graph"):
        assert_refused(
            lambda mode=mode: in_mode(twice, mode)(tf.constant(1.0)),
            ValueError,
            "Received a loss that `scale_loss` has scaled already. Scale it once: "
            "`model.fit` calls `scale_loss` itself.",
        )
    # The loss itself may be scaled again, as it is at each step.
    loss = tf.constant(3.0)
    assert float(optimizer.scale_loss(loss)) == float(optimizer.scale_loss(loss))


@pytest.mark.slow_in("xla")
@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_the_scale_is_not_frozen_into_a_graph_traced_before_build(mode):
    w = variable(2.0)
    optimizer = ka.AccumOptimizer(LossScaleOptimizer(keras.optimizers.SGD(0.5)), 1)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x * w)
            scaled = optimizer.scale_loss(loss)
        optimizer.apply(tape.gradient(scaled, [w]), [w])
        return scaled / loss

    step = in_mode(step, mode)
    assert not optimizer.built
    assert float(step(tf.constant([1.0]))) == 2.0**15
    assert_close([w], [np.array([1.5])])
    optimizer.dynamic_scale.assign(2.0**14)
    assert float(step(tf.constant([1.0]))) == 2.0**14
    assert_close([w], [np.array([1.0])])
    # An overflow halves it for the next call too.
    step(tf.constant([np.inf]))
    assert float(step(tf.constant([1.0]))) == 2.0**13
    assert_close([w], [np.array([0.5])])
    # The first call traces twice, as with Keras's: once more after it made variables.
    assert step.experimental_get_tracing_count() == 2


def test_without_float16_the_loss_stays_as_it_is():
    loss = tf.constant(3.0)
    for policy in ("float32", "mixed_bfloat16", "bfloat16"):
        keras.config.set_dtype_policy(policy)
        assert ka.AccumOptimizer("sgd", 2).scale_loss(loss) is loss
    keras.config.set_dtype_policy("mixed_float16")
    assert float(ka.AccumOptimizer("sgd", 2).scale_loss(loss)) == 3 * 2.0**15 / 2


# --- a constant scale, of the inner optimizer


@pytest.mark.slow_in("eager")
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_constant_scale_is_applied_and_undone_once(mode):
    def make():
        return keras.optimizers.SGD(0.1, momentum=0.9, loss_scale_factor=32.0)

    optimizer = ka.AccumOptimizer(make(), 3)
    assert float(optimizer.scale_loss(tf.constant(2.0))) == 64.0
    assert optimizer.loss_scale_factor == 32.0
    model = train(dense_model(), optimizer, SIZES, mode, "mse")
    oracle = dense_model()
    start = oracle.get_weights()
    train(oracle, make(), [sum(SIZES)], "graph", "mse")
    assert_close(model.get_weights(), oracle.get_weights())
    assert_close(slots(optimizer), slots(oracle.optimizer), rtol=1e-5)
    control = train(dense_model(), make(), SIZES, "graph", "mse")
    assert_differ(model.get_weights(), control.get_weights())
    # The norm is that of the gradient as it is without a scale.
    moved = [a - b for a, b in zip(start, oracle.get_weights(), strict=True)]
    norm = np.sqrt(sum((m.astype("float64") ** 2).sum() for m in moved)) / 0.1
    assert_close([optimizer.last_gradient_norm], [norm], rtol=1e-5)
    assert_differ([optimizer.last_gradient_norm], [norm * 32])
    copy = ka.AccumOptimizer.from_config(optimizer.get_config())
    assert float(copy.scale_loss(tf.constant(2.0))) == 64.0


@pytest.mark.parametrize("inside", [False, True], ids=["policy", "scaler"])
def test_beside_a_dynamic_scale_a_constant_one_is_set_aside(inside):
    """As a LossScaleOptimizer does (keras PR#21233): one scaler, not the product."""
    inner = keras.optimizers.SGD(1.0, loss_scale_factor=32.0)
    if inside:
        inner = LossScaleOptimizer(inner)
    else:
        keras.config.set_dtype_policy("mixed_float16")
    w, optimizer = variable(2.0), ka.AccumOptimizer(inner, 2)
    for slope in (1.0, 4.0):
        with tf.GradientTape() as tape:
            scaled = optimizer.scale_loss(tf.reduce_sum(slope * w))
        assert float(scaled) == 2.0**15 * slope * 2.0 / 2
        optimizer.apply(tape.gradient(scaled, [w]), [w])
    assert_close([w], [np.array([-0.5])])
    assert_close([optimizer.last_gradient_norm], [2.5])


# --- clipping comes after unscaling (Pytorch-UNet#468)


@pytest.mark.parametrize(
    "clip", [{"global_clipnorm": 2.0}, {"clipnorm": 2.0}, {"clipvalue": 1.5}]
)
@pytest.mark.parametrize("size", [0.1, 10.0], ids=["small", "large"])
def test_a_scaled_gradient_is_clipped_after_unscaling(clip, size):
    variables, plain_variables, control_variables = (two_variables() for _ in range(3))
    scaler = LossScaleOptimizer(keras.optimizers.SGD(1.0, **clip), 1024.0)
    optimizer = ka.AccumOptimizer(scaler, 4)
    window = [[g * size for g in micro] for micro in gradients(1)]
    for micro_batch, weight in zip(window, WEIGHTS, strict=True):
        optimizer.apply(constants(micro_batch, 1024.0), variables, weight)
    mean = reference.weighted_mean(window, WEIGHTS)
    keras.optimizers.SGD(1.0, **clip).apply(constants(mean), plain_variables)
    assert_close(variables, plain_variables)
    # Clipped as it comes, a gradient would next to vanish when it is unscaled.
    clipper = keras.optimizers.SGD(1.0 / 1024.0, **clip)
    clipper.apply(constants(mean, 1024.0), control_variables)
    assert_differ(variables, control_variables, by=1e-2)


def test_adaptive_clipping_comes_after_unscaling():
    weight = keras.Variable(np.ones((2, 2), "float32"))
    scaler = LossScaleOptimizer(keras.optimizers.SGD(1.0), 1024.0)
    optimizer = ka.AccumOptimizer(scaler, 2, adaptive_clip_factor=0.5)
    gradient = np.array([[3.0, 0.1], [4.0, 0.2]], "float32")
    for share in (0.5, 1.5):
        optimizer.apply([tf.constant(gradient * 1024.0 * share)], [weight])
    clipped = reference.clip_units(gradient, np.ones((2, 2)), 0.5)
    assert_close([weight], [1.0 - clipped])
    assert_differ([clipped], [gradient])


# --- the format of the sum


def sums_of(optimizer):
    """The accumulators, as the optimizer's variables show them."""
    return [v for v in optimizer.variables if v.name.startswith("sum_")]


def test_512_additions_of_one_to_a_bfloat16_variable_are_512():
    w = variable(0.0, dtype="bfloat16")
    sgd = keras.optimizers.SGD(1.0)
    optimizer = ka.AccumOptimizer(sgd, 512, reduction="sum")
    apply = in_mode(lambda g: optimizer.apply([g], [w]), "graph")
    one = tf.ones(1, "bfloat16")
    optimizer.build([w])
    for _ in range(511):
        apply(one)
    assert_equal(sums_of(optimizer), [np.array([511.0])])
    apply(one)
    assert_equal([w.numpy().astype("float32")], [np.array([-512.0])])

    # Keras's accumulator has the variable's dtype, and stops at 256.
    w = variable(0.0, dtype="bfloat16")
    keras_own = keras.optimizers.SGD(1.0, gradient_accumulation_steps=512)
    keras_own.build([w])
    apply = in_mode(lambda g: keras_own.apply([g], [w]), "graph")
    for _ in range(511):
        apply(one)
    total = [v for v in keras_own.variables if "gradient_accumulator" in v.name]
    assert_equal([total[0].numpy().astype("float32")], [np.array([256.0])])


@pytest.mark.parametrize(
    ("dtype", "asked", "expected"),
    [
        ("bfloat16", None, "float32"),
        ("float16", None, "float32"),
        ("float32", None, "float32"),
        ("float64", None, "float64"),
        ("bfloat16", "float64", "float64"),
        ("float32", "float64", "float64"),
    ],
)
def test_the_sums_are_float32_at_least_or_what_is_asked_for(dtype, asked, expected):
    variables = two_variables(dtype)
    optimizer = ka.AccumOptimizer("sgd", 3, accumulator_dtype=asked)
    optimizer.build(variables)
    assert [v.dtype for v in sums_of(optimizer)] == [expected] * 2
    assert optimizer.accumulator_bytes == 5 * (8 if expected == "float64" else 4)


@pytest.mark.parametrize(
    ("dtype", "asked", "large", "left"),
    [
        # What is left of large + 1 + 1 - large: 4 at a step too wide for a 1.
        ("float16", None, 2048.0, 2.0),
        ("bfloat16", None, 256.0, 2.0),
        ("float32", None, 2.0**25, 0.0),
        ("float32", "float64", 2.0**25, 2.0),
        ("float64", None, 2.0**25, 2.0),
        ("float64", "float32", 2.0**25, 0.0),
    ],
)
def test_small_gradients_beside_large_ones_keep_what_the_sum_can_hold(
    dtype, asked, large, left
):
    w = variable(0.0, dtype=dtype)
    sgd = keras.optimizers.SGD(1.0)
    optimizer = ka.AccumOptimizer(sgd, 4, reduction="sum", accumulator_dtype=asked)
    for gradient in (large, 1.0, 1.0, -large):
        optimizer.apply([tf.constant([gradient], dtype)], [w])
    assert_equal([w.numpy().astype("float64")], [np.array([-left])])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_narrower_accumulator_is_refused(dtype):
    assert_refused(
        lambda: ka.AccumOptimizer("sgd", 2, accumulator_dtype=dtype),
        ValueError,
        f"`accumulator_dtype` must be one of 'float32', 'float64'. Received: '{dtype}'",
    )


def test_the_norm_of_a_float16_gradient_does_not_overflow():
    w = variable(1.0, 1.0, dtype="float16")
    optimizer = ka.AccumOptimizer(keras.optimizers.SGD(0.0), 2)
    for gradient in (300.0, 500.0):
        optimizer.apply([tf.constant([gradient, gradient], "float16")], [w])
    assert_close([optimizer.last_gradient_norm], [400.0 * np.sqrt(2.0)])
    assert float(np.finfo("float16").max) < 400.0**2


def test_a_bfloat16_policy_is_accumulated_without_a_scale():
    model = dense_model(dtype="mixed_bfloat16")
    optimizer = ka.AccumOptimizer(keras.optimizers.SGD(0.1), 3)
    train(model, optimizer, SIZES * 2, "graph", "mse")
    assert not optimizer.scales_dynamically
    assert int(optimizer.step_counter) == 0
    oracle = dense_model(dtype="mixed_bfloat16")
    train(oracle, keras.optimizers.SGD(0.1), [sum(SIZES)] * 2, "graph", "mse")
    # bfloat16 rounds to 4e-3, and biases are nothing but steps: 6e-3 was measured.
    assert_close(model.get_weights(), oracle.get_weights(), rtol=1e-2)
    control = dense_model(dtype="mixed_bfloat16")
    train(control, keras.optimizers.SGD(0.1), SIZES * 2, "graph", "mse")
    assert_differ(model.get_weights(), control.get_weights(), by=1e-1)


@pytest.mark.slow_in("eager")
@pytest.mark.slow_in("xla")
def test_float64_variables_are_updated_in_float64(mode):
    variables = two_variables("float64")
    optimizer = ka.AccumOptimizer(keras.optimizers.SGD(1.0), 4)
    optimizer.build(variables)
    apply = in_mode(lambda g: optimizer.apply(g, variables), mode)
    window = [[g.astype("float64") / 3 for g in micro] for micro in gradients(1)]
    for micro_batch in window:
        apply([tf.constant(g) for g in micro_batch])
    mean = reference.weighted_mean(window, [1.0] * 4)
    start = [v.numpy() for v in two_variables("float64")]
    moved = [v - m for v, m in zip(start, mean, strict=True)]
    assert_close(variables, moved, rtol=1e-15)
    rounded = [m.astype("float32").astype("float64") for m in mean]
    assert_differ([v - m for v, m in zip(start, rounded)], moved, by=1e-9)


def test_a_float64_model_equals_the_large_batch():
    model = dense_model(dtype="float64")
    optimizer = ka.AccumOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), 3)
    train(model, optimizer, SIZES * 2, "graph", "mse")
    oracle = dense_model(dtype="float64")
    plain = keras.optimizers.SGD(0.1, momentum=0.9)
    train(oracle, plain, [sum(SIZES)] * 2, "graph", "mse")
    assert model.weights[0].dtype == "float64"
    # Keras takes the loss, and ours the weights, in float32.
    assert_close(model.get_weights(), oracle.get_weights())
    control = train(dense_model(dtype="float64"), plain.__class__(0.1), SIZES, loss="mse")
    assert_differ(model.get_weights(), control.get_weights())


def test_a_refused_option_leaves_the_inner_optimizer_as_it_was():
    inner = keras.optimizers.SGD(0.1, loss_scale_factor=32.0)
    for options in ({"accumulator_dtype": "float16"}, {"on_nonfinite": "no"}):
        with pytest.raises(ValueError):
            ka.AccumOptimizer(inner, 2, **options)
    assert inner.loss_scale_factor == 32.0
    assert_equal(state(inner), state(keras.optimizers.SGD(0.1)))


def test_gradients_in_the_step_overflow_no_sooner_than_those_of_the_large_batch():
    """A mean over 4 of 64 samples is differentiated as a sixteenth of the batch's."""
    keras.config.set_dtype_policy("mixed_float16")
    x, y = data(64)

    def train(split, scale=2.0**14):
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(64, "tanh"), keras.layers.Dense(3)]
        last = keras.layers.Activation("linear", dtype="float32")
        model = keras.Sequential([keras.Input((5,)), *layers, last])
        if split is not None:
            ka.accumulate(model, **split)
        model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=False)
        model.optimizer.build(model.trainable_variables)
        model.optimizer.dynamic_scale.assign(scale)
        for _ in range(8):
            model.train_on_batch(x, y * 30)
        return model

    large, ours = train(None), train({"micro_batch_size": 4})
    assert float(large.optimizer.dynamic_scale) == 2.0**14
    assert float(ours.optimizer.dynamic_scale) == 2.0**14
    assert_close(ours.get_weights(), large.get_weights(), rtol=2e-3)
    # The control: four times the scale is too much; a mean over 4 is 16 times as large.
    assert float(train(None, 2.0**16).optimizer.dynamic_scale) < 2.0**16
