"""Blocks to recompute, models of them, and what they leave."""

import keras
import tensorflow as tf
from helpers import assert_refused, data
from keras import layers

import keras_accum as ka

X, Y = data(features=8)


@keras.saving.register_keras_serializable("test_recompute")
def squares(outputs):
    """Of any type, in float32: Keras does not add losses of different types."""
    return 0.1 * tf.reduce_mean(tf.square(tf.cast(outputs, "float32")))


@keras.saving.register_keras_serializable("test_recompute")
def sum_of_squares(outputs):
    """As a regularizer of activity: Keras divides what it gives by the samples."""
    return 0.01 * tf.reduce_sum(tf.square(tf.cast(outputs, "float32")))


@keras.saving.register_keras_serializable("test_recompute")
class Busy(layers.Layer):
    """A residual block with everything that a second pass can get wrong."""

    def __init__(self, units, rate=0.4, **kwargs):
        super().__init__(**kwargs)
        self.units, self.rate = units, rate
        self.first = layers.Dense(units, "tanh", name="first")
        self.norm = layers.BatchNormalization(momentum=0.5)
        self.dropout = layers.Dropout(rate)
        self.last = layers.Dense(units, name="last", activity_regularizer=sum_of_squares)
        self.calls = 0

    def build(self, input_shape):
        for layer in (self.first, self.norm, self.dropout, self.last):
            layer.build(input_shape)

    def call(self, inputs, training=None):
        self.calls += 1
        self.add_loss(squares(inputs))
        hidden = self.dropout(self.norm(self.first(inputs)), training=training)
        return inputs + self.last(hidden)

    def get_config(self):
        return {**super().get_config(), "units": self.units, "rate": self.rate}


def model_of(wrap=lambda layer: layer, blocks=2):
    """A regression model of `blocks` blocks, the same at each call."""
    keras.utils.set_random_seed(5)
    inputs = keras.Input((8,))
    hidden = layers.Dense(8, name="stem")(inputs)
    for i in range(blocks):
        hidden = wrap(Busy(8, name=f"block_{i}"))(hidden)
    return keras.Model(inputs, layers.Dense(3, name="head")(hidden))


def switched(*args, make=model_of, **kwargs):
    """What makes a model and switches recomputation on."""

    def made():
        model = make()
        model.handle = ka.recompute(model, *args, **kwargs)
        return model

    return made


def state(model):
    """Moving statistics, seeds, and all other variables that are not trained."""
    return [v.numpy() for v in model.non_trainable_variables]


def gradients(model, x=X, y=Y, mode="eager", **call):
    """Loss, gradients of all weights and the state after one step of no optimizer."""
    values = [v.value for v in model.trainable_variables]

    def step(x, y):
        with tf.GradientTape() as tape:
            outputs = model(x, training=True, **call)
            loss = tf.reduce_mean(tf.square(outputs - y)) + sum(model.losses)
        return loss, tape.gradient(loss, values)

    if mode != "eager":
        step = tf.function(step, jit_compile=mode == "xla", autograph=False)
    loss, found = step(tf.constant(x), tf.constant(y))
    return loss, found, state(model)


def holder(layer):
    """A model that has `layer`."""
    model = keras.Model()
    model.held = layer
    return model


class Pair(layers.Layer):
    """Two results, each from a layer of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.one = layers.Dense(8, "tanh", name="one")
        self.two = layers.Dense(8, "tanh", name="two")

    def build(self, input_shape):
        self.one.build(input_shape)
        self.two.build(input_shape)

    def call(self, inputs):
        return self.one(inputs), self.two(inputs)


def refused(function, message, error=ValueError):
    """`assert_refused` for errors that Keras wraps where they come out of a call."""

    def unwrapped():
        try:
            function()
        except error as caught:
            text = str(caught)
            if "\x1b[1m" in text:
                text = text.split("\x1b[1m")[1].split("\x1b[0m")[0]
            raise error(text) from None

    assert_refused(unwrapped, error, message)
