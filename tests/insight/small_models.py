"""Small models, compiled to run eagerly, for tests of what is read and measured."""

import random

import keras
import numpy as np
import tensorflow as tf
from helpers import data

import keras_accum as ka

layers = keras.layers
X, Y = data()


def model_with(*middle, make=keras.Model):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((5,))
    hidden = layers.Dense(8, "tanh")(inputs)
    for layer in middle:
        hidden = layer(hidden)
    return make(inputs, layers.Dense(3)(hidden))


def compiled(model, optimizer="sgd", loss="mse", eager=True, **options):
    model.compile(optimizer, loss, run_eagerly=eager, jit_compile=False, **options)
    return model


def windows():
    return ka.AccumOptimizer("sgd", accum_steps=4)


class OwnStep(keras.Model):
    """A step that hides from the package what its loss divides by."""

    scale = 1.0

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            error = tf.reduce_sum(tf.square(y - self(x, training=True)))
            loss = error / tf.cast(tf.shape(x)[0], "float32") ** self.scale
        self.optimizer.apply(
            tape.gradient(loss, self.trainable_weights), self.trainable_weights
        )
        return {"loss": loss}


def centered(y, y_pred):
    """A loss that couples the samples of a batch."""
    y_pred -= keras.ops.mean(y_pred, axis=0)
    return keras.ops.mean(keras.ops.square(y - y_pred), axis=-1)


def everything(model):
    state = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    values = [np.array(v) for v in state]
    return [*values, np.random.get_state()[1], np.array(random.getstate()[1])]
