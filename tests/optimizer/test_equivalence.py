"""The promise: a window of micro-batches is one step on the large batch."""

import functools
from itertools import pairwise

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
    compile_in,
    data,
    dense_model,
    fit,
    slots,
)

import keras_accum as ka
from keras_accum._optimizer.arguments import resolve_optimizer

OPTIMIZERS = [
    "adadelta",
    "adafactor",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "ftrl",
    "lamb",
    "lion",
    "muon",
    "nadam",
    "rmsprop",
    "schedulefreeadamw",
    "sgd",
]

# Of an optimizer that divides by its own statistics, or takes a sign, or iterates on the
# gradient (Muon), rounding of the gradient moves the weights by more than rounding.
ADAPTIVE = 2e-5


def train(optimizer, sizes, mode="graph", epochs=3, loss="mse", compile=None, **config):
    """Train on batches of `sizes`, repeated; weights, slots and the model."""
    x, y = data(sum(sizes))
    model = compile_in(dense_model(**config), mode, optimizer, loss, **(compile or {}))
    fit(model, Batches(sizes, x, y), None, None, epochs=epochs)
    return model


def assert_same_training(model, oracle, rtol=1e-6):
    assert_close(model.get_weights(), oracle.get_weights(), rtol, "weights")
    assert_close(slots(model.optimizer), slots(oracle.optimizer), rtol * 10, "slots")
    assert int(model.optimizer.iterations) == int(oracle.optimizer.iterations)


def test_all_optimizers_of_keras_are_in_the_table():
    base = keras.optimizers.Optimizer
    wrappers = {"Optimizer", "LossScaleOptimizer", "MultiOptimizer"}
    shipped = {
        name.lower()
        for name, value in vars(keras.optimizers).items()
        if isinstance(value, type) and issubclass(value, base) and name not in wrappers
    }
    assert shipped == set(OPTIMIZERS)


@pytest.mark.slow_in("eager", *(f"{name}-xla" for name in OPTIMIZERS if name != "adamw"))
@pytest.mark.parametrize("mode", ["graph", "eager", "xla"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_equals_the_large_batch(name, mode):
    model = train(ka.AccumOptimizer(name, 3), [4, 4, 2], mode)
    oracle, naive = train_plainly(name, (10,)), train_plainly(name, (4, 4, 2))
    assert_same_training(model, oracle, 1e-6 if name == "sgd" else ADAPTIVE)
    # Adadelta's first steps are tiny, whatever the gradient.
    assert_differ(naive.get_weights(), oracle.get_weights(), by=1e-5)


@functools.cache
def train_plainly(name, sizes):
    """The same for all modes."""
    return train(resolve_optimizer(name), sizes, "eager")


def test_sgd_with_momentum_equals_numpy(mode):
    check_against_numpy(
        keras.optimizers.SGD(0.1, momentum=0.9),
        lambda v, g, s: reference.sgd(v, g, 0.1, s, momentum=0.9),
        mode,
        rtol=1e-6,
    )


@pytest.mark.slow_in("eager")
@pytest.mark.slow_in("xla")
def test_adam_equals_numpy(mode):
    check_against_numpy(
        keras.optimizers.Adam(0.01),
        lambda v, g, s: reference.adam(v, g, 0.01, s),
        mode,
        rtol=ADAPTIVE,
    )


def check_against_numpy(inner, step, mode, rtol):
    """Two windows of three explicit, weighted gradients."""
    rng = np.random.default_rng(3)
    variables = [keras.Variable(rng.normal(size=(2, 3))), keras.Variable([1.0, -2.0])]
    expected, state = [v.numpy().astype("float64") for v in variables], None
    last, unweighted = expected, expected
    optimizer = ka.AccumOptimizer(inner, 3)
    optimizer.build(variables)

    @tf.function(jit_compile=mode == "xla")
    def compiled(grads, weight):
        optimizer.apply(grads, variables, weight)

    apply = optimizer.apply if mode == "eager" else None
    for _ in range(2):
        window = [
            [rng.normal(size=v.shape).astype("float32") for v in variables] for _ in "abc"
        ]
        weights = [3.0, 0.5, 7.0]
        for grads, weight in zip(window, weights, strict=True):
            grads = [tf.constant(g) for g in grads]
            if apply:
                apply(grads, variables, weight)
            else:
                compiled(grads, tf.constant(weight))
        last, _ = step(expected, window[-1], state)
        unweighted, _ = step(expected, reference.weighted_mean(window, [1, 1, 1]), state)
        expected, state = step(expected, reference.weighted_mean(window, weights), state)
    assert_close(variables, expected, rtol)
    assert_differ(last, expected)
    assert_differ(unweighted, expected)


@pytest.mark.slow_but("graph")
def test_a_window_of_one_is_the_inner_optimizer_to_the_bit(mode):
    inner = {"learning_rate": 0.1, "momentum": 0.9, "global_clipnorm": 0.5}
    sizes = [7, 3, 5]
    model = train(ka.AccumOptimizer(keras.optimizers.SGD(**inner), 1), sizes, mode)
    as_it_is = {"plain_too": True}
    oracle = train(keras.optimizers.SGD(**inner), sizes, mode, compile=as_it_is)
    assert_equal(model.get_weights(), oracle.get_weights())
    assert_equal(slots(model.optimizer), slots(oracle.optimizer))
    assert int(model.optimizer.iterations) == 9


@pytest.mark.slow_but("clip1")
@pytest.mark.parametrize(
    "clip", [{"clipnorm": 0.1}, {"global_clipnorm": 0.2}, {"clipvalue": 0.02}]
)
def test_clipping_acts_once_on_the_mean_of_the_window(clip):
    def clipped(**extra):
        return keras.optimizers.SGD(0.5, **clip, **extra)

    model = train(ka.AccumOptimizer(clipped(), 3), [4, 4, 2])
    assert_same_training(model, train(clipped(), [10]))
    # Clipped, and not the mean of clipped micro-gradients.
    plain = train(keras.optimizers.SGD(0.5), [10])
    assert_differ(plain.get_weights(), model.get_weights())
    x, y = data(10)
    each = dense_model()
    optimizer = ka.AccumOptimizer(keras.optimizers.SGD(0.5), 3)
    for _ in range(3):
        for rows in (slice(0, 4), slice(4, 8), slice(8, 10)):
            grads = gradients(each, x[rows], y[rows])
            grads = clipped()._clip_gradients(grads)
            optimizer.apply(
                grads, each.trainable_variables, weight=rows.stop - rows.start
            )
    assert_differ(each.get_weights(), model.get_weights())


def gradients(model, x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x) - y))
    return tape.gradient(loss, [v.value for v in model.trainable_variables])


@pytest.mark.slow_in("eager")
@pytest.mark.slow_in("xla")
def test_adaptive_clipping_equals_numpy_unit_by_unit(mode):
    rng = np.random.default_rng(5)
    shapes = [(4, 3), (2, 2, 3, 5), (3,), ()]
    variables = [
        keras.Variable(rng.normal(size=s) if s else 2.0, dtype="float32") for s in shapes
    ]
    before = [v.numpy() for v in variables]
    window = [[rng.normal(size=s).astype("float32") for s in shapes] for _ in range(2)]
    optimizer = ka.AccumOptimizer(keras.optimizers.SGD(1.0), 2, adaptive_clip_factor=0.3)
    optimizer.build(variables)
    apply = lambda g: optimizer.apply(g, variables)  # noqa: E731
    if mode != "eager":
        apply = tf.function(apply, jit_compile=mode == "xla")
    for grads in window:
        apply([tf.constant(g) for g in grads])
    mean = reference.weighted_mean(window, [1, 1])
    expected = [
        v - reference.clip_units(g, v, 0.3) for v, g in zip(before, mean, strict=True)
    ]
    assert_close(variables, expected, rtol=2e-6)
    assert_differ([v - g for v, g in zip(before, mean, strict=True)], expected)
    whole = [
        v - 0.3 * np.linalg.norm(v) / np.linalg.norm(g) * g for v, g in zip(before, mean)
    ]
    assert_differ(whole[:2], expected[:2])


def test_clipping_lets_zero_weights_and_zero_gradients_be():
    variable = keras.Variable(np.zeros((2, 2), "float32"))
    optimizer = ka.AccumOptimizer(keras.optimizers.SGD(1.0), 1, adaptive_clip_factor=0.1)
    optimizer.apply([tf.constant([[0.0, 3.0], [0.0, 4.0]])], [variable])
    # The second unit moves by 0.1 times the smallest norm that counts, 1e-3.
    assert_close(variable, np.array([[0, -6e-5], [0, -8e-5]]))


def decaying():
    return keras.optimizers.AdamW(0.05, weight_decay=0.1)


def scheduled():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
    return keras.optimizers.SGD(schedule, weight_decay=0.02)


def averaging():
    return keras.optimizers.SGD(0.3, use_ema=True, ema_momentum=0.7)


def overwriting():
    return keras.optimizers.SGD(
        0.3, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=2
    )


@pytest.mark.slow_but("scheduled-eager")
@pytest.mark.slow_in("xla")
@pytest.mark.parametrize(
    ("inner", "mode"),
    [
        *[
            (inner, mode)
            for inner in (decaying, scheduled, averaging, overwriting)
            for mode in ("eager", "graph")
        ],
        (scheduled, "xla"),
        (overwriting, "xla"),
    ],
)
def test_what_the_inner_optimizer_counts_in_updates_stays_in_updates(inner, mode):
    model = train(ka.AccumOptimizer(inner(), 4), [3, 3, 3, 1], mode, epochs=5)
    oracle = train(inner(), [10], "eager", epochs=5)
    assert_same_training(model, oracle, ADAPTIVE)
    naive = train(inner(), [3, 3, 3, 1], "eager")
    assert_differ(naive.get_weights(), oracle.get_weights())


def test_constraints_and_regularisers_count_once_per_update():
    config = {
        "kernel_constraint": keras.constraints.MaxNorm(0.5),
        "kernel_regularizer": keras.regularizers.L2(0.1),
    }
    model = train(ka.AccumOptimizer(keras.optimizers.SGD(0.3), 3), [4, 4, 2], **config)
    oracle = train(keras.optimizers.SGD(0.3), [10], **config)
    assert_same_training(model, oracle)
    assert_differ(
        train(keras.optimizers.SGD(0.3), [10]).get_weights(), model.get_weights()
    )


@pytest.mark.slow_in("eager")
@pytest.mark.slow_in("xla")
def test_sum_losses_add_up_over_the_window(mode):
    loss = keras.losses.MeanSquaredError(reduction="sum")
    inner = keras.optimizers.SGD
    model = train(
        ka.AccumOptimizer(inner(0.02), 3, reduction="sum"), [4, 4, 2], mode, loss=loss
    )
    oracle = train(inner(0.02), [10], "eager", loss=loss)
    assert_same_training(model, oracle)
    divided = train(inner(0.02 / 3), [10], loss=loss)
    assert_differ(divided.get_weights(), oracle.get_weights())


def token_model():
    keras.utils.set_random_seed(2)
    return keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            keras.layers.Embedding(11, 4, mask_zero=True),
            keras.layers.Dense(11),
        ]
    )


def tokens(samples):
    """Sequences of 1 to 6 tokens, padded with 0."""
    rng = np.random.default_rng(4)
    x = rng.integers(1, 11, size=(samples, 6)).astype("int32")
    for row, length in enumerate(rng.integers(1, 7, size=samples)):
        x[row, length:] = 0
    x[0, 1:] = 0
    return x, np.roll(x, 1, axis=1)


@pytest.mark.slow_but("sample weight-eager-mean_with_sample_weight")
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean_with_sample_weight"])
@pytest.mark.parametrize(
    ("masked_by", "mode"),
    [
        ("keras mask", "graph"),
        ("ignore_class", "eager"),
        ("sample weight", "eager"),
        pytest.param("keras mask", "xla", marks=pytest.mark.slow),
    ],
)
def test_tokens_and_not_samples_weigh_a_micro_batch(masked_by, mode, reduction):
    x, y = tokens(10)
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True,
        reduction=reduction,
        ignore_class=0 if masked_by == "ignore_class" else None,
    )
    arrays = (x, y)
    if masked_by == "sample weight":
        arrays = (x, y, np.random.default_rng(6).uniform(0, 3, (10, 6)).astype("float32"))

    def run(optimizer, sizes):
        model = token_model()
        if masked_by != "keras mask":
            model.layers[0].mask_zero = False
        compile_in(model, mode, optimizer, loss)
        fit(model, Batches(sizes, *arrays), None, None, epochs=2)
        return model

    model = run(ka.AccumOptimizer(keras.optimizers.SGD(0.5), 3), [1, 6, 3])
    oracle = run(keras.optimizers.SGD(0.5), [10])
    assert_same_training(model, oracle)

    # The mean of means, which everyone else computes.
    class Unweighted(ka.AccumOptimizer):
        def apply(self, grads, trainable_variables=None, weight=None):
            super().apply(grads, trainable_variables, weight=1.0)

    naive = run(Unweighted(keras.optimizers.SGD(0.5), 3), [1, 6, 3])
    assert_differ(naive.get_weights(), oracle.get_weights())


def test_class_weights_equal_the_large_batch():
    x, _ = data(10)
    y = np.arange(10) % 3
    options = {"loss": "sparse_categorical_crossentropy"}

    def run(optimizer, batch_size):
        model = compile_in(dense_model(), "graph", optimizer, **options)
        fit(model, x, y, batch_size, 2, class_weight={0: 0.2, 1: 3.0, 2: 1.0})
        return model

    model = run(ka.AccumOptimizer(keras.optimizers.SGD(0.5), 3), 4)
    assert_same_training(model, run(keras.optimizers.SGD(0.5), 10))


def two_outputs():
    keras.utils.set_random_seed(3)
    inputs = keras.Input((5,))
    hidden = keras.layers.Dense(6, "tanh")(inputs)
    return keras.Model(
        inputs,
        {
            "a": keras.layers.Dense(3, name="a")(hidden),
            "b": keras.layers.Dense(1, name="b")(hidden),
        },
    )


def test_several_outputs_with_proportional_denominators_are_exact():
    x, y = data(10)
    targets = {"a": y, "b": y[:, :1]}

    def run(optimizer, batch_size):
        model = compile_in(
            two_outputs(),
            "graph",
            optimizer,
            {"a": "mse", "b": "mae"},
            loss_weights={"a": 0.3, "b": 2.0},
        )
        fit(model, x, targets, batch_size, 2)
        return model

    model = run(ka.AccumOptimizer(keras.optimizers.SGD(0.5), 3), 4)
    assert_same_training(model, run(keras.optimizers.SGD(0.5), 10))


def test_logged_loss_and_metrics_are_those_of_the_samples():
    x, y = data(10)
    model = compile_in(
        dense_model(), "graph", ka.AccumOptimizer("sgd", 3), metrics=["mae"]
    )
    history = fit(model, x, y, 4).history
    oracle = compile_in(dense_model(), "graph", keras.optimizers.SGD(), metrics=["mae"])
    expected = oracle.evaluate(x, y, verbose=0, return_dict=True)
    assert_close(
        [history["loss"][0], history["mae"][0]], [expected["loss"], expected["mae"]]
    )


@pytest.mark.slow_in("graph")
@pytest.mark.slow_in("xla")
def test_a_schedule_of_accum_steps_takes_effect_at_the_next_window(mode):
    def ramp(update):
        if update < 2:
            return update + 1
        return 4

    sizes = [5, 2, 4, 3, 1, 2, 3]  # windows of 1, 2 and 4 micro-batches
    model = train(
        ka.AccumOptimizer(keras.optimizers.SGD(0.5), ramp), sizes, mode, epochs=1
    )
    oracle = train(keras.optimizers.SGD(0.5), [5, 6, 9], "eager", epochs=1)
    assert_same_training(model, oracle)
    assert int(model.optimizer.micro_step) == 0
    control = train(keras.optimizers.SGD(0.5), [5, 6, 4, 5], "eager", epochs=1)
    assert_differ(control.get_weights(), oracle.get_weights())


def test_setting_accum_steps_never_misaligns_a_window():
    x, y = data(20)
    sizes = [4, 2, 3, 1, 5, 5]
    optimizer = ka.AccumOptimizer(keras.optimizers.SGD(0.5), 3)
    model = compile_in(dense_model(), "graph", optimizer)
    batches = list(Batches(sizes, x, y))
    model.train_on_batch(*batches[0])
    optimizer.accum_steps = 2  # in mid-window: this window keeps its 3
    for batch in batches[1:5]:
        model.train_on_batch(*batch)
    assert int(optimizer.iterations) == 2
    oracle = compile_in(dense_model(), "graph", keras.optimizers.SGD(0.5))
    for rows in (slice(0, 9), slice(9, 15)):
        oracle.train_on_batch(x[rows], y[rows])
    assert_same_training(model, oracle)
    assert optimizer.accum_steps == 2


@pytest.mark.slow_in("eager")
@pytest.mark.slow_in("xla")
def test_flush_divides_by_what_the_window_holds(mode):
    x, y = data(10)
    model = compile_in(
        dense_model(), mode, ka.AccumOptimizer(keras.optimizers.SGD(0.5), 5)
    )
    fit(model, Batches([4, 4, 2], x, y), None, None)
    assert_equal(model.get_weights(), dense_model().get_weights())
    model.optimizer.flush()
    oracle = compile_in(dense_model(), "eager", keras.optimizers.SGD(0.5))
    fit(oracle, x, y, 10)
    assert_same_training(model, oracle)
    short = dense_model()  # what dividing by k = 5 would give
    compile_in(short, "eager", keras.optimizers.SGD(0.3))
    fit(short, x, y, 10)
    assert_differ(short.get_weights(), oracle.get_weights())
    model.optimizer.flush()  # an empty window
    assert int(model.optimizer.iterations) == 1


def test_reset_forgets_the_window_and_nothing_else():
    x, y = data(12)
    model = compile_in(
        dense_model(), "graph", ka.AccumOptimizer(keras.optimizers.SGD(0.5), 2)
    )
    fit(model, Batches([4, 4, 4], x, y), None, None)
    model.optimizer.reset()
    fit(model, x[:8], y[:8], 4)
    oracle = compile_in(dense_model(), "graph", keras.optimizers.SGD(0.5))
    fit(oracle, x[:8], y[:8], 8, epochs=2)
    assert_same_training(model, oracle)


@pytest.mark.slow_but("graph")
def test_nothing_moves_before_the_end_of_a_window(mode):
    inner = keras.optimizers.AdamW(0.1, use_ema=True)
    model = compile_in(
        dense_model(kernel_constraint=keras.constraints.MaxNorm(0.1)),
        mode,
        ka.AccumOptimizer(inner, 4),
    )
    before = [model.get_weights(), slots(model.optimizer)]
    x, y = data(9)
    fit(model, x, y, 3)
    assert int(model.optimizer.micro_step) == 3
    for now, then in zip(
        [model.get_weights(), slots(model.optimizer)], before, strict=True
    ):
        assert_equal(now, then)


def test_one_trace_serves_a_whole_fit():
    traces = []

    class Counting(keras.layers.Layer):
        def call(self, inputs):
            traces.append(1)
            return inputs

    def count(optimizer):
        inputs = keras.Input((5,))
        model = keras.Model(inputs, keras.layers.Dense(3)(Counting()(inputs)))
        compile_in(model, "graph", optimizer, plain_too=True)
        traces.clear()
        x, y = data(26)
        fit(model, x, y, 4, epochs=3)
        return len(traces)

    assert count(ka.AccumOptimizer("adam", 3)) == count(keras.optimizers.Adam()) == 1


def before(operation):
    """All operations that a graph runs before this one."""
    found, left = set(), [operation]
    while left:
        one = left.pop()
        for other in [*(i.op for i in one.inputs), *one.control_inputs]:
            if other not in found:
                found.add(other)
                left.append(other)
    return found


def test_means_are_made_one_after_the_other():
    """All at once, they would take as much memory as the parameters, once more."""
    variables = [keras.Variable(np.ones(size, "float32")) for size in (2, 3, 4)]
    optimizer = ka.AccumOptimizer("sgd", 2)
    optimizer.build(variables)

    @tf.function(autograph=False)
    def divide(sums, divisor):
        return optimizer._accumulator.divide(range(3), sums, divisor)

    sums = [tf.TensorSpec(v.shape) for v in variables]
    graph = divide.get_concrete_function(sums, tf.TensorSpec(())).graph
    products = [op for op in graph.get_operations() if op.type == "Mul"]
    assert len(products) == 3
    for first, second in pairwise(products):
        assert first in before(second)
        assert second not in before(first)


def test_extra_state_is_one_copy_of_the_parameters():
    model = dense_model()
    inner, optimizer = keras.optimizers.Adam(), ka.AccumOptimizer("adam", 4)
    inner.build(model.trainable_variables)
    optimizer.build(model.trainable_variables)

    def numbers(variables):
        return sum(int(np.prod(v.shape)) for v in variables)

    extra = numbers(optimizer.variables) - numbers(inner.variables)
    scalars = 14 + len(model.trainable_variables)  # counters, and a flag a variable
    assert extra == model.count_params() + scalars
    assert optimizer.accumulator_bytes == 4 * model.count_params()
