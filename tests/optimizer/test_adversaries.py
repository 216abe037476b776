"""Two optimizers in one training step, as in a GAN: what is exact, and what is not."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_close, assert_differ, compile_in, data

import keras_accum as ka

STEPS, SIZE = 4, 3


class Adversaries(keras.Model):
    """Updates its critic, and then its generator, on the same batch."""

    def __init__(self, optimizer):
        super().__init__()
        keras.utils.set_random_seed(5)
        self.generator = keras.Sequential([keras.Input((5,)), keras.layers.Dense(5)])
        self.critic = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1, "tanh")])
        self.players = [
            (self.critic_loss, optimizer(), self.critic.trainable_variables),
            (self.generator_loss, optimizer(), self.generator.trainable_variables),
        ]

    def call(self, x):
        return self.critic(self.generator(x))

    def critic_loss(self, x):
        real, fake = self.critic(x), self(x)
        return tf.reduce_mean(tf.square(real - 1.0) + tf.square(fake + 1.0))

    def generator_loss(self, x):
        return tf.reduce_mean(tf.square(self(x) - 1.0))

    def train_step(self, x):
        for loss_fn, optimizer, variables in self.players:
            optimizer.apply(self.gradients(loss_fn, variables, x), variables)
        return {"stepped": tf.ones(())}

    def gradients(self, loss_fn, variables, x):
        with tf.GradientTape() as tape:
            loss = loss_fn(x)
        return tape.gradient(loss, variables)


class InParts(Adversaries):
    """Takes the batch apart for each of the two in turn."""

    def gradients(self, loss_fn, variables, x):
        _, gradients = ka.accumulate_gradients(
            loss_fn, variables, x, micro_batch_size=SIZE
        )
        return gradients


def sgd():
    return keras.optimizers.SGD(0.5, momentum=0.9)


def accumulating():
    return ka.AccumOptimizer(sgd(), STEPS)


def trained(kind, optimizer, batch_size, mode):
    model = compile_in(kind(optimizer), mode, keras.optimizers.SGD(), loss=None)
    (x, _) = data(STEPS * SIZE)
    x[:SIZE] *= 3.0
    for _ in range(2):
        model.fit(x, batch_size=batch_size, shuffle=False, verbose=0)
    return model.critic.get_weights(), model.generator.get_weights()


@pytest.mark.slow_in("graph")
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_each_in_turn_over_the_batch_is_the_large_batch(mode):
    large = trained(Adversaries, sgd, STEPS * SIZE, mode)
    parts = trained(InParts, sgd, STEPS * SIZE, mode)
    for found, expected in zip(parts, large, strict=True):
        assert_close(found, expected)
    small = trained(Adversaries, sgd, SIZE, mode)
    for found, expected in zip(small, large, strict=True):
        assert_differ(found, expected)


def test_windows_of_both_differ_by_the_critic_of_the_last_micro_step():
    class OnlyOneWindow(Adversaries):
        """The critic as it is; the generator by hand, as documented."""

        def train_step(self, x):
            (critic_loss, update_critic, of_critic) = self.players[0]
            (loss_fn, update, variables) = self.players[1]
            parts = np.split(x, STEPS)
            found = [self.gradients(loss_fn, variables, part) for part in parts[:-1]]
            gradients = self.gradients(critic_loss, of_critic, x)
            update_critic.apply(gradients, of_critic)
            found.append(self.gradients(loss_fn, variables, parts[-1]))
            update.apply([sum(g) / STEPS for g in zip(*found)], variables)
            return {"stepped": tf.ones(())}

    documented = trained(OnlyOneWindow, sgd, STEPS * SIZE, "eager")
    windows = trained(Adversaries, accumulating, SIZE, "eager")
    for found, expected in zip(windows, documented, strict=True):
        assert_close(found, expected)
    large = trained(Adversaries, sgd, STEPS * SIZE, "eager")
    assert_differ(windows[1], large[1])
