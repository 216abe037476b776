"""The weight of a micro-batch, on its way from `compute_loss` to `apply`."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    assert_close,
    assert_differ,
    assert_equal,
    assert_refused,
    compile_in,
    data,
    dense_model,
    fit,
    in_mode,
    state,
    told,
)
from keras.src.losses import loss as keras_loss

import keras_accum as ka

# Of 9 samples, micro-batches of 8 and 1.
SIZE, SAMPLES = 8, 9


def sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def oracle(epochs=2):
    model = compile_in(dense_model(), "eager", sgd())
    fit(model, *data(SAMPLES), batch_size=SAMPLES, epochs=epochs)
    return model.get_weights()


class Own(keras.Model):
    """A training step that computes its gradients in a function of its own."""

    inner = None

    def train_step(self, data):
        x, y = data
        if self.inner is None:
            self.inner = tf.function(self.gradients)
        loss, gradients = self.inner(x, y)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}

    def gradients(self, x, y):
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        return loss, tape.gradient(loss, self.trainable_variables)


@pytest.mark.slow_but("True-graph")
@pytest.mark.slow_in("xla")
@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
@pytest.mark.parametrize("inner", [True, False])
def test_a_function_inside_of_the_step_tells_its_weight(mode, inner):
    plain = dense_model()
    model = Own(plain.inputs, plain.outputs)
    if not inner:
        model.inner = model.gradients
    compile_in(model, mode, ka.AccumOptimizer(sgd(), accum_steps=2))
    fit(model, *data(SAMPLES), batch_size=SIZE, epochs=2)
    assert_close(model.get_weights(), oracle())


@pytest.mark.slow_in("None")
@pytest.mark.parametrize("weight", [None, 1.0])
def test_a_function_in_an_eager_loop_tells_its_weight(weight):
    """Also when it is called for the second time, and not traced again."""
    model = compile_in(dense_model(), "eager", ka.AccumOptimizer(sgd(), accum_steps=2))
    x, y = data(SAMPLES)

    @tf.function
    def gradients(x, y):
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True))
        return tape.gradient(loss, model.trainable_variables)

    for _ in range(2):
        for part in (slice(0, SIZE), slice(SIZE, None)):
            found = gradients(x[part], y[part])
            model.optimizer.apply(found, model.trainable_variables, weight=weight)
    if weight is None:
        assert_close(model.get_weights(), oracle())
    else:
        assert_differ(model.get_weights(), oracle())


def test_a_weight_is_used_once_and_not_saved():
    model = compile_in(dense_model(), "eager", ka.AccumOptimizer(sgd(), accum_steps=3))
    x, y = data(SAMPLES)
    before = len(model.optimizer.variables)
    model.compute_loss(x, y, model(x, training=True))
    ones = [tf.ones(v.shape) for v in model.trainable_variables]
    total = model.optimizer._accumulator.total
    model.optimizer.apply(ones, model.trainable_variables)
    model.optimizer.apply(ones, model.trainable_variables)
    # The first one weighs what the loss divided by, the second 1, in units of the first.
    assert float(total.numpy()) == pytest.approx(1 + 1 / SAMPLES)
    assert len(model.optimizer.variables) == before
    assert not [v for v in model.optimizer.variables if "announced" in v.path]


@pytest.mark.slow_in("eager")
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_losses_of_parts_leave_no_weight(mode):
    """`accumulate_gradients` gives the gradient of all parts, not of the last one."""
    model = compile_in(dense_model(), "eager", ka.AccumOptimizer(sgd(), accum_steps=3))
    variables = model.trainable_variables

    def loss(micro_batch):
        x, y = micro_batch
        return model.compute_loss(x, y, model(x, training=True))

    def step(x, y):
        batch = (x, y)
        _, found = ka.accumulate_gradients(loss, variables, batch, micro_batch_size=3)
        model.optimizer.apply(found, variables)

    in_mode(step, mode)(*map(tf.constant, data(SAMPLES)))
    model.optimizer.apply([tf.zeros(v.shape) for v in variables])
    # Both weigh 1: in units of the first, and in those of the second.
    assert float(model.optimizer._accumulator.total.numpy()) == 2.0


@pytest.mark.slow_but("inf")
@pytest.mark.parametrize("weight", [-1.0, np.nan, np.inf])
def test_a_weight_without_sense_is_refused_in_a_graph_too(weight):
    model = compile_in(dense_model(), "eager", ka.AccumOptimizer(sgd(), accum_steps=2))
    ones = [tf.ones(v.shape) for v in model.trainable_variables]
    before = state(model.optimizer)
    assert_refused(
        lambda: model.optimizer.apply(ones, weight=weight),
        ValueError,
        f"`weight` must be a finite number of at least 0. Received: {weight}",
    )

    @tf.function
    def step(weight):
        model.optimizer.apply(ones, weight=weight)

    with pytest.raises(tf.errors.InvalidArgumentError, match="must be a finite number"):
        step(tf.constant(weight))
    assert_equal(state(model.optimizer), before)
    step(tf.constant(2.0))
    assert int(model.optimizer.micro_step.numpy()) == 1


@pytest.mark.parametrize("added", [True, False])
def test_a_loss_that_a_layer_adds_beside_a_weighted_one_is_warned_of(added, recwarn):
    regularizer = "l2" if added else None
    dense = keras.layers.Dense(3, activity_regularizer=regularizer)
    model = keras.Sequential([keras.Input((5,)), dense])
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    compile_in(model, "graph", ka.AccumOptimizer(sgd(), accum_steps=2), loss=loss)
    x, y = data(SAMPLES)
    weights = np.arange(SAMPLES, dtype="float32")
    model.fit(x, y, sample_weight=weights, batch_size=SIZE, verbose=0)
    message = (
        "A layer of this model adds a loss (`add_loss`, an activity regularizer), a mean "
        "over samples, and the compiled loss has another denominator: a mask, sample "
        "weights or variable lengths. One gradient for both can be weighted by one "
        "denominator only: the compiled loss's is used. `accumulate(model, ...)` is "
        "exact for both."
    )
    assert (message in [str(w.message) for w in recwarn]) == added


@pytest.mark.parametrize("weighted", [False, True])
def test_the_first_loss_of_an_optimizer_that_nobody_built(weighted, monkeypatch):
    """Before it is built, it hears of no loss: the first counts as much as the second."""
    reduction = "mean_with_sample_weight" if weighted else "sum_over_batch_size"
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    x, y = data(16, outputs=3)
    weights = (0.5 + np.arange(16) // 4).astype("float32")

    def train(optimizer, size):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
        variables = model.trainable_variables
        for start in range(0, 16, size):
            rows = slice(start, start + size)
            with tf.GradientTape() as tape:
                value = loss(y[rows], model(x[rows]), weights[rows])
            optimizer.apply(tape.gradient(value, [v.value for v in variables]), variables)
        return model.get_weights()

    expected = train(keras.optimizers.SGD(0.1), 16)
    optimizer = ka.AccumOptimizer(keras.optimizers.SGD(0.1), 4)
    # Optimizers of other tests may still be there, and listen.
    name, build = "reduce_weighted_values", optimizer.build
    listening = getattr(keras_loss, name)
    monkeypatch.setattr(keras_loss, name, inspect.unwrap(listening))

    def build_and_listen(variables):
        monkeypatch.setattr(keras_loss, name, listening)
        build(variables)

    if listening is not inspect.unwrap(listening):
        monkeypatch.setattr(optimizer, "build", build_and_listen)
    with pytest.warns(UserWarning) as caught:
        found = train(optimizer, 4)
    assert told(caught) == [
        "The loss of the first micro-batch was computed before this optimizer was built, "
        "so its weight is unknown: it gets the weight of the second. Build the optimizer "
        "before the loop, `optimizer.build(model.trainable_variables)`."
    ]
    (assert_differ if weighted else assert_close)(found, expected)


def test_a_weight_that_is_no_number_is_refused():
    variable = keras.Variable([1.0])
    optimizer = ka.AccumOptimizer("sgd", 2)
    for weight in ("a", True):
        assert_refused(
            lambda weight=weight: optimizer.apply(
                [tf.ones(1)], [variable], weight=weight
            ),
            TypeError,
            f"`weight` must be a number. Received: {weight!r}",
        )
