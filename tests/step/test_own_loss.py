"""A `compute_loss` of the user's: exact where that can be known, else one warning.

What can be known: the loss is a plain sum of Keras losses, and made-up samples have the
same loss at once and split.
"""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_close, assert_differ, data, told
from text_models import cross_entropy, token_model, tokens

import keras_accum as ka

X, Y = data(12, outputs=3)
WEIGHTS = np.arange(12, dtype="float32")
WARNING = (
    "This model has a `compute_loss` of its own, and what it divides by cannot be known. "
    "Micro-batches weigh by their samples, a mean over samples. For another denominator, "
    "define `compute_loss_weight(self, x, y, y_pred, sample_weight)` on the model; for any "
    "loss of the predictions, `accumulate(model, ..., two_pass=True)` is exact."
)
mse = keras.losses.MeanSquaredError


class Super(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **kwargs):
        return super().compute_loss(x, y, y_pred, sample_weight, **kwargs)


class Scaled(keras.Model):
    """Keras's own loss, times a constant, and another one."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **kwargs):
        loss = super().compute_loss(x, y, y_pred, sample_weight, **kwargs)
        return 2.0 * loss + keras.losses.MeanAbsoluteError()(y, y_pred) / 3.0


class Sums(keras.Model):
    """A sum of Keras's, as it is."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **kwargs):
        return 0.1 * mse(reduction="sum")(y, y_pred) + keras.ops.sum(self.losses)


class SumOverSamples(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **kwargs):
        samples = keras.ops.cast(keras.ops.shape(y)[0], "float32")
        return mse(reduction="sum")(y, y_pred) / samples


class Normalized(keras.Model):
    """Divides the weights by their sum, as detection heads do by their matches."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **kwargs):
        weights = sample_weight / keras.ops.sum(sample_weight)
        return super().compute_loss(x, y, y_pred, weights, **kwargs)


class Coupled(keras.Model):
    """In-batch negatives: a Keras loss of what depends on all samples."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **kwargs):
        logits = keras.ops.matmul(y_pred, keras.ops.transpose(y_pred))
        labels = keras.ops.arange(keras.ops.shape(logits)[0])
        return cross_entropy()(labels, logits)


class OwnMean(keras.Model):
    """TensorFlow's guide to distributed training, with the weight that it divides by."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **kwargs):
        each = mse(reduction="none")(y, y_pred)
        return keras.ops.sum(each * sample_weight) / keras.ops.sum(sample_weight)

    def compute_loss_weight(self, x, y, y_pred, sample_weight):
        return keras.ops.sum(sample_weight)


LOSSES = {"Sums": "mse", "Normalized": mse(reduction="sum")}


class Regularized(keras.Model):
    """Adds its regularizers as often as it says."""

    times = 1.0

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **kwargs):
        loss = keras.losses.MeanSquaredError(reduction="sum")(y, y_pred)
        return loss + self.times * sum(self.losses) if self.times else loss


class Penalized(Regularized):
    """Adds a penalty on weights by hand."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **kwargs):
        loss = super().compute_loss(x, y, y_pred, sample_weight)
        return loss + 0.1 * keras.ops.sum(self.layers[-1].kernel ** 2)


def train(kind, split=None, batch=12, steps=1):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((5,))
    dense = keras.layers.Dense(3, kernel_regularizer=keras.regularizers.L2(0.01))
    model = kind(inputs, dense(inputs))
    if split:
        ka.accumulate(model, **split)
    optimizer = keras.optimizers.SGD(0.01)
    if steps > 1:
        optimizer = ka.AccumOptimizer(optimizer, steps)
    model.compile(optimizer, LOSSES.get(kind.__name__, "mse"), jit_compile=False)
    model.fit(X, Y, sample_weight=WEIGHTS, batch_size=batch, shuffle=False, verbose=0)
    return model.get_weights()


@pytest.mark.slow_but("OwnMean")
@pytest.mark.parametrize("kind", [Super, Scaled, Sums, OwnMean])
def test_what_is_understood_is_exact_without_a_word(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = train(kind, {"micro_batch_size": 5})
    assert_close(found, train(kind), 2e-6)


@pytest.mark.parametrize("kind", [SumOverSamples, Normalized, Coupled])
def test_what_is_not_understood_is_told_once(kind):
    with pytest.warns(UserWarning) as caught:
        found = train(kind, {"micro_batch_size": 5})
    assert told(caught) == [WARNING]
    expected = train(kind)
    if kind is SumOverSamples:  # A mean over samples, which is what is taken.
        assert_close(found, expected, 3e-6)
    else:
        assert_differ(found, expected)
    assert_close(train(kind, {"micro_batch_size": 5, "two_pass": True}), expected, 3e-6)


@pytest.mark.slow
def test_the_optimizer_weighs_by_the_hook_too():
    assert_close(train(OwnMean, batch=5, steps=3), train(OwnMean), 2e-6)
    assert_close(train(Super, batch=5, steps=3), train(Super), 2e-6)
    with pytest.warns(UserWarning) as caught:
        train(Normalized, batch=5, steps=3)
    assert told(caught) == [WARNING]


def test_masked_tokens_of_an_override_are_weighted_by_themselves():
    class Texts(keras.Model):
        def __init__(self):
            super().__init__()
            self.inside = token_model()

        def call(self, x):
            return self.inside(x)

        def compute_loss(self, x, y, y_pred, sample_weight=None, **kwargs):
            return super().compute_loss(x, y, y_pred, sample_weight, **kwargs)

    x, y = tokens()
    found = []
    for split in ({"micro_batch_size": 4}, None):
        model = Texts()
        model(x[:1])
        if split:
            ka.accumulate(model, **split)
        model.compile(keras.optimizers.SGD(0.5), cross_entropy(), jit_compile=False)
        model.train_on_batch(x, y)
        found.append(model.get_weights())
    assert_close(*found)


def test_a_train_step_that_calls_a_loss_object():
    class Own(keras.Model):
        loss_fn = mse()

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.loss_fn(y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_weights)
            self.optimizer.apply(gradients, self.trainable_weights)
            return {"loss": loss}

    def run(optimizer, batch, **options):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((5,))
        model = Own(inputs, keras.layers.Dense(3)(inputs))
        model.compile(optimizer, **options)
        x, y = data(13)
        model.fit(x, y, batch_size=batch, shuffle=False, verbose=0)
        return model.get_weights()

    for options in ({"jit_compile": False}, {"run_eagerly": True}):
        expected = run(keras.optimizers.SGD(0.1), 13, **options)
        optimizer = ka.AccumOptimizer(keras.optimizers.SGD(0.1), 4)
        with warnings.catch_warnings():
            # Not even because another model has computed losses before.
            warnings.simplefilter("error", UserWarning)
            assert_close(run(optimizer, 4, **options), expected)


def test_a_loop_whose_weight_nothing_tells_is_told_once():
    optimizer = ka.AccumOptimizer(keras.optimizers.SGD(0.1), 2)
    variable = keras.Variable([1.0, 2.0])
    expected = (
        "The weight of a micro-batch is not known: no Keras loss, or more than one, was "
        "differentiated since the last `apply`. Each counts as 1, which is the large batch "
        "if all divide by the same. Else pass what the loss divides by: "
        "`optimizer.apply(gradients, variables, weight=...)`."
    )
    with pytest.warns(UserWarning) as caught:
        for _ in range(3):
            optimizer.apply([tf.constant([1.0, 1.0])], [variable])
    assert told(caught) == [expected]
    quiet = (
        (ka.AccumOptimizer("sgd", 1), None),
        (ka.AccumOptimizer("sgd", 2, reduction="sum"), None),
        (ka.AccumOptimizer("sgd", 2), 3.0),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for optimizer, weight in quiet:
            optimizer.apply([tf.constant([1.0, 1.0])], [variable], weight=weight)


def test_a_loss_of_validation_is_not_a_micro_batchs():
    optimizer = ka.AccumOptimizer(keras.optimizers.SGD(1.0), 2)
    variable = keras.Variable([1.0])
    optimizer.build([variable])
    loss_fn, ones = mse(), np.ones((3, 1), "float32")
    for target in (ones, 4 * ones[:1]):
        with tf.GradientTape() as tape:
            loss = loss_fn(target, tf.ones((len(target), 1)) * variable.value)
        loss_fn(ones, ones)  # No tape sees it.
        optimizer.apply(tape.gradient(loss, [variable.value]), [variable])
    # Σ w g / Σ w with weights 3 and 1 and gradients 0 and -6.
    assert_close(variable, np.array([1.0 + 6 / 4]))


# --- Compiled losses of the user's.

COUPLED = (
    "A loss of this model is not made of losses of its samples alone: its values depend on "
    "the batch as a whole, are not one or more of each sample, or are reduced by the loss "
    "itself. Micro-batches weigh by their samples. Return values of each sample from "
    "`call`, and let Keras reduce them; or use `accumulate(model, ..., two_pass=True)`, "
    "which is exact for any loss of the predictions."
)


def squares(y, y_pred):
    return keras.ops.mean(keras.ops.square(y - y_pred), axis=-1)


def divided_by_batch(y, y_pred):
    return squares(y, y_pred) / keras.ops.cast(keras.ops.shape(y)[0], "float32")


def balanced(y, y_pred):
    weights = keras.ops.cast(y[:, 0] > 0, "float32") + 0.5
    return weights / keras.ops.mean(weights) * squares(y, y_pred)


def each_feature(y, y_pred):
    return keras.ops.mean(keras.ops.square(y - y_pred), axis=0)


def one_value(y, y_pred):
    return keras.ops.reshape(keras.ops.mean(keras.ops.square(y - y_pred)), (1,))


class MeanByWeights(keras.losses.Loss):
    """Reduces by itself, so that Keras is not asked to."""

    def __call__(self, y, y_pred, sample_weight=None):
        return keras.ops.sum(squares(y, y_pred) * sample_weight) / keras.ops.sum(
            sample_weight
        )


class OfSamples(keras.losses.Loss):
    """A loss of the user's as it should be."""

    def call(self, y, y_pred):
        return keras.ops.max(keras.ops.abs(y - y_pred), axis=-1)


def train_by(loss, batch, optimizer=None, **split):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
    if split:
        ka.accumulate(model, **split)
    model.compile(optimizer or keras.optimizers.SGD(0.1), loss, run_eagerly=True)
    x, y = data(14, outputs=3)
    weights = (0.5 + np.arange(14) % 3).astype("float32")
    of_features = loss is each_feature or hasattr(loss, "of_features")
    weights = None if of_features else weights
    model.fit(x, y, batch, sample_weight=weights, shuffle=False, verbose=0)
    return model.get_weights()


def of_features(loss):
    """A loss of Keras's that has no values of samples."""
    loss.of_features = True
    return loss


ROUTES = {
    "step": lambda loss: train_by(loss, 14, micro_batch_size=4),
    "optimizer": lambda loss: train_by(
        loss, 4, ka.AccumOptimizer(keras.optimizers.SGD(0.1), 4)
    ),
}


@pytest.mark.slow_but("<lambda>0-optimizer")
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "make",
    [
        lambda: divided_by_batch,
        lambda: balanced,
        lambda: each_feature,
        lambda: one_value,
        MeanByWeights,
        lambda: keras.losses.get(balanced),
        lambda: of_features(keras.losses.CosineSimilarity(axis=0)),
        lambda: of_features(keras.losses.Dice(axis=(0,))),
        lambda: of_features(keras.losses.CategoricalCrossentropy(True, axis=0)),
    ],
)
def test_a_compiled_loss_that_does_not_fall_apart_is_said_once(make, route):
    with pytest.warns(UserWarning) as caught:
        ROUTES[route](make())
    assert told(caught) == [COUPLED]
    exact = train_by(make(), 14, micro_batch_size=4, two_pass=True)
    assert_close(exact, train_by(make(), 14), 2e-6)


@pytest.mark.slow_but("CosineSimilarity-step")
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "make",
    [
        OfSamples,
        lambda: squares,
        lambda: "huber",
        keras.losses.CosineSimilarity,
        lambda: keras.losses.Dice(axis=(1,)),
    ],
)
def test_a_compiled_loss_of_samples_is_exact(make, route, recwarn):
    found = ROUTES[route](make())
    expected = train_by(make(), 14)
    assert_close(found, expected, 2e-6)
    assert_differ(found, train_by(divided_by_batch, 14))
    assert told(recwarn) == []


def entropies(y, y_pred):
    labels = keras.ops.clip(y, 0, 3)
    return keras.ops.sparse_categorical_crossentropy(labels, y_pred, from_logits=True)


def marked(mark):
    """The mean over the labels that are not `mark`: divided by their share."""

    def loss(y, y_pred):
        valid = keras.ops.cast(y != mark, "float32")
        return entropies(y, y_pred) * valid / keras.ops.mean(valid)

    return loss


class Unmarked(keras.losses.Loss):
    """Reduces by itself: Keras tells of no term."""

    def __call__(self, y, y_pred, sample_weight=None):
        valid = keras.ops.cast(y != -7, "float32")
        return keras.ops.sum(entropies(y, y_pred) * valid) / keras.ops.sum(valid)


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize(
    "make",
    [*(lambda mark=mark: marked(mark) for mark in (0, -1, -100, 3, 255)), Unmarked],
)
def test_a_loss_of_unmarked_labels_is_told_once(make, mode):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6, 3)), keras.layers.Dense(4)])
    ka.accumulate(model, micro_batch_size=5)
    model.compile("sgd", make(), run_eagerly=mode == "eager", jit_compile=False)
    x = np.random.default_rng(0).normal(size=(12, 6, 3)).astype("float32")
    with pytest.warns(UserWarning) as caught:
        model.train_on_batch(x, np.arange(72).reshape(12, 6) % 4)
    assert told(caught) == [COUPLED]


def reads_numbers(y, y_pred):
    return squares(y, y_pred) + 0.0 * float(keras.ops.max(y_pred).numpy())


@pytest.mark.parametrize("two_pass", [False, True])
def test_a_loss_for_eager_mode_only_is_exact(two_pass):
    def train(loss, **split):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
        if split:
            ka.accumulate(model, **split)
        sgd = keras.optimizers.SGD(0.1, momentum=0.9)
        model.compile(sgd, loss, metrics=["mae"], run_eagerly=True)
        for _ in range(2):
            logs = model.train_on_batch(*data(12), return_dict=True)
        return [*model.get_weights(), *logs.values()]

    expected = train(reads_numbers)
    found = train(reads_numbers, micro_batch_size=5, two_pass=two_pass)
    assert_close(found, expected, 2e-6)
    assert_differ(train("mae"), expected)


class OfPositive(keras.losses.Loss):
    """Of one output a sample: a part of a batch may have nothing to divide by."""

    def __call__(self, y, y_pred, sample_weight=None):
        chosen = keras.ops.cast(y > 0, "float32")
        error = keras.ops.square(y - y_pred) * chosen
        return keras.ops.sum(error) / keras.ops.sum(chosen)


def test_a_loss_that_a_part_may_not_have_is_told_once():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    ka.accumulate(model, micro_batch_size=5)
    model.compile("sgd", OfPositive(), run_eagerly=True)
    with pytest.warns(UserWarning) as caught:
        model.train_on_batch(*data(12, outputs=1))
    assert told(caught) == [COUPLED]


def test_keras_own_loss_of_pairs_of_samples_is_known():
    keras.utils.set_random_seed(1)
    model = ka.accumulate(
        keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)]), accum_steps=2
    )
    model.compile("sgd", keras.losses.Circle(), run_eagerly=True)
    with pytest.warns(UserWarning) as caught:
        model.train_on_batch(data(8)[0], np.arange(8) % 3)
    assert told(caught) == [COUPLED]


SUM_ROUTES = {
    "optimizer": {"batch": 4, "accum_steps": 3},
    "graph": {"batch": 4, "accum_steps": 3},
    "both": {"batch": 6, "accum_steps": 2, "micro_batch_size": 4},
    "both, two passes": {
        **{"batch": 6, "accum_steps": 2, "micro_batch_size": 4},
        "two_pass": True,
    },
    "step": {"batch": 12, "micro_batch_size": 5},
}


def train_sums(kind, batch, accum_steps=0, eager=True, times=1.0, **split):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((5,))
    dense = keras.layers.Dense(3, kernel_regularizer=keras.regularizers.L2(0.5))
    model = kind(inputs, dense(inputs))
    model.times = times
    if split:
        ka.accumulate(model, **split)
    optimizer = keras.optimizers.SGD(0.02)
    if accum_steps:
        optimizer = ka.AccumOptimizer(optimizer, accum_steps, reduction="sum")
    model.compile(optimizer, run_eagerly=eager, jit_compile=False)
    model.fit(*data(12, outputs=3), batch, shuffle=False, verbose=0)
    return model.get_weights()


@pytest.mark.slow_but("1.0-optimizer", "1.0-both", "1.0-step", "0.5-graph")
@pytest.mark.parametrize("route", SUM_ROUTES)
@pytest.mark.parametrize("times", [0.0, 1.0, 0.5])
def test_a_window_of_sums_has_regularizers_as_often_as_the_loss(times, route, recwarn):
    """Once in a window, if the loss adds them; not less than not at all, if it does not."""
    how = {"times": times, "eager": route != "graph"}
    expected = train_sums(Regularized, 12, **how)
    assert_close(train_sums(Regularized, **SUM_ROUTES[route], **how), expected, 2e-6)
    assert_differ(train_sums(Regularized, 12, times=times + 0.5), expected)
    assert told(recwarn) == []


@pytest.mark.slow_but("graph")
@pytest.mark.parametrize("route", SUM_ROUTES)
def test_a_penalty_by_hand_beside_sums_is_exact_in_the_step_alone(route):
    eager = route != "graph"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        found = train_sums(Penalized, **SUM_ROUTES[route], eager=eager)
    expected = train_sums(Penalized, 12, eager=eager)
    if route == "step":
        assert_close(found, expected, 2e-6)
        assert told(caught) == []
        return
    assert_differ(found, expected)
    assert told(caught) == [
        "The `compute_loss` of this model adds something to sums over samples that does "
        "not grow with them, such as a penalty on weights. An optimizer with "
        "`reduction='sum'` adds it up over the micro-batches. Give the weights a "
        "`kernel_regularizer`, which counts once in a window; or use `accumulate(model, "
        "...)` and a plain optimizer."
    ]
