"""Just so much recomputation as the budget demands, against all choices there are."""

import itertools

import numpy as np
import pytest
from test_search import Machine

from keras_accum._planning.choose import choose
from keras_accum._planning.filled import REPAIRS
from keras_accum._planning.search import WORTH, Fixed, Patience, candidates
from keras_accum._recompute.share import cheapest

RNG = np.random.default_rng(5)
# Eight unequal blocks: what each keeps of a sample, and the time that it takes.
BYTES = RNG.uniform(2, 20, 8)
TIMES = RNG.uniform(0.005, 0.05, 8)
ALL = tuple(range(8))


class Blocks:
    """A choice among the blocks, weighed as exactly as `weights` says."""

    everything = ALL

    def __init__(self, weights=BYTES):
        self.weights = weights

    def subset(self, share):
        total = self.weights.sum()
        chosen = cheapest(self.weights, TIMES, share * total)
        return tuple(chosen), self.weights[chosen].sum() / total


def memory(size, recompute):
    return 1000 + size * (30 + BYTES.sum() - BYTES[list(recompute or ())].sum())


def seconds(size, recompute):
    return (1 + 2 / size) * (1 + TIMES[list(recompute or ())].sum())


def best_of_all(sizes, budget):
    subsets = [s for n in range(9) for s in itertools.combinations(ALL, n)]
    return min(
        seconds(size, subset)
        for size in sizes
        for subset in subsets
        if memory(size, subset) <= budget
    )


def chosen(sizes, budget, weights=BYTES, memory=memory):
    machine = Machine(memory, seconds)
    options = [False, Blocks(weights)]
    best, trials = choose(machine.measure, sizes, budget, options, Patience())
    assert best in trials and memory(best.micro_batch_size, best.recompute) <= budget
    return best, machine


@pytest.mark.parametrize("share", [0.9, 0.75, 0.5, 0.33])
def test_for_one_size_the_choice_is_within_3_percent_of_the_best(share):
    plain, everything = memory(64, ()), memory(64, ALL)
    budget = everything + share * (plain - everything)
    best, machine = chosen([64], budget)
    assert best.seconds <= 1.03 * best_of_all([64], budget)
    # The control: everything recomputed is slower.
    assert best.seconds < 0.98 * seconds(64, ALL)
    assert len(machine.runs) <= 2 + REPAIRS


@pytest.mark.parametrize("budget", [2000, 3000, 5000, 7000])
def test_size_and_blocks_are_chosen_together(budget):
    sizes = candidates(64)
    best, _ = chosen(sizes, budget)
    fitting = [s for s in sizes if memory(s, ()) <= budget]
    plain = min(seconds(s, ()) for s in fitting)
    everything = min(seconds(s, ALL) for s in sizes if memory(s, ALL) <= budget)
    assert best.seconds <= min(plain, everything) / WORTH
    assert best.seconds <= best_of_all(sizes, budget) / WORTH


@pytest.mark.parametrize("weights", [np.ones(8), BYTES[::-1]], ids=["equal", "reversed"])
def test_weights_that_are_wrong_are_repaired_by_measuring(weights):
    plain, everything = memory(64, ()), memory(64, ALL)
    for share in (0.9, 0.6, 0.3, 0.1, 0.01):
        budget = everything + share * (plain - everything)
        best, machine = chosen([64], budget, weights)
        assert best.seconds <= seconds(64, ALL)
        assert len(machine.runs) <= 2 + REPAIRS


def test_a_choice_that_never_fits_ends_with_everything():
    """Memory is no line: all but the last block save nothing."""

    def steep(size, recompute):
        return memory(size, recompute if recompute == ALL else ())

    budget = memory(64, ALL) + 10
    best, _ = chosen([64], budget, memory=steep)
    assert best.recompute == ALL and best.seconds is not None


def test_what_fits_plain_is_not_recomputed():
    best, machine = chosen(candidates(64), memory(64, ()))
    assert best.recompute is False
    assert not any(recompute for _, recompute, _ in machine.runs)


def test_a_single_micro_batch_is_predicted_without_sums_of_gradients():
    sums = 3000

    def summed(size, recompute):
        return memory(size, recompute) + (0 if size == 64 else sums)

    plain, everything = memory(64, ()), memory(64, ALL)
    budget = int(everything + 0.6 * (plain - everything))
    machine = Machine(summed, seconds)
    choose(
        machine.measure,
        candidates(64),
        budget,
        [False, Blocks()],
        Patience(),
        Fixed(0, sums, 0),
    )
    tried = [recompute for size, recompute, _ in machine.runs if size == 64]
    saved = [
        BYTES[list(recompute)].sum() / BYTES.sum() for recompute in tried if recompute
    ]
    # All of them, and at once hardly more than 40 %.
    assert saved[0] == 1.0 and 0.4 <= saved[1] < 0.5
