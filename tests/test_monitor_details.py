"""What `AccumulationMonitor` sees of a window besides its sum: norms, noise, infinities."""

import logging

import keras
import numpy as np
import pytest
from helpers import assert_refused, compile_in, data, dense_model, fit

import keras_accum as ka
from keras_accum._callbacks import _NoiseScale

X, Y = data(24)


class Means(keras.layers.Layer):
    """Gives its weight to each sample: the gradient of a sample is weight minus target."""

    def build(self, shape):
        self.mean = self.add_weight(shape=(3,), initializer="zeros")

    def call(self, x):
        return self.mean + 0 * x[:, :3]


def half_square(y, y_pred):
    return 0.5 * keras.ops.sum(keras.ops.square(y - y_pred), axis=-1)


def trained(mode="eager", optimizer=None, steps=3, **options):
    model = keras.Sequential([keras.Input((5,)), Means()])
    inner = optimizer or keras.optimizers.SGD(0.0)
    compile_in(model, mode, ka.AccumOptimizer(inner, steps), loss=half_square)
    return fit(model, X, Y, 4, callbacks=[ka.AccumulationMonitor(**options)], epochs=2)


def norms_of_windows():
    """Of the windows of an epoch: mean squared norm of the parts, that of the mean."""
    gradients = -Y.reshape(2, 3, 4, 3).mean(axis=2)
    small = np.square(gradients).sum(-1).mean(-1)
    return small, np.square(gradients.mean(axis=1)).sum(-1)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_noise_scale_is_that_of_the_gradients_by_hand(mode):
    signal = noise = 0.0
    for small, large in zip(*norms_of_windows()):
        signal += 0.005 * ((3 * large - small) / 2 - signal)
        noise += 0.005 * ((small - large) * 1.5 - noise)
    expected = 4 * noise / signal if signal > 0 else None
    logged = trained(mode, noise_scale=True).history.get("noise_scale")
    if expected is None:
        assert logged is None
    else:
        np.testing.assert_allclose(logged[0], expected, rtol=1e-4)
    plain = trained(mode).history
    assert not {"noise_scale", "clipped_share", "samples_per_second"} & set(plain)


def test_noise_scale_is_right_to_a_tenth_over_a_thousand_windows():
    """Noise of 2 in 20 dimensions around a gradient of norm 5: 4 * 20 / 25 per sample."""
    rng = np.random.default_rng(0)
    gradient = np.full(20, 5 / np.sqrt(20))
    found = _NoiseScale()
    for _ in range(1000):
        parts = gradient + rng.normal(scale=2 / np.sqrt(4), size=(8, 20))
        small = np.square(parts).sum(axis=1).mean()
        found.add(small, np.square(parts.mean(axis=0)).sum(), 8)
    assert abs(4 * found.value() / 3.2 - 1) < 0.1
    # The control: norms of parts as if they were those of the true gradient.
    assert abs((small - 25) / 25 / 3.2 * 4 - 1) > 0.1


def test_noise_that_hides_the_gradient_has_no_scale():
    found = _NoiseScale()
    assert found.value() is None
    found.add(9.0, 1.0, 4)
    assert found.value() is None
    found.add(4.0, 2.0, 1)  # A window of one tells nothing.
    assert found.value() is None


@pytest.mark.parametrize(
    ("clip", "after"),
    [
        ({"global_clipnorm": 0.1}, lambda norm, mean: 0.1),
        ({"clipnorm": 0.1}, lambda norm, mean: 0.1),
        ({"clipvalue": 0.05}, lambda norm, mean: np.linalg.norm(mean.clip(-0.05, 0.05))),
        ({"global_clipnorm": 1e3}, lambda norm, mean: norm),
    ],
)
def test_norms_before_and_after_clipping_and_the_share_of_clipped_updates(clip, after):
    history = trained(optimizer=keras.optimizers.SGD(0.0, **clip), detailed=True).history
    mean = -Y[12:].mean(axis=0)
    norm = np.linalg.norm(mean)
    np.testing.assert_allclose(history["gradient_norm"][0], norm, rtol=1e-5)
    expected = after(norm, mean)
    np.testing.assert_allclose(history["clipped_gradient_norm"][0], expected, rtol=1e-5)
    assert history["clipped_share"] == [1.0, 1.0] if expected < norm else [0.0, 0.0]
    assert min(history["samples_per_second"]) > 0


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
    expected = np.sqrt(norms_of_windows()[1])
    np.testing.assert_allclose([norm for _, norm in seen], [*expected] * 2, rtol=1e-5)


def test_a_step_that_accumulates_has_no_windows_to_watch():
    model = ka.accumulate(dense_model(), accum_steps=2)
    compile_in(model, "eager", keras.optimizers.SGD(0.1))
    monitor = ka.AccumulationMonitor(noise_scale=True)
    assert_refused(
        lambda: fit(model, X, Y, 8, callbacks=[monitor]),
        ValueError,
        "`detailed=True` and `noise_scale=True` watch the windows of an `AccumOptimizer` "
        "on one device. Received a model with a step that accumulates: leave them out.",
    )


def test_afterwards_nothing_is_watched_any_more():
    optimizer = ka.AccumOptimizer(keras.optimizers.SGD(0.1), 3)
    model = compile_in(dense_model(), "graph", optimizer)
    fit(model, X, Y, 4, callbacks=[ka.AccumulationMonitor(detailed=True)])
    assert optimizer.observer is None and model.train_function is None
    assert int(optimizer.iterations) == 2
