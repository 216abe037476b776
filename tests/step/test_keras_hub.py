"""Tasks of keras_hub, built from configuration, train by both routes."""

import keras
import numpy as np
import pytest
from helpers import assert_differ

import keras_accum as ka

keras_hub = pytest.importorskip("keras_hub")

SAMPLES, LENGTH, WORDS = 10, 12, 50
SIZES = {
    "vocabulary_size": WORDS,
    "num_layers": 2,
    "num_heads": 2,
    "hidden_dim": 16,
    "intermediate_dim": 32,
    "max_sequence_length": LENGTH,
    "dropout": 0.0,
}


def language_model():
    backbone = keras_hub.models.GPT2Backbone(**SIZES)
    return keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)


def classifier():
    backbone = keras_hub.models.BertBackbone(**SIZES)
    return keras_hub.models.BertTextClassifier(
        backbone, num_classes=3, preprocessor=None, dropout=0.0
    )


def texts(segments):
    rng = np.random.default_rng(0)
    ids = rng.integers(1, WORDS, (SAMPLES, LENGTH)).astype("int32")
    held = np.arange(LENGTH) < rng.integers(3, LENGTH + 1, SAMPLES)[:, None]
    x = {"token_ids": ids, "padding_mask": held.astype("int32")}
    if segments:
        return {**x, "segment_ids": np.zeros_like(ids)}, rng.integers(0, 3, SAMPLES), None
    return x, np.roll(ids, -1, axis=1), held.astype("float32")


def trained(make, arrays, batch_size, optimizer, split=None):
    keras.utils.set_random_seed(1)
    model = make()
    if split is not None:
        ka.accumulate(model, **split)
    x, y, weight = arrays
    tokens = weight is not None
    reduction = "mean_with_sample_weight" if tokens else "sum_over_batch_size"
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=reduction
    )
    weighted = [] if tokens else None
    model.compile(optimizer, loss, weighted_metrics=weighted, jit_compile=False)
    how = {"batch_size": batch_size, "epochs": 2, "shuffle": False, "verbose": 0}
    model.fit(x, y, sample_weight=weight, **how)
    return model.get_weights()


# Of tokens, `test_every_reduction_of_a_token_loss_is_exact` shows the weights.
@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [classifier, pytest.param(language_model, marks=pytest.mark.slow)]
)
def test_a_task_trains_as_on_the_large_batch(make):
    arrays = texts(segments=make is classifier)

    def sgd():
        return keras.optimizers.SGD(0.5)

    oracle = trained(make, arrays, SAMPLES, sgd())
    in_step = trained(make, arrays, SAMPLES, sgd(), {"micro_batch_size": 3})
    in_optimizer = trained(make, arrays, 3, ka.AccumOptimizer(sgd(), 4))
    # The bias of attention's keys has no gradient but rounding: to 1e-6 of the others.
    for found in (in_step, in_optimizer):
        for a, b in zip(found, oracle, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=2e-6)
    assert_differ(trained(make, arrays, 3, sgd()), oracle, what="an update per 3 samples")
