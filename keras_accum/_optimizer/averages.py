"""The inner optimizer's step on replicas, where Keras would reduce and average itself."""

import contextlib
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from .._backend import replica
from .._backend.control import run_if
from .._backend.private.strategies import overwriting_by_averages, replicas_left_to_caller


def apply_reduced(
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[tf.Tensor | None],
    variables: Sequence[keras.Variable],
) -> None:
    """A step of `optimizer`, on each replica, for gradients that are reduced already.

    `overwrite_by_averages` has to follow, for all replicas together.
    """
    apart = replica.distributed()
    with replicas_left_to_caller(optimizer) if apart else contextlib.nullcontext():
        # As `fit` does: a user may have overridden this, or `apply`, which it calls.
        optimizer.apply_gradients(list(zip(gradients, variables)))


def overwrite_by_averages(optimizer: keras.optimizers.Optimizer) -> None:
    """What `ema_overwrite_frequency` asks for, where Keras cannot do it by itself."""
    if not replica.distributed():
        return
    for due, overwrite, variables in overwriting_by_averages(optimizer):

        def overwrite_and_constrain(
            overwrite: Any = overwrite, variables: Any = variables
        ) -> None:
            overwrite()
            replica.in_replica(_constrain, variables)

        run_if(due, overwrite_and_constrain)


def _constrain(variables: Sequence[keras.Variable]) -> None:
    for variable in variables:
        if variable.constraint is not None:
            variable.assign(variable.constraint(variable))
