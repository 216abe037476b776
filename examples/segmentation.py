"""Train a U-Net with the Dice loss of a batch, two images in memory at a time.

The default run needs no network and takes one to two minutes on two cores:

    python examples/segmentation.py

Segmentation, of medical images above all, has memory for few images, and often a
structure that most of them lack. The Dice loss (Milletari et al., 2016, "V-Net") is then
taken over a batch, because over a micro-batch without the structure it says nothing, and
it is a quotient of sums over all images: no mean of parts. `two_pass=True` computes it
over 32 images with 2 in memory. The script trains so beside plain Keras on 32 images,
and beside a Dice per micro-batch, and fails unless the first two agree, and the third
does not.
"""

import os

# Before TensorFlow is imported: it reports its build options as warnings.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from comparison import finish, judge_learning, plt
from coupled import (
    LARGE,
    SPLIT,
    TWO_PASS,
    Arrays,
    Runs,
    check,
    load_digits,
    make_parser,
    parse,
    plot_runs,
    table,
    train,
)

CANVAS, HELD_OUT = 32, 128
DICE_BOUND = 0.5
EPOCHS = 8


def compose(pool: Arrays, count: int, target: int, seed: int) -> Arrays:
    """Put digits into noisy images; the mask is the strokes of those that are `target`.

    Any digit may come, so about a third of the images has the target, and a tenth of
    the strokes is it.
    """
    random = np.random.default_rng(seed)
    images = np.zeros((count, CANVAS, CANVAS, 1), "float32")
    masks = np.zeros_like(images)
    cells = CANVAS // 2
    for image, mask in zip(images, masks, strict=True):
        # One in each quarter, so that none covers another.
        for corner in np.ndindex(2, 2):
            top, left = np.multiply(corner, cells) + random.integers(0, cells - 8 + 1, 2)
            place = slice(top, top + 8), slice(left, left + 8)
            chosen = random.integers(len(pool[0]))
            image[place] = pool[0][chosen] * random.uniform(0.6, 1.0)
            mask[place] = (pool[0][chosen] > 0.3) & (pool[1][chosen] == target)
    images += random.normal(0, 0.1, images.shape).astype("float32")
    return images, masks


def make_model(seed: int) -> keras.Model:
    """Make a U-Net of three levels.

    GroupNormalization: it looks at one image at a time, so 16 times 2 images are the
    same to it as 32. BatchNormalization would normalise by two images, and so would
    AccumBatchNormalization, which pools only what prediction uses. Average pooling and
    SiLU, so that rounding stays rounding.
    """
    keras.utils.set_random_seed(seed)
    layers = keras.layers

    def block(hidden: keras.KerasTensor, width: int) -> keras.KerasTensor:
        for _ in range(2):
            hidden = layers.Conv2D(width, 3, padding="same", use_bias=False)(hidden)
            hidden = layers.GroupNormalization(4)(hidden)
            hidden = layers.Activation("silu")(hidden)
        return hidden

    image = hidden = keras.Input((CANVAS, CANVAS, 1))
    skipped = []
    for width in (8, 16):
        skipped.append(block(hidden, width))
        hidden = layers.AveragePooling2D(2)(skipped[-1])
    hidden = block(hidden, 32)
    for width, skip in zip((16, 8), reversed(skipped), strict=True):
        hidden = layers.Concatenate()([layers.UpSampling2D(2)(hidden), skip])
        hidden = block(hidden, width)
    # Rare from the start, as the target is: sigmoid(-2) is 0.12.
    rare = keras.initializers.Constant(-2.0)
    mask = layers.Conv2D(1, 1, activation="sigmoid", bias_initializer=rare)(hidden)
    return keras.Model(image, mask)


def compile_model(model: keras.Model, args: argparse.Namespace) -> None:
    """Compile with the Dice of Keras, over all pixels of all images that it is given.

    SGD, because Adam divides by its statistics and amplifies rounding. It is clipped,
    because the gradient of a quotient explodes where the quotient is small.
    """
    optimizer = keras.optimizers.SGD(
        args.learning_rate, momentum=0.9, nesterov=True, global_clipnorm=0.1
    )
    model.compile(optimizer, loss=keras.losses.Dice())


def training_batches(data: Arrays, size: int, seed: int) -> tf.data.Dataset:
    """Shuffle and cut into batches, the same ones for every run."""
    samples = tf.data.Dataset.from_tensor_slices(data).shuffle(len(data[0]), seed)
    return samples.batch(size).prefetch(tf.data.AUTOTUNE)


def dice(predicted: np.ndarray, truth: np.ndarray) -> float:
    """Return the Dice score of masks cut at one half, over all images together."""
    predicted, truth = predicted > 0.5, truth > 0.5
    return 2 * float((predicted & truth).sum()) / (predicted.sum() + truth.sum())


def check_learning(scores: Mapping[str, float], epochs: int) -> str:
    """Return the verdict on what was learnt, or exit."""
    said = f"The Dice score of held-out images is {scores[TWO_PASS]:.2f}"
    failed = f"{said}, and should be above {DICE_BOUND}."
    if scores[TWO_PASS] > DICE_BOUND:
        failed = None
    return judge_learning(failed, epochs, EPOCHS, "epochs") or f"Learnt: {said}."


def plot_runs_to(path: Path, runs: Runs, title: str) -> None:
    """Draw losses and distances into a PNG."""
    figure, (loss, weights) = plt.subplots(1, 2, figsize=(12, 4.8))
    plot_runs(loss, weights, runs)
    loss.set(title="Loss, over as many images as each sees", ylabel="1 - Dice")
    finish(figure, title, path)


def plot_masks(
    path: Path, held_out: Arrays, predicted: Mapping[str, np.ndarray], title: str
) -> None:
    """Draw images, and over them the truth and what each way makes of it, into a PNG."""
    images, masks = held_out
    # Four with the target, and two without, where nothing should be found.
    has = masks.any(axis=(1, 2, 3))
    chosen = [*np.flatnonzero(has)[:4], *np.flatnonzero(~has)[:2]]
    columns = {"image": None, "truth": masks, **predicted}
    shape = len(chosen), len(columns)
    figure, axes = plt.subplots(*shape, figsize=(2.1 * shape[1], 2.1 * shape[0] + 0.7))
    for row, index in zip(axes, chosen, strict=True):
        for axis, (name, mask) in zip(row, columns.items(), strict=True):
            axis.imshow(images[index], cmap="gray", vmin=0, vmax=1)
            if mask is not None:
                opaque = 0.75 * mask[index, ..., 0]
                axis.imshow(np.ones_like(opaque), cmap="autumn", alpha=opaque)
            axis.set(xticks=[], yticks=[])
            if index == chosen[0]:
                axis.set_title(name)
    finish(figure, title, path)


def main(argv: Sequence[str] | None = None) -> None:
    """Train in three ways, compare and draw, as the command line says."""
    parser = make_parser(
        __doc__.splitlines()[0],
        "segmentation",
        batch_size=32,
        micro_batch_size=2,
        learning_rate=0.1,
        epochs=EPOCHS,
    )
    add = parser.add_argument
    add("--target", type=int, default=0, choices=range(10), help="the digit to find")
    add("--images", type=int, default=512, help="to train on, composed of digits")
    args = parse(parser, argv)
    pools = load_digits(args.data_dir)
    data, held_out = [
        compose(pool, count, args.target, args.seed + i)
        for i, (pool, count) in enumerate(
            zip(pools, (args.images, HELD_OUT), strict=True)
        )
    ]
    runs, predicted = {}, {}
    for way in (SPLIT, TWO_PASS, LARGE):
        model = make_model(args.seed)
        compile_model(model, args)
        batches = training_batches(data, args.batch_size, args.seed)
        runs[way] = train(model, way, batches, args)
        predicted[way] = model.predict(held_out[0], verbose=0)
    scores = {way: dice(masks, held_out[1]) for way, masks in predicted.items()}

    title = f"Dice over {args.batch_size} images, {args.micro_batch_size} at a time"
    plot_runs_to(args.output / "training.png", runs, title)
    title = f"Held-out images: find every {args.target}"
    plot_masks(args.output / "masks.png", held_out, predicted, title)
    print(f"\nFigures: {args.output}/training.png, {args.output}/masks.png\n")
    print(f"{table(runs, scores, 'held-out Dice')}\n\n{check(runs)}")
    print(check_learning(scores, args.epochs))


if __name__ == "__main__":
    main()
