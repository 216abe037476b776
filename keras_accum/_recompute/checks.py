"""Refusals of blocks that cannot be computed twice, with the reason and the remedy."""

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from .._backend.attribute_patch import AttributePatch
from .._backend.kept_tensors import KeptTensors
from .._backend.private.functions import captured
from .._backend.private.layers import handles_of, is_watched
from .._backend.private.tapes import could_record, is_recorded
from .nest import Nest
from .passes import Pass

# The beginnings of the types of operations that assign to a variable.
_ASSIGNING = ("Assign", "ResourceApply", "ResourceScatter", "ResourceStridedSliceAssign")

# The types of operations that draw from a state which cannot be set back.
_RANDOM = {
    "Multinomial",
    "ParameterizedTruncatedNormal",
    "RandomGamma",
    "RandomPoisson",
    "RandomPoissonV2",
    "RandomShuffle",
    "RandomStandardNormal",
    "RandomUniform",
    "RandomUniformInt",
    "RngReadAndSkip",
    "StatefulStandardNormalV2",
    "StatefulTruncatedNormal",
    "StatefulUniform",
    "StatefulUniformInt",
    "TruncatedNormal",
}

_COMPILED = "Keras compiles the whole training step."


def check_call_is_no_function(block: Any) -> None:
    """Refuse a layer whose `call` is a `tf.function`."""
    calls = [(block.name, block.function), *[(x.name, x.call) for x in block.layers]]
    for name, call in calls:
        if isinstance(call, tf.types.experimental.PolymorphicFunction):
            raise ValueError(
                f"The call of '{name}' in '{block.name}' is a `tf.function`. It would "
                "hold the weights of the first pass as constants. Remove the decorator: "
                f"{_COMPILED}"
            )


def check_assigned(block: Any, scope: Pass) -> None:
    """Refuse a block that assigns to trainable weights, or inside of a loop."""
    variables = scope.assigned.values()
    inside = [v.path for v in variables if not scope.owns(scope.get_current_value(v))]
    if inside:
        raise ValueError(
            f"'{block.name}' assigns to {inside} inside of a TensorFlow loop or branch. "
            "The new values cannot leave it, so the state could not move once. Call "
            "layers with a state (dropout has one, its seed) outside of the loop, or do "
            "not recompute them."
        )
    paths = [v.path for v in variables if v.trainable or is_watched(v)]
    if paths:
        raise ValueError(
            f"'{block.name}' assigns to trainable weights in its call: {paths}. The "
            "second pass would read other weights than the first. Make these weights "
            "non-trainable (`add_weight(trainable=False)`), or recompute other layers."
        )


def check_functions_are_traced_again(block: Any, first: Pass, second: Pass) -> None:
    """Refuse a `tf.function` that was traced in the first pass only."""
    found = first.read_in_functions.items()
    if held := [v.path for i, v in found if i not in second.read_in_functions]:
        raise ValueError(
            f"'{block.name}' reads {held} in a `tf.function` that is traced once. It "
            "would hold the values of the first pass in the second, without their "
            f"gradients. Remove the `tf.function`: {_COMPILED}"
        )


def check_captured(block: Any, results: Sequence[tf.Tensor]) -> None:
    """Refuse a block that uses a tensor with a gradient which is not an argument.

    No tape recorded the first pass. If a tape knows the results all the same, something
    else led to them.
    """
    if could_record() and is_recorded(results):
        raise ValueError(
            f"'{block.name}' uses something that needs a gradient and is not an argument "
            "of its call: a tensor from outside, a `tf.Variable` that is no Keras weight, "
            "or the weights of a `tf.function`. Recomputed, it would get no gradient. "
            "Pass the tensor as an argument, make the variable a Keras weight, remove "
            "the `tf.function`, or recompute a layer around both."
        )


class CacheCheck:
    """Refuses a block whose layers keep a tensor of their call in an attribute."""

    def __init__(self, block: Any) -> None:
        self._block, self._kept = block, KeptTensors(block.layers)

    def check(self) -> None:
        """Compare, after the call."""
        for layer, name in self._kept.new():
            raise ValueError(
                f"'{self._block.name}' keeps a tensor of its call in "
                f"`{layer.name}.{name}`. The second pass would replace it. Return it from "
                "the call and pass it in at the next one, or keep it in a non-trainable "
                "weight."
            )


class OperationCheck:
    """Refuses a block with operations that cannot run twice and that no scope sees.

    They draw random numbers from TensorFlow's own state, assign to a `tf.Variable`, or
    read, in a `tf.function` that was traced before, state that the block moves.
    """

    def __init__(self, block: Any) -> None:
        self._block = block
        self._before = len(_operations())

    def check(self, scope: Pass) -> None:
        """Look at the operations that the call left in the graph."""
        self._refuse(_operations()[self._before :], scope.assigned.values())

    def check_eagerly(self, args: Any, kwargs: Any) -> None:
        """Trace the call to see its operations: eager mode leaves none."""
        scope = keras.StatelessScope()

        def call() -> None:
            with scope:  # So that nothing is assigned.
                self._block.function(*args, **kwargs)

        caches = CacheCheck(self._block)
        try:
            traced = tf.function(call, autograph=False).get_concrete_function()
        except Exception:
            return  # Code for eager mode only. Nothing but running it tells more.
        finally:
            caches.check()
        operations = traced.graph.get_operations()
        self._refuse(operations, _assigned(self._block, scope), in_loops=False)

    def _refuse(
        self,
        operations: Sequence[tf.Operation],
        assigned: Collection[keras.Variable],
        in_loops: bool = True,
    ) -> None:
        # Loops of a pass read nothing themselves; those of a mere trace do.
        calls = [op for op in operations if in_loops or _calls_function(op)]
        types = _types(operations)
        if drawn := sorted(_RANDOM & types):
            raise ValueError(
                f"'{self._block.name}' draws random numbers from TensorFlow's own state "
                f"({', '.join(drawn)}). The second pass would draw others. Use "
                "`keras.random` with a `keras.random.SeedGenerator` of the layer."
            )
        if kinds := sorted(x for x in types if x.startswith(_ASSIGNING)):
            raise ValueError(
                f"'{self._block.name}' assigns to a `tf.Variable`, or to a weight inside "
                f"of a `tf.function` ({', '.join(kinds)}). Recomputed, it would assign "
                "twice. Create the state by `add_weight(trainable=False)`, and assign to "
                "it outside of any `tf.function`."
            )
        read = _read_in_functions(calls, assigned)
        moved = [v.path for v in assigned if id(v) in read]
        if moved:
            raise ValueError(
                f"'{self._block.name}' assigns to {moved} and reads it in a "
                "`tf.function`. The second pass would read the new value. Remove the "
                f"`tf.function`: {_COMPILED}"
            )


def _operations() -> Sequence[tf.Operation]:
    if tf.executing_eagerly():
        return []
    return tf.compat.v1.get_default_graph().get_operations()


def _assigned(block: Any, scope: keras.StatelessScope) -> list[keras.Variable]:
    found = [v for layer in block.layers for v in layer.variables]
    return [v for v in found if scope.get_current_value(v) is not None]


def _calls_function(operation: tf.Operation) -> bool:
    return operation.type.endswith("PartitionedCall")


def _read_in_functions(
    calls: Sequence[tf.Operation], variables: Collection[keras.Variable]
) -> set[int]:
    """The ids of those that functions read which were traced before this pass."""
    inputs = [x for op in calls if _functions(op.node_def) for x in op.inputs]
    handles = {id(captured(x)) for x in inputs if x.dtype == tf.resource}
    if not handles:
        return set()
    return {id(v) for v in variables if handles & set(map(id, handles_of(v)))}


def _types(operations: Sequence[tf.Operation]) -> set[str]:
    """The types of `operations` and of those in the functions that they call."""
    found = {operation.type for operation in operations}
    called = [name for op in operations for name in _functions(op.node_def)]
    if not called:
        return found
    library = operations[0].graph.as_graph_def().library.function
    bodies = {function.signature.name: function.node_def for function in library}
    while called:
        for node in bodies.pop(called.pop(), []):  # Each function once.
            found.add(node.op)
            called += _functions(node)
    return found


def _functions(node: Any) -> list[str]:
    """The names of the functions that an operation calls, bodies of loops included."""
    return [
        function.name
        for value in node.attr.values()
        for function in [value.func, *value.list.func]
        if function.name
    ]


def check_same(block: Any, args: Any, kwargs: Any) -> None:
    """Refuse a block that returns something else the second time.

    The block is called twice, without a gradient: with these arguments in eager mode,
    with made-up ones of the same shapes in a graph.
    """
    with tf.init_scope():
        arguments = Nest(tf.nest.map_structure(_concrete, (args, kwargs)))
        passes = [_outputs(block, *arguments.copied()) for _ in range(2)]
    for (name, first), (_, second) in zip(*passes):
        if not _same(first, second):
            raise ValueError(
                f"'{block.name}' cannot be recomputed: called twice with the same "
                f"arguments and state, '{name}' returns different outputs. A call may "
                "depend only on its arguments, on weights, and on a "
                "`keras.random.SeedGenerator`."
            )


def _concrete(value: Any) -> Any:
    if isinstance(value, tf.RaggedTensor) and not hasattr(value.flat_values, "numpy"):
        return tf.RaggedTensor.from_tensor(
            _made_up(value),
            ragged_rank=value.ragged_rank,
            row_splits_dtype=value.row_splits.dtype,
        )
    if isinstance(value, tf.Tensor) and not hasattr(value, "numpy"):
        return _made_up(value)
    return value


def _made_up(like: tf.Tensor | tf.RaggedTensor) -> tf.Tensor:
    shape = [2 if size is None else size for size in like.shape]
    if like.dtype.is_floating:
        return tf.random.stateless_normal(shape, (1, 2), dtype=like.dtype)
    return tf.ones(shape, like.dtype)


def _outputs(block: Any, args: Any, kwargs: Any) -> list[tuple[str, list[np.ndarray]]]:
    """The outputs of each layer, with its name, in the order of the calls' ends."""
    found: list[tuple[str, list[np.ndarray]]] = []
    # Nothing is assigned, so both calls begin with the same state.
    with contextlib.ExitStack() as stack:
        for layer in block.layers:
            stack.enter_context(_observed(layer, found))
        with keras.StatelessScope():
            found.append((block.name, _arrays(block.function(*args, **kwargs))))
    return found


def _arrays(outputs: Any) -> list[np.ndarray]:
    parts = tf.nest.flatten(outputs, expand_composites=True)
    return [x.numpy() for x in parts if isinstance(x, tf.Tensor)]


@contextlib.contextmanager
def _observed(layer: keras.layers.Layer, found: list[Any]) -> Iterator[None]:
    """Add to `found` what `layer` returns."""
    call = layer.call

    def observed(*args: Any, **kwargs: Any) -> Any:
        outputs = call(*args, **kwargs)
        found.append((layer.name, _arrays(outputs)))
        return outputs

    shadow = AttributePatch(layer, "call", observed)
    try:
        yield
    finally:
        shadow.undo()


def _same(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> bool:
    # The order of a sum may differ from call to call.
    return all(
        np.allclose(a, b, rtol=1e-3, atol=1e-3 * np.abs(b).max(initial=0), equal_nan=True)
        for a, b in zip(first, second)
    )
