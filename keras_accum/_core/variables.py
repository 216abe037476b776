"""Variables of this package: of each replica by itself, or the same on all of them."""

from collections.abc import Sequence

import keras
import tensorflow as tf


def own_variable(name: str, shape: Sequence[int], dtype: str) -> keras.Variable:
    """Zeros that each replica moves by itself; read from outside, their sum."""
    return _zeros(name, shape, dtype, aggregation="sum", synchronization="on_read")


def shared_variable(name: str, shape: Sequence[int], dtype: str) -> keras.Variable:
    """Zeros that are moved for all replicas at once."""
    return _zeros(name, shape, dtype, aggregation="only_first_replica")


def _zeros(
    name: str, shape: Sequence[int], dtype: str, **over_replicas: str
) -> keras.Variable:
    return keras.Variable(
        "zeros",
        shape=tuple(shape),
        dtype=dtype,
        trainable=False,
        autocast=False,
        name=name,
        **over_replicas,
    )


def read(variable: keras.Variable) -> tf.Tensor:
    """The value on this replica."""
    return tf.convert_to_tensor(variable.value)
