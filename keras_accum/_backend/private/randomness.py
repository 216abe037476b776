"""Random state outside of a model, and how dropout draws its masks."""

import contextlib
import functools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend import random as keras_random
from keras.src.backend.common.global_state import (
    get_global_attribute,
    set_global_attribute,
)
from keras.src.random.seed_generator import draw_seed
from tensorflow.python.eager import context as tf_context

from ..attribute_patch import AttributePatch
from .strategies import components

# Where Keras keeps its global seed generator. To Keras 3.12 the key has no name there.
GLOBAL_SEED_GENERATOR = "global_seed_generator"


def global_seed_generator() -> keras.random.SeedGenerator | None:
    """Keras's generator for layers and operations without a seed; None before its use."""
    return get_global_attribute(GLOBAL_SEED_GENERATOR)


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Put back, afterwards, all random state that is outside of a model.

    Python's, from which Keras draws its seeds; NumPy's; Keras's global seed generator,
    or that there was none; and the generator from which TensorFlow seeds its operations.
    """
    operations = vars(tf_context.context())
    seeds = operations.get("_rng")  # not there until `tf.random.set_seed`
    kept = (random.getstate(), np.random.get_state(), seeds and seeds.getstate())
    generator = global_seed_generator()
    states = [] if generator is None else components(generator.state)
    seed = [(state, state.numpy()) for state in states]
    try:
        yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        operations.pop("_rng", None)
        if seeds is not None:
            seeds.setstate(kept[2])
            operations["_rng"] = seeds
        set_global_attribute(GLOBAL_SEED_GENERATOR, generator)
        for state, value in seed:
            state.assign(value)


class MaskDrawing:
    """What a call of dropout is about to draw.

    Attributes:
        inputs: what it drops of; the mask has their shape.
        draw: draws the mask, True where something stays.
        skip: moves the seed on as if it had been drawn.
    """

    def __init__(
        self, inputs: tf.Tensor, draw: Callable[[], tf.Tensor], seed: Any
    ) -> None:
        self.inputs, self.draw = inputs, draw
        self.skip = functools.partial(draw_seed, seed)


class DropoutByMask:
    """A context in which dropout in Keras applies the mask that `source` gives, if any.

    Keras draws a mask and applies it in one function, which its layers and `keras.random`
    look up by name: there is no other way in between. The function is replaced while any
    thread is inside, and only then. With a mask that was drawn as `MaskDrawing.draw`
    does, the result is that of Keras, bit for bit.

    Args:
        source: from a `MaskDrawing` to a mask, or to None for Keras's own dropout.
    """

    def __init__(self, source: Callable[[MaskDrawing], tf.Tensor | None]) -> None:
        self._source = source
        self._inside, self._lock = 0, threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._patch = AttributePatch(
                    keras_random, "dropout", self._by_mask(keras_random.dropout)
                )
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._patch.undo()

    def _by_mask(self, dropout: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
        @functools.wraps(dropout)
        def dropout_by_mask(
            inputs: Any, rate: float, noise_shape: Any = None, seed: Any = None
        ) -> tf.Tensor:
            inputs = tf.convert_to_tensor(inputs)

            def draw() -> tf.Tensor:
                return dropout(tf.ones_like(inputs), rate, noise_shape, seed) > 0

            drawn = 0 < rate < 1
            mask = self._source(MaskDrawing(inputs, draw, seed)) if drawn else None
            if mask is None:
                return dropout(inputs, rate, noise_shape, seed)
            return tf.where(mask, inputs * (1 / (1 - rate)), tf.zeros((), inputs.dtype))

        return dropout_by_mask
