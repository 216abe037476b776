"""Whether what a layer passes to `add_loss` is a mean over samples, or a sum.

Keras adds its values up, whatever they are, so that only the layer knows. The rule is tried
on samples that are made up: the value of a few of them at once, and split. What is neither
a mean nor a sum depends on the batch as a whole, as a load-balancing loss does, and is
warned of.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from .._backend.private.layers import call, flatten_layers, read
from .._backend.private.losses import (
    added_losses,
    call_losses_kept,
    remember_kinds,
)
from .._backend.warn import warn
from .own_loss import Draw, kind_of, made_up, nothing_moves, positive

_ROWS = (1, 3)
# Of values below it nothing can be said: a mean of zeros is their sum.
_NOTHING = 1e-6


class _Tried(NamedTuple):
    """What layers added for all rows, and for two parts of them."""

    whole: np.ndarray
    first: np.ndarray
    second: np.ndarray

    def tell(self) -> np.ndarray:
        """Whether a value tells something: it is finite, and not always nothing."""
        sizes = np.abs(np.stack(self))
        return np.isfinite(sizes).all(0) & (sizes.max(0) > _NOTHING)

    def equals(self, first: float, second: float, rtol: float) -> np.ndarray:
        expected = first * self.first + second * self.second
        return np.abs(self.whole - expected) <= _NOTHING + rtol * np.abs(expected)


def learn_kinds(model: keras.Model, x: Any) -> None:
    """Find out, once for a model, what each value is that its layers have just added.

    It is remembered (`call_losses` tells). Of what is neither a mean nor a sum the user
    is warned; it counts as a mean if it is one value.

    Args:
        model: a model that was called.
        x: what it was called with; None if that is not known.
    """
    added = added_losses(model)
    known = _known.setdefault(model, set())
    key = (kind_of(x), len(added))
    if key in known or not any(each.is_sum is None for each in added):
        return
    known.add(key)
    tried = None if x is None else _try(model, x, [each.layer for each in added])
    several = [each.value.shape.rank > 0 for each in added]
    # What cannot be tried is a sum if there are several values, as one of each sample.
    found = (
        [s or None for s in several]
        if tried is None
        else _sums_of_all(tried, flatten_layers(model))
    )
    kinds = [each.is_sum if s is None else s for each, s in zip(added, found)]
    remember_kinds(model, [s if k is None else k for k, s in zip(kinds, several)])
    for each, kind in zip(added, kinds):
        if kind is None:
            warn(_UNKNOWN.format(each.layer.name), about=model)


# By model, the kinds of batches that were tried.
_known: "weakref.WeakKeyDictionary[keras.Model, set[Any]]"
_known = weakref.WeakKeyDictionary()


def _sums_of_all(
    tried: Sequence[_Tried], layers: Sequence[keras.layers.Layer]
) -> list[bool | None]:
    """Whether each is a sum over samples, or a mean; None if not of all made-up samples.

    `max(mean, 0)` is a mean of some.
    """
    kinds: list[set[bool | None]] = [set() for _ in tried[0].whole]
    for each in tried:
        for found, kind, tells in zip(kinds, _sums(each, layers), each.tell()):
            found |= {kind} if tells else set()
    return [found.pop() if len(found) == 1 else None for found in kinds]


def _sums(tried: _Tried, layers: Sequence[keras.layers.Layer]) -> list[bool | None]:
    """Whether each is a sum over samples, or a mean; None if it is neither."""
    # Sums of the same numbers in another order, of what other layers have computed.
    dtypes = {keras.backend.standardize_dtype(x.compute_dtype) for x in layers}
    rtol = 0.03 if dtypes & {"float16", "bfloat16"} else 0.001
    share = _ROWS[0] / _ROWS[1]
    mean, adds_up = tried.equals(share, 1 - share, rtol), tried.equals(1, 1, rtol)
    return [None if m == s else bool(s) for m, s in zip(mean, adds_up)]


def _try(
    model: keras.Model, x: Any, layers: Sequence[keras.layers.Layer]
) -> list[_Tried] | None:
    """What `layers` add for made-up samples of some kinds; None if it cannot be tried.

    Without dropout, if they add the same there.
    """
    try:
        with tf.init_scope(), call_losses_kept(model):
            for training in (False, True):
                for shift in (0.0, 0.1):
                    each = [_add(model, x, layers, training, shift, d) for d in _DRAWS]
                    tried = [found for found in each if found is not None]
                    if tried and np.any([found.tell() for found in tried], axis=0).all():
                        return tried
            return tried or None
    except Exception:
        return None  # Made-up numbers may be no input of this model.


def _spread_by(size: float) -> Draw:
    return lambda rng, shape: size * rng.normal(size=shape)


# Also small and large numbers, on both sides of what a penalty begins at.
_DRAWS = [positive, *(_spread_by(size) for size in (0.1, 1.0, 10.0))]


def _add(
    model: keras.Model,
    x: Any,
    layers: Sequence[keras.layers.Layer],
    training: bool,
    shift: float,
    draw: Draw,
) -> _Tried | None:
    """The values for all rows and for two parts; None if other layers add something.

    Args:
        model: the model.
        x: what tells the shapes and types of its inputs.
        layers: which are expected to add something.
        training: how the model is called.
        shift: what is added to all weights, which may be zero at the start.
        draw: makes floats up.
    """
    rng = np.random.default_rng(0)
    batch = tf.nest.map_structure(lambda spec: made_up(rng, spec, _ROWS[1], draw), x)
    found = []
    for rows in (slice(None), slice(0, _ROWS[0]), slice(*_ROWS)):
        part = tf.nest.map_structure(
            lambda t, rows=rows: None if t is None else t[rows], batch
        )
        with nothing_moves(model) as scope:
            if shift:
                for variable in model.weights:
                    value = tf.convert_to_tensor(read(variable))
                    if value.dtype.is_floating:
                        moved = value + tf.cast(shift, value.dtype)
                        scope.add_update((variable, moved))
            call(model, part, training=training)
            added = added_losses(model)
        if [each.layer for each in added] != list(layers):
            return None
        found.append(np.array([float(tf.reduce_sum(each.value)) for each in added]))
    return _Tried(*found)


_UNKNOWN = (
    "What the layer '{}' passes to `add_loss` is neither a mean nor a sum over samples, "
    "as far as can be found out. Micro-batches weigh by their samples: the mean of their "
    "values is taken, not the value of the batch. Pass one value per sample, which Keras "
    "adds up; or compute the loss from outputs of the model, with `accumulate(model, ..., "
    "two_pass=True)`."
)
