"""The data that `fit` takes, and what a step gets of it."""

import itertools
import reprlib
import types
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.trainers.data_adapters import get_data_adapter


def first_batch(data: Any, batch_size: int | None = None) -> Any:
    """The first batch of `data`, as `fit` passes it to a step.

    Keras's adapters convert it: floats in arrays to `floatx`, data frames to arrays, one
    sample weight for all outputs to one for each.

    Args:
        data: what `fit` takes: arrays or tensors, or a tuple of them; a
            `tf.data.Dataset`, also a distributed one; a `keras.utils.PyDataset`; a
            generator, of which one batch is used up; or a loader of another library.
        batch_size: int, the most samples to take of arrays; by default all.

    Returns:
        The batch, nested as it was, of tensors and None. Of a distributed data set, each
        tensor is a value with a part for each replica.

    Raises:
        ValueError: if `fit` would not take it, or there is no batch.
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(_one_batch(data))
    try:
        adapter = get_data_adapter(x, y, sample_weight, batch_size or _ALL)
    except ValueError as error:
        if "Unrecognized data type" not in str(error):
            raise
        raise ValueError(
            "`batch` must be what `fit` takes: `x`, `(x, y)` or `(x, y, sample_weight)` "
            "of arrays or tensors, a `tf.data.Dataset` of batches, a "
            f"`keras.utils.PyDataset` or a generator. Received: {reprlib.repr(data)}"
        ) from error
    for batch in adapter.get_tf_dataset():
        return tf.nest.map_structure(without_optional, batch, expand_composites=False)
    raise ValueError(_EMPTY + reprlib.repr(data))


_ALL = 2**31 - 1
_EMPTY = "`batch` must have at least one batch, of at least one sample. Received: "


def _one_batch(data: Any) -> Any:
    """`data`, or a generator of its first batch alone: the adapters read in advance."""
    if isinstance(data, types.GeneratorType):
        return _generator(list(itertools.islice(data, 1)))
    if not isinstance(data, keras.utils.PyDataset):
        return data
    if data.num_batches == 0:
        raise ValueError(_EMPTY + reprlib.repr(data))
    batch = data[0]
    if isinstance(batch, list):
        batch = tuple(batch)
    return _generator([batch if isinstance(batch, tuple) else (batch,)])


def _generator(batches: list[Any]) -> Iterator[Any]:
    yield from batches


def without_optional(leaf: Any) -> Any:
    """None where a data set has an empty `Optional` in its place."""
    return None if isinstance(leaf, tf.experimental.Optional) else leaf
