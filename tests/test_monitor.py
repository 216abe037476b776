"""`AccumulationMonitor`: what becomes of open windows, and what it says and logs."""

import contextlib
import functools
import logging
import pathlib
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    Batches,
    assert_close,
    assert_differ,
    assert_equal,
    assert_refused,
    compile_in,
    data,
    dense_model,
    fit,
    slots,
)

import keras_accum as ka
from keras_accum import AccumOptimizer, AccumulationMonitor

# 26 rows in micro-batches of 4, the seventh of 2, in windows of 4 micro-batches, for two
# epochs: the rows of each update, if every epoch yields rows 0 to 26 in order.
WINDOWS = {
    "carry": ([16, 14, 16], np.r_[0:26, 0:20]),
    "flush_epoch": ([16, 10, 16, 10], np.r_[0:26, 0:26]),
    "flush_end": ([16, 14, 16, 6], np.r_[0:26, 0:26]),
    "drop": ([16, 16], np.r_[0:16, 0:16]),
}

LEFT_OVER = (
    "{} micro-batches are left over in an open window: no update has used them. The next "
    "`fit` goes on with them; `tail='flush_end'` updates with them."
)
IDLE = "Epoch {} has made no update: it has fewer micro-batches than a window ({} held)."
NO_UPDATE = (
    "This training has made no update: the open window holds {} of {} micro-batches. The "
    "next `fit` goes on with them. For an update with them, call `optimizer.flush()`, or "
    "pass the callback `AccumulationMonitor(tail='flush_end')`."
)
ALL_DROPPED = (
    "This training has made no update: {} micro-batches were dropped before they filled "
    "a window of {}."
)
SKIPPED = (
    "Epoch {} has made no update: all {} windows were skipped. Each held an infinity or "
    "a NaN (on_nonfinite='skip_window'). Look at the data, the loss and the learning "
    "rate."
)
OVERFLOWN = (
    "Epoch {} has made no update: all {} were skipped. Each held an infinity or a NaN. "
    "The loss scale has fallen to {} (dtype policy 'mixed_float16'). If no scale is "
    "small enough, the loss itself is not finite: look at the data, the loss and the "
    "learning rate."
)
DROPPED = "{} micro-batches at the end of the epoch dropped."


def start(rows=4, steps=4, replicas=1, effective=16, updates="1.75", memory="0.0"):
    return (
        f"{rows} samples x {steps} accum_steps x {replicas} replicas = effective batch "
        f"{effective}; {updates} updates per epoch; accumulators: {memory} MiB"
    )


def sgd(**options):
    return keras.optimizers.SGD(0.1, momentum=0.9, **options)


def averaged_sgd():
    return sgd(use_ema=True, ema_momentum=0.7)


def accumulating(mode="eager", steps=4, inner=None, options=None, **compiled):
    inner = sgd() if inner is None else inner
    optimizer = AccumOptimizer(inner, steps, **(options or {}))
    return compile_in(dense_model(), mode, optimizer, **compiled)


@functools.cache
def large_batches(tail, make=sgd):
    """The weights and slots that plain Keras ends with on the windows of two epochs."""
    sizes, rows = WINDOWS[tail]
    x, y = data()
    model = compile_in(dense_model(), "eager", make())
    model.fit(Batches(sizes, x[rows], y[rows]), shuffle=False, verbose=0)
    return model.get_weights(), slots(model.optimizer)


def monitored(model, tail="carry", *, samples=26, epochs=2, batch_size=4, **options):
    return fit(
        model,
        *data(samples),
        batch_size,
        epochs=epochs,
        callbacks=[AccumulationMonitor(tail=tail)],
        **options,
    )


@contextlib.contextmanager
def only_warning(message):
    """Raise unless exactly one warning is given inside, with this text, of a test."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", UserWarning)
        yield
    assert [str(w.message) for w in found] == [message]
    assert pathlib.Path(found[0].filename).parent == pathlib.Path(__file__).parent


@pytest.fixture
def messages(caplog):
    """What the package says from now on: a function to (level, text) pairs."""
    caplog.set_level(logging.INFO, "keras_accum")

    def read():
        records = [r for r in caplog.records if r.name == "keras_accum"]
        return [(record.levelname, record.getMessage()) for record in records]

    return read


# ------------------------------------------------------------------------ the tails


@pytest.mark.slow_but("drop")
@pytest.mark.parametrize("tail", WINDOWS)
def test_each_tail_makes_the_updates_of_its_own_large_batches(tail):
    model = accumulating()
    monitored(model, tail)
    for name in WINDOWS:
        weights, momenta = large_batches(name)
        if name == tail:
            assert_close(model.get_weights(), weights)
            assert_close(slots(model.optimizer), momenta)
            assert int(model.optimizer.iterations) == len(WINDOWS[name][0])
        else:
            assert_differ(model.get_weights(), weights)
    assert int(model.optimizer.micro_step) == (2 if tail == "carry" else 0)


@pytest.mark.slow
@pytest.mark.slow_in("xla")
def test_flushed_epochs_are_epochs_with_the_large_batch(mode):
    model = accumulating(mode)
    monitored(model, "flush_epoch")
    large = compile_in(dense_model(), "eager", sgd())
    fit(large, *data(), 16, epochs=2)
    assert_close(model.get_weights(), large.get_weights())
    assert_close(slots(model.optimizer), slots(large.optimizer))
    carried = accumulating()
    monitored(carried, "carry")
    assert_differ(carried.get_weights(), large.get_weights())


def test_transformers_38837_a_flushed_tail_counts_in_full():
    # Divided by the 4 micro-batches of a whole window, the step would be half of it.
    model = accumulating(inner=keras.optimizers.SGD(0.1))
    before = model.get_weights()
    monitored(model, "flush_epoch", samples=8, epochs=1)
    large = compile_in(dense_model(), "eager", keras.optimizers.SGD(0.1))
    fit(large, *data(8), 8)
    assert_close(model.get_weights(), large.get_weights())
    half = [b + (w - b) / 2 for b, w in zip(before, large.get_weights())]
    assert_differ(model.get_weights(), half)


def test_accelerate_1847_a_short_last_batch_closes_no_window():
    model = accumulating()
    seen = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(logs["updates"])
    )
    fit(model, *data(), 4, callbacks=[AccumulationMonitor(), note])
    assert seen == [0, 0, 0, 1, 1, 1, 1]
    assert int(model.optimizer.micro_step) == 3


@pytest.mark.slow
def test_a_flush_comes_before_validation():
    validation = {"validation_data": data(9, seed=5)}
    model = accumulating()
    history = monitored(model, "flush_epoch", **validation).history
    large = compile_in(dense_model(), "eager", sgd())
    expected = fit(large, *data(), 16, epochs=2, **validation).history
    assert_close(history["val_loss"], expected["val_loss"])
    carried = monitored(accumulating(), "flush_end", **validation).history
    assert_differ(carried["val_loss"], expected["val_loss"])


@pytest.mark.slow
def test_epochs_without_validation_are_flushed_among_those_with():
    validation = {"validation_data": data(9, seed=5), "validation_freq": 2}
    model = accumulating()
    history = monitored(model, "flush_epoch", **validation).history
    large = compile_in(dense_model(), "eager", sgd())
    expected = fit(large, *data(), 16, epochs=2, **validation).history
    assert history["updates"] == [2, 4]
    assert_close(history["val_loss"], expected["val_loss"])
    assert_close(model.get_weights(), large.get_weights())
    carried = monitored(accumulating(), "carry", **validation).history
    assert_differ(carried["val_loss"], expected["val_loss"])


@pytest.mark.slow_but("carry")
@pytest.mark.parametrize("tail", ["carry", "flush_end"])
def test_the_next_fit_goes_on_where_the_tail_left_it(tail):
    # Two calls of one epoch each. Left open, the window of the first is closed by the
    # second; updated with at the end of training, as by flushing each epoch.
    model = accumulating()
    for _ in range(2):
        monitored(model, tail, epochs=1)
    same = {"carry": "carry", "flush_end": "flush_epoch"}[tail]
    assert_close(model.get_weights(), large_batches(same)[0])
    other = {"carry": "flush_epoch", "flush_end": "flush_end"}[tail]
    assert_differ(model.get_weights(), large_batches(other)[0])


def test_a_stop_within_an_epoch_ends_it():
    class StopAfter(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 2

    x, y = data()
    model = accumulating()
    callbacks = [AccumulationMonitor(tail="flush_epoch"), StopAfter()]
    fit(model, x, y, 4, epochs=3, callbacks=callbacks)
    large = compile_in(dense_model(), "eager", sgd())
    fit(large, x[:12], y[:12], 12)
    assert_close(model.get_weights(), large.get_weights())
    assert_differ(model.get_weights(), dense_model().get_weights())


@pytest.mark.slow_but("flush_end")
@pytest.mark.parametrize("tail", ["flush_epoch", "flush_end"])
def test_averaged_weights_are_put_in_place_after_the_last_flush(tail):
    # Keras overwrites the weights by their average before `on_train_end`.
    model = accumulating(inner=averaged_sgd())
    monitored(model, tail)
    weights, averages = large_batches(tail, averaged_sgd)
    assert_close(model.get_weights(), weights)
    assert_close(slots(model.optimizer), averages)
    assert_differ(model.get_weights(), large_batches(tail)[0])


@pytest.mark.slow
def test_after_an_early_stop_the_last_flush_comes_before_the_averages_too():
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = epoch == 1

    def train(epochs, *callbacks, samples=26):
        model = accumulating(inner=averaged_sgd())
        monitor = AccumulationMonitor(tail="flush_end")
        fit(model, *data(samples), 4, epochs=epochs, callbacks=[monitor, *callbacks])
        return model

    stopped, whole = train(9, Stop()), train(2)
    assert_equal(stopped.get_weights(), whole.get_weights())
    assert_close(stopped.get_weights(), large_batches("flush_end", averaged_sgd)[0])
    # And what comes later is not flushed by itself.
    x, y = data()
    fit(stopped, x, y, 4)
    assert int(stopped.optimizer.micro_step.numpy()) == 3
    assert_differ(stopped.get_weights(), whole.get_weights())


def test_after_an_interrupted_training_nothing_is_flushed_by_itself():
    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1 and self.model.optimizer.iterations.numpy() > 1:
                raise KeyboardInterrupt

    model, monitor = accumulating(), AccumulationMonitor(tail="flush_end")
    with pytest.raises(KeyboardInterrupt):
        fit(model, *data(), 4, epochs=3, callbacks=[monitor, Interrupt()])
    model.optimizer.reset()
    fit(model, *data(), 4)
    assert int(model.optimizer.micro_step.numpy()) == 3


@pytest.mark.parametrize(("tail", "left"), [("flush_end", 0), ("carry", 1)])
def test_a_loop_that_is_not_fit_is_flushed_at_its_end(tail, left):
    model, monitor = accumulating(), AccumulationMonitor(tail=tail)
    monitor.set_model(model)
    monitor.on_train_begin()
    gradients = [tf.ones(v.shape) for v in model.trainable_variables]
    model.optimizer.apply(gradients, weight=1)
    with only_warning(NO_UPDATE.format(1, 4)) if left else contextlib.nullcontext():
        monitor.on_train_end()
    assert int(model.optimizer.micro_step.numpy()) == left
    assert int(model.optimizer.iterations.numpy()) == 1 - left


@pytest.mark.slow
def test_a_window_that_is_empty_is_not_updated_with():
    # Momentum and decay would move the weights without any gradient.
    for tail in ("flush_epoch", "flush_end", "drop"):
        inner = sgd(weight_decay=0.1)
        model = accumulating(inner=inner)
        monitored(model, tail, samples=16)
        large = compile_in(dense_model(), "eager", sgd(weight_decay=0.1))
        fit(large, *data(16), 16, epochs=2)
        assert_close(model.get_weights(), large.get_weights(), what=tail)
        assert int(model.optimizer.iterations) == 2
    fit(large, *data(16), 16)
    assert_differ(model.get_weights(), large.get_weights())


# --------------------------------------------------------------------- what it says


@pytest.mark.slow_but("flush_end-1.75-said2")
@pytest.mark.parametrize(
    "tail, updates, said",
    [
        ("carry", "1.75", [("WARNING", LEFT_OVER.format(2))]),
        ("flush_epoch", "2", []),
        ("flush_end", "1.75", []),
        ("drop", "1", [("WARNING", DROPPED.format(3))] * 2),
    ],
)
def test_it_says_at_the_start_what_a_window_is_and_at_the_end_what_is_left(
    tail, updates, said, messages
):
    monitored(accumulating(), tail)
    assert messages() == [("INFO", start(updates=updates)), *said]


@pytest.mark.slow_but("carry")
@pytest.mark.parametrize("tail", WINDOWS)
def test_nothing_is_left_to_say_of_windows_that_close(tail, messages):
    model, monitor = accumulating(), AccumulationMonitor(tail=tail)
    for _ in range(2):
        fit(model, *data(16), 4, callbacks=[monitor])
    # Once in each call of `fit`, also with the same callback.
    assert messages() == [("INFO", start(updates="1"))] * 2


def test_lightning_21808_an_epoch_shorter_than_a_window_is_warned_of(messages):
    # 2 micro-batches of 4 in each epoch: the second closes the window.
    model = accumulating()
    before = model.get_weights()
    with only_warning(NO_UPDATE.format(2, 4)):
        monitored(model, samples=8, epochs=1)
    assert_close(model.get_weights(), before)
    assert messages() == [("INFO", start(updates="0.5"))]
    monitored(model, samples=8, epochs=2)
    assert messages()[1:] == [
        ("INFO", start(updates="0.5")),
        ("WARNING", IDLE.format(2, 2)),
        ("WARNING", LEFT_OVER.format(2)),
    ]
    assert int(model.optimizer.iterations) == 1
    assert_differ(model.get_weights(), before)


def test_lightning_21808_a_flush_trains_an_epoch_shorter_than_a_window(messages):
    model = accumulating()
    monitored(model, "flush_epoch", samples=8)
    large = compile_in(dense_model(), "eager", sgd())
    fit(large, *data(8), 8, epochs=2)
    assert_close(model.get_weights(), large.get_weights())
    assert messages() == [("INFO", start(updates="1"))]
    assert_differ(model.get_weights(), dense_model().get_weights())


def test_lightning_21808_the_warning_counts_what_was_dropped(messages):
    model = accumulating()
    with only_warning(ALL_DROPPED.format(4, 4)):
        monitored(model, "drop", samples=8, epochs=2)
    assert [text for _, text in messages()[1:]] == [
        DROPPED.format(2),
        IDLE.format(1, 2),
        DROPPED.format(2),
    ]
    assert int(model.optimizer.iterations) == 0


def test_an_epoch_without_an_update_is_warned_of_after_skipped_windows_too(messages):
    x, y = data(16)
    model = accumulating(options={"on_nonfinite": "skip_window"})
    fit(model, np.full_like(x, np.nan), y, 4, callbacks=[AccumulationMonitor()])
    assert int(model.optimizer.skipped_windows) == 1
    # That window was long enough, and not what the warning is about.
    assert messages() == [("INFO", start(updates="1")), ("WARNING", SKIPPED.format(1, 1))]
    with only_warning(NO_UPDATE.format(2, 4)):
        monitored(model, samples=8, epochs=1)
    assert messages()[2:] == [("INFO", start(updates="0.5"))]


def test_the_start_line_tells_the_memory_of_the_accumulators(messages):
    model = keras.Sequential(
        [keras.Input((1024,)), keras.layers.Dense(640, use_bias=False)]
    )
    for dtype, memory in ((None, "2.5"), ("float64", "5.0")):
        optimizer = AccumOptimizer("sgd", 2, accumulator_dtype=dtype)
        model.compile(optimizer, loss="mse", run_eagerly=True)
        x, y = data(6, features=1024, outputs=640)
        fit(model, x, y, 3, callbacks=[AccumulationMonitor()])
        expected = start(rows=3, steps=2, effective=6, updates="1", memory=memory)
        assert messages().pop() == ("INFO", expected)


def test_the_start_line_knows_micro_batches_of_several_batches_an_execution(messages):
    model = accumulating("graph", steps_per_execution=3)
    history = monitored(model, "flush_epoch").history
    assert messages() == [("INFO", start(updates="2"))]
    assert history["updates"] == [2, 4]
    assert_close(model.get_weights(), large_batches("flush_epoch")[0])
    assert_differ(model.get_weights(), large_batches("carry")[0])


# Keras warns of the end of any dataset whose length it does not know.
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_what_a_generator_does_not_tell_stays_a_question_mark(messages):
    x, y = data()

    def batches():
        for begin in range(0, 26, 4):
            yield x[begin : begin + 4], y[begin : begin + 4]

    signature = tuple(
        tf.TensorSpec((None, array.shape[1]), array.dtype) for array in (x, y)
    )
    dataset = tf.data.Dataset.from_generator(batches, output_signature=signature)
    model = accumulating("graph")
    callbacks = [AccumulationMonitor("flush_epoch")]
    model.fit(dataset, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    assert messages() == [("INFO", start(updates="?"))]
    assert_close(model.get_weights(), large_batches("flush_epoch")[0])
    assert_differ(model.get_weights(), large_batches("carry")[0])


def test_what_a_training_step_of_its_own_does_not_tell_stays_a_question_mark(messages):
    class Stepping(keras.Model):
        def train_step(self, batch):
            x, y = batch
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2)
            variables = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)
            return {"my_loss": loss}

    base = dense_model()
    model = Stepping(base.inputs, base.outputs)
    model.compile(AccumOptimizer(sgd(), 4), run_eagerly=True)
    history = monitored(model).history
    assert set(history) == {"my_loss", "updates", "gradient_norm"}
    assert messages()[0] == ("INFO", start(rows="?", effective="?"))


def test_batch_normalization_is_warned_of_at_any_depth(messages):
    inner = keras.Sequential(
        [keras.layers.Dense(4), keras.layers.BatchNormalization(name="deep")]
    )
    frozen = keras.layers.BatchNormalization(name="frozen", trainable=False)
    model = keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.BatchNormalization(name="first"),
            inner,
            frozen,
            keras.layers.LayerNormalization(),
            keras.layers.Dense(3),
        ]
    )
    model.compile(AccumOptimizer("sgd", 4), loss="mse", run_eagerly=True)
    monitored(model, samples=16, epochs=1)
    assert messages() == [
        (
            "WARNING",
            "State moves at each call of 2 layers, per micro-batch instead of per "
            "update, so that a window is not the large batch: first "
            "(BatchNormalization), deep (BatchNormalization). BatchNormalization also "
            "normalizes each micro-batch by itself. AccumBatchNormalization moves its "
            "statistics per update; GroupNormalization and LayerNormalization do not "
            "depend on the batch.",
        ),
        ("INFO", start(updates="1")),
    ]


def test_a_schedule_is_told_by_the_window_that_is_open(messages):
    model = accumulating(steps=lambda update: 2 + update)
    monitored(model, "carry", samples=20, epochs=1)
    assert messages() == [("INFO", start(steps=2, effective=8, updates="2.5"))]
    assert int(model.optimizer.iterations) == 2


# ----------------------------------------------------------------- what it refuses


def test_an_unknown_tail_is_refused():
    for tail in ("flush", None, "epoch_flush"):
        assert_refused(
            lambda tail=tail: AccumulationMonitor(tail=tail),
            ValueError,
            "`tail` must be one of 'carry', 'flush_epoch', 'flush_end', 'drop'. "
            f"Received: {tail!r}",
        )
    for tail in WINDOWS:
        assert AccumulationMonitor(tail=tail).tail == tail
    assert AccumulationMonitor().tail == "carry"


@pytest.mark.slow_but("SGD")
@pytest.mark.parametrize("name", ["SGD", "LossScaleOptimizer"])
def test_a_model_without_accumulation_is_refused(name):
    optimizer = sgd() if name == "SGD" else keras.optimizers.LossScaleOptimizer(sgd())
    model = compile_in(dense_model(), "eager", optimizer)
    before = model.get_weights()
    assert_refused(
        lambda: monitored(model),
        ValueError,
        "AccumulationMonitor watches a model that accumulates. Received one compiled "
        f"with {name}: write `model.compile(optimizer=AccumOptimizer(optimizer, "
        "accum_steps=...))`, or `accumulate(model, ...)`, or leave the callback out.",
    )
    assert_close(model.get_weights(), before)
    fit(model, *data(), 4)
    assert_differ(model.get_weights(), before)


# --------------------------------------------------------------------- what it logs


def gradient_norm(model, x, y):
    """The norm of the mean gradient over all rows at once, by hand."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    return np.sqrt(sum(np.sum(g.numpy().astype("float64") ** 2) for g in gradients))


@pytest.mark.slow_in("eager")
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_history_has_updates_and_gradient_norms_of_each_epoch(mode):
    x, y = data(16)
    model = accumulating(mode, inner=sgd(clipnorm=0.1))
    history = monitored(model, samples=16).history
    large = compile_in(dense_model(), "eager", sgd(clipnorm=0.1))
    norms = []
    for _ in range(2):
        norms.append(gradient_norm(large, x, y))
        fit(large, x, y, 16)
    assert set(history) == {"loss", "updates", "gradient_norm"}
    assert history["updates"] == [1, 2]
    assert_close(history["gradient_norm"], norms)
    # Before clipping, of the mean, of this epoch.
    assert min(norms) > 0.1
    assert_differ(norms[1], norms[0])


def test_the_norm_of_a_flushed_window_is_that_of_its_mean():
    x, y = data(26)
    model = accumulating()
    history = monitored(model, "flush_epoch", epochs=1).history
    large = compile_in(dense_model(), "eager", sgd())
    fit(large, x[:16], y[:16], 16)
    norm = gradient_norm(large, x[16:], y[16:])
    assert_close(history["gradient_norm"], [norm])
    assert history["updates"] == [2]
    assert_differ(history["gradient_norm"], [norm * 3 / 4])


def test_skipped_windows_are_logged_where_one_can_be_skipped():
    x, y = data(32)
    x[5] = np.nan
    model = accumulating(options={"on_nonfinite": "skip_window"})
    history = fit(model, x, y, 4, epochs=2, callbacks=[AccumulationMonitor()]).history
    assert history["updates"] == [1, 2]
    assert history["skipped_windows"] == [1, 2]
    assert "loss_scale" not in history
    plain = fit(accumulating(), x, y, 4, callbacks=[AccumulationMonitor()]).history
    assert "skipped_windows" not in plain


def test_the_loss_scale_is_logged_where_the_loss_is_scaled():
    scaler = keras.optimizers.LossScaleOptimizer(
        sgd(), initial_scale=2.0**10, dynamic_growth_steps=2
    )
    history = monitored(accumulating(inner=scaler), samples=16, epochs=3).history
    assert history["loss_scale"] == [2.0**10, 2.0**11, 2.0**11]
    assert history["skipped_windows"] == [0, 0, 0]
    assert history["updates"] == [1, 2, 3]


def test_callbacks_find_the_values_of_each_batch_wherever_they_are():
    seen = {"before": [], "after": []}

    def note(where):
        return keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: seen[where].append(dict(logs))
        )

    model = accumulating()
    callbacks = [note("before"), AccumulationMonitor(), note("after")]
    fit(model, *data(20), 4, callbacks=callbacks)
    assert seen["before"] == seen["after"]
    assert [logs["updates"] for logs in seen["after"]] == [0, 0, 0, 1, 1]
    norms = [logs["gradient_norm"] for logs in seen["after"]]
    assert norms[:3] == [0, 0, 0]
    assert_close(norms[3:], [gradient_norm(dense_model(), *first(data(20), 16))] * 2)
    assert all("loss" in logs for logs in seen["after"])


def first(arrays, rows):
    return [array[:rows] for array in arrays]


def test_checkpoints_by_epoch_hold_what_a_flush_has_updated(tmp_path):
    model = accumulating()
    path = tmp_path / "epoch_{epoch}.keras"
    callbacks = [
        AccumulationMonitor(tail="flush_epoch"),
        keras.callbacks.ModelCheckpoint(path),
    ]
    fit(model, *data(), 4, epochs=2, callbacks=callbacks)
    saved = keras.saving.load_model(tmp_path / "epoch_1.keras")
    large = compile_in(dense_model(), "eager", sgd())
    fit(large, *data(), 16)
    assert_close(saved.get_weights(), large.get_weights())
    assert int(saved.optimizer.iterations) == 2
    assert_differ(model.get_weights(), large.get_weights())


def test_the_monitor_changes_no_number_of_training():
    model, unwatched = accumulating("graph"), accumulating("graph")
    history = monitored(model).history
    expected = fit(unwatched, *data(), 4, epochs=2).history
    assert history["loss"] == expected["loss"]
    for a, b in zip(model.get_weights(), unwatched.get_weights()):
        np.testing.assert_array_equal(a, b)


# ------------------------------------------------------------ whom else it watches


class Adversaries(keras.Model):
    """Two networks and two optimizers, applied in turn, as in a GAN."""

    def __init__(self, generator_optimizer, critic_optimizer, critic_steps=1):
        super().__init__()
        self.generator = keras.layers.Dense(5)
        self.critic = keras.layers.Dense(1)
        self.optimizers = {"g": generator_optimizer, "d": [critic_optimizer]}
        self.critic_steps = critic_steps

    def call(self, x):
        return self.critic(self.generator(x))

    def train_step(self, x):
        for _ in range(self.critic_steps):
            with tf.GradientTape() as tape:
                fake, real = self(x), self.critic(x)
                loss = tf.reduce_mean(tf.square(fake) + tf.square(real - 1.0))
            weights = self.critic.trainable_variables
            gradients = tape.gradient(loss, weights)
            self.optimizers["d"][0].apply(gradients, weights, weight=len(x))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x) - 1.0))
        weights = self.generator.trainable_variables
        gradients = tape.gradient(loss, weights)
        self.optimizers["g"].apply(gradients, weights, weight=len(x))
        return {"g_loss": loss}


def adversaries(steps=4, **options):
    keras.utils.set_random_seed(3)
    model = Adversaries(AccumOptimizer(sgd(), steps), AccumOptimizer(sgd(), 2), **options)
    model.compile(run_eagerly=True)
    model(tf.zeros((1, 5)))
    return model


def test_several_optimizers_are_watched_each_by_its_name(messages):
    model = adversaries()
    (x, _), monitor = data(24), AccumulationMonitor()
    history = model.fit(x, batch_size=4, verbose=0, epochs=2, callbacks=[monitor]).history
    keys = {"updates", "gradient_norm"}
    names = {f"optimizers_{name}_{key}" for name in ("g", "d_0") for key in keys}
    assert set(history) == {"g_loss", *names}
    assert history["optimizers_g_updates"] == [1, 3]
    assert history["optimizers_d_0_updates"] == [3, 6]
    norms = [history[f"optimizers_{name}_gradient_norm"] for name in ("g", "d_0")]
    assert_differ(*norms)
    unknown = {"rows": "?", "effective": "?"}
    assert messages() == [
        ("INFO", "optimizers_g: " + start(**unknown, updates="1.5")),
        ("INFO", "optimizers_d_0: " + start(**unknown, steps=2, updates="3")),
    ]


@pytest.mark.slow_but("carry")
@pytest.mark.parametrize("tail", ["flush_epoch", "flush_end", "drop", "carry"])
def test_the_tail_of_each_optimizer_is_handled(tail, messages):
    # 5 micro-batches: windows of 4 and of 2 both leave one.
    model, (x, _) = adversaries(), data(20)
    model.fit(x, batch_size=4, verbose=0, epochs=1, callbacks=[AccumulationMonitor(tail)])
    optimizers = [model.optimizers["g"], model.optimizers["d"][0]]
    flushed = tail.startswith("flush")
    assert [int(o.iterations) for o in optimizers] == [1 + flushed, 2 + flushed]
    assert [int(o.micro_step) for o in optimizers] == [tail == "carry"] * 2
    said = [text for level, text in messages() if level == "WARNING"]
    one = {"drop": DROPPED, "carry": LEFT_OVER}.get(tail)
    names = ["optimizers_g: ", "optimizers_d_0: "] if one else []
    assert said == [name + one.format(1) for name in names]


def test_one_of_several_that_makes_no_update_is_named(messages):
    model, (x, _) = adversaries(steps=9), data(12)
    with only_warning("optimizers_g: " + NO_UPDATE.format(3, 9)):
        model.fit(x, batch_size=4, verbose=0, callbacks=[AccumulationMonitor()])
    assert [text for level, text in messages() if level == "WARNING"] == [
        "optimizers_d_0: " + LEFT_OVER.format(1)
    ]


def test_an_optimizer_that_is_applied_several_times_a_step_is_counted_so(messages):
    model, (x, _) = adversaries(critic_steps=3), data(16)
    history = model.fit(
        x, batch_size=4, verbose=0, callbacks=[AccumulationMonitor()]
    ).history
    assert history["optimizers_d_0_updates"] == [6]
    unknown = {"rows": "?", "effective": "?"}
    assert [text for _, text in messages()] == [
        "optimizers_g: " + start(**unknown, updates="1"),
        "optimizers_d_0: " + start(**unknown, steps=2, updates="6"),
    ]


def test_an_optimizer_that_is_not_used_is_not_warned_of(messages):
    model, (x, _) = adversaries(), data(16)
    model.spare = AccumOptimizer("sgd", 8)
    model.spare.build(model.trainable_variables)
    model.fit(x, batch_size=4, verbose=0, callbacks=[AccumulationMonitor()])
    assert [level for level, _ in messages()] == ["INFO"] * 2
    assert not any("spare" in text for _, text in messages())


@pytest.mark.slow_in("split0", "class")
@pytest.mark.parametrize("how", ["accumulate", "class"])
@pytest.mark.parametrize("split", [{"accum_steps": 3}, {"micro_batch_size": 5}])
def test_a_model_that_accumulates_in_its_step_is_watched(how, split, messages):
    model = dense_model()
    if how == "class":
        model = ka.GradientAccumulationModel(model.inputs, model.outputs, **split)
    else:
        ka.accumulate(model, **split)
    compile_in(model, "eager", sgd())
    history = monitored(model, batch_size=13).history
    assert set(history) == {"loss", "updates"}
    assert history["updates"] == [2, 4]
    parts = "3 micro-batches" if "accum_steps" in split else "micro-batches of 5"
    line = (
        f"13 samples x 1 replicas = effective batch 13, in {parts}; 2 updates per epoch, "
        "one a step: no window stays open"
    )
    assert messages() == [("INFO", line)]


def test_a_step_and_an_optimizer_that_both_accumulate_are_watched_together(messages):
    model = ka.accumulate(dense_model(), micro_batch_size=2)
    compile_in(model, "eager", AccumOptimizer(sgd(), 2))
    history = monitored(model, "flush_epoch", batch_size=6).history
    assert history["updates"] == [3, 6]
    line = start(rows=6, steps=2, effective=12, updates="3")
    assert messages() == [("INFO", line)]


class Recompile(keras.callbacks.Callback):
    """Compiles the model anew at some moment of the second epoch."""

    def __init__(self, moment, optimizer):
        super().__init__()
        self.moment, self.optimizer = moment, optimizer
        self.epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        self._compile_at("epoch_begin")

    def on_train_batch_begin(self, batch, logs=None):
        self._compile_at("batch_begin")

    def on_train_batch_end(self, batch, logs=None):
        self._compile_at("batch_end")

    def _compile_at(self, moment):
        if moment == self.moment and self.epoch == 1 and self.optimizer:
            self.model.compile(self.optimizer(), loss="mse", run_eagerly=True)
            self.model.make_train_function(force=True)
            self.optimizer = None


@pytest.mark.slow_in("False", "epoch_begin")
@pytest.mark.parametrize("moment", ["epoch_begin", "batch_begin", "batch_end"])
@pytest.mark.parametrize("first", [True, False])
def test_a_model_compiled_by_another_callback_is_followed(moment, first, messages):
    recompile = Recompile(moment, lambda: AccumOptimizer(sgd(), 2))
    monitor = AccumulationMonitor()
    callbacks = [monitor, recompile] if first else [recompile, monitor]
    model = accumulating()
    history = fit(model, *data(16), 4, epochs=2, callbacks=callbacks).history
    # The old one had 1 update after the first epoch, and a window open after 1 step.
    updates = 1 if moment == "batch_end" else 2
    assert history["updates"] == [1, updates]
    said = [text for level, text in messages() if level == "WARNING"]
    assert said == ([LEFT_OVER.format(1)] if moment == "batch_end" else [])


def test_a_model_compiled_without_accumulation_meanwhile_is_watched_no_longer(messages):
    recompile = Recompile("epoch_begin", sgd)
    callbacks = [AccumulationMonitor("flush_end"), recompile]
    history = fit(accumulating(), *data(16), 4, epochs=2, callbacks=callbacks).history
    assert history["updates"] == [1]
    assert messages() == [("INFO", start(updates="1"))]


# ----------------------------------------------------------------- windows skipped


@pytest.mark.slow_in("step")
@pytest.mark.parametrize("route", ["optimizer", "step"])
def test_an_epoch_of_overflows_is_warned_of_with_the_scale_and_the_policy(
    route, messages
):
    keras.config.set_dtype_policy("mixed_float16")
    x, y = data(16)
    bad = np.full_like(x, np.nan)
    model = dense_model()
    if route == "step":
        ka.accumulate(model, accum_steps=2)
        optimizer = keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=16.0)
        what, scales = "4 steps", [1, 0.0625]
    else:
        scaler = keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=16.0)
        optimizer = AccumOptimizer(scaler, 2)
        what, scales = "2 windows", [4, 1]
    compile_in(model, "eager", optimizer)
    history = fit(model, bad, y, 4, epochs=2, callbacks=[AccumulationMonitor()]).history
    assert [text for level, text in messages() if level == "WARNING"] == [
        OVERFLOWN.format(1, what, f"{scales[0]:g}"),
        OVERFLOWN.format(2, what, f"{scales[1]:g}"),
    ]
    assert history["loss_scale"] == scales
    assert history["updates"] == [0, 0]
    fit(model, x, y, 4, callbacks=[AccumulationMonitor()])
    assert len([1 for level, _ in messages() if level == "WARNING"]) == 2


def test_one_window_that_is_not_skipped_is_enough(messages):
    x, y = data(16)
    x[:8] = np.nan
    model = accumulating(steps=2, options={"on_nonfinite": "skip_window"})
    fit(model, x, y, 4, callbacks=[AccumulationMonitor()])
    assert int(model.optimizer.skipped_windows) == 1
    assert [level for level, _ in messages()] == ["INFO"]


# --------------------------------------------------------- samples and moving state


class OwnMetric(keras.Model):
    """Feeds the metric that Keras shows as "loss" once a step, as Keras's guides do."""

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
        return {"loss": self.metrics[0].result()}


class OwnLoss(keras.Model):
    """Has a metric of its own, called "loss", in a `compute_loss` of its own."""

    def __init__(self, *args):
        super().__init__(*args)
        self.mine = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.mine]

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        self.mine.update_state(loss)
        return loss


@pytest.mark.slow_in("OwnLoss")
@pytest.mark.parametrize(
    ("kind", "known"),
    [
        (OwnMetric, {"rows": "?", "effective": "?"}),
        (OwnLoss, {"rows": 4, "effective": 16}),
    ],
)
def test_samples_are_not_what_a_metric_of_the_users_counts(kind, known, messages):
    plain = dense_model()
    model = kind(plain.inputs, plain.outputs)
    compile_in(model, "eager", AccumOptimizer(sgd(), 4))
    for _ in range(2):  # Nobody resets the metric of Keras's, if it is not shown.
        monitored(model, samples=16)
    assert messages() == [("INFO", start(updates="1", **known))] * 2


def test_three_layers_are_named_and_the_others_counted(messages):
    normalizing = [keras.layers.BatchNormalization(name=f"bn{i}") for i in range(3)]
    spectral = keras.layers.SpectralNormalization(keras.layers.Dense(4), name="spectral")
    pooled = ka.AccumBatchNormalization(name="pooled")
    layers = [spectral, *normalizing, pooled, keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((5,)), *layers])
    compile_in(model, "eager", AccumOptimizer("sgd", 4))
    monitored(model, samples=16, epochs=1)
    assert messages()[0] == (
        "WARNING",
        "State moves at each call of 4 layers, per micro-batch instead of per update, so "
        "that a window is not the large batch: spectral (SpectralNormalization), bn0 "
        "(BatchNormalization), bn1 (BatchNormalization), and 1 more. BatchNormalization "
        "also normalizes each micro-batch by itself. AccumBatchNormalization moves its "
        "statistics per update; GroupNormalization and LayerNormalization do not depend "
        "on the batch.",
    )


def test_a_frozen_layer_is_named_only_if_its_state_moves_all_the_same(messages):
    spectral = keras.layers.SpectralNormalization(keras.layers.Dense(4), name="spectral")
    frozen = [spectral, keras.layers.BatchNormalization(name="bn")]
    for layer in frozen:
        layer.trainable = False
    model = keras.Sequential([keras.Input((5,)), *frozen, keras.layers.Dense(3)])
    compile_in(model, "eager", AccumOptimizer("sgd", 4))
    before = [v.numpy() for v in spectral.weights], model.layers[1].get_weights()
    monitored(model, samples=16, epochs=1)
    assert messages()[0] == (
        "WARNING",
        "State moves at each call of 1 layer, per micro-batch instead of per update, so "
        "that a window is not the large batch: spectral (SpectralNormalization).",
    )
    assert_differ([v.numpy() for v in spectral.weights], before[0])
    assert_equal(model.layers[1].get_weights(), before[1])


# ------------------------------------------------------------------------- replicas

REPLICAS = """
import logging
import sys
import tensorflow as tf
two = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], two)
import keras
from helpers import assert_close, assert_differ, data, dense_model, fit
from keras_accum import AccumOptimizer, AccumulationMonitor

logger = logging.getLogger("keras_accum")
logger.setLevel("INFO")
logger.addHandler(logging.StreamHandler(sys.stdout))
x, y = data(28)
with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
    model = dense_model()
    optimizer = AccumOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), 2)
    model.compile(optimizer, loss="mse", jit_compile=False)
watch = [AccumulationMonitor(tail="flush_epoch")]
history = fit(model, x, y, 8, epochs=2, callbacks=watch).history

large = dense_model()
large.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss="mse", run_eagerly=True)
fit(large, x, y, 16, epochs=2)
assert_close(model.get_weights(), large.get_weights())
assert_differ(model.get_weights(), dense_model().get_weights())
assert history["updates"] == [2, 4], history
print("FLUSHED")
"""


@pytest.fixture(scope="module")
def replicas_output():
    """What a process with two replicas prints: strategies want one of their own."""
    tests = str(pathlib.Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {tests!r})\n{REPLICAS}"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr[-2000:]


@pytest.mark.slow
def test_windows_are_flushed_on_replicas_too(replicas_output):
    assert "FLUSHED\n" in replicas_output, replicas_output


@pytest.mark.slow
def test_the_start_line_counts_replicas(replicas_output):
    # 8 rows a step are 4 on each replica.
    line = start(rows=4, steps=2, replicas=2, effective=16, updates="2")
    assert line in replicas_output.splitlines(), replicas_output


# ------------------------------------------------- the order of callbacks does not matter


def last_weights(order, accum_steps, *callbacks, read=None, **how):
    """The weights after 3 epochs of 6 micro-batches, or of a whole and a half window."""
    model, (x, y) = dense_model(), data(24)
    optimizer = keras.optimizers.SGD(0.3, use_ema=True, ema_momentum=0.8)
    monitors, rows = [], 16
    if accum_steps > 1:
        optimizer, rows = ka.AccumOptimizer(optimizer, accum_steps), 4
        monitors = [ka.AccumulationMonitor(tail="flush_epoch", verbose=0)]
    optimizer.build(model.trainable_variables)
    model.compile(optimizer, "mse", run_eagerly=True)
    called = [*monitors, *callbacks] if order == "first" else [*callbacks, *monitors]
    how = {"batch_size": rows, "epochs": 3, "shuffle": False, "verbose": 0, **how}
    model.fit(x, y, callbacks=called, **how)
    if read is not None:
        model.load_weights(read)
    return model.get_weights()


@pytest.mark.parametrize("order", ["first", "last"])
def test_averages_are_swapped_in_after_a_flush(order):
    def swap(on_epoch):
        return keras.callbacks.SwapEMAWeights(swap_on_epoch=on_epoch)

    for on_epoch, how in ((False, {"validation_data": data(4)}), (True, {})):
        oracle = last_weights(order, 1, swap(on_epoch), **how)
        assert_close(last_weights(order, 4, swap(on_epoch), **how), oracle, 2e-6)
        assert_differ(last_weights(order, 1, swap(on_epoch), epochs=2), oracle)


@pytest.mark.parametrize("order", ["first", "last"])
def test_what_is_saved_at_the_end_of_an_epoch_is_flushed(order, tmp_path):
    def saved(accum_steps, **how):
        path = tmp_path / f"{accum_steps}.weights.h5"
        save = keras.callbacks.ModelCheckpoint(path, save_weights_only=True)
        return last_weights(order, accum_steps, save, read=path, **how)

    oracle = saved(1)
    assert_close(saved(4), oracle, 2e-6)
    assert_differ(saved(1, epochs=2), oracle)


def test_going_first_leaves_the_others_in_their_order():
    called = []

    class Noting(keras.callbacks.Callback):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def on_train_begin(self, logs=None):
            called.append(self.name)

        on_epoch_end = lambda self, epoch, logs=None: called.append(self.name)  # noqa: E731

    class Monitor(ka.AccumulationMonitor):
        def on_epoch_end(self, epoch, logs=None):
            called.append("monitor")

    given = [Noting("a"), Noting("b"), Monitor(verbose=0), Noting("c")]
    model = compile_in(dense_model(), "eager", ka.AccumOptimizer("sgd", 2))
    model.fit(*data(8), batch_size=4, verbose=0, callbacks=given)
    assert called == ["a", "b", "c", "monitor", "a", "b", "c"]
    assert [type(each) for each in given] == [Noting, Noting, Monitor, Noting]
