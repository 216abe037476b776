"""The search for a micro-batch size, on invented memory and time, against all sizes."""

import dataclasses
import itertools

import numpy as np
import pytest
from helpers import assert_refused

from keras_accum._planning import budget as _budget
from keras_accum._planning.budget import format_bytes, format_step, parse_budget
from keras_accum._planning.choose import choose
from keras_accum._planning.search import (
    Fixed,
    Patience,
    Search,
    Trial,
    candidates,
)

MIB = 2**20


class Machine:
    """Steps whose memory and time are formulas, and a note of what was measured."""

    def __init__(self, memory, seconds=lambda size, recompute: 1 / size, limit=None):
        self.memory, self.seconds, self.limit = memory, seconds, limit
        self.runs = []

    def measure(self, size, recompute, timed):
        self.runs.append((size, recompute, timed))
        peak = self.memory(size, recompute)
        if self.limit is not None and peak > self.limit:
            return Trial(size, recompute, None)
        seconds = self.seconds(size, recompute) if timed else None
        return Trial(size, recompute, peak, seconds=seconds)


def search(machine, sizes, budget, recompute=False, patience=None):
    return Search(machine.measure, sizes, budget, recompute, patience or Patience())


def test_the_sizes_to_choose_from_are_the_divisors():
    assert candidates(12) == [1, 2, 3, 4, 6, 12]
    assert candidates(1) == [1]
    assert candidates(64) == [1, 2, 4, 8, 16, 32, 64]


def test_around_a_prime_halves_stand_in_for_divisors():
    assert candidates(127) == [1, 2, 4, 8, 16, 32, 64, 127]
    assert candidates(2 * 31) == [1, 2, 4, 8, 16, 31, 62]
    for rows in range(1, 200):
        sizes = candidates(rows)
        assert sizes[0] == 1 and sizes[-1] == rows
        assert all(high <= 3 * low for low, high in itertools.pairwise(sizes))


CURVES = {
    "line": lambda size, _: 1000 + 37 * size,
    "steep": lambda size, _: 10 * size,
    "flat": lambda size, _: 1000 + size // 10,
    "convex": lambda size, _: 500 + size * size,
    "concave": lambda size, _: 500 + round(900 * size**0.5),
    "steps": lambda size, _: 700 + 256 * (size // 7),
}


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("rows", [1, 2, 12, 60, 97, 128, 360])
def test_the_largest_size_that_fits_is_found_whatever_the_curve(curve, rows):
    sizes = candidates(rows)
    for budget in (400, 900, 1500, 3000, 5000, 10**6):
        machine = Machine(CURVES[curve])
        found = search(machine, sizes, budget).largest()
        fitting = [i for i, s in enumerate(sizes) if machine.memory(s, False) <= budget]
        if curve in ("line", "steep", "flat", "convex"):
            assert found == max(fitting, default=-1)
        else:
            # A line that undershoots may stop one size early, and never goes too far.
            assert max(fitting, default=-1) - 1 <= found <= max(fitting, default=-1)
        measured = {size for size, _, _ in machine.runs}
        assert found == -1 or sizes[found] in measured
        assert len(measured) == len(machine.runs)


def test_a_straight_line_takes_few_measurements():
    sizes = candidates(5040)  # 60 divisors
    machine = Machine(lambda size, _: 1000 + 37 * size)
    largest = search(machine, sizes, 1000 + 37 * 1300).largest()
    assert sizes[largest] == 1260
    assert len(machine.runs) <= 5


def test_a_small_size_is_measured_first_and_running_out_leads_down():
    machine = Machine(lambda size, _: 100 * size, limit=500)
    sizes = candidates(256)
    largest = search(machine, sizes, 10**6).largest()
    assert sizes[largest] == 4
    assert machine.runs[0][0] == 16
    assert max(size for size, _, _ in machine.runs) == 16


def test_the_fastest_is_taken_and_not_the_largest():
    # Fastest at 16; at 8 it is slower again.
    machine = Machine(lambda size, _: size, lambda size, _: 1 + abs(size - 16) / 16)
    best = search(machine, candidates(64), 64).best()
    assert best.micro_batch_size == 16
    # A faster size is compared with the one before twice.
    timed = [size for size, _, timed in machine.runs if timed]
    assert timed == [64, 32, 64, 16, 32, 8]
    # The control: with time that falls, the largest.
    machine = Machine(lambda size, _: size)
    assert search(machine, candidates(64), 64).best().micro_batch_size == 64


def test_a_smaller_size_has_to_be_faster_by_more_than_noise():
    machine = Machine(lambda size, _: size, lambda size, _: 1 + size / 3200)
    assert search(machine, candidates(64), 64).best().micro_batch_size == 64


class Noisy(Machine):
    """A machine whose steps take longer now and then: by `factors`, in turn."""

    def __init__(self, seconds, *factors):
        super().__init__(lambda size, _: size, seconds)
        self.factors = iter([*factors, *[1.0] * 99])

    def measure(self, size, recompute, timed):
        trial = super().measure(size, recompute, timed)
        if not timed:
            return trial
        return dataclasses.replace(trial, seconds=trial.seconds * next(self.factors))


def equal(size, recompute):
    return 1.0


def test_a_tie_goes_to_the_fewest_micro_batches():
    """Also where the machine was slow while the larger size was timed."""
    machine = Noisy(equal, 1.5)
    found = search(machine, candidates(64), 64)
    assert found.best().micro_batch_size == 64
    assert [size for size, _, timed in machine.runs if timed] == [64, 32, 64]
    # The time that is told is the shorter one.
    assert found.trials[6].seconds == 1.0
    # The control: 32 is as much faster the second time.
    machine = Noisy(equal, 1.5, 1.0, 1.5)
    assert search(machine, candidates(64), 64).best().micro_batch_size == 32


def test_a_tie_goes_to_the_fewest_micro_batches_wherever_the_noise_is():
    rng = np.random.default_rng(0)
    chosen = []
    for _ in range(50):
        machine = Noisy(equal, *rng.uniform(1, 1.04, size=50))
        chosen.append(search(machine, candidates(64), 64).best().micro_batch_size)
    assert set(chosen) == {64}


def test_a_size_that_needs_more_the_second_time_is_not_taken():
    """In a graph the peak differs from run to run: the largest counts."""
    machine = Noisy(equal, 1.5)
    measure, runs = machine.measure, machine.runs

    def grows(size, recompute, timed):
        trial = measure(size, recompute, timed)
        more = 10 * (runs.count((64, False, True)) > 1)
        return dataclasses.replace(trial, peak_bytes=trial.peak_bytes + more)

    found = Search(grows, candidates(64), 64, False, Patience())
    assert found.best().micro_batch_size == 32
    assert found.trials[6].peak_bytes == 74


def test_recomputation_too_has_to_be_faster_twice():
    def chosen(*factors):
        machine = Noisy(equal, *factors)
        machine.memory = memory
        best, _ = choose(machine.measure, candidates(64), 2600, [False, "s"], Patience())
        return best.micro_batch_size, best.recompute

    # 16 without recomputation, and 64 with it, take as long.
    assert chosen() == chosen(1.5) == (16, False)
    assert chosen(1.5, 1.0, 1.5) == (64, "s")


def test_what_is_chosen_has_run():
    machine = Machine(lambda size, _: 100 + size)
    for budget in (101, 110, 140, 200):
        best = search(machine, candidates(60), budget).best()
        assert best.seconds is not None
        assert best.peak_bytes == 100 + best.micro_batch_size <= budget


def test_the_whole_batch_is_tried_though_the_line_says_that_it_needs_too_much():
    # Sums of gradients take 1000, and a single micro-batch has none.
    machine = Machine(lambda size, _: size + (0 if size == 64 else 1000))
    sizes = candidates(64)
    fixed = Fixed(sums=1000)
    assert Search(machine.measure, sizes, 900, False, Patience(), fixed).largest() == 6
    # The control: it is not worth a try where it would not help.
    machine.runs.clear()
    fixed = Fixed(sums=10)
    assert Search(machine.measure, sizes, 1040, False, Patience(), fixed).largest() == 5
    assert 64 not in {size for size, _, _ in machine.runs}


@pytest.mark.parametrize("seed", range(40))
def test_what_is_chosen_fits_whatever_the_machine_does(seed):
    rng = np.random.default_rng(seed)
    noise = {size: rng.uniform(0.5, 2) for size in candidates(96)}
    machine = Machine(
        lambda size, _: round(size * noise[size] * rng.uniform(0.9, 1.1)),
        lambda size, _: rng.uniform(),
    )
    found = search(machine, candidates(96), 40)
    best = found.best()
    assert best is None or (best.fits(40) and best.seconds)
    assert best is None or best in found.trials.values()


def test_a_size_between_two_that_fit_may_not_fit():
    # A single micro-batch needs no sums of gradients; 32 does, and is the fastest.
    machine = Machine(
        lambda size, _: 60 if size == 64 else size + 40,
        lambda size, _: {64: 3.0, 32: 1.0, 16: 2.0}.get(size, 4.0),
    )
    fixed = Fixed(sums=50)
    found = Search(machine.measure, candidates(64), 61, False, Patience(), fixed)
    assert found.best().micro_batch_size == 16


def test_a_size_that_turns_out_larger_when_it_runs_is_not_taken():
    machine = Machine(lambda size, _: size)
    plain = machine.measure

    def measure(size, recompute, timed):
        trial = plain(size, recompute, timed)
        # In a graph, the order of operations differs from run to run.
        late = trial.peak_bytes + 20 if timed and size == 32 else trial.peak_bytes
        return Trial(size, recompute, late, seconds=trial.seconds)

    best = Search(measure, candidates(64), 40, False, Patience()).best()
    assert best.micro_batch_size == 16


def test_predictions_come_from_other_sizes():
    machine = Machine(lambda size, _: 1000 + 37 * size)
    found = search(machine, candidates(64), 10**6)
    found.best()
    predicted = [trial for trial in found.trials.values() if trial.predicted_bytes]
    assert predicted
    for trial in predicted:
        assert (
            trial.predicted_bytes
            == trial.peak_bytes
            == machine.memory(trial.micro_batch_size, False)
        )


def test_no_line_is_drawn_through_what_cannot_be_measured():
    """A step below the floor is measured as any number, as nothing or less."""
    small = {1: 1003, 2: 999, 4: 1000, 8: 1255}
    machine = Machine(lambda size, _: small.get(size, 1000 + 20 * size))

    def predicted(fixed):
        found = Search(machine.measure, candidates(64), 10**6, False, Patience(), fixed)
        for size in (1, 2, 4, 8, 16, 32, 64):
            found._try(found._sizes.index(size))
        return [trial.predicted_bytes for trial in found.trials.values()]

    fixed = Fixed(held=1000, floor=256)
    assert predicted(fixed) == [None] * 7
    # The controls: without a floor there is one; a single micro-batch is never on it.
    without = predicted(Fixed(held=1000))
    assert without[:2] == [None, None] and None not in without[4:6]
    assert without[-1] is None


def test_a_prediction_below_what_is_held_is_none():
    machine = Machine(lambda size, _: 2000 - 10 * size)
    found = Search(machine.measure, candidates(64), 10**6, False, Patience())
    for index in (1, 2):
        found._try(index)
    assert found.predict(64) == 2000 - 640
    found._fixed = Fixed(held=1500)
    assert found.predict(64) is None
    assert found.predict(32) == 2000 - 320


def test_looking_for_speed_ends_after_half_of_the_time_that_planning_may_take():
    times = itertools.count(0, 6.0)
    machine = Machine(lambda size, _: size, lambda size, _: size / 64)
    patience = Patience(clock=lambda: next(times))
    best = search(machine, candidates(64), 64, patience=patience).best()
    # It began at 0, and asks at 6, 12 and 18 seconds.
    assert best.micro_batch_size == 16
    assert Patience(lambda: 0.0).lasts(best)


def test_patience_grows_with_the_step():
    times = iter([0.0, 100.0, 100.0])
    patience = Patience(clock=lambda: next(times))
    assert patience.lasts(Trial(1, False, 1, seconds=11.0))
    assert not patience.lasts(Trial(1, False, 1, seconds=9.0))


# ------------------------------------------------------------------- with recomputation


def memory(size, recompute):
    return 1000 + (20 if recompute else 100) * size


def test_recomputation_is_chosen_where_it_pays():
    def seconds(size, recompute):
        return (1 + 8 / size) * (1.35 if recompute else 1)

    sizes = candidates(64)

    def chosen(budget):
        machine = Machine(memory, seconds)
        options = [False, "segments"]
        best, trials = choose(machine.measure, sizes, budget, options, Patience())
        everything = [
            (seconds(size, r), size, r)
            for size in sizes
            for r in options
            if memory(size, r) <= budget
        ]
        _, size, recompute = min(everything)
        assert (best.micro_batch_size, best.recompute) == (size, recompute)
        return best, trials

    # Enough for the whole batch: recomputation is not even tried.
    best, trials = chosen(10_000)
    assert best.recompute is False
    assert {trial.recompute for trial in trials} == {False}
    # Room for 16 plain or 64 recomputed: plain takes 1.5, recomputed 1.52.
    best, trials = chosen(2600)
    assert best.recompute is False
    assert {trial.recompute for trial in trials} == {False, "segments"}
    # Room for 2 plain: the overhead of small micro-batches weighs more.
    best, _ = chosen(1300)
    assert (best.micro_batch_size, best.recompute) == (8, "segments")
    # Nothing fits plain.
    best, _ = chosen(1050)
    assert (best.micro_batch_size, best.recompute) == (2, "segments")


def test_recomputation_is_weighed_also_when_planning_has_taken_its_time():
    times = itertools.count(0, 1000.0)
    machine = Machine(memory, lambda size, recompute: 10 / size)
    patience = Patience(clock=lambda: next(times))
    best, _ = choose(machine.measure, candidates(64), 1300, [False, "s"], patience)
    assert (best.micro_batch_size, best.recompute) == (8, "s")
    # The search with recomputation begins where the one without has ended.
    first = next(size for size, recompute, _ in machine.runs if recompute)
    assert first == 2


def test_where_nothing_fits_all_that_was_tried_is_there():
    machine = Machine(memory)
    best, trials = choose(
        machine.measure, [1, 2, 4], 900, [False, "segments"], Patience()
    )
    assert best is None
    assert {trial.recompute for trial in trials} == {False, "segments"}
    assert min(trial.micro_batch_size for trial in trials) == 1


# ---------------------------------------------------------------------------- budgets


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (12345, 12345),
        ("8GiB", 8 * 2**30),
        ("256 MiB", 256 * MIB),
        ("1.5gb", 1_500_000_000),
        ("2KB", 2000),
        ("100B", 100),
        (" 1TiB ", 2**40),
    ],
)
def test_budgets_are_read(budget, expected):
    assert parse_budget(budget) == expected


def test_budgets_of_the_device(monkeypatch):
    monkeypatch.setattr(_budget, "total_bytes", lambda: 1000 * MIB)
    monkeypatch.setattr(_budget, "free_bytes", lambda: 400 * MIB)
    assert parse_budget(0.25) == 250 * MIB
    assert parse_budget(1.0) == 1000 * MIB
    # What the model holds already is part of its budget, and not of what is free.
    assert parse_budget("device", held=50 * MIB) == 450 * MIB


def test_the_machine_tells_its_memory():
    assert 2**28 < _budget.free_bytes() <= _budget.total_bytes() < 2**50
    assert _budget.device() == "CPU:0"


@pytest.mark.parametrize(
    "budget", [0, -5, 0.0, 1.5, float("nan"), "8", "GiB", "0.1B", ""]
)
def test_budgets_without_sense_are_refused(budget):
    assert_refused(
        lambda: parse_budget(budget),
        ValueError,
        "`memory_budget` must be a number of bytes (an int above 0), a string with a "
        "unit such as '8GiB' or '500MB', a share of the device's memory (a float above "
        f"0 and up to 1), or 'device' for all that is free. Received: {budget!r}",
    )


@pytest.mark.parametrize("budget", [None, True, [1]])
def test_budgets_of_another_kind_are_refused(budget):
    with pytest.raises(TypeError, match="`memory_budget` must be a number of bytes"):
        parse_budget(budget)


def test_bytes_are_written_in_the_largest_unit():
    sizes = [5, 2048, 1.5 * MIB, 3 * 2**30]
    assert [format_bytes(s) for s in sizes] == ["5 B", "2.0 KiB", "1.5 MiB", "3.0 GiB"]
    assert format_step(2048, 1024) == format_bytes(2048)
    assert format_step(-3, 1024) == format_step(1023, 1024) == "below 1.0 KiB"


@pytest.mark.parametrize(("held", "tried"), [(600, [4, 16]), (0, [4, 8])])
def test_the_second_size_is_guessed_by_what_is_held(held, tried):
    """What is there before a step does not grow with the size: one trial less."""
    asked = []

    def measure(size, recompute, timed):
        asked.append(size)
        return Trial(size, recompute, 1000 + 10 * size, seconds=1.0)

    fixed = Fixed(held, 400) if held else Fixed()
    budget = 1000 + 10 * 16 + 5
    search = Search(measure, candidates(64), budget, False, Patience(), fixed)
    assert candidates(64)[search.largest()] == 16
    assert asked[:2] == tried
