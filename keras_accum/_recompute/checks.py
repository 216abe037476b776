"""What cannot be computed twice is refused: the reason, and what to do instead."""

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from .._backend.attribute_patch import AttributePatch
from .._backend.private.functions import captured
from .._backend.private.layers import attributes_without_losses, handles_of, is_watched
from .._backend.private.tapes import could_record, is_recorded
from .nest import Nest
from .passes import Pass

# How the types of operations begin that change a variable.
_ASSIGNING = ("Assign", "ResourceApply", "ResourceScatter", "ResourceStridedSliceAssign")

# Operations of TensorFlow that draw from a state which nobody can wind back.
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


def check_traced(block: Any) -> None:
    """Refuse a block whose layers have a memory of their own of how they are called."""
    calls = [(block.name, block.function), *[(x.name, x.call) for x in block.layers]]
    for name, call in calls:
        if isinstance(call, tf.types.experimental.PolymorphicFunction):
            raise ValueError(
                f"'{name}' in '{block.name}' has a call that is a `tf.function`: "
                "it would remember the weights of the first pass as constants. Leave the "
                "decorator out; Keras compiles the whole training step."
            )


def check_assigned(block: Any, scope: Pass) -> None:
    """Refuse a block that moves what is trained, or something inside of a loop."""
    variables = scope.assigned.values()
    inside = [v.path for v in variables if not scope.owns(scope.get_current_value(v))]
    if inside:
        raise ValueError(
            f"'{block.name}' assigns to {inside} inside of a loop or a branch of "
            "TensorFlow's, out of which their new values cannot be taken. What has a "
            "state, dropout with a seed of its own included, must be called outside of "
            "it, or be left out of what is recomputed."
        )
    paths = [v.path for v in variables if v.trainable or is_watched(v)]
    if paths:
        raise ValueError(
            f"'{block.name}' assigns to trainable weights in its call: {paths}. Its "
            "second pass would see other weights than the first. Recompute layers around "
            "it or inside of it, or keep what it assigns in non-trainable weights."
        )


def check_traced_anew(block: Any, first: Pass, second: Pass) -> None:
    """Refuse a function that the second pass called as the first one had traced it."""
    found = first.read_in_functions.items()
    if held := [v.path for i, v in found if i not in second.read_in_functions]:
        raise ValueError(
            f"'{block.name}' reads {held} in a `tf.function` that a layer keeps: in the "
            "second pass it holds the values of the first one, without their gradients. "
            "Leave the `tf.function` out; Keras compiles the whole training step."
        )


def check_captured(block: Any, results: Sequence[tf.Tensor]) -> None:
    """Refuse a block that has a gradient for something it was not given.

    Its first pass was cut from all that it was given: what a tape still knows of the
    results came another way.
    """
    if could_record() and is_recorded(results):
        raise ValueError(
            f"'{block.name}' uses a tensor, a `tf.Variable` that is no Keras weight, or "
            "the weights of a `tf.function`, which needs a gradient and is not among the "
            "arguments of its call: recomputed, it would get none. Pass it as an "
            "argument, leave the `tf.function` out (Keras compiles the whole step), or "
            "recompute a layer around both."
        )


class CacheCheck:
    """Refuses a block whose layers put tensors on themselves while they are called."""

    def __init__(self, block: Any) -> None:
        self._block = block
        self._before = list(self._tensors())  # Holds them, so that ids stay theirs.

    def check(self) -> None:
        """To be called after the call."""
        known = {id(tensor) for _, _, tensor in self._before}
        for layer, name, tensor in self._tensors():
            if id(tensor) not in known:
                raise ValueError(
                    f"'{self._block.name}' keeps a tensor of its call in "
                    f"`{layer.name}.{name}`, where the second pass would put another "
                    "one. Return it from the call and pass it in again, or keep it in "
                    "a non-trainable weight."
                )

    def _tensors(self) -> Iterator[tuple[keras.layers.Layer, str, tf.Tensor]]:
        for layer in self._block.layers:
            for name, value in attributes_without_losses(layer).items():
                values = value.values() if isinstance(value, dict) else value
                several = isinstance(value, (dict, list, tuple))
                for item in values if several else [value]:
                    if isinstance(item, tf.Tensor):
                        yield layer, name, item


class OperationCheck:
    """Refuses a block whose operations cannot run twice.

    They draw random numbers from TensorFlow's own state, assign to a variable that Keras
    does not know of, or read in a `tf.function` what the block moves: no scope sees that.
    """

    def __init__(self, block: Any) -> None:
        self._block = block
        self._before = len(_operations())

    def check(self, scope: Pass) -> None:
        """To be called after the call, which left its operations in the graph."""
        self._refuse(_operations()[self._before :], scope.assigned.values())

    def check_eagerly(self, args: Any, kwargs: Any) -> None:
        """Before the call: eager mode leaves no operations, so trace it to have some."""
        scope = keras.StatelessScope()

        def call() -> None:
            with scope:  # What it assigns goes nowhere.
                self._block.function(*args, **kwargs)

        caches = CacheCheck(self._block)
        try:
            traced = tf.function(call, autograph=False).get_concrete_function()
        except Exception:
            return  # Code for eager mode alone, which nothing but running it will tell.
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
        # A pass reads nothing in loops; what only traces them does.
        calls = [
            op for op in operations if in_loops or op.type.endswith("PartitionedCall")
        ]
        types = _types(operations)
        if drawn := sorted(_RANDOM & types):
            raise ValueError(
                f"'{self._block.name}' draws random numbers from a state of TensorFlow's "
                f"own ({', '.join(drawn)}): its second pass would draw others. Use "
                "`keras.random`, with a `keras.random.SeedGenerator` of the layer."
            )
        if kinds := sorted(x for x in types if x.startswith(_ASSIGNING)):
            raise ValueError(
                f"'{self._block.name}' assigns to a `tf.Variable`, or to a weight inside "
                f"of a `tf.function` ({', '.join(kinds)}): recomputed, it would assign "
                "twice. Keep what a call changes in a weight made by "
                "`add_weight(trainable=False)`, and assign to it outside of "
                "`tf.function`s."
            )
        read = _read_in_functions(calls, assigned)
        moved = [v.path for v in assigned if id(v) in read]
        if moved:
            raise ValueError(
                f"'{self._block.name}' assigns to {moved}, and reads it in a "
                "`tf.function`, whose second pass would read the new value. Leave the "
                "`tf.function` out; Keras compiles the whole training step."
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
    """By id, those that functions read which were traced before this pass."""
    inputs = [x for op in calls if _functions(op.node_def) for x in op.inputs]
    handles = {id(captured(x)) for x in inputs if x.dtype == tf.resource}
    if not handles:
        return set()
    return {id(v) for v in variables if handles & set(map(id, handles_of(v)))}


def _types(operations: Sequence[tf.Operation]) -> set[str]:
    """The types of `operations` and of what they call: bodies of loops, branches."""
    found = {operation.type for operation in operations}
    called = [name for op in operations for name in _functions(op.node_def)]
    if not called:
        return found
    library = operations[0].graph.as_graph_def().library.function
    bodies = {function.signature.name: function.node_def for function in library}
    while called:
        for node in bodies.pop(called.pop(), []):  # Each but once.
            found.add(node.op)
            called += _functions(node)
    return found


def _functions(node: Any) -> list[str]:
    """The names of the functions that the operation of a `NodeDef` calls."""
    return [
        function.name
        for value in node.attr.values()
        for function in [value.func, *value.list.func]
        if function.name
    ]


def check_same(block: Any, args: Any, kwargs: Any) -> None:
    """Refuse a block that gives something else the second time.

    Called twice without a gradient: with these arguments, or with made-up ones of their
    shapes where a graph is being traced.
    """
    with tf.init_scope():
        arguments = Nest(tf.nest.map_structure(_concrete, (args, kwargs)))
        passes = [_outputs(block, *arguments.copied()) for _ in range(2)]
    for (name, first), (_, second) in zip(*passes):
        if not _same(first, second):
            raise ValueError(
                f"'{block.name}' cannot be recomputed: called twice with the same "
                f"arguments and state, '{name}' gives different outputs. What a call "
                "depends on must be an argument, a weight, or a "
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
    """What each layer gave, by name, in the order in which they finished."""
    found: list[tuple[str, list[np.ndarray]]] = []
    # What it assigns goes nowhere, so both passes begin with the same state.
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
    """Add what `layer` returns to `found`."""
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
    # Some devices add up in an order of their own.
    return all(
        np.allclose(a, b, rtol=1e-3, atol=1e-3 * np.abs(b).max(initial=0), equal_nan=True)
        for a, b in zip(first, second)
    )
