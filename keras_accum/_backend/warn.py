"""Warnings that point at the line of the user's that led to them."""

import contextlib
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import keras

from .private.models import OfCompilation

# Between a user's line and a warning stand these, and what AutoGraph has generated.
_LIBRARIES = {
    *("keras", "keras_accum", "tensorflow"),
    *("contextlib", "functools", "threading", "wrapt"),
}

# What has been said about an object, and is not said again. Of a model, until it is
# compiled again: what was mended by then may be wrong once more.
_said: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
_said_of_models: OfCompilation[set[str]] = OfCompilation(set)


_collecting: list[list[str]] = []


@contextlib.contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """Collect what `warn` is given inside of the context; nobody counts as told by it."""
    found: list[str] = []
    _collecting.append(found)
    try:
        yield found
    finally:
        _collecting.remove(found)


def is_collecting() -> bool:
    """Whether warnings are collected, so that nobody is told."""
    return bool(_collecting)


def warn(message: str, about: Any = None) -> None:
    """Warn by a `UserWarning` at the innermost line that is neither Keras's nor ours.

    Args:
        message: what is wrong, and what to do instead.
        about: the model or optimizer that it is about, which is told it only once: a
            step may be traced, or run, more often than that.
    """
    if _collecting:
        if message not in _collecting[-1]:
            _collecting[-1].append(message)
        return
    if about is not None:
        if message in (said := _said_about(about)):
            return
        said.add(message)
    frame = _line_of_user()
    warnings.warn_explicit(
        message,
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__", "<unknown>"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _said_about(about: Any) -> set[str]:
    if isinstance(about, keras.Model):
        return _said_of_models(about)
    try:
        return _said.setdefault(about, set())
    except TypeError:  # A function of the user's that nothing can be remembered of.
        return set()


def _line_of_user() -> types.FrameType:
    frame = sys._getframe(1)
    if (found := _outside(frame)) is not None:
        return found
    # A replica's step runs in a thread of its own, for which the main one waits.
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    return (main and _outside(main)) or frame


def _outside(frame: types.FrameType | None) -> types.FrameType | None:
    while frame is not None and _is_of_library(frame):
        frame = frame.f_back
    return frame


def _is_of_library(frame: types.FrameType) -> bool:
    name = frame.f_globals.get("__name__", "")
    generated = "__autograph_generated_file" in frame.f_code.co_filename
    return generated or name.partition(".")[0] in _LIBRARIES
