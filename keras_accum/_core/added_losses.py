"""Whether one value that a layer passes to `add_loss` is a mean over samples, or a sum.

Keras takes the value as it is, so that only the layer knows. The rule is tried on samples
that are made up: the value of a few of them at once, and split. What is neither a mean nor
a sum depends on the batch as a whole, as a load-balancing loss does, and is warned of.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from .._backend.private.layers import call, read
from .._backend.private.losses import (
    call_losses_kept,
    losses_of_layers,
    remember_sums,
)
from .._backend.warn import warn
from .own_loss import kind_of, made_up, nothing_moves

_ROWS = (1, 3)
# Of values below it nothing can be said: a mean of zeros is their sum.
_NOTHING = 1e-6


class _Tried(NamedTuple):
    """What layers added for all rows, and for two parts of them."""

    whole: np.ndarray
    first: np.ndarray
    second: np.ndarray

    def equals(self, first: float, second: float, rtol: np.ndarray) -> np.ndarray:
        expected = first * self.first + second * self.second
        return np.abs(self.whole - expected) <= _NOTHING + rtol * np.abs(expected)


def learn_kinds(model: keras.Model, x: Any) -> None:
    """Find out, once for a model, what each value is that its layers have just added.

    Sums are remembered (`call_losses` gives vectors for them). Of what is neither a mean
    nor a sum the user is warned.

    Args:
        model: a model that was called.
        x: what it was called with; None if that is not known.
    """
    added = losses_of_layers(model)
    known = _known.setdefault(model, set())
    key = (kind_of(x), len(added))
    if not added or key in known:
        return
    known.add(key)
    layers = [layer for layer, _ in added]
    tried = None if x is None else _try(model, x, layers)
    kinds = ["unknown"] * len(added) if tried is None else _kinds(tried, layers)
    sums = [loss for (_, loss), kind in zip(added, kinds) if kind == "sum"]
    remember_sums(model, sums)
    for (layer, _), kind in zip(added, kinds):
        if kind == "unknown":
            warn(_UNKNOWN.format(layer.name), about=model)


# By model, the kinds of batches that were tried.
_known: "weakref.WeakKeyDictionary[keras.Model, set[Any]]"
_known = weakref.WeakKeyDictionary()


def _kinds(tried: _Tried, layers: Sequence[keras.layers.Layer]) -> list[str]:
    # Sums of the same numbers in another order.
    half = [keras.backend.standardize_dtype(x.compute_dtype)[-2:] == "16" for x in layers]
    rtol = np.where(half, 0.03, 0.001)
    share = _ROWS[0] / _ROWS[1]
    mean, adds_up = tried.equals(share, 1 - share, rtol), tried.equals(1, 1, rtol)
    return [
        "unknown" if m == s else "mean" if m else "sum" for m, s in zip(mean, adds_up)
    ]


def _try(
    model: keras.Model, x: Any, layers: Sequence[keras.layers.Layer]
) -> _Tried | None:
    """What `layers` add for made-up samples; None if it cannot be tried.

    Without dropout, if they add the same there.
    """
    try:
        with tf.init_scope(), call_losses_kept(model):
            for training in (False, True):
                for shift in (0.0, 0.1):
                    tried = _add(model, x, layers, training, shift)
                    if tried is not None and np.all(np.abs(tried.whole) > _NOTHING):
                        return tried
            return tried
    except Exception:
        return None  # Made-up numbers may be no input of this model.


def _add(
    model: keras.Model,
    x: Any,
    layers: Sequence[keras.layers.Layer],
    training: bool,
    shift: float,
) -> _Tried | None:
    """The values for all rows and for two parts; None if other layers add something.

    Args:
        model: the model.
        x: what tells the shapes and types of its inputs.
        layers: which are expected to add something.
        training: how the model is called.
        shift: what is added to all weights, which may be zero at the start.
    """
    rng = np.random.default_rng(0)
    batch = tf.nest.map_structure(lambda spec: made_up(rng, spec, _ROWS[1]), x)
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
            call(model, part, training)
            added = losses_of_layers(model)
        if [layer for layer, _ in added] != list(layers):
            return None
        found.append(np.array([float(value) for _, value in added]))
    return _Tried(*found)


_UNKNOWN = (
    "The layer '{}' passes one value to `add_loss` that is neither a mean nor a sum over "
    "samples, as far as can be found out. Micro-batches weigh by their samples: the mean "
    "of their values is taken, not the value of the batch. Pass one value per sample, "
    "which Keras adds up; or compute the loss from outputs of the model, with "
    "`accumulate(model, ..., two_pass=True)`."
)
