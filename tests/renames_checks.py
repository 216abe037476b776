"""What `renames.py` trains, on a few numbers: each raises if a number is wrong."""

import pathlib
import tempfile
import warnings

import keras
import numpy as np
import tensorflow as tf
from helpers import (
    assert_close,
    assert_equal,
    assert_same_step,
    data,
    dense_model,
    train_twice,
)
from text_models import (
    cross_entropy,
    token_model,
    tokens,
    two_text_arrays,
    two_texts,
    uneven,
)

import keras_accum as ka


def sgd(**options):
    return keras.optimizers.SGD(0.5, momentum=0.9, **options)


def windows_of_the_optimizer():
    x, y = tokens()
    models = []
    for optimizer, size in ((ka.AccumOptimizer(sgd(), 3), 4), (sgd(), 11)):
        model = token_model()
        model.compile(optimizer, cross_entropy(), run_eagerly=True)
        model.fit(x, y, batch_size=size, shuffle=False, verbose=0)
        models.append(model)
    assert_close(models[0].get_weights(), models[1].get_weights(), what="weights")


def masks_in_the_step():
    def options():
        return {"loss": {"a": cross_entropy(), "b": cross_entropy()}}

    how = {"options": options}
    found = train_twice(two_texts, two_text_arrays(), split={"accum_steps": 3}, **how)
    assert_same_step(found, train_twice(two_texts, two_text_arrays(), **how))


def coupled_losses():
    x, y = tokens()

    class Masked(keras.losses.Loss):
        def call(self, y_true, y_pred):
            mean = tf.reduce_mean(tf.square(y_pred))
            return tf.reduce_mean(tf.square(y_pred), -1) * mean

    how = {"options": lambda: {"loss": Masked()}}
    split = {"accum_steps": 3}
    found = train_twice(token_model, (x, y), split=split, two_pass=True, **how)
    assert_same_step(found, train_twice(token_model, (x, y), **how), 5e-6)


def make_block():
    """Without `training` in its call; what is inside is told by Keras."""

    class Block(keras.layers.Layer):
        def __init__(self):
            super().__init__(name="block")
            self.drop = keras.layers.Dropout(0.5, seed=3)
            self.norm = keras.layers.BatchNormalization()
            self.dense = keras.layers.Dense(3, "softmax", kernel_initializer=_large)

        def build(self, shape):
            self.norm.build(shape)
            self.dense.build(shape)

        def call(self, x):
            self.add_loss(tf.reduce_mean(x))
            return self.dense(self.norm(self.drop(x)))

    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((5,)), keras.layers.Dense(5), Block()])


def _large(shape, dtype=None):
    # A softmax of this is 0 or 1: only its logits have a loss.
    return 300.0 * tf.reshape(tf.range(15.0) % 4 - 1.5, shape)


def recomputed_blocks():
    x, _ = data(8)
    y = np.arange(8) % 3
    how = {"options": lambda: {"loss": "sparse_categorical_crossentropy"}}

    def recomputing():
        model = make_block()
        ka.recompute(model, "block")
        return model

    assert_same_step(
        train_twice(recomputing, (x, y), **how), train_twice(make_block, (x, y), **how)
    )


def recomputed_segments_and_layers():
    x, y = data(8)

    def in_segments():
        model = dense_model()
        ka.recompute(model, segments=2)
        return model

    def of_layers():
        plain = dense_model()
        keras.utils.set_random_seed(1)
        dense = keras.layers.Dense(8, "tanh")
        model = keras.Sequential(
            [keras.Input((5,)), ka.Recompute(dense), keras.layers.Dense(3)]
        )
        model.set_weights(plain.get_weights())
        return model

    oracle = train_twice(dense_model, (x, y))
    assert_same_step(train_twice(in_segments, (x, y)), oracle)
    assert_same_step(train_twice(of_layers, (x, y)), oracle)


def random_state():
    from keras_accum._backend.private.randomness import random_state_kept

    tf.random.set_seed(1)
    keras.random.uniform(())

    def draw():
        return [float(keras.random.uniform(())), float(tf.random.uniform((), seed=None))]

    with random_state_kept():
        inside = draw()[0]
    assert draw()[0] == inside


def replicas():
    """Clipping after the reduction, and the division of losses by replicas."""
    (x, y), weight = data(8), uneven(8)
    loss = keras.losses.MeanSquaredError("mean_with_sample_weight")

    def clipping():
        return sgd(global_clipnorm=0.05)

    how = {"optimizer": clipping, "options": lambda: {"loss": loss}}
    oracle = train_twice(dense_model, (x, y, weight), **how)[0]
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    for in_step, size in ((False, 4), (True, 8)):
        with strategy.scope():
            model, optimizer = dense_model(), clipping()
            if in_step:
                ka.accumulate(model, accum_steps=2)
            else:
                optimizer = ka.AccumOptimizer(optimizer, 2)
            model.compile(optimizer, loss, jit_compile=False)
        how = {"epochs": 2, "shuffle": False, "verbose": 0}
        model.fit(x, y, sample_weight=weight, batch_size=size, **how)
        assert_close(model.get_weights(), oracle.get_weights(), 2e-6, "weights")


def checkpoints_within_a_window():
    x, y = data(8)

    def make():
        model = dense_model()
        optimizer = ka.AccumOptimizer(sgd(), 2)
        optimizer.build(model.trainable_variables)
        model.compile(optimizer, "mse", run_eagerly=True)
        return model, tf.train.Checkpoint(model=model, optimizer=optimizer)

    (whole, _), (first, checkpoint), (second, restored) = make(), make(), make()
    for model in (whole, first):
        model.train_on_batch(x[:5], y[:5])
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoint.save(pathlib.Path(folder) / "checkpoint")
        restored.restore(path).assert_existing_objects_matched()
        scaler = keras.optimizers.LossScaleOptimizer(sgd())
        scaler.build(whole.trainable_variables)
        path = tf.train.Checkpoint(optimizer=scaler).save(pathlib.Path(folder) / "scaler")
        try:
            tf.train.Checkpoint(optimizer=make()[0].optimizer).restore(path)
        except ValueError as error:
            assert "LossScaleOptimizer" in str(error)
        else:
            raise AssertionError("the checkpoint of a LossScaleOptimizer was restored")
    for model in (whole, second):
        model.train_on_batch(x[5:], y[5:])
    assert_equal(second.get_weights(), whole.get_weights())


def pooled_statistics():
    x, y = data(11)

    def make(layer):
        keras.utils.set_random_seed(1)
        return keras.Sequential(
            [keras.Input((5,)), layer(name="norm"), keras.layers.Dense(3)]
        )

    split = {"accum_steps": 3}
    found = train_twice(lambda: make(ka.AccumBatchNormalization), (x, y), split=split)[0]
    oracle = train_twice(lambda: make(keras.layers.BatchNormalization), (x, y))[0]
    for name in ("moving_mean", "moving_variance"):
        pair = [getattr(m.get_layer("norm"), name).numpy() for m in (found, oracle)]
        assert_close(*pair, 2e-6, name)


def saved_functional_models():
    x, _ = data(4)
    plain = dense_model()
    model = ka.GradientAccumulationModel(plain.inputs, plain.outputs, accum_steps=2)
    model.compile("sgd", "mse", run_eagerly=True)
    with tempfile.TemporaryDirectory() as folder:
        model.save(pathlib.Path(folder) / "model.keras")
        loaded = keras.models.load_model(pathlib.Path(folder) / "model.keras")
    assert loaded.accum_steps == 2
    assert_equal(loaded.predict(x, verbose=0), plain.predict(x, verbose=0))


def replaced_layers():
    x, y = data(11)
    keras.utils.set_random_seed(1)
    layers = [keras.Input((5,)), keras.layers.BatchNormalization(), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    before = model.predict(x, verbose=0)
    ka.replace_batch_normalization(model)
    assert_equal(model.predict(x, verbose=0), before)
    ka.accumulate(model, accum_steps=3).compile("sgd", "mse", run_eagerly=True)
    model.train_on_batch(x, y)


def metrics_of_a_batch():
    x, y = data(8)

    def largest(y_true, y_pred):
        return tf.reduce_max(tf.abs(y_true - y_pred))

    model = ka.accumulate(dense_model(), accum_steps=2)
    model.compile("sgd", "mse", metrics=[largest], run_eagerly=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model.train_on_batch(x, y)
    assert any("largest" in str(warning.message) for warning in said)


def quantized_layers():
    model = dense_model()
    model.quantize("int8")
    before = model.layers[1](np.ones((2, 5))).numpy()
    ka.recompute(model, model.layers[1].name)
    assert_equal(model.layers[1](np.ones((2, 5))).numpy(), before)


def what_planning_asks():
    """Of data, of devices and of what XLA compiles."""
    from keras_accum._backend.private.compiled import compiled_bytes, device_limit
    from keras_accum._backend.private.data import first_batch

    x, y = data(8)
    assert first_batch((x, y), 4)[0].shape == (4, 5)
    assert device_limit("CPU:0") > 0
    product = tf.function(lambda x: tf.sin(x @ x) @ x, jit_compile=True)
    assert compiled_bytes(product, tf.ones((64, 64))) > 0


def schedules():
    x, y = data(8)
    model = dense_model()
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    model.compile(ka.AccumOptimizer(keras.optimizers.SGD(rate), 2), "mse")
    model.train_on_batch(x, y)
    assert any("schedule" in f.rule for f in ka.diagnose(model).findings)


CHECKS = (
    windows_of_the_optimizer,
    masks_in_the_step,
    coupled_losses,
    recomputed_blocks,
    recomputed_segments_and_layers,
    random_state,
    checkpoints_within_a_window,
    pooled_statistics,
    saved_functional_models,
    replaced_layers,
    metrics_of_a_batch,
    quantized_layers,
    what_planning_asks,
    schedules,
    replicas,
)
