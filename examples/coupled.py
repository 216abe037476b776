"""For losses that couple the samples of a batch: one model trained in three ways.

Plain Keras on the large batch; `two_pass=True`, which should be the same; and the batch
merely split, which should not.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import digits
import keras
import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds
from comparison import Run, WeightRecorder, difference, over_epochs, plot_distances
from matplotlib.axes import Axes

import keras_accum

LARGE, TWO_PASS, SPLIT = "large batch", "two_pass=True", "merely split"
COLORS = {LARGE: "C0", TWO_PASS: "k", SPLIT: "C3"}
# Relative differences of the weights from the large batch's after the first epoch, before
# training amplifies rounding (measured: see README.md).
TWO_PASS_BOUND, SPLIT_BOUND = 1e-4, 1e-2

Arrays = tuple[np.ndarray, np.ndarray]
Runs = Mapping[str, Run]


def make_parser(
    description: str, name: str, **defaults: object
) -> argparse.ArgumentParser:
    """Make a parser of the options that both scripts have, with these defaults."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--data-dir", type=Path, help="of tensorflow-datasets; its own, if not given")
    add("--batch-size", type=int, help="images per update")
    add("--micro-batch-size", type=int, help="images in memory at once")
    add("--learning-rate", type=float)
    add("--epochs", type=int)
    add("--seed", type=int, default=0)
    add("--output", type=Path, default=Path(f"{name}_output"), help="for the PNG")
    parser.set_defaults(**defaults)
    return parser


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> argparse.Namespace:
    """Read the command line; refuse numbers that cannot be, or show nothing."""
    args = parser.parse_args(argv)
    for option in ("batch_size", "micro_batch_size", "epochs", "learning_rate"):
        if (value := getattr(args, option)) <= 0:
            parser.error(f"--{option.replace('_', '-')} is {value}: it must be above 0")
    if args.micro_batch_size >= args.batch_size:
        parser.error(
            f"--micro-batch-size {args.micro_batch_size} does not split --batch-size "
            f"{args.batch_size}: nothing is left to compare. Use a smaller one."
        )
    return args


def load_digits(data_dir: Path | None) -> list[Arrays]:
    """Return images in 0..1 and labels: those to train on, and those held out."""
    tfds.disable_progress_bar()
    builder = digits.Builder(data_dir=data_dir)
    builder.download_and_prepare()
    parts = builder.as_dataset(["train", "test"], batch_size=-1, as_supervised=True)
    return [(x.astype("float32") / 16, y) for x, y in tfds.as_numpy(parts)]


def train(
    model: keras.Model, way: str, batches: tf.data.Dataset, args: argparse.Namespace
) -> Run:
    """Train a model that is compiled, in one of the three ways."""
    print(f"\n{way}: one update per {args.batch_size} images")
    if way != LARGE:
        keras_accum.accumulate(
            model, micro_batch_size=args.micro_batch_size, two_pass=way == TWO_PASS
        )
    recorder, start = WeightRecorder(), time.perf_counter()
    history = model.fit(
        batches,
        epochs=args.epochs,
        callbacks=[recorder],
        shuffle=False,  # The data set does it; Keras warns if it is asked to.
    )
    return Run(history.history, recorder.weights, time.perf_counter() - start)


def gap(runs: Runs, way: str, epoch: int) -> float:
    """Return the largest relative difference of the weights from the large batch's."""
    return difference(runs[way].weights[epoch], runs[LARGE].weights[epoch])[1]


def table(runs: Runs, scores: Mapping[str, float], score: str) -> str:
    """Write the distances from the large batch, and a score of each way and others."""
    last = len(runs[LARGE].weights) - 1
    lines = [
        f"{'weights, from the large batch':36}\n"
        f"{'':16}{'after epoch 1':>16}{f'after epoch {last}':>16}{score:>16}"
    ]
    for name, value in scores.items():
        epochs = (1, last) if name in (TWO_PASS, SPLIT) else ()
        gaps = [f"{gap(runs, name, epoch):.1e}" for epoch in epochs] or ["", ""]
        lines.append(f"{name:16}" + "".join(f"{g:>16}" for g in gaps) + f"{value:>16.1%}")
    return "\n".join(lines)


def check(runs: Runs) -> str:
    """Return the verdict on the weights after one epoch, or exit."""
    two_pass, split = gap(runs, TWO_PASS, 1), gap(runs, SPLIT, 1)
    if not two_pass <= TWO_PASS_BOUND:  # Written so that NaN fails.
        raise SystemExit(
            "Failed: after epoch 1 the weights of two_pass=True differ from the large "
            f"batch's by {two_pass:.1e} relative; rounding explains at most "
            f"{TWO_PASS_BOUND:.0e}. Look for a layer that sees beyond its own sample, "
            "for randomness in the model, and for training that diverges."
        )
    if not split >= SPLIT_BOUND:
        raise SystemExit(
            f"Failed: after epoch 1 the batch that was merely split is only {split:.1e} "
            f"from the large batch, and should be beyond {SPLIT_BOUND:.0e}. Use smaller "
            "micro-batches or a higher learning rate: so the comparison shows nothing."
        )
    return (
        "Checked: after epoch 1 the weights differ from the large batch's by "
        f"{two_pass:.1e} relative\nwith two_pass=True, within the {TWO_PASS_BOUND:.0e} "
        f"that rounding explains, and by {split:.1e} if merely split."
    )


def plot_runs(loss: Axes, weights: Axes, runs: Runs) -> None:
    """Draw the losses, and how far the weights lie from the large batch's."""
    epochs = range(1, len(runs[LARGE].weights))
    for name in (LARGE, TWO_PASS, SPLIT):
        pale = {"lw": 7, "alpha": 0.25, "marker": "o"}
        style = pale if name == LARGE else {"ls": "--", "marker": "."}
        loss.plot(epochs, runs[name].history["loss"], COLORS[name], label=name, **style)
    shown = {name: (runs[name], COLORS[name]) for name in (TWO_PASS, SPLIT)}
    plot_distances(weights, shown, runs[LARGE])
    weights.set_title("Weights, seen from the large batch")
    for axis in (loss, weights):
        over_epochs(axis, len(epochs))
