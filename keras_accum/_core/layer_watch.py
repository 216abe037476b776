"""Which layer was the first to give an infinity or a NaN."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from .._backend.attribute_patch import AttributePatch
from .._backend.private.layers import flatten_layers
from .variables import own_variable, read


class LayerWatch:
    """Watches what the layers of a model give, from now until `stop`.

    In the order in which they are called, inner layers before those around them. A step
    that is traced before does not know of it.

    Args:
        model: the model, built or not.
    """

    def __init__(self, model: keras.Model) -> None:
        with tf.init_scope():
            # The place of the first layer, from 1; 0 while all is finite.
            self._first = own_variable("first_layer", (), "float32")
        self._places: dict[int, int] = {}
        self.names: list[str] = []
        layers = [layer for layer in flatten_layers(model) if layer is not model]
        self._patches = [
            AttributePatch(layer, "call", self._watching(layer)) for layer in layers
        ]

    def stop(self) -> None:
        """Watch no longer."""
        while self._patches:
            self._patches.pop().undo()

    @property
    def said(self) -> list[str]:
        """What to say by what `seen` gives."""
        return ["none: the loss or the backward pass", *self.names]

    def clear(self) -> None:
        """Forget what was seen."""
        self._first.assign(tf.zeros(()))

    def seen(self) -> tf.Tensor:
        """The place in `names` of the first layer that was not finite, from 1, or 0."""
        return read(self._first)

    def take(self) -> tf.Tensor:
        """`seen`, and forget it."""
        found = tf.identity(self.seen())
        with tf.control_dependencies([] if tf.executing_eagerly() else [found]):
            self.clear()
        return found

    def _watching(self, layer: keras.layers.Layer) -> Callable[..., Any]:
        call = layer.call

        @functools.wraps(call)
        def call_and_watch(*args: Any, **kwargs: Any) -> Any:
            outputs = call(*args, **kwargs)
            tensors = [
                tensor
                for tensor in tf.nest.flatten(outputs)
                if isinstance(tensor, tf.Tensor) and tensor.dtype.is_floating
            ]
            if tensors:
                self._note(layer, tensors)
            return outputs

        return call_and_watch

    def _note(self, layer: keras.layers.Layer, tensors: list[tf.Tensor]) -> None:
        place = self._places.setdefault(id(layer), len(self._places) + 1)
        if place > len(self.names):
            self.names.append(layer.path or layer.name)
        finite = [tf.reduce_all(tf.math.is_finite(tensor)) for tensor in tensors]
        held = read(self._first)
        earlier = tf.logical_or(tf.equal(held, 0.0), float(place) < held)
        is_first = tf.logical_and(earlier, ~tf.reduce_all(tf.stack(finite)))
        self._first.assign(tf.where(is_first, float(place), held))
