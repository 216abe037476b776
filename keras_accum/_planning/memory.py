"""How much memory a step needs while it runs, outside of XLA.

TensorFlow's allocator tells it on a GPU. On a CPU it tells nothing without oneDNN, which
is the default on many processors, and with oneDNN it leaves out tensors below 256 KiB.
There the resident memory of the process tells what the allocator does not.
"""

import contextlib
import ctypes
import gc

import tensorflow as tf

from .budget import device

# Below this, resident memory is noise, and below that, the allocator's rounding.
RESIDENT_FLOOR, ALLOCATOR_FLOOR = 256 * 2**10, 2**10
_PROBE = 64 * 2**10  # bytes of a tensor that oneDNN's allocator does not count


class PeakMemory:
    """Measures the most memory that is in use between `start` and `peak`.

    Args:
        replicas: int, the replicas that train at once. CPU devices share their memory;
            each replica is taken to use an equal part of it.

    Attributes:
        method: how memory is measured, in words.
        floor: bytes, the least amount that it tells from nothing.

    Raises:
        ValueError: if nothing tells how much memory is in use.
    """

    def __init__(self, replicas: int = 1) -> None:
        counts = _allocator_counts(_PROBE)
        self._by_allocator = counts is not None
        self._by_system = not counts and _system_tells()
        if not (self._by_allocator or self._by_system):
            raise ValueError(_UNKNOWN.format(device=device()))
        self._replicas = replicas if device() == "CPU:0" else 1
        self._level = self._resident = 0
        allocator = f"allocator of {device()}"
        if counts:
            self.method, self.floor = allocator, ALLOCATOR_FLOOR
            return
        self.floor = RESIDENT_FLOOR
        self.method = "resident memory of the process"
        if self._by_allocator and self._by_system:
            self.method = f"{allocator} and {self.method}"
        elif self._by_allocator:
            self.method = f"{allocator}, without tensors below 256 KiB"

    def set_level(self) -> None:
        """Measure from here: what is in use now does not count, what is added does."""
        gc.collect()
        self._level = _allocated("current") if self._by_allocator else 0

    def start(self) -> None:
        """Forget the peak."""
        if self._by_allocator:
            tf.config.experimental.reset_memory_stats(device())
        if self._by_system:
            _reset_resident_peak()
            self._resident = _resident("VmRSS")

    def peak(self) -> int:
        """The most bytes that were in use since `start`, beyond those at `set_level`.

        Resident memory counts from `start`: tracing leaves objects of Python behind.
        """
        allocated = _allocated("peak") - self._level if self._by_allocator else 0
        resident = _resident("VmHWM") - self._resident if self._by_system else 0
        return max(allocated + resident, 0) // self._replicas


_UNKNOWN = (
    "{device} does not tell how much of its memory is in use, so that nothing can be "
    "measured. On a CPU it does with TF_CPU_ALLOCATOR_USE_BFC=1 in the environment, set "
    "before TensorFlow is imported; or compile the model with `jit_compile=True`."
)


def _allocated(what: str) -> int:
    return int(tf.config.experimental.get_memory_info(device())[what])


def _allocator_counts(size: int) -> bool | None:
    """Whether the allocator counts a tensor of `size` bytes; None if it counts none."""
    try:
        before = _allocated("current")
    except ValueError:
        return None
    with tf.device(device()):
        held = tf.fill([size // 4], 1.0)
    counted = _allocated("current") - before >= size
    del held
    return counted


def _system_tells() -> bool:
    """Whether the system tells the most memory that the process had since a moment."""
    try:
        _reset_resident_peak()
        return _resident("VmHWM") > 0
    except (OSError, KeyError):
        return False


def _reset_resident_peak() -> None:
    """Have Linux forget the peak of the process.

    The C library gives back free memory first: its use would not show in the peak.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # as in proc(5)


def _resident(key: str) -> int:
    with open("/proc/self/status") as lines:
        found = dict(line.split(":", 1) for line in lines)
    return int(found[key].split()[0]) * 1024
