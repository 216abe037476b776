"""What each layer of a model gives, call by call."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from .._backend.attribute_patch import AttributePatch
from .._backend.private.layers import flatten_layers


class Output(NamedTuple):
    """What one call of a layer gave: the layer, and its tensors, of floating dtypes."""

    layer: keras.layers.Layer
    tensors: list[tf.Tensor]


@contextlib.contextmanager
def recorded_outputs(model: keras.Model) -> Iterator[list[Output]]:
    """Record the outputs of the layers of `model` that are called inside of the context.

    In the order in which they are there, of inner layers before those around them. What
    is computed in a loop or function inside of the model stays in it, and is left out.
    """
    found: list[Output] = []

    def recording(layer: keras.layers.Layer) -> Callable[..., Any]:
        call = layer.call

        @functools.wraps(call)
        def call_and_record(*args: Any, **kwargs: Any) -> Any:
            here = graph_here()
            outputs = call(*args, **kwargs)
            tensors = [
                tensor
                for tensor in tf.nest.flatten(outputs)
                if isinstance(tensor, tf.Tensor) and tensor.dtype.is_floating
            ]
            if here is outer:
                found.append(Output(layer, tensors))
            return outputs

        return call_and_record

    outer = graph_here()
    patches: list[AttributePatch] = []
    try:
        for layer in flatten_layers(model):
            patches.append(AttributePatch(layer, "call", recording(layer)))
        yield found
    finally:
        while patches:
            patches.pop().undo()


def graph_here() -> Any:
    """The graph that is being built; None in eager mode."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
