"""What a window is: how many micro-batches it takes, and who may say so."""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from .._backend.control import assertions

AccumSteps: TypeAlias = int | Callable[[Any], Any]

# Update indices at which a schedule is tried before training starts.
PROBES = (*range(64), *(2**power for power in range(6, 31)))


def check_accum_steps(accum_steps: Any) -> AccumSteps:
    """Return `accum_steps`, an int of at least 1 or a schedule, or refuse it.

    Raises:
        ValueError: if it is an int below 1, or a schedule with such a result.
        TypeError: if it is anything else, or a schedule whose result is no integer.
    """
    if not callable(accum_steps):
        return _check_count(accum_steps, "")
    schedule = trace_schedule(accum_steps)
    for update in PROBES:
        steps = schedule(tf.constant(update, "int32"))
        _check_count(steps.numpy()[()], f" from the schedule at update {update}")
    return accum_steps


def trace_schedule(schedule: Callable[[Any], Any]) -> Callable[[tf.Tensor], tf.Tensor]:
    """A form of `schedule` that a compiled training step can call.

    AutoGraph converts it, so that it may use `if` and comparisons on the update index.

    Returns:
        A function from the index of the update to be made (scalar int32 tensor, 0 for
        the first of training) to the length of its window (scalar tensor).
    """
    return tf.function(lambda update: tf.convert_to_tensor(schedule(update)))


def checked_steps(steps: tf.Tensor) -> tf.Tensor:
    """The result of a traced schedule as int64, refused where it is below 1.

    Raises:
        tf.errors.InvalidArgumentError: when it runs. XLA leaves assertions out: there
            a wrong result that `check_accum_steps` has not met counts as 1.
    """
    steps = tf.cast(steps, "int64")
    message = _message("a smaller one", " from the schedule")
    checks = assertions(lambda: tf.debugging.assert_positive(steps, message=message))
    with tf.control_dependencies(checks):
        return tf.maximum(steps, 1)


def _check_count(value: Any, where: str) -> int:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(_message(f"{value!r}", where))
    if value < 1:
        raise ValueError(_message(f"{value!r}", where))
    return int(value)


def _message(received: str, where: str) -> str:
    return (
        "`accum_steps` must be an integer of at least 1, the micro-batches that make one "
        "update, or a function from the update index to one. Received: "
        f"{received}{where}. To train without accumulation, pass 1."
    )
