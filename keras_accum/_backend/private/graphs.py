"""Functional models: the graph of layers that they are made of."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.models.functional import Functional as Functional
from keras.src.models.model import functional_init_arguments

from ..attribute_patch import AttributePatch


def functional_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether these arguments of `keras.Model` make a functional model."""
    return functional_init_arguments(args, kwargs)


def graph_of(model: keras.Model) -> Functional | None:
    """The graph of layers that `model` is made of, None for any other kind of model."""
    if isinstance(model, keras.Sequential):
        return model._functional
    return model if isinstance(model, Functional) else None


def nodes_of(graph: Functional) -> list[Any]:
    """The calls that `graph` is made of, inputs apart, in the order Keras does them."""
    depths = sorted(graph._nodes_by_depth, reverse=True)
    nodes = [node for depth in depths for node in graph._nodes_by_depth[depth]]
    return [node for node in nodes if node.operation and not node.is_input]


def runner_of(graph: Functional) -> Callable[..., Any]:
    """What calls the layers of `graph`: its own method, or what was put in its place."""
    return graph._run_through_graph


def run_by(graph: Functional, runner: Callable[..., Any]) -> AttributePatch:
    """Have `runner` call the layers of `graph`; Keras has no hook between two layers.

    Args:
        graph: a functional model.
        runner: called with the inputs, a function of a layer that gives what to call
            instead, and, for other purposes than calling, a function that calls.
    """
    return AttributePatch(graph, "_run_through_graph", runner)


def structures(graph: Functional) -> tuple[Any, Any]:
    """The inputs and outputs of `graph`, nested as they were when it was made."""
    return graph._inputs_struct, graph._outputs_struct


def pack_outputs(graph: Functional, tensors: Sequence[Any]) -> Any:
    """`tensors`, in the order of `graph.outputs`, in the structure that a call returns."""
    return keras.tree.pack_sequence_as(graph._outputs_struct, list(tensors))


def example_arguments(
    model: keras.layers.Layer, samples: int
) -> tuple[list[Any], dict[str, Any]]:
    """Specs of the arguments that `model` is called with.

    A functional model knows what it was made for. Of any other, Keras notes the shapes
    of its first call, and no dtypes.

    Args:
        model: a built model.
        samples: the batch size where it is open.

    Raises:
        ValueError: if nothing is known.
    """

    def spec(shape: Any, dtype: str) -> tf.TensorSpec:
        first, *rest = shape
        return tf.TensorSpec([samples if first is None else first, *rest], dtype)

    graph = graph_of(model)
    if graph is not None:
        inputs = keras.tree.map_structure(
            lambda x: spec(x.shape, x.dtype), graph._inputs_struct
        )
        return [inputs], {}
    shapes = model.get_build_config() or {}
    shapes = shapes.get("shapes_dict", {"": shapes.get("input_shape")})
    if None in shapes.values():
        raise ValueError("The shapes of its arguments are not known: it was not called.")
    first, *others = [
        keras.tree.map_shape_structure(lambda x: spec(x, model.compute_dtype), shape)
        for shape in shapes.values()
    ]
    names = [name.removesuffix("_shape") for name in shapes]
    return [first], dict(zip(names[1:], others))
