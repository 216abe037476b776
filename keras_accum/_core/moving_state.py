"""Layers whose state moves at each call: per micro-batch, where it should per update.

No way of adding gradients up undoes that. What can be done is to say which they are.
"""

import weakref
from collections.abc import Callable, Sequence

import keras
import numpy as np

from .._backend.private.layers import flatten_layers, own_state
from .._backend.warn import is_collecting, warn


def moving_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """The layers of `model` that are known, by class, to move state in each training call.

    A BatchNormalization moves its statistics unless it is frozen; a SpectralNormalization
    its vector and its kernel, always.
    """
    return [
        layer
        for layer in flatten_layers(model)
        if isinstance(layer, keras.layers.SpectralNormalization)
        or (_normalizes_batches(layer) and layer.trainable)
    ]


def moved_layers(
    model: keras.Model, has_moved: Callable[[keras.Variable], bool]
) -> list[keras.layers.Layer]:
    """The layers of `model` with state that has moved in a call; any layer may do that."""
    return [
        layer
        for layer in flatten_layers(model)
        if not _moves_per_update(layer) and any(map(has_moved, own_state(layer)))
    ]


def _normalizes_batches(layer: keras.layers.Layer) -> bool:
    plain = isinstance(layer, keras.layers.BatchNormalization)
    return plain and not _moves_per_update(layer)


def _moves_per_update(layer: keras.layers.Layer) -> bool:
    return getattr(layer, "moves_state_per_update", False)


class StateWatch:
    """Which layers' state has moved since this was made, whatever moves it.

    Of each variable two sums are kept, not its value.
    """

    def __init__(self, model: keras.Model) -> None:
        known = {id(layer) for layer in moving_layers(model)}
        others = [x for x in flatten_layers(model) if id(x) not in known]
        self._model = model
        self._sums = {id(v): _sums(v) for layer in others for v in own_state(layer)}

    def moved(self) -> list[keras.layers.Layer]:
        """The layers that have moved, but for those that are known by class."""

        def has_moved(variable: keras.Variable) -> bool:
            before = self._sums.get(id(variable))
            return before is not None and not np.array_equal(
                before, _sums(variable), equal_nan=True
            )

        return moved_layers(self._model, has_moved)


def _sums(variable: keras.Variable) -> list[float]:
    values = np.asarray(keras.ops.convert_to_numpy(variable), "float64")
    return [values.sum(), np.square(values).sum()]


def describe_moving(layers: Sequence[keras.layers.Layer]) -> str:
    """What to know of layers that move state at each call, and what to do about it."""
    shown = [f"{layer.name} ({type(layer).__name__})" for layer in layers[:3]]
    if len(layers) > 3:
        shown.append(f"and {len(layers) - 3} more")
    subject = "1 layer" if len(layers) == 1 else f"{len(layers)} layers"
    message = (
        f"State moves at each call of {subject}, per micro-batch instead of per update, "
        f"so that a window is not the large batch: {', '.join(shown)}."
    )
    if any(_normalizes_batches(layer) for layer in layers):
        message += (
            " BatchNormalization also normalizes each micro-batch by itself. "
            "AccumBatchNormalization moves its statistics per update; GroupNormalization "
            "and LayerNormalization do not depend on the batch."
        )
    return message


def warn_of_moved(model: keras.Model, scope: keras.StatelessScope) -> None:
    """Warn of the layers that a call inside of `scope` has moved the state of."""
    moved = moved_layers(model, lambda v: scope.get_current_value(v) is not None)
    warn_of_moving(model, moved)


def warn_of_moving(model: keras.Model, layers: Sequence[keras.layers.Layer]) -> None:
    """Warn of `layers` of `model`, of each of them once."""
    told = _told.get(model, ())
    new = [layer for layer in layers if layer not in told]
    if new:
        if not is_collecting():
            are_told(model, new)
        warn(describe_moving(new))


def are_told(model: keras.Model, layers: Sequence[keras.layers.Layer]) -> None:
    """Remember that the user has been told of `layers` of `model`."""
    _told.setdefault(model, weakref.WeakSet()).update(layers)


_told: weakref.WeakKeyDictionary[keras.Model, "weakref.WeakSet[keras.layers.Layer]"]
_told = weakref.WeakKeyDictionary()
