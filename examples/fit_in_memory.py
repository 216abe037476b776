"""Train a transformer on a batch whose step needs several times the memory there is.

The default run needs no network and takes some minutes on two cores:

    python examples/fit_in_memory.py --memory 256MiB

`keras_accum.plan` finds the micro-batch size, and what to recompute, with which the batch
fits. `keras_accum.frontier` measures what each further MiB would cost in time; the figure
shows it, with the plan as a point of it. Then the model trains twice from one seed: as
planned, and in plain Keras on the whole batch. The memory of every step is measured while
it runs. The script fails if the planned run goes over the budget, if the batch had fitted
anyway, or if the two runs end with different weights.
"""

import os

# Before TensorFlow is imported: it reports its build options as warnings.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Likewise: else the allocator of CPUs counts only where oneDNN is on by default.
os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "1")

import argparse
import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from comparison import (
    Weights,
    difference,
    finish,
    legend_below,
    plain,
    plt,
    whole_numbers,
)
from train_digits import load_samples, scale

import keras_accum

MIB = 2.0**20
# In units of a variable's largest weight, after all updates (measured: see README.md).
RELATIVE_BOUND = 1e-3


@dataclass(frozen=True)
class Run:
    """One training: the peak of each update in bytes, its loss, and the weights left."""

    peaks: list[int]
    losses: list[float]
    weights: Weights


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--memory", default="256MiB", help="the budget")
    add("--batch-size", type=int, default=512, help="samples per update")
    add("--blocks", type=int, default=6, help="of the transformer")
    add("--updates", type=int, default=8)
    add("--points", type=int, default=8, help="of the frontier that are measured")
    add("--learning-rate", type=float, default=0.1)
    add("--seed", type=int, default=0)
    add("--output", type=Path, default=Path("fit_in_memory_output"), help="for the PNG")
    args = parser.parse_args(argv)
    for option in ("batch_size", "blocks", "updates", "points", "learning_rate"):
        if (value := getattr(args, option)) <= 0:
            parser.error(f"--{option.replace('_', '-')} is {value}: it must be above 0")
    return args


def make_model(args: argparse.Namespace) -> keras.Model:
    """Make and compile a transformer over the 64 pixels of an image, from `--seed`."""
    keras.utils.set_random_seed(args.seed)
    layers = keras.layers
    images = keras.Input((8, 8, 1))
    pixels = layers.Reshape((64, 1))(images)
    places = layers.Embedding(64, 32)(keras.ops.arange(64))
    x = layers.Dense(32)(pixels) + places
    for _ in range(args.blocks):
        h = layers.LayerNormalization()(x)
        # The bias of a key has no gradient: what it trains to would be rounding.
        attention = layers.MultiHeadAttention(4, 8, use_bias=False)
        x = layers.Add()([x, attention(h, h)])
        h = layers.Dense(128, "gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(32)(h)])
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    model = keras.Model(images, layers.Dense(10)(x), name="transformer")
    model.compile(
        keras.optimizers.SGD(args.learning_rate, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        # In a graph the allocator tells the memory of each step that `fit` runs.
        jit_compile=False,
    )
    return model


class PeakMemory(keras.callbacks.Callback):
    """Notes the most memory in use during each step, above a level, and its loss."""

    def __init__(self, level: int) -> None:
        super().__init__()
        self.level = level
        self.peaks: list[int] = []
        self.losses: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        """Forget the peak before."""
        tf.config.experimental.reset_memory_stats(keras_device())

    def on_train_batch_end(self, batch: int, logs: dict[str, float]) -> None:
        """Note the peak, and the loss."""
        self.peaks.append(memory("peak") - self.level)
        self.losses.append(logs["loss"])


def keras_device() -> str:
    """The device that Keras trains on."""
    return "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"


def memory(key: str) -> int:
    """The bytes in use on the device, "current" or "peak"."""
    return tf.config.experimental.get_memory_info(keras_device())[key]


def train(
    args: argparse.Namespace, data: tf.data.Dataset, plan_for: str | None
) -> tuple[Run, keras_accum.Plan | None]:
    """Train from `--seed`, with a plan for the given budget or on the whole batch."""
    keras.backend.clear_session()
    gc.collect()
    level, plan = memory("current"), None
    model = make_model(args)
    if plan_for is not None:
        samples = next(iter(data))
        plan = keras_accum.plan(model, samples, memory_budget=plan_for)
        plan.apply()
    recorder = PeakMemory(level)
    model.fit(data, epochs=1, callbacks=[recorder], shuffle=False)
    weights = [v.numpy() for v in model.trainable_variables]
    # The first step traces, folds constants and tunes.
    return Run(recorder.peaks[1:], recorder.losses, weights), plan


def plot_frontier(
    axis: plt.Axes, frontier: keras_accum.Frontier, plan: keras_accum.Plan
) -> None:
    """Draw time against memory, with the plan as a point."""
    points = [*frontier.points]
    kinds = (("micro-batch alone", False, "o"), ("with recomputation", True, "s"))
    for label, recomputed, marker in kinds:
        some = [point for point in points if bool(point.recompute) is recomputed]
        memory = [point.peak_bytes / MIB for point in some]
        seconds = [point.seconds for point in some]
        axis.plot(memory, seconds, f"C7{marker}", label=label)
        for point, x, y in zip(some, memory, seconds):
            axis.annotate(
                f"{point.micro_batch_size}",
                (x, y),
                xytext=(5, 4),
                textcoords="offset points",
                fontsize=8,
            )
    axis.plot(plan.peak_bytes / MIB, plan.seconds, "C0*", ms=15, label="the plan")
    axis.axvline(plan.budget_bytes / MIB, color="k", ls="--", label="budget")
    axis.set(
        title="Time against memory, by micro-batch size",
        xlabel="peak, MiB",
        ylabel="seconds of a step",
    )
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)


def plot(
    planned: Run,
    large: Run,
    plan: keras_accum.Plan,
    frontier: keras_accum.Frontier,
    path: Path,
) -> None:
    """Draw memory and loss of both runs over the updates, and the frontier."""
    figure, (peaks, losses, times) = plt.subplots(1, 3, figsize=(17, 4.8))
    label = f"{plan.accum_steps} micro-batches of {plan.micro_batch_size}"
    if plan.recompute:
        label += ", recomputed"
    for run, name, color in ((large, "whole batch", "C3"), (planned, label, "C0")):
        updates = range(2, len(run.peaks) + 2)
        peaks.plot(updates, [p / MIB for p in run.peaks], f"{color}o-", label=name)
    budget = plan.budget_bytes / MIB
    peaks.axhline(budget, color="k", ls="--", label=f"budget, {budget:.0f} MiB")
    peaks.set(title="Memory of each step", xlabel="update", ylabel="peak, MiB")
    peaks.set_ylim(bottom=0)
    updates = range(1, len(large.losses) + 1)
    losses.plot(updates, large.losses, "C3", lw=7, alpha=0.25, label="whole batch")
    losses.plot(updates, planned.losses, "C0.--", lw=1.6, label=label)
    losses.set(title="Loss", xlabel="update", ylabel="mean cross-entropy")
    plot_frontier(times, frontier, plan)
    for axis in (peaks, losses, times):
        plain(axis)
        whole_numbers(axis.xaxis)
        legend_below(axis, columns=3)
    finish(figure, f"One update per {plan.batch_size} images", path)


def check(planned: Run, large: Run, plan: keras_accum.Plan) -> str:
    """Return the verdict on memory and weights, or exit."""
    budget, peak, needed = plan.budget_bytes, max(planned.peaks), min(large.peaks)
    if not peak <= budget:
        raise SystemExit(
            f"Failed: a step needed {peak / MIB:.1f} MiB, over the budget of "
            f"{budget / MIB:.1f} MiB."
        )
    if not needed > 1.5 * budget:
        raise SystemExit(
            f"Failed: the whole batch needs {needed / MIB:.1f} MiB only, so the run "
            "shows nothing. Give less --memory, or a larger --batch-size."
        )
    _, relative = difference(planned.weights, large.weights)
    if not relative <= RELATIVE_BOUND:
        raise SystemExit(
            f"Failed: the weights differ by {relative:.1e} relative; rounding explains "
            f"at most {RELATIVE_BOUND:.0e}."
        )
    return (
        f"Checked: no step needed more than {peak / MIB:.1f} MiB of "
        f"{budget / MIB:.1f} MiB, where the whole batch needs {needed / MIB:.1f} MiB; "
        f"the weights differ by {relative:.1e} relative."
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Plan, train twice, draw and check, as the command line says."""
    args = parse_arguments(argv)
    samples = load_samples("digits", None)[0].map(scale)
    # One order for all that read it.
    samples = samples.shuffle(2000, seed=args.seed, reshuffle_each_iteration=False)
    batches = samples.repeat().batch(args.batch_size, drop_remainder=True)
    data = batches.take(args.updates)
    planned, plan = train(args, data, args.memory)
    print(f"\n{plan}\n\nThe same in plain Keras: one update per batch")
    large, _ = train(args, data, None)
    print("\nWhat each further MiB costs:")
    model, samples = make_model(args), next(iter(data))
    frontier = keras_accum.frontier(model, samples, max_points=args.points)
    print(frontier)
    path = args.output / "memory.png"
    plot(planned, large, plan, frontier, path)
    seconds = np.round(plan.seconds, 2)
    print(f"\nPlanned step: {seconds} s\nFigure: {path}")
    print(check(planned, large, plan))


if __name__ == "__main__":
    main()
