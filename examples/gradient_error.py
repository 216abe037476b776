"""Measure the gradient of a batch of tokens, over micro-batches, in two ways."""

import math
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf
from comparison import Weights, legend_below, plain
from matplotlib.axes import Axes
from source_text import PADDING, Batch

import keras_accum

MICRO_BATCH_SIZES = (1, 2, 4, 8)
OURS_BOUND, NAIVE_BOUND = 1e-5, 1e-2

# For each micro-batch size the error of the mean of means, and ours.
Errors = dict[int, tuple[float, float]]


def step_gradient(model: keras.Model, loss: keras.losses.Loss, batch: Batch) -> Weights:
    """Return the gradient that a training step of `model` hands to its optimizer."""
    start = model.get_weights()
    # The first momentum of SGD is the gradient, times the negative learning rate.
    # Eagerly, because a graph for a single step costs more than the step.
    sgd = keras.optimizers.SGD(learning_rate=1.0, momentum=0.5)
    model.compile(optimizer=sgd, loss=loss, run_eagerly=True)
    model.train_on_batch(*batch)
    model.set_weights(start)
    return [-momentum.numpy() for momentum in sgd.momentums]


def plain_gradient(model: keras.Model) -> Callable[..., Weights]:
    """Return a function for the gradient of the mean over tokens, by plain TensorFlow."""

    @tf.function(input_signature=[tf.TensorSpec((None, None), tf.int32)] * 2)
    def gradient(inputs: tf.Tensor, targets: tf.Tensor) -> list[tf.Tensor]:
        valid = tf.cast(targets != PADDING, tf.float32)
        with tf.GradientTape() as tape:
            logits = model(inputs, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits)
            loss = tf.reduce_sum(losses * valid) / tf.reduce_sum(valid)
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        return [tf.convert_to_tensor(g) for g in gradients]

    return lambda inputs, targets: [g.numpy() for g in gradient(inputs, targets)]


def norm(gradients: Weights) -> float:
    """Return the length of all gradients together."""
    return math.sqrt(sum(float(np.square(g, dtype="float64").sum()) for g in gradients))


def error(gradients: Weights, reference: Weights) -> float:
    """Return the length of the difference in units of the length of `reference`."""
    return norm([a - b for a, b in zip(gradients, reference)]) / norm(reference)


def gradient_errors(model: keras.Model, loss: keras.losses.Loss, batch: Batch) -> Errors:
    """Compare both gradients over micro-batches with that of the whole batch."""
    gradient_of = plain_gradient(model)
    large, errors = gradient_of(*batch), {}
    # A micro-batch that holds everything has nothing to get wrong.
    for size in [s for s in MICRO_BATCH_SIZES if s < len(batch[0])]:
        cuts = range(size, len(batch[0]), size)
        parts = zip(*(np.split(array, cuts) for array in batch))
        means = [gradient_of(*part) for part in parts]
        naive = [np.mean(gradients, axis=0) for gradients in zip(*means)]
        keras_accum.accumulate(model, micro_batch_size=size)
        ours = step_gradient(model, loss, batch)
        del model.train_step, model.make_train_function, model.accumulation
        errors[size] = error(naive, large), error(ours, large)
    return errors


def table(before: Errors, after: Errors) -> str:
    """Write the gradient errors, at the start and at the end of the training."""
    head = f"{'sequences':>9}{'mean of means':>28}{'keras_accum':>28}\n"
    head += f"{'at once':>9}" + f"{'untrained':>16}{'trained':>12}" * 2 + "\n"
    rows = [
        f"{size:9}"
        + "".join(f"{before[size][i]:16.1e}{after[size][i]:12.1e}" for i in (0, 1))
        for size in before
    ]
    return head + "\n".join(rows)


def check_errors(measured: Sequence[Errors]) -> str:
    """Return the verdict on all gradients, or exit."""
    pairs = [pair for errors in measured for pair in errors.values()]
    if not pairs:
        raise SystemExit(
            "Failed: the batch is a single sequence, so there is no mean of means to "
            "compare. Use more --batch-tokens."
        )
    # NumPy's max and min, unlike Python's, never lose a NaN.
    naive, ours = np.min([n for n, _ in pairs]), np.max([o for _, o in pairs])
    if not ours < OURS_BOUND:
        raise SystemExit(
            f"Failed: a gradient of keras_accum is {ours:.1e} from the whole batch's; "
            f"rounding explains at most {OURS_BOUND:.0e}. Look for a layer that sees "
            "beyond its own sequence, and for a lost mask."
        )
    if not naive > NAIVE_BOUND:
        raise SystemExit(
            f"Failed: a mean of means is only {naive:.1e} from the whole batch's "
            f"gradient, and should be beyond {NAIVE_BOUND:.0e}. Sequences of one "
            "length show nothing: use more --batch-tokens."
        )
    return (
        f"Checked: the mean of means errs by at least {naive:.1%} of the gradient, "
        f"keras_accum by at most {ours:.0e} of it."
    )


def plot_errors(bars: Axes, errors: Sequence[Errors]) -> None:
    """Draw both errors for each micro-batch size, before and after the training."""
    sizes = list(errors[0])
    places = np.arange(len(sizes))
    for i, (part, alpha) in enumerate((("untrained", 0.5), ("trained", 1.0))):
        for j, name in enumerate(("mean of means", "keras_accum")):
            heights = [errors[i][size][j] for size in sizes]
            bars.bar(
                places + 0.4 * j + 0.18 * i - 0.29,
                heights,
                0.17,
                color=("C3", "C0")[j],
                alpha=alpha,
                label=f"{name}, {part}",
            )
    bars.axhline(OURS_BOUND, color="0.5", ls=":", label="bound of the check")
    bars.set(
        title="Error of the gradient, relative to the whole batch's",
        xlabel="sequences in a micro-batch",
        ylabel="relative error",
        xticks=places,
        xticklabels=sizes,
        yscale="log",
        ylim=(1e-8, 1e1),
    )
    legend_below(bars)
    plain(bars)
