"""The recipe's schedules: against NumPy, inside of the optimizer, saved, refused."""

import re

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
    in_mode,
)

import keras_accum as ka

schedules = keras.optimizers.schedules


def ultralytics_steps(update, nominal, batch_size, warmup):
    """The length of a window as Ultralytics's trainer computes it."""
    if update > warmup or not warmup:
        return max(round(nominal / batch_size), 1)
    ramp = np.interp(update, [0, warmup], [1, nominal / batch_size])
    return max(1, int(ramp.round()))


@pytest.mark.parametrize(
    ("nominal", "batch_size", "warmup"),
    [(64, 16, 100), (64, 16, 0), (64, 12, 7), (64, 48, 9), (64, 128, 10), (40, 16, 8)],
)
def test_the_window_is_as_long_as_ultralytics_has_it(nominal, batch_size, warmup):
    steps = ka.NominalBatchSize(
        nominal, micro_batch_size=batch_size, warmup_updates=warmup
    )
    updates = [*range(warmup + 3), 10**6, 2**30]
    found = [int(steps(update)) for update in updates]
    assert found == [ultralytics_steps(u, nominal, batch_size, warmup) for u in updates]
    assert found[-1] == steps.accum_steps
    assert found[0] == (1 if warmup else steps.accum_steps)


def test_a_half_is_rounded_to_the_even_length():
    # 1.5, 2.5, 3.5, 4.5 at odd updates: what rounding up would make 2, 3, 4, 5.
    steps = ka.NominalBatchSize(80, micro_batch_size=16, warmup_updates=8)
    assert [int(steps(u)) for u in (1, 3, 5, 7)] == [2, 2, 4, 4]


def test_the_window_is_the_same_in_each_mode(mode):
    steps = ka.NominalBatchSize(64, micro_batch_size=10, warmup_updates=20)
    step = in_mode(lambda update: steps(update), mode)
    found = [int(step(tf.constant(u, "int32"))) for u in range(25)]
    assert found == [ultralytics_steps(u, 64, 10, 20) for u in range(25)]


def test_the_weight_decay_goes_with_the_batch_that_is_reached():
    def factor(batch_size):
        return ka.NominalBatchSize(64, micro_batch_size=batch_size).weight_decay_factor

    assert [factor(size) for size in (16, 12, 24, 128)] == [1, 60 / 64, 72 / 64, 2]


@pytest.mark.slow_in("eager")
@pytest.mark.slow_in("xla")
def test_windows_grow_during_training_and_are_always_whole(mode):
    # Windows of 1, 2, 2, 3 micro-batches: 1 + 2u/3, rounded.
    steps = ka.NominalBatchSize(12, micro_batch_size=4, warmup_updates=3)
    x, y = data(32)
    model = compile_in(
        dense_model(), mode, ka.AccumOptimizer(keras.optimizers.SGD(0.1), steps)
    )
    fit(model, x, y, batch_size=4)
    oracle = compile_in(dense_model(), "eager", keras.optimizers.SGD(0.1))
    fit(oracle, *Batches([4, 8, 8, 12], x, y)[0], batch_size=4)
    for i in (1, 2, 3):
        oracle.train_on_batch(*Batches([4, 8, 8, 12], x, y)[i])
    assert int(model.optimizer.iterations) == int(oracle.optimizer.iterations) == 4
    assert_close(model.get_weights(), oracle.get_weights())
    # The control: full windows from the first update on.
    control = compile_in(
        dense_model(), "eager", ka.AccumOptimizer(keras.optimizers.SGD(0.1), 3)
    )
    fit(control, x, y, batch_size=4)
    assert_differ(control.get_weights(), oracle.get_weights())


def test_a_model_is_saved_and_loaded_with_its_recipe(tmp_path):
    steps = ka.NominalBatchSize(12, micro_batch_size=4, warmup_updates=3)
    decay = schedules.PiecewiseConstantDecay([2], [0.3, 0.1])
    rate = ka.GradualWarmup(decay, 3, start_factor=0.25)
    x, y = data(32)
    optimizer = ka.AccumOptimizer(keras.optimizers.SGD(rate), steps)
    model = compile_in(dense_model(), "graph", optimizer)
    fit(model, x[:16], y[:16], batch_size=4)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    found = loaded.optimizer
    assert found.accum_steps.get_config() == steps.get_config()
    assert found.inner_optimizer._learning_rate.get_config() == rate.get_config()
    for trained in (model, loaded):
        fit(trained, x[16:], y[16:], batch_size=4)
    assert_equal(loaded.get_weights(), model.get_weights())
    assert int(loaded.optimizer.iterations) == 4


def test_configs_hold_every_argument():
    steps = ka.NominalBatchSize(64, micro_batch_size=16, warmup_updates=100)
    # Version 0.1 had another name for it in its files.
    config = {"nominal": 64, "batch_size": 16, "warmup_updates": 100}
    assert ka.NominalBatchSize.from_config(config).get_config() == steps.get_config()
    assert repr(steps) == "NominalBatchSize(64, micro_batch_size=16, warmup_updates=100)"
    assert repr(ka.NominalBatchSize.from_config(steps.get_config())) == repr(steps)
    rate = ka.GradualWarmup(0.5, 7, 0.25)
    assert rate.get_config() == {
        "learning_rate": 0.5,
        "warmup_updates": 7,
        "start_factor": 0.25,
    }


# -------------------------------------------------------------------- learning rate


def test_the_rate_is_scaled_by_the_ratio_or_its_root():
    def scaled(rule):
        return ka.scale_learning_rate(
            0.1, batch_size=8192, base_batch_size=256, rule=rule
        )

    assert_close([scaled("linear"), scaled("sqrt")], [3.2, 0.1 * 32**0.5])
    assert ka.scale_learning_rate(0.1, batch_size=64, base_batch_size=256) == 0.025
    assert ka.scale_learning_rate(0.1, batch_size=8192, base_batch_size=256) == 3.2


def warmed_up(update, rate, warmup, start):
    return rate * np.interp(update, [0, warmup], [start, 1])


@pytest.mark.slow_in("xla")
def test_the_warm_up_is_a_line_and_then_exactly_the_rate(mode):
    # float32 has no 0.3: 0.3 + (1 - 0.3) there need not be 1.
    rate = ka.GradualWarmup(0.7, 12, start_factor=0.3)
    step = in_mode(lambda update: rate(update), mode)
    found = [float(step(tf.constant(u, "int64"))) for u in range(16)]
    assert_close(np.array(found), warmed_up(np.arange(16), 0.7, 12, 0.3))
    assert found[12:] == [float(np.float32(0.7))] * 4
    assert found[11] < found[12]


def test_a_schedule_goes_on_under_the_warm_up():
    decay = schedules.ExponentialDecay(0.8, decay_steps=5, decay_rate=0.5)
    rate = ka.GradualWarmup(decay, 4, start_factor=0.125)
    updates = np.arange(9)
    expected = warmed_up(updates, 0.8 * 0.5 ** (updates / 5), 4, 0.125)
    assert_close(np.array([rate(int(u)) for u in updates]), expected)
    # The control: a decay that starts at the end of the warm-up.
    delayed = warmed_up(updates, 0.8 * 0.5 ** (np.maximum(updates - 4, 0) / 5), 4, 0.125)
    assert_differ(expected, delayed)


@pytest.mark.slow_in("eager")
@pytest.mark.slow_in("xla")
def test_the_warm_up_counts_updates_and_not_micro_batches(mode):
    x, y = data(32)
    rate = ka.GradualWarmup(0.4, 6, start_factor=0.1)
    model = compile_in(
        dense_model(), mode, ka.AccumOptimizer(keras.optimizers.SGD(rate), 2)
    )
    fit(model, x, y, batch_size=4)
    large = compile_in(dense_model(), "eager", keras.optimizers.SGD(0.0))
    for u in range(4):
        large.optimizer.learning_rate = warmed_up(u, 0.4, 6, 0.1)
        large.train_on_batch(x[8 * u : 8 * u + 8], y[8 * u : 8 * u + 8])
    assert_close(model.get_weights(), large.get_weights())
    assert_close(float(model.optimizer.learning_rate), warmed_up(4, 0.4, 6, 0.1))
    # The control: the same rates, counted by micro-batches.
    wrong = compile_in(dense_model(), "eager", keras.optimizers.SGD(0.0))
    for u in range(4):
        wrong.optimizer.learning_rate = warmed_up(2 * u + 1, 0.4, 6, 0.1)
        wrong.train_on_batch(x[8 * u : 8 * u + 8], y[8 * u : 8 * u + 8])
    assert_differ(wrong.get_weights(), large.get_weights())


# ------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: ka.NominalBatchSize(0, micro_batch_size=16),
            ValueError,
            "`nominal` must be at least 1. Received: 0",
        ),
        (
            lambda: ka.NominalBatchSize(64, micro_batch_size=16.0),
            TypeError,
            "`micro_batch_size` must be an integer. Received: 16.0",
        ),
        (
            lambda: ka.NominalBatchSize(64, micro_batch_size=16, warmup_updates=-1),
            ValueError,
            "`warmup_updates` must be at least 0. Received: -1",
        ),
        (
            lambda: ka.scale_learning_rate(-0.1, batch_size=2, base_batch_size=1),
            ValueError,
            "`learning_rate` must be above 0 and finite. Received: -0.1",
        ),
        (
            lambda: ka.scale_learning_rate(float("nan"), batch_size=2, base_batch_size=1),
            ValueError,
            "`learning_rate` must be above 0 and finite. Received: nan",
        ),
        (
            lambda: ka.scale_learning_rate("0.1", batch_size=2, base_batch_size=1),
            TypeError,
            "`learning_rate` must be a number. Received: '0.1'",
        ),
        (
            lambda: ka.scale_learning_rate(
                schedules.CosineDecay(0.1, 5), batch_size=2, base_batch_size=1
            ),
            TypeError,
            "`learning_rate` must be a number. Received a schedule, CosineDecay: scale "
            "the rates that it is made of, and its lengths in updates, of which an epoch "
            "of larger batches has fewer.",
        ),
        (
            lambda: ka.scale_learning_rate(0.1, batch_size=2, base_batch_size=0),
            ValueError,
            "`base_batch_size` must be at least 1. Received: 0",
        ),
        (
            lambda: ka.scale_learning_rate(0.1, batch_size=True, base_batch_size=1),
            TypeError,
            "`batch_size` must be an integer. Received: True",
        ),
        (
            lambda: ka.scale_learning_rate(
                0.1, batch_size=2, base_batch_size=1, rule="root"
            ),
            ValueError,
            "`rule` must be 'linear' (SGD) or 'sqrt' (adaptive optimizers). Received: "
            "'root'",
        ),
        (
            lambda: ka.GradualWarmup("0.1", 5, 0.1),
            TypeError,
            "`learning_rate` must be a number or a LearningRateSchedule. Received: '0.1'",
        ),
        (
            lambda: ka.GradualWarmup(-0.1, 5, 0.1),
            ValueError,
            "`learning_rate` must be at least 0 and finite. Received: -0.1",
        ),
        (
            lambda: ka.GradualWarmup(0.1, 0, 0.1),
            ValueError,
            "`warmup_updates` must be at least 1. Received: 0. To train without a "
            "warm-up, pass the learning rate itself to the optimizer.",
        ),
        (
            lambda: ka.GradualWarmup(0.1, 5.5, 0.1),
            TypeError,
            "`warmup_updates` must be an integer. Received: 5.5",
        ),
        (
            lambda: ka.GradualWarmup(0.1, 5, 1.5),
            ValueError,
            "`start_factor` must be from 0 to 1, a share of the learning rate. Received: "
            "1.5",
        ),
        (
            lambda: ka.GradualWarmup(0.1, 5, None),
            TypeError,
            "`start_factor` must be a number. Received: None",
        ),
    ],
)
def test_nonsense_is_refused(make, error, message):
    assert_refused(make, error, message)


def test_the_examples_of_the_docstrings_hold():
    # What stands behind a `#` on a line is what the line gives.
    claims = 0
    for documented in (ka.NominalBatchSize, ka.scale_learning_rate):
        for line in re.findall(r"^ *(\S.*?)  # (.+)$", documented.__doc__, re.MULTILINE):
            names = {
                "steps": ka.NominalBatchSize(64, micro_batch_size=16, warmup_updates=100)
            }
            names["scale_learning_rate"] = ka.scale_learning_rate
            assert_close(eval(line[0], names), eval(line[1]))
            claims += 1
    assert claims == 3


def test_an_unknown_argument_is_told_what_was_meant():
    message = (
        "`NominalBatchSize` has no argument `batch_size`. Received: batch_size=16. Did you "
        "mean `micro_batch_size=16`?"
    )
    assert_refused(lambda: ka.NominalBatchSize(64, batch_size=16), TypeError, message)
    message = (
        "`NominalBatchSize` has no argument `steps`. Received: steps=4. Its arguments are "
        "`nominal`, `micro_batch_size`, `warmup_updates`."
    )
    assert_refused(lambda: ka.NominalBatchSize(64, steps=4), TypeError, message)
