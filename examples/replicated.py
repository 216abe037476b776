"""What the examples on several replicas share: a model, its training, and the check.

One update per 128 samples, whatever the number of replicas: 4 samples in memory, 8
micro-batches and 4 replicas are the batch of 128, and so are 16, 4 and 2.
"""

import os

# Before TensorFlow is imported: it reports its build options as warnings.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import argparse
import contextlib
import math
import time
from collections.abc import Sequence

import keras
import tensorflow as tf
from comparison import Run, WeightRecorder, difference, table
from train_digits import load_samples, make_model, scale

import keras_accum

# After the first epoch, and at the end (measured: see README.md).
RELATIVE_BOUNDS = (1e-4, 1e-3)


def make_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser of the options that both examples have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--route", choices=["optimizer", "step"], default="optimizer")
    add("--batch-size", type=int, default=128, help="samples per update, of all replicas")
    add("--micro-batch-size", type=int, default=16, help="in memory at once, per replica")
    add("--learning-rate", type=float, default=0.1, help="peak of a cosine decay")
    add("--epochs", type=int, default=6)
    add("--seed", type=int, default=0)
    return parser


def check_arguments(args: argparse.Namespace) -> None:
    """Exit unless all sizes are above 0."""
    for option in ("batch_size", "micro_batch_size", "epochs", "learning_rate"):
        if (value := getattr(args, option)) <= 0:
            raise SystemExit(f"--{option.replace('_', '-')} is {value}: must be above 0")


def steps_per_window(args: argparse.Namespace, replicas: int) -> int:
    """Return `accum_steps`; exit if an update would not take whole micro-batches."""
    together = args.micro_batch_size * replicas
    if args.batch_size % together:
        above = math.ceil(args.batch_size / together) * together
        raise SystemExit(
            f"--batch-size {args.batch_size} is not a multiple of --micro-batch-size "
            f"{args.micro_batch_size} x {replicas} replicas: an update takes whole "
            f"micro-batches, as many on each replica. Use --batch-size {above}."
        )
    return args.batch_size // together


def announce(args: argparse.Namespace, replicas: int) -> str:
    """Say what makes one update."""
    return (
        f"{args.micro_batch_size} samples x {steps_per_window(args, replicas)} "
        f"accum_steps x {replicas} replicas = effective batch {args.batch_size}, "
        f"accumulated in the {args.route}"
    )


def batches(samples: tf.data.Dataset, size: int, seed: int) -> tf.data.Dataset:
    """Shuffle once, and cut into batches of `size`, the same in each epoch.

    A run that was interrupted then goes on with the batches that it would have seen.
    `fit` on a strategy takes the first batch once more, to build the model from: an
    order that changes with each pass over the data would be another one there.
    """
    shuffled = samples.shuffle(len(samples), seed=seed, reshuffle_each_iteration=False)
    return by_rows(shuffled.map(scale).batch(size).prefetch(tf.data.AUTOTUNE))


def by_rows(batched: tf.data.Dataset) -> tf.data.Dataset:
    """Let each machine take its rows of every batch, and not files of its own."""
    options = tf.data.Options()
    policy = tf.data.experimental.AutoShardPolicy.DATA
    options.experimental_distribute.auto_shard_policy = policy
    return batched.with_options(options)


def train(
    args: argparse.Namespace,
    strategy: tf.distribute.Strategy | None = None,
    callbacks: Sequence[keras.callbacks.Callback] = (),
    verbose: int | str = "auto",
) -> Run:
    """Train from `--seed`: on the replicas of `strategy`, or on one device, plainly."""
    samples, test_samples = load_samples("digits", None)
    updates = args.epochs * math.ceil(len(samples) / args.batch_size)
    schedule = keras.optimizers.schedules.CosineDecay(args.learning_rate, updates)
    recorder, rows = WeightRecorder(), args.batch_size
    watching: list[keras.callbacks.Callback] = [*callbacks, recorder]
    keras.utils.set_random_seed(args.seed)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = make_model((8, 8, 1))
        optimizer = keras.optimizers.SGD(schedule, momentum=0.9, global_clipnorm=1.0)
        if strategy and args.route == "step":
            keras_accum.accumulate(model, micro_batch_size=args.micro_batch_size)
        elif strategy:
            replicas = strategy.num_replicas_in_sync
            steps = steps_per_window(args, replicas)
            optimizer = keras_accum.AccumOptimizer(optimizer, steps)
            rows = args.micro_batch_size * replicas
            # An epoch ends within a window, which is applied before anyone looks.
            watching.insert(0, keras_accum.AccumulationMonitor(tail="flush_epoch"))
        model.compile(
            optimizer=optimizer,
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            jit_compile=False,  # On CPUs, TensorFlow compiles no strategy.
        )
    start = time.perf_counter()
    history = model.fit(
        batches(samples, rows, args.seed),
        validation_data=by_rows(test_samples.map(scale).batch(256)),
        epochs=args.epochs,
        callbacks=watching,
        shuffle=False,  # The data set does it; Keras warns if it is asked to.
        verbose=verbose,
    )
    return Run(history.history, recorder.weights, time.perf_counter() - start)


def compare(run: Run, args: argparse.Namespace) -> None:
    """Train once more, on one device in plain Keras; exit if the weights part."""
    print(f"\nThe same on one device: plain Keras, batches of {args.batch_size}")
    large = train(args)
    # A run that was resumed has no weights of the epochs before.
    first = args.epochs + 1 - len(run.weights)
    large = Run(large.history, large.weights[first:], large.seconds)
    print(f"\n{table(run, large, ('replicas', 'one device'), first)}")
    apart = [difference(run.weights[e], large.weights[e])[1] for e in (1, -1)]
    for value, bound, epoch in zip(apart, RELATIVE_BOUNDS, (first + 1, args.epochs)):
        if not value <= bound:  # Written so that NaN fails.
            raise SystemExit(
                f"Failed: after epoch {epoch} the weights differ by {value:.1e} "
                f"relative; rounding explains at most {bound:.0e}."
            )
    print(
        f"Checked: the weights differ by {apart[0]:.1e} and {apart[1]:.1e} relative, "
        f"within the {RELATIVE_BOUNDS[0]:.0e} and {RELATIVE_BOUNDS[1]:.0e} that rounding "
        "explains."
    )
