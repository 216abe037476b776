"""The graphs that TensorFlow makes of functions, and what they take from around them."""

from typing import Any

import tensorflow as tf
from tensorflow.python.ops.handle_data_util import get_handle_data


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


def elements_of_list(tensor: tf.Tensor) -> list[tf.TensorSpec]:
    """What an element of a list of tensors is, as loops keep them; [] if not known.

    A list is a tensor of dtype variant, whose own shape says nothing.
    """
    data = get_handle_data(tensor)
    if data is None or not data.is_set:
        return []
    return [
        tf.TensorSpec(tf.TensorShape(x.shape), tf.as_dtype(x.dtype))
        for x in data.shape_and_type
    ]
