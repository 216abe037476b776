"""The memory of what has a shape and a dtype."""

import math
from typing import Any

import tensorflow as tf


def bytes_of(value: Any, dtype: Any = None) -> int:
    """The bytes of a tensor or variable, by its shape and dtype.

    Args:
        value: an object with `shape` and `dtype`. Dimensions that are not known count
            as 1.
        dtype: if it were of another dtype.
    """
    sizes = (1 if size is None else size for size in value.shape)
    return math.prod(sizes) * tf.as_dtype(dtype or value.dtype).size
