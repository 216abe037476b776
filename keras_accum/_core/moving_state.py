"""Layers whose state moves at each call: per micro-batch, where it should per update.

No way of adding gradients up undoes that. What can be done is to say which they are.
"""

import weakref
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from .._backend import replica
from .._backend.arrays import to_numpy
from .._backend.private.functions import captured
from .._backend.private.layers import flatten_layers, handles_of, is_stateful, own_state
from .._backend.private.models import OfCompilation
from .._backend.warn import is_collecting, warn


def moving_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """The layers of `model` that are known, by class, to move state in each training call.

    A BatchNormalization moves its statistics unless it is frozen; a SpectralNormalization
    its vector and its kernel, and a stateful RNN its states, always.
    """
    return [
        layer
        for layer in flatten_layers(model)
        if isinstance(layer, keras.layers.SpectralNormalization)
        or is_stateful(layer)
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
        self._sums = {id(v): _sums(v) for layer in others for v in own_state(layer)}

    def moved(self, model: keras.Model) -> list[keras.layers.Layer]:
        """The layers of `model` that have moved, but for those known by class."""

        def has_moved(variable: keras.Variable) -> bool:
            before = self._sums.get(id(variable))
            return before is not None and not np.array_equal(
                before, _sums(variable), equal_nan=True
            )

        return moved_layers(model, has_moved)


def _sums(variable: keras.Variable) -> list[float]:
    values = to_numpy(variable).astype("float64")
    return [values.sum(), np.square(values).sum()]


def layers_that_moved(model: keras.Model) -> list[keras.layers.Layer]:
    """The layers of `model` whose state its training calls move, as far as is seen here.

    Asked after each call: in a graph, of what it assigns to; in eager mode, of what is
    otherwise after the second call than after the first.
    """
    if not tf.executing_eagerly():
        operations = tf.compat.v1.get_default_graph().get_operations()
        assigned = {id(captured(x.inputs[0])) for x in operations if _assigns(x)}
        return moved_layers(
            model, lambda v: any(id(h) in assigned for h in handles_of(v))
        )
    watches = _watches(model)
    if not watches and replica.count() == 1:
        watches.append(StateWatch(model))
    elif watches and (watch := watches[0]) is not None:
        watches[0] = None
        return watch.moved(model)
    return []


# Of models in eager mode, after their first call; None after the second.
_watches: OfCompilation[list[StateWatch | None]] = OfCompilation(list)


def _assigns(operation: tf.Operation) -> bool:
    return operation.type.startswith(("Assign", "ResourceScatter"))


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
    if new := untold(model, layers):
        if not is_collecting():
            are_told(model, new)
        warn(describe_moving(new))


def untold(
    model: keras.Model, layers: Sequence[keras.layers.Layer]
) -> list[keras.layers.Layer]:
    """Those of `layers` that the user has not been told of, each once."""
    told = _told.get(model, ())
    return [layer for layer in dict.fromkeys(layers) if layer not in told]


def are_told(model: keras.Model, layers: Sequence[keras.layers.Layer]) -> None:
    """Remember that the user has been told of `layers` of `model`."""
    _told.setdefault(model, weakref.WeakSet()).update(layers)


_told: weakref.WeakKeyDictionary[keras.Model, "weakref.WeakSet[keras.layers.Layer]"]
_told = weakref.WeakKeyDictionary()
