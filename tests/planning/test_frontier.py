"""`frontier`: which points are measured, what is marked, and the plans that come of it."""

import builtins
import contextlib
import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_close, assert_differ, assert_equal, assert_refused, dense_model
from planned import batch, compiled
from test_planner import Subclassed

import keras_accum as ka
from keras_accum._planning.families import Choices, choices_of
from keras_accum._planning.frontier import Frontier, Point, points
from keras_accum._planning.measure import BaselineMemory, StepProfiler
from keras_accum._planning.plan import describe, switch_on
from keras_accum._planning.planner import Task
from keras_accum._planning.search import Trial

MIB = 2**20


class Named:
    name = "model"
    dtype_policy = keras.DTypePolicy("float32")


TRIALS = [
    Trial(16, False, 90 * MIB, seconds=1.0),
    Trial(16, "segments=sqrt", 40 * MIB, seconds=1.25),
    Trial(16, ("a", "b"), 60 * MIB, seconds=1.125),
    Trial(8, False, 60 * MIB, seconds=1.5),
    Trial(4, False, 30 * MIB, seconds=1.75),
]


def example():
    task = Task(Named(), np.ones((16, 2), "float32"), 16, 1, 1)
    held = BaselineMemory(MIB, MIB, MIB)
    return Frontier(points(TRIALS), 16, "the test", task, held, 1024)


def test_points_go_by_memory_and_dominated_ones_are_marked():
    assert points(TRIALS) == (
        Point(4, False, 30 * MIB, 1.75, False),
        Point(16, "segments=sqrt", 40 * MIB, 1.25, False),
        Point(16, ("a", "b"), 60 * MIB, 1.125, False),
        Point(8, False, 60 * MIB, 1.5, True),
        Point(16, False, 90 * MIB, 1.0, False),
    )
    # Equal ones do not dominate each other.
    twins = [Trial(8, False, 5, seconds=1.0), Trial(4, False, 5, seconds=1.0)]
    assert not any(point.dominated for point in points(twins))


def test_a_frontier_prints_as_a_table():
    assert str(example()).splitlines() == [
        "Batch of 16: time of a step against memory (the test).",
        "",
        "micro-batch            recompute    memory  s/step  time           ",
        "          4   nothing recomputed  30.0 MiB   1.750  1.75           ",
        "         16  segments recomputed  40.0 MiB   1.250  1.25           ",
        "         16  2 layers recomputed  60.0 MiB   1.125  1.12           ",
        "          8   nothing recomputed  60.0 MiB   1.500  1.50  dominated",
        "         16   nothing recomputed  90.0 MiB   1.000  1.00           ",
    ]


def test_the_plan_for_a_budget_is_the_fastest_point_that_fits():
    found = example()
    plan = found.at("60MiB")
    assert isinstance(plan, ka.Plan)
    assert (plan.micro_batch_size, plan.accum_steps, plan.recompute) == (
        16,
        1,
        ("a", "b"),
    )
    assert (plan.peak_bytes, plan.seconds) == (60 * MIB, 1.125)
    assert plan.budget_bytes == 60 * MIB and len(plan.trials) == 5
    assert found.at(60 * MIB - 1).recompute == "segments=sqrt"
    assert found.at("1GiB").recompute is False
    small = found.at("35MiB")
    assert (small.micro_batch_size, small.accum_steps) == (4, 4)
    with pytest.raises(ValueError, match=r"^No micro-batch size fits 20\.0 MiB\. "):
        found.at("20MiB")


def test_a_frontier_is_json():
    told = json.loads(json.dumps(example().to_dict()))
    assert told["batch_size"] == 16 and told["method"] == "the test"
    assert told["points"][2] == {
        "micro_batch_size": 16,
        "recompute": ["a", "b"],
        "peak_bytes": 60 * MIB,
        "seconds": 1.125,
        "dominated": False,
    }


def test_a_frontier_is_drawn(monkeypatch):
    (axis,) = example().plot().axes
    assert axis.get_title() == "model: batch of 16"
    labels = axis.get_legend_handles_labels()[1]
    assert labels == [
        *["micro-batch 16", "micro-batch 8", "micro-batch 4"],
        *["recomputed", "dominated"],
    ]
    (line,) = axis.lines
    assert line.get_xdata().tolist() == [30, 40, 60, 90]
    assert line.get_ydata().tolist() == [1.75, 1.25, 1.125, 1.0]
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert_refused(
        example().plot,
        ImportError,
        "`frontier.plot()` draws with matplotlib, which is not installed: `pip install "
        "matplotlib`. `print(frontier)` shows the same as a table.",
    )


# ------------------------------------------------------------------ what is measured


@pytest.fixture
def asked(monkeypatch):
    """Memory and time by formulas, and a note of what was measured."""
    asked = []

    def measure(self, size, recompute, timed):
        assert timed
        asked.append((size, recompute))
        count = 3 if recompute else 0
        count = len(recompute) if isinstance(recompute, tuple) else count
        seconds = 1.0 + 0.1 * count + 8 / size
        return Trial(size, recompute, 1000 + size * (9 - count), seconds=seconds)

    monkeypatch.setattr(StepProfiler, "measure", measure)
    return asked


def subclassed():
    keras.utils.set_random_seed(2)
    model = Subclassed()
    model(np.zeros((1, 8)))
    return compiled("eager", metrics=[], model=model)


X, Y = np.random.default_rng(0).normal(size=(2, 16, 8)).astype("float32")


def test_sizes_are_halved_and_blocks_recomputed_in_part(asked):
    model = subclassed()
    found = ka.frontier(model, (X, Y), verbose=0)
    paths = tuple(block.path for block in model.blocks)
    sizes = (16, 8, 4, 2)
    assert asked[:8] == [(size, o) for size in sizes for o in (False, paths)]
    assert asked[8:] == [(size, paths[:n]) for size in sizes for n in (1, 2)]
    assert len(found.points) == 16 and found.batch_size == 16
    asked.clear()
    ka.frontier(model, (X, Y), verbose=0, max_points=3)
    assert asked == [(16, False), (16, paths), (8, False)]
    asked.clear()
    ka.frontier(model, (X, Y), verbose=0, recompute=False)
    assert asked == [(size, False) for size in (16, 8, 4, 2, 1)]
    asked.clear()
    ka.frontier(model, (X, Y), verbose=0, recompute="part_*", max_points=4)
    assert asked == [(s, o) for s in (16, 8) for o in (False, "part_*")]


def test_a_plan_of_it_recomputes_what_it_says(asked):
    model = subclassed()
    found = ka.frontier(model, (X, Y), verbose=0)
    plan = found.at(1000 + 16 * 8)
    assert plan.recompute == (model.blocks[0].path,)
    assert plan.apply() is model
    assert ["call" in vars(block) for block in model.blocks] == [True, False, False]


def test_of_equal_blocks_those_that_run_first_are_recomputed():
    """Keras lists the layers of a model within a model from the last one."""
    inputs = hidden = keras.Input((8,))
    for i in range(4):
        hidden = keras.Sequential(
            [keras.layers.Dense(8, "tanh") for _ in range(3)], name=f"block_{i}"
        )(hidden)
    backbone = keras.Model(inputs, hidden)
    model = keras.Sequential([keras.Input((8,)), backbone, keras.layers.Dense(2)])
    choices = choices_of(model)
    names = ("block_0", "block_1", "block_2", "block_3")
    assert tuple(path.split("/")[-1] for path in choices.everything) == names
    chosen, _ = choices.subset(0.5)
    assert tuple(path.split("/")[-1] for path in chosen) == names[:2]


def test_a_part_of_the_segments_is_the_same_after_apply():
    def make():
        keras.utils.set_random_seed(1)
        hidden = [keras.layers.Dense(8, "tanh") for _ in range(9)]
        return keras.Sequential([keras.Input((8,)), *hidden])

    model = make()
    choices = choices_of(model)
    assert choices.everything == "segments=sqrt"
    option, saved = choices.subset(0.4)
    assert option == "segments=sqrt, share=0.4" and 0.4 <= saved < 1
    assert choices.subset(1.0) == ("segments=sqrt", 1.0)
    with choices.recompute(model, option) as handle:
        names = handle.layers
    with ka.recompute(model, segments="sqrt", share=0.4) as handle:
        assert handle.layers == names
    assert choices.recompute(model, "segments=sqrt, share=0.3") is None


class Fake:
    """A family that saves so much, for so much time each byte."""

    def __init__(self, everything, saved, cost):
        self.everything, self.saved, self.cost = everything, saved, cost

    def cheapest(self, target):
        return f"{self.everything}, {target:g}", target, self.cost * target

    def recompute(self, model, option):
        return option if option.startswith(self.everything) else None


def test_blocks_and_segments_are_both_tried_by_a_trace():
    slow, fast = Fake("segments", 100.0, cost=2.0), Fake("blocks", 60.0, cost=1.0)
    both = Choices([slow, fast])
    assert both.everything == "segments"
    assert both.subset(0.3) == ("blocks, 30", 0.3)
    assert both.subset(0.7) == ("segments, 70", 0.7)  # Blocks do not save so much.
    assert Choices([slow]).subset(0.3) == ("segments, 30", 0.3)
    assert both.recompute(None, "blocks, 30") == "blocks, 30"
    assert both.recompute(None, "else") is None


class Attention(keras.layers.Layer):
    """A transformer's block: products, and what is cheap and holds much."""

    def build(self, shape):
        self.norm = keras.layers.LayerNormalization()
        self.attention = keras.layers.MultiHeadAttention(2, 8)
        self.wide = keras.layers.Dense(32, "gelu")
        self.dropout = keras.layers.Dropout(0.2)
        self.narrow = keras.layers.Dense(16)
        self.attention.build(shape, shape)
        for layer in (self.norm, self.wide):
            layer.build(shape)
        self.narrow.build((*shape[:-1], 32))

    def call(self, x):
        normal = self.norm(x)
        x = x + self.dropout(self.attention(normal, normal))
        return x + self.dropout(self.narrow(self.wide(self.norm(x))))


def transformer():
    keras.utils.set_random_seed(1)
    inputs = keras.Input((12, 16))
    hidden = inputs
    for i in range(3):
        hidden = Attention(name=f"attention_{i}")(hidden)
    return keras.Model(inputs, keras.layers.Dense(2)(hidden))


PRODUCTS = ("query", "key", "value", "attention_output")


def test_products_of_a_block_are_kept_where_little_has_to_go():
    """Korthikanti et al., 2022: what is cheap to compute again holds most.

    Not those of `wide`, whose activation needs them, nor of `narrow`, which nothing needs.
    """
    model = transformer()
    choices = choices_of(model)
    kept = f"attention_0, keep={','.join(PRODUCTS)}"
    assert choices.subset(0.2)[0] == (kept,)
    chosen, saved = choices.subset(0.9)
    assert chosen == (kept, "attention_1", "attention_2") and 0.9 <= saved < 1
    assert choices.everything == ("attention_0", "attention_1", "attention_2")
    assert choices.subset(1.0) == (choices.everything, 1.0)
    assert describe(chosen) == "3 layers recomputed, 1 of them but for products"
    for option in ((kept,), chosen):
        with choices.recompute(model, option) as handle:
            said = handle.layers, handle.kept
        # As `Plan.apply` switches it on, which has no trace.
        with switch_on(model, option) as handle:
            assert (handle.layers, handle.kept) == said
        assert said[0] == choices.everything[: len(option)] and said[1] == PRODUCTS
    # In eager mode, what is kept would be computed again all the same.
    model.compile("sgd", "mse", run_eagerly=True)
    assert choices_of(model).subset(0.2)[0] == ("attention_0",)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.2, 0.9])
def test_gradients_with_products_kept_are_those_of_the_plain_model(share):
    x = np.random.default_rng(0).normal(size=(4, 12, 16)).astype("float32")

    def gradients(share, training=True):
        model = transformer()
        choices = choices_of(model)
        option = choices.subset(share)[0] if share else False
        with switch_on(model, option) if option else contextlib.nullcontext():

            @tf.function
            def step(x):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(model(x, training=training) ** 2)
                values = [v.value for v in model.trainable_variables]
                return tape.gradient(loss, values)

            return np.concatenate([np.ravel(g) for g in step(x)])

    plain = gradients(0)
    assert_close(gradients(share), plain, 1e-6)
    # The control: without the masks of the dropout, which are to be the same.
    assert_differ(gradients(share, training=False), plain)


def test_it_is_measured_in_earnest_and_leaves_the_model_alone():
    model = compiled("eager", metrics=[])
    before = [w.copy() for w in model.get_weights()]
    found = ka.frontier(model, batch(), verbose=0, max_points=2, recompute=False)
    assert [point.micro_batch_size for point in found.points] == [1, 2]
    assert all(p.seconds > 0 and p.peak_bytes > 0 for p in found.points)
    assert_equal(model.get_weights(), before)
    # The control: training moves them.
    model.fit(*batch(), verbose=0)
    assert_differ(model.get_weights(), before)


# --------------------------------------------------------------------------- refusals


def test_what_is_refused(monkeypatch):
    model = dense_model()
    with pytest.raises(ValueError, match="is not compiled"):
        ka.frontier(model, batch())
    model = subclassed()
    for wrong, error in ((0, ValueError), (1.5, TypeError), (True, TypeError)):
        assert_refused(
            lambda: ka.frontier(model, (X, Y), max_points=wrong),  # noqa: B023
            error,
            f"`max_points` must be an integer of at least 1. Received: {wrong!r}",
        )
    with pytest.raises(TypeError, match="`recompute` must be 'auto', False"):
        ka.frontier(model, (X, Y), recompute=3)
    monkeypatch.setattr(
        StepProfiler, "measure", lambda self, size, recompute, timed: Trial(size, 0, None)
    )
    assert_refused(
        lambda: ka.frontier(model, (X, Y), verbose=0, max_points=2),
        ValueError,
        "All of the 2 points ran out of memory. Use a smaller batch, or `plan`, which "
        "begins with small micro-batches.",
    )
