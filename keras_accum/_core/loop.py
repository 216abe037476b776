"""A batch taken apart into micro-batches, and a function run on each of them in graph.

The micro-batches of a batch of n samples come in at most two sizes, so that every shape
is known to a compiler that needs to know it:

    accum_steps=k        n mod k micro-batches of n // k + 1 samples, the rest of n // k
    micro_batch_size=b   n // b micro-batches of b samples, then one of n mod b

A batch of fewer samples than `accum_steps` makes as many micro-batches of one sample.

XLA compiles the loop as a whole, with one exception. On CPUs it brings the gradients of
convolutions into the form that its fast library takes only outside of loops: inside, a
small network takes ten times as long (`benchmarks/window_time.py`). With convolutions the
loop stays in the graph there, and each micro-step is compiled by itself.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from .._backend import replica
from .._backend.control import assertions
from .._backend.private.layers import flatten_layers
from .checks import check_integer

Size: TypeAlias = int | tf.Tensor
# From a micro-batch, how many samples it has, and what the last call gave, to the next.
Step: TypeAlias = Callable[[Any, tf.Tensor, Any], Any]


@dataclasses.dataclass(frozen=True)
class Split:
    """How a batch is taken apart: into so many micro-batches, or ones of such a size.

    Raises:
        ValueError: if not exactly one of the two is given, or it is below 1.
        TypeError: if it is no integer.
    """

    accum_steps: int | None = None
    micro_batch_size: int | None = None

    def __post_init__(self) -> None:
        given = {k: v for k, v in vars(self).items() if v is not None}
        if len(given) != 1:
            raise ValueError(
                "A batch is split by exactly one of `accum_steps` (how many "
                "micro-batches it makes) and `micro_batch_size` (how many samples each "
                "has). Received: "
                f"accum_steps={self.accum_steps!r}, "
                f"micro_batch_size={self.micro_batch_size!r}"
            )
        ((name, value),) = given.items()
        object.__setattr__(self, name, check_integer(name, value, 1))

    def groups(self, rows: Size) -> list[tuple[Size, Size]]:
        """The count and the size of the micro-batches of `rows` samples, twice."""
        if (size := self.micro_batch_size) is not None:
            rest = rows % size
            return [(rows // size, size), (_at_most_one(rest), rest)]
        steps = self.accum_steps or 1
        size, rest = rows // steps, rows % steps
        # Without samples of its own, the second group has no micro-batches either.
        return [(rest, size + 1), (_if_any(size, steps - rest), size)]

    def is_even(self, rows: Size) -> bool:
        """Whether `rows` samples are known to make micro-batches of one size."""
        if not isinstance(rows, int):
            return False
        return sum(count > 0 for count, _ in self.groups(rows)) == 1


_CONVOLUTIONS = tuple(c for name, c in vars(keras.layers).items() if "Conv" in name)


def compiles_loop(model: keras.Model) -> bool:
    """Whether `model` is compiled by XLA as a whole, with the loop over micro-batches."""
    return bool(model.jit_compile) and not _convolves_on_cpu(model)


def _convolves_on_cpu(model: keras.Model) -> bool:
    layers = flatten_layers(model)
    found = any(isinstance(layer, _CONVOLUTIONS) for layer in layers)
    return found and not tf.config.list_logical_devices("GPU")


def compiles_in_parts(model: keras.Model) -> bool:
    """Whether what is traced now is to be compiled, but not with the loop in it."""
    apart = bool(model.jit_compile) and not compiles_loop(model)
    return apart and not tf.executing_eagerly()


def for_each_micro_batch(
    step: Step, batch: Any, start: Any, split: Split, jit_compile: bool | None = None
) -> Any:
    """Run `step` on each micro-batch of `batch` in turn.

    In graph, whatever the number of micro-batches, this is

        state = start
        for micro_batch in split(batch):
            state = step(micro_batch, samples(micro_batch), state)
        return state

    and `step` is traced once; in eager mode it is this loop.

    Args:
        step: gives the next state, of the same structure, shapes and dtypes.
        batch: nested tensors whose first dimension is the samples'; None is left alone.
        start: nested tensors.
        split: how to take `batch` apart.
        jit_compile: True to compile each micro-step by itself; None, not False, to have
            it compiled with what is around it.

    Returns:
        The last state.
    """
    rows = rows_of(batch)
    if tf.executing_eagerly():
        return _loop_eagerly(step, batch, start, split.groups(int(rows)))
    groups = split.groups(rows)
    # A group that is known to be empty is left out, and then sizes may stay static.
    groups = [(count, size) for count, size in groups if not _is_zero(count)]
    static = len(groups) == 1 and isinstance(groups[0][1], int)
    traced = tf.function(step, autograph=False, jit_compile=jit_compile)
    state, first = start, 0
    for count, size in groups:
        if not static:
            # A compiler wants a size that fits, also for a group that never runs.
            size = tf.clip_by_value(size, tf.minimum(rows, 1), rows)
        state = _loop(traced, batch, state, (count, size, first), static)
        first = first + count * size
    return state


def _loop_eagerly(
    step: Step, batch: Any, state: Any, groups: list[tuple[int, int]]
) -> Any:
    first = 0
    for count, size in groups:
        for _ in range(count):
            state = step(take(batch, first, size), tf.constant(size), state)
            first += size
    return state


def _loop(
    step: Step, batch: Any, state: Any, group: tuple[Size, Size, Size], static: bool
) -> Any:
    count, size, first = group

    def body(i: tf.Tensor, state: Any) -> tuple[tf.Tensor, Any]:
        micro_batch = take(batch, first + i * size, size, static)
        return i + 1, step(micro_batch, tf.convert_to_tensor(size), state)

    loop = (tf.zeros((), "int32"), state)
    return tf.while_loop(lambda i, _: i < count, body, loop, parallel_iterations=1)[1]


def rows_of(batch: Any) -> Size:
    """The number of samples of a batch: an int where it is known, else a tensor."""
    leaf = next(leaf for leaf in leaves(batch) if leaf is not None)
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows(out_type="int32")
    static = leaf.shape[0]
    return tf.shape(leaf)[0] if static is None else static


def leaves(batch: Any) -> list[Any]:
    """The tensors of a batch, ragged and sparse ones whole."""
    return tf.nest.flatten(batch, expand_composites=False)


def take(batch: Any, first: Size, size: Size, static: bool = True) -> Any:
    """Samples `first` to `first + size` of each tensor; of static shape if asked for."""

    def rows(tensor: Any) -> Any:
        if tensor is None:
            return None
        if isinstance(tensor, tf.RaggedTensor):
            return tensor[first : first + size]
        if isinstance(tensor, tf.SparseTensor):
            width = tf.cast(tf.shape(tensor), "int64")
            start = tf.concat([[tf.cast(first, "int64")], tf.zeros_like(width[1:])], 0)
            return tf.sparse.slice(
                tensor, start, tf.concat([[tf.cast(size, "int64")], width[1:]], 0)
            )
        rest = tensor.shape[1:]
        known = rest.is_fully_defined()
        # Not -1, "all": XLA wants to know where they begin, then.
        sizes = rest if known else tf.unstack(tf.shape(tensor))[1:]
        part = tf.slice(tensor, [first, *(0 for _ in rest)], [size, *sizes])
        length = size if static and isinstance(size, int) else None
        return _with_shape(part, [length, *rest])

    return tf.nest.map_structure(rows, batch, expand_composites=False)


def _with_shape(tensor: tf.Tensor, shape: list[int | None]) -> tf.Tensor:
    if tf.executing_eagerly():
        return tensor
    return tf.ensure_shape(tensor, shape)


def _is_zero(count: Size) -> bool:
    return isinstance(count, int) and count == 0


def _at_most_one(rest: Size) -> Size:
    return min(rest, 1) if isinstance(rest, int) else tf.minimum(rest, 1)


def _if_any(size: Size, count: Size) -> Size:
    if isinstance(size, int) and isinstance(count, int):
        return count if size else 0
    return tf.where(size > 0, count, 0)


def check_batch(batch: Any) -> tuple[Any, list[Any]]:
    """`batch`, with Python numbers and arrays as tensors, or refused.

    Returns:
        The batch, and what has to run before it is used: in a graph, checks of sizes
        that are not known before.

    Raises:
        ValueError: if it has no tensor, a scalar, no sample, or tensors that differ in
            the number of samples.
    """
    batch = tf.nest.map_structure(_as_tensor, batch, expand_composites=False)
    tensors = [leaf for leaf in leaves(batch) if leaf is not None]
    if not tensors:
        raise ValueError(
            "Received a batch without any tensor: there is nothing to split."
        )
    for tensor in tensors:
        if tensor.shape.rank == 0:
            raise ValueError(
                "Every tensor of a batch must have the samples as its first dimension. "
                f"Received a scalar: {tensor}. Repeat it for each sample, or keep it out "
                "of the batch."
            )
    sizes = [rows_of(tensor) for tensor in tensors]
    known = {size for size in sizes if isinstance(size, int)}
    if len(known) > 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ValueError(f"{_UNEQUAL} Received shapes: {shapes}")

    def equal(size: Size) -> Callable[[], tf.Operation | None]:
        return lambda: tf.debugging.assert_equal(size, sizes[0], message=_UNEQUAL)

    checks = assertions(*(equal(size) for size in sizes[1:]))
    # Of several replicas, one may be left without a sample by a short last batch.
    if replica.count() == 1:
        if known == {0}:
            raise ValueError(_EMPTY)
        checks += assertions(
            lambda: tf.debugging.assert_positive(sizes[0], message=_EMPTY)
        )
    return batch, checks


_UNEQUAL = "All tensors of a batch must have the same number of samples."
_EMPTY = "Received a batch without samples: its loss is not defined. Leave it out."


def _as_tensor(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
        return leaf
    return tf.convert_to_tensor(leaf)
