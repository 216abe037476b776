"""Loops of the user's, which call Keras losses: exact, or told what is not."""

import contextlib
import warnings

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
    "A Keras loss that is a mean was computed since the last `apply`, and this optimizer, "
    "with `reduction='sum'`, adds up the means of the micro-batches. Give the loss "
    "`reduction='sum'`; or leave `reduction` out of `AccumOptimizer`, which takes their "
    "weighted mean. If the loss is multiplied by its samples, it is a sum: say so by "
    "`optimizer.apply(gradients, variables, weight=1)`."
)
SUM_IN_MEAN = (
    "A Keras loss with `reduction='sum'` was computed since the last `apply`, and this "
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


def model_of(regularizer=None):
    keras.utils.set_random_seed(1)
    dense = keras.layers.Dense(3, kernel_regularizer=regularizer)
    return keras.Sequential([keras.Input((5,)), dense])


def train(loss_fn, batch, optimizer=None, mode="eager", regularizer=None, **apply):
    """One update, by a loop: the loss, and the penalties of layers."""
    model = model_of(regularizer)
    optimizer = optimizer or keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
            loss += sum(model.losses)
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


# --- `accumulate_gradients`.


def gradients_of(loss, reduction, mode, **split):
    model = model_of(keras.regularizers.L2(0.5))

    def loss_fn(batch):
        x, y = batch
        return loss(y, model(x, training=True)) + sum(model.losses)

    def compute(batch):
        return ka.accumulate_gradients(
            loss_fn, model.trainable_variables, batch, reduction=reduction, **split
        )

    if mode == "graph":
        compute = tf.function(compute, autograph=False)
    value, gradients = compute((tf.constant(X), tf.constant(Y)))
    assert model.layers[0].kernel.regularizer.l2 == 0.5  # As it was.
    return [value, *gradients]


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_regularizers_count_once_where_losses_are_added_up(mode, monkeypatch):
    loss = mse(reduction="sum")
    expected = gradients_of(loss, "sum", mode, accum_steps=1)
    found = gradients_of(loss, "sum", mode, micro_batch_size=5)
    assert_close(found, expected)
    not_shared = lambda *_: contextlib.nullcontext()  # noqa: E731
    monkeypatch.setattr(accumulate, "share_regularizers", not_shared)
    assert_differ(gradients_of(loss, "sum", mode, micro_batch_size=5), expected)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_loss_function_that_couples_samples_is_told_once(mode):
    loss = Balanced()
    with pytest.warns(UserWarning) as caught:
        gradients_of(loss, "mean", mode, micro_batch_size=5)
        gradients_of(loss, "mean", mode, micro_batch_size=5)
    assert told(caught) == [COUPLED]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        gradients_of(OfSamples(), "mean", mode, micro_batch_size=5)
