"""Fit larger micro-batches into the same memory: a deep transformer that recomputes.

The language model of train_language_model.py, deeper. The default run needs no network
and takes about two minutes on two cores:

    python examples/recompute_transformer.py

It measures the peak memory and the time of a training step that keeps all activations,
that recomputes each block, about √N segments, or each block but for its products of
matrices; and the largest micro-batch that fits into `--memory`. The script fails unless
the gradients are those of the model that keeps everything, and the memory falls.
"""

import os

# Before TensorFlow is imported: it reports its build options as warnings.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Likewise: else the allocator of CPUs counts only where oneDNN is on by default.
os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "1")

import argparse
import gc
import resource
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from comparison import finish, legend_below, plain, plt
from matplotlib.ticker import PercentFormatter
from source_text import MODULES, Batch, make_batch, read_texts
from train_language_model import make_loss, make_model

import keras_accum

MIB = 2.0**20
SIZES = (2, 4, 8, 16)
# What a graph has to compute twice changes the order of some sums.
GRADIENT_BOUND, MEMORY_BOUND = 1e-5, 0.5
Step = Callable[[np.ndarray, np.ndarray], list[tf.Tensor]]


@dataclass(frozen=True)
class Result:
    """What a way of training takes.

    Attributes:
        name: of the way.
        peaks: for each micro-batch size, MiB above the level before the step.
        seconds: CPU time of a step on the largest of these sizes.
        largest: the largest micro-batch that fits.
        error: largest difference of a gradient, in units of the largest gradient.
    """

    name: str
    peaks: dict[int, float]
    seconds: float
    largest: int
    error: float


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--layers", type=int, default=12)
    add("--width", type=int, default=64, help="of the model; a multiple of 32")
    add("--max-length", type=int, default=128)
    add("--memory", type=float, default=64.0, help="MiB for a training step")
    add("--seed", type=int, default=0)
    add("--output", type=Path, default=Path("recompute_transformer_output"))
    args = parser.parse_args(argv)
    for option in ("layers", "width", "max_length", "memory"):
        if getattr(args, option) <= 0:
            parser.error(f"--{option.replace('_', '-')} must be above 0")
    if args.width % 32:
        parser.error(f"--width is {args.width}: it must be a multiple of 32")
    return args


def ways(layers: int) -> dict[str, dict[str, object]]:
    """Name the ways to train, with the arguments of `recompute` for each."""
    # Of each block: four products in its attention, two in its feed-forward part.
    products = ["query", "key", "value", "attention_output", "dense*"]
    return {
        "keep all": {},
        "recompute blocks": {"segments": layers},
        "recompute √N": {"segments": "sqrt"},
        "blocks, products kept": {"segments": layers, "keep": products},
    }


def make_step(model: keras.Model) -> Step:
    """Make a function for the gradients of a micro-batch, for every size one graph."""
    loss_of = make_loss()
    values = [v.value for v in model.trainable_variables]

    @tf.function(input_signature=[tf.TensorSpec((None, None), tf.int32)] * 2)
    def gradients(inputs: tf.Tensor, targets: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = loss_of(targets, model(inputs, training=True))
        return [tf.convert_to_tensor(g) for g in tape.gradient(loss, values)]

    return gradients


def peak(step: Step, batch: Batch, steps: int = 2) -> float:
    """Return the largest of the peaks of some steps."""
    found = []
    for _ in range(steps):
        gc.collect()
        tf.config.experimental.reset_memory_stats("CPU:0")
        before = tf.config.experimental.get_memory_info("CPU:0")["current"]
        step(*batch)
        after = tf.config.experimental.get_memory_info("CPU:0")["peak"]
        found.append((after - before) / MIB)
    return max(found)


def cpu_time(step: Step, batch: Batch, steps: int = 5) -> float:
    """Return the median CPU time of some steps, over all threads."""

    def now() -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime

    found = []
    for _ in range(steps):
        start = now()
        step(*batch)
        found.append(now() - start)
    return statistics.median(found)


def largest_fitting(size: Callable[[int], float], memory: float) -> int:
    """Return the largest micro-batch whose measured peak is within `memory`, or 0."""
    low, high = 0, 1
    while size(high) <= memory:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle) <= memory else (low, middle)
    return low


def measure(
    name: str,
    how: dict[str, object],
    args: argparse.Namespace,
    texts: Sequence[bytes],
    expected: Sequence[np.ndarray] | None,
) -> tuple[Result, list[np.ndarray]]:
    """Measure one way to train, and compare its gradients with `expected`."""
    model = make_model(args, "float32")
    if how:
        keras_accum.recompute(model, **how)
    step = make_step(model)

    def batch_of(size: int) -> Batch:
        return make_batch([texts[i % len(texts)] for i in range(size)])

    found = [np.asarray(g) for g in step(*batch_of(4))]
    pairs = list(zip(found, found if expected is None else expected, strict=True))
    scale = max(np.abs(e).max() for _, e in pairs)
    result = Result(
        name,
        {size: peak(step, batch_of(size)) for size in SIZES},
        cpu_time(step, batch_of(SIZES[-1])),
        largest_fitting(lambda size: peak(step, batch_of(size)), args.memory),
        max(float(np.abs(f - e).max()) for f, e in pairs) / float(scale),
    )
    return result, found


def table(results: Sequence[Result], memory: float) -> str:
    """Write the results as a table."""
    size, first = SIZES[-1], results[0]
    head = (
        f"{'':24}{'MiB':>8}{'of all':>8}{'CPU s':>8}{'of all':>8}{'fits':>6}{'error':>9}"
    )
    rows = [
        f"{r.name:24}{r.peaks[size]:8.0f}{r.peaks[size] / first.peaks[size]:8.2f}"
        f"{r.seconds:8.2f}{r.seconds / first.seconds:8.2f}{r.largest:6d}{r.error:9.0e}"
        for r in results
    ]
    note = (
        f"MiB and CPU s: a step on {size} sequences. fits: sequences in {memory:.0f} MiB."
    )
    return "\n".join([head, *rows, note])


def check(results: Sequence[Result]) -> str:
    """Return the verdict, or exit."""
    size, (first, *others) = SIZES[-1], results
    wrong = [r.name for r in others if r.error > GRADIENT_BOUND]
    if wrong:
        raise SystemExit(f"Failed: other gradients than the model's own in {wrong}.")
    shares = [r.peaks[size] / first.peaks[size] for r in others[:2]]
    if max(shares) > MEMORY_BOUND:
        raise SystemExit(f"Failed: recomputed, a step takes {max(shares):.0%} of memory.")
    return (
        f"Checked: gradients within {GRADIENT_BOUND:.0e}; recomputed, a step takes "
        f"{shares[0]:.0%} (blocks) and {shares[1]:.0%} (√N) of the memory."
    )


def plot(results: Sequence[Result], memory: float, title: str, path: Path) -> None:
    """Draw memory against time, and memory against the micro-batch, into a PNG."""
    figure, (costs, growth) = plt.subplots(1, 2, figsize=(12.5, 4.8))
    size, first = SIZES[-1], results[0]
    rows = np.arange(len(results))
    shares = {
        "peak memory": [r.peaks[size] / first.peaks[size] for r in results],
        "CPU time": [r.seconds / first.seconds for r in results],
    }
    for offset, (label, values) in zip((-0.2, 0.2), shares.items(), strict=True):
        color = {"peak memory": "0.35", "CPU time": "0.75"}[label]
        bars = costs.barh(rows + offset, values, 0.36, color=color, label=label)
        costs.bar_label(bars, [f"{value:.0%}" for value in values], padding=3)
    costs.set(title=f"A step on {size} sequences", xlabel="of keeping all", xlim=(0, 1.7))
    costs.xaxis.set_major_formatter(PercentFormatter(1.0))
    costs.set_yticks(rows, [result.name for result in results])
    costs.invert_yaxis()
    legend_below(costs)
    for i, result in enumerate(results):
        label = f"{result.name}: {result.largest} fit"
        peaks = list(result.peaks.values())
        growth.plot(list(result.peaks), peaks, f"C{i}", marker="o", ms=4, label=label)
    growth.axhline(memory, color="0.5", ls=":", label=f"{memory:.0f} MiB")
    growth.set(title="Peak memory", xlabel="sequences in a micro-batch", ylabel="MiB")
    growth.set_xscale("log", base=2)
    growth.set_yscale("log", base=2)
    growth.set_xticks(SIZES, [str(s) for s in SIZES])
    growth.yaxis.set_major_formatter("{x:.0f}")
    legend_below(growth)
    for axis in (costs, growth):
        plain(axis)
    finish(figure, title, path)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every way, print, draw and check, as the command line says."""
    args = parse_arguments(argv)
    # Long ones only: every micro-batch has the same length.
    texts = [text for name in MODULES for text in read_texts(name, args.max_length)]
    texts = [text for text in texts if len(text) == args.max_length]
    title = f"Transformer of {args.layers} blocks, width {args.width}, on bytes"
    print(title)
    results: list[Result] = []
    expected = None
    for name, how in ways(args.layers).items():
        result, gradients = measure(name, how, args, texts, expected)
        expected = gradients if expected is None else expected
        results.append(result)
    path = args.output / "memory.png"
    plot(results, args.memory, title, path)
    print(f"\n{table(results, args.memory)}\n\nFigure: {path}\n\n{check(results)}")


if __name__ == "__main__":
    main()
