"""The search over micro-batch sizes where each size recomputes as little as it can."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from .search import Fixed, Measure, Patience, Search, Trial

# How often the choice for one size is measured and repaired.
REPAIRS = 3
# The share of the budget that a choice leaves free: peaks of a graph differ a little.
MARGIN = 0.01


class Choice(Protocol):
    """What can be recomputed in part."""

    everything: Any

    def subset(self, share: float) -> tuple[Any, float]:
        """What to recompute to save `share` of what all saves, and what it does save."""


class FilledSearch(Search):
    """Trials of steps that recompute just so much that they fit.

    Whether a size fits at all is measured with everything recomputed. A size that is to
    be timed then gets the cheapest choice that fits: by a line between nothing and
    everything, measured as a whole, and repaired if it does not fit or leaves room.

    Args:
        plain: the search without recomputation, which predicts what a size needs.
    """

    def __init__(
        self,
        measure: Measure,
        sizes: Sequence[int],
        budget: int,
        choice: Choice,
        patience: Patience,
        fixed: Fixed,
        start: int | None,
        plain: Search | None,
    ) -> None:
        super().__init__(
            measure, sizes, budget, choice.everything, patience, fixed, start
        )
        self._choice, self._plain = choice, plain
        self._whole: dict[int, Trial] = {}
        self._others: list[Trial] = []

    @property
    def least_index(self) -> int:
        """The smallest size that needs recomputation at all."""
        known = {} if self._plain is None else self._plain.trials
        fitting = [i for i, trial in known.items() if trial.fits(self._budget)]
        return min(max(fitting, default=-1) + 1, len(self._sizes) - 1)

    @property
    def all_trials(self) -> list[Trial]:
        """Everything that was measured."""
        found = [*self._whole.values(), *self._others, *self.trials.values()]
        return list({(t.micro_batch_size, t.recompute): t for t in found}.values())

    def _on_the_line(self) -> list[Trial]:
        return list(self._whole.values())

    def _try(self, index: int, timed: bool = False) -> Trial:
        if index not in self._whole:
            self._whole[index] = self._whole_trial(index, timed=False)
            self.trials[index] = self._whole[index]
        known = self.trials[index]
        if timed and known.seconds is None and known.fits(self._budget):
            self.trials[index] = self._fill(index)
        return self.trials[index]

    def _whole_trial(self, index: int, timed: bool) -> Trial:
        predicted = self._predict_trial(index)
        trial = self._measure(self._sizes[index], self._choice.everything, timed)
        return dataclasses.replace(trial, predicted_bytes=predicted)

    def _fill(self, index: int) -> Trial:
        """The cheapest choice for a size that fits."""
        size, best = self._sizes[index], None
        fits = (1.0, self._whole[index].peak_bytes or 0)
        too_large: tuple[float, int | None] = (0.0, self._peak_without(index))
        tried = {self._choice.everything}
        for _ in range(REPAIRS):
            option, saved = self._choice.subset(self._share(too_large, fits))
            if option in tried:
                break
            if best is not None and not self._patience.lasts(best):
                break
            tried.add(option)
            trial = self._measure(size, option, True)
            self._others.append(trial)
            if trial.fits(self._budget):
                best, fits = trial, (saved, trial.peak_bytes or 0)
            else:
                too_large = (saved, trial.peak_bytes)
        if best is not None:
            return best
        self._whole[index] = self._whole_trial(index, timed=True)
        return self._whole[index]

    def _share(
        self, too_large: tuple[float, int | None], fits: tuple[float, int]
    ) -> float:
        """The share that the line between two choices says to be enough."""
        (low, most), (high, least) = too_large, fits
        if most is None or most <= least:
            return (low + high) / 2
        aim = (1 - MARGIN) * self._budget
        part = min(max((most - aim) / (most - least), 0.0), 1.0)
        # Not the choice that was too large again.
        return low + max(part, 1e-3) * (high - low)

    def _peak_without(self, index: int) -> int | None:
        """The bytes of a size with nothing recomputed, measured or predicted."""
        if self._plain is None:
            return None
        known = self._plain.trials.get(index)
        if known is not None:
            return known.peak_bytes
        predicted = self._plain.predict(self._sizes[index])
        single = index == len(self._sizes) - 1
        sums = self._fixed.sums if single else 0
        return None if predicted is None else predicted - sums
