"""Checks of arguments: each names the argument, the rule and what was received."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

Function = TypeVar("Function", bound=Callable[..., Any])

# What other libraries call the two arguments that say how to take a batch apart.
OTHER_NAMES = {
    "accum_steps": (
        "accum",
        "accumulate",
        "accumulate_grad_batches",
        "accumulate_steps",
        "accumulation_steps",
        "every_k_schedule",
        "grad_accum",
        "grad_accum_steps",
        "grad_accumulation_steps",
        "gradient_accumulation",
        "gradient_accumulation_steps",
        "k",
        "n_gradients",
        "num_steps",
        "steps",
    ),
    "micro_batch_size": (
        "batch_size",
        "device_train_microbatch_size",
        "microbatch_size",
        "mini_batch_size",
        "minibatch_size",
        "per_device_train_batch_size",
    ),
}


def check_option(name: str, value: Any, allowed: Sequence[str]) -> None:
    if value not in allowed:
        choices = ", ".join(repr(choice) for choice in allowed)
        raise ValueError(f"`{name}` must be one of {choices}. Received: {value!r}")


def check_integer(name: str, value: Any, least: int) -> int:
    """`value` as an int of at least `least`, or a refusal."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"`{name}` must be an integer. Received: {value!r}")
    if value < least:
        raise ValueError(f"`{name}` must be at least {least}. Received: {value!r}")
    return int(value)


def check_number(name: str, value: Any, alternative: str = "") -> None:
    """Refuse what is no number; `alternative` says what else it may be."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        raise TypeError(f"`{name}` must be a number{alternative}. Received: {value!r}")


def refuse_unknown_arguments(
    owner: str, remedies: Mapping[str, str] | None = None
) -> Callable[[Function], Function]:
    """Have a function say which argument was meant by one that it does not take.

    Args:
        owner: what users call the function.
        remedies: for arguments that belong elsewhere, a sentence that says where.
    """

    def decorate(function: Function) -> Function:
        parameters = inspect.signature(function).parameters
        allowed = [name for name in parameters if name != "self"]

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            check_arguments(owner, kwargs, allowed, remedies)
            return function(*args, **kwargs)

        return checked  # type: ignore[return-value]

    return decorate


def check_arguments(
    owner: str,
    received: Mapping[str, Any],
    allowed: Sequence[str],
    remedies: Mapping[str, str] | None = None,
) -> None:
    """Refuse the first of the arguments `received` that is not among those `allowed`.

    Raises:
        TypeError: with the argument that was meant, if it can be guessed.
    """
    for name, value in received.items():
        if name in allowed:
            continue
        remedy = (remedies or {}).get(name)
        if remedy is None and (meant := _meant(name, allowed)) is not None:
            remedy = f"Did you mean `{meant}={value!r}`?"
        if remedy is None:
            remedy = f"Its arguments are {', '.join(f'`{a}`' for a in allowed)}."
        raise TypeError(
            f"`{owner}` has no argument `{name}`. Received: {name}={value!r}. {remedy}"
        )


def other_names(received: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the arguments `received` that have another name in this package."""
    others = {name for names in OTHER_NAMES.values() for name in names}
    return {name: value for name, value in received.items() if name in others}


def closest(name: str, names: Iterable[str]) -> str | None:
    """The one of `names` that was most likely meant by a misspelt `name`, if any."""
    found = difflib.get_close_matches(name.lower(), list(names), n=1, cutoff=0.7)
    return found[0] if found else None


def _meant(name: str, allowed: Sequence[str]) -> str | None:
    for argument, others in OTHER_NAMES.items():
        if name in others and argument in allowed:
            return argument
    return closest(name, allowed)
