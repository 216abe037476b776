"""Random configurations are the large batch, or refused, or warned of; see `fuzz.py`.

A short run, the same each time. `python tests/fuzz.py --minutes 30` takes others.
"""

import dataclasses
import itertools

import fuzz
import pytest
from fuzz_configurations import Configuration, parse, problem, simplest, stream

import keras_accum as ka

EXAMPLES = 8


def test_random_configurations_are_the_large_batch():
    found = fuzz.search(itertools.islice(stream(seed=0), EXAMPLES), failures="stop")
    assert not found.failures, str(found)
    exact = [c for c, outcome in found.outcomes if outcome.status == "equal"]
    assert len(exact) >= 0.5 * EXAMPLES, f"warning always would pass, too: {found}"


@pytest.fixture
def mean_of_means(monkeypatch):
    """What a run as long as the one above finds if every micro-batch counts the same."""
    apply = ka.AccumOptimizer.apply

    def unweighted(self, grads, trainable_variables=None, weight=None):
        return apply(self, grads, trainable_variables, 1.0)

    monkeypatch.setattr(ka.AccumOptimizer, "apply", unweighted)
    drawn = itertools.islice(stream(seed=0), EXAMPLES)
    found = fuzz.search(drawn, failures="stop")
    return found.failures[0]


def test_a_mean_of_means_is_found(mean_of_means):
    assert mean_of_means[1].status == "mismatch"


@pytest.mark.slow  # Tries many; `test_what_fails_is_made_simple` has nothing to train.
def test_a_mean_of_means_is_made_simple(mean_of_means):
    simple, outcome = fuzz.simplified(*mean_of_means)
    assert (simple.route, simple.model) == ("optimizer", "mlp")
    assert outcome.detail.startswith("weights")


def test_a_configuration_is_one_line():
    for recompute, replicas in ((False, 1), (True, 2)):
        drawn = stream(seed=1, recompute=recompute, replicas=replicas)
        for c in itertools.islice(drawn, 30):
            assert parse(str(c)) == c
    assert str(Configuration()) == "route=optimizer"
    with pytest.raises(ValueError, match="this is no configuration: no lengths"):
        parse("lengths=masked")
    with pytest.raises(ValueError, match="'colour' is no field of a configuration"):
        parse("colour=red")


def test_what_is_drawn_differs_and_repeats():
    first, again = ([*itertools.islice(stream(seed=2), 50)] for _ in range(2))
    assert first == again
    for field in ("route", "model", "loss", "optimizer", "weights", "feed", "policy"):
        assert len({getattr(c, field) for c in first}) > 3, field


def test_what_fails_is_made_simple():
    drawn = next(iter(stream(seed=3)))
    c = dataclasses.replace(drawn, optimizer="adam", sizes=(4, 1, 2))
    simple = simplest(c, lambda c: c.optimizer == "adam" and 2 in c.sizes)
    assert str(simple) == "optimizer=adam sizes=2"
    assert problem(simple) is None
