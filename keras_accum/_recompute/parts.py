"""A model as parts that can be recomputed, one inside of another."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras

from .._backend.private.graphs import (
    Functional,
    graph_of,
    nodes_of,
    pack_outputs,
    runner_of,
)
from .._backend.private.layers import call_method, children
from .block import Block


@dataclasses.dataclass(eq=False)
class Part:
    """A call in a graph of layers, or a layer that Python code calls.

    Attributes:
        operation: what is called: a layer, or an operation of `keras.ops`.
        node: the call in the graph; None where there is no graph.
        graph: the graph that has `node`.
        parts: the parts inside.
    """

    operation: Any
    node: Any
    graph: Functional | None
    parts: list["Part"]

    @property
    def name(self) -> str:
        """The name of what is called."""
        return self.operation.name

    def all(self) -> Iterator["Part"]:
        """The part and those inside of it, at any depth."""
        yield self
        for part in self.parts:
            yield from part.all()


def parts_of(model: keras.layers.Layer) -> list[Part]:
    """The parts of a model.

    A functional or `Sequential` model consists of its calls, at any depth. Any other
    layer consists of the layers inside of it which themselves have layers inside: a
    single layer that is recomputed saves nothing. A layer that is called twice has two
    parts, with the same parts inside.
    """
    found: dict[int, list[Part]] = {}

    def inside(operation: Any) -> list[Part]:
        if id(operation) in found:
            return found[id(operation)]
        graph = graph_of(operation)
        if is_recomputed(operation):
            parts = []
        elif graph is None:
            blocks = _blocks_in(operation)
            parts = [Part(layer, None, None, inside(layer)) for layer in blocks]
        else:
            calls = [(node, node.operation) for node in nodes_of(graph)]
            parts = [Part(called, node, graph, inside(called)) for node, called in calls]
        found[id(operation)] = parts
        return parts

    return inside(model)


def as_parts(layers: Iterable[keras.layers.Layer]) -> list[Part]:
    """Each of `layers` as a part that is whole."""
    return [Part(layer, None, None, []) for layer in layers]


def by_graph(parts: Iterable[Part]) -> dict[Functional, list[Part]]:
    """The calls among `parts`, by the graph that they belong to."""
    found: dict[Functional, list[Part]] = {}
    for part in parts:
        if part.graph is not None:
            found.setdefault(part.graph, []).append(part)
    return found


def _blocks_in(operation: Any) -> list[keras.layers.Layer]:
    # Cells share dropout masks with the loop.
    is_layer = isinstance(operation, keras.layers.Layer)
    if not is_layer or isinstance(operation, keras.layers.RNN):
        return []
    return [x for x in children(operation) if children(x) and not is_recomputed(x)]


def is_recomputed(operation: Any) -> bool:
    """Whether a layer or a graph of layers is recomputed already."""
    graph = graph_of(operation)
    if graph is not None and isinstance(runner_of(graph), GraphInSegments):
        return True
    is_layer = isinstance(operation, keras.layers.Layer)
    return is_layer and isinstance(vars(operation).get(call_method(operation)), Block)


class Segment:
    """Some calls of a graph, as a function of the tensors that come from outside."""

    def __init__(self, graph: Functional, nodes: Sequence[Any]) -> None:
        self._nodes = nodes
        made = dict.fromkeys(id(x) for node in nodes for x in node.outputs)
        used = dict.fromkeys(id(x) for node in nodes for x in node.input_tensors)
        others = [node for node in nodes_of(graph) if node not in nodes]
        wanted = {id(x) for node in others for x in node.input_tensors}
        wanted |= {id(x) for x in graph.outputs}
        self.inputs = [i for i in used if i not in made]
        self.outputs = [i for i in made if i in wanted]

    def __call__(self, operation_fn: Callable[..., Any], *values: Any) -> list[Any]:
        tensors = dict(zip(self.inputs, values))
        for node in self._nodes:
            args, kwargs = node.arguments.fill_in(tensors)
            outputs = operation_fn(node.operation)(*args, **kwargs)
            tensors.update(zip(map(id, node.outputs), keras.tree.flatten(outputs)))
        return [tensors[i] for i in self.outputs]

    def as_block(self, verify: bool) -> Block:
        """The same, recomputed."""
        operations = [node.operation for node in self._nodes]
        layers = [x for x in operations if isinstance(x, keras.layers.Layer)]
        name = f"{operations[0].name}..{operations[-1].name}"
        return Block(self, layers, name, verify=verify)


class GraphInSegments:
    """Runs the calls of a graph, as Keras does, in segments.

    Args:
        graph: the graph.
        runs: all segments, in order, each with the function to call in its place.
    """

    def __init__(
        self, graph: Functional, runs: Sequence[tuple[Callable[..., Any], Segment]]
    ) -> None:
        self._graph, self._plain = graph, runner_of(graph)
        self._runs = runs

    @classmethod
    def recomputing(
        cls, graph: Functional, segments: Sequence[Sequence[Part]], verify: bool
    ) -> "GraphInSegments":
        """Runs `graph` with these calls recomputed, each list as one, the rest plain."""
        place = {part.node: i for i, parts in enumerate(segments) for part in parts}
        runs: list[tuple[Callable[..., Any], Segment]] = []
        for number, nodes in itertools.groupby(nodes_of(graph), place.get):
            segment = Segment(graph, list(nodes))
            run = segment if number is None else segment.as_block(verify)
            runs.append((run, segment))
        return cls(graph, runs)

    def __call__(
        self,
        inputs: Any,
        operation_fn: Callable[..., Any] = lambda operation: operation,
        call_fn: Callable[..., Any] | None = None,
    ) -> Any:
        if call_fn is not None:
            return self._plain(inputs, operation_fn, call_fn)
        tensors = dict(zip(map(id, self._graph.inputs), keras.tree.flatten(inputs)))
        for run, segment in self._runs:
            values = run(operation_fn, *[tensors[i] for i in segment.inputs])
            tensors.update(zip(segment.outputs, values))
        return pack_outputs(self._graph, [tensors[id(x)] for x in self._graph.outputs])
