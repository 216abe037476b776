"""Train a small CNN on accumulated micro-batches and check it against the large batch.

The default run needs no network and takes half a minute on two cores:

    python examples/train_digits.py

It trains twice from the same seed: once with `keras_accum`, 16 samples in memory at a
time and one update per 128, and once in plain Keras with batches of 128. The script
fails if the two disagree by more than rounding.
"""

import os

# Before TensorFlow is imported: it reports its build options as warnings.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import argparse
import inspect
import logging
import math
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import digits
import keras
import tensorflow as tf
import tensorflow_datasets as tfds
from comparison import Run, WeightRecorder, difference, plot, table

import keras_accum

AUTO = "auto"

# After the first epoch, before training amplifies rounding (measured: see README.md).
RELATIVE_BOUND = 1e-3

# Asked before a download: without a network TFDS retries for minutes.
SOURCES = {
    "mnist": "https://storage.googleapis.com/cvdf-datasets/mnist/"
    "t10k-labels-idx1-ubyte.gz",
    "cifar10": "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
}

OPTIMIZERS: dict[str, type[keras.Optimizer]] = {
    name.lower(): optimizer
    for name, optimizer in vars(keras.optimizers).items()
    if inspect.isclass(optimizer)
    and issubclass(optimizer, keras.Optimizer)
    and not name.endswith("Optimizer")  # The base class and the wrappers.
}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; `accum_steps` is derived from the two batch sizes."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--dataset", choices=["digits", *SOURCES], default="digits")
    add("--data-dir", type=Path, help="of tensorflow-datasets; its own, if not given")
    add("--batch-size", type=int, default=128, help="samples per update")
    add(
        "--micro-batch-size",
        type=micro_batch_size,
        default=16,
        help="samples in memory at once, or auto: as many as --memory has room for",
    )
    add("--memory", default="4MiB", help="for --micro-batch-size auto")
    add("--optimizer", choices=sorted(OPTIMIZERS), default="adamw", help="of Keras")
    add("--learning-rate", type=float, default=3e-3, help="peak of a cosine decay")
    add("--epochs", type=int, default=20)
    add("--seed", type=int, default=0)
    precisions = ["float32", "mixed_float16", "mixed_bfloat16"]
    add("--precision", choices=precisions, default="float32")
    add("--jit-compile", choices=["auto", "on", "off"], default="auto", help="XLA")
    add("--output", type=Path, default=Path("train_digits_output"), help="for the PNG")
    add("--no-compare", action="store_true", help="skip the run with the large batch")
    args = parser.parse_args(argv)

    auto = args.micro_batch_size == AUTO
    for option in ("batch_size", "micro_batch_size", "epochs", "learning_rate"):
        value = getattr(args, option)
        if value != AUTO and value <= 0:
            parser.error(f"--{option.replace('_', '-')} is {value}: it must be above 0")
    if not auto and args.batch_size % args.micro_batch_size:
        above = math.ceil(args.batch_size / args.micro_batch_size)
        parser.error(
            f"--batch-size {args.batch_size} is not a multiple of --micro-batch-size "
            f"{args.micro_batch_size}: an update takes whole micro-batches. Use "
            f"--batch-size {above * args.micro_batch_size}, or --micro-batch-size "
            f"{math.gcd(args.batch_size, args.micro_batch_size)}."
        )
    return args


def micro_batch_size(text: str) -> int | str:
    """Read a number of samples, or `auto`."""
    return AUTO if text == AUTO else int(text)


def load_samples(name: str, data_dir: Path | None) -> list[tf.data.Dataset]:
    """Return the train and the test samples in a fixed order, downloaded if need be."""
    if name == "digits":
        tfds.disable_progress_bar()
        builder = digits.Builder(data_dir=data_dir)
    else:
        builder = tfds.builder(name, data_dir=data_dir)
    try:
        if name in SOURCES and not builder.data_path.exists():
            head = urllib.request.Request(SOURCES[name], method="HEAD")
            urllib.request.urlopen(head, timeout=10).close()
        builder.download_and_prepare()
    except (OSError, tfds.download.DownloadError) as error:
        raise SystemExit(
            f"--dataset {name} is not in {builder.data_dir} and its download failed "
            f"({error}). Run once where there is a network, or name with --data-dir a "
            "folder that holds it already. --dataset digits needs no network."
        ) from error
    parts = builder.as_dataset(split=["train", "test"], as_supervised=True)
    return [part.cache() for part in parts]


def scale(image: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Bring pixels to about 0..1: digits count to 16 on 8 x 8, the others to 255."""
    return tf.cast(image, tf.float32) / (16 if image.shape[-2] == 8 else 255), label


def training_batches(
    samples: tf.data.Dataset, size: int, seed: int, flip: bool
) -> tf.data.Dataset:
    """Shuffle and augment sample by sample, then cut into batches of `size`.

    Everything random happens before the cut and depends on the seed alone. Hence
    `accum_steps` micro-batches hold exactly the samples of one large batch.
    """
    seeds = tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=True)

    def augment(sample: tuple[tf.Tensor, tf.Tensor], draw: tf.Tensor) -> tuple:
        image, label = sample
        margin = image.shape[0] // 8
        padded = tf.pad(image, [[margin, margin], [margin, margin], [0, 0]])
        image = tf.image.stateless_random_crop(padded, image.shape, draw)
        if flip:
            image = tf.image.stateless_random_flip_left_right(image, draw)
        return scale(image, label)

    shuffled = samples.shuffle(len(samples), seed=seed)
    pairs = tf.data.Dataset.zip(shuffled, seeds.batch(2, drop_remainder=True))
    augmented = pairs.map(augment, num_parallel_calls=tf.data.AUTOTUNE)
    return augmented.batch(size).prefetch(tf.data.AUTOTUNE)


def make_model(shape: tuple[int, int, int]) -> keras.Model:
    """Make a CNN that halves the image until it is 4 pixels high.

    No layer may look beyond its own sample, or the large batch is another model than
    its micro-batches: GroupNormalization, not BatchNormalization. No Dropout either,
    because other batch shapes draw other masks.
    """
    inputs = image = keras.Input(shape)
    width = 32
    while True:
        image = keras.layers.Conv2D(width, 3, padding="same", use_bias=False)(image)
        image = keras.layers.GroupNormalization(groups=8)(image)
        # Smooth, as is the mean below: at the kink of a ReLU and between the two
        # largest values of a MaxPooling, rounding decides which way a gradient goes.
        image = keras.layers.Activation("silu")(image)
        if image.shape[1] <= 4:
            break
        image = keras.layers.AveragePooling2D(2)(image)
        width *= 2
    features = keras.layers.Flatten()(image)
    # float32 under mixed precision too: the loss needs the small differences.
    logits = keras.layers.Dense(10, dtype="float32")(features)
    return keras.Model(inputs, logits)


def plan_sizes(args: argparse.Namespace, samples: tf.data.Dataset) -> None:
    """Set `accum_steps`, and the micro-batch size if it is to be found."""
    if args.micro_batch_size == AUTO:
        model = make_model(samples.element_spec[0].shape)
        compile_model(model, OPTIMIZERS[args.optimizer](args.learning_rate), args)
        # Shuffling reads all of the cached samples: a cache that was read in part is
        # taken for whole.
        data = training_batches(samples, args.batch_size, args.seed, flip=False)
        batch = next(iter(data))
        plan = keras_accum.plan(model, batch, memory_budget=args.memory, recompute=False)
        print(f"{plan}\n")
        # A window has micro-batches of one size: the planned one where it divides.
        args.micro_batch_size = math.gcd(args.batch_size, plan.micro_batch_size)
    args.accum_steps = args.batch_size // args.micro_batch_size


def compile_model(
    model: keras.Model, optimizer: keras.Optimizer, args: argparse.Namespace
) -> None:
    """Compile `model` for the training and for planning."""
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile={"auto": "auto", "on": True, "off": False}[args.jit_compile],
    )


def train(
    args: argparse.Namespace, samples: Sequence[tf.data.Dataset], accumulate: bool
) -> Run:
    """Train from `--seed`: accumulating micro-batches, or in plain Keras."""
    keras.utils.set_random_seed(args.seed)
    train_samples, test_samples = samples
    updates = args.epochs * math.ceil(len(train_samples) / args.batch_size)
    # The schedule counts updates, whatever the number of micro-batches.
    schedule = keras.optimizers.schedules.CosineDecay(args.learning_rate, updates)
    optimizer = OPTIMIZERS[args.optimizer](learning_rate=schedule)
    recorder = WeightRecorder()
    callbacks: list[keras.callbacks.Callback] = [recorder]
    if accumulate:
        optimizer = keras_accum.AccumOptimizer(optimizer, args.accum_steps)
        # An epoch ends within a window. The large batch makes a short batch of the
        # rest, so the rest is applied here too; before the recorder looks.
        callbacks.insert(0, keras_accum.AccumulationMonitor(tail="flush_epoch"))

    model = make_model(train_samples.element_spec[0].shape)
    # Keras would do it in `fit`, where ScheduleFreeAdamW loses its copy of the weights.
    optimizer.build(model.trainable_variables)
    compile_model(model, optimizer, args)
    start = time.perf_counter()
    history = model.fit(
        training_batches(
            train_samples,
            args.micro_batch_size if accumulate else args.batch_size,
            seed=args.seed,
            flip=args.dataset == "cifar10",
        ),
        validation_data=test_samples.map(scale).batch(256),
        epochs=args.epochs,
        callbacks=callbacks,
        shuffle=False,  # The data set does it; Keras warns if it is asked to.
    )
    return Run(history.history, recorder.weights, time.perf_counter() - start)


def check(first_epoch: float, precision: str) -> str:
    """Return the verdict on the relative difference after one epoch, or exit."""
    if precision != "float32":
        return f"Not checked: {precision} rounds more coarsely than the bound."
    if not first_epoch <= RELATIVE_BOUND:  # Written so that NaN fails.
        raise SystemExit(
            f"Failed: after epoch 1 the weights differ by {first_epoch:.1e} relative; "
            f"rounding explains at most {RELATIVE_BOUND:.0e}. Look for a layer that "
            "sees beyond its own sample, for randomness after the batches are cut, for "
            "training that diverges, and for an optimizer that takes signs (lion)."
        )
    return (
        f"Checked: after epoch 1 the weights differ by {first_epoch:.1e} relative, "
        f"within the {RELATIVE_BOUND:.0e} that rounding explains."
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Train, compare and draw, as the command line says."""
    args = parse_arguments(argv)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("keras_accum").setLevel(logging.INFO)
    keras.config.set_dtype_policy(args.precision)
    samples = load_samples(args.dataset, args.data_dir)
    plan_sizes(args, samples[0])
    title = (
        f"{args.dataset}, {args.optimizer}, {args.precision}: one update per "
        f"{args.accum_steps} micro-batches of {args.micro_batch_size}"
    )
    print(title)
    accumulated = train(args, samples, accumulate=True)
    large = None
    if not args.no_compare:
        print(f"\nThe same in plain Keras: one update per batch of {args.batch_size}")
        large = train(args, samples, accumulate=False)

    path = args.output / f"{args.dataset}_{args.optimizer}_{args.precision}.png"
    plot(accumulated, large, title, path)
    print(f"\nLearning curves: {path}")
    if large:
        print(f"\n{table(accumulated, large)}")
        _, relative = difference(accumulated.weights[1], large.weights[1])
        print(check(relative, args.precision))


if __name__ == "__main__":
    main()
