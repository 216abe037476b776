"""A `fit` that ends without any update trains nothing, and is told so, once."""

import dataclasses
import weakref
from typing import Any

import keras

from .._backend.arrays import to_numpy
from .._backend.private.layers import flatten_layers
from .._backend.warn import warn


@dataclasses.dataclass
class Training:
    """Where the counters of an optimizer stood when a training began.

    Attributes:
        model: a weak reference to the model that is trained.
        updates: the updates made before.
        skipped: the windows skipped before, or told of since.
        held: the micro-batches that the open window held.
        dropped: the micro-batches dropped since.
    """

    model: weakref.ref[keras.Model]
    updates: int
    skipped: int
    held: int
    dropped: int = 0


def number(value: keras.Variable | int) -> int:
    """The Python number that a scalar variable holds, under a strategy too."""
    return to_numpy(value).item()


def begin_training(model: keras.Model, optimizer: Any) -> None:
    """Note where the counters stand, for `end_training`."""
    optimizer.training = Training(
        weakref.ref(model),
        number(optimizer.iterations),
        number(optimizer.skipped_windows),
        number(optimizer.micro_step),
    )


def begin_fit(model: keras.Model) -> None:
    """`begin_training` for the optimizer of which `fit` will tell its end."""
    optimizer: Any = getattr(model, "optimizer", None)
    if hasattr(optimizer, "micro_step"):
        begin_training(model, optimizer)


def note_dropped(optimizer: Any) -> None:
    """Note that what the open window holds will be dropped."""
    if optimizer.training is not None:
        optimizer.training.dropped += number(optimizer.micro_step)


def end_training(optimizer: Any, prefix: str = "") -> None:
    """Warn if there was no update since `begin_training`. A second call says nothing.

    Args:
        optimizer: one that a training has used, or not.
        prefix: which of several it is.
    """
    training, optimizer.training = optimizer.training, None
    if training is None or number(optimizer.iterations) > training.updates:
        return
    skipped = number(optimizer.skipped_windows) - training.skipped
    held = number(optimizer.micro_step)
    if skipped:
        why = (
            f"{skipped} windows were skipped, and no other was filled. "
            f"{describe_skipping(training.model(), optimizer)}"
        )
    elif held > training.held:
        why = (
            f"the open window holds {held} of {optimizer.window_length} micro-batches. "
            "The next `fit` goes on with them. For an update with them, call "
            "`optimizer.flush()`, or pass the callback "
            "`AccumulationMonitor(tail='flush_end')`."
        )
    elif training.dropped:
        why = (
            f"{training.dropped} micro-batches were dropped before they filled a window "
            f"of {optimizer.window_length}."
        )
    else:
        return  # It was not used, as where all epochs are over.
    warn(f"{prefix}This training has made no update: {why}")


def describe_skipping(model: keras.Model | None, optimizer: Any) -> str:
    """Why windows are skipped, with the loss scale and the policy."""
    if optimizer.scales_dynamically:
        return describe_overflow(model, number(optimizer.dynamic_scale))
    return (
        f"Each held an infinity or a NaN (on_nonfinite={optimizer.on_nonfinite!r}). Look "
        "at the data, the loss and the learning rate."
    )


def describe_overflow(model: keras.Model | None, scale: float) -> str:
    """What to make of a loss scale that has fallen to `scale`."""
    return (
        f"Each held an infinity or a NaN. The loss scale has fallen to {scale:g} (dtype "
        f"policy '{_policy(model)}'). If no scale is small enough, the loss itself is "
        "not finite: look at the data, the loss and the learning rate."
    )


def _policy(model: keras.Model | None) -> str:
    """The dtype policy for which the loss is scaled."""
    layers = [] if model is None else flatten_layers(model)
    policies = [layer.dtype_policy for layer in layers]
    scaled = [p.name for p in policies if p.compute_dtype == "float16"]
    return scaled[0] if scaled else keras.config.dtype_policy().name
