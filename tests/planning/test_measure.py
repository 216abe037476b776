"""What is measured of a step, and by what."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_refused, compile_in, data, dense_model
from planned import ROWS, batch, compiled

import keras_accum as ka
from keras_accum._planning import measure as _measure
from keras_accum._planning import memory as _memory
from keras_accum._planning.measure import StepProfiler
from keras_accum._planning.memory import PeakMemory

KIB, MIB = 2**10, 2**20


def profiler_of(model, samples=None, recompute=None):
    samples = batch() if samples is None else samples
    return StepProfiler(model, tuple(map(tf.constant, samples)), recompute)


# ----------------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ("allocator", "system", "method", "floor"),
    [
        (True, True, "allocator of CPU:0", KIB),
        (False, True, "allocator of CPU:0 and resident memory of the process", 256 * KIB),
        (False, False, "allocator of CPU:0, without tensors below 256 KiB", 256 * KIB),
        (None, True, "resident memory of the process", 256 * KIB),
    ],
)
def test_memory_is_told_by_the_allocator_the_system_or_both(
    allocator, system, method, floor, monkeypatch
):
    monkeypatch.setattr(_memory, "_allocator_counts", lambda size: allocator)
    monkeypatch.setattr(_memory, "_system_tells", lambda: system)
    found = PeakMemory()
    assert (found.method, found.floor) == (method, floor)
    in_use = {
        "current": 100,
        "peak": 70 * MIB + 100,
        "VmRSS": 500,
        "VmHWM": 8 * MIB + 500,
    }
    monkeypatch.setattr(_memory, "_allocated", in_use.__getitem__)
    monkeypatch.setattr(_memory, "_resident", in_use.__getitem__)
    monkeypatch.setattr(_memory, "_reset_resident_peak", lambda: None)
    monkeypatch.setattr(tf.config.experimental, "reset_memory_stats", lambda device: None)
    found.set_level()
    found.start()
    by_system = 8 * MIB if "resident" in method else 0
    assert found.peak() == by_system + (0 if allocator is None else 70 * MIB)


def test_where_nothing_tells_the_memory_the_error_says_what_would(monkeypatch):
    monkeypatch.setattr(_memory, "_allocator_counts", lambda size: None)
    monkeypatch.setattr(_memory, "_system_tells", lambda: False)
    assert_refused(
        PeakMemory,
        ValueError,
        "CPU:0 does not tell how much of its memory is in use, so that nothing can be "
        "measured. On a CPU it does with TF_CPU_ALLOCATOR_USE_BFC=1 in the environment, "
        "set before TensorFlow is imported; or compile the model with "
        "`jit_compile=True`.",
    )
    model = compiled("eager")
    with pytest.raises(ValueError, match="CPU:0 does not tell"):
        ka.plan(model, batch(), memory_budget="1GiB", verbose=0)


def grown(memory, count, size):
    """What `memory` says of `count` tensors of `size` bytes."""
    memory.start()
    tensors = [tf.fill([size // 4], 1.0) for _ in range(count)]
    peak = memory.peak()
    del tensors
    return peak


def test_many_small_tensors_are_seen_and_what_was_there_before_is_not():
    before = tf.ones((8 * MIB,))  # 32 MiB
    memory, pair = PeakMemory(), PeakMemory(replicas=2)
    for each in (memory, pair):
        each.set_level()
    found = grown(memory, 100, 200 * KIB)
    assert 0.8 * 20_000 * KIB < found < 1.5 * 20_000 * KIB
    assert 0.8 * 10_000 * KIB < grown(pair, 100, 200 * KIB) < 1.5 * 10_000 * KIB
    assert grown(memory, 1, 16) < MIB < before.shape[0]


def test_a_peak_below_the_level_is_no_negative_number(monkeypatch):
    memory = PeakMemory()
    memory._level, memory._by_allocator, memory._by_system = 10 * MIB, True, False
    monkeypatch.setattr(_memory, "_allocated", {"peak": MIB}.__getitem__)
    assert memory.peak() == 0


# ------------------------------------------------------------------------------- steps


@pytest.mark.slow_but("graph")
@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
def test_the_way_a_step_runs_decides_how_it_is_measured(mode):
    profiler = profiler_of(compile_in(dense_model(), mode, keras.optimizers.SGD()))
    trial = profiler.measure(1, False, timed=True)
    assert trial.peak_bytes >= profiler.held.total > 0
    assert trial.seconds > 0
    if mode == "xla":
        assert (profiler.method, profiler.floor) == ("XLA's buffer assignment", KIB)
    else:
        assert (profiler.method, profiler.floor) == (
            profiler.memory.method,
            profiler.memory.floor,
        )


def test_a_step_that_is_compiled_in_parts_has_to_run():
    """With convolutions on a CPU: the compiler knows one micro-step alone."""
    layers = [keras.layers.Conv2D(4, 3), keras.layers.Flatten(), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((8, 8, 2)), *layers])
    model.compile("sgd", "mse", jit_compile=True)
    profiler = profiler_of(
        model, (np.ones((ROWS, 8, 8, 2), "float32"), np.ones((ROWS, 3)))
    )
    assert model.jit_compile and not profiler.compiles
    assert profiler.method == profiler.memory.method


def test_a_step_without_a_time_runs_on_two_micro_batches():
    rows = []

    class Rows(keras.layers.Layer):
        def call(self, x):
            rows.append(x.shape[0])
            return x

    model = keras.Sequential([keras.Input((5,)), Rows(), keras.layers.Dense(3)])
    profiler = profiler_of(compile_in(model, "eager", keras.optimizers.SGD()), data(6))

    def micro_batches(timed):
        rows.clear()
        profiler.measure(2, False, timed=timed)
        steps = 6 if timed else 3  # one of each three warms up
        return rows.count(2) / steps

    # With one alone there are no sums of gradients. The control: all of the batch.
    assert micro_batches(timed=False) == 2
    assert micro_batches(timed=True) == 3


def test_of_several_steps_the_largest_peak_and_the_shortest_time_count(monkeypatch):
    monkeypatch.setattr(_measure, "MOST_STEPS", 5)
    profiler = profiler_of(compile_in(dense_model(), "eager", keras.optimizers.SGD()))
    steps = []
    monkeypatch.setattr(profiler, "_call", lambda step, batch: steps.append(step))
    peaks = iter([30, 50, 20, 40, 10])

    class Memory:
        def start(self):
            steps.append("start")

        def peak(self):
            return next(peaks)

    profiler.memory = Memory()
    assert profiler._peak("step", None) == 50
    assert steps == ["step", *["start", "step"] * 5]
    steps.clear()
    times = iter([0.0, 0.3, 1.0, 1.1, 2.0, 2.4, 3.0, 3.3])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    # 0.3, 0.1, 0.4 and 0.3 seconds are more than one.
    assert profiler._time("step", None) == pytest.approx(0.1)
    assert steps == ["step"] * 5


def test_short_steps_are_timed_more_often(monkeypatch):
    monkeypatch.setattr(_measure, "SHORT_SECONDS", 0.05)
    profiler = profiler_of(compile_in(dense_model(), "eager", keras.optimizers.SGD()))
    taken = []
    monkeypatch.setattr(profiler, "_call", lambda step, batch: taken.append(step))
    for seconds, count in ((0.001, 25), (0.01, 5), (0.1, 2)):
        now = iter(np.arange(100) * seconds)
        monkeypatch.setattr("time.perf_counter", lambda now=now: next(now))
        taken.clear()
        profiler._time("step", None)
        assert len(taken) == 1 + count


def test_recomputation_is_on_while_an_eager_step_runs():
    on, calls = [False], []

    class Notes(keras.layers.Layer):
        def call(self, x):
            calls.append(on[0])
            return x

    def switch(model, recompute):
        on[0] = recompute
        return lambda: on.__setitem__(0, False)

    model = keras.Sequential([keras.Input((5,)), Notes(), keras.layers.Dense(3)])
    compile_in(model, "eager", keras.optimizers.SGD())
    profiler = profiler_of(model, recompute=switch)
    calls.clear()
    profiler.measure(1, "all", timed=False)
    assert set(calls) == {"all"} and on == [False]
    # The control.
    calls.clear()
    profiler.measure(1, False, timed=False)
    assert set(calls) == {False}


def test_each_step_that_is_measured_ends_a_window():
    """The end of a window, with its update, needs the most memory."""
    optimizer = ka.AccumOptimizer(keras.optimizers.SGD(), 8)
    profiler = profiler_of(compile_in(dense_model(), "graph", optimizer))
    profiler.measure(1, False, timed=False)
    assert int(optimizer.iterations) == 3
    assert int(optimizer.micro_step) == 0


def test_a_train_step_of_an_accumulating_class_is_measured():
    sizes = []

    class Own(ka.GradientAccumulationModel):
        def train_step(self, data):
            sizes.append(self.micro_batch_size)
            return super().train_step(data)

    inputs = keras.Input((5,))
    model = Own(inputs, keras.layers.Dense(3)(inputs), accum_steps=2)
    profiler = profiler_of(compile_in(model, "eager", keras.optimizers.SGD()))
    profiler.measure(1, False, timed=False)
    assert sizes == [1, 1, 1]
    assert model.accum_steps == 2


@pytest.mark.slow
def test_the_peak_and_the_compiler_agree_on_what_grows_with_a_sample(monkeypatch):
    monkeypatch.setattr(_measure, "MOST_STEPS", 5)
    width, layers = 128, 4
    layer = [keras.layers.Dense(width, "tanh", use_bias=False) for _ in range(layers)]
    model = keras.Sequential([keras.Input((width,)), *layer])
    samples = tuple(tf.ones((8192, width)) for _ in range(2))

    def per_sample():
        profiler = StepProfiler(model, samples, None)
        small, large = (
            profiler.measure(size, False, timed=False).peak_bytes for size in (512, 4096)
        )
        return (large - small) / (4096 - 512)

    model.compile("sgd", "mse", jit_compile=True)
    compiler = per_sample()
    model.compile("sgd", "mse", jit_compile=False)
    # XLA keeps results before and after tanh, or both: between one and three of them.
    one = layers * width * 4
    assert 0.7 * one < per_sample() < 3.3 * one
    assert 0.7 * one < compiler < 3.3 * one


def failing(error, message="OOM when allocating"):
    step = StepProfiler.step

    def make(profiler, size, *args):
        if size > 3:
            raise error(None, None, message)
        return step(profiler, size, *args)

    return make


def test_running_out_of_memory_is_a_verdict_and_any_other_error_is_not(monkeypatch):
    model = compile_in(dense_model(), "eager", keras.optimizers.SGD())
    profiler = profiler_of(model, data(4))
    exhausted = tf.errors.ResourceExhaustedError
    for error, message, expected in [
        (exhausted, "OOM when allocating", None),
        (exhausted, "The queue is full", "queue is full"),
        (tf.errors.InvalidArgumentError, "wrong", "wrong"),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(StepProfiler, "step", failing(error, message))
            if expected is None:
                assert profiler.measure(4, False, timed=False).peak_bytes is None
            else:
                with pytest.raises(error, match=expected):
                    profiler.measure(4, False, timed=False)
    # The control.
    assert profiler.measure(4, False, timed=False).peak_bytes is not None
