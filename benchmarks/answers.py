"""The inside of a worker: requests come by standard input, answers go to standard output.

A request is a line of JSON, `{"call": name, ...arguments}`; an answer one of
`{"result": ...}` or, after an exception, `{"error": its last line}`. What else is printed
goes to standard error.
"""

import json
import os
import re
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import timing

# What Keras and TensorFlow add below the error itself, and around it.
BELOW = re.compile(r"Arguments received by|\d+ (successful|derived)|\[\[|•")
AROUND = re.compile(r"\x1b\[\d*m|^\(\d\) ")


def last_line(error: BaseException) -> str:
    """Returns the type of an error and the last line of what it says, shortened."""
    said = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in said if not BELOW.match(line)] or [""]
    name = type(error).__name__
    line = shorten(AROUND.sub("", said[-1]).removeprefix(f"{name}: "))
    return f"{name}: {line}" if line else name


def shorten(line: str) -> str:
    """Returns the first sentence of a line, or as many words as 160 characters hold."""
    sentence = re.split(r"(?<=[.!?]) (?=[A-Z])", line)[0]
    return textwrap.shorten(sentence, 160, placeholder=" …")


def answer(calls: dict[str, Callable[..., Any]]) -> None:
    """Answers requests until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = {"result": calls[request.pop("call")](**request)}
        except Exception as error:  # a peer's, whatever it is: it goes on the page
            traceback.print_exc()
            reply = {"error": last_line(error)}
        print(json.dumps(reply), file=answers, flush=True)


class Windows:
    """Methods that were made ready, to be timed by name."""

    def __init__(self) -> None:
        self.ready: dict[str, Callable[[], object]] = {}

    def add(self, method: str, window: Callable[[], object]) -> float:
        """Traces and compiles a window; returns the CPU seconds of one."""
        timing.time_windows(window, 2)
        self.ready[method] = window
        return timing.time_windows(window, 2)[0]

    def time(self, method: str, windows: int) -> tuple[float, float]:
        """Returns the CPU and wall seconds of one window, averaged over `windows`."""
        return timing.time_windows(self.ready[method], windows)


def run_and_listen(train: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Returns what `train` returns, and the first sentence of each warning for users."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        result = train()
    users = [w for w in heard if w.category in (UserWarning, RuntimeWarning)]
    return result, [shorten(str(w.message).splitlines()[0]) for w in users]
