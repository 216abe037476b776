"""Recomputation together with both routes of accumulation, strategies, and backbones."""

import os
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf
from blocks import X, Y, model_of, state, switched
from helpers import assert_close, assert_differ, assert_same_step

import keras_accum as ka

layers = keras.layers


def still(blocks=2):
    """Blocks without dropout: micro-batches draw other masks than a batch does."""
    keras.utils.set_random_seed(5)
    inputs = keras.Input((8,))
    hidden = layers.Dense(8)(inputs)
    for i in range(blocks):
        block = keras.Sequential(
            [layers.Dense(8, "tanh", activity_regularizer="l2"), layers.Dense(8)],
            name=f"block_{i}",
        )
        hidden = layers.Add()([hidden, block(hidden)])
    return keras.Model(inputs, layers.Dense(3)(hidden))


def trained(make, mode, prepare=lambda model: model, optimizer=None, steps=2, **how):
    """A model after some steps, prepared for accumulation or not."""
    model = prepare(make())
    inner = keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(
        optimizer(inner) if optimizer else inner,
        "mse",
        run_eagerly=mode == "eager",
        jit_compile=mode == "xla",
        **how,
    )
    logs = [model.train_on_batch(X, Y, return_dict=True) for _ in range(steps)]
    return model, logs[-1]


ROUTES = {
    "in the step": {"prepare": lambda model: ka.accumulate(model, micro_batch_size=7)},
    "two passes": {
        "prepare": lambda model: ka.accumulate(model, accum_steps=3, two_pass=True)
    },
    "in the optimizer": {"optimizer": lambda inner: ka.AccumOptimizer(inner, 2)},
    "in both": {
        "prepare": lambda model: ka.accumulate(model, accum_steps=3),
        "optimizer": lambda inner: ka.AccumOptimizer(inner, 2),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "route, how",
    [
        ("two passes", {"segments": 3}),
        ("in both", {"select": "block_*"}),
        # What is in both routes is in each of them.
        pytest.param("in the step", {"select": "block_*"}, marks=pytest.mark.slow),
        pytest.param("in the optimizer", {"segments": 3}, marks=pytest.mark.slow),
    ],
)
def test_each_route_of_accumulation(route, how):
    found = trained(switched(make=model_of, **how), "graph", **ROUTES[route])
    oracle = trained(model_of, "graph", **ROUTES[route])
    assert_close(found[0].get_weights(), oracle[0].get_weights(), 2e-6)
    assert_close(state(found[0]), state(oracle[0]), 2e-6)
    assert_close(list(found[1].values()), list(oracle[1].values()), 2e-6)
    assert_differ(found[0].get_weights(), model_of().get_weights())


@pytest.mark.slow_in("True", "xla")
@pytest.mark.parametrize(
    ("two_pass", "mode"),
    [
        (False, "eager"),
        (True, "eager"),
        (False, "xla"),
        pytest.param(True, "xla", marks=pytest.mark.slow),
    ],
)
def test_the_large_batch_is_still_the_large_batch(two_pass, mode):
    split = {"accum_steps": 4, "two_pass": two_pass}
    make = switched("block_*", make=still)
    found = trained(make, mode, lambda model: ka.accumulate(model, **split))
    assert_same_step(found, trained(still, mode), 2e-6)


@pytest.mark.slow
def test_pooled_statistics_are_pooled_once():
    def make():
        keras.utils.set_random_seed(5)
        inputs = keras.Input((8,))
        block = keras.Sequential(
            [layers.Dense(8, "tanh"), ka.AccumBatchNormalization(momentum=0.5)],
            name="block",
        )
        return keras.Model(inputs, layers.Dense(3)(block(layers.Dense(8)(inputs))))

    for route in ("in the optimizer", "in both"):
        found, _ = trained(switched("block", make=make), "graph", **ROUTES[route])
        plain, _ = trained(make, "graph", **ROUTES[route])
        assert_close(state(found), state(plain), 2e-6)
        assert_close(found.get_weights(), plain.get_weights(), 2e-6)
        # Recomputed, a call leaves nothing to be pooled later.
        assert found.get_layer("block").layers[-1]._last.before is None


@pytest.mark.slow
def test_several_steps_per_execution():
    def run(make):
        model = make()
        model.compile("sgd", "mse", steps_per_execution=2, jit_compile=False)
        model.fit(X, Y, batch_size=7, epochs=2, shuffle=False, verbose=0)
        return [*model.get_weights(), *state(model)]

    assert_close(run(switched("block_*")), run(model_of), 2e-6)


@pytest.mark.slow
def test_a_loop_of_ones_own():
    @tf.function(autograph=False)
    def step(model, batch):
        def loss_fn(batch):
            x, y = batch
            return tf.reduce_mean(tf.square(model(x, training=True) - y))

        values = model.trainable_variables
        return ka.accumulate_gradients(loss_fn, values, batch, micro_batch_size=7)

    batch = (tf.constant(X), tf.constant(Y))
    model, plain = switched("block_*")(), model_of()
    found, expected = step(model, batch), step(plain, batch)
    assert_close([found[0], *found[1]], [expected[0], *expected[1]], 2e-6)
    assert_close(state(model), state(plain))


def test_stateless_calls():
    """Weights are tensors there, and their gradients go through."""
    model, plain = switched("block_*")(), model_of()

    def run(model):
        weights = [tf.convert_to_tensor(v.value) for v in model.trainable_variables]
        others = [tf.convert_to_tensor(v.value) for v in model.non_trainable_variables]
        with tf.GradientTape() as tape:
            tape.watch(weights)
            outputs, moved, losses = model.stateless_call(
                weights, others, X, training=True, return_losses=True
            )
            loss = tf.reduce_mean((outputs - Y) ** 2) + tf.add_n(losses)
        return [loss, *tape.gradient(loss, weights), *moved]

    assert_close(run(model), run(plain))
    assert_close(state(model), state(plain))


MIRRORED = """
    import os
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import sys
    import keras, numpy as np, tensorflow as tf
    import keras_accum as ka
    sys.path[:0] = ["{tests}", "{tests}/recompute"]
    from helpers import assert_close, assert_differ
    from blocks import X, Y, model_of, state, switched

    cpu = tf.config.list_physical_devices("CPU")[0]
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, two)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

    def run(make):
        with strategy.scope():
            model = make()
            model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=False)
        model.fit(X[:24], Y[:24], batch_size=12, epochs=2, shuffle=False, verbose=0)
        return [*model.get_weights(), *state(model)]

    expected = run(model_of)
    assert_close(run(switched("block_*")), expected, 2e-6)
    assert_close(run(switched(segments=3)), expected, 2e-6)
    assert_differ(expected[:2], model_of().get_weights()[:2])
    print("replicas:", strategy.num_replicas_in_sync)
"""


@pytest.mark.slow
def test_mirrored_replicas():
    # One strategy per process: a second one reuses the first one's collective keys.
    tests = os.path.dirname(os.path.dirname(__file__))
    code = textwrap.dedent(MIRRORED.format(tests=tests))
    root = os.path.dirname(tests)
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "replicas: 2" in run.stdout


# --- Backbones as people use them, from configuration.


SIZES = {"num_layers": 3, "num_heads": 2, "hidden_dim": 16}
TEXT = {
    **SIZES,
    "vocabulary_size": 50,
    "intermediate_dim": 32,
    "dropout": 0.2,
    "max_sequence_length": 12,
}


def bert(keras_hub):
    return keras_hub.models.BertBackbone(**TEXT)


def gpt2(keras_hub):
    return keras_hub.models.GPT2Backbone(**TEXT)


def vit(keras_hub):
    return keras_hub.models.ViTBackbone(
        **SIZES,
        image_shape=(16, 16, 3),
        patch_size=4,
        mlp_dim=32,
        dropout_rate=0.2,
        attention_dropout=0.1,
    )


def tokens():
    rng = np.random.default_rng(2)
    mask = np.arange(12) < np.array([[12], [7], [9]])
    ids = rng.integers(1, 50, (3, 12)) * mask
    return {"token_ids": ids, "padding_mask": mask}


def images():
    return np.random.default_rng(2).normal(size=(3, 16, 16, 3)).astype("float32")


BACKBONES = {
    "bert": (
        bert,
        "transformer_layer_*",
        lambda: {**tokens(), "segment_ids": 0 * tokens()["token_ids"]},
    ),
    "gpt2": (gpt2, "transformer_layer_*", tokens),
    "vit": (vit, "transformer_block_*", images),
}


# One of text in the default run; the others differ in nothing that recomputation meets.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["bert", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt2", "vit"))],
)
def test_keras_hub_2158_one_line_for_a_transformers_backbone(name):
    keras_hub = pytest.importorskip("keras_hub")
    make, select, inputs = BACKBONES[name]
    x = tf.nest.map_structure(tf.constant, inputs())

    def run(switch, mode):
        keras.utils.set_random_seed(3)
        model = make(keras_hub)
        handle = ka.recompute(model, select) if switch else None
        values = [v.value for v in model.trainable_variables]

        def step():
            with tf.GradientTape() as tape:
                outputs = model(x, training=True)
                outputs = outputs["sequence_output"] if name == "bert" else outputs
                target = tf.random.stateless_normal(tf.shape(outputs), (1, 2))
                loss = tf.reduce_mean(tf.square(outputs - target))
            return [loss, *tape.gradient(loss, values, unconnected_gradients="zero")]

        step = step if mode == "eager" else tf.function(step, autograph=False)
        return handle, [tf.convert_to_tensor(g) for g in step()], state(model)

    for mode in ("eager", "graph"):
        handle, found, moved = run(True, mode)
        _, expected, plain_moved = run(False, mode)
        assert len(handle.layers) == 3
        # The gradient of an attention key's bias is rounding: in units of all gradients.
        scale = max(float(tf.reduce_max(tf.abs(g))) for g in expected)
        for f, e in zip(found, expected):
            np.testing.assert_allclose(f, e, rtol=1e-5, atol=1e-6 * scale)
        assert_close(moved, plain_moved)
