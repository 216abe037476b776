"""Faults of Keras's own accumulation, and of others', that this package does not have.

Where a test is about Keras's `gradient_accumulation_steps`, Keras itself is its control:
the test fails if Keras has mended the fault, and then says so in vain no longer.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    Batches,
    assert_close,
    assert_differ,
    compile_in,
    data,
    dense_model,
    fit,
)

import keras_accum as ka

SGD = keras.optimizers.SGD
Decay = keras.optimizers.schedules.ExponentialDecay


def weights_after(optimizer, sizes, epochs=3, **config):
    x, y = data(sum(sizes))
    model = compile_in(dense_model(**config), "graph", optimizer)
    fit(model, Batches(sizes, x, y), None, None, epochs=epochs)
    return model.get_weights()


def check(inner, sizes=(4, 4), epochs=3, rtol=1e-6, **config):
    """Ours equals the large batch, and Keras's built-in accumulation does not."""
    oracle = weights_after(inner(), [sum(sizes)], epochs, **config)
    ours = weights_after(ka.AccumOptimizer(inner(), len(sizes)), sizes, epochs, **config)
    builtin = inner(gradient_accumulation_steps=len(sizes))
    keras_own = weights_after(builtin, sizes, epochs, **config)
    assert_close(ours, oracle, rtol)
    assert_differ(keras_own, oracle)


def test_moving_averages_follow_updates():
    check(lambda **k: SGD(0.3, use_ema=True, ema_momentum=0.9, **k))


def test_moving_averages_are_kept_once():
    def of_the_weights(optimizer):
        optimizer.build(dense_model().trainable_variables)
        return sum(v.path.endswith("average") for v in optimizer.variables)

    def averaging():
        return SGD(0.3, use_ema=True)

    assert of_the_weights(ka.AccumOptimizer(averaging(), 2)) == 4
    assert of_the_weights(averaging()) == 4
    # Keras's own wrapper does not take the setting over.
    assert of_the_weights(keras.optimizers.LossScaleOptimizer(averaging())) == 4


def test_overwriting_by_the_moving_average_counts_updates():
    check(
        lambda **k: SGD(
            0.3, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2, **k
        ),
        epochs=5,
    )


def test_learning_rate_schedules_read_updates():
    # Keras evaluates a schedule at micro-steps.
    check(lambda **k: SGD(Decay(0.5, 1, 0.5), **k))


def test_a_window_of_uneven_micro_batches_is_the_mean_of_their_samples():
    check(lambda **k: SGD(0.5, **k), sizes=(4, 4, 2))


def test_constraints_run_once_per_update():
    # At each micro-step Keras shrinks what is still above the norm.
    class Halve(keras.constraints.Constraint):
        def __call__(self, weight):
            return weight * 0.5

    check(lambda **k: SGD(0.5, **k), kernel_constraint=Halve())


def test_a_partial_window_does_not_leak_or_get_lost():
    x, y = data(10)

    def run(optimizer, **options):
        model = compile_in(dense_model(), "graph", optimizer)
        fit(model, x, y, 4, **options)
        return model.get_weights()

    oracle = compile_in(dense_model(), "graph", SGD(0.5))
    for rows in (slice(0, 8), slice(8, 10)):
        oracle.train_on_batch(x[rows], y[rows])
    flush = ka.AccumulationMonitor(tail="flush_end")
    assert_close(
        run(ka.AccumOptimizer(SGD(0.5), 2), callbacks=[flush]), oracle.get_weights()
    )
    assert_differ(run(SGD(0.5, gradient_accumulation_steps=2)), oracle.get_weights())


def test_a_sum_loss_is_not_divided_by_the_steps():
    x, y = data(8)
    loss = keras.losses.MeanSquaredError(reduction="sum")

    def run(optimizer, batch_size):
        model = compile_in(dense_model(), "graph", optimizer, loss)
        fit(model, x, y, batch_size)
        return model.get_weights()

    oracle = run(SGD(0.02), 8)
    assert_close(run(ka.AccumOptimizer(SGD(0.02), 2, reduction="sum"), 4), oracle)
    assert_differ(run(SGD(0.02, gradient_accumulation_steps=2), 4), oracle)


def test_a_sum_loss_in_a_mean_of_the_window_is_refused():
    model = dense_model()
    model.compile(
        ka.AccumOptimizer("sgd", 2), keras.losses.MeanSquaredError(reduction="sum")
    )
    x, y = data(4)
    before = model.get_weights()
    message = (
        "Received a loss with `reduction='sum'` (or None) in an optimizer with "
        "`reduction='mean'`, which would divide the sum by the window's length. For the "
        "sum over the window, as the large batch has it, write `AccumOptimizer(..., "
        "reduction='sum')`; for the mean, give the loss "
        "`reduction='sum_over_batch_size'`."
    )
    with pytest.raises(ValueError) as error:
        fit(model, x, y, 2)
    assert str(error.value) == message
    assert_close(model.get_weights(), before, rtol=0)
    assert int(model.optimizer.micro_step) == 0


def messages(caught):
    return [str(w.message) for w in caught if w.category is UserWarning]


def apply_all(optimizer, variable, gradients):
    for gradient in gradients:
        optimizer.apply([gradient], [variable])
    return variable.numpy()


def test_bfloat16_gradients_are_added_in_float32():
    def run(optimizer):
        variable = keras.Variable(np.zeros(1), dtype="bfloat16")
        optimizer.build([variable])
        ones = tf.ones(1, "bfloat16")
        apply = tf.function(lambda: optimizer.apply([ones]), autograph=False)
        for _ in range(512):
            apply()
        return variable.numpy().astype("float32")

    # 512 additions of 1.0, times a rate of 1: the sum stops at 256 in bfloat16.
    assert_close(
        run(ka.AccumOptimizer(SGD(1.0), 512, reduction="sum")), np.array([-512.0])
    )
    assert_close(run(SGD(1.0, gradient_accumulation_steps=512)), np.array([-0.5]))


def test_a_window_of_one_is_allowed():
    with pytest.raises(ValueError, match="must be an integer >= 2"):
        SGD(gradient_accumulation_steps=1)
    variable = keras.Variable([1.0])
    apply_all(ka.AccumOptimizer(SGD(0.5), 1), variable, [tf.constant([1.0])])
    assert_close(variable, np.array([0.5]))


def test_no_gradient_in_the_last_micro_step_keeps_what_came_before():
    def run(optimizer):
        a, b = keras.Variable([0.0]), keras.Variable([0.0])
        optimizer.build([a, b])
        optimizer.apply([tf.constant([4.0]), tf.constant([2.0])], [a, b])
        optimizer.apply([None, tf.constant([6.0])], [a, b])
        return [a, b]

    # The mean over the window of two: 4 / 2 and (2 + 6) / 2.
    assert_close(run(ka.AccumOptimizer(SGD(1.0), 2)), [[-2.0], [-4.0]])
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        assert_differ(run(SGD(1.0, gradient_accumulation_steps=2)), [[-2.0], [-4.0]])


def test_yolov5_3722_ramping_the_steps_gives_regular_windows():
    steps = [1, 2, 3, 3]
    lengths = []
    optimizer = ka.AccumOptimizer(SGD(0.1), 1)
    variable = keras.Variable([0.0])
    for length in steps:
        optimizer.accum_steps = length
        updates, count = int(optimizer.iterations), 0
        while int(optimizer.iterations) == updates:
            optimizer.apply([tf.constant([1.0])], [variable])
            count += 1
        lengths.append(count)
    assert lengths == steps


def test_keras_19990_gradient_accumulator_30_momentum_and_decay_wait():
    inner = keras.optimizers.AdamW(0.1, weight_decay=0.5)
    variable = keras.Variable([1.0, 2.0])
    optimizer = ka.AccumOptimizer(inner, 3)
    optimizer.build([variable])
    state = [v.numpy() for v in [variable, *inner.variables]]
    for _ in range(2):
        optimizer.apply([tf.constant([1.0, 3.0])], [variable])
        assert_close([variable, *inner.variables], state, rtol=0)
    optimizer.apply([tf.constant([1.0, 3.0])], [variable])
    assert_differ([variable], state[:1])


def test_transformers_6969_thirteen_samples_in_batches_of_four():
    oracle = weights_after(SGD(0.5), [13])
    assert_close(weights_after(ka.AccumOptimizer(SGD(0.5), 4), [4, 4, 4, 1]), oracle)
    # What dividing by the number of micro-batches gives.
    means = SGD(0.5, gradient_accumulation_steps=4)
    assert_differ(weights_after(means, [4, 4, 4, 1]), oracle)


def test_tensorflow_55321_a_loss_that_is_a_scalar_says_so():
    def scalar(y_true, y_pred):
        return tf.reduce_mean(tf.square(y_true - y_pred))

    model = compile_in(dense_model(), "graph", ka.AccumOptimizer("sgd", 2), scalar)
    x, y = data(6)
    with pytest.warns(UserWarning) as caught:
        fit(model, x, y, 3)
    assert messages(caught) == [
        "A loss function returns a scalar, and what it divides by cannot be known. "
        "Micro-batches weigh by their samples, a mean over samples. Return one value per "
        "sample and let Keras take the mean; or use `accumulate(model, ..., "
        "two_pass=True)`, which is exact for any loss of the predictions."
    ]


def test_a_custom_compute_loss_says_that_weights_are_unknown():
    class Own(keras.Model):
        def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
            return tf.reduce_mean(tf.square(y - y_pred))

    base = dense_model()
    model = compile_in(
        Own(base.inputs, base.outputs), "graph", ka.AccumOptimizer("sgd", 2)
    )
    x, y = data(6)
    with pytest.warns(UserWarning, match="a `compute_loss` of its own"):
        fit(model, x, y, 3)


def test_a_custom_compute_loss_that_calls_keras_is_weighed():
    class Own(keras.Model):
        def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
            return 2.0 * super().compute_loss(x, y, y_pred, sample_weight, training)

    def run(optimizer, batch_size):
        base = dense_model()
        model = compile_in(Own(base.inputs, base.outputs), "graph", optimizer)
        x, y = data(10)
        fit(model, x, y, batch_size)
        return model.get_weights()

    assert_close(run(ka.AccumOptimizer(SGD(0.2), 3), 4), run(SGD(0.2), 10))


def test_several_losses_with_unlike_denominators_are_warned_of():
    inputs = keras.Input((5,))
    model = keras.Model(
        inputs, [keras.layers.Dense(1, name=name)(inputs) for name in ("a", "b")]
    )
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    compile_in(model, "graph", ka.AccumOptimizer("sgd", 2), [loss, loss])
    x, y = data(6, outputs=1)
    weights = [np.arange(6.0), np.ones(6)]
    with pytest.warns(UserWarning) as caught:
        fit(model, x, [y, y], 3, sample_weight=weights)
    assert messages(caught)[:1] == [
        "This model has several losses, and masks, sample weights or variable lengths "
        "may give each of them another denominator. One gradient for all of them can be "
        "weighted by one denominator only: the first loss's is used. It is exact if the "
        "others are proportional to it from micro-batch to micro-batch. "
        "`accumulate(model, ...)` is exact for all."
    ]
