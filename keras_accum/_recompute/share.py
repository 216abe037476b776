"""Choosing what to recompute: enough bytes for the least time."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .parts import Part
from .weigh import Trace

# So many states of the search are kept. Below, the choice is the best there is.
MOST_STATES = 4096


def check_share(share: Any) -> None:
    """Refuse a share that is none."""
    is_number = isinstance(share, (int, float, np.number)) and not isinstance(share, bool)
    if share is None or (is_number and 0 < share <= 1):
        return
    raise (ValueError if is_number else TypeError)(
        "`share` must be a number above 0 and up to 1: how much of the activations that "
        "recomputing all of the selected layers would save has to be saved. Received: "
        f"{share!r}"
    )


def choose_share(
    trace: Trace,
    candidates: Sequence[Sequence[Part]],
    share: float,
    kept: Sequence[Part] = (),
) -> list[int]:
    """Which candidates to recompute so that `share` of what all save is saved.

    Args:
        trace: tells what each saves, and the time that it takes.
        candidates: the parts that could be recomputed, each list as one.
        share: above 0 and up to 1.
        kept: parts inside whose results are kept, and which are not computed again.

    Returns:
        Indices of `candidates`, in order. What saves nothing is not among them.

    Raises:
        ValueError: if none of them saves anything.
    """
    saved = [trace.saving(parts, kept) for parts in candidates]
    times = [trace.time(parts, kept) for parts in candidates]
    if not any(saved):
        raise ValueError(
            "`share` chooses among layers that save memory when they are recomputed, and "
            f"none of the {len(saved)} selected ones does. Select layers that hold "
            "several others, such as the blocks of a transformer."
        )
    return cheapest(saved, times, share * sum(saved))


def cheapest(saved: Sequence[float], times: Sequence[float], target: float) -> list[int]:
    """The items that save `target` in the least time: `cheapest_ways` of one way each.

    Returns:
        Indices, in rising order.
    """
    return list(cheapest_ways([[way] for way in zip(saved, times)], target))


def cheapest_ways(
    items: Sequence[Sequence[tuple[float, float]]], target: float
) -> dict[int, int]:
    """The ways that save `target` in the least time; all that save if it is too much.

    A knapsack in which each item goes in one of several ways, or not at all. Of equal
    items the first are taken: they are recomputed last, when least is in memory.

    Args:
        items: for each its ways, each with what it saves and what it costs, at least 0.
        target: the least sum of what is saved.

    Returns:
        From the indices of the items that are taken, in rising order, to their way.
    """
    # A state is a choice among the items so far; dominated ones are dropped.
    got, cost = np.zeros(1), np.zeros(1)
    history: list[tuple[np.ndarray, np.ndarray]] = []
    for ways in items:
        count = len(got)
        savings = [np.minimum(got + saved, target) for saved, _ in ways]
        costs = [cost + time for _, time in ways]
        got, cost = np.concatenate([got, *savings]), np.concatenate([cost, *costs])
        # Stable: without the item comes first among equals.
        order = np.lexsort((-got, cost))
        best = np.maximum.accumulate(np.concatenate([[-1.0], got[order][:-1]]))
        left = order[got[order] > best]
        if len(left) > MOST_STATES:
            thinned = np.linspace(0, len(left) - 1, MOST_STATES).astype(int)
            left = left[np.unique(thinned)]
        history.append((left % count, left // count))
        got, cost = got[left], cost[left]
    # The last state saves most; those before it save less, in less time.
    state = int(np.argmax(got >= got[-1] * (1 - 1e-9)))
    chosen: dict[int, int] = {}
    for i in reversed(range(len(history))):
        parents, way = history[i]
        if way[state]:
            chosen[i] = int(way[state]) - 1
        state = int(parents[state])
    return dict(reversed(chosen.items()))
