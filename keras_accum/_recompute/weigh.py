"""What each part of a model keeps for its backward pass, and how long it takes.

The model is traced once, forward and backward. It does not run. A tensor of the forward
pass that an operation of the backward pass takes is in memory in between. A part keeps
the tensors that its operations made.

Sizes are relative: they hold for 2 samples where the batch size is open, and for 128
elements in any other dimension that is open.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from .._backend.attribute_patch import AttributePatch
from .._backend.private.functions import elements_of_list
from .._backend.private.graphs import example_arguments, run_by
from .._backend.private.layers import call, call_method
from .._backend.private.randomness import random_state_kept
from .._backend.private.strategies import local_component
from .parts import GraphInSegments, Part, Segment, by_graph

SAMPLES, OPEN_SIZE, TRIPS = 2, 128, 16
# An element that no product computes takes the time of so many multiplications.
ELEMENT = 32

# For each part, the operations that each call created: the first, the first after it.
Spans: TypeAlias = "dict[Part, list[tuple[int, int]]]"


@dataclasses.dataclass
class Trace:
    """The operations of a forward pass, and the tensors that depend on the data.

    Tensors that share their memory are one.

    Attributes:
        spans: the operations of each part.
        times: float array, the time of each operation, in multiplications.
        made: int array, for each tensor the operation that made it.
        used: int array, the last operation of the forward pass that takes it.
        uses: int array of two rows, the tensor and the operation of each use.
        sizes: float array, its bytes.
        kept: bool array, whether the backward pass takes it.
    """

    spans: Spans
    times: np.ndarray
    made: np.ndarray
    used: np.ndarray
    uses: np.ndarray
    sizes: np.ndarray
    kept: np.ndarray

    def kept_bytes(self, parts: Sequence[Part]) -> float:
        """What the backward pass needs of what `parts` compute, in bytes."""
        return float(self.sizes[self.kept & self._made_in(parts)].sum())

    def kept_bytes_of_all(self, parts: Sequence[Part]) -> float:
        """`kept_bytes` of each of `parts`, in total."""
        return sum(self.kept_bytes([part]) for part in parts)

    def is_called(self, parts: Sequence[Part]) -> bool:
        """Whether the model calls `parts`, and not inside of a loop only."""
        return bool(self._intervals(parts))

    def first_operation(self, parts: Sequence[Part]) -> int:
        """The number of the first operation of `parts`, which the model calls."""
        return self._intervals(parts)[0][0]

    def saving(self, parts: Sequence[Part], keep: Sequence[Part] = ()) -> float:
        """The bytes that recomputing `parts` as one saves, at least 0.

        Its results stay. What it takes must stay, too: it would not, if the backward pass
        takes it nowhere.

        Args:
            parts: calls that follow each other.
            keep: parts inside whose results stay.
        """
        saved, added = self._changes(parts, keep)
        return max(float(self.sizes[saved].sum() - self.sizes[added].sum()), 0.0)

    def time(self, parts: Sequence[Part], keep: Sequence[Part] = ()) -> float:
        """The time to compute again what recomputing `parts` saves, in multiplications.

        Not all that they compute: nothing needs a product that is only added to something.

        Args:
            parts: calls that follow each other.
            keep: parts inside whose results stay.
        """
        wanted, held = self._changes(parts, keep)[0], self._results(keep)
        total = 0.0
        for first, end in self._intervals(parts):
            for operation in reversed(range(first, end)):
                made = slice(*np.searchsorted(self.made, [operation, operation + 1]))
                if wanted[made].any():
                    total += float(self.times[operation])
                    uses = np.searchsorted(self.uses[1], [operation, operation + 1])
                    taken = self.uses[0][slice(*uses)]
                    wanted[taken[(self.made[taken] >= first) & ~held[taken]]] = True
        return total

    def peak(self, recomputed: Sequence[Sequence[Part]]) -> float:
        """The most bytes that the backward pass has in memory.

        At its beginning, or while it recomputes one of the parts, when nothing is left of
        those behind.

        Args:
            recomputed: the parts that are recomputed, each list as one.
        """
        kept = self.kept.copy()
        for parts in recomputed:
            saved, added = self._changes(parts, ())
            kept[saved], kept[added] = False, True
        peak = self.sizes[kept].sum()
        for parts in recomputed:
            first = self.first_operation(parts)
            before = self.sizes[kept & (self.made < first)].sum()
            peak = max(peak, before + self.kept_bytes(parts))
        return float(peak)

    def outputs(self, steps: Sequence[Part]) -> list[tuple[int, int, float]]:
        """The tensors that steps of a graph leave for later ones.

        Returns:
            For each its step, the last step that takes it (the number of steps for
            anything behind them), and its bytes.
        """
        step_of = np.full(len(self.times) + 1, len(steps))
        for i, step in enumerate(steps):
            for first, end in self.spans[step][:1]:
                step_of[first:end] = i
        made, used = step_of[self.made], step_of[self.used]
        found = np.flatnonzero((made < len(steps)) & (used > made))
        return [(int(made[k]), int(used[k]), float(self.sizes[k])) for k in found]

    def _intervals(self, parts: Sequence[Part]) -> list[tuple[int, int]]:
        """The operations of `parts` as one, for each time that they are called."""
        calls = zip(*(self.spans[part] for part in parts))
        return [(call[0][0], call[-1][1]) for call in calls]

    def _made_in(self, parts: Sequence[Part]) -> np.ndarray:
        inside = np.zeros(len(self.made), bool)
        for first, end in self._intervals(parts):
            inside |= (self.made >= first) & (self.made < end)
        return inside

    def _changes(
        self, parts: Sequence[Part], keep: Sequence[Part]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Which tensors recomputing `parts` as one lets go, and which it holds instead."""
        saved, added = np.zeros((2, len(self.made)), bool)
        for first, end in self._intervals(parts):
            inside = (self.made >= first) & (self.made < end) & (self.used < end)
            saved |= inside & self.kept
            taken = self.uses[0][(self.uses[1] >= first) & (self.uses[1] < end)]
            added[taken[(self.made[taken] < first) & ~self.kept[taken]]] = True
        # Results that are kept stay, whether or not the backward pass takes them.
        results = self._results(keep)
        added |= results & ~self.kept
        return saved & ~results, added

    def _results(self, parts: Sequence[Part]) -> np.ndarray:
        """The tensors that each of `parts` makes for what comes behind it."""
        found = np.zeros(len(self.made), bool)
        for part in parts:
            for first, end in self.spans[part]:
                found |= (self.made >= first) & (self.made < end) & (self.used >= end)
        return found


def trace_step(model: keras.layers.Layer, parts: Sequence[Part]) -> Trace:
    """Trace a training step of `model`, and note which operations `parts` create.

    Raises:
        ValueError: if the model cannot be traced.
    """
    spans: Spans = {part: [] for root in parts for part in root.all()}
    arguments: list[tf.Tensor] = []
    forward: list[tf.Operation] = []

    def step(args: Any, kwargs: Any) -> None:
        arguments.extend(tf.nest.flatten((args, kwargs), expand_composites=True))
        floats = [x for x in arguments if x.dtype.is_floating]
        with tf.GradientTape() as tape:
            tape.watch(floats)
            with keras.StatelessScope(collect_losses=True) as scope, _observed(spans):
                outputs = call(model, *args, **kwargs)
            results = [*tf.nest.flatten(outputs, expand_composites=True), *scope.losses]
            # Something takes each result: it stays in memory.
            results = [tf.identity(x) for x in results if x.dtype.is_floating]
        forward.extend(_operations())
        # Under a strategy, which a trace is not in a replica of, their first copy.
        values = [local_component(v.value) for v in model.trainable_variables]
        tape.gradient(results, [*floats, *values])

    try:
        args, kwargs = example_arguments(model, SAMPLES)
        with random_state_kept():
            function = tf.function(step, autograph=False)
            graph = function.get_concrete_function(args, kwargs).graph
    except Exception as error:
        raise ValueError(
            f"The layers of '{model.name}' are weighed by a trace of a training step, "
            f"which failed: {error} Select layers by name instead, without `share`, as in "
            "`recompute(model, 'block_*')`."
        ) from error
    backward = graph.get_operations()[len(forward) :]
    return _read(spans, forward, backward, {tensor.name for tensor in arguments})


def _operations() -> list[tf.Operation]:
    return tf.compat.v1.get_default_graph().get_operations()


@contextlib.contextmanager
def _observed(spans: Spans) -> Iterator[None]:
    """Note in `spans` the operations that calls of its parts create."""
    graph = tf.compat.v1.get_default_graph()

    def observed(part: Part, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if tf.compat.v1.get_default_graph() is not graph:
                return function(*args, **kwargs)  # In a loop, which is one operation.
            first = len(_operations())
            outputs = function(*args, **kwargs)
            spans[part].append((first, len(_operations())))
            return outputs

        return call

    with contextlib.ExitStack() as stack:
        for graph_of_layers, parts in by_graph(spans).items():
            segments = [(part, Segment(graph_of_layers, [part.node])) for part in parts]
            runs = [(observed(part, segment), segment) for part, segment in segments]
            runner = GraphInSegments(graph_of_layers, runs)
            stack.callback(run_by(graph_of_layers, runner).undo)
        for part in spans:
            if part.node is None:
                method = call_method(part.operation)
                function = getattr(part.operation, method)
                patch = AttributePatch(part.operation, method, observed(part, function))
                stack.callback(patch.undo)
        yield


# Operations whose result is in the memory of an argument.
_ALIASES = {
    "EnsureShape",
    "ExpandDims",
    "Identity",
    "IdentityN",
    "PlaceholderWithDefault",
    "PreventGradient",
    "Reshape",
    "Squeeze",
    "StopGradient",
}
# Operations of the backward pass that need no more than a shape.
_SHAPES = {"Rank", "Shape", "ShapeN", "Size", "ZerosLike", "OnesLike"}


def _read(
    spans: Spans,
    forward: Sequence[tf.Operation],
    backward: Sequence[tf.Operation],
    arguments: set[str],
) -> Trace:
    numbers: dict[str, int] = {}  # Of tensors that depend on data, by name.
    made: list[int] = []
    used: list[int] = []
    sizes: list[float] = []
    uses: list[tuple[int, int]] = []
    trips = _trips(forward)
    for i, operation in enumerate(forward):
        taken = [numbers.get(tensor.name) for tensor in operation.inputs]
        for number in taken:
            if number is not None:
                used[number] = i
                uses.append((number, i))
        depends = any(number is not None for number in taken)
        for k, tensor in enumerate(operation.outputs):
            if operation.type in _ALIASES and operation.inputs:
                same = taken[k] if operation.type == "IdentityN" else taken[0]
                if same is not None:
                    numbers[tensor.name] = same
            elif depends or "Random" in operation.type or tensor.name in arguments:
                numbers[tensor.name] = len(made)
                made.append(i)
                used.append(i)
                sizes.append(_bytes(tensor, trips))
    kept = np.zeros(len(made), bool)
    kept[[numbers[name] for name in arguments if name in numbers]] = True  # The batch.
    for operation in backward:
        if operation.type not in _SHAPES:
            found = [numbers.get(tensor.name) for tensor in operation.inputs]
            kept[[number for number in found if number is not None]] = True
    return Trace(
        spans,
        np.array([_time(operation) for operation in forward]),
        np.array(made, int),
        np.array(used, int),
        np.array(uses, int).reshape(-1, 2).T,
        np.array(sizes, float),
        kept,
    )


def _trips(operations: Sequence[tf.Operation]) -> int:
    """How often loops run: as often as the longest sequence that is given to them."""
    lists = [op.inputs[0] for op in operations if op.type == "TensorListFromTensor"]
    return max((_sizes(tensor)[0] for tensor in lists), default=TRIPS)


def _sizes(tensor: Any) -> list[int]:
    shape = tensor.shape
    return [OPEN_SIZE if size is None else size for size in shape] if shape.rank else [1]


def _bytes(tensor: tf.Tensor, trips: int) -> float:
    if tensor.dtype == tf.variant:  # What a loop keeps of each trip.
        return trips * sum(_bytes(element, trips) for element in elements_of_list(tensor))
    return math.prod(_sizes(tensor)) * tensor.dtype.size


def _time(operation: tf.Operation) -> float:
    """Multiplications of a product or a convolution; of anything else, by its size."""
    if operation.type in _ALIASES or not operation.outputs:
        return 0.0
    elements = float(sum(math.prod(_sizes(x)) for x in operation.outputs))
    if operation.type not in _PRODUCTS:
        return ELEMENT * elements
    return elements * max(1.0, _PRODUCTS[operation.type](operation))


def _summed(operation: tf.Operation, transposed: str) -> float:
    sizes = _sizes(operation.inputs[0])
    return sizes[-2 if operation.get_attr(transposed) else -1]


def _summed_by_einsum(operation: tf.Operation) -> float:
    terms, result = operation.get_attr("equation").decode().split("->")
    sizes: dict[str, int] = {}
    for labels, tensor in zip(terms.split(","), operation.inputs):
        # Dimensions that "..." stands for are not summed over.
        before, _, after = labels.partition("...")
        shape = _sizes(tensor)
        sizes.update(zip(before, shape))
        sizes.update(zip(reversed(after), reversed(shape)))
    return math.prod(size for label, size in sizes.items() if label not in result)


def _filter(operation: tf.Operation, dimensions: int) -> float:
    return math.prod(_sizes(operation.inputs[1])[:dimensions])


# For each element of the result, how many products are summed up.
_PRODUCTS: dict[str, Callable[[tf.Operation], float]] = {
    "MatMul": lambda op: _summed(op, "transpose_a"),
    "BatchMatMul": lambda op: _summed(op, "adj_x"),
    "BatchMatMulV2": lambda op: _summed(op, "adj_x"),
    "BatchMatMulV3": lambda op: _summed(op, "adj_x"),
    "Einsum": _summed_by_einsum,
    "Conv2D": lambda op: _filter(op, 3),
    "Conv3D": lambda op: _filter(op, 4),
    "DepthwiseConv2dNative": lambda op: _filter(op, 2),
}
