"""What a step over micro-batches holds in memory, beside a plain step on one of them.

The peak of the heap during a training step, above the level before it: activations,
gradients and, for ours, the sums of the window. Weights, slots and the batch are there
before and do not count. The heap is counted by a library that knows nothing of TensorFlow
(`malloc_count.c`: with a C compiler, on Linux), and oneDNN is off, so that each tensor is
an allocation of its own. A batch of 128 samples is trained whole and in micro-batches of
128, 32, 8 and 2, beside a plain step on a batch of that size. Each case has a process of
its own; the median of 5 steps is taken, after 3 unmeasured ones.

    PYTHONPATH=. python benchmarks/window_memory.py --check --json window_memory.json
"""

import argparse
import itertools
import sys
import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from common import (
    WORKLOADS,
    format_table,
    in_own_process,
    write_json,
)
from heap import compile_library, counting_heap, peak_above_level
from windows import Case, compile_model

import keras_accum

BATCH = 128
SIZES = (128, 32, 8, 2)
LIMIT = 1.15
MIB = 2.0**20
HEADER = ["model", "XLA", "micro-batch", "plain step, MiB", "ours, MiB", "sums, MiB"]
HEADER += ["(ours - sums) / plain", "ours / whole batch"]


def peak_of_a_step(case: Case, rows: int, micro_batch: int | None) -> float:
    """Returns the peak of a step on `rows` samples, in bytes; called in its own process.

    Args:
        case: the model, and whether XLA compiles it.
        rows: samples of a batch.
        micro_batch: samples of a micro-batch, or None for a plain step.
    """

    def prepare(model: keras.Model) -> None:
        if micro_batch is not None:
            keras_accum.accumulate(model, micro_batch_size=micro_batch)

    model = compile_model(case, keras.optimizers.Adam(), prepare=prepare)
    samples = case.workload.sample(rows, np.random.default_rng(0))
    x, y = (tf.constant(each) for each in samples)
    return peak_above_level(lambda: model.train_on_batch(x, y))


def parameter_bytes(case: Case) -> int:
    """Returns the bytes of the parameters, in float32; in its own process."""
    return 4 * case.workload.build().count_params()


def measure_case(case: Case) -> list[dict[str, float]]:
    """Returns what each size of micro-batch needs, in bytes."""
    sums = in_own_process(parameter_bytes, case)
    whole = in_own_process(peak_of_a_step, case, BATCH, None)
    return [
        {
            "micro_batch": size,
            "plain": in_own_process(peak_of_a_step, case, size, None),
            "ours": in_own_process(peak_of_a_step, case, BATCH, size),
            "sums": sums,
            "whole": whole,
        }
        for size in SIZES
    ]


def ratio(figures: dict[str, float]) -> float:
    """Returns ours beside the sums, as a part of a plain step on a micro-batch."""
    return (figures["ours"] - figures["sums"]) / figures["plain"]


def table_row(case: Case, figures: dict[str, float]) -> list[str]:
    """Returns a row under `HEADER`."""
    return [
        case.model,
        "on" if case.xla else "off",
        str(figures["micro_batch"]),
        *(f"{figures[name] / MIB:.1f}" for name in ("plain", "ours", "sums")),
        f"{ratio(figures):.2f}",
        f"{figures['ours'] / figures['whole']:.2f}",
    ]


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    names = ["cnn", "transformer", "mlp"]
    add("--models", nargs="+", choices=WORKLOADS, default=names)
    add("--xla", nargs="+", choices=["on", "off"], default=["on", "off"])
    add("--json", type=Path, help="write every figure here")
    add("--check", action="store_true", help=f"fail if a ratio is above {LIMIT}")
    return parser.parse_args()


def main() -> None:
    """Measures all cases, prints the table and judges the ratios."""
    arguments = parse_arguments()
    rows, misses = [], []
    records: list[dict[str, object]] = []
    for model, xla in itertools.product(arguments.models, arguments.xla):
        case = Case(model, xla == "on", 1)
        with (
            tempfile.TemporaryDirectory() as folder,
            counting_heap(compile_library(folder)),
        ):
            measured = measure_case(case)
        for figures in measured:
            rows.append(table_row(case, figures))
            records.append({"model": model, "xla": xla, **figures})
            if ratio(figures) > LIMIT:
                misses.append(" ".join(rows[-1]))
        print(f"measured {model} xla={xla}", file=sys.stderr)
        if arguments.json:
            write_json(arguments.json, records)
    print(format_table(HEADER, rows))
    if arguments.check and misses:
        sys.exit("\n".join([f"above {LIMIT}:", *misses]))


if __name__ == "__main__":
    main()
