"""The step that splits a batch inside, against one step of Keras's own on all of it."""

import dataclasses
import pickle
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
    assert_same_step,
    compile_in,
    data,
    dense_model,
    fit,
    in_mode,
    mean_of_means,
    slots,
    train_twice,
)
from text_models import (
    SAMPLES,
    cross_entropy,
    token_model,
    tokens,
    two_text_arrays,
    two_texts,
    uneven,
)

import keras_accum as ka
from keras_accum._step.model import settings_of, trained_by
from keras_accum._step.settings import Settings

# Of 11 samples, micro-batches of 4, 4 and 3.
STEPS, SIZES = {"accum_steps": 3}, (4, 4, 3)
MEANS = ["sum_over_batch_size", "mean", "mean_with_sample_weight"]
UNKNOWN = "cannot be known"


def sgd():
    return keras.optimizers.SGD(0.2, momentum=0.9)


def check(make, arrays, mode="graph", options=None, control=True, split=STEPS, **how):
    """Equal to the large batch; where `control`, the mean of means is not."""
    found = train_twice(make, arrays, mode, split, options=options, **how)
    how.pop("two_pass", None)
    oracle = train_twice(make, arrays, options=options, **how)
    assert_same_step(found, oracle)
    if control:
        naive = mean_of_means(make, arrays, SIZES, options)
        assert_differ(naive.get_weights(), oracle[0].get_weights(), what="mean of means")
    return found


def two_heads():
    keras.utils.set_random_seed(3)
    inputs = keras.Input((5,))
    hidden = keras.layers.Dense(6, "tanh")(inputs)
    heads = {"a": keras.layers.Dense(3, name="a"), "b": keras.layers.Dense(1, name="b")}
    return keras.Model(inputs, {name: head(hidden) for name, head in heads.items()})


def two_head_arrays():
    x, y = data(SAMPLES)
    return x, {"a": y, "b": y[:, :1] * 2}


# ----------------------------------------------------------------------- reductions


@pytest.mark.slow_in("graph")
@pytest.mark.slow_in("xla")
@pytest.mark.parametrize(
    ("reduction", "mode"),
    [
        *[(reduction, "graph") for reduction in (*MEANS, "sum")],
        ("mean_with_sample_weight", "eager"),
        ("mean_with_sample_weight", "xla"),
    ],
)
def test_every_reduction_of_a_weighted_loss_is_exact(reduction, mode):
    def options():
        return {
            "loss": keras.losses.MeanSquaredError(reduction=reduction),
            "metrics": ["mae", "mse"],
            "weighted_metrics": ["mae"],
        }

    arrays = (*data(SAMPLES), uneven(SAMPLES))
    check(dense_model, arrays, mode, options)


# What masks matters to the weight of a loss, and the reduction too: each kind once.
@pytest.mark.slow_in("keras mask", "sample weight")
@pytest.mark.parametrize(
    ("masked_by", "reduction"),
    [
        *[("keras mask", reduction) for reduction in (*MEANS, "sum")],
        *[(by, "mean_with_sample_weight") for by in ("ignore_class", "sample weight")],
        *[
            pytest.param(by, reduction, marks=pytest.mark.slow)
            for by in ("ignore_class", "sample weight")
            for reduction in ("sum_over_batch_size", "mean", "sum")
        ],
    ],
)
def test_every_reduction_of_a_token_loss_is_exact(masked_by, reduction):
    x, y = tokens()
    arrays = (x, y)
    if masked_by == "sample weight":
        arrays = (x, y, uneven(SAMPLES, 6))

    def options():
        ignored = 0 if masked_by == "ignore_class" else None
        loss = cross_entropy(reduction=reduction, ignore_class=ignored)
        return {"loss": loss, "weighted_metrics": ["accuracy"]}

    def make():
        return token_model(mask_zero=masked_by == "keras mask")

    check(make, arrays, "graph", options)


@pytest.mark.parametrize(
    ("reduction", "mode"),
    [
        ("sum_over_batch_size", "graph"),
        ("mean_with_sample_weight", "eager"),
        ("mean_with_sample_weight", "xla"),
    ],
)
@pytest.mark.slow_in("xla")
def test_a_mask_and_sample_weights_together_are_exact(reduction, mode):
    def options():
        return {"loss": cross_entropy(reduction=reduction), "weighted_metrics": ["acc"]}

    arrays = (*tokens(), uneven(SAMPLES, 6))
    check(token_model, arrays, mode, options)


@pytest.mark.slow_in("sum_over_batch_size")
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean_with_sample_weight"])
def test_one_weight_per_sequence_of_masked_tokens_is_exact(reduction):
    """The weight of a sample has to be written (samples, 1), as Keras wants it."""

    def options():
        return {"loss": cross_entropy(reduction=reduction)}

    check(token_model, (*tokens(), uneven(SAMPLES, 1)), "graph", options)


@pytest.mark.slow_but("1")
@pytest.mark.parametrize("size", [1, 4, 5, 50])
def test_micro_batches_of_a_size_are_exact(size):
    def options():
        return {"loss": cross_entropy(reduction="mean_with_sample_weight")}

    check(
        token_model, tokens(), "graph", options, False, split={"micro_batch_size": size}
    )


@pytest.mark.slow_in("eager")
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_more_micro_batches_than_samples_are_exact(mode):
    check(dense_model, data(3), mode, control=False, split={"accum_steps": 8})


def test_class_weights_are_exact():
    x, _ = data(SAMPLES)
    y = np.array([0, 0, 0, 0, 1, 2, 1, 2, 1, 2, 0])

    def options():
        loss = cross_entropy(reduction="mean_with_sample_weight")
        return {"loss": loss, "weighted_metrics": ["accuracy"]}

    check(
        dense_model,
        (x, y),
        options=options,
        control=False,
        class_weight={0: 0.2, 1: 3.0, 2: 1.0},
    )
    weights = np.array([0.2, 3.0, 1.0], "float32")[y]
    weighted = train_twice(dense_model, (x, y, weights), options=options)[0]
    naive = mean_of_means(dense_model, (x, y, weights), SIZES, options)
    assert_differ(naive.get_weights(), weighted.get_weights())


def test_a_micro_batch_without_any_token_adds_nothing():
    x, y = tokens()
    weight = uneven(SAMPLES, 6)
    weight[:4] = 0

    def options():
        return {"loss": cross_entropy(reduction="mean_with_sample_weight")}

    check(lambda: token_model(False), (x, y, weight), options=options)


def test_a_batch_without_any_weight_is_updated_by_its_regulariser_alone():
    def options():
        return {"loss": keras.losses.MeanSquaredError("mean_with_sample_weight")}

    def make():
        return dense_model(kernel_regularizer=keras.regularizers.L2(0.1))

    arrays = (*data(SAMPLES), np.zeros(SAMPLES, "float32"))
    found = check(make, arrays, options=options, control=False)
    assert_differ(found[0].get_weights(), make().get_weights())


# -------------------------------------------------------------------------- outputs


@pytest.mark.slow_but("sum")
@pytest.mark.parametrize(
    "reduction",
    [
        *("mean_with_sample_weight", "sum"),
        *(pytest.param(r, marks=pytest.mark.slow) for r in MEANS[:2]),
    ],
)
def test_two_outputs_with_two_masks_are_exact(reduction):
    def options():
        return {
            "loss": {n: cross_entropy(reduction=reduction) for n in "ab"},
            "loss_weights": {"a": 0.3, "b": 2.0},
            "weighted_metrics": {"a": ["accuracy"], "b": ["accuracy"]},
        }

    check(two_texts, two_text_arrays(), "graph", options)


@pytest.mark.slow_in("graph")
@pytest.mark.slow_in("xla")
def test_two_outputs_with_two_masks_are_exact_in_every_mode(mode):
    def options():
        return {"loss": {n: cross_entropy() for n in "ab"}, "loss_weights": [0.3, 2.0]}

    arrays = two_text_arrays()
    check(two_texts, arrays, mode, options if mode == "eager" else _by_name)


def _by_name():
    return {"loss": {"a": cross_entropy(), "b": cross_entropy(reduction="sum")}}


@pytest.mark.slow_in("graph")
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_two_outputs_with_sample_weights_of_their_own_are_exact(mode):
    x, y = two_head_arrays()
    weights = {"a": uneven(SAMPLES), "b": uneven(SAMPLES, seed=9)[::-1].copy()}

    def options():
        return {
            "loss": {
                "a": keras.losses.MeanSquaredError("mean_with_sample_weight"),
                "b": keras.losses.MeanAbsoluteError("mean_with_sample_weight"),
            },
            "loss_weights": {"a": 0.3, "b": 2.0},
            "metrics": {"a": ["mae"], "b": ["mse"]},
            "weighted_metrics": {"a": ["mae"], "b": ["mse"]},
        }

    check(two_heads, (x, y, weights), mode, options)


def test_a_mean_beside_a_sum_is_exact():
    def options():
        return {
            "loss": {
                "a": keras.losses.MeanSquaredError(),
                "b": keras.losses.MeanSquaredError(reduction="sum"),
            },
            # Else two steps on the sum amplify rounding tenfold.
            "loss_weights": {"a": 1.0, "b": 0.1},
        }

    check(two_heads, two_head_arrays(), "graph", options)


def test_the_loss_of_each_output_is_logged_over_batches_as_keras_logs_it():
    x, y = two_head_arrays()
    histories = []
    for split in (STEPS, None):
        model = two_heads()
        if split:
            ka.accumulate(model, **split)
        compile_in(model, "graph", sgd(), loss={"a": "mse", "b": "mae"})
        histories.append(fit(model, x[:10], {n: v[:10] for n, v in y.items()}, 5, 2))
    logs, expected = [history.history for history in histories]
    assert logs.keys() == expected.keys() >= {"a_loss", "b_loss", "loss"}
    for name in logs:
        assert_close(logs[name], expected[name], 2e-6, name)


# --------------------------------------------------------- losses of the user's own


def per_sample(y, y_pred):
    return keras.ops.mean(keras.ops.abs(y - y_pred) ** 3, axis=-1)


def scalar(y, y_pred):
    return keras.ops.mean(keras.ops.abs(y - y_pred) ** 3)


def test_a_loss_function_per_sample_is_exact():
    options = lambda: {"loss": per_sample, "metrics": [per_sample]}  # noqa: E731
    check(dense_model, data(SAMPLES), "graph", options)


def test_a_loss_function_that_returns_a_scalar_warns_and_weighs_by_samples():
    options = lambda: {"loss": scalar}  # noqa: E731
    with pytest.warns(UserWarning, match=UNKNOWN):
        check(dense_model, data(SAMPLES), "graph", options)


def test_a_scalar_loss_of_one_of_two_outputs_warns_and_weighs_by_samples():
    options = lambda: {"loss": {"a": scalar, "b": "mse"}}  # noqa: E731
    with pytest.warns(UserWarning, match=UNKNOWN):
        check(two_heads, two_head_arrays(), "graph", options)


def subclass_of_dense(**methods):
    """A functional model of a class of the user's with these methods."""
    cls = type("UserModel", (keras.Model,), methods)

    def make():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((5,))
        hidden = keras.layers.Dense(8, "tanh")(inputs)
        return cls(inputs, keras.layers.Dense(3)(hidden))

    return make


def with_penalty(self, x, y, y_pred, sample_weight=None, training=True):
    loss = keras.Model.compute_loss(self, x, y, y_pred, sample_weight)
    return 0.5 * loss + 0.1 * keras.ops.sum(self.layers[-1].kernel ** 2)


def of_keras_losses(self, x, y, y_pred, sample_weight=None):
    a = keras.losses.MeanSquaredError("mean_with_sample_weight")
    b = keras.losses.MeanAbsoluteError("sum")
    return a(y, y_pred, sample_weight) + 0.1 * b(y, y_pred)


def of_its_own(self, x, y, y_pred, sample_weight=None, training=True):
    errors = keras.ops.sum((y - y_pred) ** 2, axis=-1) * sample_weight
    return keras.ops.sum(errors) / keras.ops.sum(sample_weight)


def weight_of_its_own(self, x, y, y_pred, sample_weight):
    return keras.ops.sum(sample_weight)


@pytest.mark.slow_in("with_penalty")
@pytest.mark.parametrize("compute_loss", [with_penalty, of_keras_losses])
def test_a_compute_loss_that_calls_losses_of_keras_is_exact(compute_loss):
    make = subclass_of_dense(compute_loss=compute_loss)
    options = lambda: {  # noqa: E731
        "loss": keras.losses.MeanSquaredError("mean_with_sample_weight")
    }
    check(make, (*data(SAMPLES), uneven(SAMPLES)), "graph", options)


@pytest.mark.slow_in("eager")
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_compute_loss_with_a_hook_for_its_weight_is_exact(mode):
    make = subclass_of_dense(
        compute_loss=of_its_own, compute_loss_weight=weight_of_its_own
    )
    check(make, (*data(SAMPLES), uneven(SAMPLES)), mode)


def test_a_compute_loss_whose_weight_cannot_be_known_warns():
    make = subclass_of_dense(compute_loss=of_its_own)
    ones = np.ones(SAMPLES, "float32")
    with pytest.warns(UserWarning, match=UNKNOWN):
        check(make, (*data(SAMPLES), ones), "graph")


def test_the_hook_is_not_called_where_two_passes_make_it_needless():
    def never(*_):
        raise AssertionError("called")

    make = subclass_of_dense(compute_loss=of_its_own, compute_loss_weight=never)
    check(make, (*data(SAMPLES), uneven(SAMPLES)), "graph", two_pass=True)


# ------------------------------------------------------- regularisers and add_loss


class Penalty(keras.layers.Layer):
    """Adds the mean square of what passes, over samples."""

    def __init__(self, factor=0.3, with_loss=False, **options):
        super().__init__(**options)
        self.factor, self.with_loss = factor, with_loss
        self.supports_masking = True

    def call(self, inputs):
        flat = keras.ops.mean(inputs**2, axis=tuple(range(1, len(inputs.shape))))
        if self.with_loss:
            value = keras.losses.MeanSquaredError()(keras.ops.zeros_like(inputs), inputs)
        else:
            value = keras.ops.mean(flat)
        self.add_loss(self.factor * value)
        return inputs


@pytest.mark.slow_in("eager")
@pytest.mark.slow_in("xla")
def test_regularisers_count_once(mode):
    def make():
        return dense_model(
            kernel_regularizer=keras.regularizers.L2(0.1),
            bias_regularizer=keras.regularizers.L1(0.1),
            activity_regularizer=keras.regularizers.L2(0.05),
        )

    check(make, data(SAMPLES), mode)


@pytest.mark.slow_in("mean")
@pytest.mark.parametrize("with_loss", [False, True], ids=["mean", "loss of Keras"])
def test_what_a_layer_adds_to_the_loss_counts_once(with_loss):
    def make():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((5,))
        hidden = Penalty(with_loss=with_loss)(keras.layers.Dense(8, "tanh")(inputs))
        return keras.Model(inputs, keras.layers.Dense(3)(hidden))

    check(make, data(SAMPLES), "graph")


def masked_with(layers):
    def make():
        keras.utils.set_random_seed(2)
        embed = keras.layers.Embedding(11, 4, mask_zero=True)
        parts = [keras.Input((6,), dtype="int32"), embed, *layers()]
        return keras.Sequential([*parts, keras.layers.Dense(11)])

    return make


@pytest.mark.slow_but("add_loss")
@pytest.mark.parametrize(
    "layers",
    [
        lambda: [keras.layers.Dense(5, kernel_regularizer="l2")],
        lambda: [keras.layers.Dense(5, activity_regularizer="l2")],
        lambda: [keras.layers.Dense(5), Penalty()],
    ],
    ids=["kernel", "activity", "add_loss"],
)
def test_beside_a_masked_loss_additions_keep_their_own_share(layers):
    """A regulariser counts once, and an addition by its samples, not by its tokens."""
    check(masked_with(layers), tokens(), options=lambda: {"loss": cross_entropy()})


def test_a_model_that_has_only_added_losses_is_exact():
    def make():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((5,))
        return keras.Model(inputs, Penalty()(keras.layers.Dense(4)(inputs)))

    arrays, options = data(SAMPLES)[:1], lambda: {"loss": None}
    found = train_twice(make, arrays, "graph", STEPS, options=options)
    assert_same_step(found, train_twice(make, arrays, options=options))


# ------------------------------------------------------------ state inside the loop


class Following(keras.layers.Layer):
    """Keeps a metric of what passes."""

    def __init__(self, **options):
        super().__init__(**options)
        self.follow = keras.metrics.Mean(name="follow")
        self.supports_masking = True

    def call(self, inputs):
        self.follow.update_state(keras.ops.mean(inputs, axis=-1))
        return inputs


@pytest.mark.slow_in("xla")
@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_metrics_inside_layers_see_every_sample_once(mode):
    def make():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((5,))
        hidden = Following()(keras.layers.Dense(8, "tanh")(inputs))
        return keras.Model(inputs, keras.layers.Dense(3)(hidden))

    found = check(make, data(SAMPLES), mode)
    assert "follow" in found[1]


@pytest.mark.slow
def test_no_pass_but_the_counted_one_moves_state():
    """Where denominators come from a pass before."""
    options = lambda: {"loss": {n: cross_entropy() for n in "ab"}}  # noqa: E731
    make = lambda: two_texts(Following())  # noqa: E731
    found = check(make, two_text_arrays(), "graph", options)
    assert "follow" in found[1]


def test_metrics_with_a_state_of_many_numbers_are_exact():
    x, y = data(SAMPLES)
    y = (y[:, :1] > 0).astype("float32")

    def options():
        return {
            "loss": "binary_crossentropy",
            "metrics": [keras.metrics.AUC(name="auc"), keras.metrics.Precision(name="p")],
            "weighted_metrics": [keras.metrics.AUC(name="wauc")],
        }

    def make():
        keras.utils.set_random_seed(1)
        return keras.Sequential(
            [keras.Input((5,)), keras.layers.Dense(1, activation="sigmoid")]
        )

    check(make, (x, y, uneven(SAMPLES)), options=options)


def dropout_model():
    keras.utils.set_random_seed(5)
    return keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(8, "tanh"),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(3),
        ]
    )


@pytest.mark.slow_in("eager")
@pytest.mark.slow_in("xla")
def test_dropout_draws_anew_for_each_micro_batch_as_calls_in_turn_do(mode):
    x, y = data(SAMPLES)
    model, _ = train_twice(dropout_model, (x, y), mode, STEPS)
    # The same by hand: three calls in turn, weighted by their samples.
    keras.utils.set_random_seed(11)
    oracle = compile_in(dropout_model(), "eager", sgd())
    values = [v.value for v in oracle.trainable_variables]

    def by_hand():
        total = [tf.zeros_like(v) for v in values]
        for rows in (slice(0, 4), slice(4, 8), slice(8, 11)):
            with tf.GradientTape() as tape:
                errors = tf.square(oracle(x[rows], training=True) - y[rows])
                loss = tf.reduce_sum(errors) / (3 * SAMPLES)
            total = [t + g for t, g in zip(total, tape.gradient(loss, values))]
        oracle.optimizer.apply(total, oracle.trainable_variables)

    # XLA draws other random numbers from the same seed.
    by_hand = in_mode(by_hand, mode)
    by_hand()
    by_hand()
    assert_close(model.get_weights()[:4], oracle.get_weights()[:4])
    assert_equal(model.get_weights()[4:], oracle.get_weights()[4:])  # the seed
    large = train_twice(dropout_model, (x, y))[0]
    assert_differ(large.get_weights()[:4], oracle.get_weights()[:4])


def test_each_micro_batch_draws_a_mask_of_its_own():
    """Twelve equal samples in three micro-batches: the same mask would repeat."""

    class Noise(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.seed_generator = keras.random.SeedGenerator(3)
            zeros = {"initializer": "zeros", "trainable": False}
            self.drawn = self.add_weight(shape=(3,), name="drawn", **zeros)
            self.at = self.add_weight(shape=(), dtype="int32", name="at", **zeros)

        def call(self, inputs, training=False):
            if training:
                noise = keras.random.uniform((), seed=self.seed_generator)
                here = tf.one_hot(tf.convert_to_tensor(self.at) % 3, 3)
                self.drawn.assign_add(here * noise)
                self.at.assign_add(1)
                inputs = inputs * noise
            return inputs

    def make():
        return keras.Sequential([keras.Input((5,)), Noise(), keras.layers.Dense(3)])

    model = ka.accumulate(make(), **STEPS)
    compile_in(model, "graph", sgd())
    model.train_on_batch(*data(12))
    drawn = model.layers[0].drawn.numpy()
    assert len(set(drawn.tolist())) == 3
    assert int(model.layers[0].at) == 3
    twin = keras.random.SeedGenerator(3)
    again = [float(keras.random.uniform((), seed=twin)) for _ in range(3)]
    assert_close(drawn, np.array(again))


@pytest.mark.slow
def test_a_run_is_reproducible_from_the_random_seed():
    def run(seed):
        keras.utils.set_random_seed(seed)
        model = keras.Sequential(
            [keras.Input((5,)), keras.layers.Dropout(0.5), keras.layers.Dense(3)]
        )
        compile_in(ka.accumulate(model, **STEPS), "graph", sgd())
        model.fit(*data(), batch_size=SAMPLES, epochs=2, verbose=0)
        return model.get_weights()

    assert_equal(run(3), run(3))
    assert_differ(run(4)[:1], run(3)[:1])


# ------------------------------------------------------------------ kinds of inputs


def test_several_inputs_as_a_list_are_exact():
    def make():
        keras.utils.set_random_seed(1)
        inputs = [keras.Input((5,)), keras.Input((2,))]
        joined = keras.layers.Concatenate()(inputs)
        return keras.Model(inputs, keras.layers.Dense(3)(joined))

    x, y = data(SAMPLES)
    check(make, ([x, x[:, :2] * 2], y))


@pytest.mark.slow_in("eager")
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_inputs_in_a_dictionary_are_exact_through_fit(mode):
    x, y = data(SAMPLES)
    inputs = {"left": x, "right": x[:, :2] * 2}

    def make():
        keras.utils.set_random_seed(1)
        sizes = {"left": 5, "right": 2}
        ins = {n: keras.Input((size,), name=n) for n, size in sizes.items()}
        joined = keras.layers.Concatenate()(list(ins.values()))
        return keras.Model(ins, keras.layers.Dense(3)(joined))

    model = compile_in(ka.accumulate(make(), micro_batch_size=2), mode, sgd())
    oracle = compile_in(make(), "graph", sgd())
    logs = fit(model, inputs, y, 7, 2).history
    expected = fit(oracle, inputs, y, 7, 2).history
    assert_close(model.get_weights(), oracle.get_weights())
    assert_close(logs["loss"], expected["loss"], 2e-6)


@pytest.mark.slow_in("eager")
@pytest.mark.parametrize("how", ["eager", "graph"])
def test_ragged_inputs_are_exact(how):
    """Sequences of their own lengths, embedded and summed."""
    rows = [[1, 2], [3], [4, 5, 6, 7], [8], [], [9, 1, 2], [5], [6, 6], [7], [1], [2, 3]]
    x, (_, y) = tf.ragged.constant(rows, dtype="int32"), data(SAMPLES)

    class Bag(keras.Model):
        def __init__(self):
            super().__init__()
            self.table = self.add_weight(shape=(11, 3), name="table")

        def call(self, x):
            return tf.reduce_sum(tf.gather(tf.convert_to_tensor(self.table), x), axis=1)

    def make():
        keras.utils.set_random_seed(1)
        model = Bag()
        model.built = True
        return model

    batches = tf.data.Dataset.from_tensors((x, y)).repeat(2)
    model = compile_in(ka.accumulate(make(), **STEPS), how, sgd())
    oracle = compile_in(make(), "eager", sgd())
    logs = model.fit(batches, shuffle=False, verbose=0).history
    expected = oracle.fit(batches, shuffle=False, verbose=0).history
    assert_close(model.get_weights(), oracle.get_weights())
    assert_close(logs["loss"], expected["loss"], 2e-6)


def test_recurrent_layers_with_masks_are_exact():
    def make():
        keras.utils.set_random_seed(2)
        return keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                keras.layers.Embedding(11, 4, mask_zero=True),
                keras.layers.LSTM(4, return_sequences=True),
                keras.layers.Dense(11),
            ]
        )

    check(make, tokens(), "graph", lambda: {"loss": cross_entropy()})


@pytest.mark.slow
def test_two_recurrent_outputs_with_two_masks_are_exact():
    def make():
        keras.utils.set_random_seed(2)
        sizes = {"in_a": 6, "in_b": 4}
        ins = {n: keras.Input((size,), name=n) for n, size in sizes.items()}
        embed = keras.layers.Embedding(11, 4, mask_zero=True)
        rnn = keras.layers.SimpleRNN(4, return_sequences=True)
        outs = {
            n: keras.layers.Dense(11, name=n)(rnn(embed(ins[f"in_{n}"]))) for n in "ab"
        }
        return keras.Model(ins, outs)

    options = lambda: {"loss": {n: cross_entropy() for n in "ab"}}  # noqa: E731
    check(make, two_text_arrays(), "graph", options)


def test_sequences_of_another_length_in_each_batch_are_exact():
    def make():
        keras.utils.set_random_seed(2)
        return keras.Sequential(
            [
                keras.Input((None,), dtype="int32"),
                keras.layers.Embedding(11, 4, mask_zero=True),
                keras.layers.Dense(11),
            ]
        )

    def batches():
        yield tokens()
        yield tokens(7, 4)
        yield tokens(2, 9)

    spec = tf.TensorSpec((None, None), "int32")
    dataset = tf.data.Dataset.from_generator(batches, output_signature=(spec, spec))
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(3))
    results = []
    for split in (STEPS, None):
        model = make()
        if split:
            ka.accumulate(model, **split)
        compile_in(model, "graph", sgd(), loss=cross_entropy())
        results.append(
            (model, model.fit(dataset, shuffle=False, verbose=0).history["loss"])
        )
    (model, logs), (oracle, expected) = results
    assert_close(model.get_weights(), oracle.get_weights())
    assert_close(logs, expected, 2e-6)


# ----------------------------------------------------------------- kinds of models


class Subclassed(keras.Model):
    """Built by its first batch."""

    def __init__(self, units=8, **options):
        super().__init__(**options)
        self.units = units
        self.hidden = keras.layers.Dense(units, "tanh")
        self.out = keras.layers.Dense(3)

    def call(self, inputs):
        return self.out(self.hidden(inputs))

    def get_config(self):
        return {**super().get_config(), "units": self.units}


def sequential(built=True):
    layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((5,)), *layers] if built else layers)


@pytest.mark.parametrize(
    ("make", "how"),
    [
        pytest.param(sequential, "fit", id="sequential"),
        pytest.param(lambda: sequential(built=False), "fit", id="unbuilt sequential"),
        pytest.param(dense_model, "fit", id="functional"),
        pytest.param(Subclassed, "fit", id="unbuilt subclassed"),
        pytest.param(Subclassed, "train_on_batch", id="unbuilt, train_on_batch"),
    ],
)
def test_every_kind_of_model_is_exact(make, how):
    x, y = data(SAMPLES)
    results = []
    for split in (STEPS, None):
        keras.utils.set_random_seed(1)
        model = make()
        if split:
            assert ka.accumulate(model, **split) is model
        model.compile("sgd", "mse", metrics=["mae"], jit_compile=False)
        if how == "fit":
            fit(model, x, y, 6, 2)
        else:
            model.train_on_batch(x, y)
        results.append(model)
    assert_close(results[0].get_weights(), results[1].get_weights())
    assert_close(slots(results[0].optimizer), slots(results[1].optimizer), 1e-5)


@keras.saving.register_keras_serializable("test_train_step")
class Registered(Subclassed):
    pass


@pytest.mark.slow_but("sequential")
@pytest.mark.parametrize("kind", [sequential, dense_model, Registered])
def test_what_is_saved_is_the_users_model(kind, tmp_path):
    x, y = data(SAMPLES)
    keras.utils.set_random_seed(1)
    model = kind()
    model(x)
    plain_config, plain_class = model.get_config(), type(model)
    compile_in(ka.accumulate(model, **STEPS), "graph", sgd())
    model.train_on_batch(x, y)
    assert type(model) is plain_class
    assert model.get_config() == plain_config
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded) is plain_class
    assert "train_step" not in vars(loaded)
    assert_equal(loaded.get_weights(), model.get_weights())
    assert_equal(slots(loaded.optimizer), slots(model.optimizer))
    # And a loaded model accumulates, where it is passed again.
    oracle = keras.models.load_model(tmp_path / "model.keras")
    oracle.train_on_batch(x, y)
    ka.accumulate(loaded, **STEPS).train_on_batch(x, y)
    assert_close(loaded.get_weights(), oracle.get_weights())


def test_weights_are_saved_under_the_users_names(tmp_path):
    model = compile_in(ka.accumulate(dense_model(), **STEPS), "graph", sgd())
    model.train_on_batch(*data(SAMPLES))
    model.save_weights(tmp_path / "a.weights.h5")
    other = dense_model()
    assert_differ(other.get_weights(), model.get_weights())
    other.load_weights(tmp_path / "a.weights.h5")
    assert_equal(other.get_weights(), model.get_weights())


def count_calls(model):
    """Each time that the last layer is called, in eager mode: one per micro-batch."""
    calls, layer = [], model.layers[-1]
    original = layer.call
    layer.call = lambda *a, **k: (calls.append(1), original(*a, **k))[1]
    return calls


def test_passing_a_model_again_changes_its_split():
    calls_for = []
    x, y = data(12)
    model = compile_in(dense_model(), "eager", sgd())
    model.train_on_batch(x, y)  # builds metrics, which calls it too
    calls = count_calls(model)
    for steps in (2, 4):
        ka.accumulate(model, accum_steps=steps)
        calls.clear()
        model.train_on_batch(x, y)
        calls_for.append(len(calls))
    # What the loss is made of is found out once, by one more call.
    assert calls_for == [2 + 1, 4]


def test_a_model_can_be_asked_how_it_accumulates(tmp_path):
    model = dense_model()
    assert not hasattr(model, "accumulation")
    ka.accumulate(model, micro_batch_size=4, on_oom="halve")
    assert model.accumulation == settings_of(model)
    assert repr(model.accumulation) == (
        "Settings(accum_steps=None, micro_batch_size=4, two_pass=False, on_oom='halve')"
    )
    ka.accumulate(model, accum_steps=2, two_pass=True)
    assert model.accumulation == settings_of(model)
    assert model.accumulation.accum_steps == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        model.accumulation.accum_steps = 3
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert not hasattr(loaded, "accumulation")

    own = ka.GradientAccumulationModel(model.inputs, model.outputs, accum_steps=3)
    assert own.accumulation == settings_of(own)
    ka.accumulate(own, micro_batch_size=5)
    assert own.accumulation.micro_batch_size == 5
    with pytest.raises(AttributeError):
        own.accumulation = None


@pytest.mark.slow_in("eager")
@pytest.mark.parametrize("how", ["eager", "graph"])
def test_deleting_the_train_step_undoes_it(how):
    traced = []

    class Rows(keras.layers.Layer):
        def call(self, inputs, training=False):
            if training:
                traced.append(inputs.shape[0])
            return inputs

    model = keras.Sequential([keras.Input((5,)), Rows(), keras.layers.Dense(3)])
    compile_in(ka.accumulate(model, **STEPS), how, sgd())
    x, y = data(SAMPLES)
    model.train_on_batch(x, y)
    traced.clear()
    del model.train_step, model.make_train_function, model.accumulation
    assert "train_step" not in vars(model)
    compile_in(model, how, sgd())
    model.train_on_batch(x, y)
    assert traced == [SAMPLES]


def test_a_model_with_a_train_step_of_its_own_is_refused():
    class Own(keras.Model):
        def train_step(self, data):
            return {}

    assert_refused(
        lambda: ka.accumulate(Own(name="mine"), accum_steps=2),
        ValueError,
        "'mine' has a `train_step` of its own (Own.train_step), which cannot be taken "
        "apart from outside. Accumulate in the optimizer instead: "
        "`model.compile(AccumOptimizer(optimizer, accum_steps=k), "
        "steps_per_execution=k)`, with data that yield micro-batches; or call "
        "`accumulate_gradients` in that `train_step`.",
    )


@pytest.mark.parametrize("of", ["accumulate", "GradientAccumulationModel"])
@pytest.mark.parametrize(
    ("split", "error", "message"),
    [
        (
            {},
            ValueError,
            "A batch is split by exactly one of `accum_steps` (how many micro-batches it "
            "makes) and `micro_batch_size` (how many samples each has). Received: "
            "accum_steps=None, micro_batch_size=None",
        ),
        (
            {"accum_steps": 2, "micro_batch_size": 4},
            ValueError,
            "A batch is split by exactly one of `accum_steps` (how many micro-batches it "
            "makes) and `micro_batch_size` (how many samples each has). Received: "
            "accum_steps=2, micro_batch_size=4",
        ),
        (
            {"accum_steps": 0},
            ValueError,
            "`accum_steps` must be at least 1. Received: 0",
        ),
        (
            {"micro_batch_size": 2.0},
            TypeError,
            "`micro_batch_size` must be an integer. Received: 2.0",
        ),
    ],
)
def test_a_split_that_is_none_is_refused(of, split, error, message):
    def construct():
        if of == "accumulate":
            return ka.accumulate(dense_model(), **split)
        inputs = keras.Input((5,))
        return ka.GradientAccumulationModel(
            inputs, keras.layers.Dense(3)(inputs), **split
        )

    assert_refused(construct, error, message)


def test_a_refused_model_is_left_as_it_was():
    model = dense_model()
    with pytest.raises(ValueError):
        ka.accumulate(model)
    assert "train_step" not in vars(model)


# ------------------------------------------------------- GradientAccumulationModel


def accumulating(**split):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((5,))
    hidden = keras.layers.Dense(8, "tanh")(inputs)
    return ka.GradientAccumulationModel(inputs, keras.layers.Dense(3)(hidden), **split)


class OwnModel(ka.GradientAccumulationModel):
    """Subclassed, with arguments of its own, and not registered."""

    def __init__(self, units=8, **options):
        options.setdefault("accum_steps", 3)
        super().__init__(**options)
        self.units = units
        self.hidden = keras.layers.Dense(units, "tanh")
        self.out = keras.layers.Dense(3)

    def call(self, inputs):
        return self.out(self.hidden(inputs))

    def get_config(self):
        return {**super().get_config(), "units": self.units}


@keras.saving.register_keras_serializable("test_train_step")
class OwnRegisteredModel(OwnModel):
    pass


@keras.saving.register_keras_serializable("test_train_step")
class Either(ka.GradientAccumulationModel):
    """To be used with inputs and outputs, or without."""

    def __init__(self, *args, **options):
        super().__init__(*args, **{"accum_steps": 2, **options})
        self.functional = bool(args)
        self.only = None if args else keras.layers.Dense(3)

    def call(self, inputs, training=None, mask=None):
        if self.functional:
            return super().call(inputs, training=training, mask=mask)
        return self.only(inputs)


@pytest.mark.slow_in("eager")
@pytest.mark.parametrize(
    ("split", "mode"),
    [
        (STEPS, "graph"),
        ({"micro_batch_size": 4}, "eager"),
        ({"micro_batch_size": 4}, "xla"),
    ],
)
@pytest.mark.slow_in("xla")
def test_a_functional_accumulating_model_is_exact(split, mode):
    x, y = data(SAMPLES)
    model = compile_in(accumulating(**split), mode, sgd(), metrics=["mae"])
    oracle = compile_in(dense_model(), "eager", sgd(), metrics=["mae"])
    assert_close(
        model.train_on_batch(x, y), oracle.train_on_batch(x, y), 2e-6, "loss and metrics"
    )
    assert_close(model.get_weights(), oracle.get_weights())
    naive = mean_of_means(dense_model, (x, y), SIZES)
    oracle.train_on_batch(x, y)
    assert_differ(naive.get_weights(), oracle.get_weights())


def test_a_subclassed_accumulating_model_is_exact():
    x, y = data(SAMPLES)
    results = []
    for cls in (OwnModel, Subclassed):
        keras.utils.set_random_seed(1)
        model = cls()
        model.compile("sgd", "mse", jit_compile=False)
        fit(model, x, y, 6, 2)
        results.append(model.get_weights())
    assert_close(*results)


@pytest.mark.slow_in("True")
@pytest.mark.parametrize(
    ("split", "two_pass"), [(STEPS, True), ({"micro_batch_size": 4}, False)]
)
def test_a_saved_accumulating_model_keeps_its_settings(split, two_pass, tmp_path):
    x, y = data(SAMPLES)
    model = compile_in(accumulating(**split, two_pass=two_pass), "graph", sgd())
    model.train_on_batch(x, y)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(loaded, ka.GradientAccumulationModel)
    assert type(loaded) is type(model)
    found = (loaded.accum_steps, loaded.micro_batch_size, loaded.two_pass)
    assert found == (split.get("accum_steps"), split.get("micro_batch_size"), two_pass)
    assert_equal(loaded.get_weights(), model.get_weights())
    assert loaded.to_json() == model.to_json()
    for each in (model, loaded):
        each.train_on_batch(x, y)
    assert_equal(loaded.get_weights(), model.get_weights())


def test_a_clone_accumulates_as_the_model_does():
    model = accumulating(micro_batch_size=4, two_pass=True, on_oom="halve")
    other = accumulating(accum_steps=3)
    clone = keras.models.clone_model(model)
    assert isinstance(clone, ka.GradientAccumulationModel)
    found = (clone.micro_batch_size, clone.accum_steps, clone.two_pass, clone.on_oom)
    assert found == (4, None, True, "halve")
    assert keras.models.clone_model(other).accum_steps == 3
    assert keras.models.clone_model(clone).micro_batch_size == 4
    # As it does now, not as it was made; and others made likewise stay as they are.
    twin = accumulating(accum_steps=3)
    ka.accumulate(other, accum_steps=5)
    assert keras.models.clone_model(other).accum_steps == 5
    assert keras.models.clone_model(twin).accum_steps == 3


def test_models_of_equal_settings_have_one_class():
    model = accumulating(accum_steps=3)
    clone = keras.models.clone_model(model)
    assert type(clone) is type(model) is type(accumulating(accum_steps=3))
    # Made by the class of a model with other settings, they are the new one's.
    inputs = keras.Input((5,))
    other = type(model)(inputs, keras.layers.Dense(3)(inputs), accum_steps=5)
    assert other.accum_steps == keras.models.clone_model(other).accum_steps == 5
    assert keras.models.clone_model(model).accum_steps == 3


def test_a_model_trains_by_other_settings_for_a_while():
    model = accumulating(accum_steps=3)
    kind, before = type(model), dict(vars(model))
    with trained_by(model, Settings(micro_batch_size=2, two_pass=True)):
        assert (model.micro_batch_size, model.accum_steps) == (2, None)
        assert model.two_pass
        assert type(model) is kind
        assert keras.models.clone_model(model).accum_steps == 3
    assert vars(model) == before
    plain = dense_model()
    before = dict(vars(plain))
    with trained_by(plain, Settings(accum_steps=2)):
        assert settings_of(plain) == Settings(accum_steps=2)
    assert vars(plain) == before
    assert settings_of(plain) is None


def test_a_config_from_before_two_passes_and_running_out_of_memory_loads():
    model = accumulating(accum_steps=3, two_pass=True, on_oom="halve")
    config = model.get_config()
    del config["on_oom"]
    loaded = type(model).from_config(config)
    assert settings_of(loaded) == Settings(accum_steps=3, two_pass=True)
    del config["two_pass"]
    loaded = ka.GradientAccumulationModel.from_config(config)
    assert settings_of(loaded) == Settings(accum_steps=3)


def test_a_pickled_model_accumulates_as_the_model_does():
    x, y = data()
    model = accumulating(accum_steps=3, two_pass=True)
    model.compile(keras.optimizers.Adam(), "mse", jit_compile=False)
    model.train_on_batch(x, y)
    loaded = pickle.loads(pickle.dumps(model))
    assert (loaded.accum_steps, loaded.two_pass) == (3, True)
    before = loaded.get_weights()
    for each in (model, loaded):
        each.train_on_batch(x, y)
    assert_equal(loaded.get_weights(), model.get_weights())
    assert_differ(loaded.get_weights(), before)


def test_a_clone_has_its_normalization_converted():
    inputs = keras.Input((5,))
    outputs = keras.layers.BatchNormalization()(inputs)
    model = ka.GradientAccumulationModel(inputs, outputs, accum_steps=3)
    convert = ka.AccumBatchNormalization.convert
    clone = keras.models.clone_model(model, clone_function=convert)
    assert [type(x) for x in clone.layers[1:]] == [ka.AccumBatchNormalization]
    assert clone.accum_steps == 3


@pytest.mark.parametrize("kind", ["class", "in place"])
def test_accumulating_anew_leaves_what_it_is_not_told(kind):
    if kind == "class":
        model = accumulating(**STEPS, two_pass=True, on_oom="halve")
    else:
        model = ka.accumulate(dense_model(), **STEPS, two_pass=True, on_oom="halve")
    settings = []
    for more in ({}, {"two_pass": False}, {"on_oom": "raise"}, {"two_pass": True}):
        ka.accumulate(model, micro_batch_size=4, **more)
        found = settings_of(model)
        settings.append((found.two_pass, found.on_oom))
    expected = [(True, "halve"), (False, "halve"), (False, "raise"), (True, "raise")]
    assert settings == expected


def test_what_is_no_model_is_refused():
    assert_refused(
        lambda: ka.accumulate("a path", **STEPS),
        TypeError,
        "`model` must be a `keras.Model`. Received: 'a path'",
    )


@pytest.mark.slow_but("OwnModel")
@pytest.mark.parametrize("cls", [OwnModel, OwnRegisteredModel])
def test_a_saved_subclass_is_loaded(cls, tmp_path):
    x, y = data(SAMPLES)
    model = cls(units=6)
    model.compile("sgd", "mse", jit_compile=False)
    model.train_on_batch(x, y)
    model.save(tmp_path / "model.keras")
    custom = None if cls is OwnRegisteredModel else {"OwnModel": OwnModel}
    loaded = keras.models.load_model(tmp_path / "model.keras", custom)
    assert type(loaded) is cls
    assert (loaded.units, loaded.accum_steps) == (6, 3)
    assert_equal(loaded.get_weights(), model.get_weights())


def test_functional_use_of_a_class_does_not_change_the_class(tmp_path):
    """Keras makes all later models of a class functional. Here, only those that are."""
    x, _ = data(SAMPLES)
    bases = Either.__bases__, ka.GradientAccumulationModel.__bases__
    before = Either()
    inputs = keras.Input((5,))
    functional = Either(inputs, keras.layers.Dense(4)(inputs))
    after = Either()
    assert (Either.__bases__, ka.GradientAccumulationModel.__bases__) == bases
    assert isinstance(functional, Either)
    assert functional(x).shape == (SAMPLES, 4)
    assert before(x).shape == after(x).shape == (SAMPLES, 3)
    assert type(before) is type(after) is Either
    # The registered name still belongs to the user's class.
    registered = keras.saving.get_registered_object("test_train_step>Either")
    assert registered is Either
    functional.save(tmp_path / "functional.keras")
    loaded = keras.models.load_model(tmp_path / "functional.keras")
    assert_equal(loaded(x), functional(x))


def test_a_subclass_is_loaded_after_functional_use_of_its_class(tmp_path):
    x, _ = data(SAMPLES)
    inputs = keras.Input((5,))
    Either(inputs, keras.layers.Dense(4)(inputs))
    model = Either()
    model(x)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded) is Either
    assert_equal(loaded(x), model(x))


# -------------------------------------------------------------------- with route 1


@pytest.mark.slow_in("tokens")
@pytest.mark.parametrize(
    ("sizes", "masked"),
    [
        pytest.param((5, 6), False, id="samples"),
        pytest.param((9, 2), True, id="tokens"),
        pytest.param((9, 2), False, id="samples 9, 2", marks=pytest.mark.slow),
        pytest.param((5, 6), True, id="tokens 5, 6", marks=pytest.mark.slow),
    ],
)
def test_windows_of_windows_multiply_and_carry_their_weights(sizes, masked):
    """Two steps of three micro-batches make one update: that of all their samples."""
    arrays = tokens() if masked else data(SAMPLES)
    make = token_model if masked else dense_model
    loss = cross_entropy() if masked else "mse"
    model = ka.accumulate(make(), **STEPS)
    compile_in(model, "graph", ka.AccumOptimizer(sgd(), 2), loss)
    bounds = np.cumsum([0, *sizes])
    parts = [[a[i:j] for a in arrays] for i, j in pairwise(bounds)]
    for part in parts * 2:
        model.train_on_batch(*part)
    oracle = train_twice(make, arrays, options=lambda: {"loss": loss})[0]
    assert_close(model.get_weights(), oracle.get_weights())
    assert_close(slots(model.optimizer), slots(oracle.optimizer), 1e-5)
    assert int(model.optimizer.iterations) == 2
    # The mean of the two windows' means is another update.
    naive = mean_of_means(make, arrays, sizes, lambda: {"loss": loss})
    assert_differ(naive.get_weights(), oracle.get_weights())


def test_a_sum_over_windows_of_windows_is_the_sum_over_all():
    x, y = data(SAMPLES)
    loss = keras.losses.MeanSquaredError(reduction="sum")
    model = ka.accumulate(dense_model(), **STEPS)
    compile_in(model, "graph", ka.AccumOptimizer(sgd(), 2, reduction="sum"), loss)
    model.train_on_batch(x[:4], y[:4])
    model.train_on_batch(x[4:], y[4:])
    oracle = compile_in(dense_model(), "eager", sgd(), loss)
    oracle.train_on_batch(x, y)
    assert_close(model.get_weights(), oracle.get_weights())


@pytest.mark.slow
def test_two_outputs_in_windows_of_windows_are_exact():
    """Where the denominators of both outputs are proportional from step to step."""
    x, y = two_head_arrays()
    options = lambda: {"loss": {"a": "mse", "b": "mae"}}  # noqa: E731
    model = ka.accumulate(two_heads(), **STEPS)
    compile_in(model, "graph", ka.AccumOptimizer(sgd(), 2), **options())
    for _ in range(2):
        for rows in (slice(0, 9), slice(9, 11)):
            model.train_on_batch(x[rows], {n: v[rows] for n, v in y.items()})
    oracle = train_twice(two_heads, (x, y), options=options)[0]
    assert_close(model.get_weights(), oracle.get_weights())


# ----------------------------------------------------------------- mixed precision


def half_model(policy=None):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((5,))
    hidden = keras.layers.Dense(8, "tanh", dtype=policy)(inputs)
    return keras.Model(inputs, keras.layers.Dense(3, dtype="float32")(hidden))


HALF = 3e-3  # float16 holds 11 bits; the micro-batches round in another order


@pytest.mark.slow_but("keras-global-graph")
@pytest.mark.slow_in("xla")
@pytest.mark.parametrize(
    ("scaler", "policy", "mode"),
    [
        ("keras", "global", "graph"),
        ("keras", "of the model", "eager"),
        ("AccumOptimizer", "global", "graph"),
        ("AccumOptimizer", "of the model", "xla"),
    ],
)
def test_mixed_float16_is_scaled_once(scaler, policy, mode):
    if policy == "global":
        keras.config.set_dtype_policy("mixed_float16")
        make = half_model
    else:
        make = lambda: half_model("mixed_float16")  # noqa: E731
    x, y = data(SAMPLES)
    scaled = lambda: keras.optimizers.LossScaleOptimizer(sgd(), 2.0**10)  # noqa: E731
    wrap = lambda: ka.AccumOptimizer(scaled(), 1)  # noqa: E731
    found = train_twice(
        make, (x, y), mode, STEPS, optimizer=scaled if scaler == "keras" else wrap
    )
    oracle = train_twice(make, (x, y), optimizer=scaled)
    assert_close(found[0].get_weights(), oracle[0].get_weights(), HALF)
    assert_close(found[1]["loss"], oracle[1]["loss"], HALF)
    assert int(found[0].optimizer.iterations) == 2
    assert float(found[0].optimizer.dynamic_scale) == 2.0**10
    assert_differ(found[0].get_weights(), make().get_weights(), by=0.05)


@pytest.mark.slow_but("keras")
@pytest.mark.parametrize("scaler", ["keras", "AccumOptimizer"])
def test_an_overflow_in_one_micro_batch_skips_the_update_and_halves_once(scaler):
    keras.config.set_dtype_policy("mixed_float16")
    x, y = data(12)
    bad = y.copy()
    bad[5] = 1e30  # in the second of three micro-batches
    optimizer = keras.optimizers.LossScaleOptimizer(sgd(), 2.0**10)
    if scaler != "keras":
        optimizer = ka.AccumOptimizer(optimizer, 1)
    model = compile_in(ka.accumulate(half_model(), **STEPS), "graph", optimizer)
    before = model.get_weights()
    model.train_on_batch(x, bad)
    assert_equal(model.get_weights(), before)
    assert float(optimizer.dynamic_scale) == 2.0**9
    assert int(optimizer.iterations) == 0
    model.train_on_batch(x, y)
    assert int(optimizer.iterations) == 1
    assert np.isfinite(np.concatenate([w.ravel() for w in model.get_weights()])).all()


def test_small_gradients_survive_in_float16_because_the_loss_is_scaled():
    keras.config.set_dtype_policy("mixed_float16")
    x, y = data(SAMPLES)

    def run(optimizer):
        model = ka.accumulate(half_model(), **STEPS)
        loss = lambda t, p: 1e-9 * tf.reduce_sum(tf.square(t - p), -1)  # noqa: E731
        model.compile(optimizer, loss, jit_compile=False)
        before = model.get_weights()
        model.train_on_batch(x, y)
        return [a - b for a, b in zip(model.get_weights()[:1], before)]

    (moved,) = run(keras.optimizers.SGD(1e6))
    assert np.count_nonzero(moved) == moved.size


@pytest.mark.slow_in("float16")
@pytest.mark.parametrize("policy", ["bfloat16", "float16"])
def test_models_all_in_half_precision_train(policy):
    x, y = data(SAMPLES)
    keras.config.set_dtype_policy(policy)
    found = train_twice(dense_model, (x, y), "graph", STEPS)
    oracle = train_twice(dense_model, (x, y))
    # bfloat16 holds 8 bits.
    assert [w.dtype for w in found[0].weights] == [policy] * 4
    tolerance = 3e-2 if policy == "bfloat16" else 5e-3
    as_float = lambda m: [np.asarray(w, "float32") for w in m.get_weights()]  # noqa: E731
    assert_close(as_float(found[0]), as_float(oracle[0]), tolerance)


# ------------------------------------------------------------------- ways of running


@pytest.mark.slow_in("2")
@pytest.mark.parametrize("steps", [2, 5])
def test_several_steps_per_execution_with_a_short_last_batch_are_exact(steps):
    x, y = data(26)
    model = ka.accumulate(dense_model(), micro_batch_size=2)
    compile_in(model, "graph", sgd(), metrics=["mae"], steps_per_execution=steps)
    oracle = compile_in(dense_model(), "graph", sgd(), metrics=["mae"])
    logs = fit(model, x, y, 7, 2, validation_data=(x[:9], y[:9])).history
    expected = fit(oracle, x, y, 7, 2, validation_data=(x[:9], y[:9])).history
    assert_close(model.get_weights(), oracle.get_weights())
    assert int(model.optimizer.iterations) == 8
    assert logs.keys() == expected.keys()
    for name in logs:
        assert_close(logs[name], expected[name], 2e-6, name)


@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_a_short_last_batch_is_exact_in_every_mode(mode):
    x, y = tokens(26)
    make = token_model
    results = []
    for split in (STEPS, None):
        model = make()
        if split:
            ka.accumulate(model, **split)
        compile_in(model, mode if split else "graph", sgd(), cross_entropy())
        results.append((model, fit(model, x, y, 12, 2).history))
    (model, logs), (oracle, expected) = results
    assert_close(model.get_weights(), oracle.get_weights())
    assert_close(logs["loss"], expected["loss"], 2e-6)


@pytest.mark.slow
def test_the_model_is_traced_as_often_whatever_the_number_of_micro_batches():
    traces = []

    class Counting(keras.layers.Layer):
        def call(self, inputs):
            traces.append(1)
            return inputs

    def count(**split):
        inputs = keras.Input((5,))
        outputs = keras.layers.Dense(3)(Counting()(inputs))
        model = ka.accumulate(keras.Model(inputs, outputs), **split)
        compile_in(model, "graph", keras.optimizers.SGD())
        traces.clear()
        fit(model, *data(26), 8, 3)
        return len(traces)

    counts = [
        count(**split)
        for split in (
            {"accum_steps": 1},
            {"accum_steps": 3},
            {"accum_steps": 8},
            {"micro_batch_size": 3},
        )
    ]
    assert len(set(counts)) == 1
    assert counts[0] <= 3  # the terms of the loss are looked at once; then the loop


def test_the_step_is_traced_once_for_batches_of_every_size():
    traces = []

    class Counting(keras.layers.Layer):
        def call(self, inputs):
            traces.append(1)
            return inputs

    inputs = keras.Input((5,))
    outputs = keras.layers.Dense(3)(Counting()(inputs))
    model = ka.accumulate(keras.Model(inputs, outputs), **STEPS)
    compile_in(model, "graph", keras.optimizers.SGD())
    x, y = data(26)

    def batches(*sizes):
        for size in sizes:
            yield x[:size], y[:size]

    signature = (tf.TensorSpec((None, 5)), tf.TensorSpec((None, 3)))

    def dataset(*sizes):
        found = tf.data.Dataset.from_generator(
            lambda: batches(*sizes), output_signature=signature
        )
        return found.apply(tf.data.experimental.assert_cardinality(len(sizes)))

    model.fit(dataset(9, 4), shuffle=False, verbose=0)
    first = len(traces)
    model.fit(dataset(1, 2, 3, 13, 26), shuffle=False, verbose=0)
    assert len(traces) == first


def adamw():
    return keras.optimizers.AdamW(0.01, weight_decay=0.1, clipnorm=0.1)


def clipped():
    return keras.optimizers.SGD(0.5, global_clipnorm=0.1)


def averaging():
    return keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=2)


def scheduled():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
    return keras.optimizers.SGD(schedule, clipvalue=0.02)


@pytest.mark.slow_but("scheduled-graph")
@pytest.mark.slow_in("xla")
@pytest.mark.parametrize(
    ("optimizer", "mode"),
    [
        (clipped, "graph"),
        (adamw, "graph"),
        (averaging, "graph"),
        (scheduled, "graph"),
        (adamw, "xla"),
    ],
)
def test_optimizers_see_the_gradient_of_the_large_batch(optimizer, mode):
    arrays = (*data(SAMPLES), uneven(SAMPLES))
    options = lambda: {  # noqa: E731
        "loss": keras.losses.MeanSquaredError("mean_with_sample_weight")
    }
    found = train_twice(
        dense_model, arrays, mode, STEPS, optimizer=optimizer, options=options
    )
    # Adam's division by its own statistics turns rounding into 2e-5.
    rtol = 1e-6 if optimizer().name == "sgd" else 2e-5
    assert_same_step(
        found,
        train_twice(dense_model, arrays, optimizer=optimizer, options=options),
        rtol,
    )


def test_frozen_layers_stay_as_they_are():
    def make():
        model = dense_model()
        model.layers[1].trainable = False
        return model

    found = check(make, data(SAMPLES))
    assert_equal(found[0].get_weights()[:2], make().get_weights()[:2])


def test_a_model_without_trainable_weights_warns_as_keras_does():
    model = dense_model()
    model.trainable = False
    ka.accumulate(model, **STEPS).compile("sgd", "mse", jit_compile=False)
    with pytest.warns(UserWarning, match="does not have any trainable weights"):
        logs = model.train_on_batch(*data(SAMPLES), return_dict=True)
    oracle = dense_model()
    oracle.compile("sgd", "mse", jit_compile=False)
    expected = oracle.test_on_batch(*data(SAMPLES), return_dict=True)
    assert_close(logs["loss"], expected["loss"], 2e-6)


def test_weights_that_the_loss_does_not_reach_are_left_alone():
    def make():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((5,))
        aside = keras.layers.Dense(2, name="b")(inputs)
        return keras.Model(
            inputs, {"a": keras.layers.Dense(3, name="a")(inputs), "b": aside}
        )

    x, y = data(SAMPLES)
    options = lambda: {"loss": {"a": "mse", "b": None}}  # noqa: E731
    optimizer = lambda: keras.optimizers.SGD(0.2, weight_decay=0.1)  # noqa: E731
    arrays = (x, {"a": y, "b": y[:, :2]})
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        found = train_twice(
            make, arrays, "graph", STEPS, optimizer=optimizer, options=options
        )
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        oracle = train_twice(make, arrays, optimizer=optimizer, options=options)
    assert_same_step(found, oracle)


# ------------------------------------------------------------------------ bad input


@pytest.mark.slow_in("graph-mean", "graph-mean_with_sample_weight")
@pytest.mark.parametrize("reduction", MEANS)
@pytest.mark.parametrize("how", ["eager", "graph"])
def test_a_sample_weight_that_is_not_a_number_is_refused(how, reduction):
    loss = keras.losses.MeanSquaredError(reduction)
    model = compile_in(ka.accumulate(dense_model(), **STEPS), how, sgd(), loss)
    weight = uneven(SAMPLES)
    weight[6] = np.nan
    before = model.get_weights(), slots(model.optimizer)
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="weight"):
        model.train_on_batch(*data(SAMPLES), weight)
    assert_equal(model.get_weights(), before[0])
    assert_equal(slots(model.optimizer), before[1])


@pytest.mark.parametrize("how", ["eager", "graph"])
def test_a_loss_without_reduction_is_refused(how):
    loss = keras.losses.MeanSquaredError(reduction=None)
    model = compile_in(ka.accumulate(dense_model(), **STEPS), how, sgd(), loss)
    before = model.get_weights(), slots(model.optimizer)
    assert_refused(
        lambda: model.train_on_batch(*data(SAMPLES)),
        ValueError,
        "Received a loss with `reduction=None`: it leaves one value per sample, which is "
        "no loss to minimise. Give it `reduction='sum_over_batch_size'` or "
        "`reduction='sum'`.",
    )
    assert_equal(model.get_weights(), before[0])
    assert_equal(slots(model.optimizer), before[1])


@pytest.mark.slow_in("graph")
@pytest.mark.parametrize(
    ("how", "two_pass"), [("eager", False), ("graph", False), ("graph", True)]
)
def test_targets_for_another_number_of_samples_are_refused(how, two_pass):
    model = ka.accumulate(dense_model(), **STEPS, two_pass=two_pass)
    compile_in(model, how, sgd())
    x, y = data(SAMPLES)
    model.train_on_batch(x, y)  # before, Keras refuses it while it builds
    before = model.get_weights(), slots(model.optimizer)
    message = "All tensors of a batch must have the same number of samples."
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=message):
        model.train_on_batch(x, y[:6])
    assert_equal(model.get_weights(), before[0])
    assert_equal(slots(model.optimizer), before[1])
