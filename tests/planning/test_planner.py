"""`plan`: it leaves everything as it was, tells what it measured, and refuses clearly."""

import builtins
import dataclasses
import json
import random

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
)
from keras.src.backend.common import global_state
from tensorflow.python.eager import context

import keras_accum as ka
from keras_accum._backend.private.models import all_metrics, call_traces
from keras_accum._planning import planner as _planner
from keras_accum._planning.measure import BaselineMemory, StepProfiler, run
from keras_accum._planning.search import Patience, Trial
from keras_accum._planning.transaction import preserving_state, variables

ROWS = 4


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    """Take the largest size that fits: looking for a faster one is for test_search.py."""
    monkeypatch.setattr(Patience, "lasts", lambda self, best: False)


class CountsCalls(keras.layers.Layer):
    """Draws from Keras's global seed, counts its calls, and adds a loss."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), trainable=False, initializer="zeros")

    def call(self, x):
        self.calls.assign_add(1.0)
        self.add_loss(1e-3 * keras.ops.mean(x))
        return x + 0.01 * keras.random.normal(keras.ops.shape(x))


class Late(keras.metrics.Metric):
    """Has no variable before its first update."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        if not self.variables:
            self.last = self.add_variable((), initializer="zeros", name="last")
        self.last.assign(keras.ops.max(y_pred))

    def result(self):
        return 1.0 * self.last


def eventful_model():
    """A model with every kind of state that a step can move."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((5,))
    x = keras.layers.Dense(8, kernel_regularizer="l2")(inputs)
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.Dropout(0.5)(CountsCalls()(x))
    return keras.Model(inputs, keras.layers.Dense(3, "sigmoid")(x))


def compiled(mode="graph", optimizer=None, **options):
    model = eventful_model()
    metrics = ["mae", Late()]
    model.compile(
        optimizer or keras.optimizers.Adam(0.05),
        loss="mse",
        metrics=metrics,
        run_eagerly=mode == "eager",
        jit_compile=mode == "xla",
        **options,
    )
    return model


def batch(rows=ROWS):
    x, y = data(rows)
    return x, (y > 0).astype("float32")


def plan(model, samples=None, budget="1GiB", **options):
    samples = batch() if samples is None else samples
    return ka.plan(model, samples, memory_budget=budget, verbose=0, **options)


def everything(model):
    """All state that a step of `model`, or planning, could move."""
    generator = tf.random.get_global_generator()
    return {
        "variables": [np.array(v.value) for v in variables(model)],
        "paths": [v.path for v in variables(model)],
        "built": (
            model.optimizer.built,
            model._compile_metrics.built,
            model._compile_loss.built,
        ),
        "metrics": [[v.path for v in m.variables] for m in all_metrics(model)],
        "parts": [
            id(part)
            for part in (model.optimizer, model._compile_metrics, model.train_function)
        ],
        "step": vars(model).get("train_step"),
        "accumulation": getattr(model, "accumulation", None),
        "traces": [list(container) for container in call_traces(model)],
        "random": (
            random.getstate(),
            str(np.random.get_state()),
            generator.state.numpy().tolist(),
        ),
    }


def assert_same_state(found, expected):
    assert_equal(found.pop("variables"), expected.pop("variables"))
    assert found == expected


def draws():
    """The next numbers of all generators outside of a model."""
    return [
        random.random(),
        np.random.random(),
        float(tf.random.uniform(())),
        float(keras.random.uniform(())),
    ]


@pytest.mark.parametrize(
    ("mode", "trained"),
    [("eager", False), ("graph", False), ("graph", True), ("xla", True)],
)
def test_everything_is_what_it_was(mode, trained):
    model = compiled(mode)
    if trained:
        fit(model, *batch(), batch_size=2)
    before = everything(model)
    plan(model)
    assert_same_state(everything(model), before)


def test_a_step_would_have_moved_all_of_it():
    # The control: without the transaction.
    model = compiled()
    fit(model, *batch(), batch_size=2)
    before = everything(model)
    meter = StepProfiler(model, tuple(map(tf.constant, batch())), None)
    meter.measure(2, False, timed=True)
    after = everything(model)
    moved = [
        not np.array_equal(a, b) for a, b in zip(after["variables"], before["variables"])
    ]
    assert sum(moved) >= len(moved) - 1  # but for the learning rate
    assert after["step"] != before["step"]


@pytest.mark.parametrize("end", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("trained", [False, True], ids=["fresh", "trained"])
def test_everything_is_what_it_was_after_a_failure(end, trained, monkeypatch):
    model = compiled()
    if trained:
        fit(model, *batch(), batch_size=2)
    before = everything(model)
    measure = StepProfiler.measure

    def measure_then_fail(meter, size, recompute, timed):
        measure(meter, size, recompute, timed)
        raise end("stop")

    monkeypatch.setattr(StepProfiler, "measure", measure_then_fail)
    with pytest.raises(end, match="stop"):
        plan(model)
    assert_same_state(everything(model), before)


def test_nothing_is_different_after_planning_where_nothing_fits():
    model = compiled()
    before = everything(model)
    with pytest.raises(ValueError, match="No micro-batch size fits"):
        plan(model, budget="100B")
    assert_same_state(everything(model), before)


@pytest.mark.parametrize("planned", [False, True])
def test_training_goes_on_as_if_nothing_had_been_planned(planned, request):
    keras.utils.set_random_seed(5)
    tf.random.set_seed(5)
    model = compiled()
    fit(model, *batch(), batch_size=2)
    if planned:
        plan(model)
    found = draws()
    history = fit(model, *batch(), batch_size=2, epochs=2).history
    found += [np.array(v.value) for v in variables(model)]
    found += [np.array(history[key]) for key in sorted(history)]
    if not planned:
        request.config.stash[_EXPECTED] = found
    else:
        assert_equal(found, request.config.stash[_EXPECTED])


_EXPECTED = pytest.StashKey()


def test_random_state_that_was_not_there_is_not_there_afterwards(monkeypatch):
    model = compiled()
    keras.backend.clear_session()
    model.compile("sgd", "mse")
    # As before any `tf.random.set_seed`.
    monkeypatch.delattr(context.context(), "_rng")
    with preserving_state(model):
        model.train_on_batch(*batch())
        keras.random.uniform(())
        tf.random.set_seed(3)
    assert not hasattr(context.context(), "_rng")
    assert global_state.get_global_attribute("global_seed_generator") is None


def test_an_accumulating_model_keeps_its_own_step():
    model = ka.accumulate(compiled(), accum_steps=2)
    step = model.train_step
    plan(model)
    assert model.train_step is step


def test_an_accumulating_optimizer_keeps_its_window():
    optimizer = ka.AccumOptimizer(keras.optimizers.Adam(0.05), 4)
    model = compiled(optimizer=optimizer)
    fit(model, *batch(), batch_size=2)
    before = everything(model)
    plan(model)
    assert_same_state(everything(model), before)
    assert int(optimizer.micro_step) == 2


# ---------------------------------------------------------------------------- the plan


def test_the_micro_batches_make_the_batch(mode):
    model = compile_in(dense_model(), mode, keras.optimizers.SGD())
    found = plan(model)
    assert found.micro_batch_size * found.accum_steps == found.batch_size == ROWS
    assert found.replicas == 1
    assert found.peak_bytes <= found.budget_bytes == 2**30
    assert found.recompute is False
    chosen = [t for t in found.trials if t.micro_batch_size == found.micro_batch_size]
    assert [t.peak_bytes for t in chosen] == [found.peak_bytes]
    assert chosen[0].seconds == found.seconds > 0
    expected = {"xla": "XLA's buffer assignment"}.get(mode, "allocator of CPU:0")
    assert found.method == expected


def test_a_step_that_is_compiled_in_parts_is_measured_by_the_allocator():
    """With convolutions on a CPU: the compiler knows one micro-step alone."""
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Conv2D(4, 3), keras.layers.Flatten(), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((8, 8, 2)), *layers])
    model.compile("sgd", "mse", jit_compile=True)
    rng = np.random.default_rng(2)
    x = rng.normal(size=(ROWS, 8, 8, 2)).astype("float32")
    found = plan(model, (x, rng.normal(size=(ROWS, 3)).astype("float32")))
    assert found.method == "allocator of CPU:0"
    assert model.jit_compile


WIDTH, LAYERS = 128, 4


def wide_model():
    """Activations of 512 bytes a sample in each of 8 layers, and little else."""
    layers = [keras.layers.Dense(WIDTH, "tanh", use_bias=False) for _ in range(LAYERS)]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers])
    model.compile("sgd", "mse", jit_compile=True)
    return model


def test_less_memory_makes_smaller_micro_batches_and_the_peak_is_below():
    rows = 512
    samples = (np.ones((rows, WIDTH), "float32"),) * 2
    model = wide_model()
    plenty = plan(model, samples)
    assert plenty.micro_batch_size == rows
    assert plenty.held.parameters == LAYERS * WIDTH * WIDTH * 4
    assert plenty.held.batch == 2 * rows * WIDTH * 4
    # Between the passes, the results of all layers are in memory.
    results = rows * LAYERS * WIDTH * 4
    assert plenty.peak_bytes - plenty.held.total > results
    room = plenty.peak_bytes - results // 2
    tight = plan(model, samples, budget=room)
    assert tight.micro_batch_size < rows
    assert tight.peak_bytes <= room == tight.budget_bytes


@pytest.mark.parametrize("method", ["graph", "eager"])
def test_the_allocator_and_the_compiler_agree_on_what_grows_with_a_sample(method):
    samples = tuple(tf.ones((4096, WIDTH)) for _ in range(2))
    model = wide_model()

    def per_sample(meter):
        small, large = (
            meter.measure(size, False, timed=False).peak_bytes for size in (512, 2048)
        )
        return (large - small) / (2048 - 512)

    compiler = per_sample(StepProfiler(model, samples, None))
    model.compile("sgd", "mse", jit_compile=False, run_eagerly=method == "eager")
    allocator = per_sample(StepProfiler(model, samples, None))
    # XLA keeps results before and after tanh, or both: between one and three of them.
    one = LAYERS * WIDTH * 4
    assert 0.7 * one < allocator < 3.3 * one
    assert 0.7 * one < compiler < 3.3 * one


def test_what_else_is_in_memory_does_not_count():
    model = compiled("graph")
    alone = plan(model).peak_bytes
    other = tf.ones((16, 2**20))
    assert plan(model).peak_bytes < alone + 2**20 < other.shape.num_elements() * 4


def test_of_several_steps_the_largest_peak_and_the_shortest_time_count(monkeypatch):
    peaks = iter([0, 30, 50, 20, 40, 10])
    monkeypatch.setattr(
        "keras_accum._planning.measure._memory_info", lambda: {"peak": next(peaks)}
    )
    times = iter([0.0, 0.3, 1.0, 1.1, 2.0, 2.4, 3.0, 3.3])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    steps = []
    next(peaks)  # The first step, which warms up, is not asked for its own.
    found = run(lambda batch: steps.append(batch) or [], "batch", count=True)
    assert found == (50, pytest.approx(0.1))
    assert steps == ["batch"] * 5


def test_the_plan_trains_as_the_large_batch():
    x, y = data(12)
    model = compile_in(dense_model(), "graph", keras.optimizers.SGD(0.2))
    found = plan(model, (x, y))
    found = dataclasses.replace(found, micro_batch_size=5, accum_steps=3)
    assert found.last_micro_batch_size == 2
    assert found.apply() is model
    fit(model, x, y, batch_size=12, epochs=2)
    large = compile_in(dense_model(), "graph", keras.optimizers.SGD(0.2))
    fit(large, x, y, batch_size=12, epochs=2)
    assert_close(model.get_weights(), large.get_weights())
    control = compile_in(dense_model(), "graph", keras.optimizers.SGD(0.2))
    fit(control, x, y, batch_size=5, epochs=2)
    assert_differ(control.get_weights(), large.get_weights())


def test_a_model_that_accumulates_by_its_class_is_planned_for_too():
    keras.utils.set_random_seed(1)
    inputs = keras.Input((5,))
    outputs = keras.layers.Dense(3)(inputs)
    model = ka.GradientAccumulationModel(inputs, outputs, accum_steps=2)
    model.compile("sgd", "mse")
    x, y = data(ROWS)
    found = plan(model, (x, y))
    assert model.accum_steps == 2 and model.micro_batch_size is None
    assert found.apply() is model
    assert model.accum_steps is None
    assert model.micro_batch_size == found.micro_batch_size


def test_samples_are_repeated_to_the_size_of_the_batch():
    model = compile_in(dense_model(), "graph", keras.optimizers.SGD())
    found = plan(model, batch(3), batch_size=4)
    assert found.batch_size == 4
    assert found.micro_batch_size * found.accum_steps == 4
    assert found.held.batch == 4 * (5 + 3) * 4
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
    model.compile("sgd", "mse", jit_compile=False)
    words = tf.ragged.constant([[1, 2, 3], [4], [5, 6]])
    samples = {"words": words, "numbers": np.ones((3, 2))}
    found = plan(model, (samples, np.ones((3, 1)), np.ones(3)), batch_size=6)
    assert found.batch_size == 6


# ------------------------------------------------------------------- with recomputation


def deep_model(block="block", layers=9):
    """A chain whose activations outweigh its weights."""
    keras.utils.set_random_seed(2)
    inputs = x = keras.Input((32,))
    for i in range(layers):
        x = keras.layers.Dense(32, "tanh", name=f"{block}_{i}")(x)
    model = keras.Model(inputs, x)
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=True)
    return model


def wide_data(rows=4096):
    return tuple(np.random.default_rng(0).normal(size=(2, rows, 32)).astype("float32"))


@pytest.fixture(scope="module")
def recomputing_plan():
    """The plan where not even single samples fit without recomputation."""
    x, y = wide_data(16)
    x, y = np.repeat(x[:, None], 256, 1), np.repeat(y[:, None], 256, 1)
    model = deep_model()
    inputs = keras.Input((256, 32))
    outer = keras.Model(inputs, _through(model, inputs))
    outer.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=True)
    plain = plan(outer, (x, y), batch_size=1, recompute=False)
    step = plain.peak_bytes - plain.held.total
    budget = plain.held.total + step * 3 // 4
    return outer, (x, y), ka.plan(outer, (x[:1], y[:1]), memory_budget=budget, verbose=0)


def _through(model, x):
    for layer in model.layers[1:]:
        x = layer(x)
    return x


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
    weights = model.get_weights()
    large = model.train_on_batch(x, y)
    expected = model.get_weights()
    model.set_weights(weights)
    found.apply()
    assert "_run_through_graph" in vars(model)
    assert_close(model.train_on_batch(x, y), large)
    # A bias was zero: it is one gradient, a sum of 4,096 values of either sign.
    assert_close(model.get_weights(), expected, rtol=2e-5)
    assert_differ(weights, expected)


def test_a_pattern_is_always_recomputed():
    model = deep_model(layers=3)
    model.compile("sgd", "mse", jit_compile=False)
    found = plan(model, wide_data(2), recompute="block_*")
    assert {trial.recompute for trial in found.trials} == {"block_*"}
    assert all("call" not in vars(layer) for layer in model.layers)
    found.apply()
    assert sum("call" in vars(layer) for layer in model.layers) == 3


def test_a_pattern_that_matches_nothing_is_refused_and_changes_nothing():
    model = deep_model()
    with pytest.raises(ValueError, match="nowhere"):
        plan(model, wide_data(8), recompute="nowhere_*")
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
    options = _planner._options(model, "auto")
    assert options == [False, tuple(block.path for block in model.blocks)]
    assert all("call" not in vars(block) for block in model.blocks)
    assert _planner._options(model, False) == [False]


def test_recomputation_that_cannot_be_is_left_out_with_a_warning(monkeypatch):
    def measure(self, size, recompute, timed):
        if recompute:
            raise ValueError("draws from TensorFlow's own random state")
        return Trial(size, recompute, 2**20 * size, seconds=1.0)

    monkeypatch.setattr(StepProfiler, "measure", measure)
    monkeypatch.setattr(Patience, "lasts", lambda self, best: True)
    with pytest.warns(UserWarning, match="Recomputation is left out: draws from"):
        found = plan(deep_model(), wide_data(8), budget="4MiB")
    assert found.micro_batch_size == 4


# ------------------------------------------------------------------------- the report


def example(**changes):
    fields = {
        "micro_batch_size": 19,
        "accum_steps": 7,
        "recompute": False,
        "batch_size": 127,
        "replicas": 1,
        "budget_bytes": 64 * 2**20,
        "peak_bytes": 50 * 2**20,
        "predicted_bytes": 49 * 2**20,
        "seconds": 0.25,
        "held": BaselineMemory(2**20, 2**21, 2**19),
        "method": "XLA's buffer assignment",
        "trials": (
            Trial(8, False, 30 * 2**20),
            Trial(19, False, 50 * 2**20, 49 * 2**20, 0.25),
            Trial(64, False, 90 * 2**20, 91 * 2**20),
            Trial(127, False, None),
        ),
        "_model": dense_model(),
    }
    return ka.Plan(**{**fields, **changes})


def test_a_plan_prints_as_a_table():
    assert str(example()).splitlines() == [
        "Batch of 127: 6 micro-batches of 19 and one of 13, nothing recomputed.",
        "Needs 50.0 MiB of 64.0 MiB (XLA's buffer assignment): weights 1.0 MiB, "
        "optimizer 2.0 MiB, batch 512.0 KiB, step 46.5 MiB.",
        "The last micro-batch is shorter; it weighs what it holds, so that the update is "
        "the large batch's all the same.",
        "",
        "micro-batch           recompute  predicted  measured  s/step        verdict",
        "          8  nothing recomputed          -  30.0 MiB       -           fits",
        "         19  nothing recomputed   49.0 MiB  50.0 MiB   0.250         chosen",
        "         64  nothing recomputed   91.0 MiB  90.0 MiB       -    over budget",
        "        127  nothing recomputed          -         -       -  out of memory",
    ]


def test_replicas_share_a_batch():
    text = str(example(replicas=2, batch_size=266, accum_steps=7))
    assert "7 micro-batches of 19 on each of 2 replicas" in text


def test_a_plan_is_plain_data():
    found = json.loads(json.dumps(example().to_dict()))
    assert found["micro_batch_size"] == 19
    assert found["held"] == {"parameters": 2**20, "optimizer": 2**21, "batch": 2**19}
    assert found["trials"][3]["peak_bytes"] is None
    assert len(found) == 12


def test_a_plan_is_frozen():
    with pytest.raises(AttributeError):
        example().micro_batch_size = 1


def test_a_plan_is_drawn():
    axis = example().plot().axes[0]
    labels = [line.get_label() for line in axis.lines]
    assert labels == ["nothing recomputed", "budget", "held between steps", "chosen"]
    x, y = axis.lines[0].get_data()
    assert (list(x), list(y)) == ([8, 19, 64], [30, 50, 90])
    assert set(axis.lines[1].get_ydata()) == {64}


def test_drawing_without_matplotlib_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert_refused(
        example().plot,
        ImportError,
        "`plan.plot()` draws with matplotlib, which is not installed: `pip install "
        "matplotlib`. `print(plan)` shows the same as a table.",
    )


def test_progress_is_shown_if_asked_for(capsys):
    model = compile_in(dense_model(), "eager", keras.optimizers.SGD())
    plan(model)
    assert capsys.readouterr().out == ""
    ka.plan(model, batch(), memory_budget="1GiB")
    assert "micro_batch_size" in capsys.readouterr().out


# ------------------------------------------------------------------------- refusals


def test_a_model_that_is_not_compiled_is_refused():
    model = dense_model()
    assert_refused(
        lambda: plan(model),
        ValueError,
        f"'{model.name}' is not compiled: the training step that `plan` measures has an "
        "optimizer and a loss. Call `model.compile(optimizer, loss)` before.",
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
def test_a_batch_size_without_sense_is_refused(size, error, message):
    model = compiled()
    assert_refused(lambda: plan(model, batch_size=size), error, message)


@pytest.mark.parametrize("recompute", [True, None, 3])
def test_recompute_of_another_kind_is_refused(recompute):
    model = compiled()
    assert_refused(
        lambda: plan(model, recompute=recompute),
        TypeError,
        "`recompute` must be 'auto', False, or a pattern of layer names such as "
        f"'block_*'. Received: {recompute!r}",
    )


def refusal(monkeypatch, model, peak, **options):
    monkeypatch.setattr(
        StepProfiler,
        "measure",
        lambda self, size, recompute, timed: Trial(size, recompute, peak),
    )
    try:
        plan(model, budget="1KiB", **options)
    except ValueError as error:
        return str(error)
    raise AssertionError("nothing was raised")


def test_where_nothing_fits_the_message_says_what_takes_the_memory(monkeypatch):
    model = compile_in(dense_model(), "graph", keras.optimizers.Adam())
    # 75 weights, 150 slots, and 2 counters of 8 and 4 bytes; 3 metrics of 4 bytes.
    found = refusal(monkeypatch, model, 10 * 2**20, recompute=False)
    assert found == (
        "No micro-batch size fits 1.0 KiB. The smallest that was measured, 1, needs 10.0 "
        "MiB: weights 300 B, optimizer 620 B, the batch itself 128 B, gradients and "
        "activations 10.0 MiB. Most of it: gradients and activations. What would help: "
        "recomputing activations (`recompute='auto'` or a pattern); mixed precision "
        "(`dtype='mixed_bfloat16'`) for the activations; an optimizer with fewer slots, "
        "such as SGD; a larger `memory_budget`."
    )


def test_where_the_batch_itself_is_too_large_the_message_says_so(monkeypatch):
    model = compile_in(dense_model(), "graph", keras.optimizers.SGD())
    found = refusal(monkeypatch, model, 33_000, batch_size=1000)
    assert "Most of it: the batch itself. What would help: data that yield" in found


def test_where_everything_runs_out_of_memory_the_message_says_so(monkeypatch):
    model = compile_in(dense_model(), "graph", keras.optimizers.SGD())
    assert refusal(monkeypatch, model, None, batch_size=4, recompute=False) == (
        "No micro-batch size fits 1.0 KiB. All that were tried ran out of memory: 1."
    )


def test_running_out_of_memory_is_a_verdict_and_any_other_error_is_not(monkeypatch):
    model = compile_in(dense_model(), "eager", keras.optimizers.SGD())
    step = StepProfiler._step

    def failing(error, message="OOM when allocating"):
        def make(meter, size, *args):
            if size > 3:
                raise error(None, None, message)
            return step(meter, size, *args)

        return make

    monkeypatch.setattr(StepProfiler, "_step", failing(tf.errors.ResourceExhaustedError))
    found = plan(model)
    assert found.micro_batch_size <= 3
    assert any(trial.peak_bytes is None for trial in found.trials)
    monkeypatch.setattr(StepProfiler, "_step", failing(tf.errors.InvalidArgumentError))
    with pytest.raises(tf.errors.InvalidArgumentError):
        plan(model)
    full = failing(tf.errors.ResourceExhaustedError, "The queue is full")
    monkeypatch.setattr(StepProfiler, "_step", full)
    with pytest.raises(tf.errors.ResourceExhaustedError, match="queue is full"):
        plan(model)


def test_a_device_that_does_not_tell_its_memory_is_refused(monkeypatch):
    def unknown(device):
        raise ValueError("Allocator stats not available")

    model = compiled()
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", unknown)
    with pytest.raises(ValueError, match="CPU:0 does not tell how much of its memory"):
        plan(model)
