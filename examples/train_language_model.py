"""Train a small transformer on source text, in batches that are measured in tokens.

The default run needs no network and takes one to two minutes on two cores:

    python examples/train_language_model.py

Sequences differ in length, so micro-batches differ in tokens. The mean of their mean
losses is then not the mean loss of the batch, and its gradient is another one. The
script measures how far off it is, on this model and data, and fails unless `keras_accum`
gives the gradient of the whole batch and the training makes the text more predictable.
"""

import os

# Before TensorFlow is imported: it reports its build options as warnings.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import argparse
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from comparison import (
    finish,
    judge_learning,
    legend_below,
    plain,
    plt,
    whole_numbers,
)
from gradient_error import Errors, check_errors, gradient_errors, plot_errors, table
from source_text import (
    END,
    HELD_OUT,
    MODULES,
    START,
    as_dataset,
    batches,
    entropy,
    make_batch,
    read_texts,
)

import keras_accum

AUTO = "auto"
UPDATES = 400


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--batch-tokens", type=int, default=1536, help="tokens per update, or a bit more")
    add(
        "--micro-batch-size",
        type=micro_batch_size,
        default=4,
        help="sequences in memory at once, or auto: as many as --memory has room for",
    )
    add("--memory", default="32MiB", help="for --micro-batch-size auto")
    add("--max-length", type=int, default=128, help="longer texts are cut up")
    add("--width", type=int, default=64, help="of the model; a multiple of 32")
    add("--layers", type=int, default=2)
    add("--updates", type=int, default=UPDATES)
    add("--learning-rate", type=float, default=5e-3, help="peak of a cosine decay")
    precisions = ["float32", "mixed_float16", "mixed_bfloat16"]
    add("--precision", choices=precisions, default="float32", help="of the training")
    add("--prompt", default="def ", help="what the sample at the end starts with")
    add("--temperature", type=float, default=0.6)
    add("--seed", type=int, default=0)
    add("--output", type=Path, default=Path("train_language_model_output"))
    args = parser.parse_args(argv)

    for option, value in vars(args).items():
        if isinstance(value, (int, float)) and option != "seed" and value <= 0:
            parser.error(f"--{option.replace('_', '-')} is {value}: it must be above 0")
    if args.width % 32:
        parser.error(
            f"--width is {args.width}: attention heads are 32 wide, so it must be a "
            f"multiple of 32. Use --width {math.ceil(args.width / 32) * 32}."
        )
    return args


def micro_batch_size(text: str) -> int | str:
    """Read a number of sequences, or `auto`."""
    return AUTO if text == AUTO else int(text)


@keras.saving.register_keras_serializable(package="keras_accum_examples")
class Positions(keras.layers.Layer):
    """Adds a learned vector for each place in the sequence."""

    def __init__(self, length: int, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.length = length
        self.supports_masking = True

    def build(self, input_shape: Sequence[int | None]) -> None:
        shape = (self.length, input_shape[-1])
        self.table = self.add_weight(shape=shape, initializer="uniform", name="table")

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return inputs + self.table[: keras.ops.shape(inputs)[1]]

    def get_config(self) -> dict[str, object]:
        return {**super().get_config(), "length": self.length}


def make_model(args: argparse.Namespace, precision: str) -> keras.Model:
    """Make a decoder-only transformer over bytes, from `--seed`.

    The mask of the padding travels from the embedding to the loss, which averages over
    the tokens that it lets through. No Dropout: other batch shapes draw other masks.
    """
    keras.utils.set_random_seed(args.seed)
    keras.config.set_dtype_policy(precision)
    layers, width = keras.layers, args.width
    tokens = keras.Input((None,), dtype="int32")
    hidden = layers.Embedding(256, width, mask_zero=True)(tokens)
    hidden = Positions(args.max_length + 1)(hidden)
    for _ in range(args.layers):
        normed = layers.LayerNormalization()(hidden)
        attention = layers.MultiHeadAttention(width // 32, key_dim=32)
        # `Add` and not `+`, which would lose the mask.
        hidden = layers.Add()([hidden, attention(normed, normed, use_causal_mask=True)])
        normed = layers.LayerNormalization()(hidden)
        inner = layers.Dense(4 * width, activation="gelu")(normed)
        hidden = layers.Add()([hidden, layers.Dense(width)(inner)])
    hidden = layers.LayerNormalization()(hidden)
    # float32 under mixed precision too: the loss needs the small differences.
    return keras.Model(tokens, layers.Dense(256, dtype="float32")(hidden))


def make_loss() -> keras.losses.Loss:
    """Make the mean cross-entropy over the tokens that the mask lets through."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class BitsPerByte(keras.metrics.SparseCategoricalCrossentropy):
    """Mean over all tokens seen; the `loss` that `fit` shows is a mean over batches."""

    def __init__(self) -> None:
        super().__init__("bits_per_byte", from_logits=True)

    def result(self) -> tf.Tensor:
        return super().result() / math.log(2)


def train(
    args: argparse.Namespace, texts: Sequence[bytes], held_out: Sequence[bytes]
) -> tuple[keras.Model, dict[str, list[float]]]:
    """Train one update per batch of tokens; the history starts before the first."""
    model = make_model(args, args.precision)
    warmup, epochs = args.updates // 10, min(args.updates, 10)
    schedule = keras.optimizers.schedules.CosineDecay(
        args.learning_rate / 10,
        args.updates - warmup,
        0.05,
        "cosine",
        warmup_target=args.learning_rate,
        warmup_steps=warmup,
    )
    model.compile(
        # Clips the gradient of the whole batch, once per update.
        optimizer=keras.optimizers.AdamW(schedule, weight_decay=0.1, global_clipnorm=1.0),
        loss=make_loss(),
        metrics=[BitsPerByte()],
        # XLA would compile anew for each number of sequences and each length.
        jit_compile=False,
    )
    if args.micro_batch_size == AUTO:
        # Batches differ in shape: the longest texts, and as many as a batch can have.
        longest = sorted(texts, key=len)[-args.batch_tokens // args.max_length :]
        plan = keras_accum.plan(
            model, make_batch(longest), memory_budget=args.memory, recompute=False
        )
        print(f"{plan}\n")
        args.micro_batch_size = plan.micro_batch_size
    keras_accum.accumulate(model, micro_batch_size=args.micro_batch_size)
    chunks = [held_out[i : i + 32] for i in range(0, len(held_out), 32)]
    validation = as_dataset(lambda: map(make_batch, chunks), len(chunks))
    before = model.evaluate(validation, return_dict=True, verbose=0)
    history = model.fit(
        as_dataset(
            lambda: batches(texts, args.batch_tokens, args.seed),
            tf.data.INFINITE_CARDINALITY,
        ),
        steps_per_epoch=args.updates // epochs,
        epochs=epochs,
        validation_data=validation,
        shuffle=False,  # The data set does it; Keras warns if it is asked to.
    )
    bits = [before["bits_per_byte"], *history.history["val_bits_per_byte"]]
    steps = [epoch * (args.updates // epochs) for epoch in range(epochs + 1)]
    train_bits = history.history["bits_per_byte"]
    return model, {"updates": steps, "train": train_bits, "held out": bits}


def sample(model: keras.Model, args: argparse.Namespace, length: int = 200) -> str:
    """Draw bytes one after another; a window of them is all that the model sees."""
    random = np.random.default_rng(args.seed)
    predict = tf.function(model, reduce_retracing=True)
    text = [START, *args.prompt.encode()]
    for _ in range(length):
        window = text[-args.max_length :]
        padded = np.pad(window, (0, args.max_length - len(window)))[np.newaxis]
        logits = predict(tf.constant(padded, tf.int32))[0, len(window) - 1].numpy()
        chances = np.exp((logits - logits.max()) / args.temperature)
        drawn = random.choice(256, p=chances / chances.sum())
        text.append(START if drawn == END else drawn)  # A new text where one ends.
    return bytes(text[1:]).replace(bytes([START]), b"\n").decode("utf-8", "replace")


def check_learning(bits: Sequence[float], single: float, updates: int) -> str:
    """Return the verdict on what was learnt, or exit."""
    said = (
        f"Held-out text takes {bits[-1]:.2f} bits per byte, from {bits[0]:.2f} untrained "
        f"and {single:.2f} by the frequencies of single bytes."
    )
    failed = None if bits[-1] < single - 0.25 else said
    return judge_learning(failed, updates, UPDATES, "updates") or f"Learnt: {said}"


def plot(
    curves: dict[str, list[float]],
    single: float,
    errors: Sequence[Errors],
    title: str,
    path: Path,
) -> None:
    """Draw the learning curves and the errors of the gradients into a PNG."""
    figure, (learning, bars) = plt.subplots(1, 2, figsize=(12, 4.8))
    held_out, updates = curves["held out"], curves["updates"]
    learning.plot(updates[1:], curves["train"], "C0", marker=".", label="training text")
    learning.plot(updates, held_out, "C3", marker=".", label=f"held out: {HELD_OUT}.py")
    learning.axhline(single, color="0.5", ls=":", label="frequencies of single bytes")
    learning.set(title="Learning", xlabel="update", ylabel="bits per byte", ylim=(2, 9))
    legend_below(learning, columns=1)

    plot_errors(bars, errors)
    plain(learning)
    whole_numbers(learning.xaxis)
    finish(figure, title, path)


def title(args: argparse.Namespace) -> str:
    """What is trained, in a line."""
    return (
        f"Transformer on bytes, {args.precision}: one update per {args.batch_tokens} "
        f"tokens, {args.micro_batch_size} sequences at a time"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, train, measure again, sample and draw, as the command line says."""
    args = parse_arguments(argv)
    texts = [text for name in MODULES for text in read_texts(name, args.max_length)]
    held_out = read_texts(HELD_OUT, args.max_length)
    print(f"{title(args)}\n{len(texts):,} texts, {sum(map(len, texts)):,} bytes")
    # In float32 whatever --precision: this is about the average, not about rounding.
    exact = make_model(args, "float32")
    batch = next(batches(texts, args.batch_tokens, args.seed))
    before = gradient_errors(exact, make_loss(), batch)
    model, curves = train(args, texts, held_out)
    exact.set_weights(model.get_weights())
    after = gradient_errors(exact, make_loss(), batch)

    path = args.output / f"{args.precision}.png"
    single = entropy(held_out)
    plot(curves, single, (before, after), title(args), path)
    print(f"\nA sample:\n\n{textwrap.indent(sample(model, args), '    ')}\n")
    print(f"Figure: {path}\n\n{table(before, after)}\n")
    print(check_errors((before, after)))
    print(check_learning(curves["held out"], single, args.updates))


if __name__ == "__main__":
    main()
