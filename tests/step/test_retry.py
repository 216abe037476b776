"""Running out of memory: the same batch, the same random numbers, one update.

CPUs do not run out politely. A layer here fails as the allocator does, at some
micro-batch of a size above a limit, after others have moved all there is to move.
"""

import logging

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
    fit,
)

import keras_accum as ka
from keras_accum._step import retry as _oom

ROWS = 16


class Memory:
    """An allocator that holds `limit` rows, and notes the rows it was asked for."""

    def __init__(self, limit, error=None):
        self.limit, self.asked = limit, []
        self.error = error or MemoryError("OOM when allocating tensor")

    def allocate(self, x):
        self.asked.append(len(x))
        # The second micro-batch: the first has drawn masks and moved statistics.
        if len(x) > self.limit and self.asked.count(len(x)) % 2 == 0:
            raise self.error
        return x


class Allocates(keras.layers.Layer):
    """Passes on what it gets, if there is memory for it."""

    def __init__(self, memory):
        super().__init__()
        self.memory = memory

    def call(self, x, training=False):
        if not training or keras.backend.is_keras_tensor(x):
            return x
        held = tf.py_function(self.memory.allocate, [tf.stop_gradient(x)], "float32")
        return x + 0 * tf.ensure_shape(held, x.shape)


def model_with(memory):
    """A model in which a micro-batch moves seeds, moving statistics and metrics."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((5,))
    x = keras.layers.Dropout(0.5)(keras.layers.Dense(8)(inputs))
    x = keras.layers.BatchNormalization()(x)
    return keras.Model(inputs, keras.layers.Dense(3)(Allocates(memory)(x)))


def train(memory, mode="graph", epochs=2, model=None, **how):
    model = model or model_with(memory)
    ka.accumulate(model, **how)
    model.compile(
        keras.optimizers.Adam(0.05),
        "mse",
        metrics=["mae"],
        run_eagerly=mode == "eager",
        jit_compile=False,
    )
    history = fit(model, *data(2 * ROWS), batch_size=ROWS, epochs=epochs)
    return model, history.history


def everything(model):
    return [
        np.array(v.value)
        for v in [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    ]


@pytest.mark.slow_in("graph")
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_halved_micro_batch_trains_as_if_it_had_been_chosen(mode, caplog):
    found, history = train(Memory(4), mode, micro_batch_size=8, on_oom="halve")
    expected, expected_history = train(Memory(4), mode, micro_batch_size=4)
    assert_equal(everything(found), everything(expected))
    assert history == expected_history
    assert found.train_function.micro_batch_size == 4
    assert [record.message for record in caplog.records] == [
        "Out of memory with micro-batches of 8. The same batch is tried with "
        "micro-batches of 4."
    ]
    # The control: other micro-batches draw other masks.
    other, _ = train(Memory(99), mode, micro_batch_size=8)
    assert_differ(everything(other), everything(expected))


@pytest.mark.slow
@pytest.mark.slow_in("xla")
def test_what_never_fails_trains_as_without(mode):
    def run(**how):
        model = dense_model()
        ka.accumulate(model, micro_batch_size=4, **how)
        model.compile(
            keras.optimizers.Adam(0.05),
            "mse",
            run_eagerly=mode == "eager",
            jit_compile=mode == "xla",
        )
        x, y = data(ROWS)
        logs = [model.train_on_batch(x, y, np.arange(ROWS)) for _ in range(3)]
        return model, logs

    (found, logs), (expected, expected_logs) = run(on_oom="halve"), run()
    assert_close(found.get_weights(), expected.get_weights())
    assert_close(logs, expected_logs)
    assert int(found.optimizer.iterations) == 3


def test_it_halves_as_often_as_it_takes_and_then_gives_up():
    model, _ = train(Memory(2), micro_batch_size=8, on_oom="halve")
    expected, _ = train(Memory(2), micro_batch_size=2)
    assert model.train_function.micro_batch_size == 2
    assert_equal(everything(model), everything(expected))
    with pytest.raises(tf.errors.ResourceExhaustedError, match="OOM when allocating"):
        train(Memory(0), micro_batch_size=4, on_oom="halve")


def test_a_number_of_steps_is_halved_too():
    model, _ = train(Memory(4), accum_steps=2, on_oom="halve")
    expected, _ = train(Memory(4), micro_batch_size=4)
    assert_equal(everything(model), everything(expected))


@pytest.mark.slow
def test_the_loss_over_the_whole_batch_is_tried_again_too():
    model, _ = train(Memory(4), micro_batch_size=8, on_oom="halve", two_pass=True)
    expected, _ = train(Memory(4), micro_batch_size=4, two_pass=True)
    assert_equal(everything(model), everything(expected))


def test_by_default_it_is_raised():
    with pytest.raises(tf.errors.ResourceExhaustedError):
        train(Memory(4), micro_batch_size=8)


@pytest.mark.slow_in("error2")
@pytest.mark.parametrize(
    "error", [ValueError("OOM"), MemoryError("too many open files"), KeyError("x")]
)
def test_only_running_out_of_memory_counts(error):
    memory = Memory(4, error)
    model = model_with(memory)
    with pytest.raises(tf.errors.OpError):
        train(memory, model=model, micro_batch_size=8, on_oom="halve")
    assert set(memory.asked) == {8}


def test_what_is_out_of_memory():
    exhausted = tf.errors.ResourceExhaustedError
    for message in (
        "OOM when allocating tensor with shape[2,3]",
        "Out of memory while trying to allocate 123 bytes.",
        "failed to allocate memory",
    ):
        assert _oom.is_out_of_memory(exhausted(None, None, message))
    hint = "too many open files\nHint: to see what is allocated when OOM happens"
    assert not _oom.is_out_of_memory(exhausted(None, None, hint))
    assert not _oom.is_out_of_memory(tf.errors.InternalError(None, None, "OOM"))
    assert not _oom.is_out_of_memory(MemoryError("OOM"))


def test_an_update_that_fails_is_not_made_again(monkeypatch):
    calls = []

    def failing(model, window):
        calls.append(window)
        raise tf.errors.ResourceExhaustedError(None, None, "OOM in the update")

    monkeypatch.setattr(_oom, "update", failing)
    with pytest.raises(tf.errors.ResourceExhaustedError, match="in the update"):
        train(Memory(99), "eager", micro_batch_size=8, on_oom="halve")
    assert len(calls) == 1


@pytest.mark.slow
def test_growing_back_is_tried_once(monkeypatch):
    monkeypatch.setattr(_oom, "PATIENCE", 3)
    memory = Memory(4)
    model, _ = train(memory, epochs=6, micro_batch_size=8, on_oom="halve")
    # 12 steps. Fails at once; 3 steps of 4; fails once more; then 4 for good.
    assert memory.asked.count(8) == 4
    assert model.train_function.micro_batch_size == 4
    assert int(model.optimizer.iterations) == 12
    expected, _ = train(Memory(4), epochs=6, micro_batch_size=4)
    assert_equal(everything(model), everything(expected))


def test_growing_back_holds_where_there_is_memory_again(monkeypatch, caplog):
    monkeypatch.setattr(_oom, "PATIENCE", 3)
    memory = Memory(4)

    class Frees(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            memory.limit = 99

    model = model_with(memory)
    ka.accumulate(model, micro_batch_size=8, on_oom="halve")
    model.compile("sgd", "mse", jit_compile=False)
    with caplog.at_level(logging.INFO, "keras_accum"):
        fit(model, *data(2 * ROWS), batch_size=ROWS, epochs=4, callbacks=[Frees()])
    assert model.train_function.micro_batch_size == 8
    assert caplog.records[-1].message == "Trying micro-batches of 8 again."


def test_a_step_is_traced_once_per_size():
    traces = []

    class Traced(keras.layers.Layer):
        def call(self, x):
            if not isinstance(x, tf.Tensor) or x.shape[0] is not None:
                traces.append(x.shape[0])
            return x

    memory = Memory(4)
    inputs = keras.Input((5,))
    outputs = keras.layers.Dense(3)(Traced()(Allocates(memory)(inputs)))
    model = keras.Model(inputs, outputs)
    train(memory, epochs=1, model=model, micro_batch_size=8, on_oom="halve")
    before = len(traces)
    fit(model, *data(2 * ROWS), batch_size=ROWS, epochs=3)
    assert len(traces) == before > 0


def test_several_batches_in_one_execution():
    model = dense_model()
    ka.accumulate(model, micro_batch_size=4, on_oom="halve")
    model.compile("sgd", "mse", steps_per_execution=3, jit_compile=False)
    fit(model, *data(5 * 8), batch_size=8)
    assert int(model.optimizer.iterations) == 5
    plain = dense_model()
    plain.compile("sgd", "mse", jit_compile=False)
    fit(plain, *data(5 * 8), batch_size=8)
    assert_close(model.get_weights(), plain.get_weights())


def test_a_model_of_the_class_does_it_too(tmp_path):
    memory = Memory(4)
    plain = model_with(memory)
    model = ka.GradientAccumulationModel(
        plain.inputs, plain.outputs, micro_batch_size=8, on_oom="halve"
    )
    model.compile("sgd", "mse", jit_compile=False)
    fit(model, *data(ROWS), batch_size=ROWS)
    assert model.train_function.micro_batch_size == 4
    assert model.on_oom == "halve"
    inputs = keras.Input((5,))
    model = ka.GradientAccumulationModel(
        inputs, keras.layers.Dense(3)(inputs), accum_steps=2, on_oom="halve"
    )
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert (loaded.on_oom, loaded.accum_steps) == ("halve", 2)


def test_accumulating_anew_switches_it_off():
    model = dense_model()
    ka.accumulate(model, micro_batch_size=4, on_oom="halve")
    ka.accumulate(model, micro_batch_size=4, on_oom="raise")
    model.compile("sgd", "mse")
    model.train_on_batch(*data(8))
    assert not isinstance(model.train_function, _oom.RetryingStep)


def test_another_answer_is_refused():
    assert_refused(
        lambda: ka.accumulate(dense_model(), accum_steps=2, on_oom="retry"),
        ValueError,
        "`on_oom` must be one of 'raise', 'halve'. Received: 'retry'",
    )
