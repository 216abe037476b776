"""`accumulate_gradients` against one tape over the whole batch, and against NumPy."""

from itertools import pairwise

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    assert_close,
    assert_differ,
    assert_equal,
    assert_refused,
    data,
    dense_model,
    in_mode,
    told,
    variable,
)

import keras_accum as ka


def mse_of(model):
    def loss_fn(batch):
        x, y = batch
        return tf.reduce_mean(tf.square(model(x, training=True) - y))

    return loss_fn


def large_batch(loss_fn, variables, batch):
    """The loss and the gradients of one tape over all samples."""
    values = [v.value if isinstance(v, keras.Variable) else v for v in variables]
    with tf.GradientTape() as tape:
        loss = loss_fn(batch)
    return loss, tape.gradient(loss, values)


def accumulated(loss_fn, variables, batch, mode="graph", **how):
    def run(batch):
        return ka.accumulate_gradients(loss_fn, variables, batch, **how)

    return in_mode(run, mode)(batch)


def assert_same(found, oracle, rtol=1e-6):
    assert_close(found[0], oracle[0], 2 * rtol, "loss")
    for got, expected in zip(found[1], oracle[1], strict=True):
        assert (got is None) == (expected is None)
        if got is not None:
            assert_close(got, tf.convert_to_tensor(expected), rtol, "gradient")


def mean_over(loss_fn, variables, batch, bounds):
    """The plain mean of the parts' gradients: the control."""
    parts = [
        large_batch(loss_fn, variables, tf.nest.map_structure(lambda t: t[i:j], batch))  # noqa: B023
        for i, j in pairwise(bounds)
    ]
    gradients = zip(*(gradients for _, gradients in parts))
    return [sum(tf.convert_to_tensor(g) for g in each) / len(parts) for each in gradients]


# --------------------------------------------------------------------------- splits


SPLITS = [
    {"accum_steps": 4},  # 4, 3, 3, 3
    {"micro_batch_size": 4},  # 4, 4, 4, 1
    {"accum_steps": 1},
    {"accum_steps": 40},  # 13 of one sample
    {"micro_batch_size": 1},
    {"micro_batch_size": 50},  # one of 13
]


@pytest.mark.parametrize(
    ("split", "mode"),
    [
        *[(split, mode) for split in SPLITS for mode in ("eager", "graph")],
        *[(split, "xla") for split in SPLITS[:2]],
    ],
    ids=str,
)
def test_thirteen_samples_are_exact_however_they_are_split(split, mode):
    model = dense_model()
    batch = tuple(map(tf.constant, data(13)))
    loss_fn, variables = mse_of(model), model.trainable_variables
    oracle = large_batch(loss_fn, variables, batch)
    assert_same(accumulated(loss_fn, variables, batch, mode, **split), oracle)
    naive = mean_over(loss_fn, variables, batch, [0, 4, 8, 12, 13])
    assert_differ(naive, oracle[1])


def sizes_seen(rows, **split):
    """How many samples each micro-batch has, in turn."""
    sizes, seen = [], []

    def loss_fn(x):
        sizes.append(int(x.shape[0]))
        seen.extend(x.numpy().tolist())
        return tf.reduce_mean(x)

    x = tf.range(float(rows))
    ka.accumulate_gradients(loss_fn, [variable(1.0)], x, **split)
    assert seen == list(range(rows))
    return sizes


def test_the_first_micro_batches_have_one_sample_more():
    assert sizes_seen(13, accum_steps=4) == [4, 3, 3, 3]
    assert sizes_seen(12, accum_steps=4) == [3, 3, 3, 3]
    assert sizes_seen(3, accum_steps=4) == [1, 1, 1]
    assert sizes_seen(5, accum_steps=1) == [5]


def test_the_last_micro_batch_of_a_size_is_short():
    assert sizes_seen(13, micro_batch_size=4) == [4, 4, 4, 1]
    assert sizes_seen(12, micro_batch_size=4) == [4, 4, 4]
    assert sizes_seen(3, micro_batch_size=4) == [3]
    assert sizes_seen(3, micro_batch_size=1) == [1, 1, 1]


@pytest.mark.slow_in("graph-{'accum_steps': 4}")
@pytest.mark.slow_in("xla")
@pytest.mark.parametrize("split", [{"accum_steps": 4}, {"micro_batch_size": 4}], ids=str)
def test_in_a_graph_each_sample_is_seen_once_and_in_order(split, mode):
    """The gradient by a table of one row per sample tells which were met, and when."""
    table, order = tf.Variable(tf.zeros(13)), tf.Variable(0.0)

    def loss_fn(at):
        order.assign(order * 2 + tf.cast(tf.shape(at)[0], "float32"))
        return tf.reduce_sum(tf.gather(table, at) * tf.cast(at + 1, "float32"))

    def run(at):
        return ka.accumulate_gradients(loss_fn, [table], at, reduction="sum", **split)

    _, (gradient,) = in_mode(run, mode)(tf.range(13))
    assert_close(gradient, np.arange(1, 14, dtype="float32"))
    sizes = [4, 3, 3, 3] if "accum_steps" in split else [4, 4, 4, 1]
    expected = 0.0
    for size in sizes:
        expected = expected * 2 + size
    assert float(order) == expected


def test_one_trace_serves_every_size_and_number_of_micro_batches():
    model, traces, steps = dense_model(), [], []
    variables = model.trainable_variables

    def loss_fn(batch):
        traces.append(1)
        return mse_of(model)(batch)

    signature = ((tf.TensorSpec((None, 5)), tf.TensorSpec((None, 3))),)
    for split in ({"accum_steps": 4}, {"micro_batch_size": 4}, {"accum_steps": 64}):

        @tf.function(input_signature=signature)
        def run(batch):
            steps.append(1)
            return ka.accumulate_gradients(loss_fn, variables, batch, **split)  # noqa: B023

        traces.clear()
        for size in (13, 4, 1, 3, 26, 8):
            batch = tuple(map(tf.constant, data(size)))
            assert_same(run(batch), large_batch(mse_of(model), variables, batch))
        assert len(traces) == 1, split
    assert len(steps) == 3


@pytest.mark.slow_in("4", "13")
@pytest.mark.parametrize("steps", [1, 2, 4, 13])
def test_the_loss_function_is_traced_once_for_a_known_size(steps):
    model, traces = dense_model(), []

    def loss_fn(batch):
        traces.append(1)
        return mse_of(model)(batch)

    batch = tuple(map(tf.constant, data(13)))
    accumulated(loss_fn, model.trainable_variables, batch, accum_steps=steps)
    assert len(traces) == 1


def test_a_known_size_that_divides_gives_micro_batches_of_known_size():
    shapes = []

    def loss_fn(x):
        shapes.append(tuple(x.shape))
        return tf.reduce_mean(x)

    batch = tf.zeros((12, 5))
    accumulated(loss_fn, [variable(1.0)], batch, accum_steps=4)
    assert shapes == [(3, 5)]


# ---------------------------------------------------------------------------- batches


@pytest.mark.slow_in("xla")
def test_nested_batches_with_nothing_in_places_are_exact(mode):
    x, y = data(13)
    w, b = variable(*[0.1, -0.2, 0.3, 0.4, -0.5]), variable(0.1)
    batch = {"in": (tf.constant(x), None), "out": [tf.constant(y), {"more": None}]}

    def loss_fn(batch):
        (x, nothing), (y, more) = batch["in"], batch["out"]
        assert nothing is None and more == {"more": None}
        found = tf.linalg.matvec(x, tf.convert_to_tensor(w)) + tf.convert_to_tensor(b)
        return tf.reduce_mean(tf.square(found - y[:, 0]))

    oracle = large_batch(loss_fn, [w, b], batch)
    assert_same(accumulated(loss_fn, [w, b], batch, mode, accum_steps=4), oracle)


@pytest.mark.slow_in("xla")
def test_arrays_and_lists_of_numbers_are_taken_as_tensors(mode):
    w = variable(2.0)

    def loss_fn(batch):
        return tf.reduce_mean(tf.square(batch["x"] * tf.convert_to_tensor(w)))

    batch = {"x": np.array([[1.0], [2.0], [4.0]], "float32")}
    loss, (gradient,) = accumulated(loss_fn, [w], batch, mode, micro_batch_size=2)
    assert_close([loss, gradient], [np.float32(28.0), np.float32([28.0])])


ROWS = [[1, 2], [3], [4, 5, 6, 7], [8], [], [9, 1, 2], [5], [6, 6], [7], [1], [2, 3]]


def bags(table, rows, y):
    found = tf.reduce_sum(tf.gather(table, rows), axis=1)
    return tf.reduce_mean(tf.square(found - y))


@pytest.mark.slow_in("graph")
@pytest.mark.parametrize("how", ["eager", "graph"])
@pytest.mark.parametrize("split", [{"accum_steps": 4}, {"micro_batch_size": 3}], ids=str)
def test_ragged_tensors_are_exact(how, split):
    rng = np.random.default_rng(2)
    table = tf.Variable(rng.normal(size=(11, 3)).astype("float32"))
    batch = (tf.ragged.constant(ROWS, dtype="int32"), tf.constant(data(11)[1]))
    loss_fn = lambda batch: bags(table, *batch)  # noqa: E731
    oracle = large_batch(loss_fn, [table], batch)
    assert_same(accumulated(loss_fn, [table], batch, how, **split), oracle)


def test_ragged_tensors_of_unknown_size_are_exact_with_one_trace():
    table, traces = tf.Variable(tf.random.normal((11, 3))), []

    def loss_fn(batch):
        traces.append(1)
        return bags(table, *batch)

    signature = (
        (tf.RaggedTensorSpec((None, None), "int32"), tf.TensorSpec((None, 3), "float32")),
    )

    @tf.function(input_signature=signature)
    def run(batch):
        return ka.accumulate_gradients(loss_fn, [table], batch, accum_steps=4)

    for size in (11, 3, 6):
        rows = tf.ragged.constant(ROWS[:size], dtype="int32", ragged_rank=1)
        batch = (rows, tf.constant(data(size)[1]))
        found = run(batch)
        count = len(traces)
        assert_same(found, large_batch(loss_fn, [table], batch))
        del traces[count:]
    assert len(traces) == 1


@pytest.mark.slow_in("eager")
@pytest.mark.parametrize("how", ["eager", "graph"])
def test_sparse_tensors_are_exact(how):
    x, y = data(11)
    x[np.abs(x) < 1] = 0
    w = tf.Variable(tf.random.normal((5, 3)))
    batch = (tf.sparse.from_dense(x), tf.constant(y))

    def loss_fn(batch):
        x, y = batch
        return tf.reduce_mean(tf.square(tf.sparse.sparse_dense_matmul(x, w) - y))

    oracle = large_batch(loss_fn, [w], batch)
    assert_same(accumulated(loss_fn, [w], batch, how, accum_steps=4), oracle)


# ----------------------------------------------------------------------------- weights


def weighted_case():
    """Per-sample errors of a linear model, with uneven weights; and NumPy's answer."""
    x, y = data(13)
    weights = np.random.default_rng(1).uniform(0, 4, 13).astype("float32")
    weights[:4] *= 0.02
    w = variable(*[0.1, -0.2, 0.3, 0.4, -0.5])
    v = w.numpy().astype("float64")
    errors = x.astype("float64") @ v - y[:, 0]
    loss = (weights * errors**2).sum() / weights.sum()
    gradient = (weights * 2 * errors) @ x / weights.sum()
    batch = tuple(map(tf.constant, (x, y[:, 0], weights)))
    return w, batch, (np.float32(loss), [gradient.astype("float32")])


def weighted_errors(w, batch):
    x, y, weights = batch
    errors = tf.linalg.matvec(x, tf.convert_to_tensor(w)) - y
    return tf.reduce_sum(weights * errors**2), tf.reduce_sum(weights)


@pytest.mark.slow_in("graph")
@pytest.mark.slow_in("xla")
@pytest.mark.parametrize("split", [{"accum_steps": 4}, {"micro_batch_size": 4}], ids=str)
def test_pairs_of_a_loss_and_a_weight_equal_numpy(split, mode):
    w, batch, oracle = weighted_case()

    def loss_fn(batch):
        total, weight = weighted_errors(w, batch)
        return total / weight, weight

    assert_same(accumulated(loss_fn, [w], batch, mode, **split), oracle, 2e-6)
    alone = lambda batch: loss_fn(batch)[0]  # noqa: E731
    by_samples = accumulated(alone, [w], batch, mode, **split)
    assert_differ(by_samples[1], oracle[1])
    assert_differ(mean_over(alone, [w], batch, [0, 4, 8, 12, 13]), oracle[1])


@pytest.mark.slow_in("eager")
@pytest.mark.slow_in("xla")
def test_a_sum_equals_numpy(mode):
    w, batch, (loss, (gradient,)) = weighted_case()
    total = batch[2].numpy().sum()
    loss_fn = lambda batch: weighted_errors(w, batch)[0]  # noqa: E731
    found = accumulated(loss_fn, [w], batch, mode, accum_steps=4, reduction="sum")
    assert_same(found, (loss * total, [gradient * total]), 2e-6)
    assert_differ(accumulated(loss_fn, [w], batch, accum_steps=4)[1], [gradient * total])


def test_a_sum_does_not_ask_for_a_weight():
    w, batch, (loss, (gradient,)) = weighted_case()
    total = batch[2].numpy().sum()
    loss_fn = lambda batch: weighted_errors(w, batch)  # noqa: E731
    found = accumulated(loss_fn, [w], batch, accum_steps=4, reduction="sum")
    assert_same(found, (loss * total, [gradient * total]), 2e-6)


@pytest.mark.slow_in("graph-slice(0, 4, None)", "graph-slice(4, 8, None)")
@pytest.mark.parametrize("zeros", [slice(0, 4), slice(4, 8), slice(12, 13)], ids=str)
def test_a_weight_of_zero_adds_nothing_even_from_a_nan(zeros, mode):
    """The mean of nothing is 0 / 0."""
    if mode == "xla" and zeros.start:
        mode = "graph"
    w, batch, _ = weighted_case()
    weights = batch[2].numpy()
    weights[zeros] = 0
    batch = (*batch[:2], tf.constant(weights))

    def loss_fn(batch):
        total, weight = weighted_errors(w, batch)
        return total / weight, weight

    found = accumulated(loss_fn, [w], batch, mode, micro_batch_size=4)
    assert_same(found, large_batch(lambda batch: loss_fn(batch)[0], [w], batch), 2e-6)


@pytest.mark.slow_in("xla")
def test_weights_of_zero_everywhere_give_zeros(mode):
    w, batch, _ = weighted_case()
    batch = (*batch[:2], tf.zeros(13))

    def loss_fn(batch):
        total, weight = weighted_errors(w, batch)
        return total / weight, weight

    loss, gradients = accumulated(loss_fn, [w], batch, mode, accum_steps=4)
    assert_equal([loss, *gradients], [np.float32(0), np.zeros(5, "float32")])


def test_weights_far_beyond_the_gradients_lose_nothing():
    w, batch, oracle = weighted_case()

    def loss_fn(batch):
        total, weight = weighted_errors(w, batch)
        return total / weight, weight * 2e37

    assert_same(accumulated(loss_fn, [w], batch, accum_steps=4), oracle, 2e-6)


@pytest.mark.slow_in("xla")
def test_weights_may_be_whole_numbers(mode):
    x, y = data(13)
    lengths = tf.constant(np.arange(13) % 5 + 1)
    w = variable(*[0.1, -0.2, 0.3, 0.4, -0.5])

    def loss_fn(batch):
        x, y, lengths = batch
        share = tf.cast(lengths, "float32") / tf.cast(tf.reduce_sum(lengths), "float32")
        errors = tf.linalg.matvec(x, tf.convert_to_tensor(w)) - y
        return tf.reduce_sum(share * errors**2), tf.reduce_sum(lengths)

    batch = (tf.constant(x), tf.constant(y[:, 0]), lengths)
    oracle = large_batch(lambda batch: loss_fn(batch)[0], [w], batch)
    assert_same(accumulated(loss_fn, [w], batch, mode, accum_steps=4), oracle, 2e-6)


# -------------------------------------------------------------------------- gradients


@pytest.mark.slow_in("xla")
def test_sparse_gradients_equal_the_dense_one(mode):
    rng = np.random.default_rng(2)
    table = tf.Variable(rng.normal(size=(11, 3)).astype("float32"))
    at = tf.constant(rng.integers(0, 5, size=(13, 6)))  # rows repeat, and some never come
    y = tf.constant(rng.normal(size=(13, 6, 3)).astype("float32"))

    def loss_fn(batch):
        at, y = batch
        return tf.reduce_mean(tf.square(tf.nn.embedding_lookup(table, at) ** 2 - y))

    oracle = large_batch(loss_fn, [table], (at, y))
    assert isinstance(oracle[1][0], tf.IndexedSlices)
    found = accumulated(loss_fn, [table], (at, y), mode, accum_steps=4)
    assert_same(found, oracle, 2e-6)
    assert_equal(found[1][0][5:], np.zeros((6, 3), "float32"))


@pytest.mark.slow_in("eager")
@pytest.mark.slow_in("xla")
def test_a_gradient_of_none_stays_none_and_shifts_no_other(mode):
    a, unused, b = variable(2.0, 1.0), variable(3.0), variable(5.0)
    x = tf.constant([[1.0, 2.0], [3.0, 5.0], [4.0, -1.0]])

    def loss_fn(x):
        return (
            tf.reduce_mean(x * tf.convert_to_tensor(a)) + tf.convert_to_tensor(b)[0] ** 2
        )

    oracle = large_batch(loss_fn, [a, unused, b], x)
    found = accumulated(loss_fn, [a, unused, b], x, mode, accum_steps=2)
    assert found[1][1] is None
    assert_same(found, oracle)


def test_a_gradient_that_only_some_micro_batches_have_is_kept():
    a, b = variable(2.0), variable(3.0)

    def loss_fn(x):
        # In eager mode, a Python condition on the data.
        if float(x[0]) < 0:
            return tf.reduce_mean(x) * tf.convert_to_tensor(b)[0]
        return tf.reduce_mean(x) * tf.convert_to_tensor(a)[0]

    x = tf.constant([-1.0, -2.0, 3.0, 4.0, 5.0, 6.0])
    _, gradients = accumulated(loss_fn, [a, b], x, "eager", micro_batch_size=2)
    assert_close(gradients, [np.float32([9 / 3]), np.float32([-1.5 / 3])])


@pytest.mark.slow_in("eager")
@pytest.mark.slow_in("xla")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_accumulated_in_float32(dtype, mode):
    """Where 1/1024 is added to 1 again and again, half precision would stay at 1."""
    w = variable(1.0, dtype=dtype)
    x = tf.constant([[1.0], *[[2.0**-10]] * 64])

    def loss_fn(x):
        return tf.reduce_mean(tf.cast(x, dtype) * tf.convert_to_tensor(w))

    found = accumulated(loss_fn, [w], x, mode, micro_batch_size=1, reduction="sum")
    assert found[1][0].dtype == tf.float32
    assert_close(found[1][0], np.float32([1 + 64 * 2.0**-10]))
    assert found[0].dtype == tf.float32


def test_float64_variables_keep_their_precision():
    w = variable(1.0, dtype="float64")
    x = tf.constant([[1.0], *[[1e-12]] * 5], dtype="float64")

    def loss_fn(x):
        return tf.reduce_mean(x * tf.convert_to_tensor(w))

    found = accumulated(loss_fn, [w], x, micro_batch_size=1, reduction="sum")
    assert found[1][0].dtype == tf.float64
    assert_close(found[1][0], np.array([1 + 5e-12]), 1e-15)


@pytest.mark.slow_in("xla")
def test_variables_of_tensorflow_and_of_keras_are_taken_together(mode):
    a, b = tf.Variable([2.0, 1.0]), variable(1.0, -1.0)
    x = tf.constant(np.arange(10, dtype="float32").reshape(5, 2))

    def loss_fn(x):
        return tf.reduce_mean(x**2 * a * tf.convert_to_tensor(b))

    oracle = large_batch(loss_fn, [a, b], x)
    assert_same(accumulated(loss_fn, [a, b], x, mode, accum_steps=2), oracle)


@pytest.mark.slow_in("eager")
@pytest.mark.slow_in("xla")
def test_the_loss_is_scaled_before_it_is_differentiated_and_given_unscaled(mode):
    model = dense_model()
    batch = tuple(map(tf.constant, data(13)))
    loss_fn, variables = mse_of(model), model.trainable_variables
    loss, gradients = large_batch(loss_fn, variables, batch)
    found = accumulated(
        loss_fn, variables, batch, mode, accum_steps=4, scale_loss=lambda loss: loss * 512
    )
    assert_same(found, (loss, [g * 512 for g in gradients]))


def test_a_custom_loop_with_loss_scaling_equals_the_large_batch():
    x, y = data(13)
    optimizers = [
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.2), 2.0**8)
        for _ in "ab"
    ]
    models = [dense_model() for _ in "ab"]

    @tf.function
    def step(batch):
        _, gradients = ka.accumulate_gradients(
            mse_of(models[0]),
            models[0].trainable_variables,
            batch,
            micro_batch_size=4,
            scale_loss=optimizers[0].scale_loss,
        )
        optimizers[0].apply(gradients, models[0].trainable_variables)

    optimizers[0].build(models[0].trainable_variables)
    step((tf.constant(x), tf.constant(y)))
    scaled = lambda batch: optimizers[1].scale_loss(mse_of(models[1])(batch))  # noqa: E731
    _, gradients = large_batch(scaled, models[1].trainable_variables, (x, y))
    optimizers[1].apply(gradients, models[1].trainable_variables)
    assert_close(models[0].get_weights(), models[1].get_weights())


# ------------------------------------------------------------------------ in a function


def test_python_conditions_and_loops_on_tensors_work_in_a_function():
    w = variable(2.0, 3.0)

    def loss_fn(x):
        value = tf.convert_to_tensor(w)
        if tf.reduce_mean(x) > 3:
            found = value[0] * tf.reduce_mean(x)
        else:
            found = value[1] * tf.reduce_mean(x) ** 2
        for _ in tf.range(tf.shape(x)[0]):
            found += tf.reduce_mean(x)
        while found > 1000:
            found = found / 2
        return found

    @tf.function
    def run(x):
        return ka.accumulate_gradients(loss_fn, [w], x, micro_batch_size=2)

    x = tf.constant([1.0, 2.0, 3.0, 5.0, 6.0])
    # Means 1.5, 4 and 6, of 2, 2 and 1 samples.
    loss, (gradient,) = run(x)
    assert_close(gradient, np.float32([(2 * 4 + 6) / 5, 2 * 1.5**2 / 5]))
    expected = 2 * (3 * 1.5**2 + 2 * 1.5) + 2 * (2 * 4 + 2 * 4) + (2 * 6 + 6)
    assert_close(loss, np.float32(expected / 5))


@pytest.mark.slow_in("eager")
@pytest.mark.slow_in("xla")
def test_functions_and_callable_objects_are_taken_as_loss_functions(mode):
    w = variable(2.0)
    x = tf.constant([1.0, 2.0, 4.0])

    class Loss:
        def __call__(self, x):
            return tf.reduce_mean(x * tf.convert_to_tensor(w))

    for loss_fn in (Loss(), tf.function(Loss().__call__)):
        loss, (gradient,) = accumulated(loss_fn, [w], x, mode, micro_batch_size=2)
        assert_close([loss, gradient], [np.float32(14 / 3), np.float32([7 / 3])])


@pytest.mark.slow_in("xla")
def test_state_that_the_loss_function_moves_moves_once_per_micro_batch(mode):
    """The step is traced more often than it runs; only running may count."""
    seen = tf.Variable(0)
    w = variable(2.0)

    def loss_fn(x):
        seen.assign_add(1)
        return tf.reduce_mean(x * tf.convert_to_tensor(w))

    x = tf.range(13.0)
    accumulated(loss_fn, [w], x, mode, accum_steps=4)
    assert int(seen) == 4


# ------------------------------------------------------------------------------ refused


def refused(error, message, batch=None, mode="eager", loss_fn=None, **how):
    w = variable(2.0)
    loss_fn = loss_fn or (lambda x: tf.reduce_mean(tf.convert_to_tensor(w)))
    batch = tf.zeros((4, 2)) if batch is None else batch
    assert_refused(lambda: accumulated(loss_fn, [w], batch, mode, **how), error, message)


ONE_OF_TWO = (
    "A batch is split by exactly one of `accum_steps` (how many micro-batches it makes) "
    "and `micro_batch_size` (how many samples each has). Received: "
)


@pytest.mark.parametrize("how", ["eager", "graph"])
def test_neither_and_both_ways_to_split_are_refused(how):
    received = "accum_steps=None, micro_batch_size=None"
    refused(ValueError, ONE_OF_TWO + received, mode=how)
    received = "accum_steps=2, micro_batch_size=3"
    refused(
        ValueError, ONE_OF_TWO + received, mode=how, accum_steps=2, micro_batch_size=3
    )


@pytest.mark.parametrize("name", ["accum_steps", "micro_batch_size"])
@pytest.mark.parametrize("value", [2.0, "2", True, False])
def test_a_split_that_is_no_integer_is_refused(name, value):
    message = f"`{name}` must be an integer. Received: {value!r}"
    refused(TypeError, message, **{name: value})


@pytest.mark.parametrize("name", ["accum_steps", "micro_batch_size"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_split_below_one_is_refused(name, value):
    message = f"`{name}` must be at least 1. Received: {value}"
    refused(ValueError, message, **{name: value})


def test_an_integer_of_numpy_is_an_integer():
    """As it is for `AccumOptimizer`."""
    x = tf.range(13.0)
    w = variable(2.0)
    loss_fn = lambda x: tf.reduce_mean(x * tf.convert_to_tensor(w))  # noqa: E731
    found = accumulated(loss_fn, [w], x, accum_steps=np.int64(4))
    assert_same(found, large_batch(loss_fn, [w], x))


@pytest.mark.parametrize("how", ["eager", "graph"])
def test_tensors_of_different_sizes_are_refused(how):
    refused(
        ValueError,
        "All tensors of a batch must have the same number of samples. Received shapes: "
        "(4, 2), (3,)",
        (tf.zeros((4, 2)), tf.zeros(3)),
        how,
        accum_steps=2,
    )


@pytest.mark.parametrize("how", ["eager", "graph"])
def test_a_scalar_in_a_batch_is_refused(how):
    w = variable(2.0)
    with pytest.raises(ValueError) as caught:
        accumulated(
            lambda batch: tf.reduce_mean(tf.convert_to_tensor(w)),
            [w],
            {"x": tf.zeros((4, 2)), "rate": tf.constant(0.5)},
            how,
            accum_steps=2,
        )
    message = str(caught.value)
    assert message.startswith(
        "Every tensor of a batch must have the samples as its first dimension. Received "
        "a scalar: "
    )
    assert message.endswith("Repeat it for each sample, or keep it out of the batch.")


@pytest.mark.parametrize("how", ["eager", "graph"])
def test_an_empty_batch_is_refused(how):
    refused(
        ValueError,
        "Received a batch without samples: its loss is not defined. Leave it out.",
        (tf.zeros((0, 2)), None),
        how,
        accum_steps=2,
    )


@pytest.mark.parametrize("batch", [None, (None, {"x": None}), ()])
def test_a_batch_without_a_tensor_is_refused(batch):
    w = variable(2.0)
    assert_refused(
        lambda: accumulated(lambda x: 0.0, [w], batch, "eager", accum_steps=2),
        ValueError,
        "Received a batch without any tensor: there is nothing to split.",
    )


@pytest.mark.parametrize("how", ["eager", "graph"])
def test_a_loss_that_is_no_scalar_is_refused(how):
    refused(
        ValueError,
        "`loss_fn` must return a scalar, the mean loss of the micro-batch, or a pair of "
        "it and its weight. Received a loss of shape (2, 3): take its mean, and pass "
        "`reduction='sum'` if you take its sum.",
        mode=how,
        loss_fn=lambda x: tf.ones((2, 3)),
        accum_steps=2,
    )


def test_an_unknown_reduction_is_refused():
    w = variable(2.0)
    with pytest.raises(ValueError, match="reduction"):
        accumulated(
            lambda x: tf.reduce_mean(x * tf.convert_to_tensor(w)),
            [w],
            tf.zeros((4, 1)),
            "eager",
            accum_steps=2,
            reduction="median",
        )


def counting_run(signature):
    """A function for batches of unknown sizes that counts the micro-batches it ran."""
    w, ran = variable(2.0), tf.Variable(0)

    def loss_fn(batch):
        ran.assign_add(1)
        return tf.reduce_mean(batch[0]) * tf.convert_to_tensor(w)[0]

    @tf.function(input_signature=(signature,))
    def run(batch):
        return ka.accumulate_gradients(loss_fn, [w], batch, accum_steps=2)

    return run, ran


SIZES_UNKNOWN = (tf.TensorSpec((None, 2)), tf.TensorSpec((None,)))


def test_sizes_known_only_when_it_runs_are_checked_then():
    run, ran = counting_run(SIZES_UNKNOWN)
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match="All tensors of a batch must have the same number of samples",
    ):
        run((tf.zeros((4, 2)), tf.zeros(3)))
    assert int(ran) == 0
    run((tf.zeros((4, 2)), tf.zeros(4)))
    assert int(ran) == 2


def test_an_empty_batch_known_only_when_it_runs_is_refused_then():
    run, ran = counting_run(SIZES_UNKNOWN)
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match="Received a batch without samples: its loss is not defined",
    ):
        run((tf.zeros((0, 2)), tf.zeros(0)))
    assert int(ran) == 0


# --- What a Keras loss in the function was divided by.


def heard(make_loss, *, graph=False, **how):
    """Loss and gradients of micro-batches, and of the batch at once."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
    x, y = data(14, outputs=2)
    weights = (0.1 + np.arange(14) % 4).astype("float32")
    batch = tuple(tf.constant(each) for each in (x, y, weights))
    variables = model.trainable_variables

    def loss_fn(micro_batch):
        x, y, weights = micro_batch
        return make_loss(y, model(x), weights)

    def split():
        return ka.accumulate_gradients(
            loss_fn, variables, batch, micro_batch_size=4, **how
        )

    found = tf.function(split)() if graph else split()
    with tf.GradientTape() as tape:
        loss = loss_fn(batch)
    gradients = tape.gradient(loss, [v.value for v in variables])
    return [found[0], *found[1]], [loss, *gradients]


@pytest.mark.parametrize("graph", [False, True])
def test_the_weight_is_what_the_keras_loss_was_divided_by(graph):
    weighted = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    found, expected = heard(weighted, graph=graph)
    assert_close(found, expected, 2e-6)
    plain, _ = heard(lambda y, y_pred, w: keras.losses.MeanSquaredError()(y, y_pred))
    assert_differ(found, plain)


def test_a_sum_of_keras_is_refused_as_a_mean_and_the_other_way():
    for kind, other, loss in (
        ("sum", "mean", keras.losses.MeanSquaredError(reduction="sum")),
        ("mean", "sum", keras.losses.MeanSquaredError()),
    ):
        assert_refused(
            lambda loss=loss, other=other: heard(loss, reduction=other),
            ValueError,
            f"`loss_fn` returns a Keras loss that is a {kind}. Received: "
            f"reduction='{other}'. Pass `reduction='{kind}'`.",
        )
        found, expected = heard(loss, reduction=kind)
        assert_close(found, expected, 2e-6)


def test_several_keras_losses_that_weigh_unlike_are_said():
    weighted = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")

    def both(y, y_pred, weights):
        return weighted(y, y_pred, weights) + weighted(y, y_pred, weights**2)

    with pytest.warns(UserWarning) as caught:
        heard(both)
    assert set(told(caught)) == {
        "What `loss_fn` divides by is not known: it computes several Keras losses, or in a "
        "function of its own. Micro-batches weigh by their samples. Return a pair, the "
        "loss and its weight: what it was divided by."
    }


def test_what_is_no_pair_of_a_loss_and_a_weight_is_refused():
    assert_refused(
        lambda: heard(lambda y, y_pred, w: (tf.reduce_mean(y_pred), y_pred)),
        ValueError,
        "`loss_fn` must return a scalar, the mean loss of the micro-batch, or a pair of it "
        "and its weight, the scalar that it was divided by. Received 2 values, of the "
        "shapes (), (4, 2).",
    )
