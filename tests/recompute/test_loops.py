"""Blocks with loops, branches and functions of TensorFlow inside.

The oracle is the plain model. A tape that watches weights by name, as the one in
`accumulate` does, sees more than one that watches what is read: both are tried.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from blocks import X, Y, refused
from helpers import assert_close, assert_differ, in_mode

import keras_accum as ka

layers = keras.layers
STEPS = np.arange(1, 5)[:, None].astype("float32")
SEQUENCES = np.stack([X[:12]] * 4, axis=1) * STEPS


class Ops(layers.Layer):
    """A dense layer, called in a loop, a branch, and a loop of a branch."""

    def __init__(self):
        super().__init__(name="ops")
        self.dense = layers.Dense(8, "tanh")

    def build(self, input_shape):
        self.dense.build(input_shape)
        self.scale = self.add_weight(initializer="ones", trainable=False, name="scale")

    def call(self, x):
        x = keras.ops.map(lambda row: self.dense(row) * self.scale, x)
        step = lambda carry, row: (self.dense(carry + row), row)  # noqa: E731
        x = x + keras.ops.scan(step, x[0], x)[0]
        x = keras.ops.cond(tf.reduce_sum(x) < 1e9, lambda: self.dense(x), lambda: x)
        trip = lambda i, x: tf.cond(i < 2, lambda: self.dense(x), lambda: x)  # noqa: E731
        x = keras.ops.fori_loop(0, 3, trip, x)
        self.scale.assign(self.scale * 0.5)
        return x


def recurrent():
    """Kinds of recurrent layers after each other, one of them with a state."""
    cells = [layers.GRUCell(4, dropout=0.3, seed=1), layers.LSTMCell(8)]
    return [
        layers.Reshape((4, 2, 4, 1)),
        layers.ConvLSTM2D(2, 2, return_sequences=True),
        layers.TimeDistributed(layers.Flatten()),
        layers.Masking(),
        layers.GRU(4, return_sequences=True, recurrent_dropout=0.2, seed=1),
        layers.Bidirectional(layers.SimpleRNN(4, return_sequences=True)),
        layers.RNN(cells, return_sequences=True),
        layers.LSTM(6, stateful=True, kernel_regularizer="l2"),
    ]


def loops_of(inside, batch_size=None):
    """A model with a block of what `inside` gives, whose first layer is shared."""
    keras.utils.set_random_seed(5)
    inputs = keras.Input((4, 8), batch_size)
    shared = layers.Dense(8, "tanh")
    block = keras.Sequential([shared, *inside()], name="block")
    hidden = block(shared(layers.Dense(8)(inputs)))
    return keras.Model(inputs, layers.Dense(3)(layers.Flatten()(hidden)))


def gradients(model, watched, mode, x=SEQUENCES):
    """Loss, gradients and state after one step, by a tape that watches by name or not."""
    values = [v.value for v in model.trainable_variables]

    def step(x):
        with tf.GradientTape(watch_accessed_variables=not watched) as tape:
            if watched:
                tape.watch(values)
            loss = tf.reduce_mean(tf.square(model(x, training=True) - Y[: x.shape[0]]))
            loss += sum(model.losses)
        return loss, tape.gradient(loss, values)

    loss, found = in_mode(step, mode)(tf.constant(x))
    return [loss, *found], [v.numpy() for v in model.non_trainable_variables]


BLOCKS = {
    "recurrent": lambda: loops_of(recurrent, batch_size=12),
    "ops": lambda: loops_of(lambda: [Ops()]),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, watched",
    [
        ("ops", True),
        ("ops", False),
        # As the layer of the test below.
        pytest.param("recurrent", True, marks=pytest.mark.slow),
    ],
)
def test_weights_that_loops_and_branches_read(kind, watched):
    model, plain = BLOCKS[kind](), BLOCKS[kind]()
    before = [v.numpy() for v in plain.non_trainable_variables]
    ka.recompute(model, "block")
    found, moved = gradients(model, watched, "graph")
    expected, expected_moved = gradients(plain, watched, "graph")
    assert_close(found, expected, 2e-6)
    assert_close(moved, expected_moved, 2e-6)
    assert_differ(moved, before)
    assert all(np.abs(gradient).max() > 0 for gradient in found)


@pytest.mark.slow
@pytest.mark.slow_in("xla")
@pytest.mark.parametrize("mode", ["graph", "xla"])
def test_a_recurrent_layer_in_a_loop_over_micro_batches(mode):
    kind = layers.GRU if mode == "graph" else layers.SimpleRNN  # Compiles sooner.

    def make():
        return loops_of(lambda: [kind(6, dropout=0.2, seed=1), layers.Dense(4)])

    def trained(switch):
        model = make()
        if switch:
            ka.recompute(model, "block")
        ka.accumulate(model, accum_steps=2)
        model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=mode == "xla")
        loss = [model.train_on_batch(SEQUENCES, Y[:12]) for _ in range(2)]
        state = [v.numpy() for v in model.non_trainable_variables]
        return model.get_weights(), [*state, loss]

    (weights, rest), (expected, expected_rest) = trained(True), trained(False)
    assert_close([*weights, *rest], [*expected, *expected_rest], 2e-6)
    assert_differ(weights, make().get_weights())


class Functions(layers.Layer):
    """Calls `inside(layer, x)` in a `tf.function`, the same each time or another one."""

    def __init__(self, inside, after=lambda layer: None, lives_on=True):
        super().__init__(name="held")
        self.make = lambda: tf.function(lambda x: inside(self, x), autograph=False)
        self.function = self.make()
        self.after, self.lives_on = after, lives_on
        self.dense = layers.Dense(8, "tanh")

    def build(self, input_shape):
        self.dense.build(input_shape)
        self.scale = self.add_weight(initializer="ones", trainable=False, name="scale")
        self.variable = tf.Variable(1.0, trainable=False)

    def call(self, x):
        x = (self.function if self.lives_on else self.make())(tf.tanh(x))
        self.after(self)
        return tf.tanh(x)


class Model(keras.Model):
    """Subclassed: Keras calls nothing in it to learn shapes."""

    def __init__(self, *args, **kwargs):
        super().__init__()
        keras.utils.set_random_seed(5)
        self.first, self.held = layers.Dense(8), Functions(*args, **kwargs)
        self.first.build((None, 8))
        self.held.build((None, 8))
        self.built = True

    def call(self, x):
        return self.held(self.first(x))


def trained(model, mode):
    """Losses and gradients of steps with states and shapes that differ."""
    values = [v.value for v in model.trainable_variables]

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True))
        return loss, tape.gradient(loss, values, unconnected_gradients="zero")

    step, found = in_mode(step, mode), []
    for rows in (12, 12, 5):
        loss, gradients = step(tf.constant(X[:rows]))
        found += [loss, *gradients]
        model.held.scale.assign(model.held.scale + 1.0)
        model.held.variable.assign_add(1.0)
    return found


def halves(layer):
    layer.scale.assign(layer.scale * 0.5)


FUNCTIONS = {
    "weights": lambda layer, x: layer.dense(x) * layer.scale,
    "in a loop": lambda layer, x: keras.ops.map(
        lambda row: layer.dense(row[None])[0] * layer.scale, x
    ),
}


@pytest.mark.slow_but("weights-graph")
@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_functions_that_each_call_makes(kind, mode):
    after = halves if mode == "graph" else lambda layer: None
    model, plain = (Model(FUNCTIONS[kind], after, lives_on=False) for _ in range(2))
    ka.recompute(model, "held")
    found = trained(model, mode)
    assert_close(found, trained(plain, mode))
    assert all(np.abs(gradient).max() > 0 for gradient in found)
    assert_differ(found[0], found[5])


@pytest.mark.slow_in("xla", "graph")
@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
def test_vectorized_map_which_makes_functions(mode):
    inside = lambda layer, x: keras.ops.vectorized_map(  # noqa: E731
        lambda row: layer.dense(row[None])[0], x
    )
    model, plain = (Model(lambda layer, x: x, lambda layer: None) for _ in range(2))
    for each in (model, plain):
        each.held.function = lambda x, layer=each.held: inside(layer, x)
    ka.recompute(model, "held")
    assert_close(trained(model, mode), trained(plain, mode), 2e-6)


def test_functions_in_blocks_inside_of_blocks():
    def make():
        model = Model(FUNCTIONS["weights"], halves, lives_on=False)
        inner = keras.Sequential([model.held], name="inner")
        model.held, model.outer = inner.layers[0], keras.Sequential([inner], name="outer")
        model.call = lambda x: model.outer(model.first(x))
        model(X)
        return model

    model = make()
    ka.recompute(model, "inner")
    ka.recompute(model, "outer")
    assert_close(trained(model, "graph"), trained(make(), "graph"))


@pytest.mark.slow_in("eager")
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_function_that_lives_on_reads_a_state_as_it_is(mode):
    inside = lambda layer, x: x * layer.scale * layer.variable  # noqa: E731
    model, plain = Model(inside), Model(inside)
    for each in (model, plain):
        for rows in (12, 5):
            each(tf.constant(X[:rows]))  # Traces it.
    ka.recompute(model, "held")
    found = trained(model, mode)
    assert_close(found, trained(plain, mode))
    assert_differ(found[0], found[5])


KEEPS = (
    "'held' reads ['{path}'] in a `tf.function` that is traced once. It would hold the "
    "values of the first pass in the second, without their gradients. Remove the "
    "`tf.function`: Keras compiles the whole training step."
)
CAPTURES = (
    "'held' uses something that needs a gradient and is not an argument of its call: a "
    "tensor from outside, a `tf.Variable` that is no Keras weight, or the weights of a "
    "`tf.function`. Recomputed, it would get no gradient. Pass the tensor as an argument, "
    "make the variable a Keras weight, remove the `tf.function`, or recompute a layer "
    "around both."
)
MOVES = (
    "'held' assigns to ['{path}'] and reads it in a `tf.function`. The second pass would "
    "read the new value. Remove the `tf.function`: Keras compiles the whole training "
    "step."
)


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("traced_before", [False, True])
@pytest.mark.parametrize("moves", [False, True])
def test_a_function_that_lives_on(moves, traced_before, mode):
    """It may know the weights, or the state, of the pass that traced it."""
    inside = (lambda layer, x: x * layer.scale) if moves else FUNCTIONS["weights"]
    model = Model(inside, halves if moves else lambda layer: None)
    if traced_before:
        model(tf.constant(X[:12]))
    ka.recompute(model, "held")
    # In eager mode the check of its operations traces it before.
    first = mode == "graph" and not traced_before
    message = KEEPS if first else MOVES if moves else CAPTURES
    paths = [model.held.scale.path]
    if first and not moves:
        paths = [v.path for v in [*model.held.dense.variables, model.held.scale]]
    refused(lambda: trained(model, mode), message.replace("['{path}']", str(paths)))


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("kind", ["AssignVariableOp", "AssignAddVariableOp"])
def test_assignments_that_keras_does_not_see(kind, mode):
    model = {
        "AssignVariableOp": lambda: Model(
            lambda layer, x: x, lambda layer: layer.variable.assign(2.0)
        ),
        "AssignAddVariableOp": lambda: Model(
            lambda layer, x: x + layer.variable.assign_add(1.0)
        ),
    }[kind]()
    ka.recompute(model, "held")
    refused(
        lambda: trained(model, mode),
        "'held' assigns to a `tf.Variable`, or to a weight inside of a `tf.function` "
        f"({kind}). Recomputed, it would assign twice. Create the state by "
        "`add_weight(trainable=False)`, and assign to it outside of any `tf.function`.",
    )
