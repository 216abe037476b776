"""Keras's own callbacks and compile options, which work around the wrapper unchanged."""

import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    Batches,
    assert_close,
    assert_differ,
    assert_equal,
    compile_in,
    data,
    dense_model,
    fit,
    since_keras,
    slots,
)

from keras_accum import AccumOptimizer, AccumulationMonitor

ROWS = 24


def sgd(**options):
    return keras.optimizers.SGD(0.1, momentum=0.9, **options)


def pair(inner, *, mode="eager", steps=3, **options):
    """A model that accumulates, and the large batch: the same without."""
    accumulating = AccumOptimizer(inner(), steps)
    return (
        compile_in(dense_model(), mode, accumulating, **options),
        compile_in(dense_model(), mode, inner(), **options),
    )


def fit_both(models, make_callbacks=list, *, epochs=2, **options):
    """Train on micro-batches of 4, and on the large batches of 12 that they make."""
    x, y = data(ROWS)
    return [
        fit(model, x, y, size, epochs=epochs, callbacks=make_callbacks(), **options)
        for model, size in zip(models, (4, 12))
    ]


def assert_same_state(model, large, rtol=1e-6):
    assert_close(model.get_weights(), large.get_weights(), rtol)
    assert_close(slots(model.optimizer), slots(large.optimizer), rtol)
    assert int(model.optimizer.iterations) == int(large.optimizer.iterations)


# -------------------------------------------------------------------- learning rate


def test_gradient_accumulator_133_a_learning_rate_scheduler_sets_the_rate():
    def halving():
        return [keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)]

    models = model, large = pair(sgd)
    accumulated, whole = fit_both(models, halving)
    rates = [np.float32(0.1 / 2**i) for i in (1, 2)]
    assert accumulated.history["learning_rate"] == rates
    assert whole.history["learning_rate"] == rates
    assert_same_state(model, large)
    constant, _ = pair(sgd)
    fit(constant, *data(ROWS), 4, epochs=2)
    assert_differ(constant.get_weights(), large.get_weights())


@pytest.mark.slow
def test_gradient_accumulator_133_reduce_lr_on_plateau_sets_the_rate():
    def plateau():
        return [
            # No epoch improves by so much: the rate falls after each but the first.
            keras.callbacks.ReduceLROnPlateau(
                "val_loss", factor=0.5, patience=1, min_delta=1e9
            )
        ]

    models = model, large = pair(sgd)
    validation = {"validation_data": data(7, seed=5)}
    accumulated, whole = fit_both(models, plateau, epochs=3, **validation)
    # Logged before it is reduced; the last reduction is seen on the optimizer.
    assert_close(accumulated.history["learning_rate"], [0.1, 0.1, 0.05])
    assert_close(model.optimizer.learning_rate, 0.025)
    assert_close(accumulated.history["val_loss"], whole.history["val_loss"])
    assert_same_state(model, large)
    constant, _ = pair(sgd)
    fit(constant, *data(ROWS), 4, epochs=2)
    assert_differ(constant.get_weights(), large.get_weights())


def multi():
    """Two optimizers, one for the biases."""
    mapping = keras.optimizers.OptimizerMap(
        keras.optimizers.SGD(0.2), {".*bias": keras.optimizers.SGD(0.1, momentum=0.9)}
    )
    return keras.optimizers.MultiOptimizer(mapping)


@pytest.mark.slow
@since_keras("3.15", "MultiOptimizer")
def test_a_learning_rate_scheduler_reaches_the_parts_of_a_multi_optimizer():
    def halving():
        return [keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)]

    models = model, large = pair(multi)
    fit_both(models, halving)
    rates = [float(part.learning_rate) for part in model.optimizer.optimizers]
    assert_close(rates, [0.1 / 4, 0.2 / 4])
    assert_same_state(model, large)
    constant, _ = pair(multi)
    fit(constant, *data(ROWS), 4, epochs=2)
    assert_differ(constant.get_weights(), large.get_weights())


def test_a_rate_set_in_mid_window_is_the_one_of_the_update():
    class SetAtBatch(keras.callbacks.Callback):
        def __init__(self, batch):
            super().__init__()
            self.batch = batch

        def on_train_batch_begin(self, batch, logs=None):
            if batch == self.batch:
                self.model.optimizer.learning_rate = 0.02

    model, large = pair(sgd, mode="graph")
    x, y = data(ROWS)
    fit(model, x, y, 4, callbacks=[SetAtBatch(5)])
    fit(large, x, y, 12, callbacks=[SetAtBatch(1)])
    assert_same_state(model, large)
    earlier, _ = pair(sgd)
    fit(earlier, x, y, 4, callbacks=[SetAtBatch(2)])
    assert_differ(earlier.get_weights(), large.get_weights())


# ------------------------------------------------------------ checkpoints, stopping


@pytest.mark.slow
def test_model_checkpoint_in_mid_window_saves_what_goes_on_exactly(tmp_path):
    x, y = data(ROWS)
    model, _ = pair(sgd)
    path = tmp_path / "batch_{batch}.keras"
    checkpoint = keras.callbacks.ModelCheckpoint(path, save_freq=4)
    fit(model, x, y, 4, epochs=2, callbacks=[checkpoint])
    names = sorted(p.name for p in pathlib.Path(tmp_path).iterdir())
    assert names == ["batch_2.keras", "batch_4.keras", "batch_6.keras"]

    resumed = keras.saving.load_model(tmp_path / "batch_4.keras")
    assert int(resumed.optimizer.micro_step) == 1  # 4 of the 6 of the first epoch
    again = keras.saving.load_model(tmp_path / "batch_4.keras")
    again.optimizer.reset()
    for trained in (resumed, again):
        fit(trained, x[16:], y[16:], 4)
        fit(trained, x, y, 4)
    assert_equal(resumed.get_weights(), model.get_weights())
    assert_equal(slots(resumed.optimizer), slots(model.optimizer))
    assert_differ(again.get_weights(), model.get_weights())


@pytest.mark.slow
def test_early_stopping_restores_the_best_weights_of_the_large_batch():
    def stopping():
        return [
            keras.callbacks.EarlyStopping(
                "val_loss", patience=2, mode="max", restore_best_weights=True
            ),
            # Worse and better in turn, so that the best epoch is in the middle.
            keras.callbacks.LearningRateScheduler(
                lambda epoch: [0.0, -0.1, 0.1][epoch % 3]
            ),
        ]

    def run(model, size):
        callbacks = stopping()
        validation = data(7, seed=5)
        history = fit(
            model,
            *data(ROWS),
            size,
            epochs=8,
            callbacks=callbacks,
            validation_data=validation,
        )
        restored = model.evaluate(*validation, verbose=0)
        return callbacks[0], history.history["val_loss"], restored

    model, large = pair(keras.optimizers.SGD)
    stopped, losses, restored = run(model, 4)
    expected, expected_losses, _ = run(large, 12)
    assert stopped.stopped_epoch == expected.stopped_epoch == 3
    assert stopped.best_epoch == expected.best_epoch == 1
    assert_close(losses, expected_losses)
    assert_close(model.get_weights(), large.get_weights())
    assert_close(restored, losses[1])
    assert_differ(losses[-1], losses[1])


@pytest.mark.slow
@pytest.mark.parametrize("swap_on_epoch", [False, True])
def test_keras_22959_swap_ema_weights_sees_the_wrapped_optimizer(swap_on_epoch):
    def averaged():
        return sgd(use_ema=True, ema_momentum=0.7)

    def swap():
        return [keras.callbacks.SwapEMAWeights(swap_on_epoch=swap_on_epoch)]

    models = model, large = pair(averaged)
    validation = {"validation_data": data(7, seed=5)}
    accumulated, whole = fit_both(models, swap, **validation)
    assert_close(accumulated.history["val_loss"], whole.history["val_loss"])
    assert_same_state(model, large)
    unswapped, _ = pair(averaged)
    history = fit(unswapped, *data(ROWS), 4, epochs=2, **validation)
    assert_differ(history.history["val_loss"], whole.history["val_loss"])


def test_averages_replace_no_weights_before_the_first_update():
    """`fit` puts them in place at its end. Before there are any, they are zeros."""

    def averaged():
        return sgd(use_ema=True, ema_momentum=0.7)

    model, large = pair(averaged)
    x, y = data(12)
    fit(model, x[:8], y[:8], 4)
    assert int(model.optimizer.micro_step) == 2
    assert_equal(model.get_weights(), dense_model().get_weights())
    fit(model, x[8:], y[8:], 4)
    fit(large, x, y, 12)
    assert_same_state(model, large)
    assert_differ(model.get_weights(), dense_model().get_weights())


@pytest.mark.slow
@since_keras("3.15", "MultiOptimizer")
def test_swap_ema_weights_sees_a_multi_optimizer_inside():
    def averaged():
        parts = keras.optimizers.OptimizerMap(
            keras.optimizers.SGD(0.2, use_ema=True, ema_momentum=0.7),
            {".*bias": keras.optimizers.SGD(0.1)},
        )
        return keras.optimizers.MultiOptimizer(parts)

    def swap():
        return [keras.callbacks.SwapEMAWeights()]

    models = model, large = pair(averaged)
    validation = {"validation_data": data(7, seed=5)}
    accumulated, whole = fit_both(models, swap, **validation)
    assert_close(accumulated.history["val_loss"], whole.history["val_loss"])
    assert_same_state(model, large)
    unswapped, _ = pair(averaged)
    history = fit(unswapped, *data(ROWS), 4, epochs=2, **validation)
    assert_differ(history.history["val_loss"], whole.history["val_loss"])


def test_swap_ema_weights_refuses_an_optimizer_without_averages_as_in_keras():
    for model in pair(sgd):
        with pytest.raises(ValueError, match="SwapEMAWeights must be used when"):
            fit(
                model,
                *data(8),
                4,
                callbacks=[keras.callbacks.SwapEMAWeights()],
                validation_data=data(4),
            )


# ---------------------------------------------------------------------- TensorBoard


def scalars(folder):
    """The scalars in the event files of a folder: tag -> list of (step, value)."""
    found = {}
    for path in sorted(pathlib.Path(folder).glob("**/events.out.*")):
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                number = tf.make_ndarray(value.tensor)
                if number.shape == () and number.dtype != object:
                    found.setdefault(value.tag, []).append((event.step, number.item()))
    return found


def test_tensorboard_shows_updates_norms_and_the_learning_rate(tmp_path):
    pytest.importorskip("tensorboard", reason="tf.summary writes nothing without it")
    rates = keras.optimizers.schedules.PiecewiseConstantDecay([2], [0.1, 0.02])

    def scheduled():
        return keras.optimizers.SGD(rates)

    def board(name):
        return keras.callbacks.TensorBoard(
            tmp_path / name, update_freq=1, write_graph=False
        )

    x, y = data(ROWS)
    model, large = pair(scheduled)
    callbacks = [AccumulationMonitor(), board("accumulated")]
    history = fit(model, x, y, 4, epochs=2, callbacks=callbacks).history
    fit(large, x, y, 12, epochs=2, callbacks=[board("large")])
    found = scalars(tmp_path / "accumulated")
    expected = scalars(tmp_path / "large")

    assert found["epoch_updates"] == [(0, 2.0), (1, 4.0)]
    assert_close([v for _, v in found["epoch_gradient_norm"]], history["gradient_norm"])
    # The schedule has moved on after two updates, not after two micro-batches.
    assert_close([v for _, v in found["epoch_learning_rate"]], [0.1, 0.02])
    assert found["epoch_learning_rate"] == expected["epoch_learning_rate"]
    assert [v for _, v in found["batch_updates"]] == [0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4]
    assert "epoch_updates" not in expected


# ------------------------------------------------------------------ compile options


@pytest.mark.slow_but("1")
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_steps_per_execution_changes_no_number(steps):
    # Of 7 micro-batches: 4 executions of 2, 3 of 3, 2 of 4, none in step with windows.
    x, y = data()
    model = compile_in(
        dense_model(), "graph", AccumOptimizer(sgd(), 3), steps_per_execution=steps
    )
    fit(model, x, y, 4, epochs=3)
    large = compile_in(dense_model(), "eager", sgd())
    rows = np.r_[0:26, 0:26, 0:26]
    sizes = [12, 12, 10, 12, 10, 12, 10]  # each seventh micro-batch has 2 rows
    assert sum(sizes) == 78
    large.fit(Batches(sizes, x[rows], y[rows]), shuffle=False, verbose=0)
    assert int(model.optimizer.iterations) == 7
    assert int(model.optimizer.micro_step) == 0
    assert_same_state(model, large)
    other = compile_in(dense_model(), "eager", sgd())
    other.fit(Batches(sizes[::-1], x[rows], y[rows]), shuffle=False, verbose=0)
    assert_differ(other.get_weights(), large.get_weights())


@pytest.mark.slow_but("{'run_eagerly': True}")
@pytest.mark.parametrize(
    "options",
    [
        {"jit_compile": False},
        {"jit_compile": "auto"},
        {"jit_compile": True, "steps_per_execution": 2},
        {"run_eagerly": True},
    ],
    ids=str,
)
def test_every_way_to_compile_gives_the_same_numbers(options):
    # As a user compiles: nothing is built before.
    model = dense_model()
    model.compile(AccumOptimizer(sgd(), 3), loss="mse", **options)
    large = compile_in(dense_model(), "eager", sgd())
    fit(model, *data(ROWS), 4, epochs=2)
    fit(large, *data(ROWS), 12, epochs=2)
    assert_same_state(model, large)
    unlike = compile_in(dense_model(), "eager", sgd())
    fit(unlike, *data(ROWS), 4, epochs=2)
    assert_differ(unlike.get_weights(), large.get_weights())


def test_train_on_batch_accumulates_too():
    x, y = data(ROWS)
    model, large = pair(sgd, mode="graph")
    for start in range(0, ROWS, 4):
        model.train_on_batch(x[start : start + 4], y[start : start + 4])
    for start in range(0, ROWS, 12):
        large.train_on_batch(x[start : start + 12], y[start : start + 12])
    assert_same_state(model, large)
    reset, _ = pair(sgd)
    for start in range(0, ROWS, 4):
        reset.train_on_batch(x[start : start + 4], y[start : start + 4])
        reset.optimizer.reset()
    assert_differ(reset.get_weights(), large.get_weights())


# ------------------------------------------------------------------------- tracing


class Counted(keras.Model):
    """Counts how often Python runs its step: once a trace, or once an eager step."""

    traces = 0

    def train_step(self, *arguments):
        self.traces += 1
        return super().train_step(*arguments)


def traced(optimizer, run, built=True, **options):
    """The steps that Python has run in `run(model)`."""
    base = dense_model()
    model = Counted(base.inputs, base.outputs)
    if built:
        optimizer.build(model.trainable_variables)
    model.compile(optimizer, loss="mse", **options)
    run(model)
    return model.traces


def short_last_batches(model):
    fit(model, *data(), 4, epochs=4)


def growing_windows(model):
    for steps in (1, 2, 5):
        model.optimizer.accum_steps = steps
        fit(model, *data(), 4)
    # 7 micro-batches each time: 7 updates; 3, and one is held; that window, and one.
    assert int(model.optimizer.iterations) == 12


def evaluated_and_flushed(model):
    callbacks = [AccumulationMonitor(tail="flush_epoch")]
    validation = data(7, seed=5)
    fit(model, *data(), 4, epochs=3, callbacks=callbacks, validation_data=validation)


@pytest.mark.slow_but("{'jit_compile': False}")
@pytest.mark.parametrize(
    "options",
    [
        {"jit_compile": False},
        {"jit_compile": True},
        {"jit_compile": False, "steps_per_execution": 3},
    ],
    ids=str,
)
def test_gradient_accumulator_102_one_trace_serves_all_epochs(options):
    assert traced(AccumOptimizer(sgd(), 3), short_last_batches, **options) == 1


def test_gradient_accumulator_102_as_many_traces_as_plain_keras():
    # Which traces again after the trace that has created the variables.
    options = {"built": False, "jit_compile": False}
    plain = traced(sgd(), short_last_batches, **options)
    assert plain == 2
    assert traced(AccumOptimizer(sgd(), 3), short_last_batches, **options) == plain


@pytest.mark.slow_in("growing_windows")
@pytest.mark.parametrize("run", [growing_windows, evaluated_and_flushed])
def test_neither_new_lengths_nor_flushes_trace_again(run):
    assert traced(AccumOptimizer(sgd(), 3), run, jit_compile=False) == 1


def test_a_schedule_of_steps_is_traced_once():
    schedule = AccumOptimizer(sgd(), lambda update: 1 + update // 2)
    assert traced(schedule, short_last_batches, jit_compile=False) == 1


def test_eager_steps_are_counted_one_by_one():
    # A control of the tests above: what runs each time is seen each time.
    optimizer = AccumOptimizer(sgd(), 3)
    assert traced(optimizer, short_last_batches, run_eagerly=True) == 4 * 7
