"""Functional models: the graph of layers that they are made of."""

from typing import Any

import keras
from keras.src.models.functional import Functional as Functional
from keras.src.models.model import functional_init_arguments


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
