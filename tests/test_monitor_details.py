"""What `AccumulationMonitor` sees of a window besides its sum: norms, noise, infinities."""

import csv
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_refused, compile_in, data, dense_model, fit, since_keras

import keras_accum as ka
from keras_accum._backend import memory
from keras_accum._optimizer.observer import norm_after_clipping

X, Y = data(24)


class Means(keras.layers.Layer):
    """Gives its weight less 1 to each sample: its gradient is that minus its target."""

    def __init__(self, size=3):
        super().__init__()
        self.size = size

    def build(self, shape):
        self.mean = self.add_weight(shape=(self.size,), initializer="zeros")

    def call(self, x):
        return self.mean + 0 * x[:, :1] - 1


class Sum(keras.losses.Loss):
    def __init__(self):
        super().__init__(reduction="sum")

    def call(self, y, y_pred):
        return half_square(y, y_pred)


def half_square(y, y_pred):
    return 0.5 * keras.ops.sum(keras.ops.square(y - y_pred), axis=-1)


def trained(mode="eager", optimizer=None, steps=3, route="optimizer", **options):
    """Two epochs of 24 samples, in micro-batches of 4; 12 samples make an update."""
    model = keras.Sequential([keras.Input((5,)), Means()])
    optimizer, batch_size = optimizer or keras.optimizers.SGD(0.0), 4
    if route != "optimizer":
        ka.accumulate(model, micro_batch_size=4)
        batch_size = 12
    if route == "optimizer":
        optimizer = ka.AccumOptimizer(optimizer, steps)
    if route == "both":
        optimizer = ka.AccumOptimizer(optimizer, 2)
    compile_in(model, mode, optimizer, loss=half_square)
    monitor = ka.AccumulationMonitor(**options)
    return fit(model, X, Y, batch_size, callbacks=[monitor], epochs=2)


def noise_scale(*windows, seen=(0,)):
    """By hand, of updates that are lists of micro-batches: of targets, one a row.

    The norms are taken of those that are `seen`.
    """
    signal = noise = 0.0
    for parts in windows:
        samples = sum(map(len, parts))
        shares = np.array([len(part) / samples for part in parts])
        gradients = np.stack([-part.mean(axis=0) for part in parts])
        large = np.square(shares @ gradients).sum()
        some, shares = gradients[list(seen)], shares[list(seen)]
        small = shares @ np.square(some).sum(axis=1) / shares.sum()
        k = len(seen) / shares.sum()
        signal += 0.005 * ((k * large - small) / (k - 1) - signal)
        noise += 0.005 * (samples * (small - large) / (k - 1) - noise)
    assert signal > 0
    return noise / signal


@pytest.mark.slow_but("eager-both", "graph-optimizer")
@pytest.mark.parametrize("route", ["optimizer", "step", "both"])
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_noise_scale_is_that_of_the_gradients_by_hand(mode, route):
    logged = trained(mode, route=route, noise_scale=True).history["noise_scale"]
    parts = np.split(Y + 1, 6)
    # In both, of the first micro-batch of each step.
    expected = noise_scale(parts[:3], parts[3:])
    if route == "both":
        expected = noise_scale(parts, seen=(0, 3))
    np.testing.assert_allclose(logged[0], expected, rtol=1e-4)
    # The control: the second micro-batch instead of the first.
    assert abs(logged[0] / noise_scale(parts[:3], parts[3:], seen=(1,)) - 1) > 0.01
    plain = trained(mode, route=route).history
    assert not {"noise_scale", "clipped_share", "samples_per_second"} & set(plain)


def test_micro_batches_of_unlike_sizes_count_by_their_samples():
    model = keras.Sequential([keras.Input((5,)), Means()])
    ka.accumulate(model, accum_steps=4)
    compile_in(model, "eager", keras.optimizers.SGD(0.0), loss=half_square)
    monitor = ka.AccumulationMonitor(noise_scale=True)
    x, y = X[:22], Y[:22]
    logged = fit(model, x, y, 22, callbacks=[monitor]).history["noise_scale"]
    sizes = [6, 12, 17]
    np.testing.assert_allclose(logged[0], noise_scale(np.split(y + 1, sizes)), rtol=1e-4)
    assert abs(logged[0] / noise_scale(np.split((y + 1)[:20], 4)) - 1) > 0.01
    scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.0))
    compile_in(model, "eager", scaler, loss=half_square)
    logged = fit(model, x, y, 22, callbacks=[monitor]).history["noise_scale"]
    expected = noise_scale(np.split(y + 1, sizes), seen=range(4))
    np.testing.assert_allclose(logged[0], expected, rtol=1e-4)


@pytest.mark.parametrize("scale", [False, True])
def test_sums_and_scaled_losses_have_the_noise_of_their_mean(scale):
    """A sum over 12 samples is 12 times their mean, and its noise is 12 times theirs."""
    parts = np.split(Y + 1, 6)
    expected = noise_scale(parts[:3], parts[3:])
    optimizer = keras.optimizers.SGD(0.0)
    if scale:  # Each may overflow, and is seen.
        expected = noise_scale(parts[:3], parts[3:], seen=range(3))
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=64.0)
        for route in ("optimizer", "step"):
            logged = trained(
                optimizer=optimizer.from_config(optimizer.get_config()),
                route=route,
                noise_scale=True,
            ).history
            np.testing.assert_allclose(logged["noise_scale"][0], expected, rtol=1e-4)
            norm = np.linalg.norm((Y + 1)[12:].mean(axis=0))
            np.testing.assert_allclose(logged["gradient_norm"][0], norm, rtol=1e-5)
        return
    model = keras.Sequential([keras.Input((5,)), Means()])
    windows = ka.AccumOptimizer(optimizer, 3, reduction="sum")
    loss = Sum()
    compile_in(model, "eager", windows, loss=loss)
    monitor = ka.AccumulationMonitor(noise_scale=True)
    logged = fit(model, X, Y, 4, callbacks=[monitor]).history["noise_scale"]
    np.testing.assert_allclose(logged[0], expected, rtol=1e-4)


@pytest.mark.slow_in("0.1")
@pytest.mark.parametrize(
    ("route", "windows", "bound"), [("optimizer", 1000, 0.1), ("step", 300, 0.15)]
)
def test_noise_scale_is_right_on_a_quadratic_with_known_noise(route, windows, bound):
    """Noise of 2 in 20 dimensions around a gradient of norm 5: 4 * 20 / 25 samples."""
    rng = np.random.default_rng(0)
    samples = windows * 4 * 4
    y = 5 / np.sqrt(20) + 2 * rng.normal(size=(samples, 20)) - 1
    model = keras.Sequential([keras.Input((1,)), Means(20)])
    optimizer, batch_size = keras.optimizers.SGD(0.0), 4
    if route == "step":
        ka.accumulate(model, accum_steps=4)
        batch_size = 16
    else:
        optimizer = ka.AccumOptimizer(optimizer, 4)
    compile_in(model, "graph", optimizer, loss=half_square, steps_per_execution=20)
    monitor = ka.AccumulationMonitor(noise_scale=True)
    x = np.zeros((samples, 1), "float32")
    history = fit(model, x, y, batch_size, callbacks=[monitor]).history
    assert history["updates"] == [windows]
    assert abs(history["noise_scale"][0] / 3.2 - 1) < bound


def test_noise_that_hides_the_gradient_has_no_scale():
    model = keras.Sequential([keras.Input((5,)), Means()])
    compile_in(
        model, "eager", ka.AccumOptimizer(keras.optimizers.SGD(0.0), 3), loss=half_square
    )
    # Means of 3, 3 and -6 cancel, and so does what is left of the gradient.
    y = np.repeat(np.float32([3, 3, -6]), 4)[:, None] * np.ones((1, 3), "float32") - 1
    monitor = ka.AccumulationMonitor(noise_scale=True)
    history = fit(model, X[:12], y, 4, callbacks=[monitor]).history
    assert np.isnan(history["noise_scale"]).all()
    # A window of one micro-batch tells nothing either.
    assert np.isnan(trained(steps=1, noise_scale=True).history["noise_scale"]).all()


@pytest.mark.slow_in("optimizer", "clip0", "clip1")
@pytest.mark.parametrize(
    ("clip", "after"),
    [
        ({"global_clipnorm": 0.1}, lambda norm, mean: 0.1),
        ({"clipnorm": 0.1}, lambda norm, mean: 0.1),
        ({"clipvalue": 0.05}, lambda norm, mean: np.linalg.norm(mean.clip(-0.05, 0.05))),
        ({"global_clipnorm": 1e3}, lambda norm, mean: norm),
    ],
)
@pytest.mark.parametrize("route", ["optimizer", "step"])
def test_norms_before_and_after_clipping_and_the_share_of_clipped_updates(
    clip, after, route
):
    optimizer = keras.optimizers.SGD(0.0, **clip)
    history = trained(optimizer=optimizer, route=route, detailed=True).history
    mean = -(Y + 1)[12:].mean(axis=0)
    norm = np.linalg.norm(mean)
    np.testing.assert_allclose(history["gradient_norm"][0], norm, rtol=1e-5)
    expected = after(norm, mean)
    np.testing.assert_allclose(history["clipped_gradient_norm"][0], expected, rtol=1e-5)
    assert history["clipped_share"] == [1.0, 1.0] if expected < norm else [0.0, 0.0]
    assert min(history["samples_per_second"]) > 0


@since_keras("3.15", "MultiOptimizer")
def test_the_parts_of_a_multi_optimizer_clip_each_its_own():
    def optimizer_of(variable):
        return clipping if variable.path == "b" else plain

    plain, clipping = keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1, clipnorm=1.0)
    a, b = (keras.Variable([3.0, 4.0], name=name) for name in "ab")
    optimizer = keras.optimizers.MultiOptimizer(optimizer_of)
    optimizer.build([a, b])
    gradients = [tf.constant([3.0, 4.0])] * 2
    norm = norm_after_clipping(optimizer, gradients, [a, b])
    np.testing.assert_allclose(norm, np.sqrt(25 + 1), rtol=1e-6)


@pytest.mark.slow_but(
    "skip_window-A window was skipped after update 0: in micro-batch 2 of the "
)
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("skip_window", "A window was skipped after update 0: in micro-batch 2 of the "),
        (
            "skip_micro_batch",
            "A micro-batch was left out after update 1: in micro-batch 2 of ",
        ),
    ],
)
def test_what_was_not_finite_is_named(how, said, caplog):
    caplog.set_level(logging.WARNING, "keras_accum")
    x = X[:12].copy()
    x[5, 0] = np.nan
    optimizer = ka.AccumOptimizer(keras.optimizers.SGD(0.1), 3, on_nonfinite=how)
    model = compile_in(dense_model(), "eager", optimizer)
    fit(model, x, Y[:12], 4, callbacks=[ka.AccumulationMonitor(detailed=True)])
    names = [v.path for v in model.trainable_variables]
    (line,) = [text for text in caplog.messages if text.startswith("A ")]
    assert line.startswith(said)
    shown = f"{', '.join(names[:3])} and {len(names) - 3} more"
    assert line.endswith(f"the gradient of {shown} was not finite.")


@pytest.mark.slow_in("eager")
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_step_that_an_overflow_skips_is_explained(mode, caplog):
    caplog.set_level(logging.WARNING, "keras_accum")
    x = X[:12].copy()
    x[5, 0] = np.nan
    model = ka.accumulate(dense_model(), micro_batch_size=4)
    scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    compile_in(model, mode, scaler)
    monitor = ka.AccumulationMonitor(detailed=True)
    history = fit(model, x, Y[:12], 12, callbacks=[monitor], epochs=2).history
    assert (history["updates"], history["skipped_windows"]) == ([0, 0], [1, 2])
    assert history["gradient_norm"] == [0, 0]
    names = [v.path for v in model.trainable_variables]
    line = (
        "A step was skipped after update 0: in micro-batch 2 of the step, the gradient of "
        f"{', '.join(names[:3])} and {len(names) - 3} more was not finite."
    )
    assert [text for text in caplog.messages if text.startswith("A ")] == [line] * 2


class Root(keras.layers.Layer):
    """NaN below zero, where nothing before it is."""

    def call(self, x):
        return keras.ops.sqrt(x)


def with_root(place=1):
    """Layers of which one is not finite for a sample whose features are negative."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((5,))
    hidden = keras.layers.Activation("linear", name="first")(inputs)
    hidden = Root(name="root")(hidden) if place else hidden
    return keras.Model(inputs, keras.layers.Dense(3, name="last")(hidden))


def last_loss(y, y_pred):
    return keras.ops.sqrt(y_pred[:, 0] - y_pred[:, 0] - 0 * y[:, 0])


def first_layer_said(mode, route, make=with_root, loss="mse"):
    """What is said of a window of 3 micro-batches, the second of which is not finite."""
    x = np.abs(X[:12]) + 0.1
    x[5] *= -1
    model = make()
    inner, batch_size = keras.optimizers.SGD(0.1), 4
    if route == "step":
        ka.accumulate(model, micro_batch_size=4)
        optimizer, batch_size = keras.optimizers.LossScaleOptimizer(inner), 12
    else:
        optimizer = ka.AccumOptimizer(inner, 3, on_nonfinite=route)
    compile_in(model, mode, optimizer, loss=loss)
    monitor = ka.AccumulationMonitor(check_numerics=True)
    fit(model, x, Y[:12], batch_size, callbacks=[monitor])
    assert all("call" not in vars(layer) for layer in model.layers)


@pytest.mark.slow_in("eager-skip_window", "graph-skip_micro_batch", "graph-step")
@pytest.mark.parametrize("route", ["skip_window", "skip_micro_batch", "step"])
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_the_first_layer_that_was_not_finite_is_named_if_asked(mode, route, caplog):
    caplog.set_level(logging.WARNING, "keras_accum")
    first_layer_said(mode, route)
    (line,) = [text for text in caplog.messages if text.startswith("A ")]
    assert "micro-batch 2 of the" in line
    assert line.endswith(" First layer whose output was not finite: root.")


def test_an_infinity_of_the_loss_is_that_of_no_layer(caplog):
    caplog.set_level(logging.WARNING, "keras_accum")
    first_layer_said("eager", "skip_window", lambda: with_root(0), last_loss)
    (line,) = [text for text in caplog.messages if text.startswith("A ")]
    assert line.endswith("was not finite: none: the loss or the backward pass.")


@pytest.mark.slow_in("eager")
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_what_raises_names_the_first_layer_if_asked(mode):
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        first_layer_said(mode, "raise")
    text = str(caught.value)
    assert "root" in text.split("First layer:")[1] and "last/kernel" in text
    assert "2" in text.split("from 1:")[1].split("Variables:")[0]


def test_after_a_step_that_raises_nothing_is_watched_any_more():
    kept = []

    def make():
        kept.append(with_root())
        return kept[-1]

    with pytest.raises(tf.errors.InvalidArgumentError):
        first_layer_said("eager", "raise", make)
    (model,) = kept
    assert model.optimizer.observer is None and model.train_function is None
    assert all("call" not in vars(layer) for layer in model.layers)
    fit(model, np.abs(X[:12]), Y[:12], 4)
    assert int(model.optimizer.iterations) == 1


def test_an_infinity_in_validation_is_none_of_training(caplog):
    caplog.set_level(logging.WARNING, "keras_accum")
    x = np.abs(X[:12]) + 0.1
    y = Y[:12].copy()
    model = with_root()
    optimizer = ka.AccumOptimizer(
        keras.optimizers.SGD(0.1), 3, on_nonfinite="skip_window"
    )
    compile_in(model, "eager", optimizer, loss="mse")
    monitor = ka.AccumulationMonitor(check_numerics=True)
    fit(model, x, y, 4, callbacks=[monitor], validation_data=(-x, y))
    y[0] = np.inf  # Of the loss now.
    fit(model, x, y, 4, callbacks=[monitor], validation_data=(-x, y), epochs=2)
    lines = [text for text in caplog.messages if text.startswith("A ")]
    assert ["none: the loss" in line for line in lines] == [True, True]


# ------------------------------------------------------------- where the values go


def epoch_scalars(folder):
    """The values of each epoch in the event files of a folder, by tag."""
    found = {}
    for path in sorted(folder.glob("**/events.out.*")):
        for record in tf.data.TFRecordDataset(str(path)):
            for value in tf.compat.v1.Event.FromString(record.numpy()).summary.value:
                if value.tag.startswith("epoch_"):
                    number = tf.make_ndarray(value.tensor).item()
                    found.setdefault(value.tag.removeprefix("epoch_"), []).append(number)
    return found


@pytest.mark.slow_in("step")
@pytest.mark.parametrize("route", ["optimizer", "step"])
def test_all_values_are_in_event_files_tables_and_the_progress_bar(
    route, tmp_path, capsys
):
    """From the first epoch on, in which there is no update yet: so a table has a column."""
    pytest.importorskip("tensorboard", reason="tf.summary writes nothing without it")
    model = keras.Sequential([keras.Input((5,)), Means()])
    inner = keras.optimizers.SGD(0.0, global_clipnorm=0.5)
    if route == "optimizer":
        optimizer, batch_size = ka.AccumOptimizer(inner, 9), 4
    else:
        ka.accumulate(model, micro_batch_size=4)
        optimizer, batch_size = keras.optimizers.LossScaleOptimizer(inner), 24
    compile_in(model, "graph", optimizer, loss=half_square)
    callbacks = [
        ka.AccumulationMonitor(noise_scale=True),
        keras.callbacks.TensorBoard(tmp_path / "board"),
        keras.callbacks.CSVLogger(tmp_path / "log.csv"),
    ]
    history = model.fit(
        X, Y, batch_size=batch_size, epochs=2, shuffle=False, callbacks=callbacks
    ).history
    names = {"updates", "gradient_norm", "clipped_gradient_norm", "clipped_share"}
    names |= {"noise_scale", "samples_per_second"}
    if route == "step":
        names |= {"loss_scale", "skipped_windows"}
    assert set(history) == {"loss", *names}
    assert np.isnan(history["noise_scale"]).tolist() == [route == "optimizer", False]
    scalars = epoch_scalars(tmp_path / "board")
    with open(tmp_path / "log.csv") as file:
        rows = list(csv.DictReader(file))
    bar = capsys.readouterr().out
    for name in names:
        expected = np.float32(history[name])
        np.testing.assert_allclose(scalars[name], expected, rtol=1e-6)
        in_table = [float(row[name]) for row in rows]
        np.testing.assert_allclose(in_table, expected, rtol=1e-6)
        assert f"{name}: " in bar


# ---------------------------------------------------------------------- memory


def test_peak_memory_is_logged_where_the_device_tells(monkeypatch):
    assert "peak_bytes" not in trained(detailed=True).history  # A CPU does not.
    peaks = {"GPU:0": 7, "GPU:1": 9}
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [*peaks])

    def info(device):
        return {"peak": peaks[device], "current": 1}

    monkeypatch.setattr(tf.config.experimental, "get_memory_info", info)
    assert memory.peak_bytes() == 9
    assert trained(detailed=True).history["peak_bytes"] == [9, 9]
    assert "peak_bytes" not in trained().history

    def silent(device):
        raise ValueError("no allocator statistics")

    monkeypatch.setattr(tf.config.experimental, "get_memory_info", silent)
    assert memory.peak_bytes() is None


def test_what_raises_names_the_micro_batch_and_the_variables():
    optimizer = ka.AccumOptimizer(keras.optimizers.SGD(0.1), 3, on_nonfinite="raise")
    a, b = (keras.Variable([1.0, 2.0], name=name) for name in "ab")
    optimizer.apply([np.ones(2, "float32")] * 2, [a, b], weight=1)
    with pytest.raises(Exception, match="infinity or a NaN") as caught:
        optimizer.apply(
            [np.ones(2, "float32"), np.float32([1, np.nan])], [a, b], weight=1
        )
    text = str(caught.value)
    assert (
        "Micro-batch of the window, from 1:" in text and "2" in text.split("from 1:")[1]
    )
    assert "b" in text.split("Variables:")[1] and "a," not in text.split("Variables:")[1]


def test_the_start_line_is_shown_once_and_verbose_hides_it(capsys):
    monitor = ka.AccumulationMonitor()
    for _ in range(2):
        optimizer = ka.AccumOptimizer(keras.optimizers.SGD(0.1), 3)
        model = compile_in(dense_model(), "eager", optimizer)
        fit(model, X, Y, 4, callbacks=[monitor])
    line = (
        "4 samples x 3 accum_steps x 1 replicas = effective batch 12; 2 updates per epoch; "
        "accumulators: 0.0 MiB\n"
    )
    assert capsys.readouterr().err == line
    trained(verbose=0)
    assert capsys.readouterr().err == ""


def test_a_subclass_is_called_at_each_update():
    class Log(ka.AccumulationMonitor):
        def on_update_end(self, update, logs):
            seen.append((update, logs["gradient_norm"]))

    seen = []
    optimizer = ka.AccumOptimizer(keras.optimizers.SGD(0.0), 3)
    model = keras.Sequential([keras.Input((5,)), Means()])
    compile_in(model, "eager", optimizer, loss=half_square)
    fit(model, X, Y, 4, callbacks=[Log()], epochs=2)
    assert [update for update, _ in seen] == [1, 2, 3, 4]
    means = [(Y + 1)[:12].mean(axis=0), (Y + 1)[12:].mean(axis=0)]
    expected = [np.linalg.norm(mean) for mean in means]
    np.testing.assert_allclose([norm for _, norm in seen], expected * 2, rtol=1e-5)


def test_a_loss_that_couples_micro_batches_tells_no_noise():
    model = ka.accumulate(dense_model(), accum_steps=2, two_pass=True)
    compile_in(model, "eager", keras.optimizers.SGD(0.1))
    monitor = ka.AccumulationMonitor(noise_scale=True)
    assert_refused(
        lambda: fit(model, X, Y, 8, callbacks=[monitor]),
        ValueError,
        "`noise_scale=True` compares the gradients of micro-batches with that of the "
        "batch. Received a model with `two_pass=True`, whose loss may couple them, so "
        "that they tell nothing of noise: leave `noise_scale` out.",
    )
    history = fit(model, X, Y, 8, callbacks=[ka.AccumulationMonitor(detailed=True)])
    assert history.history["gradient_norm"][0] > 0


def test_afterwards_nothing_is_watched_any_more():
    optimizer = ka.AccumOptimizer(keras.optimizers.SGD(0.1), 3)
    model = compile_in(dense_model(), "graph", optimizer)
    fit(model, X, Y, 4, callbacks=[ka.AccumulationMonitor(detailed=True)])
    assert optimizer.observer is None and model.train_function is None
    assert int(optimizer.iterations) == 2
