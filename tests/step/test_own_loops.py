"""Loops of the user's, which call Keras losses: exact, or told what is not."""

import contextlib
import gc
import warnings
import weakref

import keras
import pytest
import tensorflow as tf
from helpers import assert_close, assert_differ, data, told
from test_own_loss import OfSamples, balanced, each_feature

import keras_accum as ka
from keras_accum._core import accumulate

X, Y = data(12, outputs=3)
COUPLED = (
    "A Keras loss of this loop is not made of losses of its samples alone: its values "
    "depend on the batch as a whole, are not one or more of each sample, or are reduced by "
    "the loss itself. Micro-batches do not add up to the large batch. Return values of "
    "each sample from `call`, and let Keras reduce them; or let Keras's own `train_step` "
    "compute it, with `accumulate(model, ..., two_pass=True)`, which is exact for any loss "
    "of the predictions."
)
MEAN_IN_SUM = (
    "A Keras loss that is a mean was differentiated since the last `apply`. This "
    "optimizer, with `reduction='sum'`, adds up the means of the micro-batches. Give the "
    "loss `reduction='sum'`; or leave `reduction` out of `AccumOptimizer`, which takes "
    "their weighted mean. If the loss is multiplied by its samples, it is a sum: say so by "
    "`optimizer.apply(gradients, variables, weight=1)`."
)
SUM_IN_MEAN = (
    "A Keras loss with `reduction='sum'` was differentiated since the last `apply`. This "
    "optimizer takes the mean over the micro-batches. For the sum, as the large batch has "
    "it, write `AccumOptimizer(..., reduction='sum')`. If the loss is divided afterwards, "
    "pass by what: `optimizer.apply(gradients, variables, weight=...)`."
)
REGULARIZERS = (
    "Weights have regularizers, and this optimizer, with `reduction='sum'`, adds up. If "
    "the loss of this loop contains `model.losses`, they count in each micro-batch, where "
    "the large batch has them once. Take the loss from `model.compute_loss`, in which they "
    "count once in a window. If they are not in the loss, say so by "
    "`optimizer.apply(gradients, variables, weight=1)`."
)
mse, mae = keras.losses.MeanSquaredError, keras.losses.MeanAbsoluteError


def model_of(regularizer=None, adds=None):
    keras.utils.set_random_seed(1)
    penalty = "l2" if adds is activity else None
    dense = keras.layers.Dense(
        3, kernel_regularizer=regularizer, activity_regularizer=penalty
    )
    model = keras.Sequential([keras.Input((5,)), dense])
    if adds is not None and adds is not activity:
        model.add(Adds(adds))
    return model


def train(
    loss_fn, batch, optimizer=None, mode="eager", regularizer=None, adds=None, **apply
):
    """One update, by a loop: the loss, and the penalties of layers."""
    model = model_of(regularizer, adds)
    optimizer = optimizer or keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
            loss += sum(map(keras.ops.sum, model.losses))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables, **apply)

    if mode == "graph":
        step = tf.function(step, autograph=False)
    for start in range(0, len(X), batch):
        step(X[start : start + batch], Y[start : start + batch])
    return model.get_weights()


def window(accum_steps=3, reduction="mean"):
    inner = keras.optimizers.SGD(0.01)
    return ka.AccumOptimizer(inner, accum_steps, reduction=reduction)


class Balanced(keras.losses.Loss):
    def call(self, y, y_pred):
        return balanced(y, y_pred)


class EachFeature(keras.losses.Loss):
    def call(self, y, y_pred):
        return each_feature(y, y_pred)


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize(
    "make",
    [
        Balanced,
        EachFeature,
        lambda: keras.losses.CategoricalCrossentropy(True, axis=0),
    ],
)
def test_a_loss_that_does_not_fall_apart_is_told_once(make, mode):
    with pytest.warns(UserWarning) as caught:
        found = train(make(), 5, window(), mode)
    assert told(caught) == [COUPLED]
    assert_differ(found, train(make(), 12))


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("make", [OfSamples, mse])
def test_a_loss_of_samples_is_exact_without_a_word(make, mode, recwarn):
    found = train(make(), 5, window(), mode)
    assert_close(found, train(make(), 12))
    assert_differ(found, train(mae(), 12))
    assert told(recwarn) == []


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize(
    "reduction, loss, said",
    [("sum", "mean", MEAN_IN_SUM), ("mean", "sum", SUM_IN_MEAN)],
)
def test_a_loss_of_the_other_reduction_is_told_once(reduction, loss, said, mode):
    loss = mse(reduction="sum" if loss == "sum" else "sum_over_batch_size")
    with pytest.warns(UserWarning) as caught:
        train(loss, 4, window(reduction=reduction), mode)
    assert told(caught) == [said]


def test_a_loss_that_is_not_differentiated_does_not_count(recwarn):
    def loss_fn(y, y_pred):
        mae()(y, y_pred)  # To be looked at.
        return mse()(y, y_pred)

    assert_close(train(loss_fn, 5, window()), train(mse(), 12))
    assert told(recwarn) == []


def test_a_loss_of_another_loop_does_not_count(recwarn):
    ours = window()
    ours.build(model_of().trainable_variables)
    train(mse(), 6)  # Of a plain optimizer, while losses are heard.
    assert_close(train(mse(), 5, window()), train(mse(), 12))
    assert told(recwarn) == []


def test_a_mean_times_its_samples_is_a_sum_by_word(recwarn):
    def loss_fn(y, y_pred):
        return mse()(y, y_pred) * tf.cast(tf.shape(y)[0], "float32")

    found = train(loss_fn, 5, window(reduction="sum"), weight=1)
    assert_close(found, train(mse(reduction="sum"), 12))
    assert_differ(found, train(mse(), 12))
    assert told(recwarn) == []


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_regularizers_in_a_loop_of_sums_are_told_once(mode):
    with pytest.warns(UserWarning) as caught:
        train(mse(reduction="sum"), 4, window(reduction="sum"), mode, "l2")
    assert told(caught) == [REGULARIZERS]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        train(mse(reduction="sum"), 4, window(reduction="sum"), mode)
        train(mse(reduction="sum"), 12, window(1, "sum"), mode, "l2")
        train(mse(), 4, window(), mode, "l2")


SCALED = (
    "The Keras loss of this loop is multiplied by something else in each micro-batch, as "
    "in `loss * samples` or `sqrt(loss)`. A window weighs a micro-batch by what its Keras "
    "loss was divided by, which is not the large batch then. Pass what the loss that you "
    "differentiate is divided by: `optimizer.apply(gradients, variables, weight=...)`; or "
    "let Keras's own `train_step` compute it, with `accumulate(model, ..., "
    "two_pass=True)`, which is exact for any loss of the predictions."
)


def root(y, y_pred):
    return keras.ops.sqrt(mse()(y, y_pred))


def times_samples(y, y_pred):
    return mse()(y, y_pred) * tf.cast(tf.shape(y)[0], "float32")


def times_weight(y, y_pred):
    return mse()(y, y_pred) * tf.reduce_mean(tf.abs(y))


def scaled(y, y_pred):
    return 0.3 * mse()(y, y_pred) / 7.0


@pytest.mark.parametrize(
    ("loss_fn", "mode"),
    [
        (root, "eager"),
        (root, "graph"),
        (times_weight, "eager"),
        (times_weight, "graph"),
        # In a graph, each size of batch has a graph of its own, with a constant in it.
        (times_samples, "eager"),
    ],
)
def test_a_loss_that_counts_otherwise_in_each_micro_batch_is_told_once(loss_fn, mode):
    with pytest.warns(UserWarning) as caught:
        found = train(loss_fn, 5, window(), mode)
    assert told(caught) == [SCALED]
    assert_differ(found, train(loss_fn, 12))


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_loss_times_a_constant_is_exact_without_a_word(mode, recwarn):
    found = train(scaled, 5, window(), mode)
    assert_close(found, train(scaled, 12))
    assert_differ(found, train(mse(), 12))
    optimizer = ka.AccumOptimizer(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01)), 3
    )

    def scaled_loss(y, y_pred):
        return optimizer.scale_loss(mse()(y, y_pred))

    assert_close(train(scaled_loss, 5, optimizer, mode), train(mse(), 12))
    assert told(recwarn) == []


# --- What layers add.

ADDED = {
    "mean": (
        "Layers add losses in this loop (`add_loss`, an activity regularizer), and the "
        "window weighs them as the Keras loss: by samples, as a mean over samples. It is "
        "not the large batch if they are sums, or if masks or sample weights give the "
        "Keras loss another denominator. `accumulate(model, ...)` is exact for both. If "
        "they are right as they are, say so by `optimizer.apply(gradients, variables, "
        "weight=...)`, with what the Keras loss is divided by."
    ),
    "sum": (
        "Layers add losses in this loop (`add_loss`, an activity regularizer) that may be "
        "means over samples, and this optimizer, with `reduction='sum'`, adds up the means "
        "of the micro-batches. `accumulate(model, ...)` is exact. If they are sums over "
        "samples, say so by `optimizer.apply(gradients, variables, weight=1)`."
    ),
}


class Adds(keras.layers.Layer):
    def __init__(self, reduce, **options):
        super().__init__(**options)
        self.reduce = reduce

    def call(self, x):
        self.add_loss(0.1 * self.reduce(x**2))
        return x


def total(x):
    return keras.ops.sum(x)


def of_samples(x):
    return keras.ops.sum(x, axis=-1)


def weighted(y, y_pred):
    loss_fn = mse(reduction="mean_with_sample_weight")
    return loss_fn(y, y_pred, sample_weight=tf.abs(y[:, 0]))


def activity(_):
    """Of the layer: a mean over samples, in newer versions of Keras."""


version = tuple(map(int, keras.__version__.split(".")[:2]))
ACTIVITY_IS_MEAN = pytest.mark.skipif(version < (3, 14), reason="a sum to Keras 3.13")


# What the window weighs otherwise than the large batch does.
INEXACT = pytest.mark.parametrize(
    ("reduction", "adds", "loss"),
    [
        ("mean", total, mse()),
        ("mean", of_samples, mse()),
        ("mean", activity, weighted),
        ("sum", keras.ops.mean, mse(reduction="sum")),
    ],
)


@INEXACT
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_what_layers_add_in_a_loop_is_told_once(reduction, adds, loss, mode):
    with pytest.warns(UserWarning) as caught:
        found = train(loss, 5, window(reduction=reduction), mode, adds=adds)
    assert told(caught) == [ADDED[reduction]]
    assert_differ(found, train(loss, 12, adds=adds))


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize(
    ("reduction", "adds"),
    [pytest.param("mean", activity, marks=ACTIVITY_IS_MEAN), ("sum", of_samples)],
)
def test_what_layers_add_is_exact_where_it_is_known(reduction, adds, mode, recwarn):
    loss_fn = mse(reduction="sum" if reduction == "sum" else "sum_over_batch_size")
    found = train(loss_fn, 5, window(reduction=reduction), mode, adds=adds)
    assert_close(found, train(loss_fn, 12, adds=adds))
    assert_differ(found, train(loss_fn, 12))
    assert told(recwarn) == []


# --- `accumulate_gradients`.


def accumulated(loss, mode, reduction="mean", regularizer=None, adds=None, **split):
    """The loss, with the penalties of layers if there are any, and the gradients."""
    model = model_of(regularizer, adds)

    def loss_fn(batch):
        x, y = batch
        value = loss(y, model(x, training=True))
        penalties = list(map(keras.ops.sum, model.losses))
        return value + sum(penalties) if penalties else value

    def compute(batch):
        return ka.accumulate_gradients(
            loss_fn, model.trainable_variables, batch, reduction=reduction, **split
        )

    if mode == "graph":
        compute = tf.function(compute, autograph=False)
    value, gradients = compute((tf.constant(X), tf.constant(Y)))
    return [value, *gradients]


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_regularizers_count_once_where_losses_are_added_up(mode, monkeypatch):
    loss, regularizer = mse(reduction="sum"), keras.regularizers.L2(0.5)
    expected = accumulated(loss, mode, "sum", regularizer, accum_steps=1)
    found = accumulated(loss, mode, "sum", regularizer, micro_batch_size=5)
    assert_close(found, expected)
    assert regularizer.l2 == 0.5  # As it was.
    not_shared = lambda *_: contextlib.nullcontext()  # noqa: E731
    monkeypatch.setattr(accumulate, "share_regularizers", not_shared)
    found = accumulated(loss, mode, "sum", regularizer, micro_batch_size=5)
    assert_differ(found, expected)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_loss_function_that_couples_samples_is_told_once(mode):
    loss = Balanced()
    with pytest.warns(UserWarning) as caught:
        accumulated(loss, mode, micro_batch_size=5)
        accumulated(loss, mode, micro_batch_size=5)
    assert told(caught) == [COUPLED]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        accumulated(OfSamples(), mode, micro_batch_size=5)


FUNCTION_SCALED = (
    "`loss_fn` multiplies its Keras loss by something else in each micro-batch, as in "
    "`loss * samples` or `sqrt(loss)`. Micro-batches weigh by what the Keras loss was "
    "divided by, which is not the large batch then. Return a pair, the loss and its "
    "weight: what it was divided by."
)
FUNCTION_ADDS = {
    "mean": (
        "Layers add losses in `loss_fn` (`add_loss`, an activity regularizer). If the loss "
        "contains them (`model.losses`), they are weighted as it is: as a mean over "
        "samples. It is not the large batch if they are sums, or if masks or sample "
        "weights give the loss another denominator. `accumulate(model, ...)` is exact for "
        "both."
    ),
    "sum": (
        "Layers add losses in `loss_fn` (`add_loss`, an activity regularizer) that may be "
        "means over samples. If the loss contains them (`model.losses`), the means of the "
        "micro-batches are added up. `accumulate(model, ...)` is exact."
    ),
}


def averaged(y, y_pred):
    return tf.reduce_mean(mse()(y, y_pred))


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("loss", [root, times_samples, times_weight])
def test_a_function_that_scales_its_loss_otherwise_is_told_once(loss, mode):
    with pytest.warns(UserWarning) as caught:
        found = accumulated(loss, mode, micro_batch_size=5)
    assert told(caught) == [FUNCTION_SCALED]
    assert_differ(found, accumulated(loss, mode, accum_steps=1))


@INEXACT
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_what_layers_add_in_a_function_is_told_once(reduction, adds, loss, mode):
    with pytest.warns(UserWarning) as caught:
        found = accumulated(loss, mode, reduction, adds=adds, micro_batch_size=5)
    assert told(caught) == [FUNCTION_ADDS[reduction]]
    whole = model_of(adds=adds)
    with tf.GradientTape() as tape:
        value = loss(Y, whole(X, training=True))
        value += sum(map(keras.ops.sum, whole.losses))
    assert_differ(found[1:], tape.gradient(value, whole.trainable_variables))


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize(
    ("reduction", "adds", "loss"),
    [
        ("mean", None, scaled),
        ("mean", None, averaged),
        pytest.param("mean", activity, mse(), marks=ACTIVITY_IS_MEAN),
        ("sum", of_samples, mse(reduction="sum")),
    ],
)
def test_a_function_is_exact_without_a_word(reduction, adds, loss, mode, recwarn):
    found = accumulated(loss, mode, reduction, adds=adds, micro_batch_size=5)
    assert_close(found, accumulated(loss, mode, reduction, adds=adds, accum_steps=1))
    assert_differ(found, accumulated(mae(reduction="sum"), mode, "sum", accum_steps=1))
    assert told(recwarn) == []


# --- What is remembered of a loop.


def test_a_loop_that_is_over_keeps_no_graph():
    optimizer, model = window(), model_of()
    optimizer.build(model.trainable_variables)
    graphs = []

    @tf.function(autograph=False)
    def step(x, y):  # Its gradients reach no optimizer.
        graphs.append(weakref.ref(tf.compat.v1.get_default_graph()))
        with tf.GradientTape() as tape:
            loss = mse()(y, model(x, training=True))
        return tape.gradient(loss, model.trainable_variables)

    step(X, Y)
    assert graphs[0]() is not None
    del step
    gc.collect()
    assert graphs[0]() is None
