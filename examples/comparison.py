"""Two trainings side by side: what each leaves, how far they lie apart, a picture."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import keras
import matplotlib
import numpy as np

matplotlib.use("Agg")  # Draws into files, so a machine without a screen will do.
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    PercentFormatter,
)

Weights = Sequence[np.ndarray]


@dataclass(frozen=True)
class Run:
    """One training; `weights[e]` are the trainable weights after `e` epochs."""

    history: dict[str, list[float]]
    weights: list[Weights]
    seconds: float


class WeightRecorder(keras.callbacks.Callback):
    """Copies the trainable weights before the training and after every epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Weights] = []

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        """Copy the initial weights."""
        self.on_epoch_end(0)

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Copy the weights that this epoch leaves."""
        self.weights.append([v.numpy() for v in self.model.trainable_variables])


def difference(weights: Weights, reference: Weights) -> tuple[float, float]:
    """Return the largest difference, and the largest in units of its variable.

    The unit is the largest weight of that variable in `reference`. Divided by each
    weight itself, the result would be about weights that happen to lie near zero.
    """
    gaps = [np.abs(a - b).max() for a, b in zip(weights, reference, strict=True)]
    units = [np.abs(b).max() + np.finfo(np.float32).tiny for b in reference]
    # NumPy's max, unlike Python's, never loses a NaN.
    return float(np.max(gaps)), float(np.max(np.divide(gaps, units)))


def table(
    accumulated: Run,
    large: Run,
    names: tuple[str, str] = ("accumulated", "large batch"),
    start: int = 0,
) -> str:
    """Write accuracies, times and distances as a table; the runs start at epoch `start`.

    The distance that the weights have moved since the start stands below the one
    between the runs: without it nobody can tell a small number from a large one.
    """

    def row(name: str, pair: Sequence[object], spec: str = "") -> str:
        return f"{name:30}" + "".join(f"{cell:>16{spec}}" for cell in pair) + "\n"

    epochs = (1, len(large.weights) - 1)
    apart = [difference(accumulated.weights[e], large.weights[e]) for e in epochs]
    moved = [difference(large.weights[e], large.weights[0]) for e in epochs]
    runs = (accumulated, large)
    return (
        row("", names)
        + row("test accuracy", [run.history["val_accuracy"][-1] for run in runs], ".2%")
        + row("seconds", [run.seconds for run in runs], ".1f")
        + "\n"
        + row("weights", [f"after epoch {start + epoch}" for epoch in epochs])
        + row("largest difference", [absolute for absolute, _ in apart], ".1e")
        + row("largest relative difference", [relative for _, relative in apart], ".1e")
        + row("largest move since the start", [absolute for absolute, _ in moved], ".1e")
    )


def plot(accumulated: Run, large: Run | None, title: str, path: Path) -> None:
    """Draw the learning curves, and how far the weights lie apart, into a PNG."""
    figure, axes = plt.subplots(1, 3 if large else 2, figsize=(15 if large else 10, 4.8))
    for axis, metric in zip(axes, ("loss", "accuracy"), strict=False):
        plot_curves(axis, metric, accumulated, large)
    axes[0].set(title="Loss", ylabel="mean cross-entropy", yscale="log")
    axes[1].set(title="Accuracy", ylabel="share of correct answers")
    axes[1].yaxis.set_major_formatter(PercentFormatter(1.0))
    if large:
        plot_difference(axes[2], accumulated, large)
    for axis in axes:
        over_epochs(axis, len(accumulated.weights) - 1)
    finish(figure, title, path)


def over_epochs(axis: Axes, epochs: int) -> None:
    """Dress a graph of something that epochs change."""
    axis.set_xlabel("epoch")
    axis.set_xlim(0.5, epochs + 0.5)
    plain(axis)
    whole_numbers(axis.xaxis)
    legend_below(axis)


def whole_numbers(axis: Axis) -> None:
    """Have ticks at whole numbers only, as epochs and updates are."""
    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def legend_below(axis: Axes, columns: int = 2) -> None:
    """Put the legend below the graph, where it covers nothing."""
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.14)}
    axis.legend(frameon=False, ncols=columns, **place)


def plain(axis: Axes) -> None:
    """Take a frame off that says nothing, and put a faint grid in."""
    axis.grid(alpha=0.25)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    if axis.get_yscale() == "log" and axis.yaxis.get_transform().base == 10:
        one_notation(axis.yaxis)


def one_notation(axis: Axis) -> None:
    """Write all ticks of a logarithmic axis alike: powers of ten, or plain numbers.

    Matplotlib labels ticks between the powers by another rule, and in another notation.
    """
    low, high = axis.get_view_interval()
    narrow = math.log10(high / low) < 2
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if narrow else (1,)))
    axis.set_minor_formatter(NullFormatter())
    if isinstance(axis.get_major_formatter(), PercentFormatter):
        axis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * x:g} %"))
    elif narrow:
        axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))


def judge_learning(
    failed: str | None, trained: int, needed: int, what: str
) -> str | None:
    """Say that a training was too short to be judged, or exit if it was long enough.

    Whether numbers are right is another question, which a script answers before.

    Args:
        failed: what was not reached, in a sentence; None if all was.
        trained: how many epochs, or updates, were made.
        needed: how many the default run makes.
        what: "epochs" or "updates".
    """
    if failed is None:
        return None
    if trained >= needed:
        raise SystemExit(f"Failed to learn: {failed}")
    return (
        f"Not judged: what was learnt in {trained} {what}; {needed} are the default. "
        f"{failed}"
    )


def finish(figure: Figure, title: str, path: Path) -> None:
    """Write a figure into a PNG."""
    figure.suptitle(title, fontsize="x-large")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_curves(axis: Axes, metric: str, accumulated: Run, large: Run | None) -> None:
    """Draw one metric; the thin dashed line lies inside the pale one if they agree."""
    for color, part, prefix in (("C0", "train", ""), ("C3", "test", "val_")):
        thin = accumulated.history[prefix + metric]
        epochs = range(1, len(thin) + 1)
        if large:
            pale, label = large.history[prefix + metric], f"{part}, large batch"
            axis.plot(epochs, pale, color, lw=7, alpha=0.25, marker="o", label=label)
        label = f"{part}, accumulated"
        axis.plot(epochs, thin, color, lw=1.6, ls="--", marker=".", label=label)


def plot_difference(axis: Axes, accumulated: Run, large: Run) -> None:
    """Draw the distance between the runs below the distance from the start."""
    plot_distances(axis, {"between the runs": (accumulated, "k")}, large)


def plot_distances(axis: Axes, runs: Mapping[str, tuple[Run, str]], large: Run) -> None:
    """Draw how far runs, given with a colour each, lie from `large` after each epoch."""
    epochs = range(1, len(large.weights))
    moved = [difference(large.weights[e], large.weights[0])[0] for e in epochs]
    axis.plot(epochs, moved, "0.6", lw=1.6, marker=".", label="moved since the start")
    for label, (run, color) in runs.items():
        apart = [difference(run.weights[e], large.weights[e])[0] for e in epochs]
        axis.plot(epochs, apart, color, lw=1.6, marker="o", ms=3, label=label)
    axis.set(title="Weights", ylabel="largest absolute difference", yscale="log")
