"""Amounts of memory: parsed from a budget, counted on the device, printed."""

import re
from typing import Any

import numpy as np
import tensorflow as tf

from .._backend.private.compiled import device_limit

_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_budget(budget: Any, held: int = 0) -> int:
    """The bytes of a budget.

    Args:
        budget: an int (bytes); a string with a unit, such as "8GiB", "256 MiB" or
            "1.5GB"; a float above 0 and up to 1, the share of the device's memory; or
            "device", what is free on it.
        held: bytes that the model already has on the device. Free memory is counted
            without them, and a budget with them.

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
    if (size := int(float(number) * unit)) < 1:
        raise ValueError(_message(text))
    return size


def _message(received: Any) -> str:
    return (
        "`memory_budget` must be a number of bytes (an int above 0), a string with a "
        "unit such as '8GiB' or '500MB', a share of the device's memory (a float above "
        f"0 and up to 1), or 'device' for all that is free. Received: {received!r}"
    )


def device() -> str:
    """The device on which memory is measured: the first GPU, or the CPU."""
    return "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"


def total_bytes() -> int:
    """The memory of the device; of a GPU, the part that TensorFlow may use."""
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
            "The memory of this machine cannot be read: there is no /proc/meminfo. Pass "
            "`memory_budget` as a number of bytes, or as a string such as '8GiB'."
        ) from error


def format_bytes(size: float) -> str:
    """A size in the largest binary unit that leaves a number of at least 1."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(size) >= 1024**power:
            return f"{size / 1024**power:.1f} {unit}"
    return f"{size:.0f} B"


def format_step(size: float, floor: int) -> str:
    """The bytes that a step adds; below `floor` they are not told from none."""
    return f"below {format_bytes(floor)}" if size < floor else format_bytes(size)
