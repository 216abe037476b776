"""`check_equivalence` finds what differs, and where; what is equal it calls so."""

import json
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_equal, assert_refused, dense_model
from small_models import (
    OwnStep,
    X,
    Y,
    centered,
    compiled,
    everything,
    model_with,
    windows,
)

import keras_accum as ka
from keras_accum._insight import equivalence

layers = keras.layers


# ------------------------------------------------------------------- what is equal


@pytest.mark.slow_in("windows-True")
@pytest.mark.parametrize(
    ("optimizer", "eager"), [("sgd", True), (windows, True), (windows, False)]
)
def test_a_clean_model_is_equal_and_a_mean_of_means_is_not(optimizer, eager):
    """26 samples in 4 micro-batches: 7, 7, 6, 6."""
    optimizer = optimizer() if callable(optimizer) else optimizer
    model = compiled(dense_model(), optimizer, eager=eager, metrics=["mae"])
    report = ka.check_equivalence(model, X, Y, accum_steps=4)
    assert report.equal and report.loss.equal and report.metrics["mae"].equal
    assert (report.samples, report.accum_steps) == (26, 4)
    assert report.route == ("step" if optimizer == "sgd" else "optimizer")
    assert set(report.gradients) == {v.path for v in model.trainable_variables}
    assert all(0 <= ratio < 2 for ratio in report.gradients.values())
    assert all(1e-8 < v.floor < 1e-5 for v in report.variables)
    assert all(v.cosine > 1 - 1e-6 and v.kind == "equal" for v in report.variables)
    assert min(report.naive.values()) > 1e3
    assert (report.first_layer, report.state, report.randomness) == (None, (), "none")


def test_a_mean_of_means_is_equal_where_micro_batches_are():
    report = ka.check_equivalence(compiled(dense_model()), X[:24], Y[:24], accum_steps=4)
    assert report.equal and max(report.naive.values()) < 4


def test_token_weights_are_equal_in_the_step_and_logged_by_samples_in_the_optimizer():
    weight = np.arange(26.0, dtype="float32")
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    step = ka.check_equivalence(compiled(dense_model(), loss=loss), X, Y, weight)
    assert step.equal and step.loss.equal and min(step.naive.values()) > 1e4
    model = compiled(dense_model(), windows(), loss=loss)
    optimizer = ka.check_equivalence(model, X, Y, weight)
    assert optimizer.equal and not optimizer.loss.equal
    assert "Logged otherwise than for the large batch: loss." in str(optimizer)


def test_dropout_and_noise_are_the_same_for_each_sample():
    middle = [layers.Dropout(0.5), layers.GaussianNoise(0.3), layers.GaussianDropout(0.2)]
    report = ka.check_equivalence(compiled(model_with(*middle)), X, Y)
    assert report.equal and report.randomness == "replayed"
    assert max(report.gradients.values()) < 2


def test_the_bias_of_keys_is_zero_but_for_rounding():
    inputs = keras.Input((5, 4))
    hidden = layers.MultiHeadAttention(2, 4)(inputs, inputs)
    model = keras.Model(inputs, layers.Dense(3)(layers.Flatten()(hidden)))
    x = np.random.default_rng(0).normal(size=(26, 5, 4)).astype("float32")
    report = ka.check_equivalence(compiled(model), x, Y)
    zero = [v for v in report.variables if v.kind == "zero"]
    assert [v.path for v in zero] == ["multi_head_attention/key/bias"]
    assert zero[0].error > 0.1 and report.equal
    said = "Zero but for rounding: the gradient of multi_head_attention/key/bias."
    assert said in str(report)


@pytest.mark.slow_in("mixed_bfloat16")
@pytest.mark.parametrize(
    ("policy", "optimizer"),
    [
        ("mixed_bfloat16", windows),
        ("mixed_float16", keras.optimizers.SGD),
        pytest.param("mixed_bfloat16", keras.optimizers.SGD, marks=pytest.mark.slow),
        pytest.param("mixed_float16", windows, marks=pytest.mark.slow),
    ],
)
def test_low_precision_has_a_higher_floor(policy, optimizer):
    keras.config.set_dtype_policy(policy)
    model = compiled(dense_model(), optimizer())
    report = ka.check_equivalence(model, X, Y)
    assert report.equal and min(v.floor for v in report.variables) > 1e-4
    differs = compiled(model_with(layers.BatchNormalization()), optimizer())
    assert not ka.check_equivalence(differs, X, Y).equal


def test_a_loss_scale_that_overflows_at_first_is_lowered():
    keras.config.set_dtype_policy("mixed_float16")
    scaler = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(), initial_scale=2.0**24
    )
    report = ka.check_equivalence(compiled(dense_model(), scaler), X, Y)
    assert report.equal and all(v.kind == "equal" for v in report.variables)


def test_a_data_set_gives_its_first_batch():
    batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(10)
    report = ka.check_equivalence(compiled(dense_model()), batches, accum_steps=3)
    assert report.equal and report.samples == 10


# --------------------------------------------------------------------- what differs


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [keras.optimizers.SGD, windows])
def test_batch_normalization_is_where_the_difference_enters(optimizer):
    middle = [
        layers.Dropout(0.5),
        layers.BatchNormalization(name="norm"),
        layers.Dense(4),
    ]
    model = model_with(*middle)
    report = ka.check_equivalence(compiled(model, optimizer()), X, Y)
    assert not report.equal and report.first_layer == "norm"
    assert {v.path for v in report.state} == {"norm/moving_mean", "norm/moving_variance"}
    assert all(v.kind == "differs" for v in report.state)
    model.get_layer("norm").trainable = False
    frozen = ka.check_equivalence(compiled(model, optimizer()), X, Y)
    assert frozen.equal and frozen.state == ()


def test_a_loss_that_couples_samples_is_where_it_enters_and_two_passes_mend_it():
    model = compiled(dense_model(), loss=centered)
    report = ka.check_equivalence(model, X, Y)
    assert not report.equal and report.first_layer == "loss"
    assert ka.check_equivalence(model, X, Y, two_pass=True).equal


def test_state_that_moves_at_each_call_is_named():
    model = model_with(layers.SpectralNormalization(layers.Dense(4), name="spectral"))
    report = ka.check_equivalence(compiled(model), X, Y)
    assert not report.equal and report.first_layer == "spectral"


def test_a_layer_that_looks_at_the_sample_before_is_named():
    class Shift(layers.Layer):
        def call(self, x):
            return x + keras.ops.roll(x, 1, axis=0)

    report = ka.check_equivalence(compiled(model_with(Shift(name="shift"))), X, Y)
    assert not report.equal and report.first_layer == "shift"
    assert report.randomness == "none"


def test_random_numbers_that_cannot_be_drawn_again_are_no_equality():
    class Noise(layers.Layer):
        def call(self, x):
            return x + tf.random.normal(tf.shape(x))

    report = ka.check_equivalence(compiled(model_with(Noise())), X, Y)
    assert not report.equal and report.randomness == "not replayed"
    assert "draws random numbers that cannot be drawn again" in str(report)


def test_a_step_of_the_users_is_measured_with_what_it_draws():
    """Micro-batches of 7, 7, 6, 6 samples whose weight the package does not know."""
    model = model_with(layers.Dropout(0.5), make=OwnStep)
    report = ka.check_equivalence(compiled(model, loss=None), X, Y, accum_steps=4)
    assert not report.equal and report.route == "optimizer"
    assert report.first_layer == "loss" and report.randomness == "replayed"
    assert ["weight of a micro-batch is not known" in text for text in report.said] == [
        True
    ]
    even = ka.check_equivalence(model, X[:24], Y[:24], accum_steps=4)
    assert even.equal and even.loss.equal


def test_a_metric_of_the_batch_is_found_and_the_update_is_equal():
    def rmse(y, y_pred):
        return keras.ops.sqrt(keras.ops.mean(keras.ops.square(y - y_pred)))

    model = compiled(dense_model(), metrics=[rmse, "mae"])
    report = ka.check_equivalence(model, X, Y)
    assert report.equal and not report.metrics["rmse"].equal
    assert report.metrics["mae"].equal
    assert ka.check_equivalence(model, X, Y, two_pass=True).metrics["rmse"].equal


# -------------------------------------------------------- the model is what it was


@pytest.mark.slow_in("False")
@pytest.mark.parametrize(
    ("fails", "optimizer"),
    [
        (False, windows),
        (True, lambda: keras.optimizers.Adam()),
        pytest.param(True, windows, marks=pytest.mark.slow),
        pytest.param(False, lambda: keras.optimizers.Adam(), marks=pytest.mark.slow),
    ],
)
def test_the_model_is_to_the_bit_what_it_was(fails, optimizer, monkeypatch):
    middle = [layers.BatchNormalization(), layers.Dropout(0.5)]
    model = compiled(model_with(*middle), optimizer(), metrics=["mae"], eager=fails)
    model.fit(X, Y, batch_size=7, verbose=0)
    before, functions = everything(model), (model.train_function, model.optimizer)
    if fails:
        monkeypatch.setattr(equivalence._Measurement, "report", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ka.check_equivalence(model, X, Y)
    else:
        ka.check_equivalence(model, X, Y)
    assert_equal(everything(model), before)
    assert (model.train_function, model.optimizer) == functions
    assert "call" not in vars(model) and model.jit_compile is False
    assert all("call" not in vars(layer) for layer in model.layers)


def test_what_was_said_in_it_is_said_again_in_training():
    model = compiled(model_with(layers.SpectralNormalization(layers.Dense(4))))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        report = ka.check_equivalence(model, X, Y)
    assert len(report.said) == 1 and "State moves at each call" in report.said[0]
    with pytest.warns(UserWarning, match="State moves at each call"):
        ka.accumulate(model, accum_steps=2)


def test_it_costs_at_most_six_large_batches():
    """A step is three passes, a forward pass one; six are needed to find a layer."""
    rows = []

    class Count(layers.Layer):
        def call(self, x):
            if not tf.is_symbolic_tensor(x):
                rows.append(int(x.shape[0]))
            return x

    model = compiled(model_with(Count()))
    ka.check_equivalence(model, X, Y)
    assert sum(rows) == 4 * 26
    rows.clear()
    model = compiled(model_with(layers.BatchNormalization(), Count()))
    ka.check_equivalence(model, X, Y)
    assert sum(rows) == 4 * 26 + 2 * 26


# ------------------------------------------------------------------ what it prints


def test_a_report_prints_a_table_and_draws_a_figure():
    model = compiled(model_with(layers.BatchNormalization(name="norm")), metrics=["mae"])
    report = ka.check_equivalence(model, X, Y)
    lines = str(report).splitlines()
    assert lines[:2] == [
        "NOT EQUAL: 26 samples in 8 micro-batches, taken apart in the step, against one "
        "large batch.",
        "Logged otherwise than for the large batch: loss, mae.",
    ]
    assert lines[2] == "The difference enters at: norm."
    assert lines[3].startswith(
        "A mean of the micro-batches' means would differ, by up to"
    )
    assert lines[5].split() == (
        ["variable", "error", "floor", "floors", "cosine", "mean", "of", "means"]
    )
    assert lines[6].split()[0] == "dense/kernel" and lines[6].endswith("DIFFERS")
    found = json.loads(json.dumps(report.to_dict()))
    assert found["first_layer"] == "norm" and found["gradients"] == report.gradients
    figure = report.plot()
    (axis,) = figure.axes
    names = [label.get_text() for label in axis.get_yticklabels()]
    assert names == [v.path for v in report.variables] and axis.get_xscale() == "log"
    widths = [bar.get_width() for bar in axis.patches]
    np.testing.assert_allclose(widths, [v.error for v in report.variables])
    np.testing.assert_allclose(
        axis.lines[0].get_xdata(), [v.floor for v in report.variables]
    )


# ---------------------------------------------------------------- what is refused


def test_what_cannot_be_measured_is_refused():
    def refused(error, message, model=None, x=X, y=Y, **how):
        model = compiled(dense_model()) if model is None else model
        assert_refused(lambda: ka.check_equivalence(model, x, y, **how), error, message)

    bare = keras.Sequential([layers.Dense(3)], name="bare")
    refused(
        ValueError,
        "'bare' is not compiled. `check_equivalence` takes training steps, which need an "
        "optimizer and a loss: call `model.compile(optimizer, loss)` before.",
        bare,
    )
    refused(
        ValueError,
        "'bare' is not built: measuring would draw its first weights. Call it on a sample "
        "before, `model(x[:1])`, or give it an `Input`.",
        compiled(bare),
    )
    refused(TypeError, "`model` must be a `keras.Model`. Received: 3", 3)
    refused(
        ValueError,
        "`x` must have at least 2 samples, to be taken apart. Received: 1",
        x=X[:1],
        y=Y[:1],
    )
    refused(ValueError, "`accum_steps` must be at least 1. Received: 0", accum_steps=0)
    refused(
        ValueError,
        "`two_pass=True` belongs to a step that takes the batch apart. This model "
        "accumulates in its optimizer, or has a `train_step` of its own: leave `two_pass` "
        "out, or compile a model without a `train_step` with a plain optimizer.",
        compiled(dense_model(), windows()),
        two_pass=True,
    )


def test_a_step_whose_optimizer_is_hidden_is_refused():
    class Hidden(keras.Model):
        def train_step(self, batch):
            x, y = batch
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(y - self(x, training=True)))
            held["sgd"].apply(tape.gradient(loss, self.trainable_weights))
            return {"loss": loss}

    model = compiled(model_with(make=Hidden), loss=None)
    held = {"sgd": keras.optimizers.SGD()}
    held["sgd"].build(model.trainable_variables)
    before = model.get_weights()
    assert_refused(
        lambda: ka.check_equivalence(model, X, Y),
        ValueError,
        f"No gradient of '{model.name}' reached an optimizer that is an attribute of the "
        "model. `check_equivalence` puts others in their place, to see the gradients: keep "
        "each optimizer in an attribute, `self.optimizer` or `self.d_optimizer`, and apply "
        "it in `train_step`.",
    )
    assert_equal(model.get_weights(), before)
