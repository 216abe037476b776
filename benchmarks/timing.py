"""Times of windows, in any environment: nothing but Python's own library is imported."""

import dataclasses
import resource
import statistics
import time
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds that one window took, a value for each round."""

    cpu: list[float]
    wall: list[float]

    @property
    def median(self) -> float:
        """The median of CPU time."""
        return statistics.median(self.cpu)

    @property
    def wall_median(self) -> float:
        """The median of wall time."""
        return statistics.median(self.wall)

    @property
    def spread(self) -> float:
        """Half the distance of the quartiles of CPU time, as a part of the median."""
        low, _, high = statistics.quantiles(self.cpu, n=4, method="inclusive")
        return (high - low) / 2 / self.median


def cpu_seconds() -> float:
    """Returns user and system time of this process, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def time_windows(run_window: Callable[[], object], windows: int) -> tuple[float, float]:
    """Returns the CPU and wall seconds of one window, averaged over `windows`."""
    cpu, wall = cpu_seconds(), time.perf_counter()
    for _ in range(windows):
        run_window()
    return (cpu_seconds() - cpu) / windows, (time.perf_counter() - wall) / windows
