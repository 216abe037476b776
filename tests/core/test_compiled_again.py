"""What was found out about a model is found out again when it is compiled again.

A model is fine-tuned in two phases, or its loss is mended after a warning: what held
before says nothing of what holds now.
"""

import gc
import warnings
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import data, dense_model
from test_moving_state import Codebook

import keras_accum as ka
from keras_accum._backend.private.models import OfCompilation

X, Y = data(8, outputs=3)
OWN_LOSS = "This model has a `compute_loss` of its own"
COUPLED = "A loss of this model is not made of losses of its samples alone"


class Super(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **kwargs):
        return super().compute_loss(x, y, y_pred, sample_weight, **kwargs)


def of_super():
    model = dense_model()
    return Super(model.inputs, model.outputs)


def centered(y, y_pred):
    """Compares each sample with the mean of its batch."""
    return tf.reduce_mean(tf.square(y - y_pred + tf.reduce_mean(y_pred, 0)), -1)


def alone(y, y_pred):
    return tf.reduce_mean(tf.square(y - y_pred), -1)


def fit(model, loss, route):
    """Compile and train; what that warns of."""
    optimizer = keras.optimizers.SGD(0.1)
    if route == "optimizer":
        optimizer = ka.AccumOptimizer(optimizer, 4)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", UserWarning)
        model.compile(optimizer, loss, run_eagerly=True)
        rows = 2 if route == "optimizer" else 8
        model.fit(X, Y, batch_size=rows, shuffle=False, verbose=0)
    return [str(each.message) for each in found]


@pytest.mark.parametrize("route", ["optimizer", "step"])
@pytest.mark.parametrize(("make", "text"), [(of_super, OWN_LOSS), (dense_model, COUPLED)])
def test_another_loss_is_looked_at(route, make, text):
    model = make()
    if route == "step":
        ka.accumulate(model, accum_steps=4)
    assert not fit(model, alone, route)  # The control: one that is as it should be.
    assert [said.startswith(text) for said in fit(model, centered, route)] == [True]
    with_another = fit(model, lambda y, y_pred: centered(y, y_pred), route)
    assert [said.startswith(text) for said in with_another] == [True]
    assert not fit(model, alone, route)


@pytest.mark.parametrize("route", ["optimizer", "step"])
def test_a_layer_that_is_trained_from_now_on_is_looked_at(route):
    class Trained(Codebook):
        def call(self, inputs, training=False):
            return super().call(inputs, training=training and self.trainable)

    model = keras.Sequential([keras.Input((5,)), Trained(), keras.layers.Dense(3)])
    if route == "step":
        ka.accumulate(model, accum_steps=4)
    model.layers[0].trainable = False
    assert not fit(model, "mse", route)
    model.layers[0].trainable = True
    assert ["State moves" in said for said in fit(model, "mse", route)] == [True]
    assert not fit(model, "mse", route)  # Of a layer that is as it was, once.


def test_a_memory_ends_with_what_it_is_about():
    memory, model = OfCompilation(dict), dense_model()
    memory(model)["uncompiled"] = 1
    model.compile("sgd", "mse")
    first = weakref.ref(model.optimizer)
    assert not memory(model)
    memory(model)["first"] = 2
    assert memory(model) == {"first": 2}
    model.compile("sgd", "mse")
    assert not memory(model)
    gc.collect()
    assert first() is None
    assert not memory(dense_model())
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_stand_ins_do_not_make_it_forget():
    memory, model = OfCompilation(dict), dense_model()
    model.compile("sgd", "mse")
    memory(model)["known"] = np.pi
    optimizer, vars(model)["optimizer"] = model.optimizer, keras.optimizers.Adam()
    assert not memory(model)
    vars(model)["optimizer"] = optimizer
    assert memory(model) == {"known": np.pi}
