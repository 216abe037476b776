"""Replicas: the one file that names `tf.distribute`.

A micro-step of the optimizer has two parts. Each replica adds its gradient to its own
sum (replica context); then all of them together count the micro-step and, at the end of
a window, reduce, update and reset (cross-replica context). TensorFlow demands this
order: a conditional around anything that reduces must stand outside of the replicas.
Without a strategy all of it is the same plain call.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from .private.compiled import compiled_by_xla


def count() -> int:
    """The number of replicas that make one update together."""
    return tf.distribute.get_strategy().num_replicas_in_sync


def index() -> tf.Tensor | int:
    """The place of this replica among them; 0 where there is one."""
    if count() == 1:
        return 0
    return tf.distribute.get_replica_context().replica_id_in_sync_group


def in_cross_replica(function: Callable[[], Any]) -> None:
    """Run `function` once for all replicas. To be called on each, or for all."""
    # Even where TensorFlow needs no `merge_call`, as under XLA on GPUs: a variable that
    # all replicas share merges at each assignment on one, and cannot in control flow.
    if distributed() and not tf.distribute.in_cross_replica_context():
        context = tf.distribute.get_replica_context()
        context.merge_call(lambda _: function())
    else:
        function()


def in_replica(function: Callable[..., Any], *args: Any) -> Any:
    """Run `function` on each replica, from inside of `in_cross_replica`."""
    if distributed() and tf.distribute.in_cross_replica_context():
        strategy = tf.distribute.get_strategy()
        return strategy.extended.call_for_each_replica(function, args=args)
    return function(*args)


def distributed() -> bool:
    """Whether there is a strategy, be it of one replica."""
    return tf.distribute.has_strategy()


def current() -> tf.distribute.Strategy:
    """The strategy that this is called in; the default one, of one replica, if none."""
    return tf.distribute.get_strategy()


def run_on(strategy: tf.distribute.Strategy, function: Callable[[], None]) -> None:
    """Run `function` on each replica of `strategy`, from outside or on one of them."""
    outside = tf.distribute.in_cross_replica_context() or not tf.distribute.has_strategy()
    if strategy.num_replicas_in_sync > 1 and outside:
        with _eager_without_warning():
            strategy.run(function)
    else:
        function()


@contextlib.contextmanager
def _eager_without_warning() -> Iterator[None]:
    """Have TensorFlow not warn of a strategy that is used eagerly.

    It is slow in a training loop, of which TensorFlow thinks. At the end of an epoch, to
    trace a function would take longer, and nobody can act on it.
    """

    def quiet(record: logging.LogRecord) -> bool:
        return "eagerly has significant overhead" not in record.getMessage()

    logger = tf.get_logger()
    logger.addFilter(quiet)
    try:
        yield
    finally:
        logger.removeFilter(quiet)


def is_distributed(value: Any) -> bool:
    """Whether each replica may have another value."""
    return isinstance(value, tf.distribute.DistributedValues)


def local_result(value: Any) -> Any:
    """The value of one replica, where all of them hold the same."""
    return tf.distribute.get_strategy().experimental_local_results(value)[0]


def local_parts(strategy: tf.distribute.Strategy, value: Any) -> list[Any]:
    """What each replica has of a nested `value`; all of it, if it is not distributed."""
    leaves = tf.nest.flatten(value, expand_composites=False)
    if any(map(is_distributed, leaves)):
        return list(strategy.experimental_local_results(value))
    return [value]


def sum_over_replicas(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The sums of `tensors` over all replicas, each in the dtype of its own.

    In one batched reduction for each dtype. Scalars of a dtype that nothing else has go
    along in a wider one, which holds them exactly.
    """
    if count() == 1 or not tensors:
        return list(tensors)
    context = tf.distribute.get_replica_context()
    sent: dict[tf.DType, dict[int, tf.Tensor]] = {}
    for i, tensor in enumerate(tensors):
        dtype = _dtype_to_send(tensor, tensors)
        # Inside of a conditional, the value of a variable has no device to reduce on:
        # its identity has.
        sent.setdefault(dtype, {})[i] = tf.identity(tf.cast(tensor, dtype))
    sums: dict[int, tf.Tensor] = {}
    for batch in sent.values():
        reduced = context.all_reduce(tf.distribute.ReduceOp.SUM, list(batch.values()))
        sums.update(zip(batch, reduced))
    return [tf.cast(sums[i], tensor.dtype) for i, tensor in enumerate(tensors)]


def _dtype_to_send(tensor: tf.Tensor, others: Sequence[tf.Tensor]) -> tf.DType:
    dtypes = {other.dtype for other in others if other.shape.rank != 0}
    if tensor.shape.rank != 0 or tensor.dtype in dtypes or not tensor.dtype.is_floating:
        return tensor.dtype
    wider = [d for d in dtypes if d.is_floating and d.size > tensor.dtype.size]
    return max(wider, key=lambda dtype: dtype.size, default=tensor.dtype)


def all_reduce_max(tensor: tf.Tensor) -> tf.Tensor:
    """The elementwise maximum of `tensor` over all replicas."""
    return tf.reduce_max(all_gather(tf.expand_dims(tensor, 0)), axis=0)


def all_gather(tensor: tf.Tensor) -> tf.Tensor:
    """The rows of `tensor` on all replicas, of which each may have another number."""
    if count() == 1:
        return tensor
    # Collective operations know no booleans, and need a device, as above.
    sent = tf.cast(tensor, "int32") if tensor.dtype.is_bool else tf.identity(tensor)
    gathered = tf.distribute.get_replica_context().all_gather(sent, axis=0)
    # TensorFlow forgets the shape, by which Keras tells what it squeezes or expands.
    gathered = tf.ensure_shape(gathered, [None, *tensor.shape[1:]])
    return tf.cast(gathered, tensor.dtype)


def first_row(rows: tf.Tensor | int) -> tf.Tensor | int:
    """Where the `rows` rows of this replica begin in what `all_gather` gives."""
    if count() == 1:
        return 0
    before = all_gather(tf.reshape(tf.cast(rows, "int32"), [1]))
    return tf.reduce_sum(before[: index()])


def check_compilable() -> None:
    """Refuse to be compiled by XLA on replicas that TensorFlow cannot compile for.

    Keras compiles the step of all replicas of a process into one program, which can use
    the variables of one device alone. Several machines with one GPU each are left.

    Raises:
        ValueError: under a strategy with CPU devices, or with several GPUs in a process.
    """
    if count() == 1 or not compiled_by_xla():
        return
    devices = getattr(current().extended, "worker_devices", ())
    if any("CPU" in device.upper() for device in devices):
        raise ValueError(_CPUS_NOT_COMPILABLE)
    if sum("GPU" in device.upper() for device in devices) > 1:
        raise ValueError(_GPUS_NOT_COMPILABLE)


_CPUS_NOT_COMPILABLE = (
    "Received `jit_compile=True` under a strategy whose replicas are CPU devices, where "
    "TensorFlow compiles no collective operation. Write "
    "`model.compile(..., jit_compile=False)`."
)
_GPUS_NOT_COMPILABLE = (
    "Received `jit_compile=True` under a strategy with several GPUs in one process, "
    "where XLA compiles a program for one device only. Write "
    "`model.compile(..., jit_compile=False)`."
)
