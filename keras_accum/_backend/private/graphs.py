"""Functional models: the graph of layers that they are made of."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
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


def pack_outputs(graph: Functional, tensors: Sequence[Any]) -> Any:
    """`tensors`, in the order of `graph.outputs`, in the structure that a call returns."""
    return keras.tree.pack_sequence_as(graph._outputs_struct, list(tensors))
