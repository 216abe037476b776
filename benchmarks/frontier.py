"""Time against memory where only as many blocks are recomputed as a budget demands.

    python benchmarks/frontier.py                  # chain, graph
    python benchmarks/frontier.py --model unet --mode xla

For budgets of the activations of 90, 75, 50 and 33 % of the plain model's, the cheapest
set of blocks that fits is found as `plan` finds it, at one micro-batch size. Ratios are of
one run: the median of the CPU times of steps over that of plain steps, measured in turn,
with half the distance of the quartiles of their ratios. `bound` is 1 + 1.1
times the share that has to go times the overhead of recomputing everything.
"""

import argparse
import os
import statistics
import time

# Before TensorFlow is imported: so that its allocator counts on any processor.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "1")

import keras
import numpy as np

from keras_accum._planning.families import Switch, choices_of
from keras_accum._planning.filled import FilledSearch
from keras_accum._planning.measure import StepProfiler
from keras_accum._planning.plan import describe
from keras_accum._planning.search import Fixed, Patience, Search

layers = keras.layers
BUDGETS = (0.9, 0.75, 0.5, 0.33)


class Residual(layers.Layer):
    """A residual block: two products, an activation, dropout."""

    def __init__(self, units: int, inner: int, **kwargs) -> None:
        super().__init__(**kwargs)
        self.first = layers.Dense(inner, "gelu")
        self.second = layers.Dense(units)
        self.dropout = layers.Dropout(0.1)
        self.inner = inner

    def build(self, shape) -> None:
        """Build the layers."""
        self.first.build(shape)
        self.second.build((*shape[:-1], self.inner))

    def call(self, x):
        """Add what the layers make of `x` to it."""
        return x + self.dropout(self.second(self.first(x)))


class Decoder(layers.Layer):
    """A block of a causal transformer."""

    def __init__(self, units: int, **kwargs) -> None:
        super().__init__(**kwargs)
        self.norms = [layers.LayerNormalization() for _ in range(2)]
        self.attention = layers.MultiHeadAttention(4, units // 4)
        self.first = layers.Dense(4 * units, "gelu")
        self.second = layers.Dense(units)
        self.units = units

    def build(self, shape) -> None:
        """Build the layers."""
        for norm in self.norms:
            norm.build(shape)
        self.attention.build(shape, shape)
        self.first.build(shape)
        self.second.build((*shape[:-1], 4 * self.units))

    def call(self, x):
        """Attend to what came before, then transform each place."""
        h = self.norms[0](x)
        x = x + self.attention(h, h, use_causal_mask=True)
        return x + self.second(self.first(self.norms[1](x)))


class Convolutions(layers.Layer):
    """Two convolutions with normalisation, of a U-Net."""

    def __init__(self, filters: int, **kwargs) -> None:
        super().__init__(**kwargs)
        self.convolutions = [layers.Conv2D(filters, 3, padding="same") for _ in range(2)]
        self.norms = [layers.BatchNormalization() for _ in range(2)]
        self.filters = filters

    def build(self, shape) -> None:
        """Build the layers."""
        for convolution, norm in zip(self.convolutions, self.norms):
            convolution.build(shape)
            shape = (*shape[:-1], self.filters)
            norm.build(shape)

    def call(self, x):
        """Convolve twice."""
        for convolution, norm in zip(self.convolutions, self.norms):
            x = keras.ops.relu(norm(convolution(x)))
        return x


def chain(depth: int = 24, unequal: bool = False) -> tuple[keras.Model, np.ndarray]:
    """Residual blocks, and samples for them."""
    inputs = hidden = keras.Input((128,))
    for i in range(depth):
        inner = 64 + 96 * (i * 5 % 8) if unequal else 384
        hidden = Residual(128, inner, name=f"block_{i}")(hidden)
    x = np.random.default_rng(0).normal(size=(1024, 128)).astype("float32")
    return keras.Model(inputs, layers.Dense(8)(hidden), name="chain"), x


def decoder() -> tuple[keras.Model, np.ndarray]:
    """A decoder of 12 blocks, and tokens for it."""
    inputs = keras.Input((64,), dtype="int32")
    hidden = layers.Embedding(256, 128)(inputs)
    for i in range(12):
        hidden = Decoder(128, name=f"block_{i}")(hidden)
    x = np.random.default_rng(0).integers(0, 256, (16, 64))
    return keras.Model(inputs, layers.Dense(8)(hidden), name="decoder"), x


def unet() -> tuple[keras.Model, np.ndarray]:
    """A U-Net of three levels, and images for it."""
    inputs = hidden = keras.Input((64, 64, 3))
    skips = []
    for i, filters in enumerate((16, 32)):
        hidden = Convolutions(filters, name=f"down_{i}")(hidden)
        skips.append(hidden)
        hidden = layers.MaxPooling2D()(hidden)
    hidden = Convolutions(64, name="middle")(hidden)
    for i, filters in enumerate((32, 16)):
        hidden = layers.Concatenate()([layers.UpSampling2D()(hidden), skips.pop()])
        hidden = Convolutions(filters, name=f"up_{i}")(hidden)
    x = np.random.default_rng(0).normal(size=(8, 64, 64, 3)).astype("float32")
    return keras.Model(inputs, layers.Conv2D(2, 1)(hidden), name="unet"), x


def keras_hub_model(name: str) -> tuple[keras.Model, object]:
    """A classifier of keras_hub from configuration, and samples for it."""
    import keras_hub

    rng = np.random.default_rng(0)
    if name == "bert":
        backbone = keras_hub.models.BertBackbone(
            256, 6, 4, 128, 512, max_sequence_length=64
        )
        model = keras_hub.models.BertTextClassifier(backbone, 3, preprocessor=None)
        tokens = rng.integers(1, 256, (16, 64))
        ones, zeros = np.ones_like(tokens), np.zeros_like(tokens)
        return model, {"token_ids": tokens, "segment_ids": zeros, "padding_mask": ones}
    backbone = keras_hub.models.ViTBackbone(
        image_shape=(64, 64, 3),
        patch_size=8,
        num_layers=6,
        num_heads=4,
        hidden_dim=128,
        mlp_dim=512,
    )
    model = keras_hub.models.ViTImageClassifier(backbone, 3, preprocessor=None)
    return model, rng.normal(size=(16, 64, 64, 3)).astype("float32")


MODELS = {
    "chain": chain,
    "unequal": lambda: chain(8, unequal=True),
    "decoder": decoder,
    "unet": unet,
    "bert": lambda: keras_hub_model("bert"),
    "vit": lambda: keras_hub_model("vit"),
}


def profiler_of(name: str, mode: str):
    """What measures steps of the model, and what can be recomputed."""
    keras.utils.set_random_seed(0)
    model, x = MODELS[name]()
    compiled = mode == "xla"
    model.compile(keras.optimizers.SGD(0.01), "mse", metrics=[], jit_compile=compiled)
    y = np.zeros(np.shape(model(x)), "float32")
    choices = choices_of(model)
    if choices is None:
        raise SystemExit(f"{name}: nothing can be recomputed.")
    batch = keras.tree.map_structure(keras.ops.convert_to_tensor, (x, y))
    return StepProfiler(model, (*batch, None), Switch(choices)), choices, len(y)


def timed(profiler, size: int, options, rounds: int) -> dict:
    """The CPU times of each step over all threads, all measured in turn."""
    seconds = {option: [] for option in options}
    for turn in range(rounds):
        # Rotated, so that no step always follows the same one.
        first = turn % len(options)
        for option in options[first:] + options[:first]:
            with profiler.configured(size, option):
                step = profiler.step(size, option, profiler.batch)
                start = time.process_time()
                profiler._call(step, profiler.batch)
                seconds[option].append(time.process_time() - start)
    return seconds


def compared(times: list[float], plain: list[float]) -> tuple[float, float]:
    """The ratio of medians, and half the distance of the quartiles of ratios by turn."""
    each = [a / b for a, b in zip(times, plain, strict=True)]
    low, _, high = statistics.quantiles(each, n=4, method="inclusive")
    return statistics.median(times) / statistics.median(plain), (high - low) / 2


def main() -> None:
    """Measure as the command line says, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="chain")
    parser.add_argument("--mode", choices=("graph", "xla"), default="graph")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    name = args.model
    profiler, choices, rows = profiler_of(name, args.mode)
    plain = profiler.measure(rows, False, True)
    everything = profiler.measure(rows, choices.everything, True)
    activations = plain.peak_bytes - profiler.held.total
    print(f"{name}, {args.mode}: activations {activations / 2**20:.1f} MiB")
    chosen = {}
    for share in BUDGETS:
        budget = int(profiler.held.total + share * activations)
        first = Search(profiler.measure, [rows], budget, False, Patience())
        first.trials[0] = plain
        fixed = Fixed(profiler.held.total, profiler.gradient_sum_bytes, profiler.floor)
        search = FilledSearch(
            profiler.measure, [rows], budget, choices, Patience(), fixed, None, first
        )
        chosen[share] = search.run_largest()
    options = {False, choices.everything, *(t.recompute for t in chosen.values() if t)}
    seconds = timed(profiler, rows, list(options), args.rounds)
    whole, spread = compared(seconds[choices.everything], seconds[False])
    left = (everything.peak_bytes - profiler.held.total) / activations
    print(f"everything recomputed: memory {left:.2f}, time {whole:.3f} ± {spread:.3f}")
    for share, trial in chosen.items():
        if trial is None:
            print(f"budget {share:.0%}: does not fit")
            continue
        used = (trial.peak_bytes - profiler.held.total) / activations
        ratio, spread = compared(seconds[trial.recompute], seconds[False])
        bound = 1 + 1.1 * (1 - share) * (whole - 1)
        print(
            f"budget {share:.0%}: memory {used:.2f}, time {ratio:.3f} ± {spread:.3f}, "
            f"bound {bound:.3f} ({describe(trial.recompute)})"
        )


if __name__ == "__main__":
    main()
