"""The heap of a process that was started under `malloc_count.c`, in any environment."""

import contextlib
import ctypes
import gc
import os
import statistics
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path


def compile_library(folder: str) -> Path:
    """Makes the library that counts the heap in `folder`; it needs a C compiler."""
    source = Path(__file__).with_name("malloc_count.c")
    library = Path(folder) / "malloc_count.so"
    command = ["cc", "-O2", "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    return library


@contextlib.contextmanager
def counting_heap(library: Path) -> Iterator[None]:
    """Has processes that start inside load `library`; each tensor is an allocation there.

    With oneDNN, TensorFlow takes tensors from a pool of its own instead.
    """
    changes = {"LD_PRELOAD": str(library), "TF_ENABLE_ONEDNN_OPTS": "0"}
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def heap() -> tuple[Callable[[], int], Callable[[Callable[[], object]], int]]:
    """Returns two functions: the bytes in use, and the most in use while a third runs."""
    counter = ctypes.CDLL(None)
    counter.heap_live.restype = counter.heap_peak.restype = ctypes.c_long

    def peak(function: Callable[[], object]) -> int:
        counter.heap_reset()
        function()
        return counter.heap_peak()

    return counter.heap_live, peak


def peak_above_level(step: Callable[[], object], steps: int = 5) -> float:
    """Returns the bytes of a step above what is held before: the median of `steps`.

    Three steps run before, unmeasured: they trace and compile.
    """
    level, peak = heap()
    for _ in range(3):
        step()
    gc.collect()
    peaks = []
    for _ in range(steps):
        before = level()
        peaks.append(peak(step) - before)
    return statistics.median(peaks)
