"""The quick start in cells: open it as a notebook, or run it from top to bottom."""

# %% Some data, and a model that is the same each time it is made.
import keras
import numpy as np

import keras_accum as ka

rng = np.random.default_rng(0)
x = rng.normal(size=(512, 20)).astype("float32")
y = (x[:, 0] + x[:, 1] > 0).astype("int32")


def make_model() -> keras.Model:
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((20,)),
            keras.layers.Dense(64, activation="tanh"),
            keras.layers.Dense(2),
        ]
    )


def train(model: keras.Model, optimizer: keras.Optimizer, batch_size: int) -> np.ndarray:
    """Train for three epochs; returns all weights."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    model.fit(x, y, batch_size=batch_size, epochs=3, shuffle=False, verbose=2)
    return np.concatenate([w.ravel() for w in model.get_weights()])


# %% The large batch, in plain Keras.
large = train(make_model(), keras.optimizers.SGD(0.1, momentum=0.9), 128)

# %% In the optimizer: the data yield micro-batches of 16, and every eighth updates.
sgd = keras.optimizers.SGD(0.1, momentum=0.9)
in_optimizer = train(make_model(), ka.AccumOptimizer(sgd, accum_steps=8), 16)

# %% In the step: the data yield the large batch, and the step takes 16 at a time.
sgd = keras.optimizers.SGD(0.1, momentum=0.9)
in_step = train(ka.accumulate(make_model(), micro_batch_size=16), sgd, 128)

# %% All three end with the same weights; without accumulation they do not.
small = train(make_model(), keras.optimizers.SGD(0.1, momentum=0.9), 16)
for name, weights in {
    "in the optimizer": in_optimizer,
    "in the step": in_step,
    "batches of 16": small,
}.items():
    print(f"{name:18} differs by {np.abs(weights - large).max():.0e}")
assert np.abs(in_optimizer - large).max() < 1e-4
assert np.abs(in_step - large).max() < 1e-4
assert np.abs(small - large).max() > 1e-2
