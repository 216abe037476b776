"""Scenarios on several replicas, to be run in a process of their own.

    python tests/distribution/replicas.py NAME... [--replicas N] [--slow]

Logical CPU devices stand in for GPUs. TensorFlow wants one MirroredStrategy per process:
after a collective operation that failed, everything later in that process fails too, so
the first scenario that fails ends it. `test_replicas.py` runs them all, a group in each
process. The oracle is one plain Keras step on one device.
"""

import argparse
import contextlib
import dataclasses
import gc
import itertools
import logging
import os
import pathlib
import tempfile
import time
import unittest.mock
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from helpers import (
    assert_close,
    assert_differ,
    assert_equal,
    assert_refused,
    data,
    dense_model,
    slots,
)
from text_models import (
    cross_entropy,
    nt_xent,
    token_model,
    tokens,
    two_text_arrays,
    two_texts,
    uneven,
)

import keras_accum as ka
from keras_accum._backend.private.strategies import components
from keras_accum._planning.measure import StepProfiler
from keras_accum._planning.search import Trial
from keras_accum._planning.transaction import variables

# Batches of 4 over 2 replicas: 2 and 2, three times, and then 1 and none.
SAMPLES, BATCH, STEPS = 13, 4, 4
PASSED = "passed:"
SCENARIOS, MODES, SLOW, GROUPS = {}, {}, {}, {}


def scenario(group, *modes, slow=()):
    """Register a scenario, to be run in `modes`: by default, in a graph and eagerly.

    In one of them only where a scenario shows nothing that the other does by itself. In
    those that are `slow`, only if they are asked for.
    """
    assert isinstance(group, str), "write @scenario(GROUP)"

    def register(function):
        name = function.__name__
        SCENARIOS[name], SLOW[name] = function, slow
        MODES[name] = tuple(m for m in modes or ("graph", "eager") if m not in slow)
        GROUPS.setdefault(group, []).append(name)
        return function

    return register


class CountingReductions(tf.distribute.ReductionToOneDevice):
    """Counts the reductions that run, and the tensors and bytes that they reduce.

    What it gathers has no known shape in a graph, as from collective operations.
    """

    def __init__(self):
        super().__init__()
        self.counts = None
        self.gathers = False

    def _gather_implementation(self, *args, **options):
        self.gathers = True
        try:
            return super()._gather_implementation(*args, **options)
        finally:
            self.gathers = False

    def broadcast_implementation(self, tensor, destinations):
        if self.gathers and not tf.executing_eagerly():
            unknown = [None] * tensor.shape.rank
            tensor = tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=unknown)
        return super().broadcast_implementation(tensor, destinations)

    def start(self):
        """Forget what was counted."""
        if self.counts is None:
            self.counts = [tf.Variable(0, dtype="int64") for _ in range(3)]
        for count in self.counts:
            count.assign(0)

    def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
        if self.counts is not None:
            values = [value.values[0] for value, _ in value_destination_pairs]
            sizes = [v.dtype.size * tf.size(v, tf.int64) for v in values]
            for count, by in zip(self.counts, (1, len(values), tf.add_n(sizes))):
                count.assign_add(by)
        return super().batch_reduce_implementation(
            reduce_op, value_destination_pairs, options
        )


REDUCTIONS = CountingReductions()


def scope_of(strategy):
    return strategy.scope() if strategy else contextlib.nullcontext()


def train(make, arrays, optimizer, strategy=None, mode="graph", **how):
    """Fit `make()` in order: on one device without a `strategy`, in one batch.

    Args:
        make: gives a built model.
        arrays: inputs, targets and perhaps sample weights.
        optimizer: gives an optimizer.
        strategy: where to train, in batches of `batch_size` samples.
        mode: "graph" or "eager"; without a `strategy`, eager, where tracing would take
            longer than the few steps.
        how: `split`, as for `accumulate`; `two_pass`; `batch_size`; `epochs`;
            `class_weight`; `callbacks`; and arguments of `compile`.

    Returns:
        The model, and the last epoch's logs.
    """
    split, two_pass = how.pop("split", None), how.pop("two_pass", False)
    fit = {k: how.pop(k) for k in ("class_weight", "callbacks") if k in how}
    rows = len(tf.nest.flatten(arrays)[0])
    batch_size, epochs = how.pop("batch_size", rows), how.pop("epochs", 2)
    keras.utils.set_random_seed(11)
    with scope_of(strategy):
        model = make()
        if split is not None:
            ka.accumulate(model, **split, two_pass=two_pass)
        optimizer = optimizer()
        optimizer.build(model.trainable_variables)
        eager = strategy is None or mode == "eager"
        model.compile(optimizer, run_eagerly=eager, jit_compile=False, **how)
    x, y, weight = keras.utils.unpack_x_y_sample_weight(arrays)
    history = model.fit(
        x,
        y,
        sample_weight=weight,
        batch_size=batch_size,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        **fit,
    )
    return model, {name: values[-1] for name, values in history.history.items()}


def assert_same(found, oracle, rtol=1e-6, logs=True):
    """Raise unless two results of `train` agree in all state and logs."""
    (model, found_logs), (expected, expected_logs) = found, oracle
    assert_close(model.get_weights(), expected.get_weights(), rtol, "weights")
    assert_close(slots(model.optimizer), slots(expected.optimizer), 10 * rtol, "slots")
    if logs:
        assert found_logs.keys() == expected_logs.keys()
        for name in found_logs:
            assert_close(found_logs[name], expected_logs[name], 2 * rtol, name)


def sgd():
    return keras.optimizers.SGD(0.2, momentum=0.9)


def accumulating(inner=sgd, steps=STEPS, **options):
    """Gives an `AccumOptimizer` around what `inner()` gives."""
    return lambda: ka.AccumOptimizer(inner(), steps, **options)


def check(
    make,
    arrays,
    strategy,
    mode,
    inner=sgd,
    control=True,
    together=True,
    rtol=1e-6,
    **how,
):
    """Both routes, and both `together`, against the large batch on one device.

    The control is plain Keras on the replicas: each divides by what it holds itself. It
    runs eagerly, which takes no tracing.
    """
    how = {"loss": "mse", **how}
    oracle = train(make, arrays, inner, **how)
    micro = {"batch_size": BATCH, **how}
    found = train(make, arrays, accumulating(inner), strategy, mode, **micro)
    assert_same(found, oracle, rtol, logs=False)
    split = {"split": {"accum_steps": 3}}
    found = train(make, arrays, inner, strategy, mode, **how, **split)
    assert_same(found, oracle, rtol)
    if together:
        found = train(make, arrays, accumulating(inner), strategy, mode, **micro, **split)
        assert_same(found, oracle, rtol, logs=False)
    if control:
        naive = train(make, arrays, inner, strategy, "eager", **how)
        assert_differ(naive[0].get_weights(), oracle[0].get_weights(), what="plain Keras")


# ------------------------------------------------------------- optimizers, invariance


def optimizers():
    """Everything that has to happen once per update, on the reduced gradient."""
    keras_optimizers = keras.optimizers
    decay = keras_optimizers.schedules.ExponentialDecay(0.5, 1, 0.7)
    averages = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2}
    return {
        "global_clipnorm, decay": lambda: keras_optimizers.SGD(
            0.5, momentum=0.9, global_clipnorm=0.1, weight_decay=0.1
        ),
        "clipnorm, schedule": lambda: keras_optimizers.SGD(decay, clipnorm=0.05),
        "clipvalue, ema": lambda: keras_optimizers.SGD(0.5, clipvalue=0.01, **averages),
        "adamw": lambda: keras_optimizers.AdamW(0.01, epsilon=1e-3),
        "muon": lambda: keras_optimizers.Muon(0.01),
    }


def constrained():
    return dense_model(kernel_constraint=keras.constraints.MaxNorm(0.5))


@scenario("optimizers", slow=("graph",))
def every_setting_of_an_optimizer_acts_on_the_reduced_gradient(strategy, mode):
    """keras#19891, TensorFlow#33929, keras#20582: invariant, clipped once, no crash."""
    # Three updates: what is overwritten by averages after the second shows in the third.
    arrays, how = data(SAMPLES), {"loss": "mse", "mode": mode, "epochs": 3}
    for name, inner in optimizers().items():
        if mode == "eager" and name != "clipvalue, ema":
            continue
        print(name)
        rtol = 2e-5 if name in ("adamw", "muon") else 2e-6
        oracle = train(constrained, arrays, inner, **how)
        micro = {**how, "batch_size": BATCH}
        found = train(constrained, arrays, accumulating(inner), strategy, **micro)
        assert_same(found, oracle, rtol, logs=False)
        if name not in ("global_clipnorm, decay", "clipvalue, ema"):
            continue  # In the step, the optimizer is called as it is without.
        split = {"accum_steps": 3}
        found = train(constrained, arrays, inner, strategy, split=split, **how)
        assert_same(found, oracle, rtol)


@scenario("invariance", "graph")
def one_two_and_four_replicas_give_the_same_weights(strategy, mode):
    """Run with 1, 2 and 4 replicas, each against the same oracle."""
    check(dense_model, data(SAMPLES), strategy, mode, control=False, metrics=["mae"])


@scenario("optimizers")
def gradients_are_clipped_after_they_are_reduced(strategy, mode):
    """(3, 0) on replica 0 and (0, 4) on replica 1, clipped to norm 1: (0.6, 0.8)."""

    def moved(make):
        with strategy.scope():
            weights = keras.Variable([0.0, 0.0])
            optimizer = make()
            optimizer.build([weights])

        def replica():
            index = tf.distribute.get_replica_context().replica_id_in_sync_group
            gradient = tf.where(tf.equal(index, 0), [3.0, 0.0], [0.0, 4.0])
            optimizer.apply([gradient], [weights])

        step = replica if mode == "eager" else tf.function(replica)
        strategy.run(step)
        return weights.numpy()

    def inner():
        return keras.optimizers.SGD(1.0, global_clipnorm=1.0)

    assert_close(moved(accumulating(inner, steps=1)), -np.array([0.6, 0.8], "float32"))
    assert np.linalg.norm(moved(inner)) > 1.4  # The control: Keras clips each by itself.


# ------------------------------------------------------------------ weights and losses


@scenario("short batches", slow=("eager",))
def a_short_last_batch_weighs_what_it_holds(strategy, mode):
    """transformers#6969: 13 samples in batches of 4; the last leaves one replica none."""
    arrays = data(SAMPLES)
    check(dense_model, arrays, strategy, mode, metrics=["mae"])


@scenario("weights", "graph", slow=("graph",))
def sample_weights_are_summed_over_replicas(strategy, mode):
    x, y = data(SAMPLES)
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    how = {"loss": loss, "together": False}
    check(dense_model, (x, y, uneven(SAMPLES)), strategy, mode, **how)


@scenario("weights", "graph")
def tokens_are_counted_over_replicas(strategy, mode):
    """transformers#34191: the denominator is the window's tokens, across devices too."""
    arrays = tokens(SAMPLES)
    check(token_model, arrays, strategy, mode, loss=cross_entropy())


@scenario("weights", "graph", slow=("graph",))
def two_outputs_with_two_masks_are_exact_in_the_step(strategy, mode):
    x, y = two_text_arrays()
    cut = tf.nest.map_structure(lambda a: a[:SAMPLES], (x, y))
    how = {"loss": {"a": cross_entropy(), "b": cross_entropy()}, "mode": mode}
    oracle = train(two_texts, cut, sgd, **how)
    split = {"accum_steps": 3}
    assert_same(train(two_texts, cut, sgd, strategy, split=split, **how), oracle)
    naive = train(two_texts, cut, sgd, strategy, **{**how, "mode": "eager"})
    assert_differ(naive[0].get_weights(), oracle[0].get_weights())


@scenario("losses", "graph")
def a_sum_is_not_divided_by_the_number_of_replicas(strategy, mode):
    arrays, loss = data(SAMPLES), keras.losses.MeanSquaredError(reduction="sum")

    def inner():
        return keras.optimizers.SGD(0.002, momentum=0.9)

    how = {"loss": loss, "mode": mode}
    oracle = train(dense_model, arrays, inner, **how)
    summing = accumulating(inner, reduction="sum")
    found = train(dense_model, arrays, summing, strategy, batch_size=BATCH, **how)
    assert_same(found, oracle, logs=False)
    split = {"accum_steps": 3}
    assert_same(train(dense_model, arrays, inner, strategy, split=split, **how), oracle)
    averaging = accumulating(inner)
    assert_refused(
        lambda: train(dense_model, arrays, averaging, strategy, batch_size=BATCH, **how),
        ValueError,
        "Received a loss with `reduction='sum'` (or None) in an optimizer with "
        "`reduction='mean'`, which would divide the sum by the window's length. For "
        "the sum over the window, as the large batch has it, write "
        "`AccumOptimizer(..., reduction='sum')`; for the mean, give the loss "
        "`reduction='sum_over_batch_size'`.",
    )


@scenario("losses", "graph")
def a_regulariser_counts_once(strategy, mode):
    """Keras PR#20609: not once per replica, nor once per micro-batch."""

    def make():
        return dense_model(kernel_regularizer=keras.regularizers.L2(0.3))

    # Not 13: of no samples on one replica, Keras's own eager step fails here.
    check(make, data(14), strategy, mode, control=False, together=False)
    # One sample: the other replica has none, and adds its share all the same.
    total = {"loss": keras.losses.MeanSquaredError(reduction="sum")}
    oracle = train(make, data(1), sgd, mode=mode, **total)
    summing = accumulating(steps=1, reduction="sum")
    split = {"accum_steps": 2}
    found = train(make, data(1), summing, strategy, mode, split=split, **total)
    assert_same(found, oracle, logs=False)
    bare = train(dense_model, data(1), sgd, mode=mode, **total)
    assert_differ(bare[0].get_weights(), oracle[0].get_weights())


class Penalty(keras.layers.Layer):
    """Adds a mean over samples to the loss."""

    def call(self, inputs):
        self.add_loss(0.3 * keras.ops.mean(keras.ops.square(inputs)))
        return inputs


@scenario("losses", "graph", slow=("graph",))
def what_a_layer_adds_to_the_loss_counts_once(strategy, mode):
    def make():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((5,))
        hidden = Penalty()(keras.layers.Dense(4)(inputs))
        return keras.Model(inputs, keras.layers.Dense(3)(hidden))

    # Of no samples, Keras itself makes a loss of NaN.
    check(make, data(16), strategy, mode, control=False)


class Total(keras.layers.Layer):
    """Adds a sum over samples to the loss, as one value or one of each sample."""

    def __init__(self, axis):
        super().__init__()
        self.axis = axis

    def call(self, inputs):
        self.add_loss(0.02 * keras.ops.sum(keras.ops.square(inputs), self.axis))
        return inputs


@scenario("losses", "graph", slow=("graph",))
def sums_that_a_layer_adds_are_over_all_samples(strategy, mode):
    """In the step: an optimizer alone takes them for means, and warns."""
    both = {"split": {"accum_steps": 2}}
    for axis, two_pass, split in ((None, False, both), (-1, True, {})):

        def make(axis=axis):
            keras.utils.set_random_seed(1)
            inputs = keras.Input((5,))
            dense = keras.layers.Dense(4, kernel_regularizer="l2")
            hidden = Total(axis)(dense(inputs))
            return keras.Model(inputs, keras.layers.Dense(3)(hidden))

        oracle = train(make, data(16), sgd, mode=mode, loss="mse")
        how = {"split": {"accum_steps": 3}, "two_pass": two_pass}
        found = train(make, data(16), sgd, strategy, mode, loss="mse", **how)
        assert_same(found, oracle)
        how = {"mode": mode, "loss": keras.losses.MeanSquaredError(reduction="sum")}
        small = lambda: keras.optimizers.SGD(0.01)  # noqa: E731
        summing = accumulating(small, reduction="sum")
        expected = train(make, data(16), small, **how)
        micro = {"batch_size": BATCH, **split, **how}
        found = train(make, data(16), summing, strategy, **micro)
        assert_same(found, expected, logs=False)
        naive = train(make, data(16), sgd, strategy, "eager", loss="mse")
        assert_differ(naive[0].get_weights(), oracle[0].get_weights(), what="plain Keras")


@scenario("losses", "graph", slow=("graph",))
def a_metric_of_a_whole_batch_is_named(strategy, mode):
    """Each replica computes it from its own samples, with `two_pass` too."""

    def largest_error(y, y_pred):
        return keras.ops.max(keras.ops.abs(y - y_pred))

    def said(two_pass, metric):
        how = {"split": {"accum_steps": 2}, "two_pass": two_pass, "metrics": [metric]}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(dense_model, data(8), sgd, strategy, mode, loss="mse", **how)
        return [text for w in caught if "metric" in (text := str(w.message))]

    more = "; or pass `two_pass=True`, with which metrics see all samples of a replica"
    for two_pass, part, way_out in ((False, "micro-batch", more), (True, "replica", "")):
        expected = (
            "The metric 'largest_error' returns one number for a batch. It is computed "
            f"for each {part}, and the mean of those is shown, not the value of the "
            f"batch. Return one value per sample{way_out}."
        )
        assert said(two_pass, largest_error) == [expected]
        assert not said(two_pass, "mae")


@scenario("weights", "graph", slow=("graph",))
def class_weights_are_exact(strategy, mode):
    x, y = data(SAMPLES)
    labels = np.abs(y).argmax(axis=1)
    check(
        dense_model,
        (x, labels),
        strategy,
        mode,
        loss=cross_entropy(),
        class_weight={0: 0.2, 1: 3.0, 2: 1.0},
        together=False,
    )


class OwnLoss(keras.Model):
    """A loss of its own, of which the hook says what it was divided by."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        weights = tf.cast(y[:, 0] > 0, "float32") + 0.1
        errors = tf.reduce_mean(tf.square(y - y_pred), axis=-1)
        return tf.reduce_sum(errors * weights) / tf.reduce_sum(weights)

    def compute_loss_weight(self, x, y, y_pred, sample_weight):
        return tf.reduce_sum(tf.cast(y[:, 0] > 0, "float32") + 0.1)


@scenario("losses", "graph")
def a_loss_with_a_hook_for_its_weight_is_exact(strategy, mode):
    def make():
        model = dense_model()
        return OwnLoss(model.inputs, model.outputs)

    arrays, split = data(SAMPLES), {"accum_steps": 3}
    oracle = train(make, arrays, sgd, mode=mode)
    assert_same(train(make, arrays, sgd, strategy, mode, split=split), oracle)


@scenario("losses", "graph", slow=("graph",))
def inputs_in_a_dictionary_and_dropout_train(strategy, mode):
    """Random numbers are drawn anew; the exact part is asserted without them."""

    def make(rate=0.0):
        keras.utils.set_random_seed(1)
        a, b = keras.Input((3,), name="a"), keras.Input((2,), name="b")
        hidden = keras.layers.Concatenate()([a, b])
        hidden = keras.layers.Dropout(rate)(keras.layers.Dense(6, "tanh")(hidden))
        return keras.Model({"a": a, "b": b}, keras.layers.Dense(3)(hidden))

    x, y = data(SAMPLES)
    arrays = ({"a": x[:, :3], "b": x[:, 3:]}, y)
    check(make, arrays, strategy, mode, control=False, together=False)
    how = {"loss": "mse", "split": {"accum_steps": 3}}
    dropped, _ = train(lambda: make(0.5), arrays, sgd, strategy, mode, **how)
    exact, _ = train(make, arrays, sgd, loss="mse")
    assert_differ(dropped.get_weights(), exact.get_weights())


@scenario("optimizers", slow=("eager",))
def embeddings_on_both_replicas_are_exact(strategy, mode):
    """Sparse gradients with rows that repeat, on both replicas, under a clip.

    Keras itself clips such gradients wrongly: the oracle's gradient is dense.
    """
    x, y = tokens(SAMPLES)

    class Dense(keras.optimizers.SGD):
        def apply(self, grads, trainable_variables=None):
            dense = [tf.convert_to_tensor(g) for g in grads]
            return super().apply(dense, trainable_variables)

    def plain(kind=keras.optimizers.SGD):
        return kind(0.5, global_clipnorm=0.02)

    how = {"loss": cross_entropy(), "mode": mode}
    oracle = train(token_model, (x, y), lambda: plain(Dense), **how)
    micro = {**how, "batch_size": BATCH}
    found = train(token_model, (x, y), accumulating(plain), strategy, **micro)
    assert_same(found, oracle, logs=False)
    split = {"accum_steps": 3}
    assert_same(train(token_model, (x, y), plain, strategy, split=split, **how), oracle)
    naive = train(token_model, (x, y), plain, **how)
    assert_differ(naive[0].get_weights(), oracle[0].get_weights(), what="sparse clip")


# ------------------------------------------------------------------------- custom loops


def gradients_loop(strategy, mode, optimizer, variables, steps):
    """Apply each of `steps`: gradients of replica 0, of replica 1, and their weights."""
    with strategy.scope():
        optimizer.build(variables)

    for of_replica in steps:

        def replica(of_replica=of_replica):
            context = tf.distribute.get_replica_context()
            first = tf.equal(context.replica_id_in_sync_group, 0)
            chosen = [
                None if a is None else tf.where(first, a, b) for a, b in zip(*of_replica)
            ]
            *grads, weight = chosen
            # As Keras's losses make them.
            grads = [g if g is None else g / 2 for g in grads]
            optimizer.apply(grads, variables, weight=weight)

        strategy.run(replica if mode == "eager" else tf.function(replica))


def two_variables(strategy):
    with strategy.scope():
        return [keras.Variable([1.0, 2.0]), keras.Variable([3.0])]


@scenario("custom loops")
def a_parameter_unused_in_the_last_micro_batch_keeps_its_gradient(strategy, mode):
    """pytorch#69031."""
    variables = two_variables(strategy)
    with strategy.scope():
        optimizer = ka.AccumOptimizer(keras.optimizers.SGD(1.0), 2)
    steps = [
        ([[1.0, 2.0], [4.0], 3.0], [[5.0, 6.0], [8.0], 1.0]),
        ([[1.0, 0.0], None, 2.0], [[0.0, 1.0], None, 2.0]),
    ]
    gradients_loop(strategy, mode, optimizer, variables, steps)
    # Σ w g / Σ w, over both micro-batches and both replicas.
    expected = [
        np.array([1.0, 2.0]) - np.array([3 + 5 + 2 + 0, 6 + 6 + 0 + 2]) / 8,
        np.array([3.0]) - (12 + 8) / 8,
    ]
    assert_close([v.numpy() for v in variables], [e.astype("float32") for e in expected])


@scenario("custom loops")
def an_infinity_on_one_replica_skips_the_window_on_all(strategy, mode):
    """Keras judges replica 0 alone: an Inf on replica 1 reaches the weights."""
    variables = two_variables(strategy)
    before = [v.numpy() for v in variables]
    with strategy.scope():
        optimizer = ka.AccumOptimizer(sgd(), 2, on_nonfinite="skip_window")
    good = ([[1.0, 2.0], [4.0], 1.0], [[5.0, 6.0], [8.0], 1.0])
    bad = ([[1.0, 2.0], [4.0], 1.0], [[5.0, np.inf], [8.0], 1.0])
    gradients_loop(strategy, mode, optimizer, variables, [good, bad])
    assert_equal([v.numpy() for v in variables], before)
    assert int(optimizer.skipped_windows.numpy()) == 1
    assert int(optimizer.iterations.numpy()) == 0
    gradients_loop(strategy, mode, optimizer, variables, [good, good])
    assert_differ([v.numpy() for v in variables], before)
    assert int(optimizer.iterations.numpy()) == 1


@scenario("custom loops")
def an_overflow_on_one_replica_halves_the_scale_once(strategy, mode):
    variables = two_variables(strategy)
    before = [v.numpy() for v in variables]
    with strategy.scope():
        inner = keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=8.0)
        optimizer = ka.AccumOptimizer(inner, 2)
    bad = ([[1.0, 2.0], [4.0], 1.0], [[5.0, np.inf], [8.0], 1.0])
    gradients_loop(strategy, mode, optimizer, variables, [bad, bad])
    assert_equal([v.numpy() for v in variables], before)
    assert float(optimizer.dynamic_scale.numpy()) == 4.0
    assert int(optimizer.iterations.numpy()) == 0


@scenario("custom loops")
def a_micro_batch_of_one_replica_can_be_skipped_alone(strategy, mode):
    variables = two_variables(strategy)
    with strategy.scope():
        optimizer = ka.AccumOptimizer(
            keras.optimizers.SGD(1.0), 1, on_nonfinite="skip_micro_batch"
        )
    bad = ([[1.0, 2.0], [4.0], 1.0], [[5.0, np.inf], [8.0], 3.0])
    gradients_loop(strategy, mode, optimizer, variables, [bad])
    # The control: with the other's weight in the denominator, it would be a quarter.
    expected = [np.array([0.0, 0.0], "float32"), np.array([-1.0], "float32")]
    assert_close([v.numpy() for v in variables], expected)
    assert int(optimizer.skipped_micro_batches.numpy()) == 1


@scenario("custom loops")
def values_that_overwrite_are_the_maximum_over_replicas(strategy, mode):
    with strategy.scope():
        scale, other = keras.Variable([1.0, 1.0]), keras.Variable([0.0])
        scale.overwrite_with_gradient = True
        optimizer = ka.AccumOptimizer(keras.optimizers.SGD(1.0), 2)
    # The loop halves what it is given, as if it were a gradient.
    steps = [
        ([[2.0, 4.0], [1.0], 1.0], [[6.0, 0.5], [1.0], 1.0]),
        ([[4.0, 3.0], [1.0], 1.0], [[1.0, 8.0], [1.0], 2.0]),
    ]
    gradients_loop(strategy, mode, optimizer, [scale, other], steps)
    assert_equal(scale.numpy(), np.array([3.0, 4.0], "float32"))


@scenario("custom loops")
def a_loop_of_ones_own_on_accumulate_gradients_is_exact(strategy, mode):
    """Uneven tokens on two replicas; the weight goes from the loss to `apply`."""
    x, y = tokens(SAMPLES)
    oracle, _ = train(token_model, (x, y), sgd, mode=mode, loss=cross_entropy(), epochs=1)
    with strategy.scope():
        model = token_model()
        optimizer = ka.AccumOptimizer(sgd(), 2)
        optimizer.build(model.trainable_variables)

    def tokens_of(x):
        return tf.reduce_sum(tf.cast(x != 0, "float32"))

    def loss_fn(micro_batch):
        x, y = micro_batch
        loss = cross_entropy(reduction="mean_with_sample_weight")
        return loss(y, model(x, training=True)), tokens_of(x)

    def replica(batch):
        _, grads = ka.accumulate_gradients(
            loss_fn, model.trainable_variables, batch, micro_batch_size=2
        )
        optimizer.apply(grads, model.trainable_variables, weight=tokens_of(batch[0]))

    def step(batch):
        strategy.run(replica, args=(batch,))

    step = step if mode == "eager" else tf.function(step)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(7)
    for batch in strategy.experimental_distribute_dataset(dataset):
        step(batch)
    assert int(optimizer.iterations.numpy()) == 1
    assert_close(model.get_weights(), oracle.get_weights())


# ---------------------------------------------------------------------- precision, state


def half_model():
    keras.utils.set_random_seed(1)
    inputs = keras.Input((5,))
    hidden = keras.layers.Dense(8, "tanh", dtype="mixed_float16")(inputs)
    outputs = keras.layers.Dense(3, dtype="mixed_float16")(hidden)
    return keras.Model(
        inputs, keras.layers.Activation("linear", dtype="float32")(outputs)
    )


@scenario("state", "graph")
def mixed_precision_scales_and_unscales_once(strategy, mode):
    """In float16, to 2e-3: each micro-batch's products are rounded by themselves."""
    keras.config.set_dtype_policy("mixed_float16")
    arrays = data(SAMPLES)
    oracle = train(half_model, arrays, sgd, mode=mode, loss="mse")
    how = {"loss": "mse", "mode": mode}
    micro = {**how, "batch_size": BATCH}
    routes = [
        train(half_model, arrays, accumulating(), strategy, **micro),
        train(half_model, arrays, sgd, strategy, split={"accum_steps": 3}, **how),
    ]
    for model, _ in routes:
        assert_close(model.get_weights(), oracle[0].get_weights(), 2e-3, "weights")
        assert_equal(model.optimizer.dynamic_scale.numpy(), np.float32(2.0**15))
        assert int(model.optimizer.inner_optimizer.iterations.numpy()) == 2
    keras.config.set_dtype_policy("float32")
    fresh = half_model().get_weights()
    assert_differ(oracle[0].get_weights(), fresh, by=0.05, what="training")


def started(strategy, arrays, mode, load=None):
    """A model in the middle of a window: two of its four micro-batches are in."""
    with scope_of(strategy):
        model = dense_model()
        optimizer = accumulating()()
        optimizer.build(model.trainable_variables)
        model.compile(optimizer, "mse", run_eagerly=mode == "eager", jit_compile=False)
    if load is not None:
        load(model)
    return model


def feed(model, arrays, rows):
    x, y = (a[rows] for a in arrays)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)


def storages(folder):
    """Ways to save a model in mid-window: each gives what saves and what loads."""

    def checkpoint(model):
        return tf.train.Checkpoint(model=model, optimizer=model.optimizer)

    def whole(model):
        kept = keras.saving.load_model(folder / "model.keras")
        assert int(kept.optimizer.micro_step.numpy()) == 2
        kept.save_weights(folder / "again.weights.h5")
        model.load_weights(folder / "again.weights.h5")

    return {
        "weights": (
            lambda model: model.save_weights(folder / "model.weights.h5"),
            lambda model: model.load_weights(folder / "model.weights.h5"),
        ),
        "keras": (lambda model: model.save(folder / "model.keras"), whole),
        "checkpoint": (
            lambda model: checkpoint(model).write(str(folder / "checkpoint")),
            lambda model: checkpoint(model).read(str(folder / "checkpoint")),
        ),
    }


@scenario("state", "eager")
def a_window_goes_on_with_another_number_of_replicas(strategy, mode):
    """Saved in mid-window on 2 replicas, or on 1, and loaded on 1, or on 2."""
    arrays = data(SAMPLES)
    oracle, _ = train(dense_model, arrays, sgd, mode=mode, loss="mse", epochs=1)
    for before, afters in ((strategy, (strategy, None)), (None, (strategy,))):
        model = started(before, arrays, mode)
        feed(model, arrays, slice(0, 8))
        with tempfile.TemporaryDirectory() as folder:
            for way, after in itertools.product(
                ("weights", "keras", "checkpoint"), afters
            ):
                print(way, before, after)
                save, load = storages(pathlib.Path(folder))[way]
                save(model)
                other = started(after, arrays, mode, load)
                assert int(other.optimizer.micro_step.numpy()) == 2
                feed(other, arrays, slice(8, None))
                assert int(other.optimizer.iterations.numpy()) == 1
                assert_close(other.get_weights(), oracle.get_weights(), what=way)
    # The control: what was in the window before counts.
    alone = started(strategy, arrays, mode)
    alone.optimizer.accum_steps = 2
    feed(alone, arrays, slice(8, None))
    assert_differ(alone.get_weights(), oracle.get_weights())


@scenario("state", "eager")
def an_open_window_is_flushed_from_outside_or_on_the_replicas(strategy, mode):
    arrays = data(SAMPLES)
    oracle, _ = train(dense_model, arrays, sgd, mode=mode, loss="mse", epochs=1)
    how = {"loss": "mse", "batch_size": BATCH, "epochs": 1}
    flushes = {
        "outside": lambda model: model.optimizer.flush(),
        "inside": lambda model: strategy.run(model.optimizer.flush),
        "scope": lambda model: _in_scope(strategy, model.optimizer.flush),
    }
    longer = accumulating(steps=9)
    for name, flush in flushes.items():
        model, _ = train(dense_model, arrays, longer, strategy, mode, **how)
        assert int(model.optimizer.iterations.numpy()) == 0
        flush(model)
        assert_close(model.get_weights(), oracle.get_weights(), what=name)
    monitor = [ka.AccumulationMonitor(tail="flush_epoch")]
    how = {**how, "callbacks": monitor}
    model, logs = train(dense_model, arrays, longer, strategy, mode, **how)
    assert_close(model.get_weights(), oracle.get_weights(), what="monitor")
    assert logs["updates"] == 1

    model, _ = train(
        dense_model, arrays, longer, strategy, mode, loss="mse", batch_size=4
    )
    model.optimizer.reset()
    assert int(model.optimizer.micro_step.numpy()) == 0
    fresh = dense_model()
    assert_equal(model.get_weights(), fresh.get_weights())


def _in_scope(strategy, function):
    with strategy.scope():
        function()


@scenario("state", "eager")
def the_monitor_names_the_replicas(strategy, mode):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("keras_accum").addHandler(handler)
    logging.getLogger("keras_accum").setLevel(logging.INFO)
    arrays, how = data(16), {"loss": "mse", "batch_size": BATCH, "epochs": 2}
    monitor = [ka.AccumulationMonitor()]
    train(dense_model, arrays, accumulating(), strategy, mode, callbacks=monitor, **how)
    found = [line for line in lines if "2 samples x 4 accum_steps x 2 replicas" in line]
    assert found and "effective batch 16" in found[0], lines


# ----------------------------------------------------------------------------- planning


def each_component(model):
    """The values of all variables, on each replica."""
    return [part.numpy() for v in variables(model) for part in components(v)]


def invented(profiler, size, recompute, timed):
    return Trial(size, recompute, 2**20, seconds=1.0)


@scenario("planning", slow=("eager",))
def a_plan_is_for_each_replica_and_changes_none(strategy, mode):
    """The model is made in the scope; the call is outside of it."""
    x, y = data(6)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    with strategy.scope():
        model = normalised()
        optimizer = ka.AccumOptimizer(sgd(), 3)
        model.compile(
            optimizer,
            "mse",
            metrics=["mae"],
            run_eagerly=mode == "eager",
            jit_compile=False,
        )
    model.fit(x, y, batch_size=6, verbose=0)  # leaves a window open
    assert int(optimizer.micro_step.numpy()) == 1
    before = each_component(model)
    how = {"memory_budget": "1GiB", "verbose": 0}

    def check_plan(batch):
        plan = ka.plan(model, batch, **how)
        assert_equal(each_component(model), before)
        assert (plan.replicas, plan.window, plan.batch_size) == (2, 3, 12)
        assert plan.micro_batch_size * plan.accum_steps == 2
        assert plan.held.batch == 2 * (5 + 3) * 4
        assert plan.held.total < plan.peak_bytes < 2**30

    check_plan((x[:4], y[:4]))
    with unittest.mock.patch.object(StepProfiler, "measure", invented):
        check_plan(dataset)
        check_plan(strategy.experimental_distribute_dataset(dataset))
        few = {"batch_size": 3, **how}
        assert_refused(
            lambda: ka.plan(model, (x, y), **few),
            ValueError,
            "`batch_size` must be at least 6, replicas (2) times the steps of an "
            "`AccumOptimizer`'s window (3). Received: 3",
        )
    # The control: an epoch.
    weights = model.get_weights()
    model.fit(x, y, batch_size=6, verbose=0)
    assert_differ(model.get_weights(), weights)


@scenario("planning", "graph", slow=("graph",))
def a_plan_trains_as_the_large_batch(strategy, mode):
    """Also where the replicas cannot share the batch equally."""
    arrays = data(5)
    oracle = train(dense_model, arrays, sgd, loss="mse")
    with strategy.scope():
        model = dense_model()
        model.compile(sgd(), "mse", run_eagerly=mode == "eager", jit_compile=False)
    plan = ka.plan(model, arrays, memory_budget="1GiB", verbose=0)
    split = plan.batch_size, plan.micro_batch_size * plan.accum_steps
    assert split == (5, 3), plan
    plan = dataclasses.replace(plan, micro_batch_size=2, accum_steps=2)
    assert plan.last_micro_batch_size == 1
    history = plan.apply().fit(*arrays, batch_size=5, epochs=2, shuffle=False, verbose=0)
    logs = {name: values[-1] for name, values in history.history.items()}
    assert_same((model, logs), oracle)
    weights = dense_model().get_weights()
    assert_differ(weights, model.get_weights())


# -------------------------------------------------------------------------- collectives


@scenario("reductions", slow=("eager",))
def one_reduction_per_window_whatever_its_length(strategy, mode):
    """Gradients and weights are reduced together, once. Keras reduces at each step."""
    arrays = data(24)

    def reductions(optimizer, **how):
        how = {"loss": "mse", "epochs": 1, **how}
        REDUCTIONS.start()
        train(dense_model, arrays, optimizer, strategy, mode, **how)
        return [int(count) for count in REDUCTIONS.counts]

    parameters = 4 * dense_model().count_params()
    for steps in (1, 6) if mode == "graph" else (3,):
        found = reductions(accumulating(steps=steps), batch_size=4)
        # Beside the sums of 4 variables: the weight, and what was dropped.
        assert found == [6 // steps, 6 * 6 // steps, (parameters + 8) * 6 // steps], found
    for steps in (1, 6) if mode == "graph" else (6,):
        # In the step: the number of samples before, the gradients after.
        found = reductions(sgd, split={"accum_steps": steps})
        # In eager mode, which of the 4 variables have a gradient on some replica.
        told = [1, 1, 4 * 4] if mode == "eager" else [0, 0, 0]
        expected = np.array([2, 5, parameters + 4]) + told
        assert found == expected.tolist(), found
    # The control.
    assert reductions(sgd, batch_size=4)[0] == 6


def model_of(*dtypes):
    """Gives a model of a layer of each of `dtypes`, which may be policies."""

    def make():
        keras.utils.set_random_seed(1)
        outputs = inputs = keras.Input((5,))
        for width, dtype in zip((8, 3), dtypes, strict=True):
            outputs = keras.layers.Dense(width, "tanh", dtype=dtype)(outputs)
        return keras.Model(inputs, outputs)

    return make


# The layers' dtypes, and how near the large batch: half precision rounds micro-batches.
TYPES = {
    ("float64", "float64"): 1e-13,
    ("float64", "float32"): 1e-6,
    ("mixed_bfloat16", "float64"): 2e-2,
}


def check_types(strategy, mode, types):
    """Both routes against the large batch, for models of layers of `types`."""
    arrays = data(SAMPLES)
    how = {"loss": keras.losses.MeanSquaredError(dtype="float64"), "mode": mode}
    for dtypes in types:
        make, rtol = model_of(*dtypes), TYPES[dtypes]
        oracle, _ = train(make, arrays, sgd, **how)
        micro = {**how, "batch_size": BATCH}
        found, _ = train(make, arrays, accumulating(), strategy, **micro)
        assert_close(found.get_weights(), oracle.get_weights(), rtol, str(dtypes))
        found, _ = train(make, arrays, sgd, strategy, split={"accum_steps": 3}, **how)
        assert_close(found.get_weights(), oracle.get_weights(), max(rtol, 1e-6))
        assert_differ(oracle.get_weights(), make().get_weights(), 0.05, "training")


@scenario("reductions", slow=("graph",))
def each_type_is_reduced_apart(strategy, mode):
    """And to the precision of its own."""
    wide, *mixed = TYPES
    check_types(strategy, mode, [wide] if mode == "eager" else mixed)


@scenario("reductions", slow=("graph",))
def one_reduction_per_window_and_type(strategy, mode):
    """The weight of a window goes along: with sums of its type, or of a wider one."""
    for dtypes, types, scalars in (
        (("float32", "float32"), 1, 4 + 4),
        (("float64", "float64"), 1, 8 + 8),
        (("float32", "float64"), 2, 8 + 4),
        (("bfloat16", "float32"), 1, 4 + 4),
    ):
        make, arrays = model_of(*dtypes), data(24)
        how = {"loss": "mse", "epochs": 1, "batch_size": 4}
        REDUCTIONS.start()
        model, _ = train(make, arrays, accumulating(steps=3), strategy, mode, **how)
        found = [int(count) for count in REDUCTIONS.counts]
        parameters = [tf.convert_to_tensor(v) for v in model.trainable_variables]
        size = sum(max(p.dtype.size, 4) * int(tf.size(p)) for p in parameters)
        assert found == [2 * types, 2 * 6, 2 * (size + scalars)], (dtypes, found)
        if mode == "eager":
            break


@scenario("reductions", slow=("graph",))
def a_monitor_sees_the_micro_batches_of_all_replicas(strategy, mode):
    """Noise, norms and clipping as on one device with the same micro-batches."""
    x, y = data(12)

    def inner():
        return keras.optimizers.SGD(0.01, global_clipnorm=0.1)

    def logged(optimizer, strategy=None, counted=0, order=slice(None), **how):
        monitor = ka.AccumulationMonitor(noise_scale=True, verbose=0)
        REDUCTIONS.start()
        how = {"loss": "mse", "callbacks": [monitor], **how}
        arrays = x[order], y[order]
        _, logs = train(dense_model, arrays, optimizer, strategy, mode, **how)
        # As many as without the monitor, in two epochs.
        assert int(REDUCTIONS.counts[0]) == counted, REDUCTIONS.counts
        return [logs[name] for name in KEYS]

    def compared(found, expected):
        assert np.isfinite(expected).all() and expected[3] == 1.0
        assert_close(found, expected, 1e-4)

    small = {"split": {"micro_batch_size": 2}}
    # On each replica, the first micro-batch of an update is seen. So is it of each of two
    # batches in the step, on one device.
    two = {**small, "batch_size": 6}
    found = logged(accumulating(inner, 3), strategy, 2, batch_size=4)
    order = [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11]
    expected = logged(accumulating(inner, 2), order=order, **two)
    compared(found, expected)
    expected = logged(accumulating(inner, 2), **two)
    assert_differ(found[:1], expected[:1], 0.01)  # The control: others are seen.
    # The number of samples before, and in eager mode which gradients there are.
    counted = 4 if mode == "graph" else 6
    compared(logged(inner, strategy, counted, **small), expected)
    if mode == "eager":
        return
    compared(logged(accumulating(inner, 1), strategy, 2, **small), expected)
    # Where one may be skipped, all are seen.
    sums = keras.losses.MeanSquaredError(reduction="sum")
    for reduction, how in (("mean", {}), ("sum", {"loss": sums})):
        options = {"reduction": reduction, "on_nonfinite": "skip_window"}
        three, six = (accumulating(inner, steps, **options) for steps in (3, 6))
        expected = logged(six, batch_size=2, **how)
        compared(logged(three, strategy, 2, batch_size=4, **how), expected)


KEYS = ("noise_scale", "gradient_norm", "clipped_gradient_norm", "clipped_share")


@scenario("reductions", "graph")
def what_was_not_finite_is_named_with_its_replica(strategy, mode):
    """Sample 7 of 12 is in the second micro-batch, and among four on replica 1."""
    x, y = data(12)
    x[7] = np.nan
    for optimizer, split, unit in (
        (accumulating(steps=3, on_nonfinite="skip_window"), None, "window"),
        (lambda: keras.optimizers.LossScaleOptimizer(sgd()), 2, "step"),
    ):
        how = {"batch_size": 4} if split is None else {"split": {"micro_batch_size": 2}}
        monitor = ka.AccumulationMonitor(check_numerics=True, verbose=0)
        told = []
        handler = logging.Handler()
        handler.emit = lambda record: told.append(record.getMessage())  # noqa: B023
        logging.getLogger("keras_accum").addHandler(handler)
        model, logs = train(
            dense_model,
            (x, y),
            optimizer,
            strategy,
            mode,
            loss="mse",
            epochs=1,
            callbacks=[monitor],
            **how,
        )
        logging.getLogger("keras_accum").removeHandler(handler)
        names = ", ".join(v.path for v in model.trainable_variables[:3])
        step, place = (2, 2) if split is None else (1, 2)
        line = (
            f"A {unit} was skipped after update 0: in micro-batch {step} of the {unit} on "
            f"replica {place}, the gradient of {names} and 1 more was not finite. First "
            f"layer whose output was not finite: {model.layers[1].path}."
        )
        assert line in told, told
        assert logs["skipped_windows"] == 1 and logs["updates"] == 0
        assert all("call" not in vars(layer) for layer in model.layers)


# ------------------------------------------------------------- coupled losses, refusals


@scenario("coupled", slow=("eager",))
def a_coupled_loss_sees_the_samples_of_all_replicas(strategy, mode):
    def make():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((2, 5))
        decay = keras.regularizers.L2(0.1)
        first = keras.layers.Dense(8, "tanh", kernel_regularizer=decay)
        return keras.Sequential([inputs, first, Penalty(), keras.layers.Dense(4)])

    x = np.random.default_rng(3).normal(size=(SAMPLES, 2, 5)).astype("float32")
    arrays = (x, np.zeros((SAMPLES, 1), "float32"))
    how = {"loss": nt_xent, "split": {"accum_steps": 3}}
    oracle = train(make, arrays, sgd, mode=mode, loss=nt_xent)
    found = train(make, arrays, sgd, strategy, mode, two_pass=True, **how)
    assert_same(found, oracle)
    inside = train(
        make, arrays, accumulating(steps=1), strategy, mode, two_pass=True, **how
    )
    assert_same(inside, oracle)
    naive = train(make, arrays, sgd, strategy, "eager", loss=nt_xent)
    assert_differ(naive[0].get_weights(), oracle[0].get_weights())


@scenario("coupled", "graph")
def masks_are_gathered_with_the_predictions(strategy, mode):
    arrays, how = tokens(SAMPLES), {"loss": cross_entropy(), "mode": mode}
    split = {"split": {"accum_steps": 3}, "two_pass": True}
    oracle = train(token_model, arrays, sgd, **how)
    assert_same(train(token_model, arrays, sgd, strategy, **how, **split), oracle)
    naive = train(token_model, arrays, sgd, strategy, **{**how, "mode": "eager"})
    assert_differ(naive[0].get_weights(), oracle[0].get_weights())


@scenario("coupled", "graph")
def weights_in_a_column_are_gathered_as_a_column(strategy, mode):
    """Keras squeezes what it knows to be a column; else it would make a square of it."""
    x, y = data(SAMPLES)
    column = np.float32(np.arange(SAMPLES) % 3)[:, None]
    how = {"loss": "mse", "mode": mode}
    oracle = train(dense_model, (x, y, column), sgd, **how)
    split = {"split": {"accum_steps": 3}, "two_pass": True}
    found = train(dense_model, (x, y, column), sgd, strategy, **how, **split)
    assert_same(found, oracle)
    unweighted = train(dense_model, (x, y), sgd, **how)
    assert_differ(unweighted[0].get_weights(), oracle[0].get_weights())


class ReadsInputs(keras.Model):
    """A coupled loss that reads the inputs too."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        likeness = tf.matmul(x, x, transpose_b=True)
        found = tf.matmul(y_pred, y_pred, transpose_b=True)
        return tf.reduce_mean(tf.square(likeness - found))


@scenario("coupled", "graph")
def a_coupled_loss_of_the_inputs_sees_those_of_all_replicas(strategy, mode):
    def make():
        model = dense_model()
        return ReadsInputs(model.inputs, model.outputs)

    def inner():
        return keras.optimizers.SGD(0.001, momentum=0.9)

    arrays, split = data(SAMPLES), {"accum_steps": 3}
    oracle = train(make, arrays, inner, mode=mode)
    found = train(make, arrays, inner, strategy, mode, two_pass=True, split=split)
    assert_same(found, oracle)


def normalised(**options):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(**options)]
    return keras.Sequential([keras.Input((5,)), *layers, keras.layers.Dense(3)])


@scenario("coupled", "graph")
def statistics_synchronised_over_replicas_are_refused_in_a_loop(strategy, mode):
    arrays = data(12)
    how = {"loss": "mse", "split": {"accum_steps": 3}, "mode": mode}

    def synchronized():
        train(
            lambda: normalised(synchronized=True, name="norm"),
            arrays,
            sgd,
            strategy,
            **how,
        )

    assert_refused(
        synchronized,
        ValueError,
        "The layer 'norm' has `synchronized=True`: it averages its statistics over the "
        "replicas at each call, which cannot be done in a loop over micro-batches. Use "
        "`synchronized=False`, or accumulate in the optimizer, with `AccumOptimizer`.",
    )
    model, _ = train(normalised, arrays, sgd, strategy, **how)
    assert all(np.isfinite(w).all() for w in model.get_weights())


@scenario("coupled", "graph")
def statistics_are_pooled_over_the_window_of_each_replica(strategy, mode):
    """What is saved is replica 0's, as for Keras's BatchNormalization."""

    def make():
        keras.utils.set_random_seed(1)
        layers = [ka.AccumBatchNormalization(), keras.layers.Dense(3)]
        return keras.Sequential([keras.Input((5,)), *layers])

    x, y = data(12)
    how = {"loss": "mse", "split": {"accum_steps": 3}, "mode": mode, "epochs": 1}
    found, _ = train(make, (x, y), sgd, strategy, **how)
    own, _ = train(make, (x[:6], y[:6]), sgd, **how)
    other, _ = train(make, (x[6:], y[6:]), sgd, **how)

    def moving(model):
        return [
            model.layers[0].moving_mean.numpy(),
            model.layers[0].moving_variance.numpy(),
        ]

    assert_close(moving(found), moving(own))
    assert_differ(moving(found), moving(other))


@scenario("coupled", "graph", slow=("graph",))
def statistics_of_replaced_layers_are_pooled_too(strategy, mode):
    """Replaced outside of the scope in which the model was made; replica 0's are saved."""
    x, y = data(12)

    def train_one(replace, rows, **how):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            layers = [keras.layers.BatchNormalization(), keras.layers.Dense(3)]
            model = keras.Sequential([keras.Input((5,)), *layers])
        before = model(x).numpy()
        if replace:
            ka.replace_batch_normalization(model)
        assert_equal(model(x).numpy(), before)
        how = {"loss": "mse", "mode": mode, "epochs": 1, **how}
        train(lambda: model, (x, y), how.pop("optimizer", sgd), strategy, **how)
        pooled = [0.01 * x[rows].mean(0), 0.99 + 0.01 * x[rows].var(0)]
        norm = model.layers[0]
        return [norm.moving_mean.numpy(), norm.moving_variance.numpy()], pooled

    routes = (
        (slice(6), {"split": {"accum_steps": 3}}),
        ([0, 1, 4, 5, 8, 9], {"batch_size": 4, "optimizer": accumulating(steps=3)}),
    )
    for rows, how in routes:
        assert_close(*train_one(True, rows, **how))
        assert_differ(*train_one(False, rows, **how))


def convolving():
    keras.utils.set_random_seed(1)
    inputs = keras.Input((5,))
    hidden = keras.layers.Reshape((5, 1))(inputs)
    hidden = keras.layers.Flatten()(keras.layers.Conv1D(2, 3)(hidden))
    return keras.Model(inputs, keras.layers.Dense(3)(hidden))


@scenario("coupled", "graph")
def xla_is_refused_where_tensorflow_cannot_compile_collectives(strategy, mode):
    """keras#19005."""
    x, y = data(12)
    message = (
        "Received `jit_compile=True` under a strategy whose replicas are CPU devices, "
        "where TensorFlow compiles no collective operation. Write "
        "`model.compile(..., jit_compile=False)`."
    )
    three = {"accum_steps": 3}
    # With a convolution, the loop over micro-batches is not compiled on a CPU.
    for make, split, optimizer in (
        (dense_model, None, accumulating()),
        (dense_model, three, sgd),
        (convolving, three, sgd),
        (convolving, three, accumulating()),
    ):
        with strategy.scope():
            model = make()
            if split:
                ka.accumulate(model, **split)
            model.compile(optimizer(), "mse", jit_compile=True)
        before = model.get_weights()
        assert_refused(
            lambda model=model: model.fit(x, y, batch_size=4, verbose=0),
            ValueError,
            message,
        )
        assert_equal(model.get_weights(), before)


def run(function, *arguments):
    """Run a scenario as if it were alone in this process; print what it has taken."""
    keras.backend.clear_session()
    gc.freeze()  # As in conftest.py.
    keras.config.set_dtype_policy("float32")
    keras.utils.set_random_seed(7)
    began = time.process_time()
    function(*arguments)
    words = [function.__name__, *(a for a in arguments if isinstance(a, str))]
    print(*words, f"{time.process_time() - began:.1f} CPU seconds", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="+")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--slow", action="store_true", help="the slow modes")
    wanted = parser.parse_args()
    (cpu,) = tf.config.list_physical_devices("CPU")
    devices = [tf.config.LogicalDeviceConfiguration()] * wanted.replicas
    tf.config.set_logical_device_configuration(cpu, devices)
    strategy = tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(wanted.replicas)], cross_device_ops=REDUCTIONS
    )
    for name in wanted.names:
        for mode in (SLOW if wanted.slow else MODES)[name]:
            run(SCENARIOS[name], strategy, mode)
        print(PASSED, name, flush=True)


if __name__ == "__main__":
    main()
