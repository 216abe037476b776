"""What adds up, what averages, and what counts once, in both routes.

The oracle is the large batch in plain Keras; the control, that the mean of micro-batches'
means differs.
"""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_close, assert_differ, compile_in, data, is_plain, told
from keras import layers

import keras_accum as ka

X, Y = data(13, outputs=3)
SPLITS = {
    "step": {"micro_batch_size": 4},
    "two passes": {"micro_batch_size": 4, "two_pass": True},
}


class PerSample(layers.Layer):
    """Adds a loss of one value per sample, of one or of more axes."""

    def __init__(self, axis=-1):
        super().__init__()
        self.axis = axis

    def call(self, inputs):
        self.add_loss(0.1 * keras.ops.sum(inputs**2, axis=self.axis))
        return inputs


class Mean(layers.Layer):
    """Adds a loss that is one value, a mean over samples."""

    def call(self, inputs):
        self.add_loss(keras.ops.mean(inputs**2))
        return inputs


def stack(*inside, regularizer=None):
    keras.utils.set_random_seed(1)
    dense = layers.Dense(4, "tanh", kernel_regularizer=regularizer)
    return keras.Sequential([keras.Input((5,)), dense, *inside, layers.Dense(3)])


def train(make, batch, optimizer=None, split=None, loss="mse", weights=None, **options):
    """Weights and loss after an epoch in the order of the data."""
    model = make()
    if split:
        ka.accumulate(model, **split)
    optimizer = optimizer or keras.optimizers.SGD(0.1)
    if is_plain(model, optimizer):  # Tracing takes longer than its few steps.
        options["run_eagerly"] = True
    model.compile(optimizer, loss, jit_compile=False, **options)
    history = model.fit(
        X, Y, batch_size=batch, sample_weight=weights, shuffle=False, verbose=0
    )
    return model.get_weights(), history.history["loss"][0]


def check(make, split, **how):
    found, loss = train(make, 13, split=split, **how)
    expected, expected_loss = train(make, 13, **how)
    assert_close(found, expected, 2e-6)
    assert_close(loss, expected_loss, 2e-6)
    return expected


@pytest.mark.slow_in("False", "step")
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(
    ("axis", "eager"),
    [
        (-1, False),
        ((), True),
        pytest.param(-1, True, marks=pytest.mark.slow),
        pytest.param((), False, marks=pytest.mark.slow),
    ],
)
def test_values_that_a_layer_adds_are_summed(split, axis, eager):
    how = {"run_eagerly": eager}
    expected = check(lambda: stack(PerSample(axis)), SPLITS[split], **how)
    assert_differ(expected, train(stack, 13, **how)[0])


@pytest.mark.slow_but("step")
@pytest.mark.parametrize("split", SPLITS)
def test_a_sum_a_mean_and_a_regularizer_in_one_loss(split):
    check(lambda: stack(PerSample(), Mean(), regularizer="l2"), SPLITS[split])


class OneValue(layers.Layer):
    """Adds one value, by a function of its inputs, times a weight."""

    def __init__(self, function, scale=0.1):
        super().__init__()
        self.function, self.start = function, scale

    def build(self, shape):
        self.scale = self.add_weight(
            name="scale", shape=(), initializer=keras.initializers.Constant(self.start)
        )

    def call(self, inputs):
        value = self.scale * self.function(inputs)
        self.add_loss(keras.ops.cast(value, "float32"))  # As Keras wants them.
        return inputs


def sum_of_squares(inputs):
    return keras.ops.sum(inputs**2)


def mean_of_squares(inputs):
    return keras.ops.mean(inputs**2)


def mean_of_shape_one(inputs):
    return keras.ops.reshape(mean_of_squares(inputs), (1, 1))


def means_of_features(inputs):
    return keras.ops.mean(inputs**2, axis=0)


def of_the_batch(inputs):
    return keras.ops.sum(keras.ops.mean(inputs, axis=0) ** 2)


@pytest.mark.slow_in("False", "step")
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(
    ("start", "eager"),
    [
        (0.1, False),
        (0.0, True),
        pytest.param(0.1, True, marks=pytest.mark.slow),
        pytest.param(0.0, False, marks=pytest.mark.slow),
    ],
)
def test_one_value_that_is_a_sum_over_samples_adds_up(split, start, eager, recwarn):
    """Also if it is nothing yet, as of a weight that an annealing raises from 0."""

    def make(*inside):
        inside = inside or (layers.Dropout(0.0), OneValue(sum_of_squares, start), Mean())
        return stack(*inside)

    expected = check(make, SPLITS[split], run_eagerly=eager)
    mean = make(layers.Dropout(0.0), OneValue(mean_of_squares, start), Mean())
    assert_differ(expected, train(lambda: mean, 13, run_eagerly=eager)[0])
    assert told(recwarn) == []


@pytest.mark.slow
@pytest.mark.parametrize("function", [mean_of_shape_one, means_of_features])
def test_means_with_axes_are_no_sums(function, recwarn):
    def make():
        return stack(OneValue(function))

    expected = check(make, SPLITS["step"])
    check(make, SPLITS["two passes"])
    found, _ = train(make, 4, accumulating(), run_eagerly=True)
    assert_close(found, train(make, 13, keras.optimizers.SGD(0.01))[0], 2e-6)
    assert_differ(expected, train(lambda: stack(OneValue(sum_of_squares)), 13)[0])
    assert told(recwarn) == []


@pytest.mark.slow_in("mixed_float16")
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_the_kind_is_known_in_half_precision_too(policy, recwarn):
    keras.config.set_dtype_policy(policy)
    found = {}
    for function in (sum_of_squares, mean_of_squares):
        model = ka.accumulate(stack(OneValue(function)), micro_batch_size=4)
        model.compile("sgd", "mse", run_eagerly=True)
        found[function] = model.train_on_batch(X, Y)
        plain = stack(OneValue(function))
        plain.compile("sgd", "mse", run_eagerly=True)
        assert_close(found[function], plain.train_on_batch(X, Y), 1e-2)
    assert_differ(*found.values(), by=0.1)
    assert told(recwarn) == []


def test_what_layers_add_is_summed_beside_a_loss_that_does_not_fall_apart():
    def rows(y, y_pred):
        rows = keras.ops.cast(keras.ops.shape(y_pred)[0], "float32")
        return rows**2 + 0.0 * keras.ops.sum(y_pred, -1)

    make, how = lambda: stack(PerSample()), {"loss": rows, "run_eagerly": True}
    with pytest.warns(UserWarning, match="depend on the batch as a whole"):
        found, _ = train(make, 13, split=SPLITS["step"], **how)
    expected, _ = train(make, 13, **how)
    assert_close(found, expected, 2e-6)
    assert_differ(expected, make().get_weights())


@pytest.mark.slow
def test_a_layer_that_is_called_twice_adds_each_value_by_its_kind():
    class Both(layers.Layer):
        def call(self, inputs):
            self.add_loss(0.1 * sum_of_squares(inputs))
            self.add_loss(mean_of_squares(inputs))
            self.add_loss(keras.ops.sum(inputs**2, -1))
            return inputs

    def make():
        keras.utils.set_random_seed(1)
        both, x = Both(), keras.Input((5,))
        y = both(layers.Dense(3)(both(x)))
        return keras.Model(x, layers.Dense(3)(y))

    for split in SPLITS.values():
        check(make, split)


@pytest.mark.slow_in("step")
@pytest.mark.parametrize("route", ["step", "optimizer"])
def test_what_is_neither_a_mean_nor_a_sum_is_said_once(route):
    step = route == "step"
    how = {"split": SPLITS["step"]} if step else {"optimizer": accumulating()}
    with pytest.warns(UserWarning) as caught:
        train(lambda: stack(OneValue(of_the_batch)), 4, **how)
    assert told(caught) == [
        "What the layer 'one_value' passes to `add_loss` is neither a mean nor a sum over "
        "samples, as far as can be found out. Micro-batches weigh by their samples: the "
        "mean of their values is taken, not the value of the batch. Pass one value per "
        "sample, which Keras adds up; or compute the loss from outputs of the model, with "
        "`accumulate(model, ..., two_pass=True)`."
    ]


def beyond(limit):
    """What of the batch's mean is above a limit, as free bits are."""
    return lambda x: keras.ops.maximum(keras.ops.mean(x**2) - limit, 0.0)


def beyond_of_each(limit):
    """What of each sample's mean is above a limit: a mean over samples."""
    return lambda x: keras.ops.mean(
        keras.ops.maximum(keras.ops.mean(x**2, -1) - limit, 0)
    )


BENT = {
    "free bits": (beyond(0.01), True),
    "a far limit": (beyond(1.0), True),
    "distance": (lambda x: keras.ops.abs(keras.ops.mean(x)), True),
    "variance": (lambda x: keras.ops.mean((x - keras.ops.mean(x, 0)) ** 2), True),
    "of each sample": (beyond_of_each(0.01), False),
    "far of each": (beyond_of_each(1.0), False),
    "exponential": (lambda x: keras.ops.mean(keras.ops.exp(3.0 * x)), False),
}


@pytest.mark.slow_but("free bits", "distance", "far of each", "exponential")
@pytest.mark.parametrize(("function", "bent"), BENT.values(), ids=list(BENT))
def test_a_bent_function_of_the_batchs_mean_is_no_mean(function, bent, recwarn):
    inputs = keras.Input((5,))
    outputs = layers.Dense(3)(OneValue(function)(inputs))
    model = ka.accumulate(keras.Model(inputs, outputs), micro_batch_size=4)
    model.compile("sgd", "mse", run_eagerly=True)
    model.train_on_batch(X, Y)
    said = [text for text in told(recwarn) if "neither a mean nor a sum" in text]
    assert len(said) == bent


@pytest.mark.slow
def test_the_optimizer_knows_one_value_that_is_a_sum():
    def make():
        return stack(OneValue(sum_of_squares))

    expected, _ = train(make, 13, keras.optimizers.SGD(0.01), loss=sums())
    found, _ = train(make, 4, accumulating("sum"), loss=sums())
    assert_close(found, expected, 2e-6)
    with pytest.warns(UserWarning, match="passes to `add_loss` what adds up"):
        train(make, 4, accumulating())


def test_finding_out_what_is_added_moves_nothing():
    """No weight, no seed, and not what the model has added before."""
    plain, split = [
        stack(layers.Dropout(0.5, seed=3), OneValue(sum_of_squares)) for _ in "ab"
    ]
    ka.accumulate(split, accum_steps=1)
    for model in (plain, split):
        model.compile("sgd", "mse", run_eagerly=True)
        model.train_on_batch(X, Y)
    assert_close(split.get_weights(), plain.get_weights())
    seeds = [
        [v.numpy() for v in model.non_trainable_variables] for model in (plain, split)
    ]
    assert_close(*seeds)
    assert_close(split.losses, plain.losses)


def test_a_model_that_trains_by_what_is_added_alone():
    """As CTC does in a layer of its own."""

    def make():
        keras.utils.set_random_seed(1)
        dense = layers.Dense(4, "tanh")
        return keras.Sequential([keras.Input((5,)), dense, PerSample()])

    check(make, SPLITS["step"], loss=None)


def sums(**options):
    return keras.losses.MeanSquaredError(reduction="sum", **options)


def accumulating(reduction="mean", accum_steps=4):
    return ka.AccumOptimizer(keras.optimizers.SGD(0.01), accum_steps, reduction=reduction)


def test_a_regularizer_of_a_sum_counts_once():
    def make():
        return stack(regularizer=keras.regularizers.L2(0.3))

    expected, _ = train(make, 13, keras.optimizers.SGD(0.01), loss=sums())
    # Windows of 4, 4, 4 and 1, and again: the second begins anew.
    found, _ = train(make, 4, accumulating("sum"), loss=sums())
    assert_close(found, expected, 2e-6)
    assert_differ(found, train(stack, 4, accumulating("sum"), loss=sums())[0])


def test_both_routes_at_once_count_a_regularizer_of_a_sum_once():
    def make():
        return stack(regularizer=keras.regularizers.L2(0.3))

    split = {"micro_batch_size": 2}
    found, _ = train(make, 7, accumulating("sum", 2), split, loss=sums())
    expected, _ = train(make, 13, keras.optimizers.SGD(0.01), loss=sums())
    assert_close(found, expected, 2e-6)


def test_a_window_that_weighs_nothing_still_has_its_regularizer():
    def make():
        return stack(regularizer=keras.regularizers.L2(0.3))

    def loss():
        return keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")

    nothing = np.zeros(13, "float32")
    how = {"loss": loss(), "weights": nothing}
    expected, _ = train(make, 13, keras.optimizers.SGD(0.01), **how)
    assert_differ(expected, make().get_weights())
    for steps, batch, split in ((4, 4, None), (1, 13, None), (1, 13, SPLITS["step"])):
        found, _ = train(make, batch, accumulating(accum_steps=steps), split, **how)
        assert_close(found, expected)
    # Among others, what weighs nothing adds nothing.
    nothing[:4] = 1.0
    expected, _ = train(make, 13, keras.optimizers.SGD(0.01), **how)
    found, _ = train(make, 4, accumulating(), **how)
    assert_close(found, expected)


def test_a_mean_is_refused_where_gradients_are_added_up():
    with pytest.raises(ValueError) as caught:
        train(stack, 4, accumulating("sum"))
    assert str(caught.value) == (
        "Received a loss that is a mean in an optimizer with `reduction='sum'`, which "
        "would add up the means of the micro-batches. Leave `reduction` out: "
        "`AccumOptimizer(..., reduction='mean')` takes their weighted mean; or give the "
        "loss `reduction='sum'`."
    )


@pytest.mark.parametrize(
    ("inside", "reduction", "words"),
    [
        (PerSample, "mean", "passes to `add_loss` what adds up"),
        (Mean, "sum", "which an optimizer with `reduction='sum'` adds up"),
    ],
)
def test_the_optimizer_warns_of_added_losses_of_another_kind(inside, reduction, words):
    loss = sums() if reduction == "sum" else "mse"
    with pytest.warns(UserWarning, match=words):
        train(lambda: stack(inside()), 4, accumulating(reduction), loss=loss)


def total(y, y_pred):
    return tf.reduce_sum(tf.square(y - y_pred))


def test_a_scalar_that_is_added_up_is_said_once():
    """It may be a sum; with sample weights Keras takes a mean of it."""
    said = (
        "A loss function returns a scalar, which an optimizer with `reduction='sum'` adds "
        "up over the micro-batches. It is the large batch if it is a sum over samples, and "
        "there are no sample weights: of a scalar, Keras takes the mean by them. Return "
        "one value per sample, from a loss with `reduction='sum'`."
    )
    gap = []
    for weights in (None, (0.1 + np.arange(13) % 4).astype("float32")):
        how = {"loss": total, "weights": weights}
        expected, _ = train(stack, 13, keras.optimizers.SGD(0.01), **how)
        with pytest.warns(UserWarning) as caught:
            found, _ = train(stack, 4, accumulating("sum"), **how)
        assert told(caught) == [said]
        gap.append(np.abs(found[0] - expected[0]).max())
    assert gap[0] < 1e-6 < 1e-3 < gap[1]


def valid(y, y_pred):
    """The losses of those samples alone whose target is positive."""
    return tf.boolean_mask(tf.reduce_mean(tf.square(y - y_pred), -1), y[:, 0] > 0)


@pytest.mark.slow
@pytest.mark.parametrize("eager", [False, True])
def test_a_loss_weighs_by_what_it_returns(eager):
    assert len(set((Y[:12, 0] > 0).reshape(3, 4).sum(1))) > 1
    check(stack, SPLITS["step"], loss=valid, run_eagerly=eager)
    expected, _ = train(stack, 13, keras.optimizers.SGD(0.01), loss=valid)
    found, _ = train(stack, 4, accumulating(), loss=valid, run_eagerly=eager)
    assert_close(found, expected)


@pytest.mark.slow
def test_a_micro_batch_for_which_a_loss_returns_nothing():
    targets = np.abs(Y)
    targets[4:8] *= -1
    for eager in (False, True):
        model = ka.accumulate(stack(), micro_batch_size=4)
        plain = stack()
        for each in (model, plain):
            each.compile("sgd", valid, run_eagerly=eager, jit_compile=False)
        logs = model.train_on_batch(X, targets)
        assert_close(logs, plain.train_on_batch(X, targets))
        assert_close(model.get_weights(), plain.get_weights())


def root_mean_squared(y, y_pred):
    return keras.ops.sqrt(keras.ops.mean((y - y_pred) ** 2))


@pytest.mark.slow
def test_a_metric_of_the_whole_batch_is_named():
    expected = (
        "The metric 'root_mean_squared' returns one number for a batch. It is computed "
        "for each micro-batch, and the mean of those is shown, not the value of the "
        "batch. Return one value per sample; or pass `two_pass=True`, with which metrics "
        "see the whole batch."
    )

    def run(split):
        model = stack()
        ka.accumulate(model, **split)
        model.compile("sgd", "mse", metrics=[root_mean_squared], jit_compile=False)
        return model.train_on_batch(X, Y, return_dict=True)["root_mean_squared"]

    with pytest.warns(UserWarning) as caught:
        split = run({"micro_batch_size": 4})
    assert told(caught) == [expected]
    whole = run(SPLITS["two passes"])
    assert_close(whole, run({"micro_batch_size": 13}))
    assert_differ(split, whole, by=1e-4)


COUNTS_ONE = (
    "The metric '{}' counts each micro-batch as 1, as `keras.metrics.Mean` does when it "
    "is given one number. The mean of micro-batches is shown, not the value of the "
    "batch. Give `update_state` one value per sample; or pass `sample_weight=`, the "
    "number of samples."
)


class Watched(layers.Layer):
    """Logs a mean: of one number for each call, or of one for each sample."""

    def __init__(self, axis):
        super().__init__()
        self.mean, self.axis = keras.metrics.Mean("size"), axis

    def call(self, inputs):
        self.mean.update_state(keras.ops.mean(keras.ops.abs(inputs), self.axis))
        return inputs


def test_a_mean_of_one_number_for_each_micro_batch_is_named():
    def run(axis, size):
        model = ka.accumulate(stack(Watched(axis)), micro_batch_size=size)
        model.compile("sgd", "mse", jit_compile=False)
        return model.train_on_batch(X, Y, return_dict=True)["size"]

    with pytest.warns(UserWarning) as caught:
        split = run(None, 5)
    assert told(caught) == [COUNTS_ONE.format("size")]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        whole = run(None, 13)
        assert_close(run(-1, 5), whole)
    assert_differ(split, whole, by=1e-4)


class Root(keras.metrics.Metric):
    """The mean of the roots of batches."""

    def __init__(self):
        super().__init__(name="root")
        self.total = self.add_weight(initializer="zeros", name="total")
        self.count = self.add_weight(initializer="zeros", name="count")

    def update_state(self, y, y_pred, sample_weight=None):
        error = keras.ops.mean(keras.ops.square(y - y_pred))
        self.total.assign_add(keras.ops.sqrt(error))
        self.count.assign_add(1.0)

    def result(self):
        return self.total / self.count


def test_a_metric_that_counts_batches_is_named(recwarn):
    def run(metrics):
        model = ka.accumulate(stack(), micro_batch_size=5)
        model.compile("sgd", "mse", metrics=metrics, jit_compile=False)
        model.train_on_batch(X, Y)
        return told(recwarn.list)

    metrics = keras.metrics
    assert run([metrics.MeanSquaredError(), metrics.R2Score(), metrics.AUC()]) == []
    assert run([Root()]) == [COUNTS_ONE.format("root")]


@pytest.mark.parametrize("split", ["step", "two passes"])
def test_logs_that_are_no_metric_are_named(split):
    class Logs(keras.Sequential):
        def compute_metrics(self, x, y, y_pred, sample_weight=None):
            logs = super().compute_metrics(x, y, y_pred, sample_weight)
            return {**logs, "most": keras.ops.max(y_pred)}

    keras.utils.set_random_seed(1)
    model = Logs([keras.Input((5,)), layers.Dense(3)])
    ka.accumulate(model, **SPLITS[split])
    model.compile("sgd", "mse", jit_compile=False)
    with pytest.warns(UserWarning) as caught:
        logs = model.train_on_batch(X, Y, return_dict=True)
        model.train_on_batch(X, Y)
    assert list(logs) == ["loss"]
    assert told(caught) == [
        "`compute_metrics` of this model returns 'most', which is no metric of the model: "
        "a step that accumulates does not show it. Keep it in a `keras.metrics.Metric` "
        "that the model has."
    ]


def test_windows_of_unlike_lengths_weigh_by_their_tokens():
    rng = np.random.default_rng(0)
    batches = [(rng.integers(1, 11, (4, n)), rng.integers(0, 11, (4, n))) for n in (3, 9)]

    def make():
        keras.utils.set_random_seed(2)
        tokens = keras.Input((None,), dtype="int32")
        return keras.Sequential([tokens, layers.Embedding(11, 4), layers.Dense(11)])

    def loss(**options):
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)

    plain = make()
    values = [v.value for v in plain.trainable_variables]
    with tf.GradientTape() as tape:
        each = [tf.reshape(loss(reduction=None)(y, plain(x)), [-1]) for x, y in batches]
        total = tf.reduce_mean(tf.concat(each, 0))
    gradients = [tf.convert_to_tensor(g) for g in tape.gradient(total, values)]
    keras.optimizers.SGD(0.5).apply(gradients, plain.trainable_variables)
    for eager in (True, False):
        model = ka.accumulate(make(), micro_batch_size=2)
        optimizer = ka.AccumOptimizer(keras.optimizers.SGD(0.5), 2)
        model.compile(optimizer, loss(), run_eagerly=eager, jit_compile=False)
        for x, y in batches:
            model.train_on_batch(x, y)
        assert_close(model.get_weights(), plain.get_weights())
    assert_differ(plain.get_weights(), make().get_weights())


def test_two_passes_keep_float64():
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        found, expected = [
            train(lambda: stack(Mean(), PerSample()), 13, split=split, run_eagerly=True)[
                0
            ]
            for split in (SPLITS["two passes"], None)
        ]
    finally:
        keras.config.set_floatx("float32")
    assert_close(found, expected, 1e-13)


def test_two_passes_add_losses_up_in_the_widest_dtype():
    """Layers in float32, and losses in float64: Keras itself cannot add them up."""
    expected, _ = train(lambda: stack(Mean()), 13)
    keras.config.set_floatx("float64")
    try:
        found, _ = train(lambda: stack(Mean()), 13, split=SPLITS["two passes"])
    finally:
        keras.config.set_floatx("float32")
    assert_close(found, expected, 2e-6)


@pytest.mark.slow_but("step")
@pytest.mark.parametrize("how", SPLITS)
def test_both_routes_weigh_by_what_the_loss_divides_by(how):
    def loss():
        return keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")

    weights = (0.1 + np.arange(13) % 4).astype("float32")
    weights[:7] *= 0.2
    options = {"loss": loss(), "weights": weights}
    expected, _ = train(stack, 13, keras.optimizers.SGD(0.01), **options)
    found, _ = train(stack, 7, accumulating(accum_steps=2), SPLITS[how], **options)
    assert_close(found, expected)
    assert_differ(expected, train(stack, 13, keras.optimizers.SGD(0.01))[0])


def test_two_passes_count_a_regularizer_of_a_sum_once_a_window():
    def make():
        return stack(regularizer=keras.regularizers.L2(0.3))

    split = {"micro_batch_size": 2, "two_pass": True}
    found, _ = train(make, 7, accumulating("sum", 2), split, loss=sums())
    expected, _ = train(make, 13, keras.optimizers.SGD(0.01), loss=sums())
    assert_close(found, expected, 2e-6)


@pytest.mark.slow_in("False")
@pytest.mark.parametrize("eager", [False, True])
def test_an_output_without_a_loss(eager):
    def run(optimizer, batch):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((5,))
        outputs = {name: layers.Dense(3, name=name)(inputs) for name in "ab"}
        model = keras.Model(inputs, outputs)
        losses = {"a": "mse", "b": None}
        model.compile(optimizer, losses, run_eagerly=eager, jit_compile=False)
        model.fit(X, {"a": Y}, batch_size=batch, shuffle=False, verbose=0)
        return model.get_weights()

    with pytest.warns(UserWarning, match="Gradients do not exist"):
        expected = run(keras.optimizers.SGD(0.01), 13)
    assert_close(run(accumulating(), 4), expected)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_ragged_predictions_are_counted_by_rows(mode):
    class Times(keras.Model):
        def build(self, shape):
            self.factor = self.add_weight(shape=(), initializer="ones")

        def call(self, x):
            return x * self.factor

    def of_rows(y, y_pred):
        return tf.reduce_mean(tf.square(y - y_pred), axis=-1)

    def train(optimizer, batch):
        model = Times()
        model.build(None)
        compile_in(model, mode, optimizer, of_rows)
        x = tf.ragged.constant([[1.0], [2.0, 3.0], [4.0, 5.0, 6.0]])
        model.fit(x, 2 * x, batch_size=batch, shuffle=False, verbose=0)
        return model.get_weights()

    rate = 0.01
    expected = train(keras.optimizers.SGD(rate), 3)
    found = train(ka.AccumOptimizer(keras.optimizers.SGD(rate), 2), 2)
    assert_close(found, expected)
    assert_differ(train(keras.optimizers.SGD(rate), 2), expected)
