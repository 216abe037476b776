"""What the optimizer accepts: each argument is resolved, or refused with a remedy."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.optimizers import LossScaleOptimizer

from .._core.checks import check_option


def resolve_optimizer(
    identifier: keras.optimizers.Optimizer | str | dict[str, Any],
) -> keras.optimizers.Optimizer:
    """The optimizer that an instance, a name or a config stands for.

    Names and configs are looked up in `keras.optimizers`; `keras.optimizers.get` knows
    fewer of its optimizers (not Lamb, in Keras 3.15).
    """
    if isinstance(identifier, str):
        classes = {name.lower(): value for name, value in vars(keras.optimizers).items()}
        found = classes.get(identifier.lower())
        if isinstance(found, type) and issubclass(found, keras.optimizers.Optimizer):
            return found()
    elif isinstance(identifier, dict):
        identifier = keras.saving.deserialize_keras_object(identifier)
    if isinstance(identifier, keras.optimizers.Optimizer):
        return identifier
    raise TypeError(
        "`inner_optimizer` must be a Keras optimizer, the name of one in "
        f"`keras.optimizers`, or its config. Received: {identifier!r}"
    )


def check_inner(inner: keras.optimizers.Optimizer) -> None:
    for part in [inner, *getattr(inner, "optimizers", [])]:
        if isinstance(part, LossScaleOptimizer):
            raise ValueError(
                f"Received a {type(part).__name__} inside of another wrapper. One "
                "wrapper accumulates and scales the loss: pass the innermost optimizer "
                "to it, `AccumOptimizer(inner, accum_steps=...)`."
            )
        if part.gradient_accumulation_steps:
            raise ValueError(
                "The inner optimizer accumulates gradients itself. Received: "
                f"{type(part).__name__}(gradient_accumulation_steps="
                f"{part.gradient_accumulation_steps}). Leave that argument out and pass "
                f"`accum_steps={part.gradient_accumulation_steps}` here."
            )


def check_clipping(
    inner: keras.optimizers.Optimizer, adaptive_clip_factor: float | None
) -> None:
    if adaptive_clip_factor is None:
        return
    number = isinstance(adaptive_clip_factor, (int, float, np.number))
    if isinstance(adaptive_clip_factor, bool) or not number or adaptive_clip_factor <= 0:
        raise ValueError(
            "`adaptive_clip_factor` must be a number above 0, or None. Received: "
            f"{adaptive_clip_factor!r}"
        )
    for part in [inner, *getattr(inner, "optimizers", [])]:
        for argument in ("clipnorm", "global_clipnorm", "clipvalue"):
            if (value := getattr(part, argument)) is not None:
                raise ValueError(
                    "Gradients are clipped in one way. Received: adaptive_clip_factor="
                    f"{adaptive_clip_factor} and {type(part).__name__}({argument}="
                    f"{value}). Leave one of the two out."
                )


def check_dtype(dtype: Any) -> str | None:
    if dtype is None:
        return None
    dtype = keras.backend.standardize_dtype(dtype)
    check_option("accumulator_dtype", dtype, ("float32", "float64"))
    return dtype


def check_weight(weight: Any) -> tuple[tf.Tensor, list[tf.Operation]]:
    """`weight` as a float32 scalar, and what has to hold when it runs."""
    weight = tf.cast(tf.convert_to_tensor(weight), "float32")
    if weight.shape.rank not in (0, None):
        raise ValueError(
            "`weight` must be a scalar, the denominator of the micro-batch's mean loss. "
            f"Received a tensor of shape {tuple(weight.shape)}: pass its sum."
        )
    known = tf.get_static_value(weight)
    if known is None:
        fine = (weight >= 0.0) & tf.math.is_finite(weight)
        return weight, [tf.debugging.Assert(fine, [_BAD_WEIGHT, weight])]
    if not 0 <= known < float("inf"):
        raise ValueError(f"{_BAD_WEIGHT} {float(known)}")
    return weight, []


_BAD_WEIGHT = "`weight` must be a finite number of at least 0. Received:"


def scaler_settings(scaler: LossScaleOptimizer) -> dict[str, Any]:
    return {
        "initial_scale": scaler.initial_scale,
        "dynamic_growth_steps": scaler.dynamic_growth_steps,
    }
