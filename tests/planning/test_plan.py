"""`Plan`: what it prints, draws and gives away; made by hand, without planning."""

import builtins
import dataclasses
import json

import keras
import pytest
from helpers import assert_close, assert_differ, assert_refused, data, dense_model, fit

import keras_accum as ka
from keras_accum._planning.measure import BaselineMemory
from keras_accum._planning.plan import SEGMENTS
from keras_accum._planning.search import Trial

MIB = 2**20


class Named:
    name = "model"


def example(**changes):
    fields = {
        "micro_batch_size": 19,
        "accum_steps": 7,
        "recompute": False,
        "batch_size": 127,
        "replicas": 1,
        "window": 1,
        "budget_bytes": 64 * MIB,
        "peak_bytes": 50 * MIB,
        "predicted_bytes": 49 * MIB,
        "floor_bytes": 2**10,
        "seconds": 0.25,
        "held": BaselineMemory(MIB, 2 * MIB, MIB // 2),
        "method": "XLA's buffer assignment",
        "trials": (
            Trial(8, False, 30 * MIB),
            Trial(19, False, 50 * MIB, 49 * MIB, 0.25),
            Trial(64, False, 90 * MIB, 91 * MIB),
            Trial(127, False, None),
        ),
        "_model": Named(),
    }
    return ka.Plan(**{**fields, **changes})


def test_a_plan_prints_as_a_table():
    assert str(example()).splitlines() == [
        "Batch of 127: 6 micro-batches of 19 and one of 13, nothing recomputed.",
        "Needs 50.0 MiB of 64.0 MiB (XLA's buffer assignment): weights 1.0 MiB, "
        "optimizer 2.0 MiB, batch 512.0 KiB, step 46.5 MiB.",
        "The last micro-batch is shorter. It is weighted by its samples, so that the "
        "update is still the large batch's.",
        "",
        "micro-batch           recompute  predicted  measured  s/step        verdict",
        "          8  nothing recomputed          -  30.0 MiB       -           fits",
        "         19  nothing recomputed   49.0 MiB  50.0 MiB   0.250         chosen",
        "         64  nothing recomputed   91.0 MiB  90.0 MiB       -    over budget",
        "        127  nothing recomputed          -         -       -  out of memory",
    ]


def first_line(**changes):
    return str(example(**changes)).splitlines()[0]


def test_what_makes_a_batch_is_said_in_the_first_line():
    whole = {"micro_batch_size": 64, "accum_steps": 1, "batch_size": 64}
    assert first_line(**whole) == (
        "Batch of 64: 1 micro-batch of 64, nothing recomputed."
    )
    halves = {"micro_batch_size": 32, "accum_steps": 2}
    assert first_line(**halves, batch_size=128, replicas=2) == (
        "Batch of 128: 2 micro-batches of 32 on each of 2 replicas, nothing recomputed."
    )
    assert first_line(**halves, batch_size=256, window=4, recompute=SEGMENTS) == (
        "Batch of 256: 4 steps of 64, the window of AccumOptimizer; each step 2 "
        "micro-batches of 32, segments recomputed."
    )
    assert first_line(**halves, batch_size=512, window=4, replicas=2) == (
        "Batch of 512: 4 steps of 128, the window of AccumOptimizer; each step 2 "
        "micro-batches of 32 on each of 2 replicas, nothing recomputed."
    )


def test_the_last_micro_batch_is_what_is_left_of_a_replicas_step():
    assert example().last_micro_batch_size == 127 - 6 * 19
    changes = {"micro_batch_size": 10, "accum_steps": 2}
    # 4 steps of 2 replicas of 13 samples each.
    found = example(**changes, batch_size=4 * 2 * 13, window=4, replicas=2)
    assert found.last_micro_batch_size == 3
    assert "each step 1 micro-batches of 10 and one of 3 on each" in str(found)


def test_nothing_is_printed_below_what_can_be_measured():
    """As on CPUs: the step is not told from none, and its parts not from each other."""
    held = BaselineMemory(300, 620, 128)
    trials = (
        Trial(16, False, held.total + 0),
        Trial(32, False, held.total + 255 * 2**10),
        Trial(64, False, held.total + 256 * 2**10, None, 0.001),
    )
    found = example(
        micro_batch_size=64,
        accum_steps=1,
        batch_size=64,
        peak_bytes=held.total,
        predicted_bytes=None,
        floor_bytes=256 * 2**10,
        held=held,
        trials=trials,
    )
    assert str(found).splitlines() == [
        "Batch of 64: 1 micro-batch of 64, nothing recomputed.",
        "Needs below 257.0 KiB of 64.0 MiB (XLA's buffer assignment): weights 300 B, "
        "optimizer 620 B, batch 128 B, step below 256.0 KiB.",
        "",
        "micro-batch           recompute  predicted         measured  s/step  verdict",
        "         16  nothing recomputed          -  below 257.0 KiB       -     fits",
        "         32  nothing recomputed          -  below 257.0 KiB       -     fits",
        "         64  nothing recomputed          -        257.0 KiB   0.001   chosen",
    ]


def test_a_plan_is_plain_data():
    found = json.loads(json.dumps(example().to_dict()))
    assert found["micro_batch_size"] == 19
    assert found["window"] == 1
    assert found["held"] == {"parameters": 2**20, "optimizer": 2**21, "batch": 2**19}
    assert found["trials"][3]["peak_bytes"] is None
    assert len(found) == 14


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


def test_a_plan_trains_as_the_large_batch():
    x, y = data(12)

    def trained(batch_size, plan=None):
        model = dense_model()
        model.compile(keras.optimizers.SGD(0.2), "mse", run_eagerly=True)
        if plan is not None:
            plan = dataclasses.replace(plan, _model=model)
            assert plan.last_micro_batch_size == 2
            assert plan.apply() is model
        fit(model, x, y, batch_size=batch_size, epochs=2)
        return model.get_weights()

    large = trained(12)
    plan = example(micro_batch_size=5, accum_steps=3, batch_size=12)
    assert_close(trained(12, plan), large)
    assert_differ(trained(5), large)
