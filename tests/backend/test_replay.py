"""Random numbers that follow the sample: the same wherever it stands in a batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_differ, assert_equal

from keras_accum._backend.private.replay import RandomBySample

X = np.random.default_rng(0).normal(size=(6, 4)).astype("float32")
DRAWS = {
    "dropout": lambda x: keras.random.dropout(x + 9, 0.5),
    "dropout with noise_shape": lambda x: keras.random.dropout(x + 9, 0.5, (None, 1)),
    "uniform": lambda x: keras.random.uniform(keras.ops.shape(x), 2, 3),
    "normal": lambda x: keras.random.normal(keras.ops.shape(x), 1.0, 2.0),
    "truncated_normal": lambda x: keras.random.truncated_normal(keras.ops.shape(x)),
    "randint": lambda x: keras.random.randint(keras.ops.shape(x), 0, 99),
    "binomial": lambda x: keras.random.binomial(keras.ops.shape(x), 1, 0.5),
    "categorical": lambda x: keras.random.categorical(x, 5),
}


def drawn(draw, x, place="model"):
    with RandomBySample() as random, random.following(x, place):
        return draw(tf.constant(x)).numpy()


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_sample_draws_the_same_in_any_batch(draw):
    whole = drawn(draw, X)
    for rows in ([3], [5, 0, 2], [1, 2, 3, 4, 5]):
        if rows != [3] or draw is DRAWS["categorical"]:  # One row may be for all of them.
            assert_equal(drawn(draw, X[rows]), whole[rows])
    assert_differ(whole[:3], whole[3:], what="samples draw alike")
    assert_differ(drawn(draw, X, "elsewhere"), whole, what="places draw alike")


def test_a_row_of_one_follows_its_sample_too():
    whole = drawn(DRAWS["dropout"], X)
    assert_equal(drawn(DRAWS["dropout"], X[[3]]), whole[[3]])


def test_in_a_graph_it_is_as_it_is_outside():
    random = RandomBySample()

    @tf.function(input_signature=[tf.TensorSpec([None, 4])])
    def graph(x):
        with random, random.following(x, "model"):
            return keras.random.normal(keras.ops.shape(x), 1.0, 2.0)

    assert_equal(graph(X), drawn(DRAWS["normal"], X))


def test_the_distributions_are_those_of_their_names():
    x = np.random.default_rng(1).normal(size=(4000, 5)).astype("float32")
    found = {name: drawn(draw, x) for name, draw in DRAWS.items()}
    assert (
        abs(found["normal"].mean() - 1) < 0.05 and abs(found["normal"].std() - 2) < 0.05
    )
    assert abs(found["uniform"].mean() - 2.5) < 0.01
    assert found["uniform"].min() >= 2 and found["uniform"].max() < 3
    assert np.abs(found["truncated_normal"]).max() <= 2
    assert abs(found["truncated_normal"].std() - 0.88) < 0.02
    assert (found["randint"].min(), found["randint"].max()) == (0, 98)
    assert abs(found["binomial"].mean() - 0.5) < 0.02
    kept = found["dropout"] != 0
    assert abs(kept.mean() - 0.5) < 0.02
    np.testing.assert_allclose(found["dropout"][kept], 2 * (x + 9)[kept], rtol=1e-6)
    same = (found["dropout with noise_shape"] != 0).sum(axis=1)
    assert set(same.tolist()) == {0, 5}


def test_outside_of_it_keras_draws_as_ever():
    before = keras.random.normal
    with RandomBySample() as random:
        assert_equal(
            keras.random.normal((3,), seed=1), tf.random.stateless_normal([3], [1, 0])
        )
        assert random.drawn == 0
    assert keras.random.normal is before
    assert "RandomBySample" not in keras.src.backend.random.normal.__qualname__


@pytest.mark.parametrize(
    "inputs",
    [
        tf.ragged.constant([[1, 2], [3], [4, 5, 6]]),
        tf.constant([["a"], ["b"], ["c"]]),
        {"a": tf.constant([1.0, 2.0, 3.0]), "b": tf.constant([True, False, True])},
    ],
    ids=["ragged", "strings", "dict"],
)
def test_samples_of_any_kind_have_keys(inputs):
    def numbers(inputs, rows):
        with RandomBySample() as random, random.following(inputs, "model"):
            return keras.random.uniform((rows, 3)).numpy()

    rest = tf.nest.map_structure(lambda leaf: leaf[1:], inputs)
    whole = numbers(inputs, 3)
    assert_equal(numbers(rest, 2), whole[1:])
    assert_differ(whole[0], whole[1])
