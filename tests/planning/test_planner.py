"""`plan`: what it takes, what it chooses, and what it refuses."""

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
    dense_model,
)
from planned import ROWS, Invented, batch, plan

import keras_accum as ka
from keras_accum._planning import planner as _planner
from keras_accum._planning.families import choices_of
from keras_accum._planning.measure import StepProfiler
from keras_accum._planning.plan import describe_trial
from keras_accum._planning.search import Patience, Trial

KIB, MIB = 2**10, 2**20


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    """Take the largest size that fits: looking for a faster one is for test_search.py."""
    monkeypatch.setattr(Patience, "lasts", lambda self, best: False)


@pytest.fixture
def invented(monkeypatch):
    """Memory and time by formulas: no step runs."""
    invented = Invented()
    monkeypatch.setattr(StepProfiler, "measure", invented)
    return invented


def small(optimizer=None, mode="eager"):
    return compile_in(dense_model(), mode, optimizer or keras.optimizers.SGD())


# ---------------------------------------------------------------------------- the plan


def test_the_micro_batches_make_the_batch():
    found = plan(small(mode="graph"))
    assert found.micro_batch_size * found.accum_steps == found.batch_size == ROWS
    assert found.replicas == found.window == 1
    assert found.held.total < found.peak_bytes <= found.budget_bytes == 2**30
    assert found.recompute is False
    chosen = [t for t in found.trials if t.micro_batch_size == found.micro_batch_size]
    assert [t.peak_bytes for t in chosen] == [found.peak_bytes]
    assert chosen[0].seconds == found.seconds > 0


WIDTH, LAYERS = 128, 2


@pytest.mark.slow
def test_less_memory_makes_smaller_micro_batches_and_the_peak_is_below():
    """Activations of 64 KiB a sample in each of 2 layers, and little else."""
    layers = [keras.layers.Dense(WIDTH, "tanh", use_bias=False) for _ in range(LAYERS)]
    model = keras.Sequential([keras.Input((128, WIDTH)), *layers])
    model.compile("sgd", "mse", jit_compile=True)
    rows, length = 4, 128
    samples = (np.ones((rows, length, WIDTH), "float32"),) * 2
    plenty = plan(model, samples, recompute=False)
    assert plenty.micro_batch_size == rows
    assert plenty.held.parameters == LAYERS * WIDTH * WIDTH * 4
    assert plenty.held.batch == 2 * rows * length * WIDTH * 4
    # Between the passes, the results of all layers are in memory.
    results = rows * length * LAYERS * WIDTH * 4
    assert plenty.peak_bytes - plenty.held.total > results
    room = plenty.peak_bytes - results // 2
    tight = plan(model, samples, budget=room, recompute=False)
    assert tight.micro_batch_size < rows
    assert tight.peak_bytes <= room == tight.budget_bytes


def test_each_trial_is_printed_if_asked_for(capsys, invented, monkeypatch):
    model = small()
    plan(model)
    assert capsys.readouterr().out == ""
    found = ka.plan(model, batch(), memory_budget="1GiB")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= len(found.trials)
    tried = "Tried micro-batches of 2, nothing recomputed: 2.0 MiB"
    assert any(line.startswith(tried) for line in lines)
    # A step that is not told from none has a bound only.
    monkeypatch.setattr(StepProfiler, "floor", 4 * MIB)
    ka.plan(model, batch(), memory_budget="1GiB")
    assert "2, nothing recomputed: below 4.0 MiB" in capsys.readouterr().out


def test_a_trial_in_a_line():
    def described(recompute, peak, seconds=None):
        return describe_trial(Trial(4, recompute, peak, seconds=seconds), least=2048)

    assert described(False, 3072) == "micro-batches of 4, nothing recomputed: 3.0 KiB"
    assert described("block_*", 2047, 0.25) == (
        "micro-batches of 4, 'block_*' recomputed: below 2.0 KiB, 0.250 s a step"
    )
    assert described(("a", "b"), None) == (
        "micro-batches of 4, 2 layers recomputed: out of memory"
    )


# ---------------------------------------------------------------------------- the batch

X, Y = data(6)


class Endless(keras.utils.PyDataset):
    num_batches = None

    def __getitem__(self, index):
        return list(batch(4))


def dataset(*arrays):
    return tf.data.Dataset.from_tensor_slices(arrays).batch(4)


def generator():
    yield X[:4], Y[:4]
    yield X[4:], Y[4:]


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: dataset(X, Y), id="tf.data"),
        pytest.param(
            lambda: dataset(X, Y).filter(lambda x, y: True), id="unknown length"
        ),
        pytest.param(lambda: dataset(X, Y).repeat(), id="infinite"),
        pytest.param(lambda: Batches([4, 2], X, Y), id="PyDataset"),
        pytest.param(generator, id="generator"),
        pytest.param(lambda: (X[:4], Y[:4]), id="arrays"),
        pytest.param(lambda: (tf.constant(X[:4]), tf.constant(Y[:4])), id="tensors"),
    ],
)
def test_the_first_batch_is_planned_for(make, invented):
    found = plan(small(), make())
    assert found.batch_size == 4
    x, y, weight = invented.batches[0]
    assert_equal([x, y], [X[:4], Y[:4]])
    assert weight is None


def test_a_data_set_is_planned_for_in_earnest():
    found = plan(small(mode="graph"), dataset(X, Y), batch_size=2)
    assert (found.batch_size, found.micro_batch_size) == (2, 2)
    assert found.peak_bytes > found.held.total


def test_a_generator_has_one_batch_less_afterwards(invented):
    batches = generator()
    plan(small(), batches)
    assert_equal(next(batches), (X[4:], Y[4:]))


def test_an_infinite_data_set_of_keras_is_asked_for_its_first_batch(invented):
    model = small()
    plan(model, Endless())
    assert_equal(invented.batches[0][:2], batch(4))


def test_reading_a_batch_does_not_move_random_state(invented):
    class Draws(Batches):
        def __getitem__(self, index):
            drawn.append(np.random.random())
            return super().__getitem__(index)

    drawn = []
    model = small()
    keras.utils.set_random_seed(4)
    plan(model, Draws([4, 2], X, Y))
    found = np.random.random()
    keras.utils.set_random_seed(4)
    assert found == np.random.random() == drawn[0]


def test_a_batch_is_converted_as_fit_does(invented):
    """Floats in arrays to floatx, those in a data set not; one weight for two outputs."""
    model = small()
    doubles = X.astype("float64"), Y.astype("float16")
    plan(model, doubles)
    plan(model, dataset(*doubles))
    dtypes = [[x.dtype, y.dtype] for x, y, _ in invented.batches]
    assert dtypes[0] == ["float32", "float32"]
    assert dtypes[-1] == ["float64", "float16"]
    inputs = keras.Input((5,))
    layer = keras.layers.Dense(3)
    two = keras.Model(inputs, [layer(inputs), layer(inputs)])
    two.compile("sgd", ["mse", "mse"], run_eagerly=True)
    plan(two, (X, (Y, Y), np.arange(6)))
    _, (first, second), weights = invented.batches[-1]
    assert_equal([first, second, *weights], [Y, Y, np.arange(6), np.arange(6)])


def test_samples_are_repeated_to_the_size_of_the_batch(invented):
    model = small()
    found = plan(model, batch(3), batch_size=4)
    assert found.batch_size == 4
    assert found.held.batch == 4 * (5 + 3) * 4
    x, _ = batch(3)
    assert_equal(invented.batches[-1][0], x[[0, 1, 2, 0]])
    found = plan(model, batch(4), batch_size=2)
    assert found.held.batch == 2 * (5 + 3) * 4


def test_nested_and_ragged_samples_are_planned_for():
    ragged = keras.Input((None,), dtype="int32", ragged=True, name="words")
    dense = keras.Input((2,), name="numbers")
    pooled = keras.layers.Lambda(
        lambda x: tf.reduce_mean(tf.cast(x, "float32"), 1, keepdims=True),
        output_shape=(1,),
    )(ragged)
    outputs = keras.layers.Dense(1)(keras.layers.Concatenate()([pooled, dense]))
    model = keras.Model({"words": ragged, "numbers": dense}, outputs)
    model.compile("sgd", "mse", run_eagerly=True)
    words = tf.ragged.constant([[1, 2, 3]])
    samples = {"words": words, "numbers": np.ones((1, 2))}
    found = plan(model, (samples, np.ones((1, 1)), np.ones(1)), batch_size=2)
    assert found.batch_size == 2


@pytest.mark.parametrize("data", [3, [[1, 2], [3]]])
def test_what_fit_does_not_take_is_refused(data):
    assert_refused(
        lambda: plan(small(), data),
        ValueError,
        "`batch` must be what `fit` takes: `x`, `(x, y)` or `(x, y, sample_weight)` of "
        "arrays or tensors, a `tf.data.Dataset` of batches, a `keras.utils.PyDataset` or "
        f"a generator. Received: {data!r}",
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: dataset(X, Y).take(0),
        lambda: Batches([], X, Y),
        lambda: (X[:0], Y[:0]),
    ],
    ids=["tf.data", "PyDataset", "arrays"],
)
def test_data_without_a_batch_are_refused(make):
    message = "`batch` must have at least one batch, of at least one sample. Received: "
    with pytest.raises(ValueError, match=f"^{message}"):
        plan(small(), make())


# ------------------------------------------------------- the window of an AccumOptimizer


def two_then_five(update):
    return tf.where(update < 3, 2, 5)


def test_the_window_of_an_optimizer_multiplies_the_batch(invented):
    def planned(steps, **options):
        model = small(ka.AccumOptimizer("sgd", steps))
        model.optimizer.inner_optimizer.iterations.assign(3)
        return plan(model, batch(4), **options)

    found = planned(4)
    assert (found.batch_size, found.window) == (16, 4)
    assert found.micro_batch_size * found.accum_steps * found.window == 16
    assert str(found).startswith("Batch of 16: 4 steps of 4, the window of AccumOptim")
    found = planned(4, batch_size=8)
    assert (found.batch_size, found.window, found.micro_batch_size) == (8, 4, 2)
    assert (found.held.batch, found.last_micro_batch_size) == (2 * (5 + 3) * 4, 2)
    found = planned(two_then_five)
    assert (found.batch_size, found.window) == (20, 5)
    # The control: a window of one.
    found = planned(1)
    assert (found.batch_size, found.window) == (4, 1)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (
            3,
            "`batch_size` must be at least 4, replicas (1) times the steps of an "
            "`AccumOptimizer`'s window (4). Received: 3",
        ),
        (
            10,
            "`batch_size` counts the samples of an update, and must be a multiple of the "
            "steps of an `AccumOptimizer`'s window, 4. Received: 10",
        ),
    ],
)
def test_a_batch_that_makes_no_window_is_refused(size, message):
    model = small(ka.AccumOptimizer("sgd", 4))
    assert_refused(lambda: plan(model, batch_size=size), ValueError, message)


def test_an_optimizer_that_keras_has_accumulate_is_refused():
    model = small(keras.optimizers.SGD(gradient_accumulation_steps=4))
    with pytest.raises(ValueError, match="This model accumulates in its step"):
        plan(model)


# ------------------------------------------------------------------- with recomputation


@pytest.fixture(scope="module")
def recomputing_plan():
    """The plan where not even single samples fit without recomputation."""
    keras.utils.set_random_seed(2)
    inputs = x = keras.Input((256, 32))
    for i in range(9):
        x = keras.layers.Dense(32, "tanh", name=f"block_{i}")(x)
    model = keras.Model(inputs, x)
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=True)
    x, y = np.random.default_rng(0).normal(size=(2, 1, 256, 32)).astype("float32")
    plain = plan(model, (x, y), recompute=False)
    step = plain.peak_bytes - plain.held.total
    budget = plain.held.total + step * 3 // 4
    return model, (x, y), plan(model, (x, y), budget)


def test_recomputation_is_chosen_where_nothing_else_fits(recomputing_plan):
    _, _, found = recomputing_plan
    assert found.recompute == "segments=sqrt"
    assert found.peak_bytes <= found.budget_bytes
    kinds = {trial.recompute: trial.fits(found.budget_bytes) for trial in found.trials}
    assert kinds == {False: False, "segments=sqrt": True}
    assert "segments recomputed" in str(found)


def test_the_model_recomputes_after_apply_and_not_before(recomputing_plan):
    model, (x, y), found = recomputing_plan
    assert "_run_through_graph" not in vars(model)
    model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    weights = model.get_weights()
    large = model.train_on_batch(x, y)
    expected = model.get_weights()
    model.set_weights(weights)
    found.apply()
    assert "_run_through_graph" in vars(model)
    assert_close(model.train_on_batch(x, y), large)
    assert_close(model.get_weights(), expected)
    assert_differ(weights, expected)


def deep_model(layers):
    inputs = x = keras.Input((5,))
    for i in range(layers):
        x = keras.layers.Dense(5, "tanh", name=f"block_{i}")(x)
    model = keras.Model(inputs, keras.layers.Dense(3)(x))
    return compile_in(model, "eager", keras.optimizers.SGD())


def test_a_pattern_is_always_recomputed():
    model = deep_model(layers=3)
    found = plan(model, recompute="block_*")
    assert {trial.recompute for trial in found.trials} == {"block_*"}
    blocks = [layer for layer in model.layers if layer.name.startswith("block")]
    assert all("call" not in vars(layer) for layer in blocks)
    found.apply()
    assert all("call" in vars(layer) for layer in blocks)


def test_a_pattern_that_matches_nothing_is_refused_and_changes_nothing():
    model = deep_model(layers=1)
    with pytest.raises(ValueError, match="nowhere"):
        plan(model, recompute="nowhere_*")
    assert "train_step" not in vars(model)


class Block(keras.layers.Layer):
    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.first = keras.layers.Dense(units, "tanh")
        self.second = keras.layers.Dense(units)

    def call(self, x):
        return x + self.second(self.first(x))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.blocks = [Block(8, name=f"part_{i}") for i in range(3)]

    def call(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_the_blocks_of_a_model_without_a_graph_are_found():
    model = Subclassed()
    model(np.zeros((1, 8)))
    choices = choices_of(model)
    assert choices.everything == tuple(block.path for block in model.blocks)
    assert all("call" not in vars(block) for block in model.blocks)
    assert _planner._options("auto", choices) == [False, choices]
    assert _planner._options(False, choices) == [False]


def test_planning_goes_on_without_recomputation_that_fails(invented, monkeypatch):
    def peak(size, recompute):
        if recompute:
            raise ValueError("It draws from TensorFlow's own random state.")
        return 2**20 * size

    invented.peak = peak
    monkeypatch.setattr(Patience, "lasts", lambda self, best: True)
    with pytest.warns(
        UserWarning,
        match="^Planning without recomputation, which failed: It draws from Tensor",
    ):
        found = plan(deep_model(layers=9), batch(8), budget="4MiB")
    assert found.micro_batch_size == 4


# --------------------------------------------------------------------------- refusals


def test_a_model_that_is_not_compiled_is_refused():
    model = dense_model()
    assert_refused(
        lambda: plan(model),
        ValueError,
        f"'{model.name}' is not compiled. `plan` measures the training step, which needs "
        "an optimizer and a loss: call `model.compile(optimizer, loss)` before.",
    )


def test_a_model_that_is_not_built_is_refused():
    model = keras.Sequential([keras.layers.Dense(3)], name="late")
    model.compile("sgd", "mse")
    assert_refused(
        lambda: plan(model),
        ValueError,
        "'late' is not built: planning would draw its first weights. Call it on a sample "
        "before, `model(x[:1])`, or give it an `Input`.",
    )


@pytest.mark.parametrize(
    ("size", "error", "message"),
    [
        (0, ValueError, "`batch_size` must be at least 1. Received: 0"),
        (2.0, TypeError, "`batch_size` must be an integer. Received: 2.0"),
        (True, TypeError, "`batch_size` must be an integer. Received: True"),
    ],
)
def test_a_batch_size_out_of_its_range_is_refused(size, error, message):
    assert_refused(lambda: plan(small(), batch_size=size), error, message)


@pytest.mark.parametrize("recompute", [True, None, 3])
def test_recompute_of_a_wrong_type_is_refused(recompute):
    assert_refused(
        lambda: plan(small(), recompute=recompute),
        TypeError,
        "`recompute` must be 'auto', False, or a pattern of layer names such as "
        f"'block_*'. Received: {recompute!r}",
    )


def refusal(model, **options):
    with pytest.raises(ValueError) as caught:
        plan(model, batch(4), budget="1KiB", **options)
    return str(caught.value)


def test_where_nothing_fits_the_message_says_what_needs_the_memory(invented):
    invented.peak = lambda size, recompute: 10 * MIB
    found = refusal(small(keras.optimizers.Adam()), recompute=False)
    # 75 weights, 150 slots, and 2 counters of 8 and 4 bytes; 3 metrics of 4 bytes.
    assert found == (
        "No micro-batch size fits 1.0 KiB. The smallest that was measured, 1, needs 10.0 "
        "MiB: weights 300 B, optimizer 620 B, the batch itself 128 B, gradients and "
        "activations 10.0 MiB. Most of it: gradients and activations. What would help: "
        "recomputing activations (`recompute='auto'` or a pattern); mixed precision "
        "(`dtype='mixed_bfloat16'`) for the activations; an optimizer with fewer slots, "
        "such as SGD; a larger `memory_budget`."
    )


def test_a_step_that_cannot_be_measured_is_not_said_to_need_nothing(
    invented, monkeypatch
):
    monkeypatch.setattr(StepProfiler, "floor", 256 * KIB)
    invented.peak = lambda size, recompute: 1048
    found = refusal(small(keras.optimizers.Adam()), recompute=False)
    assert "gradients and activations below 256.0 KiB. Most of it: optimizer." in found


def test_where_the_batch_itself_is_too_large_the_message_says_so(invented):
    invented.peak = lambda size, recompute: 33_000
    found = refusal(small(), batch_size=1000)
    assert "Most of it: the batch itself. What would help: data that yield" in found


def test_where_everything_runs_out_of_memory_the_message_says_so(invented):
    invented.peak = lambda size, recompute: None
    assert refusal(small(), recompute=False) == (
        "No micro-batch size fits 1.0 KiB. All sizes that were tried ran out of memory: "
        "1."
    )
