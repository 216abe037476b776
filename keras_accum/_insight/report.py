"""What `check_equivalence` has measured."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from .._backend.figure import new_figure

Kind: TypeAlias = Literal["equal", "zero", "differs", "none"]

# An error of so many times its rounding floor is a true difference. Rounding itself
# reaches 1.6 times its floor in the models of `tests/insight`, and 4.3 times in a bias of
# 1,000 outputs over 4,096 tokens (`benchmarks/check_equivalence.py`).
MOST = 10.0


@dataclasses.dataclass(frozen=True)
class Comparison:
    """An array, as the window and as the large batch have it.

    Attributes:
        path: of the variable.
        error: float, L2 norm of the difference over that of the large batch's array; of
            moved state, over that of its move.
        floor: float, the same for rounding alone.
        cosine: float, of the angle between the two arrays; NaN where one is zero.
        kind: "equal"; "zero", a gradient that is zero but for rounding; "differs"; or
            "none", a variable without a gradient in both.
    """

    path: str
    error: float
    floor: float
    cosine: float
    kind: Kind

    @property
    def ratio(self) -> float:
        """The error, in rounding floors; 1 is rounding."""
        if self.error == 0:
            return 0.0
        return self.error / self.floor if self.floor else math.inf


@dataclasses.dataclass(frozen=True)
class Value:
    """A number that training logs, as the window and as the large batch have it.

    Attributes:
        name: by which it is logged.
        large: float, of the large batch.
        window: float, of the window.
        floor: float, how far rounding alone may take them apart.
    """

    name: str
    large: float
    window: float
    floor: float

    @property
    def equal(self) -> bool:
        """Whether the two are the same but for rounding."""
        if math.isnan(self.large) or math.isnan(self.window):
            return math.isnan(self.large) and math.isnan(self.window)
        return (
            self.large == self.window
            or abs(self.window - self.large) <= MOST * self.floor
        )


@dataclasses.dataclass(frozen=True)
class Report:
    """How a window compares with the large batch; made by `check_equivalence`.

    `print(report)` shows a table, `report.plot()` draws it.

    Attributes:
        equal: bool, whether the update differs by rounding only: the gradients, and the
            state that a step moves besides.
        loss: `Value`, the logged loss; None if the step logs none. In the optimizer, Keras
            logs the mean over samples, whatever the loss divides by.
        metrics: dict of str to `Value`, the other logged numbers.
        gradients: dict of path to float: the error of a variable's gradient in rounding
            floors. Near 1 it is rounding, above 10 it is a true difference.
        first_layer: str, where a difference enters: the path of the first layer whose
            output for a sample depends on the micro-batch, or whose state moves
            otherwise; "loss" if all layers agree; None without a difference of gradients
            or state.
        naive: dict as `gradients`, for the mean of the micro-batches' mean gradients.
        variables: tuple of `Comparison`, one for each trained variable.
        state: tuple of `Comparison`, one for each variable that a step moves besides
            (moving statistics, codebooks).
        route: "optimizer" if micro-batches came one by one to an `AccumOptimizer`,
            "step" if the step took the batch apart.
        samples: int, of the large batch.
        accum_steps: int, how many micro-batches were made of them.
        randomness: "none"; "replayed", if each sample drew the same numbers in both; or
            "not replayed", if steps differ from each other by numbers that cannot be
            drawn again: what differs is then not known, and `equal` is False.
        said: tuple of str, what this package warned of.
    """

    equal: bool
    loss: Value | None
    metrics: dict[str, Value]
    gradients: dict[str, float]
    first_layer: str | None
    naive: dict[str, float]
    variables: tuple[Comparison, ...]
    state: tuple[Comparison, ...]
    route: Literal["optimizer", "step"]
    samples: int
    accum_steps: int
    randomness: Literal["none", "replayed", "not replayed"]
    said: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """All of it, in types that JSON has."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        rows = [_HEADER, *(self._row(v) for v in self.variables)]
        lines = [*self._summary(), "", *aligned(rows)]
        if self.state:
            moved = [("moved state", "error", "floor", "floors", "")]
            moved += [
                (
                    v.path,
                    _short(v.error),
                    _short(v.floor),
                    _short(v.ratio),
                    _VERDICTS[v.kind],
                )
                for v in self.state
            ]
            lines += ["", *aligned(moved)]
        if logged := self._logged():
            table = [("logged", "large batch", "window", "")]
            table += [
                (
                    v.name,
                    f"{v.large:.6g}",
                    f"{v.window:.6g}",
                    "equal" if v.equal else "DIFFERS",
                )
                for v in logged
            ]
            lines += ["", *aligned(table)]
        return "\n".join([*lines, *(f"\nSaid: {text}" for text in self.said)])

    def _logged(self) -> list[Value]:
        return [v for v in (self.loss, *self.metrics.values()) if v is not None]

    def _row(self, found: Comparison) -> tuple[str, ...]:
        if found.kind == "none":
            return (found.path, "-", "-", "-", "-", "-", _VERDICTS[found.kind])
        return (
            found.path,
            _short(found.error),
            _short(found.floor),
            _short(found.ratio),
            f"{found.cosine:.6f}",
            _short(self.naive[found.path]),
            _VERDICTS[found.kind],
        )

    def _summary(self) -> list[str]:
        how = (
            "one by one, in the optimizer"
            if self.route == "optimizer"
            else "taken apart in the step"
        )
        lines = [
            f"{'Equal' if self.equal else 'NOT EQUAL'}: {self.samples} samples in "
            f"{self.accum_steps} micro-batches, {how}, against one large batch."
        ]
        if self.randomness == "not replayed":
            lines.append(
                "The step draws random numbers that cannot be drawn again: two steps on "
                "the same batch differ. Differences below that cannot be seen."
            )
        elif self.randomness == "replayed":
            lines.append("Random numbers (dropout, noise): the same for each sample.")
        unlike = [v.name for v in self._logged() if not v.equal]
        if unlike:
            lines.append(
                f"Logged otherwise than for the large batch: {', '.join(unlike)}."
            )
        zero = [v.path for v in self.variables if v.kind == "zero"]
        if zero:
            lines.append(f"Zero but for rounding: the gradient of {', '.join(zero)}.")
        if self.first_layer is not None:
            lines.append(f"The difference enters at: {self.first_layer}.")
        worst = max(self.naive.values(), default=0.0)
        lines.append(
            "A mean of the micro-batches' means would "
            + (
                f"differ, by up to {_short(worst)} rounding floors."
                if worst > MOST
                else "be equal on these data."
            )
        )
        return lines

    def plot(self) -> Any:
        """Draw one bar per variable on a log scale, with the rounding floor.

        The 40 variables that differ most, if there are more.

        Returns:
            A matplotlib `Figure`, which notebooks show, and which has `savefig`.

        Raises:
            ImportError: without matplotlib.
        """
        shown = [v for v in self.variables if v.kind != "none"]
        if len(shown) > _MOST_BARS:
            worst = sorted(shown, key=lambda v: v.ratio)[-_MOST_BARS:]
            shown = [v for v in shown if v in worst]
        figure, axis = new_figure("report", (8, 1.6 + 0.3 * len(shown)))
        places = range(len(shown))
        least = min((v.floor for v in shown if v.floor), default=1e-8) / 30
        axis.barh(
            places,
            [max(v.error, least) for v in shown],
            color=[_COLORS[v.kind] for v in shown],
            height=0.6,
        )
        axis.plot([v.floor for v in shown], places, "k|", ms=11, mew=2)
        axis.plot(
            [max(self.naive[v.path] * v.floor, least) for v in shown],
            places,
            "o",
            color="0.45",
            mfc="none",
        )
        self._label(axis, shown, least)
        return figure

    def _label(self, axis: Any, shown: list[Comparison], least: float) -> None:
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        kinds = dict.fromkeys(v.kind for v in shown)
        legend: list[Any] = [
            Patch(color=_COLORS[kind], label=f"window: {_VERDICTS[kind]}")
            for kind in kinds
        ]
        legend += [
            Line2D([], [], color="k", marker="|", ls="", ms=11, mew=2, label="rounding"),
            Line2D(
                [], [], color="0.45", marker="o", ls="", mfc="none", label="mean of means"
            ),
        ]
        axis.set_yticks(range(len(shown)), [v.path for v in shown])
        axis.set_ylim(len(shown) - 0.4, -0.6)
        axis.set_xscale("log")
        axis.set_xlim(left=least)
        axis.set_xlabel("error of the gradient, relative to the large batch's")
        state = "equal" if self.equal else "not equal"
        axis.set_title(
            f"{self.samples} samples in {self.accum_steps} micro-batches: {state}"
        )
        axis.grid(axis="x", alpha=0.25)
        axis.legend(
            handles=legend, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0)
        )


_MOST_BARS = 40
_HEADER: tuple[str, ...] = (
    "variable",
    "error",
    "floor",
    "floors",
    "cosine",
    "mean of means",
    "",
)
_VERDICTS = {
    "equal": "equal",
    "zero": "zero but for rounding",
    "differs": "DIFFERS",
    "none": "no gradient",
}
_COLORS = {"equal": "C0", "zero": "0.75", "differs": "C3", "none": "w"}


def _short(number: float) -> str:
    return f"{number:.1e}"


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows of cells as lines, with the first column to the left."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(
            cell.rjust(width) if 0 < i < len(row) - 1 else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]
