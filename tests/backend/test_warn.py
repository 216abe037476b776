"""Warnings point at the line of the user's that led to them, and are said once."""

import inspect
import linecache
import threading
import warnings

import keras
import pytest
import tensorflow as tf
from helpers import compile_in, data, dense_model

import keras_accum as ka
from keras_accum._backend.warn import warn

SCALAR = "A loss function returns a scalar, and what it divides by cannot be known"


def scalar_loss(y, y_pred):
    return tf.reduce_mean(tf.square(y - y_pred))


def line_of(warning):
    """The line of source that a warning points at."""
    assert warning.filename == __file__
    return linecache.getline(warning.filename, warning.lineno).strip()


def only(found, text=""):
    (warning,) = [w for w in found if text in str(w.message)]
    return warning


@pytest.mark.slow_but("eager-optimizer", "graph-step")
@pytest.mark.parametrize("route", ["optimizer", "step"])
def test_a_warning_of_a_step_points_at_the_line_that_trains(route, mode):
    model = dense_model()
    optimizer = keras.optimizers.SGD()
    if route == "step":
        ka.accumulate(model, accum_steps=2)
    else:
        optimizer = ka.AccumOptimizer(optimizer, 2)
    compile_in(model, mode, optimizer, loss=scalar_loss)
    with pytest.warns(UserWarning, match=SCALAR) as found:
        model.fit(*data(4), batch_size=2, verbose=0)  # here
    assert {line_of(w) for w in found if SCALAR in str(w.message)} == {
        "model.fit(*data(4), batch_size=2, verbose=0)  # here"
    }


def test_in_a_step_of_the_users_it_points_at_the_line_that_computes_the_loss():
    class Stepping(keras.Model):
        def train_step(self, batch):
            x, y = batch
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x))  # here
            variables = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)
            return {"loss": loss}

    plain = dense_model()
    model = Stepping(plain.inputs, plain.outputs)
    compile_in(model, "graph", ka.AccumOptimizer("sgd", 2), loss=scalar_loss)
    with pytest.warns(UserWarning, match=SCALAR) as found:
        model.fit(*data(4), batch_size=2, verbose=0)
    assert {line_of(w) for w in found if SCALAR in str(w.message)} == {
        "loss = self.compute_loss(x, y, self(x))  # here"
    }


def test_in_code_that_autograph_has_converted_it_points_at_the_call_of_it():
    model = dense_model()
    compile_in(model, "graph", ka.AccumOptimizer("sgd", 2), loss=scalar_loss)
    x, y = data(4)

    @tf.function
    def loss():
        return model.compute_loss(x, y, model(x))

    with pytest.warns(UserWarning, match=SCALAR) as found:
        loss()  # here
    assert {line_of(w) for w in found} == {"loss()  # here"}


def test_in_a_thread_of_a_library_it_points_at_what_the_main_one_waits_for():
    thread = threading.Thread(target=warn, args=("In a thread.",))
    with pytest.warns(UserWarning, match="In a thread") as found:
        thread.start(), thread.join()  # here
    assert line_of(only(found)) == "thread.start(), thread.join()  # here"


def test_the_usual_filter_says_it_once_for_a_line():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for _ in range(3):
            warn("Said.")
        warn("Said.")
        warn("Something else.")
    assert [str(w.message) for w in found] == ["Said.", "Said.", "Something else."]


def test_what_is_said_about_an_object_is_said_once_whatever_the_filter():
    first, second = ka.AccumOptimizer("sgd", 2), ka.AccumOptimizer("sgd", 2)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(3):
            warn("Said.", about=first)
        warn("Said.", about=second)
        warn("Something else.", about=first)
        for _ in range(2):
            warn("Of nothing.")
    said = [str(w.message) for w in found]
    assert said == ["Said.", "Said.", "Something else.", "Of nothing.", "Of nothing."]


def test_a_filter_for_the_users_module_applies():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", module=inspect.getmodulename(__file__))
        warn("Said.")
    assert not found


def test_a_function_that_cannot_be_remembered_is_warned_of_each_time():
    class Unhashable:
        __hash__ = None

    with pytest.warns(UserWarning) as found:
        warn("twice", about=(function := Unhashable()))
        warn("twice", about=function)
    assert len(found) == 2
