"""Draws how wrong a mean of means is, from updates that are made and compared.

A small model reads texts of different lengths; padding is masked. One update over a window
of micro-batches is compared with one plain Keras update on the large batch: by Keras's own
`gradient_accumulation_steps`, and by `AccumOptimizer`. Run from the repository's root:

    PYTHONPATH=. python docs/figures/mean_of_means.py
"""

import pathlib

import keras
import matplotlib
import numpy as np

import keras_accum as ka

matplotlib.use("Agg")
import matplotlib.pyplot as plt

TEXTS, MICRO_BATCH, LONGEST, WORDS = 16, 2, 64, 50
RATIOS = (1, 2, 4, 8, 16, 32, 64)
SEEDS = range(5)
RATE = 100.0  # High, so that the weights' own rounding does not hide the update's.


def make_texts(ratio, seed):
    """Words and the words that follow; lengths from `LONGEST / ratio` to `LONGEST`."""
    rng = np.random.default_rng(seed)
    # Even steps between logarithms, the same number of texts at each.
    lengths = np.geomspace(LONGEST / ratio, LONGEST, TEXTS).round().astype(int)
    words = rng.integers(1, WORDS, size=(TEXTS, LONGEST + 1))
    words[np.arange(LONGEST + 1) > rng.permutation(lengths)[:, None]] = 0
    return words[:, :-1], words[:, 1:]


def make_model(optimizer):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((LONGEST,)),
            keras.layers.Embedding(WORDS, 16, mask_zero=True),
            keras.layers.Dense(32, "tanh"),
            keras.layers.Dense(WORDS),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=False)
    return model


def change(model, batch_size, x, y):
    """What one pass over the texts adds to the weights, as one vector."""
    weights = model.get_weights()
    for start in range(0, TEXTS, batch_size):
        rows = slice(start, start + batch_size)
        model.train_on_batch(x[rows], y[rows])
    after = model.get_weights()
    model.set_weights(weights)
    moved = [(b - a).ravel() for a, b in zip(weights, after)]
    return np.concatenate(moved).astype("float64")


def measure():
    """The error of each way, relative to the change by the large batch.

    Returns:
        Array of shape (ratios, seeds, 2): Keras's own way, and `AccumOptimizer`.
    """
    sgd, steps = keras.optimizers.SGD, TEXTS // MICRO_BATCH
    large = make_model(sgd(RATE))
    means = make_model(sgd(RATE, gradient_accumulation_steps=steps))
    ours = make_model(ka.AccumOptimizer(sgd(RATE), accum_steps=steps))
    errors = np.zeros((len(RATIOS), len(SEEDS), 2))
    for i, ratio in enumerate(RATIOS):
        for j, seed in enumerate(SEEDS):
            x, y = make_texts(ratio, seed)
            truth = change(large, TEXTS, x, y)
            for way, model in enumerate((means, ours)):
                off = change(model, MICRO_BATCH, x, y) - truth
                errors[i, j, way] = np.linalg.norm(off) / np.linalg.norm(truth)
    return errors


def draw(path):
    measured = measure()
    figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
    labels = ("Keras's gradient_accumulation_steps", "AccumOptimizer")
    for way, (label, colour, marker) in enumerate(
        zip(labels, ("#c0392b", "#2c5aa0"), "so")
    ):
        values = measured[:, :, way]
        axes.plot(RATIOS, np.median(values, 1), color=colour, marker=marker, label=label)
        axes.fill_between(RATIOS, values.min(1), values.max(1), color=colour, alpha=0.2)
    axes.set_xscale("log", base=2)
    axes.set_xticks(RATIOS, [str(ratio) for ratio in RATIOS])
    axes.set_yscale("log")
    axes.set_ylim(3e-9, 3)
    axes.set_xlabel("longest text / shortest text")
    axes.set_ylabel("error of the update")
    axes.set_title(
        f"One update over {TEXTS // MICRO_BATCH} micro-batches of {MICRO_BATCH} texts,\n"
        f"against the batch of {TEXTS} in plain Keras",
        fontsize="medium",
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="center right", frameon=False)
    figure.savefig(path, dpi=160)
    return measured


if __name__ == "__main__":
    numbers = draw(pathlib.Path(__file__).with_suffix(".png"))
    print("median of each ratio: Keras's, AccumOptimizer's")
    for ratio, medians in zip(RATIOS, np.median(numbers, 1)):
        print(ratio, *(f"{median:.1e}" for median in medians))
