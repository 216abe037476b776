"""`AccumBatchNormalization`: statistics of a window, against those of the large batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    Batches,
    assert_close,
    assert_differ,
    assert_equal,
    assert_refused,
    compile_in,
    data,
    fit,
    since_keras,
)

import keras_accum as ka

PLAIN, POOLED = keras.layers.BatchNormalization, ka.AccumBatchNormalization

# Float32 sums of squares; the variance is a difference of them in Keras.
STATISTICS = 2e-6


def sgd():
    return keras.optimizers.SGD(0.1)


def model_of(layer, features=5, **options):
    """A model whose first layer normalises: its statistics are those of the data."""
    keras.utils.set_random_seed(1)
    norm = layer(name="norm", **options)
    dense = keras.layers.Dense(3, name="dense")
    return keras.Sequential([keras.Input((features,)), norm, dense])


def shifted(samples=22):
    """Data whose mean and scale drift, so that micro-batches are unlike each other."""
    x, y = data(samples)
    drift = np.linspace(-2, 3, samples, dtype="float32")[:, None]
    return x * (1 + drift**2) + 3 * drift, y


def moving(model):
    norm = model.get_layer("norm")
    return [norm.moving_mean.numpy(), norm.moving_variance.numpy()]


def large_batch(x, y, size, epochs=1, **options):
    model = compile_in(model_of(PLAIN, **options), "graph", sgd())
    fit(model, x, y, size, epochs)
    return model


def route_1(layer, x, y, sizes, steps, mode="graph", epochs=1, **options):
    model = compile_in(model_of(layer, **options), mode, ka.AccumOptimizer(sgd(), steps))
    fit(model, Batches(sizes, x, y), None, None, epochs)
    return model


def route_2(layer, x, y, size, mode="graph", epochs=1, two_pass=False, **options):
    model = ka.accumulate(model_of(layer, **options), accum_steps=3, two_pass=two_pass)
    fit(compile_in(model, mode, sgd()), x, y, size, epochs)
    return model


# --------------------------------------------------------------------- pooled statistics


@pytest.mark.slow_in("xla", "eager", "0.0")
@pytest.mark.parametrize(
    ("momentum", "mode"), [(0.99, "graph"), (0.5, "eager"), (0.5, "xla"), (0.0, "graph")]
)
def test_statistics_over_windows_of_the_optimizer_are_those_of_the_large_batch(
    momentum, mode
):
    x, y = shifted()
    sizes = [5, 4, 2, 1, 7, 3]
    model = route_1(POOLED, x, y, sizes, 3, mode, 2, momentum=momentum)
    oracle = large_batch(x, y, 11, 2, momentum=momentum)
    assert_close(moving(model), moving(oracle), STATISTICS)
    control = route_1(PLAIN, x, y, sizes, 3, "graph", 2, momentum=momentum)
    assert_differ(moving(control), moving(oracle))


@pytest.mark.slow
@pytest.mark.slow_in("xla")
@pytest.mark.parametrize(
    ("momentum", "two_pass", "mode"),
    [
        (0.99, False, "graph"),
        (0.5, False, "eager"),
        (0.5, False, "xla"),
        (0.99, True, "eager"),
        (0.5, True, "graph"),
    ],
)
def test_statistics_inside_of_the_step_are_those_of_the_large_batch(
    momentum, two_pass, mode
):
    x, y = shifted()
    options = {"momentum": momentum}
    model = route_2(POOLED, x, y, 11, mode, 2, two_pass, **options)
    oracle = large_batch(x, y, 11, 2, **options)
    assert_close(moving(model), moving(oracle), STATISTICS)
    control = route_2(PLAIN, x, y, 11, "graph", 2, two_pass, **options)
    assert_differ(moving(control), moving(oracle))


@pytest.mark.slow
@pytest.mark.parametrize("two_pass", [False, True])
@pytest.mark.parametrize("how", ["eager", "graph"])
def test_statistics_over_windows_of_windows_are_those_of_the_large_batch(how, two_pass):
    x, y = shifted()
    sizes = [7, 4, 9, 2]
    models = {}
    for layer in (POOLED, PLAIN):
        model = ka.accumulate(
            model_of(layer, momentum=0.6), accum_steps=3, two_pass=two_pass
        )
        compile_in(model, how, ka.AccumOptimizer(sgd(), 2))
        fit(model, Batches(sizes, x, y), None, None, 2)
        models[layer] = model
    oracle = large_batch(x, y, 11, 2, momentum=0.6)
    assert_close(moving(models[POOLED]), moving(oracle), STATISTICS)
    assert_differ(moving(models[PLAIN]), moving(oracle))


@pytest.mark.slow
def test_several_outputs_do_not_count_a_batch_twice():
    """Where the denominators of the losses come from a pass before."""
    x, y = shifted()

    def make(layer):
        plain = model_of(layer, momentum=0.6)
        more = keras.layers.Dense(1, name="more")(plain.get_layer("norm").output)
        return keras.Model(plain.inputs, {"dense": plain.outputs[0], "more": more})

    targets = {"dense": y, "more": y[:, :1]}
    loss = keras.losses.MeanSquaredError("mean_with_sample_weight")
    weights = {"dense": np.ones(22, "float32"), "more": np.linspace(0, 2, 22)}
    model = ka.accumulate(make(POOLED), accum_steps=3)
    oracle = make(PLAIN)
    for each in (model, oracle):
        losses = {"dense": loss, "more": loss}
        compile_in(each, "graph", sgd(), losses)
        fit(each, x, targets, 11, 2, sample_weight=weights)
    assert_close(moving(model), moving(oracle), STATISTICS)


def test_micro_batches_are_normalised_by_their_own_statistics():
    """As BatchNormalization does: the gradient is its, and not the large batch's."""
    x, y = shifted(11)
    model = route_2(POOLED, x, y, 11)
    plain = route_2(PLAIN, x, y, 11)
    oracle = large_batch(x, y, 11)
    assert_close(model.trainable_weights, plain.trainable_weights)
    assert_differ(model.trainable_weights, oracle.trainable_weights)


@pytest.mark.slow_in("2")
@pytest.mark.parametrize("route", [1, 2])
def test_masked_entries_are_left_out(route):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(22, 6, 4)).astype("float32")
    x *= 1 + np.arange(22, dtype="float32")[:, None, None] / 5
    for row, length in enumerate(rng.integers(1, 7, size=22)):
        x[row, length:] = 0
    x[:3, 1:] = 0
    y = rng.normal(size=(22, 6, 2)).astype("float32")

    def make(layer):
        keras.utils.set_random_seed(1)
        norm = layer(name="norm", momentum=0.6)
        parts = [keras.layers.Masking(), norm, keras.layers.Dense(2)]
        return keras.Sequential([keras.Input((6, 4)), *parts])

    oracle = compile_in(make(PLAIN), "graph", sgd())
    fit(oracle, x, y, 11, 2)
    results = {}
    for layer in (POOLED, PLAIN):
        model = make(layer)
        if route == 2:
            compile_in(ka.accumulate(model, accum_steps=3), "graph", sgd())
            fit(model, x, y, 11, 2)
        else:
            compile_in(model, "graph", ka.AccumOptimizer(sgd(), 3))
            fit(model, Batches([5, 4, 2, 1, 7, 3], x, y), None, None, 2)
        results[layer] = moving(model)
    assert_close(results[POOLED], moving(oracle), STATISTICS)
    assert_differ(results[PLAIN], moving(oracle))


@pytest.mark.slow
@pytest.mark.parametrize("axis", [1, -1])
def test_images_with_channels_anywhere_are_exact(axis):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(22, 3, 4, 2)).astype("float32")
    x *= 1 + np.arange(22, dtype="float32")[:, None, None, None] / 5
    x += np.arange(x.shape[axis], dtype="float32").reshape(
        (1, -1, 1, 1) if axis == 1 else (1, 1, 1, -1)
    )
    y = rng.normal(size=(22, 1)).astype("float32")

    def make(layer):
        keras.utils.set_random_seed(1)
        norm = layer(name="norm", momentum=0.6, axis=axis)
        parts = [norm, keras.layers.Flatten(), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input((3, 4, 2)), *parts])

    model = compile_in(ka.accumulate(make(POOLED), accum_steps=3), "graph", sgd())
    oracle = compile_in(make(PLAIN), "graph", sgd())
    for each in (model, oracle):
        fit(each, x, y, 11, 2)
    assert_close(moving(model), moving(oracle), STATISTICS)


@pytest.mark.slow_in("1")
@pytest.mark.parametrize("route", [1, 2])
def test_mixed_precision_pools_in_float32(route):
    keras.config.set_dtype_policy("mixed_float16")
    x, y = shifted()
    x = x / 4
    options = {"momentum": 0.6}
    if route == 1:
        model = route_1(POOLED, x, y, [5, 4, 2, 1, 7, 3], 3, epochs=2, **options)
    else:
        model = route_2(POOLED, x, y, 11, epochs=2, **options)
    oracle = large_batch(x, y, 11, 2, **options)
    assert {v.dtype for v in model.get_layer("norm").weights} == {"float32"}
    # Keras takes the statistics of a float16 input in float32.
    assert_close(moving(model), moving(oracle), 1e-5)


# ------------------------------------------------------------------------ window corners


@pytest.mark.slow_but("bfloat16")
@pytest.mark.parametrize("policy", ["float16", "bfloat16", "float64"])
def test_every_dtype_of_weights_pools(policy):
    """The moving statistics are of the policy's dtype, the window's of float32 at least."""
    x, y = shifted()
    options = {"dtype": policy, "momentum": 0.5}
    model = route_2(POOLED, x, y, 22, "eager", **options)
    oracle = moving(large_batch(x, y, 22, **options))
    held = [v.dtype for v in model.get_layer("norm")._open_window.weights]
    assert held == ["float64" if policy == "float64" else "float32"] * 5
    assert moving(model)[0].dtype == oracle[0].dtype
    close = {"float16": 2e-3, "bfloat16": 2e-2, "float64": STATISTICS}[policy]
    assert_close(moving(model), oracle, close)
    assert_differ(moving(route_2(PLAIN, x, y, 22, "eager", **options)), oracle, 3 * close)


def called_twice(layer):
    keras.utils.set_random_seed(1)
    shared, inputs = layer(name="norm"), [keras.Input((5,)), keras.Input((5,))]
    return keras.Model(inputs, keras.layers.Dense(3)(sum(map(shared, inputs))))


@pytest.mark.slow_in("2")
@pytest.mark.parametrize("route", [1, 2])
def test_a_layer_that_is_called_several_times_in_a_step_warns(route):
    """Keras moves its statistics at each call, by those of that call."""
    x, y = shifted()
    model = called_twice(POOLED)
    model([x, x], training=True)  # Is none of the step's calls in an accumulating model.
    if route == 1:
        model = called_twice(POOLED)
    optimizer = ka.AccumOptimizer(sgd(), 3) if route == 1 else sgd()
    if route == 2:
        ka.accumulate(model, accum_steps=3)
    compile_in(model, "eager", optimizer)
    with pytest.warns(UserWarning) as said:
        fit(model, [x, x + 1], y, 22, 3)
    ours = [warning for warning in said if warning.category is UserWarning]
    assert [str(warning.message) for warning in ours] == [
        "'norm' is called 2 times in a step. AccumBatchNormalization pools the last call "
        "only, so that its moving statistics are not those of the large batch, which move "
        "at each call. Use a layer of its own for each call, or freeze this one."
    ]


def test_an_open_window_holds_what_it_would_be_if_it_ended_there():
    x, y = shifted(11)
    model = route_1(POOLED, x, y, [5, 4, 2], 5, momentum=0.6)
    oracle = large_batch(x, y, 11, momentum=0.6)
    assert_close(moving(model), moving(oracle), STATISTICS)
    model.optimizer.flush()
    assert_close(moving(model), moving(oracle), STATISTICS)


def test_after_a_flush_a_new_window_begins():
    x, y = shifted()
    model = route_1(POOLED, x[:11], y[:11], [5, 4, 2], 5, momentum=0.6)
    model.optimizer.flush()
    fit(model, Batches([1, 7, 3], x[11:], y[11:]), None, None)
    oracle = large_batch(x, y, 11, momentum=0.6)
    assert_close(moving(model), moving(oracle), STATISTICS)


def test_a_tail_is_carried_into_the_next_epoch_with_its_statistics():
    x, y = shifted(11)
    model = route_1(POOLED, x, y, [5, 4, 2], 2, epochs=2, momentum=0.6)
    # Windows: 5 + 4, 2 + 5, 4 + 2.
    oracle = compile_in(model_of(PLAIN, momentum=0.6), "graph", sgd())
    for rows in ([*range(9)], [9, 10, *range(5)], [*range(5, 11)]):
        oracle.train_on_batch(x[rows], y[rows])
    assert_close(moving(model), moving(oracle), STATISTICS)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["weights", "model"])
def test_a_run_interrupted_in_a_window_resumes_exactly(how, tmp_path):
    x, y = shifted()
    sizes = [5, 4, 2, 1, 7, 3]
    whole = route_1(POOLED, x, y, sizes, 3, momentum=0.6)
    first = route_1(POOLED, x[:9], y[:9], sizes[:2], 3, momentum=0.6)
    if how == "model":
        first.save(tmp_path / "model.keras")
        resumed = keras.models.load_model(tmp_path / "model.keras")
    else:
        checkpoint = tf.train.Checkpoint(model=first, optimizer=first.optimizer)
        path = checkpoint.save(tmp_path / "checkpoint")
        resumed = compile_in(
            model_of(POOLED, momentum=0.6), "graph", ka.AccumOptimizer(sgd(), 3)
        )
        restored = tf.train.Checkpoint(model=resumed, optimizer=resumed.optimizer)
        restored.restore(path).assert_existing_objects_matched()
    assert int(resumed.optimizer.micro_step) == 2
    fit(resumed, Batches(sizes[2:], x[9:], y[9:]), None, None)
    assert_equal(resumed.get_weights(), whole.get_weights())
    # Without what the window held, it would have been another.
    fresh = model_of(POOLED, momentum=0.6)
    fresh.set_weights(first.get_weights())
    compile_in(fresh, "graph", ka.AccumOptimizer(sgd(), 3))
    fit(fresh, Batches(sizes[2:], x[9:], y[9:]), None, None)
    assert_differ(moving(fresh), moving(whole))


@pytest.mark.slow
def test_a_skipped_step_of_the_validation_data_leaves_the_window_alone():
    x, y = shifted()
    sizes = [5, 4, 2, 1, 7, 3]
    model = compile_in(
        model_of(POOLED, momentum=0.6), "graph", ka.AccumOptimizer(sgd(), 3)
    )
    for batch in Batches(sizes, x, y):
        model.train_on_batch(*batch)
        model.evaluate(x, y, verbose=0)
        model.predict(x, verbose=0)
    whole = route_1(POOLED, x, y, sizes, 3, momentum=0.6)
    assert_equal(moving(model), moving(whole))


# ------------------------------------------------------------------ as BatchNormalization


@pytest.mark.slow_in("graph")
@pytest.mark.slow_in("xla")
@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({}, "graph"),
        ({"momentum": 0.5}, "eager"),
        ({"momentum": 0.5}, "xla"),
        ({"scale": False}, "graph"),
    ],
)
def test_without_accumulation_it_is_batch_normalization(options, mode):
    x, y = shifted()
    models = [
        compile_in(model_of(layer, **options), mode, sgd()) for layer in (POOLED, PLAIN)
    ]
    for model in models:
        fit(model, x, y, 7, 2)
    assert_equal(models[0].trainable_weights, models[1].trainable_weights)
    assert_equal(moving(models[0]), moving(models[1]))
    assert_equal(*(model.predict(x, verbose=0) for model in models))


def test_a_window_of_one_is_batch_normalization():
    x, y = shifted()
    model = route_1(POOLED, x, y, [5, 4, 2, 1, 7, 3], 1, momentum=0.6)
    plain = route_1(PLAIN, x, y, [5, 4, 2, 1, 7, 3], 1, momentum=0.6)
    assert_close(model.trainable_weights, plain.trainable_weights)
    assert_close(moving(model), moving(plain))


def test_a_frozen_layer_normalises_by_what_it_has_and_moves_nothing():
    x, y = shifted()

    def make(layer):
        model = model_of(layer)
        model.get_layer("norm").moving_mean.assign(np.arange(5.0))
        model.get_layer("norm").trainable = False
        return model

    for route in (1, 2):
        models = [make(POOLED), make(PLAIN)]
        for model in models:
            if route == 2:
                compile_in(ka.accumulate(model, accum_steps=3), "graph", sgd())
                fit(model, x, y, 11)
            else:
                compile_in(model, "graph", ka.AccumOptimizer(sgd(), 3))
                fit(model, Batches([5, 4, 2], x, y), None, None)
        assert_equal(moving(models[0]), moving(make(POOLED)))
        assert_close(models[0].trainable_weights, models[1].trainable_weights)


def test_it_begins_with_the_weights_of_batch_normalization():
    ours, plain = model_of(POOLED).get_layer("norm"), model_of(PLAIN).get_layer("norm")
    names = [w.name for w in plain.weights]
    assert [w.name for w in ours.weights[:4]] == names
    assert [w.name for w in ours.trainable_weights] == ["gamma", "beta"]


# ----------------------------------------------------------------- in a model that exists


class Holds(keras.Model):
    """Holds layers in attributes, a list and a dictionary."""

    def __init__(self, **config):
        super().__init__(**{"name": "holds", **config})
        self.norm = PLAIN(name="norm", momentum=0.6)
        self.parts = [PLAIN(name="second", momentum=0.6), keras.layers.Dense(3)]
        self.more = {"third": PLAIN(name="third", momentum=0.6)}

    def call(self, x, training=None):
        return self.parts[1](self.more["third"](self.parts[0](self.norm(x))))


def functional():
    inputs = keras.Input((5,))
    norm = PLAIN(name="norm", momentum=0.6)(inputs)
    shared = PLAIN(name="second", momentum=0.6, center=False)
    dense = keras.layers.Dense(3, activation="tanh")(shared(norm))
    return keras.Model(inputs, keras.layers.add([dense, keras.layers.Dense(3)(norm)]))


def nested():
    inner = functional()
    outer = [keras.Input((5,)), inner, PLAIN(momentum=0.6), keras.layers.Dense(3)]
    return keras.Sequential(outer)


def recomputed():
    block = keras.Sequential([PLAIN(name="norm", momentum=0.6), keras.layers.Dense(4)])
    parts = [keras.Input((5,)), ka.Recompute(block), keras.layers.Dense(3)]
    return keras.Sequential(parts)


def sequential():
    return model_of(PLAIN, momentum=0.6)


KINDS = (sequential, functional, nested, Holds, recomputed)


def norms(model):
    layers = model._flatten_layers()
    return [layer for layer in layers if isinstance(layer, PLAIN)]


@pytest.mark.slow_in("options0")
@pytest.mark.parametrize(
    "options", [{"momentum": 0.6, "epsilon": 0.1}, {"center": False, "scale": False}]
)
def test_a_converted_clone_keeps_its_weights_and_settings(options):
    x, y = shifted()
    layers = [keras.Input((5,)), keras.layers.Dense(3), PLAIN(name="norm", **options)]
    model = fit_eagerly(keras.Sequential(layers), x, y)
    clone = keras.models.clone_model(model, clone_function=POOLED.convert)
    norm, plain = clone.get_layer("norm"), model.get_layer("norm")
    assert type(norm) is POOLED
    assert_equal(norm.get_weights()[: len(plain.weights)], plain.get_weights())
    assert_equal(clone.predict(x, verbose=0), model.predict(x, verbose=0))
    fresh = keras.models.clone_model(model)
    assert_differ(fresh.predict(x, verbose=0), model.predict(x, verbose=0))
    config = plain.get_config()
    assert {k: v for k, v in norm.get_config().items() if k in config} == config


def test_a_layer_that_is_not_built_and_one_of_another_kind_are_converted_too():
    assert type(POOLED.convert(PLAIN(momentum=0.3))) is POOLED
    assert POOLED.convert(PLAIN(momentum=0.3)).momentum == 0.3
    other = keras.layers.Dense(3, "tanh", name="dense")
    copy = POOLED.convert(other)
    assert copy is not other
    assert copy.get_config() == other.get_config()
    assert type(POOLED.convert(POOLED(momentum=0.4))) is POOLED


def test_a_frozen_layer_stays_frozen_when_converted():
    layer = PLAIN(name="norm")
    layer.build((None, 5))
    layer.trainable = False
    assert POOLED.convert(layer).trainable is False


def trained(make):
    """A model whose statistics and weights are those of some training."""
    x, y = shifted()
    keras.utils.set_random_seed(1)
    model = make()
    model(x[:1])
    return fit_eagerly(model, x, y)


def fit_eagerly(model, x, y, epochs=1):
    compile_in(model, "eager", sgd())
    fit(model, x, y, 11, epochs)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_replaced_layers_predict_to_the_bit_and_pool_their_statistics(make):
    x, y = shifted()
    models = {name: trained(make) for name in ("large", "pooled", "plain")}
    pooled = models["pooled"]
    before, layers = pooled.predict(x, verbose=0), norms(pooled)
    names = [w.path for w in pooled.trainable_weights]
    assert ka.replace_batch_normalization(pooled) is pooled
    assert_equal(pooled.predict(x, verbose=0), before)
    assert_equal(before, models["large"].predict(x, verbose=0))
    assert [w.path for w in pooled.trainable_weights] == names
    assert norms(pooled) == layers
    assert all(isinstance(layer, POOLED) for layer in layers)
    # The statistics of "norm" are those of the data, whatever the weights.
    for name, model in models.items():
        if name != "large":
            ka.accumulate(model, accum_steps=3)
        fit_eagerly(model, x, y)
    held = {name: moving_inside(model) for name, model in models.items()}
    assert_close(held["pooled"], held["large"], STATISTICS)
    assert_differ(held["plain"], held["large"])


def moving_inside(model):
    (norm,) = [layer for layer in norms(model) if layer.name == "norm"]
    return [norm.moving_mean.numpy(), norm.moving_variance.numpy()]


def test_a_model_with_replaced_layers_saves_and_loads(tmp_path):
    x, y = shifted()
    model = ka.replace_batch_normalization(trained(nested))
    fit_eagerly(ka.accumulate(model, accum_steps=3), x, y)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert all(isinstance(layer, POOLED) for layer in norms(loaded))
    assert_equal(loaded.get_weights(), model.get_weights())
    assert_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))


def test_a_replaced_layer_keeps_its_settings_and_stays_frozen():
    model = functional()
    norm = model.get_layer("second")
    norm.trainable, config = False, norm.get_config()
    ka.replace_batch_normalization(model)
    assert model.get_layer("second") is norm and isinstance(norm, POOLED)
    assert norm.get_config() == {**config, "trainable": False}
    assert not norm.trainable_weights and norm.beta is None
    ka.replace_batch_normalization(model)  # The second time, nothing is left to do.
    assert len(norm.weights) == 3 + 5


@pytest.mark.slow_but("sequential")
@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_with_its_layers_frozen_a_model_accumulates_as_the_large_batch(make):
    x, y = shifted()
    models = {name: trained(make) for name in ("large", "accumulating", "control")}
    for name, model in models.items():
        if name != "control":
            ka.replace_batch_normalization(model, freeze=True)
        if name != "large":
            ka.accumulate(model, accum_steps=3)
        fit_eagerly(model, x, y, 2)
    weights = {name: model.get_weights() for name, model in models.items()}
    assert {type(layer) for layer in norms(models["accumulating"])} == {PLAIN}
    assert_close(weights["accumulating"], weights["large"], 2e-6)
    assert_differ(weights["control"], weights["large"])


class Own(PLAIN):
    pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Holds(),
            "'holds' is not built: layers that it makes when it is built could not be "
            "replaced. Call it on a sample before, `model(x[:1])`.",
        ),
        (
            lambda: model_of(Own),
            "'norm' is a Own, a subclass of BatchNormalization, whose statistics may be "
            "its own. Derive it from AccumBatchNormalization, or write "
            "`replace_batch_normalization(model, freeze=True)`.",
        ),
        (
            lambda: recomputing("norm"),
            "The call of 'norm' is recomputed. Call `recompute` after "
            "`replace_batch_normalization`.",
        ),
        pytest.param(
            lambda: model_of(PLAIN, renorm=True),
            "'norm' has `renorm=True`, whose statistics AccumBatchNormalization does not "
            "pool. Write `replace_batch_normalization(model, freeze=True)`.",
            marks=since_keras("3.14", "BatchNormalization(renorm=True)"),
        ),
    ],
    ids=["unbuilt", "subclass", "recomputed", "renorm"],
)
def test_what_cannot_be_replaced_is_refused(make, message):
    model = make()
    kinds = [type(layer) for layer in norms(model)]
    refuse = ka.replace_batch_normalization
    assert_refused(lambda: refuse(model), ValueError, message)
    assert [type(layer) for layer in norms(model)] == kinds


def recomputing(name):
    model = functional()
    ka.recompute(model, name)
    return model


def test_what_is_no_model_has_nothing_to_replace():
    assert_refused(
        lambda: ka.replace_batch_normalization(PLAIN(name="norm")),
        TypeError,
        "`model` must be a `keras.Model`. Received: <BatchNormalization name=norm, "
        "built=False>",
    )


def test_an_architecture_of_keras_predicts_to_the_bit():
    model = keras.applications.MobileNetV2((32, 32, 3), alpha=0.35, weights=None)
    rng = np.random.default_rng(0)
    for layer in norms(model):
        layer.moving_mean.assign(rng.normal(size=layer.moving_mean.shape))
        layer.moving_variance.assign(rng.uniform(0.5, 2, layer.moving_variance.shape))
    x = rng.normal(size=(2, 32, 32, 3)).astype("float32")
    before = model(x).numpy()
    ka.replace_batch_normalization(model)
    assert_equal(model(x).numpy(), before)
    assert len(norms(model)) == 52
    assert all(isinstance(layer, POOLED) for layer in norms(model))


@pytest.mark.slow_in("nested", "Holds")
@pytest.mark.parametrize(
    "make", [sequential, nested, Holds], ids=lambda make: make.__name__
)
@pytest.mark.parametrize("replaced_first", [True, False])
def test_files_of_weights_fit_a_model_before_and_after_it_is_replaced(
    make, replaced_first, tmp_path
):
    x, y = shifted()
    path = tmp_path / "model.weights.h5"
    saved, other = trained(make), trained(make)
    (ka.replace_batch_normalization(saved if replaced_first else other))
    fit_eagerly(ka.accumulate(saved, accum_steps=3), x, y)
    if not replaced_first:  # In an open window, of which the file holds nothing.
        other.compile(ka.AccumOptimizer(sgd(), 3), "mse", run_eagerly=True)
        other.train_on_batch(x[:5], y[:5])
    assert_differ(other.predict(x, verbose=0), saved.predict(x, verbose=0))
    saved.save_weights(path)
    other.load_weights(path)
    assert_equal(other.predict(x, verbose=0), saved.predict(x, verbose=0))
    for layer in norms(other) if not replaced_first else ():
        assert_equal(layer._open_window.base_mean.numpy(), layer.moving_mean.numpy())
        assert layer._open_window.count.numpy() == 0


def test_a_class_that_makes_its_layers_anew_loads_what_it_saved(tmp_path):
    x, y = shifted()
    model = ka.replace_batch_normalization(trained(Holds))
    fit_eagerly(model, x, y)
    model.save(tmp_path / "model.keras")
    objects = {"Holds": Holds}
    loaded = keras.models.load_model(tmp_path / "model.keras", custom_objects=objects)
    assert {type(layer) for layer in norms(loaded)} == {PLAIN}
    assert_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))


# --------------------------------------------------------------------------------- config


def test_a_config_goes_round():
    options = {"axis": 1, "momentum": 0.3, "epsilon": 0.2, "center": False}
    layer = POOLED(**options, name="mine", beta_initializer="ones")
    again = POOLED.from_config(layer.get_config())
    assert again.get_config() == layer.get_config()
    for name, value in options.items():
        assert getattr(again, name) == value
    config = keras.saving.serialize_keras_object(layer)
    assert config["registered_name"] == "keras_accum>AccumBatchNormalization"
    assert type(keras.saving.deserialize_keras_object(config)) is POOLED


def test_a_saved_model_loads_without_being_told_the_class(tmp_path):
    x, y = shifted()
    model = route_2(POOLED, x, y, 11, momentum=0.6)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.get_layer("norm")) is POOLED
    assert_equal(loaded.get_weights(), model.get_weights())
    assert_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))


@since_keras("3.14", "BatchNormalization(renorm=True)")
def test_renormalization_is_refused():
    assert_refused(
        lambda: POOLED(renorm=True),
        ValueError,
        "AccumBatchNormalization does not pool the statistics of batch "
        "renormalization. Received: renorm=True. Use "
        "`keras.layers.BatchNormalization(renorm=True)`, which moves them per "
        "micro-batch.",
    )
