"""Random numbers that follow the sample, however a batch is taken apart.

Keras draws the numbers of a batch from one seed, so that a sample's numbers depend on its
place and on its micro-batch. Here they are a hash of the sample's own content and of the
place in the model where they are drawn: the large batch and its micro-batches draw the
same. They are for comparing two steps, not for training.
"""

import contextlib
import functools
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend import random as keras_random

from ..attribute_patch import AttributePatch

# The finalizer of MurmurHash3 (Appleby, 2011), and the golden ratio, in 64 bits.
_MIX = (-49064778989728563, -4265267296055464877)
_GOLDEN = -7046029254386353131
_BITS = 24


class RandomBySample:
    """A context in which what Keras draws for a sample depends on its content.

    Dropout, noise and the like: `dropout`, `uniform`, `normal`, `truncated_normal`,
    `randint`, `binomial` of one trial, and `categorical`. What else is drawn is left as it
    is, and so is what is drawn outside of `following`.

    Attributes:
        drawn: how often something was drawn inside of `following`.
    """

    def __init__(self) -> None:
        self.drawn = 0
        self._inputs: Any = None
        self._keys: dict[Any, tf.Tensor] = {}
        self._place, self._draws = "", 0
        self._patches: list[AttributePatch] = []

    def __enter__(self) -> "RandomBySample":
        for name in _DRAWN:
            draw = getattr(keras_random, name)
            self._patches.append(AttributePatch(keras_random, name, self._by(name, draw)))
        return self

    def __exit__(self, *_: object) -> None:
        while self._patches:
            self._patches.pop().undo()

    @contextlib.contextmanager
    def following(self, inputs: Any, place: str) -> Iterator[None]:
        """Draw for the samples of `inputs` inside; the outermost context counts.

        Args:
            inputs: nested tensors, with the samples first.
            place: a name of what is called with them.
        """
        if self._inputs is not None:
            yield
            return
        self._inputs, self._place, self._draws = (inputs,), place, 0
        try:
            yield
        finally:
            self._inputs, self._keys = None, {}

    def _by(self, name: str, draw: Callable[..., Any]) -> Callable[..., Any]:
        replayed = _DRAWN[name]

        @functools.wraps(draw)
        def draw_by_sample(*args: Any, **kwargs: Any) -> Any:
            if self._inputs is None:
                return draw(*args, **kwargs)
            self.drawn += 1
            found = replayed(self._uniform, *args, **kwargs)
            return draw(*args, **kwargs) if found is None else found

        return draw_by_sample

    def _uniform(self, shape: Any) -> tf.Tensor:
        """Numbers in (0, 1) of a shape that begins with the samples, or is for them all."""
        self._draws += 1
        keys = self._keys_here()
        salt = zlib.crc32(f"{self._place}/{self._draws}".encode()) << 31
        keys = keys if _begins_with(shape, keys) else tf.zeros([1], "int64")
        shape = tf.stack(shape) if isinstance(shape, (list, tuple)) else shape
        shape = tf.cast(shape, "int64")
        rows = tf.maximum(tf.shape(keys, out_type="int64")[0], 1)
        each = tf.range(tf.reduce_prod(shape) // rows) * _GOLDEN
        bits = _mixed(keys[:, None] + each + salt)
        low = tf.cast(tf.bitwise.bitwise_and(bits, 2**_BITS - 1), "float32")
        return tf.reshape((low + 0.5) * 2.0**-_BITS, shape)

    def _keys_here(self) -> tf.Tensor:
        """A key for each sample; of each graph by itself, as loops have their own."""
        eager = tf.executing_eagerly()
        here = None if eager else tf.compat.v1.get_default_graph()
        if here not in self._keys:
            self._keys[here] = _keys_of(self._inputs)
        return self._keys[here]


def _begins_with(shape: Any, keys: tf.Tensor) -> bool:
    """Whether a shape begins with the samples, or a multiple of them."""
    if not isinstance(shape, (list, tuple)):
        return True
    first, rows = (shape[0] if shape else 1), keys.shape[0]
    if not isinstance(first, int):
        return True
    return rows is not None and first > 0 and first % rows == 0


def _keys_of(inputs: Any) -> tf.Tensor:
    """A number for each sample, int64 `(samples,)`, made of its content."""
    keys = [
        _key_of(leaf, place)
        for place, leaf in enumerate(tf.nest.flatten(inputs))
        if leaf is not None
    ]
    return _mixed(tf.add_n(keys))


def _key_of(leaf: Any, place: int) -> tf.Tensor:
    if isinstance(leaf, tf.SparseTensor):
        values = _mixed(_integers(leaf.values) + place)
        return tf.math.unsorted_segment_sum(
            values, leaf.indices[:, 0], leaf.dense_shape[0]
        )
    if isinstance(leaf, tf.RaggedTensor):
        mixed = tf.ragged.map_flat_values(lambda v: _mixed(_integers(v) + place), leaf)
        while mixed.shape.rank > 1:
            mixed = tf.reduce_sum(mixed, axis=-1)
        return tf.convert_to_tensor(mixed)
    leaf = tf.convert_to_tensor(leaf)
    rows = tf.shape(leaf)[0]
    values = tf.reshape(
        _integers(leaf), tf.stack([rows, tf.size(leaf) // tf.maximum(rows, 1)])
    )
    places = tf.range(tf.shape(values, out_type="int64")[1]) * _GOLDEN
    keys = tf.reduce_sum(_mixed(values + places + place), axis=1)
    return tf.ensure_shape(keys, [leaf.shape[0]])


def _integers(values: tf.Tensor) -> tf.Tensor:
    """Values as int64, equal ones as equal numbers."""
    if values.dtype == tf.string:
        return tf.strings.to_hash_bucket_fast(values, 2**62)
    if values.dtype.is_complex:
        return _integers(tf.math.real(values)) + _integers(tf.math.imag(values))
    if values.dtype.is_floating:
        return tf.bitcast(tf.cast(values, "float64"), "int64")
    return tf.cast(values, "int64")


def _mixed(bits: tf.Tensor) -> tf.Tensor:
    for factor in _MIX:
        bits = tf.bitwise.bitwise_xor(bits, _shifted(bits)) * factor
    return tf.bitwise.bitwise_xor(bits, _shifted(bits))


def _shifted(bits: tf.Tensor) -> tf.Tensor:
    """By 33 bits to the right, with zeros from the left."""
    shifted = tf.bitwise.right_shift(bits, tf.constant(33, "int64"))
    return tf.bitwise.bitwise_and(shifted, 2**31 - 1)


# --- As Keras's functions of these names, of numbers that are uniform in (0, 1).

_Uniform = Callable[[Any], tf.Tensor]


def _dropout(
    uniform: _Uniform,
    inputs: Any,
    rate: float,
    noise_shape: Sequence[Any] | None = None,
    seed: Any = None,
) -> tf.Tensor | None:
    if not 0 < rate < 1:
        return None
    inputs = tf.convert_to_tensor(inputs)
    shape: Any = _shape_of(inputs)
    if noise_shape is not None:
        shape = [
            own if given is None else given for own, given in zip(shape, noise_shape)
        ]
    kept = uniform(shape) >= rate
    return tf.where(kept, inputs * (1 / (1 - rate)), tf.zeros((), inputs.dtype))


def _shape_of(tensor: tf.Tensor) -> list[Any]:
    dynamic = tf.shape(tensor)
    return [dynamic[i] if n is None else n for i, n in enumerate(tensor.shape)]


def _draw_uniform(
    uniform: _Uniform,
    shape: Any,
    minval: Any = 0.0,
    maxval: Any = 1.0,
    dtype: Any = None,
    seed: Any = None,
) -> tf.Tensor:
    numbers = _as(uniform(shape), dtype)
    low, high = tf.cast(minval, numbers.dtype), tf.cast(maxval, numbers.dtype)
    return low + numbers * (high - low)


def _draw_normal(
    uniform: _Uniform,
    shape: Any,
    mean: Any = 0.0,
    stddev: Any = 1.0,
    dtype: Any = None,
    seed: Any = None,
    most: float = math.inf,
) -> tf.Tensor:
    share = math.erf(most / math.sqrt(2))
    numbers = tf.math.erfinv((2 * uniform(shape) - 1) * share) * math.sqrt(2)
    numbers = _as(numbers, dtype)
    return numbers * tf.cast(stddev, numbers.dtype) + tf.cast(mean, numbers.dtype)


def _randint(
    uniform: _Uniform,
    shape: Any,
    minval: Any,
    maxval: Any,
    dtype: Any = "int32",
    seed: Any = None,
) -> tf.Tensor:
    low, high = tf.cast(minval, "float32"), tf.cast(maxval, "float32")
    return tf.cast(tf.floor(low + uniform(shape) * (high - low)), dtype)


def _binomial(
    uniform: _Uniform,
    shape: Any,
    counts: Any,
    probabilities: Any,
    dtype: Any = None,
    seed: Any = None,
) -> tf.Tensor | None:
    if not isinstance(counts, (int, float)) or counts != 1:
        return None
    return _as(uniform(shape) < tf.cast(probabilities, "float32"), dtype)


def _categorical(
    uniform: _Uniform,
    logits: Any,
    num_samples: int,
    dtype: Any = "int64",
    seed: Any = None,
) -> tf.Tensor:
    logits = tf.cast(logits, "float32")
    rows, classes = _shape_of(logits)
    noise = -tf.math.log(-tf.math.log(uniform([rows, num_samples, classes])))
    return tf.cast(tf.argmax(logits[:, None] + noise, axis=-1), dtype)


def _as(numbers: tf.Tensor, dtype: Any) -> tf.Tensor:
    return tf.cast(numbers, dtype or keras.config.floatx())


_DRAWN: dict[str, Callable[..., Any]] = {
    "binomial": _binomial,
    "categorical": _categorical,
    "dropout": _dropout,
    "normal": _draw_normal,
    "randint": _randint,
    "truncated_normal": functools.partial(_draw_normal, most=2.0),
    "uniform": _draw_uniform,
}
