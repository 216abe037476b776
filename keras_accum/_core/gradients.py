"""Arithmetic on a list of gradients: dense, `tf.IndexedSlices` or None."""

import collections
from collections.abc import Sequence
from typing import TypeAlias

import keras
import tensorflow as tf

from .._backend.identity import unique
from .._backend.private.compiled import compiled_by_xla

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None


def values_of(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    """The numbers of a gradient: all of a dense one, the rows that a sparse one holds."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def weigh(
    gradient: tf.Tensor | tf.IndexedSlices, weight: tf.Tensor, dtype: str
) -> tf.Tensor | tf.IndexedSlices:
    """`gradient * weight` in `dtype`; exactly zero, even from NaN, where weight is 0."""
    weighted = tf.math.multiply_no_nan(
        tf.cast(values_of(gradient), dtype), tf.cast(weight, dtype)
    )
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(weighted, gradient.indices, gradient.dense_shape)
    return weighted


def divide_no_nan(total: tf.Tensor, divisor: tf.Tensor) -> tf.Tensor:
    """`total / divisor`, and 0 where both are.

    By the reciprocal: XLA computes a product where it is used, whereas for a division it
    makes one more tensor.
    """
    inverse = tf.math.divide_no_nan(
        tf.ones((), total.dtype), tf.cast(divisor, total.dtype)
    )
    return total * inverse


def all_finite(gradients: Sequence[tf.Tensor | tf.IndexedSlices]) -> tf.Tensor:
    """A scalar bool: no gradient holds an infinity or a NaN."""
    finite = [tf.reduce_all(tf.math.is_finite(values_of(g))) for g in gradients]
    return tf.reduce_all(tf.stack(finite))


def global_norm(gradients: Sequence[tf.Tensor]) -> tf.Tensor:
    """The L2 norm over all `gradients` together, a float32 scalar.

    In float32 whatever the gradients are: squares of float16 values overflow at 256.
    """
    squares = [sum_of_squares(tf.cast(g, "float32")) for g in gradients]
    return tf.sqrt(tf.add_n(squares)) if squares else tf.zeros(())


def sum_of_squares(tensor: tf.Tensor) -> tf.Tensor:
    """The sum of the squares of a float32 tensor."""
    size = tensor.shape.num_elements()
    if size is None or not compiled_by_xla():
        # Half the sum of squares; needs no memory for the squares.
        return 2.0 * tf.nn.l2_loss(tensor)
    # XLA adds one number after the other on a CPU: eight sums side by side fill a vector
    # unit, in a sixth of the time.
    *lanes, rest = tf.split(tf.reshape(tensor, [-1]), [size // 8] * 8 + [size % 8])
    side_by_side = tf.add_n([tf.square(lane) for lane in lanes])
    return tf.reduce_sum(side_by_side) + tf.reduce_sum(tf.square(rest))


def check_gradients(
    gradients: Sequence[Gradient], variables: Sequence[keras.Variable]
) -> None:
    """Refuse a list of gradients that does not fit its list of variables.

    Raises:
        ValueError: if the lengths differ, a shape differs, a variable comes twice, or
            every gradient is None.
    """
    if len(gradients) != len(variables):
        raise ValueError(
            f"Received {len(gradients)} gradients for {len(variables)} variables. There "
            "must be one gradient, or None, for each variable, in the same order: "
            "`optimizer.apply(tape.gradient(loss, variables), variables)`."
        )
    for gradient, variable in zip(gradients, variables):
        if gradient is None:
            continue
        if not tf.TensorShape(gradient.shape).is_compatible_with(variable.shape):
            raise ValueError(
                f"Received a gradient of shape {tuple(gradient.shape)} for the variable "
                f"'{name_of(variable)}' of shape {tuple(variable.shape)}. Shapes must be "
                "equal: pass gradients in the order of their variables."
            )
    if len(unique(variables)) < len(variables):
        counts = collections.Counter(map(id, variables))
        name = next(name_of(v) for v in variables if counts[id(v)] > 1)
        raise ValueError(
            f"Received the variable '{name}' twice. Add its gradients up, and pass it once."
        )
    if all(gradient is None for gradient in gradients):
        raise ValueError(
            "No gradients provided for any variable. Every gradient received is None: "
            "the loss does not depend on the variables, or was computed outside of the "
            "`tf.GradientTape`."
        )


def name_of(variable: keras.Variable | tf.Variable) -> str:
    """The path of a Keras variable, or the name of a TensorFlow one."""
    return getattr(variable, "path", variable.name)


def add(total: tf.Tensor, gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    """`total + gradient`, with a sparse gradient scattered into the rows that it has."""
    if isinstance(gradient, tf.IndexedSlices):
        indices = tf.expand_dims(gradient.indices, -1)
        values = tf.cast(gradient.values, total.dtype)
        return tf.tensor_scatter_nd_add(total, indices, values)
    return total + tf.cast(gradient, total.dtype)


def add_or_none(total: tf.Tensor | None, gradient: Gradient) -> tf.Tensor | None:
    """`add`, of which one or both may be None."""
    if gradient is None:
        return total
    return tf.convert_to_tensor(gradient) if total is None else add(total, gradient)


def sum_dtype(variable: keras.Variable | tf.Variable, dtype: str | None) -> str:
    """The dtype of a sum: `dtype`, or that of `variable`, but float32 at least."""
    own = keras.backend.standardize_dtype(variable.dtype)
    if dtype is not None and tf.as_dtype(own).is_floating:
        return dtype
    return "float32" if tf.as_dtype(own).size < 4 else own


def scalar_dtype(variables: Sequence[keras.Variable | tf.Variable]) -> str:
    """The dtype of weights and shares: that of float64 variables, else float32."""
    dtypes = [sum_dtype(variable, None) for variable in variables]
    return "float64" if "float64" in dtypes else "float32"
