"""Train a contrastive encoder on micro-batches, with the negatives of the whole batch.

The default run needs no network and takes one to two minutes on two cores:

    python examples/contrastive.py

Two views of an image attract each other and repel the views of all other images of the
batch (NT-Xent, Chen et al., 2020, "A Simple Framework for Contrastive Learning of Visual
Representations"). A batch that is merely split loses the images that lie in other
micro-batches: no weighting brings them back. `two_pass=True` does. The script trains
both from the same seed beside plain Keras on the large batch, and fails unless the first
ends with its weights and the second does not.
"""

import os

# Before TensorFlow is imported: it reports its build options as warnings.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from comparison import finish, judge_learning, plain, plt
from coupled import (
    COLORS,
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
from matplotlib.ticker import PercentFormatter
from sklearn.manifold import TSNE
from sklearn.neighbors import KNeighborsClassifier

TEMPERATURE = 0.2
EPOCHS = 30


def augment(images: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Turn, stretch, shift, dim and roughen images of 8 x 8, each in its own way."""
    count = tf.shape(images)[0]

    def draw(stream: int, low: float, high: float, *shape: int) -> tf.Tensor:
        own = seed + tf.constant([0, stream], seed.dtype)
        return tf.random.stateless_uniform((count, *shape), own, low, high)

    angle, size, squeeze = draw(1, -0.4, 0.4), draw(2, 0.85, 1.2), draw(3, 0.85, 1.15)
    cos, sin = tf.cos(angle) * size, tf.sin(angle) * size
    shift, zero = draw(4, -1.2, 1.2, 2), tf.zeros_like(angle)
    rows = [
        (cos * squeeze, -sin * squeeze, shift[:, 0]),
        (sin / squeeze, cos / squeeze, shift[:, 1]),
    ]
    # The last term of a row keeps the middle of the image, at 3.5, where it is.
    terms = [t for a, b, c in rows for t in (a, b, c + 3.5 - 3.5 * (a + b))]
    transforms = tf.stack([*terms, zero, zero], axis=1)
    moved = keras.ops.image.affine_transform(images, transforms)
    moved *= draw(5, 0.6, 1.1, 1, 1, 1)
    return moved + draw(6, -0.15, 0.15, 8, 8, 1)


def training_batches(data: Arrays, size: int, seed: int) -> tf.data.Dataset:
    """Cut into batches, and make two views of each whole batch.

    Everything random happens before the step splits a batch, and depends on the seed
    alone: every run sees the same views in the same batches.
    """
    seeds = tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=True)
    samples = tf.data.Dataset.from_tensor_slices(data).shuffle(len(data[0]), seed)
    pairs = tf.data.Dataset.zip(samples.batch(size), seeds.batch(4))

    def view(batch: tuple[tf.Tensor, tf.Tensor], seed: tf.Tensor) -> tuple:
        images, labels = batch
        views = [augment(images, seed[:2]), augment(images, seed[2:])]
        return tf.stack(views, axis=1), labels

    return pairs.map(view).prefetch(tf.data.AUTOTUNE)


def make_model(seed: int) -> tuple[keras.Model, keras.Model]:
    """Make an encoder, and a model that takes the two views of an image through it.

    The encoder sees each image alone: GroupNormalization, not BatchNormalization, so
    that the loss is the only thing that couples the samples of a batch. Smooth
    activations and pooling, so that rounding stays rounding.
    """
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    image = hidden = keras.Input((8, 8, 1))
    for width in (32, 64):
        hidden = layers.Conv2D(width, 3, padding="same")(hidden)
        hidden = layers.GroupNormalization(8)(hidden)
        hidden = layers.AveragePooling2D(2)(layers.Activation("silu")(hidden))
    features = layers.Dense(128, activation="silu")(layers.Flatten()(hidden))
    encoder = keras.Model(image, features)
    # The loss sees a projection; the features before it are what is kept (SimCLR, 4.2).
    projection = layers.UnitNormalization()(layers.Dense(32)(features))
    project = keras.Model(image, projection)

    views = keras.Input((2, 8, 8, 1))
    flat = keras.ops.reshape(views, (-1, 8, 8, 1))
    pairs = keras.ops.reshape(project(flat), (-1, 2, 32))
    return encoder, keras.Model(views, pairs)


def nt_xent(labels: tf.Tensor, pairs: tf.Tensor) -> tf.Tensor:
    """Return for each pair how badly one view tells the other from all other views."""
    del labels  # They are never looked at.
    count = tf.shape(pairs)[0]
    views = tf.concat([pairs[:, 0], pairs[:, 1]], axis=0)
    logits = tf.matmul(views, views, transpose_b=True) / TEMPERATURE
    # No view is its own neighbour.
    logits = tf.linalg.set_diag(logits, tf.fill([2 * count], -1e9))
    partners = tf.roll(tf.range(2 * count), count, axis=0)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(partners, logits)
    return (losses[:count] + losses[count:]) / 2


def compile_model(model: keras.Model, args: argparse.Namespace, samples: int) -> None:
    """Compile with SGD: Adam divides by its statistics, and amplifies rounding."""
    updates = args.epochs * math.ceil(samples / args.batch_size)
    schedule = keras.optimizers.schedules.CosineDecay(args.learning_rate, updates)
    model.compile(keras.optimizers.SGD(schedule, momentum=0.9), loss=nt_xent)


def accuracy(features: Sequence[np.ndarray], labels: Sequence[np.ndarray]) -> float:
    """Return how often the 5 nearest training images name the right digit."""
    neighbors = KNeighborsClassifier(5, metric="cosine")
    neighbors.fit(features[0].reshape(len(labels[0]), -1), labels[0])
    return neighbors.score(features[1].reshape(len(labels[1]), -1), labels[1])


def check_learning(accuracies: Mapping[str, float], epochs: int) -> str:
    """Return the verdict on what was learnt, or exit."""
    found, pixels = accuracies[TWO_PASS], accuracies["pixels"]
    said = (
        f"By their features {found:.1%} of the digits are found, by pixels {pixels:.1%}."
    )
    failed = None if found > pixels else said
    return judge_learning(failed, epochs, EPOCHS, "epochs") or f"Learnt: {said}"


def plot(
    runs: Runs,
    accuracies: Mapping[str, float],
    scatter: Arrays,
    title: str,
    path: Path,
) -> None:
    """Draw losses, distances, accuracies and a map of the test images into a PNG."""
    figure, ((loss, weights), (bars, points)) = plt.subplots(2, 2, figsize=(12, 9))
    plot_runs(loss, weights, runs)
    loss.set(title="Loss, over as many negatives as each sees", ylabel="NT-Xent")

    drawn = bars.barh(
        list(accuracies),
        list(accuracies.values()),
        color=[COLORS.get(name, "0.7") for name in accuracies],
        alpha=0.8,
    )
    bars.bar_label(drawn, fmt="{:.1%}", padding=4)
    bars.invert_yaxis()
    bars.set(title="Digits found by 5 neighbours, test images augmented", xlim=(0, 1))
    bars.set_xlabel("share of the test images")
    bars.xaxis.set_major_formatter(PercentFormatter(1.0))
    plain(bars)

    features, labels = scatter
    places = TSNE(metric="cosine", init="pca", random_state=0).fit_transform(features)
    for digit in range(10):
        chosen = places[labels == digit]
        points.scatter(*chosen.T, s=70, marker=f"${digit}$", color=f"C{digit}", lw=0.3)
    points.set(title=f"Test images by their features, {TWO_PASS} (t-SNE)")
    points.set(xticks=[], yticks=[])
    finish(figure, title, path)


def main(argv: Sequence[str] | None = None) -> None:
    """Train in three ways, compare and draw, as the command line says."""
    parser = make_parser(
        __doc__.splitlines()[0],
        "contrastive",
        batch_size=256,
        micro_batch_size=8,
        learning_rate=0.3,
        epochs=EPOCHS,
    )
    args = parse(parser, argv)
    data, (images, labels) = load_digits(args.data_dir)
    # Moved and noisy: of the test images as they are, pixels find 99 % already.
    test = augment(tf.constant(images), tf.constant([args.seed, 0], tf.int64)).numpy()
    both = data[1], labels
    accuracies = {"pixels": accuracy([data[0], test], both)}
    encoders, runs = {"untrained": make_model(args.seed)[0]}, {}
    for way in (SPLIT, TWO_PASS, LARGE):
        encoders[way], model = make_model(args.seed)
        compile_model(model, args, len(data[0]))
        batches = training_batches(data, args.batch_size, args.seed)
        runs[way] = train(model, way, batches, args)
    features = {
        name: [encoder.predict(x, 256, verbose=0) for x in (data[0], test, images)]
        for name, encoder in encoders.items()
    }
    accuracies |= {name: accuracy(found, both) for name, found in features.items()}

    title = (
        f"Contrastive learning: one update per {args.batch_size} images, "
        f"{args.micro_batch_size} at a time"
    )
    path = args.output / "contrastive.png"
    plot(runs, accuracies, (features[TWO_PASS][2], labels), title, path)
    print(f"\nFigure: {path}\n\n{table(runs, accuracies, 'kNN accuracy')}\n")
    print(check(runs))
    print(check_learning(accuracies, args.epochs))


if __name__ == "__main__":
    main()
