"""Whether `plan` tells the memory that a training needs, and chooses well, and fast.

For each model, in a graph and under XLA:

- every divisor of the batch from a 32nd on is measured, without recomputation and, with
  `--joint`, with it; those that fit are timed in turns, by CPU time. That is the
  exhaustive search that `plan` is there to save;
- `plan` is given what a quarter of the batch needs, plus 2 %, and what it chooses is
  compared with the fastest of all divisors that fit;
- the plan is applied in a fresh process, where the training step of Keras runs. Under XLA
  the heap is then counted by a library that knows nothing of TensorFlow
  (`malloc_count.c`, with a C compiler on Linux; oneDNN off, so that every tensor is an
  allocation of its own). In a graph it is the allocator's peak: what TensorFlow's pool
  rounds up and cannot hand out is in use, whatever the tensors' sizes say. So it is for
  models with convolutions under XLA, whose loop stays in the graph.

With `--joint`, recomputation has to help: `plan` gets half of what the fastest plan
without it needs.

    PYTHONPATH=. python benchmarks/plan.py --json plan.json
    PYTHONPATH=. python benchmarks/plan.py --models encoder --joint
"""

import argparse
import contextlib
import dataclasses
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from common import (
    Arrays,
    Workload,
    format_table,
    in_own_process,
    make_model,
    measure,
    write_json,
)
from heap import compile_library, counting_heap, heap
from keras import layers
from timing import cpu_seconds

import keras_accum
from keras_accum._core.loop import compiles_loop
from keras_accum._planning.measure import StepProfiler
from keras_accum._planning.plan import switch_on
from keras_accum._planning.planner import _samples
from keras_accum._planning.search import candidates
from keras_accum._planning.transaction import preserving_state

MIB = 2**20
STEPS = 5

# A micro-batch size, and what is recomputed.
Kind = tuple[int, Any]


def build_mlp() -> keras.Model:
    """Sixteen dense layers of 256 units."""
    hidden = [layers.Dense(256, activation="relu") for _ in range(16)]
    return keras.Sequential([keras.Input((256,)), *hidden])


def build_cnn() -> keras.Model:
    """A convolution, and ten of one pixel, with BatchNormalization on 32 x 32 places."""
    inputs = keras.Input((64, 64, 3))
    x = layers.Conv2D(16, 3, 2, padding="same", use_bias=False)(inputs)
    for _ in range(10):
        x = layers.Activation("relu")(layers.BatchNormalization()(x))
        x = layers.Conv2D(16, 1, use_bias=False)(x)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(10, activation="softmax")(x))


def build_unet() -> keras.Model:
    """Three levels down and up on 64 x 64 images, with skip connections."""

    def convolve(x: Any, filters: int) -> Any:
        x = layers.Conv2D(filters, 3, padding="same")(x)
        return layers.Activation("relu")(layers.GroupNormalization(4)(x))

    inputs = x = keras.Input((64, 64, 3))
    skips = []
    for filters in (8, 16, 32):
        skips.append(x := convolve(x, filters))
        x = layers.AveragePooling2D(2)(x)
    x = convolve(x, 64)
    for skip in reversed(skips):
        x = layers.Concatenate()([layers.UpSampling2D()(x), skip])
        x = convolve(x, skip.shape[-1])
    return keras.Model(inputs, layers.Conv2D(3, 1)(x))


def transformer(x: Any, blocks: int, causal: bool, dropout: float) -> Any:
    """Pre-norm blocks of width 128."""
    for _ in range(blocks):
        h = layers.LayerNormalization()(x)
        h = layers.MultiHeadAttention(4, 32)(h, h, use_causal_mask=causal)
        x = x + layers.Dropout(dropout)(h)
        h = layers.LayerNormalization()(x)
        h = layers.Dense(512, activation="gelu")(h)
        x = x + layers.Dropout(dropout)(layers.Dense(128)(h))
    return x


def build_encoder() -> keras.Model:
    """Six blocks with dropout on 64 tokens, then one of ten classes."""
    tokens = keras.Input((64,), dtype="int32")
    x = transformer(layers.Embedding(1000, 128)(tokens), 6, causal=False, dropout=0.1)
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(tokens, layers.Dense(10, activation="softmax")(x))


def build_decoder() -> keras.Model:
    """Four causal blocks on 64 tokens, then the next token of 1,000."""
    tokens = keras.Input((64,), dtype="int32")
    x = transformer(layers.Embedding(1000, 128)(tokens), 4, causal=True, dropout=0.0)
    return keras.Model(tokens, layers.Dense(1000, activation="softmax")(x))


def build_backbone() -> keras.Model:
    """A BERT of keras_hub, from its configuration: four blocks of width 128."""
    import keras_hub

    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=1000,
        num_layers=4,
        num_heads=4,
        hidden_dim=128,
        intermediate_dim=512,
        max_sequence_length=64,
    )
    pooled = backbone.output["pooled_output"]
    outputs = layers.Dense(10, activation="softmax")(pooled)
    return keras.Model(backbone.input, outputs)


def sample_vectors(rows: int, rng: np.random.Generator) -> Arrays:
    """Draws input and target vectors."""
    x, y = rng.standard_normal((2, rows, 256), dtype=np.float32)
    return x, y


def sample_pixels(rows: int, rng: np.random.Generator) -> Arrays:
    """Draws images, and images to make of them."""
    x, y = rng.standard_normal((2, rows, 64, 64, 3), dtype=np.float32)
    return x, y


def sample_photos(rows: int, rng: np.random.Generator) -> Arrays:
    """Draws images and classes."""
    return sample_pixels(rows, rng)[0], rng.integers(0, 10, rows)


def sample_texts(rows: int, rng: np.random.Generator) -> Arrays:
    """Draws 64 tokens and a class."""
    return rng.integers(0, 1000, (rows, 64), dtype=np.int32), rng.integers(0, 10, rows)


def sample_next(rows: int, rng: np.random.Generator) -> Arrays:
    """Draws 64 tokens and those that follow."""
    x = rng.integers(0, 1000, (rows, 65), dtype=np.int32)
    return x[:, :-1], x[:, 1:]


def sample_bert(rows: int, rng: np.random.Generator) -> Any:
    """Draws the inputs of a BERT and a class."""
    tokens, classes = sample_texts(rows, rng)
    inputs = {
        "token_ids": tokens,
        "segment_ids": np.zeros_like(tokens),
        "padding_mask": np.ones_like(tokens),
    }
    return inputs, classes


CROSS_ENTROPY = "sparse_categorical_crossentropy"

# `micro_batch` is the whole batch here, which the planner takes apart.
WORKLOADS = {
    "mlp": Workload(4096, build_mlp, sample_vectors, "mse"),
    "cnn": Workload(64, build_cnn, sample_photos, CROSS_ENTROPY),
    "unet": Workload(32, build_unet, sample_pixels, "mse"),
    "encoder": Workload(64, build_encoder, sample_texts, CROSS_ENTROPY),
    "decoder": Workload(64, build_decoder, sample_next, CROSS_ENTROPY),
    "backbone": Workload(64, build_backbone, sample_bert, CROSS_ENTROPY),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One combination to measure."""

    model: str
    xla: bool
    joint: bool = False

    @property
    def workload(self) -> Workload:
        """The model and the data."""
        return WORKLOADS[self.model]

    def __str__(self) -> str:
        return f"{self.model} {'xla' if self.xla else 'graph'}"


def prepare(case: Case) -> tuple[keras.Model, Any]:
    """The compiled model and one batch."""
    model = make_model(case.workload)
    optimizer = keras.optimizers.Adam(1e-4)
    model.compile(optimizer, case.workload.loss, jit_compile=case.xla)
    rows = case.workload.micro_batch
    return model, case.workload.sample(rows, np.random.default_rng(0))


def as_tensors(samples: Any) -> Any:
    """The samples as a step gets them."""
    return _samples(samples, None, tf.distribute.get_strategy(), window=1)[0]


def is_compiled(case: Case) -> bool:
    """Whether XLA compiles the whole step."""
    return compiles_loop(prepare(case)[0])


def peaks_of(case: Case, kinds: Sequence[Kind]) -> dict[Kind, int]:
    """The peak of each kind of step."""
    model, samples = prepare(case)
    batch = as_tensors(samples)
    with preserving_state(model):
        profiler = StepProfiler(model, batch, switch_on)
        return {kind: profiler.measure(*kind, timed=False).peak_bytes for kind in kinds}


def seconds_of(case: Case, kinds: Sequence[Kind]) -> dict[Kind, float]:
    """The CPU seconds of a step of each kind, which take turns."""
    model, samples = prepare(case)
    batch = as_tensors(samples)
    profiler, steps = StepProfiler(model, batch, switch_on), {}
    for kind in kinds:
        with profiler.configured(*kind):
            steps[kind] = profiler.step(*kind, batch)
    methods = {
        str(kind): lambda step=step: np.asarray(step(batch)["loss"])
        for kind, step in steps.items()
    }
    timings = measure(methods, rounds=3, turn_seconds=0.1)
    return {kind: timings[str(kind)].median for kind in kinds}


def measure_plan(case: Case, budget: int, recompute: Any) -> dict[str, Any]:
    """A plan, and how long it took to make it."""
    model, samples = prepare(case)
    start, cpu = time.perf_counter(), cpu_seconds()
    plan = keras_accum.plan(
        model, samples, memory_budget=budget, recompute=recompute, verbose=0
    )
    return {
        **plan.to_dict(),
        "planning_seconds": time.perf_counter() - start,
        "planning_cpu_seconds": cpu_seconds() - cpu,
    }


def count_memory(case: Case, size: int, recompute: Any) -> tuple[int, int]:
    """The bytes that Keras's own step needs above what it starts from.

    Variables and batch are there before. The median and the largest of several steps.
    """
    model, samples = prepare(case)
    model.optimizer.build(model.trainable_variables)
    x, y, _ = as_tensors(samples)
    if recompute:
        switch_on(model, recompute)
    keras_accum.accumulate(model, micro_batch_size=size)
    level, peak = heap() if compiles_loop(model) else _allocator()
    before = level()
    model.train_on_batch(x, y)
    model.train_on_batch(x, y)
    peaks = []
    for _ in range(STEPS):
        if compiles_loop(model):
            before = level()  # What compiling has left is none of the step's.
        peaks.append(peak(lambda: model.train_on_batch(x, y)) - before)
    return int(statistics.median(peaks)), max(peaks)


def _allocator() -> tuple[Any, Any]:
    memory = tf.config.experimental

    def peak(step: Any) -> int:
        memory.reset_memory_stats("CPU:0")
        step()
        return memory.get_memory_info("CPU:0")["peak"]

    return lambda: memory.get_memory_info("CPU:0")["current"], peak


def counted(case: Case, plan: dict[str, Any], library: Path) -> tuple[int, int]:
    """`count_memory` in a process of its own, with the library loaded for XLA."""
    by_heap = os.environ["TF_ENABLE_ONEDNN_OPTS"] == "0"
    with counting_heap(library) if by_heap else contextlib.nullcontext():
        return in_own_process(
            count_memory, case, plan["micro_batch_size"], plan["recompute"]
        )


def run_plan(case: Case, library: Path) -> dict[str, Any]:
    """A plan, and what it needs, without the search of all sizes."""
    rows = case.workload.micro_batch
    quarter = in_own_process(peaks_of, case, [(rows // 4, False)])
    budget = int(quarter[rows // 4, False] * 1.02)
    plan = in_own_process(measure_plan, case, budget, False)
    return {**report(case, budget, plan, library), "best": None}


def report(
    case: Case, budget: int, plan: dict[str, Any], library: Path
) -> dict[str, Any]:
    """A plan beside what it is counted to need."""
    needed, highest = counted(case, plan, library)
    held = sum(plan["held"].values())
    return {
        "case": str(case),
        "budget": budget,
        "plan": plan,
        "counted": needed + held,
        "counted_highest": highest + held,
    }


def run_case(case: Case, library: Path) -> dict[str, Any]:
    """Everything about one case."""
    rows = case.workload.micro_batch
    options = [False, "segments=sqrt"] if case.joint else [False]
    divisors = [size for size in candidates(rows) if 32 * size >= rows]
    kinds = [(size, option) for option in options for size in divisors]
    peaks = in_own_process(peaks_of, case, kinds)
    plain = [kind for kind in peaks if not kind[1]]
    sizes = [size for size, _ in plain]
    if case.joint:
        plain_seconds = in_own_process(seconds_of, case, plain)
        best_plain = min(plain_seconds, key=plain_seconds.__getitem__)
        budget = peaks[best_plain] // 2
    else:
        best_plain = None
        budget = int(peaks[sizes[-1] // 4, False] * 1.02)
    plan = in_own_process(measure_plan, case, budget, "auto" if case.joint else False)
    chosen = (plan["micro_batch_size"], plan["recompute"])
    fitting = [kind for kind, peak in peaks.items() if peak <= budget]
    timed = {*fitting, chosen, *([best_plain] if best_plain else [])}
    seconds = in_own_process(seconds_of, case, sorted(timed, key=str))
    best = min(fitting, key=seconds.__getitem__)
    return {
        **report(case, budget, plan, library),
        "joint": case.joint,
        "best": best,
        "apart": abs(sizes.index(best[0]) - sizes.index(chosen[0])),
        "slower": seconds[chosen] / seconds[best],
        "versus_plain": seconds[chosen] / seconds[best_plain] if best_plain else None,
        "best_plain": best_plain,
        "peaks": {str(kind): peak for kind, peak in peaks.items()},
        "cpu_seconds": {str(kind): value for kind, value in seconds.items()},
    }


def row(found: dict[str, Any]) -> list[str]:
    """One line of the table."""
    plan, counted_bytes = found["plan"], found["counted"]

    def off(size: int | None) -> str:
        return "-" if size is None else f"{100 * (size / counted_bytes - 1):+.1f} %"

    def kind(size: int, recompute: Any) -> str:
        return f"{size}, recomputed" if recompute else str(size)

    best, versus = found["best"], found.get("versus_plain")
    return [
        found["case"],
        f"{found['budget'] / MIB:.1f}",
        kind(plan["micro_batch_size"], plan["recompute"]),
        "-" if best is None else kind(*best),
        "-" if best is None else f"{found['slower']:.2f}",
        f"{counted_bytes / MIB:.1f}",
        off(plan["peak_bytes"]),
        off(plan["predicted_bytes"]),
        f"{plan['planning_seconds']:.0f} ({plan['planning_cpu_seconds']:.0f} CPU) of "
        f"{max(30, 20 * plan['seconds']):.0f}",
        "-" if versus is None else f"{versus:.2f}",
    ]


HEADER = [
    "case",
    "budget, MiB",
    "planned",
    "fastest of all",
    "time ratio",
    "needed, MiB",
    "measured",
    "predicted",
    "planning, s",
    "time / best plain",
]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--xla", nargs="+", choices=["on", "off"], default=["off", "on"])
    parser.add_argument("--joint", action="store_true", help="half of the memory")
    parser.add_argument("--no-search", action="store_true", help="only the plan")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    cases = [
        Case(model, xla == "on", args.joint) for model in args.models for xla in args.xla
    ]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        library = compile_library(folder)
        for case in cases:
            by_heap = in_own_process(is_compiled, case)
            os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0" if by_heap else "1"
            run = run_plan if args.no_search else run_case
            found.append(run(case, library))
            print(format_table(HEADER, [row(found[-1])]), flush=True)
            if args.json:
                write_json(args.json, found)
    print("\n" + format_table(HEADER, [row(each) for each in found]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
