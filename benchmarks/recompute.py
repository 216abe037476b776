"""What recomputation saves and costs: peak memory, CPU time and correctness over depth.

A chain of residual blocks, `x + dropout(gelu(dense(x)))`, one training step without an
optimizer. Peak memory is TensorFlow's allocator's, above the level before the step: the
median of several steps after two that warm up. Under XLA it is what the compiler has
assigned. The gradients of the weights are taken off in both: they are there with or
without recomputation. Methods take turns in one process for each depth and mode.

    PYTHONPATH=. python benchmarks/recompute.py --depths 6 12 24 48
"""

import argparse
import functools
import gc
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from common import format_table, in_own_process, measure, write_json

import keras_accum as ka
from keras_accum._backend.private.compiled import compiled_bytes

layers = keras.layers
MIB = 2.0**20
Forward = Callable[[tf.Tensor], tf.Tensor]
Blocks = list[Callable[[tf.Tensor], tf.Tensor]]


def build(depth: int, width: int, rate: float, norm: bool = False) -> keras.Model:
    """A chain of blocks, the same each time."""
    keras.utils.set_random_seed(0)
    inputs = hidden = keras.Input((width,))
    for i in range(depth):
        inner = layers.Dense(width, "gelu", name=f"dense_{i}")(hidden)
        if norm:
            inner = layers.BatchNormalization(name=f"norm_{i}")(inner)
        if rate:
            inner = layers.Dropout(rate, name=f"dropout_{i}")(inner)
        hidden = layers.Add(name=f"add_{i}")([hidden, inner])
    return keras.Model(inputs, hidden)


def blocks_of(model: keras.Model) -> Blocks:
    """The blocks of the chain as functions, for methods that wrap functions."""
    inner = [x for x in model.layers if not isinstance(x, layers.InputLayer)]
    ends = [i + 1 for i, x in enumerate(inner) if isinstance(x, layers.Add)]

    def block(parts: Sequence[keras.layers.Layer]) -> Forward:
        def call(x: tf.Tensor) -> tf.Tensor:
            hidden = x
            for layer in parts[:-1]:
                hidden = layer(hidden, training=True)
            return parts[-1]([x, hidden])

        return call

    return [block(inner[i:j]) for i, j in zip([0, *ends], ends, strict=False)]


def in_turn(functions: Sequence[Forward]) -> Forward:
    """One function after another."""

    def call(x: tf.Tensor) -> tf.Tensor:
        for function in functions:
            x = function(x)
        return x

    return call


def plain(make: Callable[[], keras.Model]) -> tuple[keras.Model, Forward]:
    model = make()
    return model, lambda x: model(x, training=True)


def ours(make: Callable[[], keras.Model], **how: object) -> tuple[keras.Model, Forward]:
    model, forward = plain(make)
    ka.recompute(model, **how)
    return model, forward


def remat(make: Callable[[], keras.Model]) -> tuple[keras.Model, Forward]:
    """`keras.remat` around every block."""
    model = make()
    return model, in_turn([keras.remat(block) for block in blocks_of(model)])


def raw(make: Callable[[], keras.Model]) -> tuple[keras.Model, Forward]:
    """`tf.recompute_grad` around about √depth groups of blocks."""
    model = make()
    blocks = blocks_of(model)
    size = math.ceil(len(blocks) / round(math.sqrt(len(blocks))))
    groups = [in_turn(blocks[i : i + size]) for i in range(0, len(blocks), size)]
    return model, in_turn([tf.recompute_grad(group) for group in groups])


def remat_scope(make: Callable[[], keras.Model]) -> tuple[keras.Model, Forward]:
    """`keras.RematScope` while the model is made."""
    with keras.RematScope("full"):
        return plain(make)


METHODS = {
    "plain": plain,
    "recompute, sqrt": lambda make: ours(make, segments="sqrt"),
    "keras.remat, blocks": remat,
    "tf.recompute_grad, sqrt": raw,
    "RematScope full": remat_scope,
}


def step_of(
    method: str, make: Callable[[], keras.Model], x: np.ndarray, xla: bool
) -> tuple[keras.Model, functools.partial[list[tf.Tensor]]]:
    """A training step by one method, and its model."""
    model, forward = METHODS[method](make)
    values = [v.value for v in model.trainable_variables]
    target = tf.random.stateless_normal(x.shape, (3, 4))

    @tf.function(jit_compile=xla, autograph=False)
    def gradients(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(forward(x) - target))
        return tape.gradient(loss, values)

    return model, functools.partial(gradients, tf.constant(x))


def peak(step: Callable[[], object], steps: int = 5) -> tuple[float, float]:
    """The median and the largest of the peaks of `steps` steps, in MiB."""
    found = []
    for _ in range(steps):
        gc.collect()
        tf.config.experimental.reset_memory_stats("CPU:0")
        before = tf.config.experimental.get_memory_info("CPU:0")["current"]
        step()
        after = tf.config.experimental.get_memory_info("CPU:0")["peak"]
        found.append((after - before) / MIB)
    return statistics.median(found), max(found)


def measure_depth(
    depth: int, xla: bool, width: int, rows: int, rate: float, rounds: int
) -> list[dict[str, object]]:
    """All methods at one depth: in a process of its own."""
    x = np.random.default_rng(0).standard_normal((rows, width), dtype=np.float32)
    steps, rows_of, weights = {}, {}, depth * width * (width + 1) * 4 / MIB
    for method in METHODS:
        case = {"method": method, "depth": depth, "mode": "xla" if xla else "graph"}
        try:
            _, step = step_of(method, lambda: build(depth, width, rate), x, xla)
            step(), step()
        except Exception as error:
            rows_of[method] = {**case, "error": type(error).__name__}
            continue
        # Of XLA's temporaries the allocator's pool may take twice the size.
        assigned = compiled_bytes(step.func, *step.args) / MIB if xla else 0.0
        median, largest = (assigned, assigned) if xla else peak(step)
        rows_of[method] = {**case, "mib": median - weights, "largest": largest - weights}
        steps[method] = step
    timings = measure(steps, rounds=rounds, turn_seconds=0.0)
    for method, timing in timings.items():
        rows_of[method]["seconds"] = timing.median
        rows_of[method]["spread"] = timing.spread
        ratio = timing.median / timings["plain"].median
        rows_of[method]["time"] = ratio
        rows_of[method]["memory"] = rows_of[method]["mib"] / rows_of["plain"]["mib"]
    return list(rows_of.values())


def correctness(method: str, xla: bool) -> dict[str, object]:
    """The error of the gradient with dropout, and how often seeds and statistics move."""
    x = np.random.default_rng(0).standard_normal((64, 32), dtype=np.float32)
    found = {}
    for name in ("plain", method):
        make = lambda: build(6, 32, 0.3, norm=True)  # noqa: E731
        try:
            model, step = step_of(name, make, x, xla)
            before = [v.numpy() for v in model.non_trainable_variables]
            gradients = [np.asarray(g) for g in step()]
        except Exception as error:
            return {"error": type(error).__name__}
        after = [v.numpy() for v in model.non_trainable_variables]
        found[name] = gradients, [a - b for a, b in zip(after, before, strict=True)]
    (expected, moved), (actual, moved_too) = found["plain"], found[method]
    scale = max(np.abs(g).max() for g in expected)
    error = max(np.abs(a - e).max() for a, e in zip(actual, expected, strict=True))
    seeds = [
        b[1] / a[1] for a, b in zip(moved, moved_too, strict=True) if a.shape == (2,)
    ]
    gaps = [
        np.abs(b - a).max() / np.abs(a).max()
        for a, b in zip(moved, moved_too, strict=True)
        if a.shape != (2,)
    ]
    return {
        "gradient_error": float(error / scale),
        "seeds": float(np.mean(seeds)),
        "statistics": "once" if max(gaps) < 1e-4 else "twice",
    }


def all_correctness(xla: bool) -> dict[str, dict[str, object]]:
    """`correctness` of every method: in a process of its own."""
    return {method: correctness(method, xla) for method in METHODS}


def exponent(cases: Sequence[dict[str, object]]) -> float:
    """The slope of log memory over log depth: 1 for all kept, 0.5 for a root."""
    depths = np.log([case["depth"] for case in cases])
    return float(np.polyfit(depths, np.log([case["mib"] for case in cases]), 1)[0])


def root_fit(cases: Sequence[dict[str, object]]) -> str:
    """The least-squares fit of a + b √depth, with its largest relative deviation."""
    roots = np.sqrt([case["depth"] for case in cases])
    mib = np.array([case["mib"] for case in cases])
    slope, start = np.polyfit(roots, mib, 1)
    off = np.abs(start + slope * roots - mib) / mib
    return f"{start:.0f} + {slope:.1f} √d (±{off.max():.0%})"


def report(cases: list[dict[str, object]], depths: Sequence[int]) -> str:
    """The tables, as Markdown."""
    rows = []
    for mode in ("graph", "xla"):
        for method in METHODS:
            own = [c for c in cases if c["method"] == method and c["mode"] == mode]
            if not own:
                continue
            if any("error" in c for c in own):
                error = next(c["error"] for c in own if "error" in c)
                rows.append([mode, method, *[f"{error}"] * (len(depths) + 6)])
                continue
            right = own[0].get("correctness", {})
            rows.append(
                [
                    mode,
                    method,
                    *[f"{c['mib']:.0f}" for c in own],
                    f"{exponent(own):.2f}" if len(own) > 1 else "",
                    root_fit(own) if len(own) > 1 else "",
                    " ".join(f"{c['time']:.2f}" for c in own),
                    f"{right.get('gradient_error', float('nan')):.0e}",
                    f"{right.get('seeds', float('nan')):.0f}",
                    right.get("statistics", ""),
                ]
            )
    header = ["mode", "method", *[f"MiB, {d}" for d in depths], "exponent", "fit"]
    header += ["time / plain", "gradient error", "seeds", "statistics"]
    return format_table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depths", type=int, nargs="+", default=[6, 12, 24, 48])
    parser.add_argument("--modes", nargs="+", default=["graph", "xla"])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cases: list[dict[str, object]] = []
    for mode in args.modes:
        right = in_own_process(all_correctness, mode == "xla")
        for depth in args.depths:
            shape = (args.width, args.rows, args.dropout, args.rounds)
            found = in_own_process(measure_depth, depth, mode == "xla", *shape)
            for case in found:
                case["correctness"] = right[case["method"]]
                print(case, flush=True)
            cases += found
    print(report(cases, args.depths))
    if args.json:
        write_json(args.json, cases)


if __name__ == "__main__":
    main()
