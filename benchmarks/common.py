"""Models, measuring and reports that the benchmarks share; no optimizer in sight.

CPU time is the user and system time of the process over all its threads. It is what
a shared machine disturbs least, and it counts the work that threads do in parallel.
Methods take turns: every round runs each of them for the same number of windows, so
that a slow minute of the machine falls on all alike. Figures are medians over
rounds, comparisons are ratios of medians.
"""

import dataclasses
import functools
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from samples import Arrays, sample_images, sample_tokens, sample_vectors
from timing import Timing, time_windows

Layers = Any  # `keras`, or another module that has its names


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model to train and data of its kind.

    Attributes:
        micro_batch: samples that pass through the model at once.
        build: makes the model; its weights are the same each time.
        sample: makes `rows` samples and their targets.
        loss: the name of a Keras loss.
    """

    micro_batch: int
    build: Callable[[], keras.Model]
    sample: Callable[[int, np.random.Generator], Arrays]
    loss: str


def build_mlp(width: int = 1024, k: Layers = keras) -> keras.Model:
    """Six dense layers; of 1,024 units, 6.3 million weights and little arithmetic."""
    layers = [k.layers.Dense(width, activation="relu") for _ in range(6)]
    return k.Sequential([k.Input((width,)), *layers])


def build_cnn(k: Layers = keras) -> keras.Model:
    """Four convolutions on 32 x 32 images: 0.1 million weights, much arithmetic."""

    def convolution(filters: int, strides: int) -> keras.layers.Layer:
        return k.layers.Conv2D(
            filters, 3, strides=strides, padding="same", activation="relu"
        )

    return k.Sequential(
        [
            k.Input((32, 32, 3)),
            convolution(16, 1),
            convolution(32, 2),
            convolution(64, 2),
            convolution(128, 2),
            k.layers.GlobalAveragePooling2D(),
            k.layers.Dense(10, activation="softmax"),
        ]
    )


def build_transformer(mask_zero: bool = False, k: Layers = keras) -> keras.Model:
    """Two pre-norm blocks of width 128 on 64 tokens, with a sparse embedding."""
    tokens = k.Input((64,), dtype="int32")
    x = k.layers.Embedding(1000, 128, mask_zero=mask_zero)(tokens)
    for _ in range(2):
        h = k.layers.LayerNormalization()(x)
        x = x + k.layers.MultiHeadAttention(4, 32)(h, h)
        h = k.layers.LayerNormalization()(x)
        h = k.layers.Dense(512, activation="relu")(h)
        x = x + k.layers.Dense(128)(h)
    return k.Model(tokens, k.layers.Dense(1000, activation="softmax")(x))


WORKLOADS = {
    "mlp": Workload(8, build_mlp, sample_vectors, "mse"),
    "small": Workload(
        32,
        functools.partial(build_mlp, 256),
        functools.partial(sample_vectors, width=256),
        "mse",
    ),
    "cnn": Workload(8, build_cnn, sample_images, "sparse_categorical_crossentropy"),
    "transformer": Workload(
        8, build_transformer, sample_tokens, "sparse_categorical_crossentropy"
    ),
    # The loss counts the tokens under a mask that travels through the model.
    "masked": Workload(
        8,
        functools.partial(build_transformer, mask_zero=True),
        functools.partial(sample_tokens, longest_padding=48),
        "sparse_categorical_crossentropy",
    ),
}


def make_model(workload: Workload) -> keras.Model:
    """Builds the model of `workload` with the weights that it always starts from."""
    keras.utils.set_random_seed(0)
    return workload.build()


def endless_batches(workload: Workload, rows: int, count: int = 4) -> tf.data.Dataset:
    """Yields batches of `rows` samples for ever: `count` different ones, from memory.

    Nothing is prefetched: a thread that works ahead would charge one method's data to
    the next one's turn.
    """
    data = workload.sample(rows * count, np.random.default_rng(0))
    batched = tuple(a.reshape(count, rows, *a.shape[1:]) for a in data)
    return tf.data.Dataset.from_tensor_slices(batched).repeat()


def measure(
    methods: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    turn_seconds: float,
    windows: int | None = None,
) -> dict[str, Timing]:
    """Times methods in alternation.

    Args:
        methods: name -> function that runs one window.
        rounds: how often each method has its turn.
        turn_seconds: the least CPU time of the cheapest method's turn; it sets the
            number of windows in a turn, which is the same for all methods.
        windows: that number, where processes that wait for each other must agree on it.

    Returns:
        name -> its times. Two windows of each method run before, unmeasured: they
        trace and compile.
    """
    cheapest = float("inf")
    for run_window in methods.values():
        time_windows(run_window, 2)
        cheapest = min(cheapest, time_windows(run_window, 2)[0])
    windows = windows or max(1, round(turn_seconds / cheapest))
    timings = {name: Timing([], []) for name in methods}
    names = list(methods)
    for turn in range(rounds):
        # Rotated, so that no method always follows the same one's cache and heap.
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            cpu, wall = time_windows(methods[name], windows)
            timings[name].cpu.append(cpu)
            timings[name].wall.append(wall)
    return timings


def in_own_process(function: Callable[..., Any], *args: object) -> Any:
    """Calls a module-level function in a fresh process and returns what it returns.

    What one case leaves behind (heap, compiled programs, threads) would otherwise
    weigh on the next.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def describe_machine() -> dict[str, str | int | None]:
    """Returns what the figures depend on."""
    return {
        "cores": os.cpu_count(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "dtype": keras.config.floatx(),
    }


def format_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns a Markdown table with aligned columns."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    lines = (" | ".join(map(str.ljust, row, widths)) for row in cells)
    return "\n".join(f"| {line} |" for line in lines)


def write_json(path: Path, cases: Sequence[Mapping[str, object]]) -> None:
    """Writes the machine and the cases that were measured on it."""
    report = {"machine": describe_machine(), "cases": cases}
    path.write_text(json.dumps(report, indent=2) + "\n")
