"""Cutting a model into segments, of which only the boundaries are kept.

Of a chain of N layers cut into n segments, the boundaries and the inside of one segment
are in memory at a time: about n + N/n activations, least at n = √N (Chen et al., 2016,
"Training Deep Nets with Sublinear Memory Cost"). Layers differ in size and graphs have
skip connections, so a cut costs what crosses it; cuts are placed where the sum of what
crosses them and the largest segment is least.

A segment is in one graph. A step that holds more than a segment should is entered: a
nested model is cut by itself, and of a layer without a graph the layers inside are
recomputed one by one.
"""

import collections
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import keras
import numpy as np

from .._backend.warn import warn
from .parts import Part, parts_of
from .weigh import trace_step

# A step is entered if it holds so many times more than the mean segment.
TOO_LARGE = 1.5
# The layers inside of one without a graph stand for it if they hold this share of it.
MOST = 0.5
# Steps that hold less than this share of the mean segment are not worth recomputing.
LITTLE = 0.1
# Cutting has to leave less than this share of the memory.
USELESS = 0.95

# Tensors that steps leave: the step, the last step that takes it, bytes.
Outputs = Sequence[tuple[int, int, float]]


def place(sizes: Sequence[float], outputs: Outputs, count: int) -> list[int]:
    """Where to cut N steps into `count` segments.

    Args:
        sizes: the bytes that the backward pass needs of each step.
        outputs: the tensors that steps leave for later ones; N is the last step that
            takes what is used after all.
        count: int, 1 to N.

    Returns:
        The first step of each segment but the first. What the segments but the last keep,
        plus the largest segment, is within 2 % of the least there is.
    """
    kept, inside = _costs(np.asarray(sizes, "float64"), outputs)
    best: tuple[float, list[int]] = (math.inf, [])
    limit = inside[0, -1]
    while (
        cuts := _cheapest(np.where(inside <= limit, kept, math.inf), count)
    ) is not None:
        bounds = [0, *cuts, len(sizes)]
        pairs = list(pairwise(bounds))
        largest = max(inside[i, j] for i, j in pairs)
        total = largest + sum(kept[i, j] for i, j in pairs[:-1])
        best = min(best, (total, cuts))
        limit = 0.98 * largest if largest else -1.0
    return best[1]


def _costs(sizes: np.ndarray, outputs: Outputs) -> tuple[np.ndarray, np.ndarray]:
    """Bytes that outlive a segment of the steps i to j - 1, and bytes inside of it."""
    steps = len(sizes)
    kept, inside = np.full((2, steps + 1, steps + 1), math.inf)
    crossing = np.zeros((steps, steps + 1))  # Of each step, the bytes that cross a cut.
    for made, used, size in outputs:
        crossing[made, made + 1 : used + 1] += size
    crossing = np.cumsum(crossing[::-1], axis=0)[::-1]
    total = np.concatenate([[0.0], np.cumsum(sizes)])
    for i in range(steps):
        kept[i, i + 1 :] = crossing[i, i + 1 :]
        inside[i, i + 1 :] = total[i + 1 :] - total[i]
    return kept, inside


def _cheapest(costs: np.ndarray, count: int) -> list[int] | None:
    """The cuts with the least sum of costs; None if there are none that are finite."""
    steps = len(costs) - 1
    # What follows the last segment is there with or without it.
    last = np.where(np.isfinite(costs[:, steps]), 0.0, math.inf)
    best, choices = last, []
    for _ in range(count - 1):
        through = costs + best[None, :]
        choices.append(np.argmin(through, axis=1))
        best = np.min(through, axis=1)
    if not np.isfinite(best[0]):
        return None
    cuts, at = [], 0
    for choice in reversed(choices):
        at = int(choice[at])
        cuts.append(at)
    return cuts


class Division:
    """A model in segments, by a trace of what its backward pass keeps.

    Attributes:
        trace: the trace.
        segments: the segments to recompute, in the order in which they run: calls of one
            graph, or a layer. Not the last one: its gradient is the first to be asked
            for, when all that it computed is there still (as in
            `torch.utils.checkpoint.checkpoint_sequential`).

    Args:
        model: a model, or a layer with layers inside.
        count: int, how many segments; None for the root of the number of steps.
        kept: further parts to trace.

    Raises:
        ValueError: if there is nothing to cut, or nothing to gain. Of a `count` that gains
            nothing, it warns.
    """

    def __init__(
        self, model: keras.layers.Layer, count: int | None, kept: Sequence[Part] = ()
    ) -> None:
        self._model = model
        self._parts = parts_of(model)
        if not self._parts:
            raise ValueError(
                f"'{model.name}' has no graph of layers to cut into segments: it is "
                "subclassed, or a Sequential model that is not built. Build it first, or "
                "give the layers to recompute, as in `recompute(model, 'block_*')`."
            )
        least = _least_steps(self._parts)
        if count is not None and not 2 <= count <= least:
            raise ValueError(
                "`segments` must be at least 2, since the last one is not recomputed, "
                f"and at most the number of layers, {least}. Received: {count}"
            )
        self.trace = trace_step(model, [*self._parts, *kept])
        steps = self._count_steps(self._parts)
        self._mean = self.trace.kept_bytes_of_all(self._parts) / (
            max(2, round(steps**0.5)) if count is None else count
        )
        found = [s for run in self._runs(self._parts) for s in self._cut(run)]
        found = [s for s in dict.fromkeys(map(tuple, found)) if self.trace.is_called(s)]
        found.sort(key=self.trace.first_operation)
        self.segments: list[Sequence[Part]] = list(found[:-1])
        if (nothing := self._nothing_saved()) is not None:
            if count is None:
                raise ValueError(nothing)
            warn(nothing)

    def _count_steps(self, parts: Sequence[Part]) -> int:
        return sum(
            self._count_steps(part.parts) if self._can_enter(part) else 1
            for part in parts
        )

    def _can_enter(self, part: Part) -> bool:
        """Whether the parts inside of `part` stand for it."""
        if not part.parts or part.parts[0].graph is not None:
            return bool(part.parts)
        inside = self.trace.kept_bytes_of_all(part.parts)
        return inside >= MOST * self.trace.kept_bytes([part])

    def _runs(self, parts: Sequence[Part]) -> Iterator[list[Part]]:
        """Steps that can be one segment: calls of a graph in a row, or a layer."""
        run: list[Part] = []
        for part in parts:
            large = self.trace.kept_bytes([part]) > TOO_LARGE * self._mean
            enter = large and self._can_enter(part)
            if run and (enter or part.graph is None):
                yield run
                run = []
            if enter:
                yield from self._runs(part.parts)
            else:
                run.append(part)
        if run:
            yield run

    def _cut(self, run: Sequence[Part]) -> list[Sequence[Part]]:
        sizes = [self.trace.kept_bytes([part]) for part in run]
        share = sum(sizes) / self._mean if self._mean else 0.0
        count = min(max(1, round(share)), len(run))
        if count == 1 and (share < LITTLE or not self.trace.saving(run)):
            return []
        cuts = place(sizes, self.trace.outputs(run), count)
        return [run[i:j] for i, j in pairwise([0, *cuts, len(run)])]

    def _nothing_saved(self) -> str | None:
        """That segments save nothing, and what would save more; None if they do."""
        plain = self.trace.peak([])
        left = self.trace.peak(self.segments)
        if self.segments and left <= USELESS * plain:
            return None
        return (
            f"Cutting '{self._model.name}' into segments saves nothing: "
            f"{min(left / plain, 1) if plain else 1:.0%} of what its backward pass needs "
            f"would stay in memory. {self._advice(plain)}"
        )

    def _advice(self, plain: float) -> str:
        """What saves more: the layers of a class that repeats, if there are such."""
        classes: dict[type, list[Part]] = collections.defaultdict(list)
        for part in dict.fromkeys(p for root in self._parts for p in root.all()):
            if isinstance(part.operation, keras.layers.Layer):
                classes[type(part.operation)].append(part)
        left = {
            kind: self.trace.peak([[p] for p in found if self.trace.is_called([p])])
            for kind, found in classes.items()
            if len(found) > 1
        }
        best = min(left, key=lambda kind: left[kind], default=None)
        if best is None or left[best] > USELESS * plain:
            return "No layers that repeat would save more: recompute nothing."
        pattern = _pattern([part.name for part in classes[best]])
        select = best.__name__ if pattern is None else repr(pattern)
        return (
            f"Recompute the layers that repeat, which leaves {left[best] / plain:.0%}: "
            f"`recompute(model, {select})`."
        )


def _least_steps(parts: Sequence[Part]) -> int:
    return sum(_least_steps(part.parts) if part.parts else 1 for part in parts)


def _pattern(names: Sequence[str]) -> str | None:
    """A pattern that matches all of `names`; None if they have no beginning in common."""
    shortest = min(names, key=len)
    ends = range(len(shortest), 0, -1)
    common = [
        shortest[:n] for n in ends if all(x.startswith(shortest[:n]) for x in names)
    ]
    return f"{common[0]}*" if common else None


def name_of_segment(parts: Sequence[Part]) -> str:
    """The names of its first and last call, or of its layer."""
    first, last = parts[0], parts[-1]
    return first.name if first.graph is None else f"{first.name}..{last.name}"
