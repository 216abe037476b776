"""What the optimizer accepts: each argument is resolved, or refused with a remedy."""

import contextlib
import copy
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.optimizers import LossScaleOptimizer

from .._backend.control import assertions
from .._backend.private.versions import legacy_hint
from .._core.checks import OTHER_NAMES, check_option, closest

_ON_THE_INNER = (
    "Pass it to the inner optimizer: `AccumOptimizer(keras.optimizers.Adam({}=...), "
    "accum_steps=...)`."
)
_ON_THE_SCALER = (
    "Pass it to a scaler inside: `AccumOptimizer(keras.optimizers.LossScaleOptimizer("
    "optimizer, {}=...), accum_steps=...)`."
)
_IN_THE_DATA = (
    "The data say it: `model.fit(..., batch_size=...)` is the micro-batch of all "
    "replicas together."
)
# What to do about arguments that belong elsewhere.
REMEDIES = {
    **dict.fromkeys(["micro_batch_size", *OTHER_NAMES["micro_batch_size"]], _IN_THE_DATA),
    "clipnorm": _ON_THE_INNER.format("clipnorm"),
    "clipvalue": _ON_THE_INNER.format("clipvalue"),
    "dynamic_growth_steps": _ON_THE_SCALER.format("dynamic_growth_steps"),
    "ema_momentum": _ON_THE_INNER.format("ema_momentum"),
    "ema_overwrite_frequency": _ON_THE_INNER.format("ema_overwrite_frequency"),
    "global_clipnorm": _ON_THE_INNER.format("global_clipnorm"),
    "initial_scale": _ON_THE_SCALER.format("initial_scale"),
    "learning_rate": _ON_THE_INNER.format("learning_rate"),
    "loss_scale_factor": _ON_THE_INNER.format("loss_scale_factor"),
    "optimizer": "Did you mean `inner_optimizer`?",
    "use_ema": _ON_THE_INNER.format("use_ema"),
    "weight_decay": _ON_THE_INNER.format("weight_decay"),
}


def resolve_optimizer(
    identifier: keras.optimizers.Optimizer | str | dict[str, Any],
    custom_objects: dict[str, Any] | None = None,
) -> keras.optimizers.Optimizer:
    """The optimizer that an instance, a name or a config stands for.

    Names and configs are those that `keras.optimizers.get` takes: names in any case,
    configs with `module` or without. That function knows fewer of Keras's optimizers (not
    Lamb, in Keras 3.15).

    Raises:
        TypeError: for anything else, with a hint if it can be guessed what was meant.
    """
    if isinstance(identifier, keras.optimizers.Optimizer):
        return identifier
    # An empty scope would hide the classes that the caller's own scope names.
    scope = keras.saving.custom_object_scope(custom_objects)
    with scope if custom_objects else contextlib.nullcontext():
        if isinstance(identifier, str):
            found = _by_name(identifier)
        elif isinstance(identifier, dict) and "class_name" in identifier:
            found = _by_config(copy.deepcopy(identifier))  # Keras takes it apart.
        else:
            found = None
    if isinstance(found, keras.optimizers.Optimizer):
        return found
    raise TypeError(
        "`inner_optimizer` must be a Keras optimizer, the name of one in "
        f"`keras.optimizers`, or its config. Received: {identifier!r}{_hint(identifier)}"
    )


def _by_name(name: str) -> Any:
    registered = keras.saving.get_registered_object(name)
    found = _classes().get(name.lower(), registered)
    return found() if isinstance(found, type) else None


def _by_config(config: dict[str, Any]) -> Any:
    if config.get("module") is not None or config.get("registered_name") is not None:
        return keras.saving.deserialize_keras_object(config)
    config = {"config": {}, **config}
    name = config["class_name"]
    registered = keras.saving.get_registered_object(name)
    if (found := _classes().get(name.lower(), registered)) is not None:
        return found.from_config(config["config"])
    return keras.optimizers.deserialize(config)


def _hint(identifier: Any) -> str:
    if isinstance(identifier, type) and not legacy_hint(identifier):
        return f". That is a class: pass an instance of it, `{identifier.__name__}(...)`."
    name = identifier.get("class_name") if isinstance(identifier, dict) else identifier
    if not isinstance(name, str):
        return legacy_hint(identifier)
    meant = closest(name, _classes())
    return "" if meant is None else f". Did you mean {meant!r}?"


def _classes() -> dict[str, type[keras.optimizers.Optimizer]]:
    """The optimizers of Keras that stand for themselves, by their names in lower case."""
    around_others = ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
    return {
        name.lower(): value
        for name, value in vars(keras.optimizers).items()
        if isinstance(value, type)
        and issubclass(value, keras.optimizers.Optimizer)
        and name not in around_others
    }


def parts_of(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """An optimizer, and those inside of it at any depth."""
    inner = getattr(optimizer, "inner_optimizer", None)
    inside = [*([] if inner is None else [inner]), *getattr(optimizer, "optimizers", [])]
    return [optimizer, *(part for held in inside for part in parts_of(held))]


def describe_optimizer(optimizer: keras.optimizers.Optimizer) -> str:
    """The class of an optimizer, with those of the parts of a MultiOptimizer."""
    parts = [describe_optimizer(part) for part in getattr(optimizer, "optimizers", [])]
    name = type(optimizer).__name__
    return f"{name}({', '.join(parts)})" if parts else name


def check_scaler(scaler: LossScaleOptimizer) -> None:
    """Refuse a LossScaleOptimizer with code of the user's, which would not run."""
    own = [
        f"`{name}`"
        for name in ("apply", "apply_gradients", "scale_loss")
        if _overrides(scaler, name, LossScaleOptimizer)
    ]
    if own:
        raise ValueError(
            "`AccumOptimizer` scales the loss itself, and takes the settings of a "
            f"LossScaleOptimizer over, not its code. Received: {type(scaler).__name__}, "
            f"which overrides {', '.join(own)}. Override `apply` of the optimizer inside; "
            "or use `accumulate(model, ...)`, which takes any optimizer."
        )


def _overrides(optimizer: Any, name: str, base: type) -> bool:
    """Whether the class of an optimizer, or itself, has another method than `base`."""
    return name in vars(optimizer) or getattr(type(optimizer), name) is not getattr(
        base, name
    )


def check_inner(inner: keras.optimizers.Optimizer) -> None:
    """Refuse an optimizer that accumulates or scales the loss itself, or holds one."""
    for part in parts_of(inner):
        if isinstance(part, LossScaleOptimizer):
            raise ValueError(
                f"Received a {type(part).__name__} inside of another wrapper. One "
                "wrapper accumulates and scales the loss: pass the innermost optimizer "
                "to it, `AccumOptimizer(inner, accum_steps=...)`."
            )
        if _overrides(part, "scale_loss", keras.optimizers.Optimizer):
            raise ValueError(
                "`AccumOptimizer` scales the loss itself. Received: "
                f"{type(part).__name__}, which overrides `scale_loss`. Pass a "
                "`keras.optimizers.LossScaleOptimizer`; or use `accumulate(model, ...)`, "
                "which takes any optimizer."
            )
        if part.gradient_accumulation_steps:
            raise ValueError(
                "The inner optimizer accumulates gradients itself. Received: "
                f"{type(part).__name__}(gradient_accumulation_steps="
                f"{part.gradient_accumulation_steps}). Leave that argument out and pass "
                f"`accum_steps={part.gradient_accumulation_steps}` here."
            )


def check_step_optimizer(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuse, in a step over micro-batches, an optimizer that Keras has accumulate."""
    for part in parts_of(optimizer):
        if part.gradient_accumulation_steps:
            steps = part.gradient_accumulation_steps
            raise ValueError(
                "This model accumulates in its step, which makes one update. Received an "
                "optimizer that accumulates the gradients of several steps: "
                f"{type(part).__name__}(gradient_accumulation_steps={steps}). Leave that "
                "argument out; for windows of several steps, write "
                f"`AccumOptimizer(optimizer, accum_steps={steps})`."
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


def check_nonfinite(on_nonfinite: str, scaled: bool) -> None:
    """Refuse a policy that loss scaling would ignore: an overflow skips the window."""
    if scaled and on_nonfinite not in ("propagate", "skip_window"):
        raise ValueError(
            f"Received on_nonfinite={on_nonfinite!r} where the loss is scaled dynamically "
            "(a LossScaleOptimizer inside, or a mixed_float16 policy). There an overflow "
            "is expected: it skips the window and halves the scale. Leave `on_nonfinite` "
            "out; or train without scaling, with `compile(auto_scale_loss=False)` or in "
            "mixed_bfloat16."
        )


def check_dtype(dtype: Any) -> str | None:
    if dtype is None:
        return None
    dtype = keras.backend.standardize_dtype(dtype)
    check_option("accumulator_dtype", dtype, ("float32", "float64"))
    return dtype


def check_weight(weight: Any) -> tuple[tf.Tensor, list[tf.Operation]]:
    """`weight` as a float scalar, and what has to hold when it runs."""
    given, weight = weight, tf.convert_to_tensor(weight)
    if not (weight.dtype.is_floating or weight.dtype.is_integer):
        raise TypeError(f"`weight` must be a number. Received: {given!r}")
    if weight.dtype not in (tf.float32, tf.float64):
        weight = tf.cast(weight, "float32")
    if weight.shape.rank not in (0, None):
        raise ValueError(
            "`weight` must be a scalar, the denominator of the micro-batch's mean loss. "
            f"Received a tensor of shape {tuple(weight.shape)}: pass its sum."
        )
    known = tf.get_static_value(weight)
    if known is None:
        fine = (weight >= 0.0) & tf.math.is_finite(weight)
        return weight, assertions(
            lambda: tf.debugging.Assert(fine, [_BAD_WEIGHT, weight])
        )
    if not 0 <= known < float("inf"):
        raise ValueError(f"{_BAD_WEIGHT} {float(known)}")
    return weight, []


_BAD_WEIGHT = "`weight` must be a finite number of at least 0. Received:"


def scaler_settings(scaler: LossScaleOptimizer) -> dict[str, Any]:
    return {
        "initial_scale": scaler.initial_scale,
        "dynamic_growth_steps": scaler.dynamic_growth_steps,
    }
