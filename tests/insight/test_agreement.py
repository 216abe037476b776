"""What is diagnosed is measured: losses and steps that users write, on their data."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from architectures import EXPECTED, SLOW
from helpers import dense_model
from small_models import X, Y, compiled, model_with, windows

import keras_accum as ka
from keras_accum._insight.facts import made_up

layers = keras.layers
WEIGHTS = np.arange(1.0, 27, dtype="float32")


class OwnMean(keras.Model):
    """The pattern of TensorFlow's guide to distributed training, and what it divides by."""

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        each = keras.losses.MeanSquaredError(reduction="none")(y, y_pred)
        weight = keras.ops.ones_like(each) if sample_weight is None else sample_weight
        return keras.ops.sum(each * weight) / keras.ops.sum(weight)

    def compute_loss_weight(self, x, y, y_pred, sample_weight):
        return keras.ops.sum(sample_weight)


class SumByN(keras.Model):
    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        samples = keras.ops.cast(keras.ops.shape(y)[0], "float32")
        return keras.losses.MeanSquaredError(reduction="sum")(y, y_pred) / samples


class Positives(keras.Model):
    """Divides its weights by their sum, as detection heads do."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **kwargs):
        if sample_weight is not None:
            sample_weight /= keras.ops.maximum(keras.ops.sum(sample_weight), 1.0)
        return super().compute_loss(x, y, y_pred, sample_weight, **kwargs)


class StepWithLoss(keras.Model):
    loss_of = keras.losses.MeanSquaredError()

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.loss_of(y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss}


def total():
    return keras.losses.MeanSquaredError(reduction="sum")


def regularized():
    return model_with(layers.Dense(4, kernel_regularizer="l2"))


def two_pass(model):
    return ka.accumulate(model, accum_steps=8, two_pass=True)


def summing():
    return ka.AccumOptimizer("sgd", 4, reduction="sum")


def weighted():
    return keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")


def tokens():
    keras.utils.set_random_seed(2)
    model = keras.Sequential(
        [keras.Input((None,), dtype="int32"), layers.Embedding(11, 4), layers.Dense(11)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return compiled(ka.accumulate(model, micro_batch_size=2), windows(), loss)


def text():
    rng = np.random.default_rng(0)
    return [rng.integers(1, 11, (26, 5)).astype("int32") for _ in range(2)]


def in_float64():
    return keras.Sequential(
        [keras.Input((5,)), layers.Dense(8, dtype="float64"), layers.Dense(3)]
    )


OWN, RATE = "own_compute_loss", {"learning_rate": "exact"}
# By kind: the model, the data, the rules that are to be found, and what is measured.
CASES = {
    "own mean": (
        lambda: compiled(model_with(make=OwnMean)),
        [WEIGHTS],
        {OWN: "exact"},
        True,
    ),
    "own mean, in the optimizer": (
        lambda: compiled(model_with(make=OwnMean), windows()),
        [WEIGHTS],
        {OWN: "exact", **RATE},
        True,
    ),
    "sum over n": (
        lambda: compiled(model_with(make=SumByN)),
        [],
        {OWN: "unknown"},
        True,
    ),
    "positives": (
        lambda: compiled(model_with(make=Positives), loss=total()),
        [WEIGHTS],
        {OWN: "unknown"},
        False,
    ),
    "positives, in two passes": (
        lambda: compiled(two_pass(model_with(make=Positives)), loss=total()),
        [WEIGHTS],
        {OWN: "exact"},
        True,
    ),
    "step with a loss": (
        lambda: compiled(model_with(make=StepWithLoss), windows(), loss=None),
        [],
        {"own_train_step": "unknown", **RATE},
        True,
    ),
    "sum and regularizer": (
        lambda: compiled(regularized(), summing(), total()),
        [],
        RATE,
        True,
    ),
    "all weights zero": (
        lambda: compiled(regularized(), windows(), weighted()),
        [0 * WEIGHTS],
        {"logged_loss": "exact", **RATE},
        True,
    ),
    "both routes": (tokens, text, {"embeddings": "exact", **RATE}, True),
    "float64": (lambda: compiled(in_float64()), [], {}, True),
}


@pytest.mark.slow_in(
    "own mean",
    "positives",
    "both routes",
    "positives, in two passes",
    "sum and regularizer",
)
@pytest.mark.parametrize(
    ("make", "more", "expected", "equal"), CASES.values(), ids=list(CASES)
)
def test_losses_and_steps_of_users_are_diagnosed_as_they_are_measured(
    make, more, expected, equal
):
    arrays = more() if callable(more) else [X, Y, *more]
    model = make()
    found = {f.rule: f.level for f in ka.diagnose(model).findings}
    assert found == expected
    report = ka.check_equivalence(model, *arrays, accum_steps=8)
    assert report.equal == equal
    if "unknown" not in found.values():
        assert equal == ("differs" not in found.values())


@pytest.mark.slow_in("total")
@pytest.mark.parametrize(
    ("optimizer", "loss", "kind", "remedy"),
    [
        (summing, weighted, "mean_with_sample_weight", "sum"),
        (windows, total, "sum", "sum_over_batch_size"),
    ],
)
def test_a_loss_that_is_refused_is_diagnosed(optimizer, loss, kind, remedy):
    model = compiled(dense_model(), optimizer(), loss())
    findings = ka.diagnose(model).findings
    (finding,) = [f for f in findings if f.rule == "loss_reduction"]
    assert finding.level == "differs" and f"`reduction='{kind}'`" in finding.message
    assert finding.remedy == f"loss = keras.losses.MeanSquaredError(reduction='{remedy}')"
    with pytest.raises(ValueError, match="reduction"):
        ka.check_equivalence(model, X, Y)


def test_images_that_a_model_rescales_are_made_up_in_its_range():
    """Else a border of zeros hides that the batch is normalized by itself."""
    inputs = keras.Input((8, 8, 3))
    hidden = layers.Rescaling(1 / 127.5, offset=-1.0)(inputs)
    hidden = layers.Conv2D(4, 3, padding="same")(hidden)
    hidden = layers.BatchNormalization(name="norm")(hidden)
    model = keras.Model(inputs, layers.GlobalAveragePooling2D()(hidden))
    rules = {f.rule: f.layers for f in ka.diagnose(model).findings}
    assert rules == {"batch_normalization": ("norm",)}
    assert 100 < float(tf.reduce_max(made_up(model))) <= 127.5


@pytest.mark.slow
@pytest.mark.parametrize("name", [*EXPECTED, *SLOW])
def test_architectures_are_measured_as_they_are_diagnosed(name):
    make, _ = {**EXPECTED, **SLOW}[name]
    backbone = make()
    x, outputs = made_up(backbone), backbone.output
    if isinstance(outputs, dict):
        outputs = outputs.get("sequence_output", next(iter(outputs.values())))
    outputs = layers.Dense(2)(outputs)
    while len(outputs.shape) > 2:
        outputs = keras.ops.mean(outputs, axis=1)
    model = compiled(keras.Model(backbone.input, outputs), eager=False)
    y = np.random.default_rng(0).normal(size=(len(tf.nest.flatten(x)[0]), 2))
    report = ka.check_equivalence(model, x, y.astype("float32"), accum_steps=3)
    assert report.equal == ka.diagnose(model).clean
