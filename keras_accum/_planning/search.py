"""The search for the fastest micro-batch size that fits, by few measurements.

Memory grows with the size, so the largest one that fits lies between one that was
measured to fit and one that was measured not to. A line through the measured sizes says
which to measure next; it never decides. The whole batch is an exception: a single
micro-batch needs no sums of gradients, and may need less than half a batch. Time need not
grow or fall with the size: the search descends from the largest size that fits as long as
steps get faster.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

# A smaller size, or recomputation, is preferred only if its step takes less than this
# share of the time. Steps on a shared machine are not timed more exactly.
WORTH = 0.95


@dataclasses.dataclass(frozen=True)
class Trial:
    """One micro-batch size, measured.

    Attributes:
        micro_batch_size: int, the samples of a micro-batch on one replica.
        recompute: what was recomputed in the backward pass; False for nothing.
        peak_bytes: int, the most that a step needed, what is in memory before it
            included; None if it ran out of memory.
        predicted_bytes: int, what a line through the sizes measured before predicted;
            None where they make no line.
        seconds: float, the time of a step on the whole batch; None if it was not timed.
    """

    micro_batch_size: int
    recompute: Any
    peak_bytes: int | None
    predicted_bytes: int | None = None
    seconds: float | None = None

    def fits(self, budget: int) -> bool:
        """Whether it ran within `budget` bytes."""
        return self.peak_bytes is not None and self.peak_bytes <= budget


# From a size, what to recompute, and whether to time it, to what was measured.
Measure: TypeAlias = Callable[[int, Any, bool], Trial]


@dataclasses.dataclass(frozen=True)
class Fixed:
    """Bytes of a step that do not depend on the micro-batch size.

    Attributes:
        held: in memory before a step.
        sums: the sums of gradients, which a single micro-batch does not need.
        floor: the least bytes beyond `held` that measurements tell from none.
    """

    held: int = 0
    sums: int = 0
    floor: int = 0


NOTHING_FIXED = Fixed()


class Patience:
    """How long to look for something faster, once something has been found.

    Up to half of what planning may take: 30 seconds, or 20 steps if they take longer.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = clock()

    def lasts(self, best: Trial) -> bool:
        """Whether to go on, with this being the best so far."""
        allowed = max(30.0, 20 * (best.seconds or 0.0))
        return self._clock() - self._start < allowed / 2


def candidates(rows: int) -> list[int]:
    """The micro-batch sizes to choose from for a batch of `rows`, in rising order.

    The divisors, with which all micro-batches are equal. Where two of them are more than
    a factor of 3 apart, as around a prime, halves are added between them. The last
    micro-batch is then shorter, and is weighted by its samples.
    """
    divisors = [size for size in range(1, rows + 1) if rows % size == 0]
    sizes = set(divisors)
    for low, high in itertools.pairwise(divisors):
        while high > 3 * low:
            high = -(-high // 2)
            sizes.add(high)
    return sorted(sizes)


class Search:
    """Trials of one kind of step, and the choice among them.

    Args:
        measure: measures one size.
        sizes: the sizes to choose from, in rising order.
        budget: int, bytes.
        recompute: what the step recomputes.
        patience: how long to look for a size that is faster.
        fixed: the bytes that do not depend on the size.
        start: the size to measure first; by default a 16th of the last.
    """

    def __init__(
        self,
        measure: Measure,
        sizes: Sequence[int],
        budget: int,
        recompute: Any,
        patience: Patience,
        fixed: Fixed = NOTHING_FIXED,
        start: int | None = None,
    ) -> None:
        self._fixed = fixed
        self._start = start
        self._measure = measure
        self._sizes = list(sizes)
        self._budget = budget
        self._recompute = recompute
        self._patience = patience
        self.trials: dict[int, Trial] = {}  # by index of the size

    def best(self) -> Trial | None:
        """The fastest size that fits, by descent from the largest that does."""
        largest = self.run_largest()
        return None if largest is None else self.descend(largest)

    def descend(self, best: Trial) -> Trial:
        """From a size that fits, on to smaller ones as long as they are faster."""
        index = self._sizes.index(best.micro_batch_size)
        best = self.trials[index]
        while index > self.least_index and self._patience.lasts(best):
            index -= 1
            smaller = self._try(index, timed=True)
            if not smaller.fits(self._budget):
                continue  # Less than half a batch may need more than the whole.
            if not self.is_beaten(best, smaller):
                break
            best = smaller
        return self.trials[self._sizes.index(best.micro_batch_size)]

    def is_beaten(self, best: Trial, other: Trial) -> bool:
        """Whether `other` is faster than `best`, timed before it and again after it.

        A tie goes to `best`. The second time tells a faster step from a machine that was
        slower for a while.
        """
        if not faster(other, best):
            return False
        again = self._time_again(best)
        return not again.fits(self._budget) or faster(other, again)

    def _time_again(self, trial: Trial) -> Trial:
        """A trial of this search with the shorter of two times, and the larger peak."""
        again = self._measure(trial.micro_batch_size, trial.recompute, True)
        if again.peak_bytes is None or trial.peak_bytes is None:
            peak = seconds = None
        else:
            peak = max(trial.peak_bytes, again.peak_bytes)
            seconds = min(s for s in (trial.seconds, again.seconds) if s is not None)
        trial = dataclasses.replace(trial, peak_bytes=peak, seconds=seconds)
        self.trials[self._sizes.index(trial.micro_batch_size)] = trial
        return trial

    def run_largest(self) -> Trial | None:
        """The largest size that fits, and did so when its step ran on the whole batch."""
        for index in range(self.largest(), -1, -1):
            if (trial := self._try(index, timed=True)).fits(self._budget):
                return trial
        return None

    def largest(self) -> int:
        """The index of the largest size that fits; -1 if none does."""
        last = len(self._sizes) - 1
        largest = self._largest_of_several()
        if any(trial.peak_bytes is None for trial in self.trials.values()):
            return largest
        predicted = self.predict(self._sizes[last])
        worth_a_try = predicted is None or predicted - self._fixed.sums <= self._budget
        if worth_a_try and self._try(last).fits(self._budget):
            return last
        return largest

    def _largest_of_several(self) -> int:
        """`largest` of the sizes that make several micro-batches of the batch."""
        low, high = -1, len(self._sizes) - 1
        guess = self._first_guess()
        while low + 1 < high:
            guess = min(max(guess, low + 1), high - 1)
            if self._try(guess).fits(self._budget):
                low = guess
            else:
                high = guess
            guess = self._guess(low, high)
            if guess <= low and self._surely_too_large(low + 1):
                break
        return low

    def predict(self, size: int) -> int | None:
        """The bytes of a size by a line through the two nearest that were measured.

        None where there is no such line: fewer were measured, or measured as nothing.
        """
        least = self._fixed.held + self._fixed.floor
        known = [
            (t.micro_batch_size, t.peak_bytes)
            for t in self._on_the_line()
            if t.peak_bytes is not None and t.peak_bytes >= least
        ]
        if len(known) < 2:
            return None
        known.sort(key=lambda pair: abs(pair[0] - size))
        (x0, y0), (x1, y1) = known[:2]
        predicted = round(y0 + (y1 - y0) / (x1 - x0) * (size - x0))
        return predicted if predicted >= least else None

    @property
    def least_index(self) -> int:
        """The index of the smallest size that can be worth a trial."""
        return 0

    @property
    def all_trials(self) -> list[Trial]:
        """Everything that was measured."""
        return list(self.trials.values())

    def _on_the_line(self) -> list[Trial]:
        """The trials that predict others: of the same kind of step."""
        return list(self.trials.values())

    def _try(self, index: int, timed: bool = False) -> Trial:
        known = self.trials.get(index)
        if known is None or (timed and known.seconds is None and known.peak_bytes):
            size = self._sizes[index]
            predicted = known.predicted_bytes if known else self._predict_trial(index)
            trial = self._measure(size, self._recompute, timed)
            self.trials[index] = dataclasses.replace(trial, predicted_bytes=predicted)
        return self.trials[index]

    def _predict_trial(self, index: int) -> int | None:
        """What to compare a trial with; a single micro-batch is not on the line."""
        single = index == len(self._sizes) - 1
        return None if single else self.predict(self._sizes[index])

    def _first_guess(self) -> int:
        """A size that is small, for it may not fit, but not so small as to be slow."""
        aim = self._start or self._sizes[-1] / 16
        return min(range(len(self._sizes)), key=lambda i: abs(self._sizes[i] - aim))

    def _guess(self, low: int, high: int) -> int:
        """The largest index that the line says fits; `low` if none above it does."""
        if self.predict(self._sizes[high]) is None:
            return self._second_guess(low) if low >= 0 else (high - 1) // 2
        fitting = [
            index
            for index in range(low + 1, high)
            if (self.predict(self._sizes[index]) or 0) <= self._budget
        ]
        return fitting[-1] if fitting else low

    def _second_guess(self, low: int) -> int:
        """The largest index that fits if all but the fixed bytes grows with the size."""
        size, fixed = self._sizes[low], self._fixed.held + self._fixed.sums
        grows = (self.trials[low].peak_bytes or 0) - fixed
        room = (self._budget - fixed) / max(grows, 1) * size if fixed else 0.0
        fitting = [i for i, s in enumerate(self._sizes[:-1]) if s <= room]
        return max(low + 1, fitting[-1] if fitting else 0)

    def _surely_too_large(self, index: int) -> bool:
        """Whether there is no need to measure that a size does not fit."""
        predicted = self.predict(self._sizes[index])
        return predicted is not None and predicted > 1.1 * self._budget


def faster(trial: Trial, than: Trial) -> bool:
    """Whether a trial is so much faster than another that it is worth it."""
    if trial.seconds is None or than.seconds is None:
        return False
    return trial.seconds < WORTH * than.seconds
