"""What the first step costs: CPU seconds to its end, of plain Keras and of each route.

A first step traces the model, prepares its graph, or compiles it, and runs once. So does
the first step with another size of batch. Through the function that `model.fit` calls:

- `plain`: no accumulation
- `built`: no accumulation, the optimizer built before, so that Keras traces once too
- `keras`: the optimizer's `gradient_accumulation_steps`
- `route1`: `keras_accum.AccumOptimizer`
- `route2`: `keras_accum.accumulate`
- `recompute`: each block recomputed, and no accumulation
- `both`: `route2` with each block recomputed

Each runs in a process of its own, in turns; figures are medians over rounds, comparisons
are ratios to `plain`. Seconds of one process differ by a quarter from minute to minute:
trust ratios of one run only.

    PYTHONPATH=. python benchmarks/first_step.py --rounds 3 --json first_step.json
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
from common import build_cnn, format_table, in_own_process, write_json
from timing import cpu_seconds

import keras_accum

STEPS = 4
TOKENS, VOCABULARY = 32, 64


def build_decoder(blocks: int = 6, width: int = 64) -> keras.Model:
    """A decoder: each block is attention and two dense layers, residual and normalised."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((TOKENS,), dtype="int32")
    hidden = keras.layers.Embedding(VOCABULARY, width)(inputs)
    for i in range(blocks):
        hidden = Block(width, name=f"block_{i}")(hidden)
    return keras.Model(inputs, keras.layers.Dense(VOCABULARY)(hidden))


class Block(keras.layers.Layer):
    """One block of a decoder."""

    def __init__(self, width: int, **options: object) -> None:
        super().__init__(**options)
        self.norms = [keras.layers.LayerNormalization() for _ in range(2)]
        self.attention = keras.layers.MultiHeadAttention(4, width // 4, dropout=0.1)
        self.wide = keras.layers.Dense(4 * width, "gelu")
        self.narrow = keras.layers.Dense(width)

    def build(self, shape: tuple[int | None, ...]) -> None:
        for norm in self.norms:
            norm.build(shape)
        self.attention.build(shape, shape)
        self.wide.build(shape)
        self.narrow.build((*shape[:-1], self.wide.units))

    def call(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        normal = self.norms[0](inputs)
        hidden = inputs + self.attention(normal, normal, use_causal_mask=True)
        return hidden + self.narrow(self.wide(self.norms[1](hidden)))


def decoder_batch(rows: int) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (rows, TOKENS))
    return tokens, np.roll(tokens, -1, 1)


def cnn_batch(rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 32, 32, 3)).astype("float32"), rng.integers(0, 10, rows)


def build_small_cnn() -> keras.Model:
    keras.utils.set_random_seed(0)
    return build_cnn()


MODELS: dict[str, tuple[Callable, Callable, bool]] = {
    "decoder": (build_decoder, decoder_batch, True),
    "cnn": (build_small_cnn, cnn_batch, False),
}
ROUTES = ("plain", "built", "keras", "route1", "route2", "recompute", "both")


def first_steps(model_name: str, route: str, xla: bool) -> tuple[float, float]:
    """CPU seconds of the first step, and of the first with another size of batch."""
    build, batch, from_logits = MODELS[model_name]
    model = build()
    if route in ("recompute", "both"):
        pattern = "block_*" if model_name == "decoder" else "conv2d_*"
        keras_accum.recompute(model, pattern)
    if route in ("route2", "both"):
        keras_accum.accumulate(model, accum_steps=STEPS)
    steps = STEPS if route == "keras" else None
    optimizer = keras.optimizers.Adam(gradient_accumulation_steps=steps)
    if route == "route1":
        optimizer = keras_accum.AccumOptimizer(optimizer, STEPS)
    if route == "built":
        optimizer.build(model.trainable_variables)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=from_logits)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=xla)
    rows = 32 if route in ("plain", "built", "recompute", "route2", "both") else 8
    found = []
    for size in (rows, rows // 2):
        x, y = batch(size)
        before = cpu_seconds()
        model.fit(x, y, batch_size=size, verbose=0)
        found.append(cpu_seconds() - before)
    return found[0], found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--routes", nargs="+", choices=ROUTES, default=list(ROUTES))
    parser.add_argument("--xla", choices=("on", "off", "both"), default="both")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    modes = {"on": [True], "off": [False], "both": [False, True]}[args.xla]
    seconds: dict[tuple[str, str, bool], list[tuple[float, float]]] = {}
    for _ in range(args.rounds):
        for case in itertools.product(args.models, args.routes, modes):
            seconds.setdefault(case, []).append(in_own_process(first_steps, *case))
            print("measured", *case, *seconds[case][-1], file=sys.stderr, flush=True)
    rows, found = [], []
    for (model, route, xla), runs in seconds.items():
        first, other = (statistics.median(column) for column in zip(*runs))
        plain = seconds.get((model, "plain", xla), runs)
        base_first, base_other = (statistics.median(c) for c in zip(*plain))
        mode = "xla" if xla else "graph"
        ratios = [f"{first / base_first:.2f}", f"{other / base_other:.2f}"]
        rows.append([model, mode, route, f"{first:.1f}", f"{other:.1f}", *ratios])
        found.append(
            {
                "model": model,
                "mode": mode,
                "route": route,
                "seconds": [list(r) for r in runs],
            }
        )
    header = ["model", "mode", "route", "first s", "other size s", "/ plain", "/ plain"]
    print(format_table(header, rows))
    if args.json:
        write_json(args.json, found)


if __name__ == "__main__":
    main()
