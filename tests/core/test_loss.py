"""What a micro-batch weighs, against what Keras divides by."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_close, assert_differ

from keras_accum._core import own_loss
from keras_accum._core.loss import record_terms


def masked(shape):
    """Predictions with a Keras mask of `shape`, as a layer hands them on."""
    rng = np.random.default_rng(1)
    predictions = tf.constant(rng.normal(size=(3, 4, 2)), "float32")
    predictions._keras_mask = tf.constant(rng.integers(0, 2, size=shape) > 0)
    return predictions


@pytest.mark.parametrize(
    ("mask", "weights"),
    [((3, 4), (3, 4)), ((3, 4, 1), (3, 4)), ((3, 4), (3, 4, 1)), ((3, 4), (3, 1))],
    ids=["same", "mask with an axis of 1", "weights with an axis of 1", "per sample"],
)
def test_a_mask_and_weights_are_matched_as_keras_matches_them(mask, weights):
    rng = np.random.default_rng(2)
    weights = tf.constant(rng.uniform(0.1, 3, weights), "float32")
    y, y_pred = tf.constant(rng.normal(size=(3, 4, 2)), "float32"), masked(mask)
    with record_terms(rows=3) as terms:
        mean = keras.losses.MeanSquaredError("mean_with_sample_weight")(
            y, y_pred, weights
        )
    total = keras.losses.MeanSquaredError("sum")(y, y_pred, weights)
    assert_close(terms[0].weight * mean, total)
    # Without the mask, the denominator is another.
    assert_differ(tf.reduce_sum(weights) * mean, total)


def test_the_graph_of_a_loss_is_read_however_deep_it_is():
    with tf.Graph().as_default():
        loss = tf.compat.v1.placeholder("float32", ())
        total, deep = loss, loss
        for _ in range(2000):
            total, deep = total + 1.0, tf.nn.relu(deep)
        assert own_loss.is_term_of(2.0 * total, loss)
        assert not own_loss.is_term_of(tf.sqrt(total), loss)
        assert own_loss.depends_on_data(deep)
        assert not own_loss.depends_on_data(tf.constant(2.0) * 3.0)
