"""What a recipe changes over the updates: the length of a window, and the learning rate.

All of it is a function of the index of an update, 0 for the first. Micro-batches do not
count, so a recipe for a large batch is written down as it was published.
"""

import math
from typing import Any, Literal

import keras
import tensorflow as tf

from ._core.checks import check_integer, check_number, refuse_unknown_arguments

RULES = ("linear", "sqrt")


@keras.saving.register_keras_serializable(package="keras_accum")
class NominalBatchSize:
    """An `accum_steps` that comes as near to a nominal batch as whole micro-batches do.

    A window has `round(nominal / micro_batch_size)` micro-batches, and at least one. With
    warm-up, its length rises from 1 in a straight line, rounded at each update:

    ```python
    steps = NominalBatchSize(64, micro_batch_size=16, warmup_updates=100)
    [int(steps(update)) for update in (0, 50, 100, 1000)]  # [1, 2, 4, 4]
    optimizer = keras.optimizers.SGD(0.01, weight_decay=5e-4 * steps.weight_decay_factor)
    model.compile(AccumOptimizer(optimizer, accum_steps=steps), loss="mse")
    ```

    This is how Ultralytics trains (`nbs=64`), with two differences: windows are always
    whole, where a test of the batch's number modulo the length makes irregular ones
    while the length changes; and the warm-up counts updates, not micro-batches.

    Args:
        nominal: int, the samples of an update that the recipe was written for.
        micro_batch_size: int, the samples of a micro-batch, over all replicas.
        warmup_updates: int, the index of the first update at full length; 0 for none.

    Raises:
        ValueError: for sizes below 1, or a negative `warmup_updates`.
        TypeError: for anything but integers.

    References:
        Jocher et al., 2020, YOLOv5, and 2023, Ultralytics YOLO, on the nominal batch
        size. Smith et al., 2018, "Don't Decay the Learning Rate, Increase the Batch
        Size", on batches that grow.
    """

    @refuse_unknown_arguments("NominalBatchSize")
    def __init__(
        self, nominal: int, *, micro_batch_size: int, warmup_updates: int = 0
    ) -> None:
        self.nominal = check_integer("nominal", nominal, 1)
        self.micro_batch_size = check_integer("micro_batch_size", micro_batch_size, 1)
        self.warmup_updates = check_integer("warmup_updates", warmup_updates, 0)

    def __call__(self, update: int | tf.Tensor) -> tf.Tensor:
        """The micro-batches of the window that makes an update.

        Args:
            update: scalar integer, the index of the update.

        Returns:
            Scalar int32 tensor. A half is rounded to the even neighbour, as Python does.
        """
        span = max(self.warmup_updates, 1)
        done = tf.minimum(tf.cast(update, "int64"), span) if self.warmup_updates else span
        # One division of integers: a half is met exactly, and rounded as NumPy does.
        size = self.micro_batch_size
        rise = (self.nominal - size) * done
        steps = tf.round((size * span + rise) / (size * span))
        return tf.cast(tf.maximum(steps, 1), "int32")

    @property
    def accum_steps(self) -> int:
        """The micro-batches of a window after the warm-up."""
        return max(round(self.nominal / self.micro_batch_size), 1)

    @property
    def weight_decay_factor(self) -> float:
        """What to multiply the recipe's weight decay by: effective over nominal batch.

        `micro_batch_size × accum_steps / nominal`: 1 where the nominal batch is met;
        above it where even one micro-batch is larger, so that an epoch makes fewer updates.
        """
        return self.micro_batch_size * self.accum_steps / self.nominal

    def get_config(self) -> dict[str, int]:
        """The arguments of the constructor."""
        return {
            "nominal": self.nominal,
            "micro_batch_size": self.micro_batch_size,
            "warmup_updates": self.warmup_updates,
        }

    @classmethod
    def from_config(cls, config: dict[str, int]) -> "NominalBatchSize":
        """A schedule with the arguments in `config`, or in one of version 0.1's files."""
        names = {"batch_size": "micro_batch_size"}
        return cls(**{names.get(name, name): value for name, value in config.items()})

    def __repr__(self) -> str:
        return (
            f"NominalBatchSize({self.nominal}, micro_batch_size={self.micro_batch_size}, "
            f"warmup_updates={self.warmup_updates})"
        )


def scale_learning_rate(
    learning_rate: float,
    *,
    batch_size: int,
    base_batch_size: int,
    rule: Literal["linear", "sqrt"] = "linear",
) -> float:
    """The learning rate for another batch size than the recipe's.

    ```python
    scale_learning_rate(0.1, batch_size=8192, base_batch_size=256)  # 3.2
    scale_learning_rate(1e-3, batch_size=1024, base_batch_size=256, rule="sqrt")  # 2e-3
    ```

    Neither rule is a law: both hold up to some batch size, which differs from task to
    task, and the linear one needs a `GradualWarmup` at large ratios.

    Args:
        learning_rate: the rate that is good for `base_batch_size`.
        batch_size: int, the effective batch, of one update: micro-batch × `accum_steps` ×
            replicas.
        base_batch_size: int, the effective batch that the rate was found for.
        rule: `"linear"` multiplies by the ratio of the batches, for SGD, with momentum or
            not; `"sqrt"` by its square root, for optimizers that divide by the size of
            the gradient, as Adam does.

    Returns:
        The scaled rate.

    Raises:
        ValueError: for a rate that is not above 0 and finite, sizes below 1, or another
            rule.
        TypeError: for a rate that is no number, as a schedule is, or sizes that are no
            integers.

    References:
        Krizhevsky, 2014, "One weird trick for parallelizing convolutional neural
        networks" (both rules); Goyal et al., 2017, "Accurate, Large Minibatch SGD"
        (linear); Malladi et al., 2022, "On the SDEs and Scaling Rules for Adaptive
        Gradient Algorithms" (square root for Adam and RMSprop).
    """
    if isinstance(learning_rate, keras.optimizers.schedules.LearningRateSchedule):
        raise TypeError(
            "`learning_rate` must be a number. Received a schedule, "
            f"{type(learning_rate).__name__}: scale the rates that it is made of, and "
            "its lengths in updates, of which an epoch of larger batches has fewer."
        )
    check_number("learning_rate", learning_rate)
    if not 0 < learning_rate < math.inf:
        raise ValueError(
            f"`learning_rate` must be above 0 and finite. Received: {learning_rate!r}"
        )
    batch_size = check_integer("batch_size", batch_size, 1)
    ratio = batch_size / check_integer("base_batch_size", base_batch_size, 1)
    if rule not in RULES:
        raise ValueError(
            "`rule` must be 'linear' (SGD) or 'sqrt' (adaptive optimizers). Received: "
            f"{rule!r}"
        )
    return float(learning_rate * (ratio if rule == "linear" else math.sqrt(ratio)))


@keras.saving.register_keras_serializable(package="keras_accum")
class GradualWarmup(keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate, or a schedule of it, that starts low and rises in a straight line.

    Update u has the rate, or what the schedule says at u, times

        start_factor + (1 - start_factor) × u / warmup_updates

    and from `warmup_updates` on, times 1. The schedule counts from the first update of
    training, not from the end of the warm-up. In an `AccumOptimizer` updates count, and
    micro-batches do not.

    ```python
    rate = scale_learning_rate(0.1, batch_size=8192, base_batch_size=256)
    decay = keras.optimizers.schedules.PiecewiseConstantDecay(
        [4680, 9360], [rate, rate / 10, rate / 100]
    )
    optimizer = keras.optimizers.SGD(GradualWarmup(decay, 780, start_factor=256 / 8192))
    ```

    Args:
        learning_rate: float, or a `LearningRateSchedule`.
        warmup_updates: int of at least 1, the index of the first update at the full rate.
        start_factor: float from 0 to 1, what the first update's rate is multiplied by.
            Goyal et al. start at the rate of the small batch: `base / large`.

    Raises:
        ValueError: for `warmup_updates` below 1, `start_factor` outside of 0 to 1, or a
            rate that is negative or not finite.
        TypeError: for arguments of another kind.

    References:
        Goyal et al., 2017, "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour",
        section 2.2.
    """

    def __init__(
        self,
        learning_rate: float | keras.optimizers.schedules.LearningRateSchedule,
        warmup_updates: int,
        start_factor: float,
    ) -> None:
        super().__init__()
        if not isinstance(learning_rate, keras.optimizers.schedules.LearningRateSchedule):
            check_number("learning_rate", learning_rate, " or a LearningRateSchedule")
            if not 0 <= learning_rate < math.inf:
                raise ValueError(
                    "`learning_rate` must be at least 0 and finite. Received: "
                    f"{learning_rate!r}"
                )
        if warmup_updates == 0:
            raise ValueError(
                "`warmup_updates` must be at least 1. Received: 0. To train without a "
                "warm-up, pass the learning rate itself to the optimizer."
            )
        self.learning_rate = learning_rate
        self.warmup_updates = check_integer("warmup_updates", warmup_updates, 1)
        check_number("start_factor", start_factor)
        if not 0 <= start_factor <= 1:
            raise ValueError(
                "`start_factor` must be from 0 to 1, a share of the learning rate. "
                f"Received: {start_factor!r}"
            )
        self.start_factor = float(start_factor)

    def __call__(self, step: int | tf.Tensor) -> tf.Tensor:
        """The learning rate of an update, a scalar tensor.

        Args:
            step: scalar integer, the index of the update.
        """
        rate = self.learning_rate
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            rate = rate(step)
        rate = keras.ops.convert_to_tensor(rate, keras.config.floatx())
        step = keras.ops.convert_to_tensor(step)
        left = keras.ops.maximum(self.warmup_updates - step, 0)
        # From the end backwards, so that after the warm-up the factor is 1 to the bit.
        missing = keras.ops.cast(left, rate.dtype) / self.warmup_updates
        return rate * (1 - (1 - self.start_factor) * missing)

    def get_config(self) -> dict[str, Any]:
        """The arguments of the constructor, serialised."""
        return {
            "learning_rate": keras.saving.serialize_keras_object(self.learning_rate),
            "warmup_updates": self.warmup_updates,
            "start_factor": self.start_factor,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "GradualWarmup":
        """A schedule with the arguments in `config`."""
        rate = keras.saving.deserialize_keras_object(config["learning_rate"])
        return cls(**{**config, "learning_rate": rate})
