"""Fine-tune a backbone of keras_hub with LoRA, accumulating in both routes.

The backbone is made from a configuration, so nothing is downloaded; with a preset it is
the same. What is frozen needs no accumulator: LoRA's sums are a small part of the full
ones. Texts differ in length, and tokens weigh alike, whichever micro-batch they are in.

    pip install keras-hub
    python examples/fine_tune_lora.py

Checked: both routes end with the weights of the large batch; a mean of means does not.
"""

import os

# Before TensorFlow is imported: it reports its build options as warnings.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import argparse
from collections.abc import Callable, Sequence

import keras
import numpy as np
from comparison import difference
from source_text import HELD_OUT, PADDING, make_batch, read_texts

import keras_accum

try:
    import keras_hub
except ImportError as error:
    raise SystemExit("This example needs keras_hub: pip install keras-hub") from error

# Relative differences of the trained weights from the large batch's.
OURS_BOUND, MEANS_BOUND = 1e-4, 1e-2


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--layers", type=int, default=2)
    add("--width", type=int, default=64, help="of the backbone; a multiple of 32")
    add("--rank", type=int, default=4, help="of LoRA")
    add("--batch-size", type=int, default=16, help="texts per update")
    add("--micro-batch-size", type=int, default=2, help="texts in memory at once")
    add("--updates", type=int, default=4)
    add("--learning-rate", type=float, default=0.5)
    args = parser.parse_args(argv)
    for option, value in vars(args).items():
        if value <= 0:
            parser.error(f"--{option.replace('_', '-')} is {value}: it must be above 0")
    if args.width % 32:
        parser.error(f"--width is {args.width}: it must be a multiple of 32")
    if args.batch_size % args.micro_batch_size:
        parser.error("--batch-size must be a multiple of --micro-batch-size")
    return args


def make_model(args: argparse.Namespace, length: int, lora: bool = True) -> keras.Model:
    """Make a causal language model over bytes; with LoRA, its adapters alone train."""
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=256,
        num_layers=args.layers,
        num_heads=args.width // 32,
        hidden_dim=args.width,
        intermediate_dim=4 * args.width,
        max_sequence_length=length,
        dropout=0.0,  # Micro-batches would draw other masks than the large batch.
    )
    if lora:
        backbone.enable_lora(args.rank)
    return keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)


def accumulator_bytes(model: keras.Model) -> int:
    """The memory that accumulation adds: a float32 copy of what is trained."""
    optimizer = keras_accum.AccumOptimizer("sgd", accum_steps=2)
    optimizer.build(model.trainable_variables)
    return optimizer.accumulator_bytes


def main(argv: Sequence[str] | None = None) -> None:
    """Train in four ways, and compare."""
    args = parse_arguments(argv)
    texts = read_texts(HELD_OUT, max_length=64)[: args.batch_size * args.updates]
    x, y = make_batch(texts)
    held = (y != PADDING).astype("float32")
    inputs = {"token_ids": x, "padding_mask": (x != PADDING).astype("int32")}
    steps = args.batch_size // args.micro_batch_size

    def train(
        optimizer: keras.Optimizer,
        batch_size: int,
        prepare: Callable[[keras.Model], keras.Model] = lambda model: model,
    ) -> list[np.ndarray]:
        model = prepare(make_model(args, x.shape[1]))
        by_tokens = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="mean_with_sample_weight"
        )
        model.compile(optimizer, by_tokens, weighted_metrics=[], jit_compile=False)
        model.fit(inputs, y, batch_size, sample_weight=held, shuffle=False, verbose=0)
        return [v.numpy() for v in model.trainable_variables]

    def in_step(model: keras.Model) -> keras.Model:
        return keras_accum.accumulate(model, micro_batch_size=args.micro_batch_size)

    full, lora = (accumulator_bytes(make_model(args, x.shape[1], on)) for on in (0, 1))
    print(f"Accumulators: {lora / 1024:.0f} KiB with LoRA, {full / 1024:.0f} KiB without")
    sgd, rate = keras.optimizers.SGD, args.learning_rate
    large = train(sgd(rate), args.batch_size)
    ways = {
        "AccumOptimizer": train(
            keras_accum.AccumOptimizer(sgd(rate), steps), args.micro_batch_size
        ),
        "accumulate": train(sgd(rate), args.batch_size, in_step),
        "mean of means": train(
            sgd(rate, gradient_accumulation_steps=steps), args.micro_batch_size
        ),
    }
    errors = {name: difference(weights, large)[1] for name, weights in ways.items()}
    for name, error in errors.items():
        print(f"{name:16} differs from the large batch by {error:.0e}")
    if not max(errors["AccumOptimizer"], errors["accumulate"]) <= OURS_BOUND:
        raise SystemExit(f"Failed: rounding explains at most {OURS_BOUND:.0e}.")
    if not errors["mean of means"] >= MEANS_BOUND:
        raise SystemExit(
            f"Failed: a mean of means should be beyond {MEANS_BOUND:.0e}. Use more "
            "--updates, or a higher --learning-rate: so the comparison shows nothing."
        )
    print("Checked: both routes train as the large batch does; a mean of means does not.")


if __name__ == "__main__":
    main()
