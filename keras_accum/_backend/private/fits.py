"""When `fit` begins. Keras tells an optimizer of the end only."""

import functools
from collections.abc import Callable
from typing import Any

import keras
from keras.src.trainers.trainer import Trainer

from ..attribute_patch import AttributePatch, Installation

_observers: list[Callable[[keras.Model], None]] = []


def observe_fits(observer: Callable[[keras.Model], None]) -> None:
    """Have `observer` know of each `fit` that begins while `hear_fits` is in force."""
    if observer not in _observers:
        _observers.append(observer)


def hear_fits() -> Callable[[], None]:
    """Have observers know of `fit`; returns what ends it."""
    _fits.hold()
    return _fits.release


def _patch_fits() -> list[AttributePatch]:
    # The first thing that `fit` does, whoever has overridden the others.
    name = "_assert_compile_called"
    return [AttributePatch(Trainer, name, _observed(getattr(Trainer, name)))]


_fits = Installation(_patch_fits)


def _observed(check: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(check)
    def check_and_tell(self: Any, method_name: str | None = None) -> Any:
        result = check(self, method_name)
        if method_name == "fit":
            for observer in _observers:
                observer(self)
        return result

    return check_and_tell
