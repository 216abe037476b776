"""What is saved goes on: checkpoints of every kind, in mid-window, and configurations."""

import copy
import json
import re
import warnings

import h5py
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
    since_keras,
    slots,
)

from keras_accum import AccumOptimizer

# Saving does not depend on how a step runs; a few eager steps are the fastest.
MODE = "eager"
FORMATS = ("weights.h5", "keras", "checkpoint", "checkpoint_unbuilt")

MISFIT = (
    "The saved window does not fit the variables of this optimizer: {} are missing or "
    "of another shape. Build the model and the optimizer as they were when saved, then "
    "load."
)


@keras.saving.register_keras_serializable(package="tests")
def three_then_two(update):
    return keras.ops.where(update < 5, 3, 2)


def scaled_sgd():
    """Momentum and an average of the weights, behind a loss scale that grows soon."""
    sgd = keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True, ema_momentum=0.7)
    return keras.optimizers.LossScaleOptimizer(
        sgd, initial_scale=2.0**10, dynamic_growth_steps=2
    )


def accumulating(inner=None, accum_steps=3, **options):
    return AccumOptimizer(
        scaled_sgd() if inner is None else inner, accum_steps, **options
    )


def everything(model):
    """Weights, slots, accumulators, counters and loss scale, as arrays."""
    # Times one: a truth value becomes a number, that controls can subtract.
    return [v.numpy() * 1 for v in [*model.weights, *model.optimizer.variables]]


def window(optimizer):
    """What the open window holds: its micro-steps, its weight, and its sums."""
    accumulator = optimizer._accumulator
    return [v.numpy() for v in [accumulator.micro_step, accumulator.total]] + [
        v.numpy() for v in accumulator.sums
    ]


def used(optimizer, mode=MODE):
    """A model with other weights, other slots and an open window of its own."""
    model = compile_in(dense_model(), mode, optimizer)
    fit(model, *data(12, seed=9), 6)
    return model


def unbuilt(optimizer):
    """A model with other weights, whose optimizer has no variables yet."""
    model = dense_model()
    model.set_weights([w + 1.0 for w in model.get_weights()])
    model.compile(optimizer, loss="mse", run_eagerly=True)
    return model


def save(model, folder, kind):
    if kind.startswith("checkpoint"):
        return tf.train.Checkpoint(model).write(str(folder / "checkpoint"))
    path = folder / f"saved.{kind}"
    model.save_weights(path) if kind == "weights.h5" else model.save(path)
    return path


def load(path, kind, optimizer, mode=MODE):
    """A model that goes on from what was saved, with `optimizer` or the saved one."""
    if kind == "keras" and optimizer is None:
        return keras.saving.load_model(path)
    if kind == "checkpoint_unbuilt":
        model = unbuilt(optimizer)
        tf.train.Checkpoint(model).read(path)
        return model
    model = used(optimizer, mode)
    if kind == "checkpoint":
        tf.train.Checkpoint(model).read(path).assert_existing_objects_matched()
    else:
        model.load_weights(path)
    return model


# ------------------------------------------------------------- resume in mid-window


@pytest.mark.slow_but("keras")
@pytest.mark.parametrize("kind", FORMATS)
def test_training_resumed_in_mid_window_is_the_uninterrupted_one_to_the_bit(
    kind, tmp_path
):
    def fresh():
        return None if kind == "keras" else accumulating(accum_steps=2)

    # 7 micro-batches, the last one short, in windows of 2: it is held when saved.
    model = compile_in(dense_model(), MODE, accumulating(accum_steps=2))
    fit(model, *data(seed=2), 4)
    optimizer = model.optimizer
    assert (int(optimizer.micro_step), int(optimizer.iterations)) == (1, 3)
    assert (float(optimizer.dynamic_scale), int(optimizer.step_counter)) == (2.0**11, 1)
    before = everything(model)
    path = save(model, tmp_path, kind)

    resumed, reset = load(path, kind, fresh()), load(path, kind, fresh())
    if kind != "checkpoint_unbuilt":
        assert_equal(everything(resumed), before)
    reset.optimizer.build(reset.trainable_variables)
    reset.optimizer.reset()
    for trained in (model, resumed, reset):
        fit(trained, *data(seed=3), 4)

    assert int(resumed.optimizer.iterations) == 7
    assert float(resumed.optimizer.dynamic_scale) == 2.0**13
    assert_equal(everything(resumed), everything(model))
    assert_differ(reset.get_weights(), model.get_weights())


@pytest.mark.slow
@pytest.mark.slow_in("xla")
@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_training_resumes_in_mid_window_in_compiled_steps_too(mode, tmp_path):
    model = compile_in(dense_model(), mode, accumulating())
    fit(model, *data(seed=2), 4)
    path = save(model, tmp_path, "weights.h5")
    resumed = load(path, "weights.h5", accumulating(), mode)
    reset = load(path, "weights.h5", accumulating(), "eager")
    reset.optimizer.reset()
    for trained in (model, resumed, reset):
        fit(trained, *data(seed=3), 4)

    assert_equal(everything(resumed), everything(model))
    assert_differ(reset.get_weights(), model.get_weights())


@pytest.mark.slow_but("keras")
@pytest.mark.parametrize("kind", FORMATS[:3])
def test_counters_of_skipped_windows_and_micro_batches_are_saved(kind, tmp_path):
    def fresh():
        return AccumOptimizer("sgd", 2, on_nonfinite="skip_micro_batch")

    x, y = data(24)
    x[4:20] = np.nan
    model = compile_in(dense_model(), MODE, fresh())
    # Kept and left out; a window left out; and one left out, with which it is saved.
    fit(model, x[:20], y[:20], 4)
    path = save(model, tmp_path, kind)
    loaded = load(path, kind, None if kind == "keras" else fresh())
    assert_equal(loaded.optimizer.last_gradient_norm, model.optimizer.last_gradient_norm)
    other = used(fresh())
    assert_differ(other.optimizer.last_gradient_norm, model.optimizer.last_gradient_norm)
    for trained in (model, loaded, other):
        fit(trained, x[20:], y[20:], 4)

    assert int(loaded.optimizer.skipped_windows) == 1
    assert int(loaded.optimizer.skipped_micro_batches) == 4
    assert_equal(everything(loaded), everything(model))
    assert int(other.optimizer.skipped_micro_batches) == 0
    assert_differ(other.get_weights(), model.get_weights())


MULTI = pytest.param("multi", marks=since_keras("3.15", "MultiOptimizer"))


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["sgd", MULTI])
def test_an_inner_optimizer_of_any_make_is_restored(inner, tmp_path):
    def fresh():
        if inner == "sgd":
            return accumulating(keras.optimizers.SGD(0.1))
        rules = {".*bias": keras.optimizers.SGD(0.1, momentum=0.9)}
        rest = keras.optimizers.RMSprop(0.01)
        mapping = keras.optimizers.OptimizerMap(rest, rules)
        return accumulating(keras.optimizers.MultiOptimizer(mapping))

    model = compile_in(dense_model(), MODE, fresh())
    fit(model, *data(seed=2), 4)
    # Keras leaves the parts of a MultiOptimizer out of a tf.train.Checkpoint.
    for kind in FORMATS[: 2 if inner == "multi" else 3]:
        path = save(model, tmp_path, kind)
        resumed = load(path, kind, None if kind == "keras" else fresh())
        assert_equal(everything(resumed), everything(model), kind)
        assert_differ(everything(used(fresh())), everything(model))


def test_the_running_maximum_of_variables_that_are_overwritten_is_saved(tmp_path):
    def fresh():
        scale = keras.Variable(0.0, name="scale")
        scale.overwrite_with_gradient = True
        optimizer = AccumOptimizer(keras.optimizers.SGD(0.1), 3)
        optimizer.build([scale])
        return scale, optimizer

    scale, optimizer = fresh()
    optimizer.apply([tf.constant(-5.0)], [scale])
    store = {}
    optimizer.save_own_variables(store)
    resumed_scale, resumed = fresh()
    resumed.load_own_variables(store)
    for value in (-7.0, -6.0):
        optimizer.apply([tf.constant(value)], [scale])
        resumed.apply([tf.constant(value)], [resumed_scale])

    assert float(scale) == -5.0
    assert float(resumed_scale) == -5.0
    forgetful_scale, forgetful = fresh()
    for value in (-7.0, -6.0):
        forgetful.apply([tf.constant(value)], [forgetful_scale])
    forgetful.flush()
    assert float(forgetful_scale) == -6.0


@pytest.mark.slow
def test_a_copy_of_a_model_goes_on_in_mid_window():
    model = compile_in(dense_model(), MODE, accumulating())
    fit(model, *data(seed=2), 4)
    duplicate = copy.deepcopy(model)
    assert_equal(everything(duplicate), everything(model))
    fit(duplicate, *data(seed=3), 4)
    assert_differ(duplicate.get_weights(), model.get_weights())
    fit(model, *data(seed=3), 4)
    assert_equal(everything(duplicate), everything(model))


@pytest.mark.slow
def test_the_list_of_variables_carries_the_whole_state():
    model = compile_in(dense_model(), MODE, accumulating())
    fit(model, *data(seed=2), 4)
    other = used(accumulating())
    assert_differ(everything(other), everything(model))
    other.set_weights(model.get_weights())
    for mine, its in zip(other.optimizer.variables, model.optimizer.variables):
        mine.assign(its)
    for trained in (model, other):
        fit(trained, *data(seed=3), 4)
    assert_equal(everything(other), everything(model))


# -------------------------------------------------------------- another window length


@pytest.mark.slow_but("checkpoint_unbuilt")
@pytest.mark.parametrize("kind", FORMATS)
def test_a_window_opened_with_four_steps_keeps_them_in_an_optimizer_of_two(
    kind, tmp_path
):
    def sgd():
        return keras.optimizers.SGD(0.1, momentum=0.9)

    def fresh(steps):
        return accumulating(sgd(), steps)

    x, y = data(40)
    model = compile_in(dense_model(), MODE, fresh(4))
    fit(model, x[:24], y[:24], 4)
    path = save(model, tmp_path, kind)
    if kind == "keras":
        resumed = keras.saving.load_model(path)
        resumed.optimizer.accum_steps = 2
    else:
        resumed = load(path, kind, fresh(2))
    iterations = []
    for start in (24, 28, 32, 36):
        fit(resumed, x[start : start + 4], y[start : start + 4], 4)
        iterations.append(int(resumed.optimizer.iterations))

    assert iterations == [1, 2, 2, 3]
    large = compile_in(dense_model(), MODE, sgd())
    large.fit(Batches([16, 16, 8], x, y), shuffle=False, verbose=0)
    assert_close(resumed.get_weights(), large.get_weights())
    assert_close(slots(resumed.optimizer), slots(large.optimizer))
    misaligned = compile_in(dense_model(), MODE, sgd())
    misaligned.fit(Batches([16, 8, 8, 8], x, y), shuffle=False, verbose=0)
    assert_differ(misaligned.get_weights(), large.get_weights())


# ------------------------------------------------- checkpoints without accumulation


def load_plain(path, kind, optimizer):
    """`load`, for a checkpoint that knows of no window."""
    if kind != "checkpoint":
        model = load(path, kind, optimizer)
    else:
        # TensorFlow restores what is there and leaves the rest, an open window too.
        model = compile_in(dense_model(), MODE, optimizer)
        model.set_weights([w + 1.0 for w in model.get_weights()])
        tf.train.Checkpoint(model).read(path).expect_partial()
    model.optimizer.build(model.trainable_variables)
    return model


@pytest.mark.slow_but("checkpoint")
@pytest.mark.parametrize("kind", FORMATS)
def test_a_checkpoint_of_the_plain_inner_optimizer_loads(kind, tmp_path):
    def adam():
        return keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9)

    plain = compile_in(dense_model(), MODE, adam())
    fit(plain, *data(seed=2), 8)
    path = save(plain, tmp_path, kind)
    model = load_plain(path, kind, accumulating(adam(), 2))

    assert_equal(model.get_weights(), plain.get_weights())
    assert_equal(slots(model.optimizer), slots(plain.optimizer))
    assert int(model.optimizer.iterations) == 4
    assert all(np.abs(held).max() == 0 for held in window(model.optimizer))
    other = used(accumulating(adam(), 2))
    assert_differ(slots(other.optimizer), slots(plain.optimizer))
    assert_differ(other.get_weights(), plain.get_weights())
    fit(model, *data(24, seed=3), 4)
    fit(plain, *data(24, seed=3), 8)
    assert_close(model.get_weights(), plain.get_weights(), rtol=2e-5)  # Adam


def test_a_plain_checkpoint_closes_the_window_that_was_open_before(tmp_path):
    plain = compile_in(dense_model(), MODE, keras.optimizers.SGD(0.1, momentum=0.9))
    fit(plain, *data(seed=2), 8)
    path = save(plain, tmp_path, "weights.h5")
    model = used(accumulating(keras.optimizers.SGD(0.1, momentum=0.9), 4))
    assert int(model.optimizer.micro_step) == 2
    assert all(np.abs(held).max() > 0 for held in window(model.optimizer))
    model.load_weights(path)
    assert all(np.abs(held).max() == 0 for held in window(model.optimizer))


@pytest.mark.slow_in("keras")
@pytest.mark.parametrize("kind", ["weights.h5", "keras"])
def test_a_checkpoint_of_a_plain_loss_scale_optimizer_loads(kind, tmp_path):
    plain = compile_in(dense_model(), MODE, scaled_sgd())
    fit(plain, *data(20, seed=2), 4)
    assert float(plain.optimizer.dynamic_scale) == 2.0**12
    path = save(plain, tmp_path, kind)
    model = load_plain(path, kind, accumulating())

    assert_equal(model.get_weights(), plain.get_weights())
    assert_equal(slots(model.optimizer), slots(plain.optimizer))
    assert float(model.optimizer.learning_rate) == np.float32(0.1)
    assert int(model.optimizer.iterations) == 5
    assert float(model.optimizer.dynamic_scale) == 2.0**12
    assert int(model.optimizer.step_counter) == 1
    other = used(accumulating()).optimizer
    assert (float(other.dynamic_scale), int(other.step_counter)) == (2.0**10, 0)


def test_an_optimizer_that_has_trained_already_keeps_its_slots_inside_of_the_wrapper(
    tmp_path,
):
    plain = compile_in(dense_model(), MODE, keras.optimizers.SGD(0.1, momentum=0.9))
    fit(plain, *data(16, seed=2), 8)
    path = save(plain, tmp_path, "keras")
    loaded = keras.saving.load_model(path)
    loaded.compile(AccumOptimizer(loaded.optimizer, 2), loss="mse", run_eagerly=True)
    fit(loaded, *data(16, seed=3), 4)
    fit(plain, *data(16, seed=3), 8)
    assert_close(loaded.get_weights(), plain.get_weights())
    assert_close(slots(loaded.optimizer), slots(plain.optimizer))
    forgetful = keras.saving.load_model(path)
    inner = keras.optimizers.SGD(0.1, momentum=0.9)
    forgetful.compile(AccumOptimizer(inner, 2), loss="mse", run_eagerly=True)
    fit(forgetful, *data(16, seed=3), 4)
    assert_differ(forgetful.get_weights(), plain.get_weights())


@pytest.mark.slow_in("adam_into_momentum")
@pytest.mark.parametrize(
    "saved, wanted",
    [
        (
            lambda: keras.optimizers.SGD(0.1, momentum=0.9),
            lambda: keras.optimizers.SGD(0.1),
        ),
        (
            lambda: keras.optimizers.Adam(0.01),
            lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        ),
    ],
    ids=["momentum_into_none", "adam_into_momentum"],
)
def test_a_checkpoint_of_another_optimizer_is_skipped_as_keras_skips_it(
    saved, wanted, tmp_path
):
    # With four trained variables it has four entries more than the inner optimizer, as
    # the checkpoint of a LossScaleOptimizer has.
    plain = compile_in(dense_model(), MODE, saved())
    fit(plain, *data(seed=2), 8)
    path = save(plain, tmp_path, "weights.h5")

    model = used(wanted())
    before = slots(model.optimizer)
    with pytest.warns(UserWarning, match="Skipping variable loading for optimizer"):
        model.load_weights(path)
    assert_equal(slots(model.optimizer), before)

    model = used(accumulating(wanted(), 2))
    before = slots(model.optimizer)
    with pytest.warns(UserWarning, match="Skipping variable loading for optimizer"):
        model.load_weights(path)
    assert_equal(slots(model.optimizer), before)
    assert_equal(model.get_weights(), plain.get_weights())


# ---------------------------------------------------- what does not fit, or is not there


def test_a_saved_window_of_other_variables_is_refused_and_changes_nothing():
    model = compile_in(dense_model(), MODE, accumulating())
    fit(model, *data(seed=2), 4)
    store = {}
    model.optimizer.save_own_variables(store)
    narrow = compile_in(dense_model(features=4), MODE, accumulating())
    fit(narrow, *data(8, features=4), 4)
    before = everything(narrow)

    def load_it():
        narrow.optimizer.load_own_variables(store)

    assert_refused(load_it, ValueError, MISFIT.format("sum_0"))
    assert_equal(everything(narrow), before)

    del store["micro_step"], store["sum_2"]
    assert_refused(load_it, ValueError, MISFIT.format("micro_step, sum_0, sum_2"))
    assert_equal(everything(narrow), before)


def test_a_saved_window_of_a_model_with_a_frozen_layer_is_refused(tmp_path):
    def half_frozen():
        model = dense_model()
        model.layers[1].trainable = False
        return compile_in(model, MODE, accumulating())

    frozen = half_frozen()
    fit(frozen, *data(seed=2), 4)
    path = save(frozen, tmp_path, "weights.h5")
    model = used(accumulating())
    before = [v.numpy() for v in model.optimizer.variables]

    message = MISFIT.format("reached, sum_0, sum_1, sum_2, sum_3")
    with pytest.raises(ValueError, match=re.escape(message)):
        model.load_weights(path)
    assert_equal([v.numpy() for v in model.optimizer.variables], before)
    alike = half_frozen()
    alike.load_weights(path)
    assert_equal(everything(alike), everything(frozen))


def test_a_model_that_was_saved_before_it_was_trained_loads(tmp_path):
    model = dense_model()
    model.compile(accumulating(keras.optimizers.Adam(0.01)), loss="mse")
    assert not model.optimizer.built
    path = save(model, tmp_path, "keras")
    with warnings.catch_warnings():
        # Keras says of any optimizer with slots that it has none to load.
        warnings.filterwarnings("ignore", message="Skipping variable loading")
        loaded = keras.saving.load_model(path)
    for trained in (model, loaded):
        fit(trained, *data(), 4)
    assert_equal(everything(loaded), everything(model))
    assert int(loaded.optimizer.iterations) == 2


def test_a_window_is_not_lost_in_silence_by_an_optimizer_that_is_not_built(tmp_path):
    model = compile_in(dense_model(), MODE, accumulating(keras.optimizers.SGD(0.1)))
    fit(model, *data(seed=2), 4)
    assert int(model.optimizer.micro_step) == 1
    path = save(model, tmp_path, "weights.h5")
    resumed = unbuilt(accumulating(keras.optimizers.SGD(0.1)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        resumed.load_weights(path)
    if caught:
        assert "Skipping variable loading for optimizer" in str(caught[0].message)
        return
    resumed.optimizer.build(resumed.trainable_variables)
    assert_equal(everything(resumed), everything(model))


# ------------------------------------------------------------------------- file size


def _saved_numbers(path):
    """How many numbers an `.h5` file holds under its optimizer."""
    sizes = []
    with h5py.File(path) as file:
        file.visititems(
            lambda name, item: (
                sizes.append(item.size)
                if isinstance(item, h5py.Dataset) and name.startswith("optimizer")
                else None
            )
        )
    return sum(sizes)


def test_slots_are_saved_once(tmp_path):
    def adam():
        return keras.optimizers.Adam(0.01)

    numbers = {}
    for name, optimizer in {
        "plain": adam(),
        "accumulating": accumulating(adam()),
        "scaled": keras.optimizers.LossScaleOptimizer(adam()),
    }.items():
        model = compile_in(dense_model(), MODE, optimizer)
        fit(model, *data(), 8)
        numbers[name] = _saved_numbers(save(model, tmp_path, "weights.h5"))
    parameters = dense_model().count_params()

    assert numbers["plain"] == 2 * parameters + 2
    # One copy of the parameters is the window; its counters are a few scalars.
    assert 0 < numbers["accumulating"] - 3 * parameters < 20
    # A control: Keras's own wrapper saves the slots twice.
    assert numbers["scaled"] > 4 * parameters


# ----------------------------------------------------------------- BackupAndRestore


class Interrupted(Exception):
    """What stops training from outside."""


class InterruptAt(keras.callbacks.Callback):
    """Stops at the end of a batch (counted over all epochs), or before an epoch."""

    def __init__(self, batch=None, epoch=None):
        super().__init__()
        self.batch, self.epoch, self.seen = batch, epoch, 0

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1
        if self.seen == self.batch:
            raise Interrupted

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            raise Interrupted


@pytest.mark.slow
def test_keras_19389_backup_and_restore_resumes_the_optimizer_after_a_cold_start(
    tmp_path,
):
    x, y = data(18)  # 5 micro-batches, the last one short: 2 are carried over

    def backup():
        return keras.callbacks.BackupAndRestore(tmp_path / "backup")

    whole = unbuilt(accumulating())
    fit(whole, x, y, 4, epochs=3)

    stopped = unbuilt(accumulating())
    with pytest.raises(Interrupted):
        fit(stopped, x, y, 4, epochs=3, callbacks=[backup(), InterruptAt(epoch=1)])
    assert int(stopped.optimizer.micro_step) == 2
    resumed = unbuilt(accumulating())
    history = fit(resumed, x, y, 4, epochs=3, callbacks=[backup()])

    assert history.epoch == [1, 2]
    assert_equal(everything(resumed), everything(whole))
    weights_only = unbuilt(accumulating())
    weights_only.set_weights(stopped.get_weights())
    fit(weights_only, x, y, 4, epochs=2)
    assert_differ(weights_only.get_weights(), whole.get_weights())


def test_backup_in_mid_epoch_replays_the_epoch_onto_the_window_that_was_open(tmp_path):
    # Keras begins the interrupted epoch anew, with the state of the middle of it.
    x, y = data(24)

    def backup():
        return keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=5)

    def sgd():
        return keras.optimizers.SGD(0.1, momentum=0.9)

    stopped = unbuilt(accumulating(sgd()))
    with pytest.raises(Interrupted):
        fit(stopped, x, y, 4, callbacks=[backup(), InterruptAt(batch=6)])
    resumed = unbuilt(accumulating(sgd()))
    fit(resumed, x, y, 4, callbacks=[backup()])

    # 5 micro-batches, saved; then the 6 of the whole epoch: windows of 12 rows each.
    rows = np.r_[0:20, 0:24]
    large = unbuilt(sgd())
    large.fit(Batches([12, 12, 12], x[rows], y[rows]), shuffle=False, verbose=0)
    assert int(resumed.optimizer.iterations) == 3
    assert int(resumed.optimizer.micro_step) == 2
    assert_close(resumed.get_weights(), large.get_weights())
    exact = unbuilt(sgd())
    exact.fit(Batches([12, 12], x, y), shuffle=False, verbose=0)
    assert_differ(exact.get_weights(), large.get_weights())


# ---------------------------------------------------------- iterations of the inner


@pytest.mark.slow_in("resumed")
@pytest.mark.parametrize("resume", [False, True], ids=["one_run", "resumed"])
def test_keras_20901_horovod_3631_inner_iterations_advance_behind_the_loss_scale(
    resume, tmp_path
):
    def adam():
        return keras.optimizers.Adam(0.05)

    model = compile_in(
        dense_model(), MODE, accumulating(keras.optimizers.LossScaleOptimizer(adam()))
    )
    large = compile_in(dense_model(), MODE, adam())
    stuck = compile_in(dense_model(), MODE, adam())
    for epoch in range(2):
        x, y = data(24, seed=epoch)
        fit(model, x, y, 4)
        fit(large, x, y, 12)
        for half in (slice(12), slice(12, 24)):
            stuck.optimizer.iterations.assign(0)
            fit(stuck, x[half], y[half], 12)
        if resume:
            model = load(save(model, tmp_path, "keras"), "keras", None)

    assert int(model.optimizer.iterations) == 4
    assert int(model.optimizer.inner_optimizer.iterations) == 4
    assert_close(model.get_weights(), large.get_weights(), rtol=2e-5)  # Adam
    assert_close(slots(model.optimizer), slots(large.optimizer), rtol=2e-5)
    assert_differ(stuck.get_weights(), large.get_weights())


# ----------------------------------------------------------------- configurations

ARGUMENTS = {
    "name": {"name": "windowed"},
    "accum_steps": {"accum_steps": 5},
    "schedule": {"accum_steps": three_then_two},
    "reduction": {"reduction": "sum"},
    "accumulator_dtype": {"accumulator_dtype": "float64"},
    "adaptive_clip_factor": {"adaptive_clip_factor": 0.25},
    "on_nonfinite": {"on_nonfinite": "skip_window"},
}


def _by_serialization(optimizer, folder):
    config = keras.optimizers.serialize(optimizer)
    return keras.optimizers.deserialize(json.loads(json.dumps(config)))


def _by_saved_model(optimizer, folder):
    model = compile_in(dense_model(), MODE, optimizer)
    return keras.saving.load_model(save(model, folder, "keras")).optimizer


def _by_from_config(optimizer, folder):
    return AccumOptimizer.from_config(optimizer.get_config())


round_trips = pytest.mark.parametrize(
    "round_trip", [_by_serialization, _by_saved_model, _by_from_config]
)


@pytest.mark.slow_in("schedule-_by_saved_model")
@round_trips
@pytest.mark.parametrize("argument", ARGUMENTS)
def test_every_argument_survives_saving(argument, round_trip, tmp_path):
    options = {"accum_steps": 3, **ARGUMENTS[argument]}
    optimizer = AccumOptimizer(keras.optimizers.SGD(0.25, momentum=0.5), **options)
    default = AccumOptimizer(keras.optimizers.SGD(0.25, momentum=0.5), 3)
    again = round_trip(optimizer, tmp_path)

    assert type(again) is AccumOptimizer
    (name,) = ARGUMENTS[argument]
    assert getattr(again, name) == ARGUMENTS[argument][name]
    assert getattr(default, name) != ARGUMENTS[argument][name]
    assert again.get_config() == optimizer.get_config()
    assert again.get_config() != default.get_config()


@round_trips
def test_the_steps_that_were_set_last_survive_saving(round_trip, tmp_path):
    optimizer = AccumOptimizer("sgd", 3)
    optimizer.accum_steps = 5
    again = round_trip(optimizer, tmp_path)
    assert again.accum_steps == 5


@round_trips
def test_the_inner_optimizer_survives_saving(round_trip, tmp_path):
    inner = keras.optimizers.AdamW(
        keras.optimizers.schedules.CosineDecay(0.1, 50),
        weight_decay=0.03,
        clipvalue=0.7,
        use_ema=True,
        ema_momentum=0.6,
    )
    again = round_trip(AccumOptimizer(inner, 3), tmp_path).inner_optimizer
    assert type(again) is keras.optimizers.AdamW
    assert again.get_config() == inner.get_config()
    assert again.get_config() != keras.optimizers.AdamW().get_config()


@round_trips
def test_the_settings_of_a_loss_scale_inside_survive_saving(round_trip, tmp_path):
    optimizer = accumulating()
    again = round_trip(optimizer, tmp_path)
    assert again.scales_dynamically
    assert (again.initial_scale, again.dynamic_growth_steps) == (2.0**10, 2)
    assert float(again.scale_loss(tf.constant(2.0))) == pytest.approx(2.0**11 / 3)
    assert again.inner_optimizer.ema_momentum == 0.7
    assert again.get_config() == optimizer.get_config()
    default = AccumOptimizer("adam", 3)
    assert (default.initial_scale, default.dynamic_growth_steps) == (2.0**15, 2000)
    assert not default.scales_dynamically


@round_trips
def test_a_constant_loss_scale_survives_saving(round_trip, tmp_path):
    optimizer = AccumOptimizer(keras.optimizers.SGD(0.1, loss_scale_factor=8.0), 3)
    again = round_trip(optimizer, tmp_path)
    assert again.loss_scale_factor == 8.0
    assert float(again.scale_loss(tf.constant(2.0))) == 16.0
    assert again.get_config() == optimizer.get_config()
    assert float(AccumOptimizer("sgd", 3).scale_loss(tf.constant(2.0))) == 2.0


def test_a_configuration_can_be_used_twice():
    optimizer = accumulating()
    for make, config in (
        (AccumOptimizer.from_config, optimizer.get_config()),
        (keras.optimizers.deserialize, keras.optimizers.serialize(optimizer)),
    ):
        for _ in range(2):
            assert make(config).get_config() == optimizer.get_config()


def test_classes_of_the_users_own_are_found_by_name(tmp_path):
    class Cautious(keras.optimizers.SGD):
        pass

    class Ramp:
        def __call__(self, update):
            return keras.ops.minimum(1 + update, 4)

        def get_config(self):
            return {}

        @classmethod
        def from_config(cls, config):
            return cls(**config)

    own = {"Cautious": Cautious, "Ramp": Ramp}
    optimizer = AccumOptimizer(Cautious(0.1), Ramp())
    model = compile_in(dense_model(), MODE, optimizer)
    path = save(model, tmp_path, "keras")
    again = keras.saving.load_model(path, custom_objects=own).optimizer
    assert type(again.inner_optimizer) is Cautious
    assert type(again.accum_steps) is Ramp
    with pytest.raises(TypeError, match="Could not locate class 'Cautious'"):
        keras.saving.load_model(path)


@pytest.mark.slow
def test_a_schedule_goes_on_where_it_was_saved(tmp_path):
    def sgd():
        return keras.optimizers.SGD(0.1, momentum=0.9)

    x, y = data(23)
    model = compile_in(dense_model(), MODE, accumulating(sgd(), three_then_two))
    fit(model, x[:13], y[:13], 1)
    loaded = load(save(model, tmp_path, "keras"), "keras", None)
    fit(loaded, x[13:], y[13:], 1)

    large = compile_in(dense_model(), MODE, sgd())
    large.fit(Batches([3] * 5 + [2] * 4, x, y), shuffle=False, verbose=0)
    assert int(loaded.optimizer.iterations) == 9
    assert_close(loaded.get_weights(), large.get_weights())
    constant = compile_in(dense_model(), MODE, sgd())
    constant.fit(Batches([3] * 7, x, y), shuffle=False, verbose=0)
    assert_differ(constant.get_weights(), large.get_weights())
