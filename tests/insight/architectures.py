"""Architectures from configuration, and what `diagnose` is to find in each."""

import keras
import pytest

apps, layers = keras.applications, keras.layers
SIZES = {
    "vocabulary_size": 50,
    "num_layers": 2,
    "num_heads": 2,
    "hidden_dim": 16,
    "intermediate_dim": 32,
    "max_sequence_length": 12,
    "dropout": 0.1,
}
NORM, RANDOM = "batch_normalization", "randomness"


def app(name, side=32, **options):
    def make():
        options.setdefault("include_top", False)
        return getattr(apps, name)(weights=None, input_shape=(side, side, 3), **options)

    return make


def hub(name, **options):
    def make():
        keras_hub = pytest.importorskip("keras_hub")
        return getattr(keras_hub.models, name)(**{**SIZES, **options})

    return make


def llama():
    keras_hub = pytest.importorskip("keras_hub")
    return keras_hub.models.LlamaBackbone(
        vocabulary_size=50,
        num_layers=2,
        num_query_heads=2,
        num_key_value_heads=1,
        hidden_dim=16,
        intermediate_dim=32,
    )


def albert():
    keras_hub = pytest.importorskip("keras_hub")
    return keras_hub.models.AlbertBackbone(**SIZES, embedding_dim=8)


# What is to be found, as names of rules: "exact" ones too.
EXPECTED = {
    "MobileNetV2": (app("MobileNetV2", alpha=0.35), {NORM}),
    "VGG16": (app("VGG16"), set()),
    "BertBackbone": (hub("BertBackbone"), {RANDOM, "embeddings"}),
    "GPT2Backbone": (hub("GPT2Backbone"), {RANDOM, "embeddings"}),
    "LlamaBackbone": (llama, {"embeddings", "no_gradient"}),
}
SLOW = {
    "ConvNeXtTiny": (app("ConvNeXtTiny"), set()),
    "ResNet50": (app("ResNet50"), {NORM}),
    "DenseNet121": (app("DenseNet121"), {NORM}),
    "EfficientNetB0": (app("EfficientNetB0"), {NORM, RANDOM}),
    "EfficientNetV2B0": (app("EfficientNetV2B0"), {NORM, RANDOM}),
    "InceptionV3": (app("InceptionV3", 75), {NORM}),
    "MobileNetV3Small": (app("MobileNetV3Small"), {NORM}),
    "Xception": (app("Xception", 71), {NORM}),
    "RobertaBackbone": (hub("RobertaBackbone"), {RANDOM, "embeddings"}),
    "DistilBertBackbone": (hub("DistilBertBackbone"), {RANDOM, "embeddings"}),
    "OPTBackbone": (hub("OPTBackbone"), {RANDOM, "embeddings"}),
    "GPTNeoXBackbone": (hub("GPTNeoXBackbone"), {RANDOM, "embeddings"}),
    "AlbertBackbone": (albert, {RANDOM, "embeddings"}),
}
