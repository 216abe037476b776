"""Selecting layers of a model: by name, class, function, or the layers themselves."""

import difflib
import fnmatch
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import keras

from .._backend.identity import unique
from .._backend.private.layers import children

Layer: TypeAlias = keras.layers.Layer
Select: TypeAlias = (
    str | type | tuple[type, ...] | Layer | Sequence[Layer] | Callable[[Layer], bool]
)


def select_layers(model: Layer, select: Select) -> list[Layer]:
    """The layers inside of `model` that match, without those inside of a match."""
    matches = _predicate(model, select)
    inside = _inside(model, enter=lambda layer: not matches(layer))
    found = [layer for layer in inside if matches(layer)]
    if not found:
        raise ValueError(_nothing(model, select))
    return found


def _inside(
    layer: Layer,
    enter: Callable[[Layer], bool] = lambda _: True,
    seen: set[int] | None = None,
) -> Iterator[Layer]:
    """The layers inside of `layer`, in order, each once; `enter` says how deep."""
    seen = set() if seen is None else seen
    for child in children(layer):
        if id(child) in seen:
            continue
        seen.add(id(child))
        yield child
        if enter(child):
            yield from _inside(child, enter, seen)


def _predicate(model: Layer, select: Select) -> Callable[[Layer], bool]:
    if isinstance(select, str):
        return _named(select)
    if isinstance(select, keras.layers.Layer):
        return _listed(model, [select])
    classes = select if isinstance(select, tuple) else (select,)
    if all(isinstance(item, type) for item in classes):
        return lambda layer: isinstance(layer, classes)
    if isinstance(select, Sequence):
        return _listed(model, select)
    if callable(select):
        return select
    raise TypeError(
        "`select` must be a pattern of names, a class, a function from a layer to bool, "
        f"a layer, or a list of layers. Received: {select!r} of type "
        f"{type(select).__name__}"
    )


def _named(pattern: str) -> Callable[[Layer], bool]:
    if "/" in pattern:
        return lambda layer: fnmatch.fnmatchcase(layer.path or "", pattern)
    return lambda layer: fnmatch.fnmatchcase(layer.name, pattern)


def _listed(model: Layer, layers: Sequence[Any]) -> Callable[[Layer], bool]:
    inside = {id(layer) for layer in _inside(model)}
    for layer in layers:
        if layer is model:
            raise ValueError(
                f"'{model.name}' is the model itself. Recomputing all of it at once saves "
                "no memory: the second pass would hold all activations again. Select "
                "layers inside of it, or pass `segments='sqrt'`."
            )
        if id(layer) not in inside:
            raise ValueError(
                f"'{model.name}' does not contain the layer that was selected: {layer}. "
                "Select layers inside of the model."
            )
    wanted = {id(layer) for layer in layers}
    return lambda layer: id(layer) in wanted


def _nothing(model: Layer, select: Select) -> str:
    names = [layer.name for layer in _inside(model)]
    pattern = select.strip("*?") if isinstance(select, str) else ""
    near = difflib.get_close_matches(pattern, names, n=5, cutoff=0.4) or names[:10]
    return (
        f"No layer inside of '{model.name}' matches {select!r}. "
        + (f"Names of its layers: {', '.join(near)}. " if near else "")
        + "A model that creates its layers in `build` must be built first."
    )


def layers_inside(roots: Sequence[Layer], patterns: str | Sequence[str]) -> list[Layer]:
    """The layers inside of `roots` whose names match one of the patterns of `keep`."""
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    layers = unique(layer for root in roots for layer in _inside(root))
    kept = [x for x in layers if any(_named(pattern)(x) for pattern in patterns)]
    if patterns and not kept:
        names = ", ".join(layer.name for layer in layers[:10])
        raise ValueError(
            f"No layer inside of the recomputed ones matches keep={patterns}. Names of "
            f"layers there: {names}."
        )
    return kept


_PRODUCTS = (
    keras.layers.Dense,
    keras.layers.EinsumDense,
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
)


def products_inside(layer: Layer) -> list[Layer]:
    """The layers inside of `layer` that are a product with a weight, and little else.

    Their result is enough for the backward pass. With an activation of their own, it
    needs the product before it, too.
    """
    return [
        inside
        for inside in _inside(layer)
        if isinstance(inside, _PRODUCTS) and inside.activation is keras.activations.linear
    ]
