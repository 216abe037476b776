"""The optimizers that a model trains with, wherever it keeps them."""

import dataclasses
import types
from collections.abc import Iterator, Mapping
from typing import Any

import keras

from .._backend.private.layers import attributes, children
from .wrapper import AccumOptimizer


def find_optimizers(model: keras.Model) -> dict[str, AccumOptimizer]:
    """Each `AccumOptimizer` that a training step of `model` may apply.

    Keras's own step, and this package's, apply `model.optimizer` alone. A `train_step` of
    the user's may apply whatever the model can reach: attributes of it and of its layers,
    also in dicts, lists and data classes.

    Returns:
        By unique names, made of the attributes and keys that lead there: "d_optimizer"
        for `model.d_optimizer`, "optimizers_d" for `model.optimizers["d"]`.
    """
    if has_known_train_step(model):
        optimizer = getattr(model, "optimizer", None)
        return {"optimizer": optimizer} if isinstance(optimizer, AccumOptimizer) else {}
    found: dict[str, AccumOptimizer] = {}
    for path, optimizer in _walk(model, (), set()):
        name = base = "_".join(path)
        alike = 1
        while name in found:
            alike += 1
            name = f"{base}_{alike}"
        found[name] = optimizer
    return found


def has_known_train_step(model: keras.Model) -> bool:
    """Whether `model` trains by the step of Keras, or by the one of this package."""
    step = getattr(model.train_step, "func", model.train_step)
    return getattr(step, "__module__", "").partition(".")[0] in ("keras", "keras_accum")


def _walk(
    value: Any, path: tuple[str, ...], seen: set[int]
) -> Iterator[tuple[tuple[str, ...], AccumOptimizer]]:
    parts = _parts(value)
    if id(value) in seen or not (parts or isinstance(value, AccumOptimizer)):
        return
    seen.add(id(value))
    if isinstance(value, AccumOptimizer):
        yield path, value
        return
    for name, part in parts:
        yield from _walk(part, (*path, name), seen)


def _parts(value: Any) -> list[tuple[str, Any]]:
    """What `value` holds, with names."""
    if isinstance(value, Mapping):
        return [(str(key), part) for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return [(str(index), part) for index, part in enumerate(value)]
    is_record = dataclasses.is_dataclass(value) and not isinstance(value, type)
    is_layer = isinstance(value, keras.layers.Layer)
    if not (is_layer or is_record or isinstance(value, types.SimpleNamespace)):
        return []
    named = attributes(value).items()
    public = [(name, part) for name, part in named if not name.startswith("_")]
    layers = [(layer.name, layer) for layer in children(value)] if is_layer else []
    # Last, because there Keras keeps the same layers under names of its own.
    others = [(name.lstrip("_"), part) for name, part in named if name.startswith("_")]
    return [*public, *layers, *others]
