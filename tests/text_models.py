"""Models of text, their tokens and losses: what tests of several folders train."""

import keras
import numpy as np
import tensorflow as tf

# In three micro-batches: 4, 4 and 3.
SAMPLES = 11


def tokens(samples=SAMPLES, length=6, seed=4):
    """Sequences of 1 to `length` tokens, padded with 0, and their targets."""
    rng = np.random.default_rng(seed)
    x = rng.integers(1, 11, size=(samples, length)).astype("int32")
    for row, held in enumerate(rng.integers(1, length + 1, size=samples)):
        x[row, held:] = 0
    x[:3, 1:] = 0
    return x, np.roll(x, 1, axis=1)


def token_model(mask_zero=True, length=6, **options):
    keras.utils.set_random_seed(2)
    return keras.Sequential(
        [
            keras.Input((length,), dtype="int32"),
            keras.layers.Embedding(11, 4, mask_zero=mask_zero),
            keras.layers.Dense(11, **options),
        ]
    )


def two_texts(between=None):
    """Two outputs, each with the mask of its own input, and a layer in common."""
    keras.utils.set_random_seed(3)
    between = between or keras.layers.Identity()
    a = keras.Input((6,), dtype="int32", name="in_a")
    b = keras.Input((4,), dtype="int32", name="in_b")
    embed = keras.layers.Embedding(11, 4, mask_zero=True)
    outputs = {
        "a": keras.layers.Dense(11, name="a")(between(embed(a))),
        "b": keras.layers.Dense(11, name="b")(between(embed(b))),
    }
    return keras.Model({"in_a": a, "in_b": b}, outputs)


def two_text_arrays():
    (a, target_a), (b, target_b) = tokens(), tokens(length=4, seed=8)
    b[4:8, 1:] = 0
    return {"in_a": a, "in_b": b}, {"a": target_a, "b": target_b}


def cross_entropy(**options):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def uneven(*shape, seed=6):
    """Weights from 0 to 3; the first micro-batch's are tiny."""
    weights = np.random.default_rng(seed).uniform(0, 3, shape).astype("float32")
    weights[:4] *= 0.05
    return weights


def nt_xent(y, y_pred, temperature=0.5):
    """Each sample's first view has to find its second among those of all samples."""
    z = y_pred / tf.norm(y_pred, axis=-1, keepdims=True)
    logits = tf.matmul(z[:, 0], z[:, 1], transpose_b=True) / temperature
    labels = tf.range(tf.shape(logits)[0])
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    )
