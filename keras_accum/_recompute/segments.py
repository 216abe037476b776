"""Cutting a graph of layers into segments, of which only the boundaries are kept.

Of a chain of N layers cut into n segments, the boundaries and the inside of one segment
are in memory at a time: about n + N/n activations, least at n = √N (Chen et al., 2016,
"Training Deep Nets with Sublinear Memory Cost"). Layers differ in size and graphs have
skip connections, so a cut costs what crosses it; cuts are placed where the sum of what
crosses them and the largest segment is least.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from .._backend.private.graphs import (
    Functional,
    graph_of,
    nodes_of,
    pack_outputs,
    runner_of,
)
from .block import Block


def place(sizes: Sequence[int], last_uses: Sequence[int], count: int) -> list[int]:
    """Where to cut N steps into `count` segments.

    Args:
        sizes: what each step makes, in bytes.
        last_uses: the last step that uses what each made; N for what is used after all.
        count: int, 1 to N.

    Returns:
        The first step of each segment but the first. What the segments but the last keep,
        plus the largest segment, is within 2 % of the least there is.
    """
    kept, inside = _costs(np.asarray(sizes, "float64"), np.asarray(last_uses))
    best: tuple[float, list[int]] = (math.inf, [])
    limit = inside[0, -1]
    while (
        cuts := _cheapest(np.where(inside <= limit, kept, math.inf), count)
    ) is not None:
        bounds = [0, *cuts, len(sizes)]
        pairs = list(pairwise(bounds))
        largest = max(inside[i, j] for i, j in pairs)
        total = largest + sum(kept[i, j] for i, j in pairs[:-1])
        best = min(best, (total, cuts))
        limit = 0.98 * largest
    return best[1]


def _costs(sizes: np.ndarray, last_uses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bytes that outlive a segment of the steps i to j - 1, and bytes inside of it."""
    steps = len(sizes)
    kept, inside = np.full((2, steps + 1, steps + 1), math.inf)
    ends = np.arange(steps + 1)
    # What step k made crosses a cut at j if j is behind k, and not behind its last use.
    crosses = (ends > np.arange(steps)[:, None]) & (ends <= last_uses[:, None])
    crossing = np.cumsum(np.where(crosses, sizes[:, None], 0.0)[::-1], axis=0)[::-1]
    total = np.concatenate([[0.0], np.cumsum(sizes)])
    for i in range(steps):
        kept[i, i + 1 :] = crossing[i, i + 1 :]
        inside[i, i + 1 :] = total[i + 1 :] - total[i]
    return kept, inside


def _cheapest(costs: np.ndarray, count: int) -> list[int] | None:
    """The cuts with the least sum of costs; None if there are none that are finite."""
    steps = len(costs) - 1
    # What follows the last segment is there with or without it.
    last = np.where(np.isfinite(costs[:, steps]), 0.0, math.inf)
    best, choices = last, []
    for _ in range(count - 1):
        through = costs + best[None, :]
        choices.append(np.argmin(through, axis=1))
        best = np.min(through, axis=1)
    if not np.isfinite(best[0]):
        return None
    cuts, at = [], 0
    for choice in reversed(choices):
        at = int(choice[at])
        cuts.append(at)
    return cuts


class GraphInSegments:
    """Runs a graph as Keras does, recomputing its segments.

    All but the last: its gradient is the first to be asked for, when all that it computed
    is there still (as in `torch.utils.checkpoint.checkpoint_sequential`).

    Attributes:
        names: of the segments that are recomputed, "first..last" layer.
    """

    def __init__(self, graph: Functional, count: int, verify: bool) -> None:
        self._graph, self._plain = graph, runner_of(graph)
        segments = [
            _Segment(graph, nodes) for nodes in cut(nodes_of(graph), graph, count)
        ]
        blocks = [segment.as_block(verify) for segment in segments[:-1]]
        runs: list[Callable[..., Any]] = [*blocks, segments[-1]]
        self._runs = list(zip(runs, segments))
        self.names = [block.name for block in blocks]

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


class _Segment:
    """Some calls of a graph, as a function of the tensors that come in from before."""

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


def cut(nodes: Sequence[Any], graph: Functional, count: int) -> list[Sequence[Any]]:
    """The nodes of `graph` in `count` segments, in the order in which they run."""
    users = {id(x): i for i, node in enumerate(nodes) for x in node.input_tensors}
    users |= {id(x): len(nodes) for x in graph.outputs}
    last_uses = [max(users.get(id(x), i) for x in n.outputs) for i, n in enumerate(nodes)]
    starts = [0, *place([_bytes(n) for n in nodes], last_uses, count), len(nodes)]
    return [nodes[i:j] for i, j in pairwise(starts)]


def _bytes(node: Any) -> int:
    """What a call computes for one sample, as far as shapes tell."""
    inner = graph_of(node.operation)
    if inner is not None:
        return sum(_bytes(inner_node) for inner_node in nodes_of(inner))
    return sum(
        math.prod(size or 1 for size in x.shape) * tf.as_dtype(x.dtype).size
        for x in node.outputs
    )
