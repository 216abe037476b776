"""What Keras, and people who know it, do with an optimizer that wraps another."""

import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    assert_close,
    assert_differ,
    assert_equal,
    assert_refused,
    data,
    dense_model,
    told,
)

import keras_accum as ka

FUNCTIONS = """
import gc
import keras
from keras.src.losses import loss
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.trainers.trainer import Trainer

def functions():
    named = ("reduce_weighted_values", "scale_loss_for_distribution")
    methods = (
        (Trainer, "compute_loss"),
        (Trainer, "_compute_loss"),
        (keras.losses.Loss, "__call__"),
        (keras.layers.Layer, "add_loss"),
        (BaseOptimizer, "apply"),
    )
    return [*[vars(loss)[n] for n in named], *[vars(c)[n] for c, n in methods]]

before = functions()
import keras_accum as ka
optimizer = ka.AccumOptimizer("sgd", 2)
assert functions() == before
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile(optimizer, "mse")
assert not set(functions()) & set(before)
del model, optimizer
gc.collect()
assert functions() == before
"""


def test_keras_has_its_own_functions_until_a_model_is_met_and_after():
    done = subprocess.run(
        [sys.executable, "-c", FUNCTIONS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_variables_excluded_from_weight_decay_do_not_decay():
    def train(make):
        model = dense_model()
        model.compile(make(), "mse", jit_compile=False)
        model.fit(*data(8), batch_size=8, verbose=0)
        return model.get_weights()

    def plain(excluded=True):
        optimizer = keras.optimizers.SGD(0.01, weight_decay=0.5)
        if excluded:
            optimizer.exclude_from_weight_decay(var_names=["kernel"])
        return optimizer

    def wrapped():
        optimizer = ka.AccumOptimizer(plain(excluded=False), 1)
        optimizer.exclude_from_weight_decay(var_names=["kernel"])
        return optimizer

    assert_equal(train(wrapped), train(plain))
    assert_differ(train(wrapped), train(lambda: plain(excluded=False)))


@pytest.mark.parametrize(
    ("name", "value"),
    [("weight_decay", 0.5), ("global_clipnorm", 0.1), ("momentum", 0.9)],
)
def test_settings_are_those_of_the_inner_optimizer(name, value):
    inner = keras.optimizers.SGD(0.1, **{name: value})
    optimizer = ka.AccumOptimizer(inner, 2)
    assert getattr(optimizer, name) == value
    if name != "momentum":
        setattr(optimizer, name, 0.25)
        assert getattr(inner, name) == 0.25


def test_what_nobody_has_is_missing():
    with pytest.raises(AttributeError, match="no attribute 'no_such_thing'"):
        _ = ka.AccumOptimizer("sgd", 2).no_such_thing


def test_weights_are_set_on_the_inner_optimizer():
    model = dense_model()
    plain = keras.optimizers.Adam()
    plain.build(model.trainable_variables)
    values = [np.full(v.shape, i + 1, v.dtype) for i, v in enumerate(plain.variables)]
    optimizer = ka.AccumOptimizer("adam", 2)
    optimizer.build(model.trainable_variables)
    optimizer.set_weights(values)
    assert_equal(optimizer.inner_optimizer.variables, values)
    message = r"Received 1 arrays. The inner optimizer has 10 variables, and \d+ with"
    with pytest.raises(ValueError, match=message):
        optimizer.set_weights(values[:1])
    assert_equal(optimizer.inner_optimizer.variables, values)


@pytest.mark.slow_in("False")
@pytest.mark.parametrize("eager", [True, False])
def test_variables_without_a_gradient_are_named(eager):
    class Unused(keras.layers.Layer):
        def build(self, shape):
            self.held = self.add_weight(shape=(2,), name="unused")

        def call(self, x):
            return x

    model = keras.Sequential([keras.Input((5,)), Unused(), keras.layers.Dense(3)])
    optimizer = ka.AccumOptimizer(keras.optimizers.SGD(0.1, weight_decay=0.1), 2)
    model.compile(optimizer, "mse", run_eagerly=eager, jit_compile=False)
    before = model.layers[0].held.numpy()
    with pytest.warns(UserWarning) as caught:
        model.fit(*data(16), batch_size=2, verbose=0)
    path = model.layers[0].held.path
    assert told(caught) == [
        f"Gradients do not exist for variables ['{path}'] in a window of micro-batches: "
        "the loss does not depend on them. They are left as they are."
    ]
    assert_equal(model.layers[0].held, before)


def test_a_layer_frozen_in_mid_window_does_not_move():
    model = dense_model()
    optimizer = ka.AccumOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), 2)
    model.compile(optimizer, "mse", run_eagerly=True)
    x, y = data(8)
    before = model.get_weights()
    model.train_on_batch(x[:4], y[:4])
    model.layers[1].trainable = False
    model.train_on_batch(x[4:], y[4:])
    assert int(optimizer.iterations) == 1
    assert_equal(model.layers[1].get_weights(), before[:2])
    assert_differ(model.layers[2].get_weights()[:1], before[2:3])


def test_a_checkpoint_that_does_not_fit_changes_nothing():
    class Store(dict):
        pass

    def built(units):
        optimizer = ka.AccumOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), 2)
        variable = keras.Variable(np.ones(units, "float32"))
        optimizer.build([variable])
        optimizer.apply([tf.ones(units)], [variable], weight=1.0)
        return optimizer

    def numbers(optimizer):
        return [v.numpy() for v in optimizer.variables]

    store = Store()
    built(3).save_own_variables(store)
    inside = Store({name: value for name, value in store.items() if name.isdecimal()})
    optimizer = built(2)
    before = numbers(optimizer)
    with pytest.raises(ValueError, match="The saved window does not fit the variables"):
        optimizer.load_own_variables(store)
    assert_equal(numbers(optimizer), before)
    with pytest.raises(ValueError, match="The saved state does not fit the variables"):
        optimizer.load_own_variables(inside)
    assert_equal(numbers(optimizer), before)
    # Of the right shapes inside, and the wrong ones in the window; or without a window.
    store = Store()
    built(2).save_own_variables(store)
    store["sum_0"] = np.ones(3)
    with pytest.raises(ValueError, match="The saved window does not fit the variables"):
        optimizer.load_own_variables(store)
    assert_equal(numbers(optimizer), before)


@pytest.mark.parametrize("eager", [True, False])
def test_an_optimizer_that_starts_from_the_weights(eager):
    if not hasattr(keras.optimizers, "ScheduleFreeAdamW"):
        pytest.skip("this Keras has no ScheduleFreeAdamW")

    def model_of(*first):
        keras.utils.set_random_seed(1)
        return keras.Sequential([*first, keras.layers.Dense(3)])

    def train(model, optimizer, batch):
        model.compile(optimizer, "mse", run_eagerly=eager, jit_compile=False)
        model.fit(*data(8), batch_size=batch, shuffle=False, verbose=0)
        return model.get_weights()

    def inner():
        return keras.optimizers.ScheduleFreeAdamW(0.1)

    plain, optimizer = model_of(keras.Input((5,))), inner()
    optimizer.build(plain.trainable_variables)
    expected = train(plain, optimizer, 8)
    assert_close(
        train(model_of(keras.Input((5,))), ka.AccumOptimizer(inner(), 2), 4), expected
    )
    if eager:
        assert_close(train(model_of(), ka.AccumOptimizer(inner(), 2), 4), expected)
        return
    message = "ScheduleFreeAdamW starts from the values of the weights, and this model"
    with pytest.raises(ValueError, match=message):
        train(model_of(), ka.AccumOptimizer(inner(), 2), 4)


def float16_model(policy="mixed_float16"):
    keras.utils.set_random_seed(1)
    dense = keras.layers.Dense(3, dtype=policy)
    return keras.Sequential([keras.Input((5,)), dense])


def test_compile_can_say_not_to_scale_the_loss():
    for auto_scale_loss in (True, False):
        model, optimizer = float16_model(), ka.AccumOptimizer("sgd", 2)
        model.compile(
            optimizer, "mse", auto_scale_loss=auto_scale_loss, jit_compile=False
        )
        model.fit(*data(8), batch_size=4, verbose=0)
        assert optimizer.scales_dynamically is auto_scale_loss


def test_float16_data_are_no_reason_to_scale():
    x, y = data(8)
    model, optimizer = float16_model("float32"), ka.AccumOptimizer("sgd", 2)
    model.compile(optimizer, "mse", jit_compile=False)
    batches = tf.data.Dataset.from_tensor_slices((x.astype("float16"), y)).batch(4)
    model.fit(batches, shuffle=False, verbose=0)
    assert optimizer.scales_dynamically is False


def test_a_policy_that_scaling_would_ignore_is_refused():
    expected = (
        "Received on_nonfinite='raise' where the loss is scaled dynamically (a "
        "LossScaleOptimizer inside, or a mixed_float16 policy). There an overflow is "
        "expected: it skips the window and halves the scale. Leave `on_nonfinite` out; or "
        "train without scaling, with `compile(auto_scale_loss=False)` or in "
        "mixed_bfloat16."
    )
    inner = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    with pytest.raises(ValueError) as caught:
        ka.AccumOptimizer(inner, 2, on_nonfinite="raise")
    assert str(caught.value) == expected
    model = float16_model()
    model.compile(ka.AccumOptimizer("sgd", 2, on_nonfinite="raise"), "mse")
    before = model.get_weights()
    with pytest.raises(ValueError) as caught:
        model.fit(*data(8), batch_size=4, verbose=0)
    assert expected in str(caught.value)
    assert_equal(model.get_weights(), before)


def test_the_scale_settles_where_the_large_batchs_does():
    """Each loss is differentiated by its share, so that float16 overflows alike."""

    def train(batch, optimizer):
        model = float16_model()
        model.compile(optimizer, "mse", jit_compile=False)
        x, y = data(64)
        for _ in range(6):
            model.fit(30 * x, 400 * y, batch_size=batch, shuffle=False, verbose=0)
        return model

    large = train(64, keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1e-4)))
    small = train(4, ka.AccumOptimizer(keras.optimizers.SGD(1e-4), 16))
    scales = [float(m.optimizer.dynamic_scale) for m in (large, small)]
    assert scales[0] == scales[1] < 2**15
    assert_close(small.get_weights(), large.get_weights(), 5e-3)


# --- Optimizers of the user's.


class Clips(keras.optimizers.SGD):
    """As old optimizers do it: `fit` calls this, and it calls `apply`."""

    def apply_gradients(self, grads_and_vars):
        pairs = [(keras.ops.clip(g, -0.01, 0.01), v) for g, v in grads_and_vars]
        return super().apply_gradients(pairs)


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("route", ["optimizer", "step"])
def test_gradients_are_applied_by_a_method_of_the_users(route, mode):
    x, y = data(12)

    def train(optimizer, batch_size, **split):
        model = dense_model()
        if split:
            ka.accumulate(model, **split)
        model.compile(optimizer, "mse", run_eagerly=mode == "eager", jit_compile=False)
        model.fit(x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    expected = train(Clips(0.3), 12)
    if route == "step":
        found = train(Clips(0.3), 12, micro_batch_size=5)
    else:
        found = train(ka.AccumOptimizer(Clips(0.3), 3), 4)
    assert_close(found, expected)
    assert_differ(train(keras.optimizers.SGD(0.3), 12), expected)


class Scales(keras.optimizers.SGD):
    def scale_loss(self, loss):
        return 128.0 * loss

    def apply(self, grads, trainable_variables=None):
        return super().apply([g / 128.0 for g in grads], trainable_variables)


class Halves(keras.optimizers.LossScaleOptimizer):
    def apply(self, grads, trainable_variables=None):
        return super().apply([0.5 * g for g in grads], trainable_variables)


class OnlyNamed(keras.optimizers.LossScaleOptimizer):
    """Has no code of its own."""


def test_a_scaling_of_the_users_own_is_refused():
    for part in (Scales(), keras.optimizers.LossScaleOptimizer(Scales())):
        assert_refused(
            lambda part=part: ka.AccumOptimizer(part, 2),
            ValueError,
            "`AccumOptimizer` scales the loss itself. Received: Scales, which overrides "
            "`scale_loss`. Pass a `keras.optimizers.LossScaleOptimizer`; or use "
            "`accumulate(model, ...)`, which takes any optimizer.",
        )
    assert_refused(
        lambda: ka.AccumOptimizer(Halves(keras.optimizers.SGD()), 2),
        ValueError,
        "`AccumOptimizer` scales the loss itself, and takes the settings of a "
        "LossScaleOptimizer over, not its code. Received: Halves, which overrides "
        "`apply`. Override `apply` of the optimizer inside; or use `accumulate(model, "
        "...)`, which takes any optimizer.",
    )
    ka.AccumOptimizer(OnlyNamed(keras.optimizers.SGD()), 2)
