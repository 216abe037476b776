"""`AccumulationMonitor`: what becomes of open windows, and what it says and logs."""

import functools
import logging
import pathlib
import subprocess
import sys

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
NO_UPDATE = (
    "Epoch {} has made no update: it has fewer micro-batches than a window ({} held)."
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


@pytest.fixture
def messages(caplog):
    """What the package says from now on: a function to (level, text) pairs."""
    caplog.set_level(logging.INFO, "keras_accum")

    def read():
        records = [r for r in caplog.records if r.name == "keras_accum"]
        return [(record.levelname, record.getMessage()) for record in records]

    return read


# ------------------------------------------------------------------------ the tails


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


def test_a_flush_comes_before_validation():
    validation = {"validation_data": data(9, seed=5)}
    model = accumulating()
    history = monitored(model, "flush_epoch", **validation).history
    large = compile_in(dense_model(), "eager", sgd())
    expected = fit(large, *data(), 16, epochs=2, **validation).history
    assert_close(history["val_loss"], expected["val_loss"])
    carried = monitored(accumulating(), "flush_end", **validation).history
    assert_differ(carried["val_loss"], expected["val_loss"])


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


@pytest.mark.parametrize("tail", ["flush_epoch", "flush_end"])
def test_averaged_weights_are_put_in_place_after_the_last_flush(tail):
    # Keras overwrites the weights by their average before `on_train_end`.
    model = accumulating(inner=averaged_sgd())
    monitored(model, tail)
    weights, averages = large_batches(tail, averaged_sgd)
    assert_close(model.get_weights(), weights)
    assert_close(slots(model.optimizer), averages)
    assert_differ(model.get_weights(), large_batches(tail)[0])


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
    model.optimizer.apply([tf.ones(v.shape) for v in model.trainable_variables])
    monitor.on_train_end()
    assert int(model.optimizer.micro_step.numpy()) == left
    assert int(model.optimizer.iterations.numpy()) == 1 - left


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
    monitored(model, samples=8, epochs=1)
    assert_close(model.get_weights(), before)
    assert messages() == [
        ("INFO", start(updates="0.5")),
        ("WARNING", NO_UPDATE.format(1, 2)),
        ("WARNING", LEFT_OVER.format(2)),
    ]
    monitored(model, samples=8, epochs=2)
    assert messages()[3:] == [
        ("INFO", start(updates="0.5")),
        ("WARNING", NO_UPDATE.format(2, 2)),
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
    monitored(model, "drop", samples=8, epochs=1)
    assert [text for _, text in messages()[1:]] == [
        DROPPED.format(2),
        NO_UPDATE.format(1, 2),
    ]
    assert int(model.optimizer.iterations) == 0


def test_an_epoch_without_an_update_is_warned_of_after_skipped_windows_too(messages):
    x, y = data(16)
    model = accumulating(options={"on_nonfinite": "skip_window"})
    fit(model, np.full_like(x, np.nan), y, 4, callbacks=[AccumulationMonitor()])
    assert int(model.optimizer.skipped_windows) == 1
    # That window was long enough, and not what the warning is about.
    assert messages() == [("INFO", start(updates="1"))]
    monitored(model, samples=8, epochs=1)
    assert messages()[1:] == [
        ("INFO", start(updates="0.5")),
        ("WARNING", NO_UPDATE.format(1, 2)),
        ("WARNING", LEFT_OVER.format(2)),
    ]


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
            "BatchNormalization normalizes each micro-batch by itself, so that a window "
            "is not the large batch: first, deep. GroupNormalization and "
            "LayerNormalization have no such dependence.",
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


@pytest.mark.parametrize("name", ["SGD", "LossScaleOptimizer"])
def test_a_model_without_accumulation_is_refused(name):
    optimizer = sgd() if name == "SGD" else keras.optimizers.LossScaleOptimizer(sgd())
    model = compile_in(dense_model(), "eager", optimizer)
    before = model.get_weights()
    assert_refused(
        lambda: monitored(model),
        ValueError,
        f"AccumulationMonitor watches an AccumOptimizer. Received a model compiled with "
        f"{name}: write `model.compile(optimizer=AccumOptimizer(optimizer, "
        "accum_steps=...))`, or leave the callback out.",
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


def test_callbacks_further_down_the_list_find_the_values_of_each_batch():
    seen = {"before": [], "after": []}

    def note(where):
        return keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: seen[where].append(dict(logs))
        )

    model = accumulating()
    callbacks = [note("before"), AccumulationMonitor(), note("after")]
    fit(model, *data(20), 4, callbacks=callbacks)
    assert [sorted(logs) for logs in seen["before"]] == [["loss"]] * 5
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


def test_windows_are_flushed_on_replicas_too(replicas_output):
    assert "FLUSHED\n" in replicas_output, replicas_output


def test_the_start_line_counts_replicas(replicas_output):
    # 8 rows a step are 4 on each replica.
    line = start(rows=4, steps=2, replicas=2, effective=16, updates="2")
    assert line in replicas_output.splitlines(), replicas_output
