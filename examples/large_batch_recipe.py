"""Train with a large batch by the recipe of Goyal et al. 2017, and without parts of it.

The default run needs no network and takes two to three minutes on two cores:

    python examples/large_batch_recipe.py

One network is trained on handwritten digits in four ways, for the same number of epochs:
on the base batch; on a batch many times as large, at the same learning rate; with the
rate scaled by the size of the batch; and with the rate scaled and warmed up gradually.
Only the last one is to keep up with the base batch. The script fails if it does not, or
if the others do. Memory never holds more than a micro-batch: the rest is `keras_accum`.
"""

import os

# Before TensorFlow is imported: it reports its build options as warnings.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from comparison import finish, judge_learning, over_epochs, plt
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter
from train_digits import load_samples, make_model, scale, training_batches

import keras_accum


@dataclass(frozen=True)
class Recipe:
    """One way to train: the batch, and what is done about the learning rate."""

    large: bool
    scaled: bool = False
    warmed_up: bool = False


RECIPES = {
    "base batch": Recipe(large=False),
    "large batch, same rate": Recipe(large=True),
    "rate scaled": Recipe(large=True, scaled=True),
    "rate scaled and warmed up": Recipe(large=True, scaled=True, warmed_up=True),
}
EPOCHS = 30
COLORS = dict(zip(RECIPES, ("k", "C0", "C3", "C2"), strict=True))

# Per recipe, the metric of each epoch (columns) in each run (rows).
Curves = Mapping[str, Mapping[str, np.ndarray]]


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--base-batch-size", type=int, default=16)
    add("--batch-size", type=int, default=128, help="the large one")
    add("--micro-batch-size", type=int, default=16, help="samples in memory at once")
    add("--learning-rate", type=float, default=0.01, help="for the base batch")
    add("--epochs", type=int, default=EPOCHS)
    add("--warmup-epochs", type=int, default=5)
    add("--runs", type=int, default=3, help="each from another seed")
    add("--output", type=Path, default=Path("large_batch_recipe_output"))
    args = parser.parse_args(argv)

    for option, value in vars(args).items():
        if isinstance(value, (int, float)) and value <= 0:
            parser.error(f"--{option.replace('_', '-')} is {value}: it must be above 0")
    for option in ("base_batch_size", "batch_size"):
        if getattr(args, option) % args.micro_batch_size:
            parser.error(
                f"--{option.replace('_', '-')} {getattr(args, option)} is not a multiple "
                f"of --micro-batch-size {args.micro_batch_size}"
            )
    if args.warmup_epochs >= args.epochs:
        parser.error("--warmup-epochs must be below --epochs")
    return args


def learning_rate(
    args: argparse.Namespace, recipe: Recipe, samples: int
) -> keras.optimizers.schedules.LearningRateSchedule:
    """The schedule of one recipe: it drops twice, at the same epochs in all of them."""
    batch = args.batch_size if recipe.large else args.base_batch_size
    updates = math.ceil(samples / batch)
    rate = args.learning_rate
    if recipe.scaled:
        rate = keras_accum.scale_learning_rate(
            rate, batch_size=batch, base_batch_size=args.base_batch_size
        )
    drops = [updates * args.epochs * third // 3 for third in (1, 2)]
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay(
        drops, [rate, rate / 10, rate / 100]
    )
    if recipe.warmed_up:
        schedule = keras_accum.GradualWarmup(
            schedule,
            warmup_updates=updates * args.warmup_epochs,
            start_factor=args.base_batch_size / batch,
        )
    return schedule


def train(
    args: argparse.Namespace,
    samples: Sequence[tf.data.Dataset],
    recipe: Recipe,
    seed: int,
) -> dict[str, list[float]]:
    """Train once; returns the history."""
    keras.utils.set_random_seed(seed)
    train_samples, test_samples = samples
    batch = args.batch_size if recipe.large else args.base_batch_size
    model = make_model(train_samples.element_spec[0].shape)
    optimizer = keras.optimizers.SGD(
        learning_rate(args, recipe, len(train_samples)), momentum=0.9, nesterov=True
    )
    model.compile(
        keras_accum.AccumOptimizer(optimizer, batch // args.micro_batch_size),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    history = model.fit(
        training_batches(train_samples, args.micro_batch_size, seed, flip=False),
        validation_data=test_samples.map(scale).batch(256),
        epochs=args.epochs,
        callbacks=[keras_accum.AccumulationMonitor(tail="flush_epoch")],
        shuffle=False,  # The data set does it; Keras warns if it is asked to.
        verbose=0,
    )
    return history.history


def train_all(args: argparse.Namespace, samples: Sequence[tf.data.Dataset]) -> Curves:
    """Train every recipe from every seed; the metrics of all epochs."""
    curves = {}
    for name, recipe in RECIPES.items():
        runs = [train(args, samples, recipe, seed) for seed in range(args.runs)]
        curves[name] = {key: np.array([run[key] for run in runs]) for key in runs[0]}
        accuracy = 100 * curves[name]["val_accuracy"][:, -1]
        print(f"{name:26} {accuracy.mean():6.1f} % ± {accuracy.std():.1f}")
    return curves


def plot(curves: Curves, title: str, path: Path) -> None:
    """Draw loss and error of all recipes over the epochs, with the spread of the runs."""
    figure, (loss, error) = plt.subplots(1, 2, figsize=(12, 4.8))
    for name, metrics in curves.items():
        draw(loss, name, metrics["loss"])
        draw(error, name, 1 - metrics["val_accuracy"])
    loss.set(title="Training", ylabel="mean cross-entropy", yscale="log")
    error.set(title="Test", ylabel="share of wrong answers", yscale="log")
    error.yaxis.set_major_formatter(PercentFormatter(1.0))
    for axis in (loss, error):
        over_epochs(axis, metrics["loss"].shape[1])
    finish(figure, title, path)


def draw(axis: Axes, name: str, values: np.ndarray) -> None:
    """Draw the median of the runs, and the range of all of them behind it."""
    epochs = range(1, values.shape[1] + 1)
    color = COLORS[name]
    low, middle, high = values.min(0), np.median(values, 0), values.max(0)
    axis.plot(epochs, middle, color, lw=1.6, label=name)
    axis.fill_between(epochs, low, high, color=color, alpha=0.15, lw=0)


def check(curves: Curves, epochs: int) -> str:
    """Return the verdict on the losses that the recipes end with, or exit."""
    base, same, scaled, full = (
        np.median(metrics["loss"][:, -1]) for metrics in curves.values()
    )
    failed = None
    if not 2 * full < min(same, scaled):  # Written so that NaN fails.
        failed = (
            f"With the whole recipe the training loss is {full:.3f}, not below "
            f"half of {min(same, scaled):.3f}, which part of it gives. Use another "
            "--learning-rate, or a --batch-size further from the base."
        )
    return judge_learning(failed, epochs, EPOCHS, "epochs") or (
        f"Checked: the training loss ends at {full:.3f} with the whole recipe and at "
        f"{base:.3f} on the base batch; at {same:.3f} with the same rate, and at "
        f"{scaled:.3f} with a scaled one from the start."
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Train, draw and check, as the command line says."""
    args = parse_arguments(argv)
    title = (
        f"Digits: batches of {args.base_batch_size} and of {args.batch_size}, "
        f"{args.micro_batch_size} images at a time"
    )
    print(title)
    curves = train_all(args, load_samples("digits", None))
    path = args.output / "digits.png"
    plot(curves, title, path)
    print(f"Figure: {path}\n{check(curves, args.epochs)}")


if __name__ == "__main__":
    main()
