"""Checks of arguments: each names the argument, the rule and what was received."""

from collections.abc import Sequence
from typing import Any


def check_option(name: str, value: Any, allowed: Sequence[str]) -> None:
    if value not in allowed:
        choices = ", ".join(repr(choice) for choice in allowed)
        raise ValueError(f"`{name}` must be one of {choices}. Received: {value!r}")
