"""The graphs that TensorFlow makes of functions, and what they take from around them."""

from typing import Any

import tensorflow as tf


def is_in_function(graph: tf.Graph, outer: tf.Graph) -> bool:
    """Whether a `tf.function` is between `graph` and `outer`, not only loops or branches.

    TensorFlow builds the body of a loop anew for each loop, but may call the graph of a
    `tf.function` again. Only an attribute of the graph tells which it is.
    """
    while graph is not outer and getattr(graph, "is_control_flow_graph", False):
        graph = graph.outer_graph
    return graph is not outer


def captured(tensor: Any) -> Any:
    """The tensor outside of all functions that a placeholder in them stands for."""
    while captures := getattr(getattr(tensor, "graph", None), "captures", ()):
        found = [outside for outside, inside in captures if inside is tensor]
        if not found:
            break
        tensor = found[0]
    return tensor
