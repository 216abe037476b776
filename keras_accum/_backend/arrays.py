"""Values of variables as arrays of NumPy."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from . import replica


def to_numpy(value: Any) -> np.ndarray[Any, Any]:
    """The value of a variable, a tensor or a number, outside of any graph.

    `keras.ops.convert_to_numpy` takes that of a variable in a way that NumPy 2 deprecates.
    """
    held = value.value if isinstance(value, keras.Variable) else value
    if isinstance(held, tf.Variable) and not replica.is_distributed(held):
        # In a fifth of the time; the monitor does it after each step.
        read = tf.raw_ops.ReadVariableOp(resource=held.handle, dtype=held.dtype)
        return np.asarray(read.numpy())
    return np.asarray(held.numpy() if hasattr(held, "numpy") else held)
