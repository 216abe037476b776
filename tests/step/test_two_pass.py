"""Losses that couple the samples of a batch, in two passes, against the whole batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    assert_close,
    assert_differ,
    assert_equal,
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
from text_models import SAMPLES, cross_entropy, nt_xent, token_model, tokens

import keras_accum as ka

# Of 11 samples, micro-batches of 4, 4 and 3.
STEPS, SIZES = {"accum_steps": 3}, (4, 4, 3)
ROWS = (slice(0, 4), slice(4, 8), slice(8, 11))


def sgd():
    return keras.optimizers.SGD(0.2, momentum=0.9)


def batch_dice(y, y_pred):
    """Overlap counted over the whole batch."""
    p = tf.sigmoid(y_pred)
    overlap = tf.reduce_sum(p * y)
    return 1 - (2 * overlap + 1) / (tf.reduce_sum(p) + tf.reduce_sum(y) + 1)


def ranking(y, y_pred):
    """Every pair of samples in the order of its targets."""
    wanted = tf.sign(y[:, None, 0] - y[None, :, 0])
    gap = tf.sigmoid(y_pred[:, None, 0]) - tf.sigmoid(y_pred[None, :, 0])
    return tf.reduce_sum(tf.abs(wanted) * tf.nn.softplus(-wanted * gap)) / tf.reduce_sum(
        tf.abs(wanted)
    )


def encoder(*layers):
    """Two views of 5 features to two embeddings of 4."""
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((2, 5)),
            keras.layers.Dense(8, "tanh"),
            *layers,
            keras.layers.Dense(4),
        ]
    )


def views(samples=SAMPLES):
    x, y = data(samples, 10)
    return x.reshape(samples, 2, 5), y


def case(loss):
    if loss is nt_xent:
        return encoder, views()
    x, y = data(SAMPLES)
    if loss is batch_dice:
        y = (y > 0.7).astype("float32")
    return dense_model, (x, y)


def check(make, arrays, mode="graph", options=None, control=True, split=STEPS, **how):
    """Equal to the large batch; where `control`, the naive split is not."""
    found = train_twice(make, arrays, mode, split, options=options, two_pass=True, **how)
    oracle = train_twice(make, arrays, options=options, **how)
    assert_same_step(found, oracle)
    if control:
        naive = mean_of_means(make, arrays, SIZES, options)
        assert_differ(naive.get_weights(), oracle[0].get_weights(), what="naive split")
    return found


@pytest.mark.slow_but("nt_xent-graph", "nt_xent-xla")
@pytest.mark.parametrize(
    ("loss", "mode"),
    [
        (nt_xent, "eager"),
        (nt_xent, "graph"),
        (nt_xent, "xla"),
        (batch_dice, "graph"),
        pytest.param(batch_dice, "xla", marks=pytest.mark.slow),
        (ranking, "graph"),
    ],
)
def test_a_loss_that_couples_samples_is_exact(loss, mode):
    make, arrays = case(loss)
    metric = keras.metrics.MeanAbsoluteError if loss is not nt_xent else None
    options = lambda: {"loss": loss, "metrics": [metric()] if metric else None}  # noqa: E731
    check(make, arrays, mode, options)


@pytest.mark.slow_in("split0")
@pytest.mark.parametrize("split", [{"micro_batch_size": 4}, {"accum_steps": 50}])
def test_every_split_is_exact(split):
    check(encoder, views(), "graph", lambda: {"loss": nt_xent}, False, split)


def test_a_loss_that_is_a_mean_over_samples_stays_exact():
    weights = np.linspace(0.01, 3, SAMPLES, dtype="float32")
    options = lambda: {  # noqa: E731
        "loss": keras.losses.MeanSquaredError("mean_with_sample_weight"),
        "metrics": ["mae"],
        "weighted_metrics": ["mae"],
    }
    check(dense_model, (*data(SAMPLES), weights), "graph", options)


def by_hand(model, x, y, mode="eager"):
    """One tape over the calls in turn, and the loss of all that they gave."""
    values = [v.value for v in model.trainable_variables]

    def step():
        with tf.GradientTape() as tape:
            parts = [model(x[rows], training=True) for rows in ROWS]
            loss = nt_xent(y, tf.concat(parts, 0))
        model.optimizer.apply(tape.gradient(loss, values), model.trainable_variables)

    # XLA draws other random numbers from the same seed.
    in_mode(step, mode)()


@pytest.mark.slow_in("eager")
@pytest.mark.slow_in("xla")
def test_the_second_pass_draws_the_random_numbers_of_the_first(mode):
    """If it drew its own, the gradient would be another; if both counted, the seed."""
    x, y = views()
    make = lambda: encoder(keras.layers.Dropout(0.5))  # noqa: E731
    model, _ = train_twice(
        make, (x, y), mode, STEPS, options=lambda: {"loss": nt_xent}, two_pass=True
    )
    keras.utils.set_random_seed(11)
    oracle = compile_in(make(), "eager", sgd())
    for _ in range(2):
        by_hand(oracle, x, y, mode)
    trained = len(model.trainable_weights)
    assert_close(model.get_weights()[:trained], oracle.get_weights()[:trained])
    assert_equal(model.get_weights()[trained:], oracle.get_weights()[trained:])
    large = train_twice(make, (x, y), options=lambda: {"loss": nt_xent})[0]
    assert_differ(large.get_weights()[:trained], oracle.get_weights()[:trained])


@pytest.mark.slow_in("eager")
@pytest.mark.parametrize("how", ["eager", "graph"])
def test_moving_statistics_move_once_per_micro_batch(how):
    x, y = views()
    make = lambda: encoder(keras.layers.BatchNormalization(momentum=0.6))  # noqa: E731
    model, _ = train_twice(
        make, (x, y), how, STEPS, options=lambda: {"loss": nt_xent}, two_pass=True
    )
    oracle = compile_in(make(), "eager", sgd())
    for _ in range(2):
        by_hand(oracle, x, y)
    moving = [w.numpy() for w in oracle.non_trainable_weights]
    assert_close(model.non_trainable_weights, moving, 2e-6)
    assert_close(model.trainable_weights, oracle.trainable_weights, 5e-6)
    by_hand(oracle, x, y)
    assert_differ(oracle.non_trainable_weights, moving)


def test_metrics_inside_layers_see_every_sample_once():
    class Following(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.follow = keras.metrics.Mean(name="follow")
            self.calls = keras.metrics.Sum(name="calls")

        def call(self, inputs):
            self.follow.update_state(keras.ops.mean(inputs, axis=(1, 2)))
            self.calls.update_state(1.0)
            return inputs

    make = lambda: encoder(Following())  # noqa: E731
    options = lambda: {"loss": nt_xent}  # noqa: E731
    _, logs = train_twice(make, views(), "graph", STEPS, options=options, two_pass=True)
    _, expected = train_twice(make, views(), options=options)
    assert_close(logs["follow"], expected["follow"], 2e-6)
    # Of one batch from Keras 3.15 on, of both before.
    assert logs["calls"] == 3 * expected["calls"] > 0


class Penalty(keras.layers.Layer):
    """Adds the mean square of what passes, over samples."""

    def call(self, inputs):
        self.add_loss(0.3 * keras.ops.mean(inputs**2))
        return inputs


@pytest.mark.slow_in("graph")
@pytest.mark.slow_in("xla")
def test_regularisers_and_added_losses_count_once(mode):
    def make():
        return encoder(
            Penalty(),
            keras.layers.Dense(
                6,
                kernel_regularizer=keras.regularizers.L2(0.1),
                activity_regularizer=keras.regularizers.L2(0.1),
            ),
        )

    check(make, views(), mode, lambda: {"loss": nt_xent})


class LeavesOut(keras.Model):
    """Does not count what its layers add."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return nt_xent(y, y_pred)


class Weighs(keras.Model):
    """Multiplies the losses that its layers add, and their squares."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        added = [10 * loss + loss**2 for loss in self.losses]
        return nt_xent(y, y_pred) + sum(added)


@pytest.mark.slow_in("eager", "Weighs")
@pytest.mark.parametrize("cls", [LeavesOut, Weighs])
@pytest.mark.slow_in("xla")
def test_a_compute_loss_does_with_added_losses_what_it_likes(cls, mode):
    def make():
        plain = encoder(
            Penalty(), keras.layers.Dense(6, "tanh", activity_regularizer="l2")
        )
        return cls(plain.inputs[0], plain.outputs[0])

    options = lambda: {"loss": None}  # noqa: E731
    oracle = train_twice(make, views(), options=options)
    found = train_twice(make, views(), mode, STEPS, options=options, two_pass=True)
    assert_same_step(found, oracle)
    naive = mean_of_means(make, views(), SIZES, options)
    assert_differ(naive.get_weights(), oracle[0].get_weights())


@pytest.mark.slow_in("eager")
@pytest.mark.slow_in("xla")
def test_a_model_that_trains_by_added_losses_alone_takes_two_passes(mode):
    def make():
        keras.utils.set_random_seed(3)
        dense = keras.layers.Dense(4, "tanh")
        return keras.Sequential([keras.Input((2, 5)), dense, Penalty()])

    options = lambda: {"loss": None}  # noqa: E731
    x, _ = views()
    oracle = train_twice(make, (x,), options=options)
    found = train_twice(make, (x,), mode, STEPS, options=options, two_pass=True)
    assert_same_step(found, oracle)
    assert_differ(oracle[0].get_weights(), make().get_weights())


@pytest.mark.slow_in("halve")
@pytest.mark.parametrize("on_oom", ["raise", "halve"])
def test_the_losses_of_outputs_are_logged_by_samples(on_oom):
    """Keras takes the mean of batches in a graph, of samples in eager mode."""

    def make():
        keras.utils.set_random_seed(3)
        inputs = keras.Input((5,))
        outputs = {n: keras.layers.Dense(3, name=n)(inputs) for n in ("a", "b")}
        return keras.Model(inputs, outputs)

    x, y = data(SAMPLES)
    targets = {"a": y, "b": 2 * y**2}
    plain = compile_in(make(), "eager", keras.optimizers.SGD(0.0))
    expected = fit(plain, x, targets, 8).history
    model = ka.accumulate(make(), **STEPS, two_pass=True, on_oom=on_oom)
    compile_in(model, "graph", keras.optimizers.SGD(0.0))
    found = fit(model, x, targets, 8).history
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert_close(found[name], values, what=name)


def test_several_outputs_of_which_one_is_coupled_are_exact():
    def make():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((5,))
        hidden = keras.layers.Dense(6, "tanh")(inputs)
        heads = {n: keras.layers.Dense(3, name=n)(hidden) for n in ("rank", "class")}
        return keras.Model(inputs, heads)

    x, y = data(SAMPLES)
    targets = {"rank": y, "class": np.arange(SAMPLES) % 3}

    def options():
        classes = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return {
            "loss": {"rank": ranking, "class": classes},
            "loss_weights": {"rank": 2.0, "class": 0.3},
            "metrics": {"class": ["accuracy"]},
        }

    check(make, (x, targets), "graph", options)


@pytest.mark.slow_in("sum_over_batch_size")
@pytest.mark.slow_in("xla")
@pytest.mark.parametrize(
    ("reduction", "mode"),
    [
        ("sum_over_batch_size", "graph"),
        ("sum_over_batch_size", "xla"),
        ("mean_with_sample_weight", "eager"),
    ],
)
def test_masks_travel_from_the_first_pass_to_the_loss(reduction, mode):
    check(
        token_model, tokens(), mode, lambda: {"loss": cross_entropy(reduction=reduction)}
    )


@pytest.mark.slow_in("eager")
@pytest.mark.parametrize("how", ["eager", "graph"])
def test_sequences_of_another_length_in_each_batch_are_exact(how):
    def batches():
        yield tokens()
        yield tokens(7, 4)
        yield tokens(2, 9)

    spec = tf.TensorSpec((None, None), "int32")
    dataset = tf.data.Dataset.from_generator(batches, output_signature=(spec, spec))
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(3))
    results = []
    for split in (True, False):
        model = token_model(length=None)
        if split:
            ka.accumulate(model, **STEPS, two_pass=True)
        compile_in(model, how, sgd(), loss=cross_entropy())
        results.append(
            (model, model.fit(dataset, shuffle=False, verbose=0).history["loss"])
        )
    (model, logs), (oracle, expected) = results
    assert_close(model.get_weights(), oracle.get_weights())
    assert_close(logs, expected, 2e-6)


def test_ragged_inputs_are_exact():
    rows = [[1, 2], [3], [4, 5, 6, 7], [8], [], [9, 1, 2], [5], [6, 6], [7], [1], [2, 3]]
    x, (_, y) = tf.ragged.constant(rows, dtype="int32"), data(SAMPLES)

    class Bag(keras.Model):
        def __init__(self):
            super().__init__()
            self.table = self.add_weight(shape=(11, 3), name="table")
            self.built = True

        def call(self, x):
            return tf.reduce_sum(tf.gather(tf.convert_to_tensor(self.table), x), axis=1)

    batches = tf.data.Dataset.from_tensors((x, y)).repeat(2)
    results = []
    for split in (True, False):
        keras.utils.set_random_seed(1)
        model = Bag()
        if split:
            ka.accumulate(model, **STEPS, two_pass=True)
        compile_in(model, "graph", sgd(), loss=ranking)
        results.append(
            (model, model.fit(batches, shuffle=False, verbose=0).history["loss"])
        )
    (model, logs), (oracle, expected) = results
    assert_close(model.get_weights(), oracle.get_weights())
    assert_close(logs, expected, 2e-6)


class Tempered(keras.Model):
    """Learns the temperature of its loss."""

    def build(self, input_shape):
        super().build(input_shape)
        self.log_temperature = self.add_weight(
            shape=(), name="log_temperature", regularizer="l2", initializer="ones"
        )

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        temperature = tf.exp(tf.convert_to_tensor(self.log_temperature))
        return nt_xent(y, y_pred, temperature) + sum(self.losses)


def tempered():
    plain = encoder(keras.layers.Dense(6, kernel_regularizer="l2"))
    return Tempered(plain.inputs[0], plain.outputs[0])


@pytest.mark.slow_in("eager")
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_temperature_inside_of_the_loss_is_learned(mode):
    found = check(tempered, views(), mode)
    start = tempered().log_temperature
    assert_differ(found[0].log_temperature, start, by=1e-2)


@pytest.mark.slow_in("functional")
@pytest.mark.parametrize("kind", ["functional", "subclassed"])
def test_an_accumulating_model_takes_two_passes(kind):
    x, y = views()

    class Own(ka.GradientAccumulationModel):
        def __init__(self, **options):
            super().__init__(accum_steps=3, two_pass=True, **options)
            self.inside = encoder()

        def call(self, inputs):
            return self.inside(inputs)

    plain = encoder()
    if kind == "functional":
        model = ka.GradientAccumulationModel(
            plain.inputs[0], plain.outputs[0], accum_steps=3, two_pass=True
        )
    else:
        model = Own()
    oracle = encoder()
    for each, how in ((model, "graph"), (oracle, "eager")):
        each(x)
        compile_in(each, how, sgd(), loss=nt_xent)
    logs = fit(model, x, y, 6, 2).history["loss"]
    expected = fit(oracle, x, y, 6, 2).history["loss"]
    assert_close(model.get_weights(), oracle.get_weights())
    assert_close(logs, expected, 2e-6)


# A window of such batches cannot be exact: that is said.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:A loss function returns a scalar")
def test_windows_of_two_passes_are_the_mean_of_their_batches():
    """Between steps nothing is coupled: their losses average, weighted by samples."""
    x, y = views()
    model = ka.accumulate(encoder(), **STEPS, two_pass=True)
    compile_in(model, "graph", ka.AccumOptimizer(sgd(), 2), nt_xent)
    oracle = compile_in(encoder(), "eager", sgd(), nt_xent)
    values = [v.value for v in oracle.trainable_variables]
    for _ in range(2):
        for rows in (slice(0, 8), slice(8, 11)):
            model.train_on_batch(x[rows], y[rows])
        with tf.GradientTape() as tape:
            first = nt_xent(y[:8], oracle(x[:8]))
            second = nt_xent(y[8:], oracle(x[8:]))
            loss = (8 * first + 3 * second) / 11
        oracle.optimizer.apply(tape.gradient(loss, values), oracle.trainable_variables)
    assert_close(model.get_weights(), oracle.get_weights())
    assert int(model.optimizer.iterations) == 2
    large = compile_in(encoder(), "eager", sgd(), nt_xent)
    large.train_on_batch(x, y)
    large.train_on_batch(x, y)
    assert_differ(large.get_weights(), oracle.get_weights())


@pytest.mark.slow
def test_a_sum_of_losses_takes_two_passes_in_an_optimizer_that_sums():
    x, y = data(SAMPLES)
    loss = keras.losses.MeanSquaredError(reduction="sum")
    model = ka.accumulate(dense_model(), **STEPS, two_pass=True)
    inner = keras.optimizers.SGD(0.02)
    compile_in(model, "graph", ka.AccumOptimizer(inner, 2, reduction="sum"), loss)
    model.train_on_batch(x[:7], y[:7])
    model.train_on_batch(x[7:], y[7:])
    oracle = compile_in(dense_model(), "eager", keras.optimizers.SGD(0.02), loss)
    oracle.train_on_batch(x, y)
    assert_close(model.get_weights(), oracle.get_weights())


# A window of such batches cannot be exact: that is said.
@pytest.mark.slow_but("keras-of the model")
@pytest.mark.filterwarnings("ignore:A loss function returns a scalar")
@pytest.mark.parametrize("policy", ["global", "of the model"])
@pytest.mark.parametrize("scaler", ["keras", "AccumOptimizer"])
def test_mixed_float16_is_scaled_once(scaler, policy):
    x, y = views()
    if policy == "global":
        keras.config.set_dtype_policy("mixed_float16")
    half = None if policy == "global" else "mixed_float16"

    def make():
        keras.utils.set_random_seed(1)
        return keras.Sequential(
            [
                keras.Input((2, 5)),
                keras.layers.Dense(8, "tanh", dtype=half),
                Penalty(dtype="float32"),
                keras.layers.Dense(4, dtype="float32"),
            ]
        )

    scaled = lambda: keras.optimizers.LossScaleOptimizer(sgd(), 2.0**10)  # noqa: E731
    wrapped = lambda: ka.AccumOptimizer(sgd(), 1)  # noqa: E731
    options = lambda: {"loss": nt_xent}  # noqa: E731
    model, logs = train_twice(
        make,
        (x, y),
        "graph",
        STEPS,
        optimizer=scaled if scaler == "keras" else wrapped,
        options=options,
        two_pass=True,
    )
    oracle, expected = train_twice(make, (x, y), optimizer=scaled, options=options)
    # float16 holds 11 bits; the micro-batches round in another order.
    assert_close(model.get_weights(), oracle.get_weights(), 3e-3)
    assert_close(logs["loss"], expected["loss"], 3e-3)
    assert int(model.optimizer.iterations) == 2
    assert_differ(model.get_weights(), make().get_weights(), by=0.01)
    if scaler != "keras":
        assert model.optimizer.scales_dynamically


class Large(keras.layers.Layer):
    """Adds one value of each sample, of about 8000."""

    def call(self, inputs):
        self.add_loss(8000 + 16 * inputs[:, 0])
        return inputs


@pytest.mark.slow_in("graph")
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_values_that_a_layer_adds_are_summed_beyond_float16(mode):
    """11 times 8000, where float16 ends at 65504. Keras adds no float16 to a float32."""

    def make(dtype="float32"):
        keras.utils.set_random_seed(1)
        first = keras.layers.Dense(8, "tanh")
        added = Large(dtype=dtype)
        return keras.Sequential([keras.Input((5,)), first, added, keras.layers.Dense(3)])

    def small():
        return keras.optimizers.SGD(1e-3)

    arrays, how = data(SAMPLES), {"optimizer": small, "options": lambda: {"loss": "mse"}}
    half = lambda: make("float16")  # noqa: E731
    found, logs = train_twice(half, arrays, mode, STEPS, two_pass=True, **how)
    oracle, expected = train_twice(make, arrays, **how)
    assert expected["loss"] > float(np.finfo("float16").max)
    # What passes in float16, and each value of about 8000, is rounded; no gradient is.
    assert_close(logs["loss"], expected["loss"], 5e-4)
    assert_close(found.get_weights(), oracle.get_weights(), 1e-4)
    assert_differ(found.get_weights(), make().get_weights(), by=0.01)


def test_an_overflow_in_the_second_pass_skips_the_update_and_halves_once():
    keras.config.set_dtype_policy("mixed_float16")
    x, y = data(12)
    y[5] = 1e30
    optimizer = keras.optimizers.LossScaleOptimizer(sgd(), 2.0**10)
    model = ka.accumulate(dense_model(), **STEPS, two_pass=True)
    compile_in(model, "graph", optimizer)
    before = model.get_weights()
    model.train_on_batch(x, y)
    assert_equal(model.get_weights(), before)
    assert float(optimizer.dynamic_scale) == 2.0**9
    assert int(optimizer.iterations) == 0


@pytest.mark.slow
def test_the_model_is_traced_as_often_whatever_the_number_of_micro_batches():
    traces = []

    class Counting(keras.layers.Layer):
        def call(self, inputs):
            traces.append(1)
            return inputs

    def count(**split):
        model = ka.accumulate(encoder(Counting()), **split, two_pass=True)
        compile_in(model, "graph", sgd(), loss=nt_xent)
        traces.clear()
        fit(model, *views(26), 8, 3)
        return len(traces)

    counts = [count(accum_steps=1), count(accum_steps=5), count(micro_batch_size=3)]
    assert len(set(counts)) == 1
    assert counts[0] <= 4  # what the predictions look like, and the two passes


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3])
def test_fit_with_a_short_last_batch_is_exact(steps):
    x, y = views(26)
    model = ka.accumulate(encoder(), **STEPS, two_pass=True)
    compile_in(model, "graph", sgd(), loss=nt_xent, steps_per_execution=steps)
    oracle = compile_in(encoder(), "graph", sgd(), loss=nt_xent)
    how = {"validation_data": (x[:8], y[:8])}
    logs, expected = fit(model, x, y, 11, 2, **how), fit(oracle, x, y, 11, 2, **how)
    assert_close(model.get_weights(), oracle.get_weights())
    assert_close(slots(model.optimizer), slots(oracle.optimizer), 1e-5)
    for name in ("loss", "val_loss"):
        assert_close(logs.history[name], expected.history[name], 2e-6)


def test_frozen_layers_stay_as_they_are():
    def make():
        model = encoder()
        model.layers[0].trainable = False
        return model

    found = check(make, views(), options=lambda: {"loss": nt_xent})
    assert_equal(found[0].get_weights()[:2], make().get_weights()[:2])


def test_an_output_that_the_loss_does_not_use_is_left_alone():
    def make():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((5,))
        hidden = keras.layers.Dense(6, "tanh")(inputs)
        heads = {n: keras.layers.Dense(3, name=n)(hidden) for n in ("rank", "unused")}
        return keras.Model(inputs, heads)

    x, y = data(SAMPLES)
    targets = {"rank": y, "unused": y}
    options = lambda: {"loss": {"rank": ranking, "unused": None}}  # noqa: E731
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        check(make, (x, targets), "graph", options, control=False)


class KeepsCode(keras.Model):
    """Keeps a tensor of its call; `penalty` of it is in the loss."""

    def __init__(self, penalty):
        super().__init__(name="keeps_code")
        self.inner, self.outer = keras.layers.Dense(4), keras.layers.Dense(3)
        self.penalty = penalty

    def call(self, inputs):
        self.code = self.inner(inputs)
        return self.outer(self.code)

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        if self.penalty and self.code is not None:
            loss += self.penalty * keras.ops.mean(keras.ops.square(self.code))
        return loss


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_what_a_call_keeps_cannot_be_in_the_loss(mode):
    def make(penalty):
        keras.utils.set_random_seed(1)
        model = KeepsCode(penalty)
        model(arrays[0])
        return model

    arrays = data(11)
    with pytest.raises(ValueError) as caught:
        train_twice(lambda: make(0.5), arrays, mode, STEPS, two_pass=True)
    assert str(caught.value) == (
        "The call of this model keeps tensors in `keeps_code.code`. With `two_pass=True` "
        "the loss and the metrics see the whole batch, and these tensors are of one "
        "micro-batch: they are out of reach there. Return them from `call`, with the "
        "predictions; or leave `two_pass` out."
    )
    # Who keeps it for others may do so.
    found = train_twice(lambda: make(0.0), arrays, mode, STEPS, two_pass=True)
    expected = train_twice(lambda: make(0.0), arrays)
    assert_same_step(found, expected)
    other, _ = train_twice(lambda: make(0.5), arrays)
    assert_differ(other.get_weights(), expected[0].get_weights())
