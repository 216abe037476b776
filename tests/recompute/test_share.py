"""Recomputing a share of the layers: which ones, and that nothing else changes."""

import itertools

import keras
import numpy as np
import pytest
from blocks import gradients
from helpers import assert_close, assert_equal, assert_refused

import keras_accum as ka
from keras_accum._recompute.share import cheapest, cheapest_ways

layers = keras.layers
PATTERN = "block_*"


@pytest.mark.parametrize("seed", range(6))
def test_the_choice_is_the_best_of_all(seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(3, 10))
    saved = rng.integers(0, 50, count).astype(float)
    times = rng.integers(1, 50, count).astype(float)
    for share in (0.1, 0.5, 0.9, 1.0):
        target = share * saved.sum()
        chosen = cheapest(saved, times, target)
        subsets = itertools.chain.from_iterable(
            itertools.combinations(range(count), n) for n in range(count + 1)
        )
        enough = [s for s in map(list, subsets) if saved[s].sum() >= target - 1e-6]
        assert saved[chosen].sum() >= target - 1e-6
        assert times[chosen].sum() == min(times[s].sum() for s in enough)


@pytest.mark.parametrize("seed", range(3))
def test_the_choice_among_ways_is_the_best_of_all(seed):
    rng = np.random.default_rng(seed)
    items = [[*map(tuple, rng.uniform(0.1, 1, (1 + i % 3, 2)))] for i in range(6)]
    target = sum(max(saved for saved, _ in ways) for ways in items) / 2
    every = itertools.product(*[[None, *range(len(ways))] for ways in items])

    def totals(ways):
        return np.sum([items[i][w] for i, w in ways.items()], axis=0, initial=0.0)

    all_choices = [
        {i: way for i, way in enumerate(choice) if way is not None} for choice in every
    ]
    enough = [ways for ways in all_choices if len(ways) and totals(ways)[0] >= target]
    chosen = cheapest_ways(items, target)
    assert list(chosen) == sorted(chosen) and totals(chosen)[0] >= target
    assert_close(totals(chosen)[1], min(totals(ways)[1] for ways in enough), 1e-12)
    first = cheapest_ways([ways[:1] for ways in items], target)
    assert totals(first)[1] > totals(chosen)[1]  # The control.


def test_equal_ones_are_taken_from_the_front():
    assert cheapest([3.0] * 8, [2.0] * 8, 12.0) == [0, 1, 2, 3]
    assert cheapest([3.0] * 7, [2.0] * 7, 21.0 * 3 / 7) == [0, 1, 2]
    assert cheapest([1 / 3] * 3, [1.0] * 3, 1.0) == [0, 1, 2]
    # More than there is: all that save, and no more.
    assert cheapest([3.0, 0.0, 1.0], [1.0, 1.0, 1.0], 9.0) == [0, 2]


def test_many_items_are_chosen_from_in_no_time():
    """So many differ that not all choices can be looked at."""
    rng = np.random.default_rng(0)
    saved, times = rng.uniform(1, 9, (2, 80))
    chosen = cheapest(saved, times, saved.sum() / 2)
    assert saved[chosen].sum() >= saved.sum() / 2
    # No choice takes less than the best with a last item in part.
    order = np.argsort(times / saved)
    got = np.cumsum(saved[order])
    last = int(np.argmax(got >= saved.sum() / 2))
    least = times[order[:last]].sum()
    assert least <= times[chosen].sum() <= 1.02 * (least + times[order[last]])


def block(width, inner, count, name):
    sizes = [*[inner] * count, width]
    return keras.Sequential([layers.Dense(n, "tanh") for n in sizes], name=name)


def unequal():
    """The first block saves most for its time: much memory, few products."""
    keras.utils.set_random_seed(3)
    inputs = hidden = keras.Input((16, 8))
    rows = layers.Reshape((128, 1))(hidden)
    rows = block(1, 4, 4, "block_0")(rows)
    hidden = layers.Reshape((128,))(rows)
    for i in range(1, 4):
        hidden = layers.Add()([hidden, block(128, 128, 2, f"block_{i}")(hidden)])
    return keras.Model(inputs, layers.Dense(3)(hidden), name="unequal")


def rows(model):
    shape = (6, *model.input_shape[1:])
    x = np.random.default_rng(0).normal(size=shape).astype("float32")
    return x, np.ones((6, 3), "float32")


@pytest.mark.slow_but("0.8-names1")
@pytest.mark.parametrize(
    ("share", "names"),
    [
        (0.7, ["block_0"]),
        (0.8, ["block_0", "block_1"]),
        (1.0, ["block_0", "block_1", "block_2", "block_3"]),
    ],
)
def test_most_bytes_for_the_least_time_go_first(share, names):
    expected = gradients(unequal(), *rows(unequal()))
    model = unequal()
    with ka.recompute(model, PATTERN, share=share) as handle:
        assert list(handle.layers) == names
        for got, want in zip(gradients(model, *rows(model)), expected):
            assert_equal(got, want)
    # The control: what is not named is not recomputed.
    called = [vars(model.get_layer(f"block_{i}")).get("call") for i in range(4)]
    assert called == [None] * 4


def test_a_share_of_segments():
    model = unequal()
    everything = ka.recompute(model, segments=4)
    all_of_them = everything.layers
    everything.undo()
    with ka.recompute(model, segments=4, share=0.5) as handle:
        assert set(handle.layers) < set(all_of_them) and handle.layers


def test_what_is_kept_is_not_saved():
    """With its results kept, a block of products saves less."""
    model = unequal()
    names = [layer.name for layer in model.get_layer("block_0").layers[:-1]]
    with ka.recompute(model, PATTERN, share=0.5) as handle:
        assert handle.layers == ("block_0",)
    with ka.recompute(model, PATTERN, share=0.5, keep=names) as handle:
        assert "block_1" in handle.layers and handle.kept == ()


@pytest.mark.parametrize(
    ("share", "error"),
    [
        (0, ValueError),
        (-0.5, ValueError),
        (1.01, ValueError),
        (float("nan"), ValueError),
        (True, TypeError),
        ("half", TypeError),
    ],
)
def test_what_is_no_share(share, error):
    model = unequal()
    for what in ({"select": PATTERN}, {"segments": 2}):
        assert_refused(
            lambda: ka.recompute(model, **what, share=share),  # noqa: B023
            error,
            "`share` must be a number above 0 and up to 1: how much of the activations "
            "that recomputing all of the selected layers would save has to be saved. "
            f"Received: {share!r}",
        )


def test_a_share_of_nothing():
    assert_refused(
        lambda: ka.recompute(unequal(), layers.Reshape, share=0.5),
        ValueError,
        "`share` chooses among layers that save memory when they are recomputed, and "
        "none of the 2 selected ones does. Select layers that hold several others, such "
        "as the blocks of a transformer.",
    )
