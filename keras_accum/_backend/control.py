"""Running a branch only sometimes, and checks: in eager mode, in a graph, under XLA."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from .private.compiled import compiled_by_xla


def assertions(*checks: Callable[[], tf.Operation | None]) -> list[tf.Operation]:
    """The operations of TensorFlow's assertions, each made by one of `checks`.

    None under XLA, which would leave them out, and warn of each: "Ignoring Assert
    operator". In eager mode an assertion is checked at once, and is no operation.
    """
    if compiled_by_xla():
        return []
    made = [check() for check in checks]
    return [operation for operation in made if operation is not None]


def run_if(condition: tf.Tensor, branch: Callable[[], Any]) -> None:
    """Run `branch` for its side effects if `condition` holds.

    In a graph this is a loop of zero or one trips,

        while condition:
            branch()
            condition = False

    and not a `tf.cond`: XLA lets a loop update its variables in place, whereas for a
    conditional it copies every variable that a branch touches, whether the branch runs
    or not. For an optimizer with two slots that costs more than the update itself, at
    each micro-step (`benchmarks/optimizer_overhead.py`).

    Args:
        condition: scalar bool tensor.
        branch: a function without arguments; what it returns is ignored.
    """
    if tf.executing_eagerly():
        if condition:
            branch()
        return

    def body(_: tf.Tensor) -> list[tf.Tensor]:
        branch()
        return [tf.constant(False)]

    tf.while_loop(lambda pending: pending, body, [tf.convert_to_tensor(condition)])


def run_either(
    condition: tf.Tensor, then: Callable[[], Any], otherwise: Callable[[], Any]
) -> None:
    """Run `then` if `condition` holds and `otherwise` if not, for their side effects."""
    # Negated before `then` runs: it may assign what the condition was read from.
    negated = tf.logical_not(condition)
    run_if(condition, then)
    run_if(negated, otherwise)
