"""Amounts of memory: read from what a user writes, found on the device, written down."""

import re
from typing import Any

import numpy as np
import tensorflow as tf

from .._backend.private.compiled import device_limit

_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_budget(budget: Any, held: int = 0) -> int:
    """The bytes that a budget stands for.

    Args:
        budget: an int (bytes); a string with a unit, such as "8GiB", "256 MiB" or
            "1.5GB"; a float above 0 and up to 1, the share of the device's memory; or
            "device", what is free on it.
        held: bytes that the model holds on the device already, which its budget covers.

    Raises:
        ValueError, TypeError: for anything else.
    """
    if isinstance(budget, str):
        return free_bytes() + held if budget == "device" else _parse_text(budget)
    if isinstance(budget, bool) or not isinstance(budget, (int, float, np.number)):
        raise TypeError(_message(budget))
    if isinstance(budget, (float, np.floating)):
        if not 0 < budget <= 1:
            raise ValueError(_message(budget))
        return int(budget * total_bytes())
    if budget < 1:
        raise ValueError(_message(budget))
    return int(budget)


def _parse_text(text: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B\s*", text, re.IGNORECASE)
    if not match:
        raise ValueError(_message(text))
    number, prefix, binary = match.groups()
    unit = (1024 if binary else 1000) ** _POWERS[prefix.upper()]
    return _at_least_one(int(float(number) * unit), text)


def _at_least_one(size: int, text: str) -> int:
    if size < 1:
        raise ValueError(_message(text))
    return size


def _message(received: Any) -> str:
    return (
        "`memory_budget` must be a number of bytes (an int above 0), a text with a unit "
        "such as '8GiB' or '500MB', a share of the device's memory (a float above 0 and "
        f"up to 1), or 'device' for what is free. Received: {received!r}"
    )


def device() -> str:
    """The device that a model trains on: the first GPU, or the CPU."""
    return "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"


def total_bytes() -> int:
    """The memory of the device; of a GPU, what TensorFlow may use of it."""
    return _meminfo("MemTotal") if device() == "CPU:0" else device_limit(device())


def free_bytes() -> int:
    """The memory of the device that nothing uses."""
    if device() == "CPU:0":
        return _meminfo("MemAvailable")
    used = tf.config.experimental.get_memory_info(device())["current"]
    return device_limit(device()) - int(used)


def _meminfo(key: str) -> int:
    try:
        with open("/proc/meminfo") as lines:
            found = dict(line.split(":") for line in lines)
        return int(found[key].split()[0]) * 1024
    except (OSError, KeyError) as error:
        raise ValueError(
            "The memory of this machine cannot be read: there is no /proc/meminfo. Write "
            "`memory_budget` as a number of bytes, or as a text such as '8GiB'."
        ) from error


def format_bytes(size: float) -> str:
    """A size in the largest binary unit that leaves a number of at least 1."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(size) >= 1024**power:
            return f"{size / 1024**power:.1f} {unit}"
    return f"{size:.0f} B"
