"""What an optimizer that wraps another needs of Keras's and TensorFlow's base classes."""

import sys
from collections.abc import Sequence
from typing import Any

import keras


def restore_deferred(optimizer: keras.optimizers.Optimizer) -> None:
    """Give variables just created the values of a checkpoint that was restored before.

    TensorFlow does so where an attribute is set. An optimizer that names its children
    itself has to ask for it.
    """
    for name, child in children_of(optimizer).items():
        optimizer._handle_deferred_dependencies(name=name, trackable=child)


def children_of(optimizer: keras.optimizers.Optimizer, **kwargs: Any) -> dict[str, Any]:
    """What `tf.train.Checkpoint` saves of `optimizer`, by name."""
    return optimizer._trackable_children("checkpoint", **kwargs)


class NamesChildren:
    """An optimizer that says itself what `tf.train.Checkpoint` saves of it.

    TensorFlow would save what is found in attributes, under their names.
    """

    def _checkpointed(self, **kwargs: Any) -> dict[str, Any]:
        """What is saved, by name; `kwargs` go to `children_of`."""
        raise NotImplementedError

    def _check_checkpointed(self, name: str) -> None:
        """Raise if a checkpoint with a child of this name cannot be restored."""
        raise NotImplementedError

    def _trackable_children(
        self, save_type: str = "checkpoint", **kwargs: Any
    ) -> dict[str, Any]:
        if save_type != "checkpoint":
            return super()._trackable_children(save_type, **kwargs)  # type: ignore[misc]
        return self._checkpointed(**kwargs)

    def _lookup_dependency(self, name: str, cached_dependencies: Any = None) -> Any:
        if cached_dependencies is not None:  # While a checkpoint is restored.
            self._check_checkpointed(name)
        return super()._lookup_dependency(  # type: ignore[misc]
            name, cached_dependencies
        )


def track_variable(optimizer: Any, variable: keras.Variable) -> None:
    """Have `optimizer` list `variable`; `add_variable` has no `synchronization`."""
    optimizer._track_variable(variable)


def schedule_of(
    optimizer: Any,
) -> keras.optimizers.schedules.LearningRateSchedule | None:
    """The schedule of an optimizer's rate, or None; `learning_rate` is its value now."""
    rate = getattr(optimizer, "_learning_rate", None)
    scheduled = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
    return rate if scheduled else None


def trained_by(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The variables that `optimizer` was built with."""
    return list(optimizer._trainable_variables)


def index_of(optimizer: Any, variable: keras.Variable) -> int | None:
    """The place of `variable` among those that `optimizer` was built with, or None."""
    key = optimizer._var_key(variable)
    return optimizer._trainable_variables_indices.get(key)


def optimizers_of(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]
) -> list[tuple[keras.optimizers.Optimizer, list[int]]]:
    """The optimizers that update `variables`, and the places of those of each.

    That is `optimizer` itself, but for the parts of a `MultiOptimizer`.
    """
    parts = getattr(optimizer, "optimizers", None)
    if parts is None:
        return [(optimizer, list(range(len(variables))))]
    which = [optimizer._var_to_optimizer_idx[optimizer._var_key(v)] for v in variables]
    return [
        (part, [i for i, of in enumerate(which) if of == number])
        for number, part in enumerate(parts)
    ]


def compiling() -> tuple[keras.Model, bool] | None:
    """The model of the `compile` up the stack, and its `auto_scale_loss`.

    Keras tells an optimizer nothing of its model, and keeps `auto_scale_loss` nowhere.
    """
    frame = sys._getframe(1)
    for _ in range(24):
        if frame is None:
            break
        if frame.f_code.co_name == "compile" and "auto_scale_loss" in frame.f_locals:
            return frame.f_locals["self"], bool(frame.f_locals["auto_scale_loss"])
        frame = frame.f_back  # type: ignore[assignment]
    return None
