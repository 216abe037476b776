"""Layers whose state moves at each call: per micro-batch, where it should per update.

No way of adding gradients up undoes that. What can be done is to say which they are.
"""

from collections.abc import Sequence

import keras

from .._backend.private.layers import flatten_layers


def moving_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """The layers of `model` that are known to move state at each call in training.

    A BatchNormalization moves its statistics unless it is frozen; a SpectralNormalization
    its vector and its kernel, always. A layer that does so once per update says it, by an
    attribute `moves_state_per_update`.
    """
    return [layer for layer in flatten_layers(model) if _moves(layer)]


def _moves(layer: keras.layers.Layer) -> bool:
    if getattr(layer, "moves_state_per_update", False):
        return False
    if isinstance(layer, keras.layers.BatchNormalization):
        return bool(layer.trainable)
    return isinstance(layer, keras.layers.SpectralNormalization)


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
    if any(isinstance(layer, keras.layers.BatchNormalization) for layer in layers):
        message += (
            " BatchNormalization also normalizes each micro-batch by itself. "
            "AccumBatchNormalization moves its statistics per update; GroupNormalization "
            "and LayerNormalization do not depend on the batch."
        )
    return message
