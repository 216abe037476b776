"""The result of planning: the sizes to train with, and what was measured to find them."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import keras

from .._backend.figure import new_figure
from .._backend.identity import unique
from .._backend.private.layers import flatten_layers
from .._recompute.api import Recomputation, recompute_parts
from .._recompute.api import recompute as ka_recompute
from .._recompute.parts import as_parts
from .._recompute.select import layers_inside
from .._step.model import accumulate
from .budget import format_bytes, format_step
from .measure import BaselineMemory
from .search import Trial


@dataclasses.dataclass(frozen=True)
class Plan:
    """How to train on a batch within a memory budget; made by `plan`.

    `print(plan)` shows a table of what was tried, `plan.plot()` draws it, and
    `plan.apply()` has the model train by the plan.

    Attributes:
        micro_batch_size: int, the samples of a micro-batch on one replica.
        accum_steps: int, the micro-batches of one step on one replica.
        recompute: what is recomputed in the backward pass: False for nothing, a pattern
            of layer names, "segments=sqrt", "segments=sqrt, share=0.5" for only as many
            segments as save that share, or the paths of layers. A path with ", keep=NAMES"
            behind it is of a layer that is recomputed but for the results of layers
            inside, as with `keep` of `recompute`.
        batch_size: int, the effective batch: samples of one update, over all replicas
            and the whole window of an `AccumOptimizer`.
        replicas: int, the devices that train together.
        window: int, the steps of one update: the window of an `AccumOptimizer`, as it
            was when planning; 1 for any other optimizer.
        budget_bytes: int, the memory that was allowed, on one device.
        peak_bytes: int, what a step of this size was measured to need, all in all:
            variables, batch, sums of gradients, and activations.
        predicted_bytes: int, what the other sizes that were measured predict for this
            one, by the line through the two nearest; None where they make no line.
        floor_bytes: int, the least memory of a step that is told from none.
        seconds: float, the time of a step on the whole batch.
        held: the part of `peak_bytes` that is in memory before and after a step.
        method: how memory was measured, in words.
        trials: everything that was measured, in that order.
    """

    micro_batch_size: int
    accum_steps: int
    recompute: Any
    batch_size: int
    replicas: int
    window: int
    budget_bytes: int
    peak_bytes: int
    predicted_bytes: int | None
    floor_bytes: int
    seconds: float
    held: BaselineMemory
    method: str
    trials: tuple[Trial, ...]
    _model: keras.Model = dataclasses.field(repr=False, compare=False)

    @property
    def last_micro_batch_size(self) -> int:
        """The samples of the last micro-batch; fewer if the batch does not divide."""
        rows = math.ceil(self.batch_size / (self.replicas * self.window))
        return rows - (self.accum_steps - 1) * self.micro_batch_size

    def apply(self) -> keras.Model:
        """Have the model that was planned for train by this plan.

        Returns:
            The model itself. `accumulate` has been called with it, and `recompute` if the
            plan says so. It stays compiled as it was.
        """
        if self.recompute:
            switch_on(self._model, self.recompute)
        return accumulate(self._model, micro_batch_size=self.micro_batch_size)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the model, in types that JSON has."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del fields["_model"]
        return {
            **fields,
            "held": dataclasses.asdict(self.held),
            "trials": [dataclasses.asdict(trial) for trial in self.trials],
        }

    def __str__(self) -> str:
        rows = [[*_HEADER], *(self._row(trial) for trial in self.trials)]
        return "\n".join([*self._summary(), "", *aligned(rows)])

    def _summary(self) -> list[str]:
        steps, last = self.accum_steps, self.last_micro_batch_size
        split = (
            f"{steps} micro-batch{'es' if steps > 1 else ''} of {self.micro_batch_size}"
        )
        if last != self.micro_batch_size:
            split = (
                f"{steps - 1} micro-batches of {self.micro_batch_size} and one of {last}"
            )
        replicas = f" on each of {self.replicas} replicas" if self.replicas > 1 else ""
        if self.window > 1:
            step = self.batch_size // self.window
            window = f"{self.window} steps of {step}, the window of AccumOptimizer"
            split = f"{window}; each step {split}"
        held, what = self.held, describe(self.recompute)
        needs = format_step(self.peak_bytes - held.total, self.floor_bytes)
        lines = [
            f"Batch of {self.batch_size}: {split}{replicas}, {what}.",
            f"Needs {self._peak(self.peak_bytes)} of {format_bytes(self.budget_bytes)} "
            f"({self.method}): weights {format_bytes(held.parameters)}, optimizer "
            f"{format_bytes(held.optimizer)}, batch {format_bytes(held.batch)}, step "
            f"{needs}.",
        ]
        if last != self.micro_batch_size:
            lines.append(
                "The last micro-batch is shorter. It is weighted by its samples, so that "
                "the update is still the large batch's."
            )
        return lines

    def _peak(self, size: int) -> str:
        """A peak; where the step's part is below the floor, a bound of it."""
        least = self.held.total + self.floor_bytes
        return f"below {format_bytes(least)}" if size < least else format_bytes(size)

    def _row(self, trial: Trial) -> list[str]:
        return [
            str(trial.micro_batch_size),
            describe(trial.recompute),
            "-" if trial.predicted_bytes is None else format_bytes(trial.predicted_bytes),
            "-" if trial.peak_bytes is None else self._peak(trial.peak_bytes),
            "-" if trial.seconds is None else f"{trial.seconds:.3f}",
            self._verdict(trial),
        ]

    def _verdict(self, trial: Trial) -> str:
        if trial.peak_bytes is None:
            return "out of memory"
        if not trial.fits(self.budget_bytes):
            return "over budget"
        chosen = (self.micro_batch_size, self.recompute)
        return "chosen" if chosen == (trial.micro_batch_size, trial.recompute) else "fits"

    def plot(self) -> Any:
        """Draw memory over the micro-batch size, with the budget as a line.

        Returns:
            A `matplotlib.figure.Figure`; write it with `savefig`.

        Raises:
            ImportError: without matplotlib.
        """
        figure, axis = new_figure("plan", (7, 4.5))
        mib = 2.0**20
        kinds = list(dict.fromkeys(trial.recompute for trial in self.trials))
        for i, kind in enumerate(kinds):
            tried = [t for t in self.trials if t.recompute == kind and t.peak_bytes]
            tried.sort(key=lambda trial: trial.micro_batch_size)
            sizes = [trial.micro_batch_size for trial in tried]
            peaks = [(trial.peak_bytes or 0) / mib for trial in tried]
            axis.plot(sizes, peaks, f"C{i}o-", label=describe(kind))
        axis.axhline(self.budget_bytes / mib, color="C3", ls="--", label="budget")
        axis.axhline(
            self.held.total / mib, color="0.6", ls=":", label="held between steps"
        )
        axis.plot(
            self.micro_batch_size,
            self.peak_bytes / mib,
            "ko",
            ms=12,
            mfc="none",
            label="chosen",
        )
        axis.set_xscale("log", base=2)
        sizes = sorted({trial.micro_batch_size for trial in self.trials})
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.set(xlabel="micro-batch size", ylabel="peak of a step, MiB")
        axis.set_ylim(bottom=0)
        axis.set_title(f"{self._model.name}: batch of {self.batch_size}")
        axis.grid(alpha=0.25)
        axis.legend(frameon=False)
        return figure


_HEADER = ("micro-batch", "recompute", "predicted", "measured", "s/step", "verdict")


SEGMENTS = "segments=sqrt"
_KEEP = ", keep="


def with_kept(path: str, names: Iterable[str]) -> str:
    """What a plan calls the layer at `path`, recomputed but for results inside."""
    kept = ",".join(dict.fromkeys(names))
    return f"{path}{_KEEP}{kept}" if kept else path


def switch_on(model: keras.Model, recompute: Any) -> Recomputation:
    """Recompute what a plan's `recompute` names; returns the handle that undoes it."""
    if isinstance(recompute, str) and recompute.startswith(SEGMENTS):
        return ka_recompute(model, segments="sqrt", share=_share(recompute))
    if isinstance(recompute, tuple):
        return _switch_on_blocks(model, recompute)
    return ka_recompute(model, recompute)


def _switch_on_blocks(model: keras.Model, recompute: tuple[str, ...]) -> Recomputation:
    wanted: dict[str, str] = {}
    for entry in recompute:
        path, _, names = entry.partition(_KEEP)
        wanted[path] = names
    blocks = [layer for layer in flatten_layers(model) if layer.path in wanted]
    kept = [
        inside
        for block in blocks
        if wanted[block.path]
        for inside in layers_inside([block], wanted[block.path].split(","))
    ]
    parts = [[part] for part in as_parts(blocks)]
    return recompute_parts(model, parts, unique(kept))


def describe_trial(trial: Trial, least: int) -> str:
    """A trial in a line; peaks below `least` bytes are not told from one another."""
    if trial.peak_bytes is None:
        needs = "out of memory"
    else:
        needs = format_step(trial.peak_bytes, least)
    time = "" if trial.seconds is None else f", {trial.seconds:.3f} s a step"
    return (
        f"micro-batches of {trial.micro_batch_size}, {describe(trial.recompute)}: "
        f"{needs}{time}"
    )


def _share(recompute: str) -> float | None:
    """The share of "segments=sqrt, share=0.5"; None for all of them."""
    before, comma, share = recompute.partition(", share=")
    return float(share) if comma and before == SEGMENTS else None


def describe(recompute: Any) -> str:
    """What is recomputed, in words."""
    if isinstance(recompute, tuple):
        kept = sum(_KEEP in entry for entry in recompute)
        but = f", {kept} of them but for products" if kept else ""
        return f"{len(recompute)} layers recomputed{but}"
    if recompute == SEGMENTS:
        return "segments recomputed"
    if isinstance(recompute, str) and (share := _share(recompute)):
        return f"{share:.0%} of segments recomputed"
    return f"{recompute!r} recomputed" if recompute else "nothing recomputed"


def aligned(rows: list[list[str]]) -> list[str]:
    """The lines of a table."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows
    ]
