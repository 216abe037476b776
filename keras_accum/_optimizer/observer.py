"""What is seen of a window besides its sum, and a log of its updates.

What micro-batches show is in `_core/observed.py`. In a window, replicas see theirs apart;
it is summed in the one reduction that the gradients take at its end.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from .._backend import replica
from .._backend.arrays import to_numpy
from .._backend.private.optimizers import optimizers_of
from .._core.gradients import Gradient, global_norm
from .._core.layer_watch import LayerWatch
from .._core.observed import SCALARS, Observed, Observer, join, pack, unpack
from .._core.variables import own_variable, read, shared_variable

# Of running means: over about 200 updates.
_DECAY = 0.995


class Update(NamedTuple):
    """What the log holds of the updates so far; floats, as they are read.

    Attributes:
        updates: how many there were.
        norm: of the last one's mean gradient.
        clipped_norm: what clipping has left of it.
        clipped: how many updates were clipped.
        signal: running mean of the squared norm of the true gradient.
        noise: running mean of the noise of one sample, over the samples of a step.
        skipped: how many windows were skipped.
        infinities: how often a gradient was not finite, in a window or in a part of it
            that was left out.
        bad_step: the micro-batch that was not finite last, from 1; 0 if none was.
        bad_replica: on which replica, from 0.
        bad_layer: the first layer in it that was not finite, as `LayerWatch` counts.
    """

    updates: float
    norm: float
    clipped_norm: float
    clipped: float
    signal: float
    noise: float
    skipped: float
    infinities: float
    bad_step: float
    bad_replica: float
    bad_layer: float

    @property
    def noise_scale(self) -> float:
        """In samples, over those of a step; NaN if unknown, or noise hides the gradient."""
        return self.noise / self.signal if self.signal > 0 else float("nan")


class UpdateLog:
    """Notes of updates, in variables that are never saved."""

    built = False

    def build(self, count: int) -> None:
        """Make the variables, for `count` trained ones."""
        if not self.built:
            with tf.init_scope():
                self._values = shared_variable(
                    "observed", (len(Update._fields),), "float32"
                )
                self._bad = shared_variable("not_finite", (count,), "float32")
            self.built = True

    def read(self) -> Update:
        """What is noted, from outside of any function; zeros before any update."""
        if not self.built:
            return Update(*[0.0] * len(Update._fields))
        return Update(*to_numpy(self._values).tolist())

    def bad(self) -> list[int]:
        """The variables whose gradient was not finite in the last bad micro-batch."""
        return np.flatnonzero(to_numpy(self._bad)).tolist()

    def note(self, usable: tf.Tensor | bool, **found: tf.Tensor) -> None:
        """Note an update, if the gradient was usable: its norms, and what gives the noise.

        Args:
            usable: scalar bool, whether there is an update.
            found: `norm` and `clipped_norm`; `squares`, `part`, `count` and `large`, as
                in `_core/observed.py`; and `steps`, the training steps that it took.
        """
        held = Update(*tf.unstack(read(self._values)))
        norm, clipped_norm, large = found["norm"], found["clipped_norm"], found["large"]
        small = tf.math.divide_no_nan(found["squares"], found["part"])
        k = tf.math.divide_no_nan(found["count"], found["part"])
        several = k > 1.0 + 1e-3
        others = tf.where(several, k - 1.0, 1.0)
        signal = (k * large - small) / others
        noise = (small - large) / others * found["steps"]
        known = tf.logical_and(several, tf.math.is_finite(signal + noise))
        # Both means begin at zero alike: their quotient needs no correction.
        rate = tf.where(known, 1.0 - _DECAY, 0.0)
        signal, noise = (tf.where(known, x, 0.0) for x in (signal, noise))
        now = held._replace(
            updates=held.updates + 1.0,
            norm=norm,
            clipped_norm=clipped_norm,
            clipped=held.clipped + tf.cast(clipped_norm < norm * (1 - 1e-5), "float32"),
            signal=held.signal + rate * (signal - held.signal),
            noise=held.noise + rate * (noise - held.noise),
        )
        self._values.assign(tf.where(usable, tf.stack(now), tf.stack(held)))

    def note_infinity(self, skipped: tf.Tensor, reduced: "Seen") -> None:
        """Note whether a window was skipped, and what in it was not finite.

        Args:
            skipped: scalar bool.
            reduced: what all replicas have seen.
        """
        bad, steps, layers = reduced.bad, reduced.steps, reduced.layers
        held = Update(*tf.unstack(read(self._values)))
        some = tf.reduce_any(steps > 0)
        where = tf.argmin(tf.where(steps > 0, steps, steps.dtype.max))
        first = (steps[where], where, layers[where])
        names = ("bad_step", "bad_replica", "bad_layer")
        old = [getattr(held, name) for name in names]
        new = [
            tf.where(some, tf.cast(x, "float32"), before) for x, before in zip(first, old)
        ]
        found = dict(zip(names, new))
        found["skipped"] = held.skipped + tf.cast(skipped, "float32")
        found["infinities"] = held.infinities + tf.cast(some, "float32")
        self._values.assign(tf.stack(held._replace(**found)))
        self._bad.assign(tf.where(some, tf.cast(bad, "float32"), read(self._bad)))


class Seen(NamedTuple):
    """What all replicas have seen; as in `Observed`, but of each replica in a vector."""

    squares: tf.Tensor
    part: tf.Tensor
    count: tf.Tensor
    bad: tf.Tensor
    steps: tf.Tensor
    layers: tf.Tensor


def to_reduce(seen: Observed, share: tf.Tensor | float = 1.0) -> Seen:
    """What is to be summed over replicas, of which this one has a share."""
    own = tf.one_hot(replica.index(), replica.count())
    squares, part = seen.squares * share, seen.part * share
    return Seen(squares, part, seen.count, seen.bad, own * seen.step, own * seen.layer)


class WindowObserver(Observer):
    """Sees the micro-batches of an `AccumOptimizer`, for the time of a `fit`.

    Args:
        layers: as for `Observer`.
    """

    def __init__(self, layers: LayerWatch | None = None) -> None:
        super().__init__(layers)
        self.log = UpdateLog()
        self._kept: keras.Variable | None = None

    def build(self, count: int) -> None:
        """Make the variables, for `count` trained ones."""
        self.log.build(count)
        if self._kept is None:
            with tf.init_scope():
                self._kept = own_variable("seen", (SCALARS + count,), "float32")

    def add(
        self,
        gradients: Sequence[Gradient],
        indices: Sequence[int],
        window: Any,
        *,
        part: tf.Tensor,
        factor: tf.Tensor,
        weighs: tf.Tensor,
        parts: Observed | None,
    ) -> None:
        """Note one micro-batch, before it is counted.

        Args:
            gradients: as they came.
            indices: of their variables.
            window: the `Accumulator` that they were added to.
            part: scalar, what it weighs.
            factor: scalar, from the squares of their numbers to those of their mean
                gradient.
            weighs: scalar bool.
            parts: what was seen of its own micro-batches, if it is a batch that was
                taken apart in the step.
        """
        held, size = self._held(window), len(window.sums)
        if parts is None:
            given = [
                None if window.overwrites[i] else g for i, g in zip(indices, gradients)
            ]
            now = self.see(held, given, indices, part, factor, weighs=weighs)
        else:
            part = tf.cast(part, "float32")
            squares = tf.math.multiply_no_nan(parts.squares * factor, part)
            spread = tf.scatter_nd([[i] for i in indices], parts.bad, [size])
            now = parts._replace(squares=squares, part=parts.part * part, bad=spread)
            now = join(held, now)
        self._variable().assign(pack(now))

    def _variable(self) -> keras.Variable:
        assert self._kept is not None  # `build` has made it.
        return self._kept

    def _held(self, window: Any) -> Observed:
        """What was seen of the window so far."""
        begins = tf.equal(window.micro_step.value, 0)
        kept = read(self._variable())
        return unpack(tf.where(begins, tf.zeros_like(kept), kept))

    def to_reduce(self) -> Seen:
        """What is to be summed over replicas at the window's end."""
        return to_reduce(unpack(read(self._variable())))


def looks_at_each(observer: Observer, optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether each micro-batch may be one to name, as not finite."""
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    how = getattr(optimizer, "on_nonfinite", "")
    if how:  # An `AccumOptimizer`, which is one that may not scale.
        scales = how.startswith("skip") or optimizer.scales_dynamically
    return observer.layers is not None or scales


def norm_after_clipping(
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[tf.Tensor],
    variables: Sequence[keras.Variable],
    norm: tf.Tensor | None = None,
) -> tf.Tensor:
    """The norm that the clipping of a Keras optimizer leaves of the gradients.

    With `norm`, theirs before it, if it is known.
    """
    left = []
    parts = optimizers_of(optimizer, variables)
    for part, held in parts:
        own = [gradients[i] for i in held]
        if norm is None or len(parts) > 1:
            norm = global_norm(own)
        if (most := getattr(part, "global_clipnorm", None)) is not None:
            norm = tf.minimum(norm, most)
        elif (most := getattr(part, "clipnorm", None)) is not None:
            norms = [tf.minimum(global_norm([g]), most) for g in own]
            norm = global_norm(norms)
        elif (most := getattr(part, "clipvalue", None)) is not None:
            norm = global_norm([tf.clip_by_value(g, -most, most) for g in own])
        left.append(norm)
    return left[0] if len(left) == 1 else global_norm(left)
