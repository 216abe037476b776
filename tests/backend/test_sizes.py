"""Sizes in bytes, and each object once."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import compile_in, data, dense_model

from keras_accum._backend.identity import unique
from keras_accum._backend.sizes import bytes_of
from keras_accum._planning.measure import StepProfiler


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (tf.zeros((3, 2)), 24),
        (tf.zeros(()), 4),
        (tf.zeros((0, 5)), 0),
        (np.zeros((3, 2)), 48),
        (keras.Variable(np.zeros((5, 7)), dtype="bfloat16"), 70),
        (keras.KerasTensor((None, 3), "float16"), 6),  # Of one sample.
        (tf.TensorSpec((None, 3), "int64"), 24),
    ],
)
def test_bytes_by_shape_and_dtype(value, expected):
    assert bytes_of(value) == expected


def test_bytes_in_another_dtype():
    assert bytes_of(tf.zeros((3,), "float16"), "float32") == 12


def test_sums_of_gradients_are_of_float32_at_least():
    keras.config.set_dtype_policy("bfloat16")
    model = compile_in(dense_model(), "eager", keras.optimizers.SGD())
    profiler = StepProfiler(model, tuple(map(tf.constant, data(4))), None)
    assert profiler.gradient_sum_bytes == 4 * model.count_params()
    assert sum(map(bytes_of, model.weights)) == 2 * model.count_params()


def test_what_is_equal_but_not_the_same_is_kept():
    first, second = tf.constant([1.0, 2.0]), tf.constant([1.0, 2.0])
    found = unique([first, second, first])
    assert [id(x) for x in found] == [id(first), id(second)]
