"""`diagnose`: no false alarm, nothing overlooked; what it says is what is measured."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from architectures import EXPECTED, SLOW
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
from keras_accum._insight.rules import RULES

layers = keras.layers


# ------------------------------------------------------------- what models are of


class PerSample(layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * keras.ops.sum(keras.ops.square(x), axis=-1))
        return x


class Balanced(layers.Layer):
    """A loss of the batch as a whole, as load balancing is."""

    def call(self, x):
        self.add_loss(keras.ops.sum(keras.ops.square(keras.ops.mean(x, axis=0))))
        return x


class Shift(layers.Layer):
    def call(self, x):
        return x + keras.ops.roll(x, 1, axis=0)


class Codebook(layers.Layer):
    def build(self, shape):
        self.code = self.add_weight(shape=(shape[-1],), trainable=False)

    def call(self, x, training=False):
        code = self.code + 0.0
        if training:
            self.code.assign(0.9 * self.code + 0.1 * keras.ops.mean(x, axis=0))
        return x * (1 + code)


class TokensOfAll(keras.Model):
    """Divides by what the batch holds."""

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        valid = keras.ops.cast(y > 0, "float32")
        error = keras.ops.square(y - y_pred) * valid
        return keras.ops.sum(error) / keras.ops.sum(valid)


class Halved(keras.Model):
    def compute_loss(self, *args, **kwargs):
        return 0.5 * super().compute_loss(*args, **kwargs)


def mean(y, y_pred):
    return keras.ops.mean(keras.ops.square(y - y_pred))


def of_valid(y, y_pred):
    """A masked mean, as users write it: wrong where micro-batches hold unlike many."""
    valid = keras.ops.cast(y > 0.5, "float32")
    error = keras.ops.square(y - y_pred) * valid
    return keras.ops.sum(error) / keras.ops.sum(valid)


def valid_entries(y, y_pred):
    return tf.boolean_mask(keras.ops.mean(keras.ops.square(y - y_pred), -1), y[:, 0] > 0)


def rmse(y, y_pred):
    return keras.ops.sqrt(keras.ops.mean(keras.ops.square(y - y_pred)))


def accumulated(model, **how):
    return ka.accumulate(model, accum_steps=8, **how)


# By kind: the compiled model, and the rules that are to be found with their levels.
CASES = {
    "clean": (lambda: compiled(dense_model()), {}),
    "clean, in the optimizer": (
        lambda: compiled(dense_model(), windows()),
        {"learning_rate": "exact"},
    ),
    "dropout": (
        lambda: compiled(model_with(layers.Dropout(0.5), layers.GaussianNoise(0.1))),
        {"randomness": "exact"},
    ),
    "regularizers": (
        lambda: compiled(
            model_with(
                layers.Dense(4, kernel_regularizer="l2", activity_regularizer="l2")
            )
        ),
        {},
    ),
    "normalized": (
        lambda: compiled(model_with(layers.BatchNormalization(), layers.Dense(4))),
        {"batch_normalization": "differs"},
    ),
    "normalized, pooled": (
        lambda: compiled(model_with(ka.AccumBatchNormalization())),
        {"accum_batch_normalization": "differs"},
    ),
    "normalized, frozen": (
        lambda: compiled(model_with(layers.BatchNormalization(trainable=False))),
        {"batch_normalization_frozen": "exact"},
    ),
    "spectral": (
        lambda: compiled(model_with(layers.SpectralNormalization(layers.Dense(4)))),
        {"spectral_normalization": "differs"},
    ),
    "codebook": (
        lambda: compiled(model_with(Codebook())),
        {"moving_state": "differs"},
    ),
    "shift": (lambda: compiled(model_with(Shift())), {"coupled_layers": "differs"}),
    "vectors, in the step": (
        lambda: compiled(model_with(PerSample())),
        {"added_vectors": "exact"},
    ),
    "vectors, in the optimizer": (
        lambda: compiled(model_with(PerSample()), windows()),
        {"added_vectors": "differs", "learning_rate": "exact"},
    ),
    "balanced": (
        lambda: compiled(model_with(Balanced())),
        {"added_batch_wide": "differs"},
    ),
    "scalar mean": (lambda: compiled(dense_model(), loss=mean), {"scalar_loss": "exact"}),
    "own masked loss": (
        lambda: compiled(dense_model(), loss=of_valid),
        {"scalar_loss": "differs"},
    ),
    "own masked loss, two passes": (
        lambda: compiled(accumulated(dense_model(), two_pass=True), loss=of_valid),
        {"scalar_loss": "exact"},
    ),
    "valid entries": (lambda: compiled(dense_model(), loss=valid_entries), {}),
    "coupled": (
        lambda: compiled(dense_model(), loss=centered),
        {"coupled_loss": "differs"},
    ),
    "coupled by an axis": (
        lambda: compiled(dense_model(), loss=keras.losses.CosineSimilarity(axis=0)),
        {"coupled_loss": "differs"},
    ),
    "coupled, two passes": (
        lambda: compiled(accumulated(dense_model(), two_pass=True), loss=centered),
        {"coupled_loss": "exact"},
    ),
    "own compute_loss": (
        lambda: compiled(model_with(make=TokensOfAll)),
        {"own_compute_loss": "unknown"},
    ),
    "own compute_loss, a sum": (
        lambda: compiled(model_with(make=Halved)),
        {"own_compute_loss": "exact"},
    ),
    "own train_step": (
        lambda: compiled(model_with(make=OwnStep), loss=None),
        {"own_train_step": "unknown"},
    ),
    "metric of the batch": (
        lambda: compiled(dense_model(), metrics=[rmse, "mae"]),
        {"batch_metric": "differs"},
    ),
}


# Others show the same, of each of the two by itself.
SLOW_CASES = ("clean, in the optimizer", "normalized, pooled", "regularizers", "coupled")


@pytest.mark.slow_but(
    "normalized, frozen", "codebook", "shift", "balanced", "own masked loss, two passes"
)
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name in SLOW_CASES))
        for name, case in CASES.items()
    ],
)
def test_what_is_diagnosed_is_measured_and_what_is_measured_diagnosed(make, expected):
    model = make()
    before = everything(model)
    diagnosis = ka.diagnose(model)
    assert_equal(everything(model), before)
    levels = {f.rule: f.level for f in diagnosis.findings}
    assert levels == expected
    assert diagnosis.clean == (set(expected.values()) <= {"exact"})
    report = ka.check_equivalence(model, X, Y, accum_steps=8)
    of_metrics = levels.pop("batch_metric", None) == "differs"
    assert of_metrics != all(v.equal for v in report.metrics.values())
    if "unknown" not in levels.values():
        assert report.equal == ("differs" not in levels.values())


# ------------------------------------------------------------------ architectures


def check(make, expected):
    diagnosis = ka.diagnose(make())
    assert {f.rule for f in diagnosis.findings} == expected
    assert diagnosis.clean == ("batch_normalization" not in expected)


@pytest.mark.slow_but("GPT2Backbone")
@pytest.mark.parametrize(("make", "expected"), EXPECTED.values(), ids=EXPECTED)
def test_an_architecture_has_what_is_expected_of_it_and_no_more(make, expected):
    check(make, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "expected"), SLOW.values(), ids=SLOW)
def test_a_heavy_architecture_has_what_is_expected_of_it(make, expected):
    check(make, expected)


# ----------------------------------------------------------------- single findings


def found(model, rule):
    (finding,) = [f for f in ka.diagnose(model).findings if f.rule == rule]
    return finding


def test_settings_of_the_optimizer_that_change_meaning_are_exact():
    rate = keras.optimizers.schedules.CosineDecay(0.1, 10)
    inner = keras.optimizers.Adam(rate, global_clipnorm=1.0, use_ema=True)
    diagnosis = ka.diagnose(compiled(dense_model(), ka.AccumOptimizer(inner, 4)))
    assert diagnosis.clean
    assert [f.rule for f in diagnosis.findings] == [
        *("clipping", "moving_average", "schedule", "learning_rate"),
    ]
    assert "(global_clipnorm)" in diagnosis.findings[0].message


def test_embeddings_say_what_their_sums_need():
    inputs = keras.Input((None,))
    hidden = layers.Embedding(1024, 256, name="words", mask_zero=True)(inputs)
    model = keras.Model(inputs, layers.Dense(3)(layers.LSTM(2)(hidden)))
    finding = found(model, "embeddings")
    assert "1.0 MiB" in finding.message and finding.layers == ("words",)


def test_weights_that_nothing_depends_on_are_named():
    class Unused(keras.Model):
        def __init__(self):
            super().__init__()
            self.used, self.unused = layers.Dense(3), layers.Dense(2, name="unused")

        def call(self, x):
            return self.unused(x) * 0 if x.shape[0] == 99 else self.used(x)

    model = Unused()
    model.unused.build((None, 5))
    model(X[:1])
    assert [p.split("/")[-2] for p in found(model, "no_gradient").layers] == [
        "unused"
    ] * 2


def test_float16_without_a_scale_is_unknown():
    keras.config.set_dtype_policy("mixed_float16")
    scaled = compiled(dense_model())
    assert ka.diagnose(scaled).clean
    plain = compiled(dense_model(), auto_scale_loss=False)
    assert found(plain, "float16_unscaled").level == "unknown"


def test_what_is_refused_is_found():
    sums = keras.losses.MeanSquaredError(reduction="sum")
    assert found(compiled(dense_model(), windows(), sums), "loss_reduction").level == (
        "differs"
    )
    assert ka.diagnose(compiled(dense_model(), "sgd", sums)).clean
    twice = keras.optimizers.SGD(gradient_accumulation_steps=3)
    finding = found(compiled(dense_model(), twice), "keras_accumulation")
    assert "gradient_accumulation_steps=3" in finding.message


def test_inference_mode_in_a_call_is_no_batch_statistic():
    class Inference(layers.Layer):
        def build(self, shape):
            self.norm = layers.BatchNormalization()
            self.norm.build(shape)

        def call(self, x):
            return self.norm(x, training=False)

    assert ka.diagnose(compiled(model_with(Inference()))).clean
    # A functional model passes its own `training` on, whatever was said at its making.
    inputs = keras.Input((5,))
    hidden = layers.BatchNormalization(name="norm")(inputs, training=False)
    model = compiled(keras.Model(inputs, layers.Dense(3)(hidden)))
    assert found(model, "batch_normalization").layers == ("norm",)


def test_what_cannot_be_called_is_unknown():
    class Strict(layers.Layer):
        def call(self, x):
            if not tf.is_symbolic_tensor(x):
                raise RuntimeError("not on made-up samples")
            return x

    finding = found(model_with(Strict()), "not_read")
    assert (finding.level, finding.layers) == ("unknown", ())


# ---------------------------------------------------------------------- the table


def test_each_rule_is_a_whole_row_and_no_two_have_a_name():
    assert len({rule.name for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert all((rule.why, rule.remedy, rule.source)) and rule.why.endswith(".")


def test_a_diagnosis_prints_and_goes_into_a_dict():
    norms = [layers.BatchNormalization(name=f"norm_{i}") for i in range(5)]
    model = compiled(model_with(*norms))
    diagnosis = ka.diagnose(model)
    assert str(diagnosis).splitlines() == [
        f"{model.name}: 1 differ, 0 unknown.",
        "differs batch_normalization [norm_0, norm_1, norm_2 and 2 more]",
        "        BatchNormalization normalizes each micro-batch by its own mean and "
        "variance, and moves its statistics once per micro-batch.",
        "        > ka.replace_batch_normalization(model)  # freeze=True is exact, for "
        "fine-tuning",
    ]
    assert json.loads(json.dumps(diagnosis.to_dict()))["clean"] is False
    clean = ka.diagnose(dense_model())
    assert str(clean).endswith(": a window is the large batch, as far as a model tells.")


def test_rich_shows_the_same_table():
    console = pytest.importorskip("rich.console")
    with open("/dev/null", "w") as nowhere:
        shown = console.Console(record=True, width=200, file=nowhere)
        shown.print(
            ka.diagnose(compiled(model_with(layers.BatchNormalization(name="n"))))
        )
    assert "batch_normalization" in shown.export_text()


def test_a_model_that_cannot_be_read_is_refused():
    bare = keras.Sequential([layers.Dense(3)], name="bare")
    assert_refused(
        lambda: ka.diagnose(bare),
        ValueError,
        "'bare' is not built, so that its layers cannot be read. Call it on a sample "
        "before, `model(x[:1])`, or give it an `Input`.",
    )
    assert_refused(
        lambda: ka.diagnose(np.ones(3)),
        TypeError,
        "`model` must be a `keras.Model`. Received: array([1., 1., 1.])",
    )
