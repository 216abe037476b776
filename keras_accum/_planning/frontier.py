"""`frontier`: the time of a step against its memory, over sizes and recomputation."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from .._backend.figure import new_figure
from .._backend.private import canaries
from .budget import format_bytes, parse_budget
from .families import Choices, Switch, choices_of
from .measure import BaselineMemory, StepProfiler
from .plan import Plan, aligned, describe
from .planner import Task, check_model, check_recompute, shown
from .search import Trial, candidates
from .shortage import nothing_fits
from .transaction import preserving_state

# The shares of a family that are measured: of the sizes, the largest and so many halves.
SHARES = (1 / 3, 2 / 3)
SIZES = 4


@dataclasses.dataclass(frozen=True)
class Point:
    """One way to train on the batch, measured.

    Attributes:
        micro_batch_size: int, the samples of a micro-batch on one replica.
        recompute: what is recomputed in the backward pass, as in `Plan.recompute`.
        peak_bytes: int, the most that a step needed on one device, all in all.
        seconds: float, the time of a step on the whole batch.
        dominated: bool, whether another point needs no more memory and no more time, and
            less of one.
    """

    micro_batch_size: int
    recompute: Any
    peak_bytes: int
    seconds: float
    dominated: bool


@dataclasses.dataclass(frozen=True)
class Frontier:
    """What each MiB costs in time; made by `frontier`.

    `print(frontier)` shows a table, `frontier.plot()` draws it, and `frontier.at(budget)`
    is the plan for a budget.

    Attributes:
        points: tuple of `Point`, by rising memory.
        batch_size: int, the effective batch.
        method: str, how memory was measured, in words.
    """

    points: tuple[Point, ...]
    batch_size: int
    method: str
    _task: Task = dataclasses.field(repr=False, compare=False)
    _held: BaselineMemory = dataclasses.field(repr=False, compare=False)
    _floor: int = dataclasses.field(repr=False, compare=False)

    def at(self, budget: int | float | str) -> Plan:
        """The plan for a budget: the fastest point that fits.

        Args:
            budget: of one device, as `memory_budget` of `plan`.

        Returns:
            A `Plan`. Nothing is measured again.

        Raises:
            ValueError: if no point fits, with what needs the memory.
        """
        size = parse_budget(budget, self._held.parameters + self._held.optimizer)
        trials = [
            Trial(p.micro_batch_size, p.recompute, p.peak_bytes, seconds=p.seconds)
            for p in self.points
        ]
        fitting = [trial for trial in trials if trial.fits(size)]
        if not fitting:
            model = self._task.model
            raise ValueError(nothing_fits(trials, size, self._held, self._floor, model))
        best = min(fitting, key=lambda trial: trial.seconds or 0.0)
        return self._task.plan(best, trials, size, self._held, self._floor, self.method)

    def to_dict(self) -> dict[str, Any]:
        """Points, batch size and method, in types that JSON has."""
        return {
            "batch_size": self.batch_size,
            "method": self.method,
            "points": [dataclasses.asdict(point) for point in self.points],
        }

    def __str__(self) -> str:
        fastest = min(point.seconds for point in self.points)
        rows = [["micro-batch", "recompute", "memory", "s/step", "time", ""]]
        for point in self.points:
            cells = [str(point.micro_batch_size), describe(point.recompute)]
            cells += [format_bytes(point.peak_bytes), f"{point.seconds:.3f}"]
            cells += [f"{point.seconds / fastest:.2f}"]
            rows.append([*cells, "dominated" if point.dominated else ""])
        head = (
            f"Batch of {self.batch_size}: time of a step against memory ({self.method})."
        )
        return "\n".join([head, "", *aligned(rows)])

    def plot(self) -> Any:
        """Draw time against memory: all points, and the line of those worth choosing.

        Returns:
            A `matplotlib.figure.Figure`; write it with `savefig`.

        Raises:
            ImportError: without matplotlib.
        """
        figure, axis = new_figure("frontier", (7, 4.5))
        best = [point for point in self.points if not point.dominated]
        memory = [point.peak_bytes / 2**20 for point in best]
        # Between two points nothing was measured: what fits is the one below.
        axis.step(memory, [p.seconds for p in best], "0.7", where="post", zorder=1)
        sizes = sorted({point.micro_batch_size for point in self.points}, reverse=True)
        for i, size in enumerate(sizes):
            for recomputed, marker in ((False, "o"), (True, "s")):
                drawn = [
                    p
                    for p in self.points
                    if p.micro_batch_size == size and bool(p.recompute) is recomputed
                ]
                for dominated, fill in ((False, f"C{i}"), (True, "none")):
                    some = [p for p in drawn if p.dominated is dominated]
                    axis.scatter(
                        [p.peak_bytes / 2**20 for p in some],
                        [p.seconds for p in some],
                        marker=marker,
                        facecolor=fill,
                        edgecolor=f"C{i}",
                        zorder=2,
                    )
            axis.scatter([], [], color=f"C{i}", label=f"micro-batch {size}")
        axis.scatter([], [], color="k", marker="s", label="recomputed")
        axis.scatter([], [], facecolor="none", edgecolor="k", label="dominated")
        axis.set(xlabel="peak of a step, MiB", ylabel="seconds of a step")
        axis.set_ylim(0, 1.1 * max(point.seconds for point in self.points))
        axis.set_title(f"{self._task.model.name}: batch of {self.batch_size}")
        axis.grid(alpha=0.25)
        axis.legend(frameon=False, fontsize="small")
        return figure


def frontier(
    model: keras.Model,
    batch: Any,
    *,
    batch_size: int | None = None,
    recompute: bool | str = "auto",
    max_points: int = 16,
    verbose: int = 1,
) -> Frontier:
    """Measure the time of a step against its memory, for this model on this device.

    ```python
    frontier = keras_accum.frontier(model, (x[:128], y[:128]))
    print(frontier)                          # what each further MiB costs
    frontier.plot().savefig("frontier.png")
    model = frontier.at("2GiB").apply()
    ```

    Each point is a micro-batch size together with what is recomputed in the backward
    pass: nothing, two thirds or one third of what all blocks save, by the cheapest
    blocks, or all. Its step runs, and its memory and time are measured as `plan` measures
    them. The model is afterwards what it was before, to the bit.

    Args:
        model: built and compiled.
        batch: as for `plan`.
        batch_size: int, the effective batch, as for `plan`.
        recompute: "auto" for the blocks that repeat, or segments; False for micro-batch
            sizes only; or a pattern of layer names, all of which are recomputed or none.
        max_points: int, at least 1. The most points to measure. Of each size, nothing and
            everything recomputed come first, and the largest sizes before smaller ones.
        verbose: 1 prints a line for each point that is measured, 0 nothing.

    Returns:
        A `Frontier`.

    Raises:
        ValueError: for a model that is not built or not compiled, arguments out of their
            range, and if everything runs out of memory.
        TypeError: for arguments of a wrong type.

    References:
        Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost".
    """
    check_model(model)
    canaries.check()
    check_recompute(recompute)
    _check_max_points(max_points)
    task = Task.prepare(model, batch, batch_size)
    with model.distribute_strategy.scope(), preserving_state(model):
        choices = choices_of(model) if recompute == "auto" else None
        profiler = StepProfiler(model, task.samples, Switch(choices))
        measure = shown(profiler) if verbose else profiler.measure
        fixed = [False] if recompute in (False, "auto") else [False, recompute]
        wanted = itertools.islice(_grid(task.rows, fixed, choices), max_points)
        trials = [measure(size, option, True) for size, option in wanted]
        held, floor, method = profiler.held, profiler.floor, profiler.method
    if verbose:
        print()
    measured = [trial for trial in trials if trial.peak_bytes is not None]
    if not measured:
        raise ValueError(
            f"All of the {len(trials)} points ran out of memory. Use a smaller batch, or "
            "`plan`, which begins with small micro-batches."
        )
    return Frontier(points(measured), task.batch_size, method, task, held, floor)


def _check_max_points(max_points: Any) -> None:
    integer = isinstance(max_points, (int, np.integer)) and not isinstance(
        max_points, bool
    )
    if not integer or max_points < 1:
        raise (ValueError if integer else TypeError)(
            f"`max_points` must be an integer of at least 1. Received: {max_points!r}"
        )


def _grid(
    rows: int, fixed: Sequence[Any], choices: Choices | None
) -> Iterator[tuple[int, Any]]:
    """What to measure, the most telling first."""
    sizes = candidates(rows)
    nearest = [min(sizes, key=lambda s: abs(s - rows / 2**i)) for i in range(SIZES)]
    nearest = list(dict.fromkeys(nearest))
    first, between = [*fixed], []
    if choices is not None:
        first.append(choices.everything)
        between = [choices.subset(share)[0] for share in SHARES]
    # Sizes alone make more points where there is nothing to recompute.
    if first == [False]:
        nearest = [*nearest, *(s for s in reversed(sizes) if s not in nearest)]
    between = [option for option in dict.fromkeys(between) if option not in first]
    for options in (first, between):
        yield from itertools.product(nearest, options)


def points(trials: Sequence[Trial]) -> tuple[Point, ...]:
    """The points of what was measured and timed, by rising memory."""
    pairs = [(trial.peak_bytes or 0, trial.seconds or 0.0) for trial in trials]

    def is_dominated(pair: tuple[int, float]) -> bool:
        return any(
            other != pair and other[0] <= pair[0] and other[1] <= pair[1]
            for other in pairs
        )

    found = [
        Point(trial.micro_batch_size, trial.recompute, *pair, is_dominated(pair))
        for trial, pair in zip(trials, pairs)
    ]
    return tuple(sorted(found, key=lambda point: (point.peak_bytes, point.seconds)))
