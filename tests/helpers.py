"""Comparisons that raise, and small models and data for them.

Data are unequal on purpose: batch sizes, lengths and weights differ, so that mean, sum,
first, last and maximum all differ, and so do a weighted mean and a plain one.
"""

from itertools import pairwise

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_accum as ka

SAMPLES = 26


def since_keras(version, what):
    """Mark a test of what Keras has from `version` on, to be skipped on an older one."""
    older = _numbers(keras.__version__) < _numbers(version)
    reason = f"{what} came with Keras {version}; this is {keras.__version__}"
    return pytest.mark.skipif(older, reason=reason)


def _numbers(version):
    return [int(part) for part in version.split(".")[:2]]


def assert_close(actual, expected, rtol=1e-6, what=""):
    """Raise unless two lists of arrays agree to `rtol` of each array's largest value."""
    actual, expected = _arrays(actual), _arrays(expected)
    assert len(actual) == len(expected), (
        f"{what}: {len(actual)} != {len(expected)} arrays"
    )
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert a.shape == e.shape, f"{what}[{i}]: shape {a.shape} != {e.shape}"
        np.testing.assert_allclose(
            a, e, rtol=rtol, atol=rtol * np.abs(e).max(initial=0), err_msg=f"{what}[{i}]"
        )


def assert_differ(actual, expected, by=1e-3, what=""):
    """Raise unless some array differs by more than `by` of its largest value."""
    pairs = list(zip(_arrays(actual), _arrays(expected), strict=True))
    gap = max(np.abs(a - e).max() / max(np.abs(e).max(), 1e-30) for a, e in pairs)
    assert gap > by, f"{what}: differ by {gap:.1e} only, the control proves nothing"


def assert_equal(actual, expected, what=""):
    """Raise unless two lists of arrays are the same to the bit."""
    for i, (a, e) in enumerate(zip(_arrays(actual), _arrays(expected), strict=True)):
        np.testing.assert_array_equal(a, e, err_msg=f"{what}[{i}]")


def _arrays(values):
    if isinstance(values, (list, tuple)):
        return [np.asarray(keras.ops.convert_to_numpy(value)) for value in values]
    return [np.asarray(keras.ops.convert_to_numpy(values))]


def data(samples=SAMPLES, features=5, outputs=3, seed=0):
    """Random inputs and targets, float32, of scale 1."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(samples, features)).astype("float32")
    y = rng.normal(size=(samples, outputs)).astype("float32")
    return x, y


def dense_model(features=5, outputs=3, **options):
    """A small regression model, the same at each call."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((features,))
    hidden = keras.layers.Dense(8, "tanh", **options)(inputs)
    return keras.Model(inputs, keras.layers.Dense(outputs, **options)(hidden))


def is_plain(model, optimizer):
    """Whether nothing of this package accumulates: an oracle, or a control."""
    return not (
        isinstance(optimizer, ka.AccumOptimizer) or hasattr(model, "accumulation")
    )


def compile_in(model, mode, optimizer, loss="mse", plain_too=False, **options):
    """Compile `model` to run its steps in `mode`: "eager", "graph" or "xla".

    Plain Keras runs eagerly, unless `plain_too`: tracing takes longer than a few steps.
    """
    if is_plain(model, optimizer) and not plain_too:
        mode = "eager"
    # Built here: ScheduleFreeAdamW, built by Keras while tracing, starts from zeros.
    optimizer.build(model.trainable_variables)
    model.compile(
        optimizer,
        loss=loss,
        run_eagerly=mode == "eager",
        jit_compile=mode == "xla",
        **options,
    )
    return model


def fit(model, x, y, batch_size, epochs=1, **options):
    """Train in the order of the data, silently; returns the History."""
    return model.fit(
        x, y, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0, **options
    )


def slots(optimizer):
    """The state of a plain optimizer, or of the one inside of a wrapper, as arrays."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return [v.numpy() for v in inner.variables]


class Batches(keras.utils.PyDataset):
    """Batches of the given sizes, in order: `Batches([4, 4, 2], x, y)`."""

    def __init__(self, sizes, *arrays):
        super().__init__()
        self.bounds = np.cumsum([0, *sizes])
        self.arrays = arrays

    def __len__(self):
        return len(self.bounds) - 1

    def __getitem__(self, i):
        rows = slice(self.bounds[i], self.bounds[i + 1])
        return tuple(array[rows] for array in self.arrays)


def in_mode(function, mode):
    """`function` as it runs in `mode`: as it is, in a graph, or compiled by XLA."""
    if mode == "eager":
        return function
    return tf.function(function, jit_compile=mode == "xla", autograph=False)


def state(optimizer):
    """Copies of all variables of an optimizer, the open window's included."""
    return [v.numpy().copy() for v in optimizer.variables]


def variable(*values, dtype="float32", name=None):
    """A trainable vector."""
    return keras.Variable(np.array(values), dtype=dtype, name=name)


def assert_refused(function, error, message):
    """Raise unless `function()` raises `error` with exactly `message`."""
    try:
        function()
    except error as caught:
        assert str(caught) == message
    else:
        raise AssertionError(f"nothing was raised, instead of: {message}")


def told(caught):
    """The texts of the warnings for users that `pytest.warns` has caught."""
    return [str(w.message) for w in caught if w.category is UserWarning]


def train_twice(make, arrays, mode="eager", split=None, *, optimizer=None, **how):
    """Two steps of `make()` on `arrays`, in micro-batches where there is a `split`.

    Args:
        make: gives a built model.
        arrays: as for `train_on_batch`.
        mode: as for `compile_in`.
        split: as for `accumulate`, or None for a plain step on all samples.
        optimizer: gives an optimizer; by default SGD with momentum.
        how: `options`, which gives more arguments of `compile`; `two_pass`; and the
            arguments of `train_on_batch`.

    Returns:
        The model, and the logs of the second step.
    """
    options, two_pass = how.pop("options", None), how.pop("two_pass", False)
    keras.utils.set_random_seed(11)
    model = make()
    if split is not None:
        ka.accumulate(model, **split, two_pass=two_pass)
    optimizer = optimizer() if optimizer else keras.optimizers.SGD(0.2, momentum=0.9)
    compile_in(model, mode, optimizer, **(options() if options else {}))
    for _ in range(2):
        logs = model.train_on_batch(*arrays, return_dict=True, **how)
    return model, logs


def mean_of_means(make, arrays, sizes, options=None):
    """`train_twice` as everyone else accumulates: the plain mean over micro-batches."""
    keras.utils.set_random_seed(11)
    optimizer = keras.optimizers.SGD(0.2, momentum=0.9)
    model = compile_in(make(), "eager", optimizer, **(options() if options else {}))
    values = [v.value for v in model.trainable_variables]
    bounds = np.cumsum([0, *sizes])
    for _ in range(2):
        found = []
        for first, last in pairwise(bounds):
            part = tf.nest.map_structure(lambda a: a[first:last], arrays)  # noqa: B023
            x, y, weight = keras.utils.unpack_x_y_sample_weight(part)
            with tf.GradientTape() as tape:
                loss = model.compute_loss(x, y, model(x, training=True), weight)
            found.append(tape.gradient(loss, values))
        mean = [tf.add_n([tf.convert_to_tensor(g) for g in gs]) for gs in zip(*found)]
        optimizer.apply([g / len(sizes) for g in mean], model.trainable_variables)
    return model


def assert_same_step(found, oracle, rtol=1e-6):
    """Raise unless two results of `train_twice` agree: all state, loss and metrics."""
    (model, logs), (expected, expected_logs) = found, oracle
    assert_close(model.get_weights(), expected.get_weights(), rtol, "weights")
    assert_close(slots(model.optimizer), slots(expected.optimizer), 10 * rtol, "slots")
    assert int(model.optimizer.iterations) == int(expected.optimizer.iterations)
    assert logs.keys() == expected_logs.keys()
    for name in logs:
        assert_close(logs[name], expected_logs[name], 2 * rtol, name)
