"""The choice of a micro-batch size together with what to recompute."""

from typing import Any

from .._backend.warn import warn
from .filled import FilledSearch
from .search import NOTHING_FIXED, Fixed, Measure, Patience, Search, Trial


def choose(
    measure: Measure,
    sizes: list[int],
    budget: int,
    options: list[Any],
    patience: Patience,
    fixed: Fixed = NOTHING_FIXED,
) -> tuple[Trial | None, list[Trial]]:
    """The fastest trial that fits, and all of them.

    Of steps that take equally long, the one that recomputes nothing is chosen, and of
    those with the same recomputation, the one with the fewest micro-batches.

    Args:
        measure: measures one size.
        sizes: in rising order.
        budget: int, bytes.
        options: what to recompute, the cheapest first: False, a name, or a `Choice`, of
            which each size recomputes as little as it can. Another one is tried only if
            the whole batch does not fit with those before it: there is nothing to gain
            then.
        patience: how long to look for something faster.
        fixed: the bytes that do not depend on the size.
    """
    best: tuple[Search, Trial] | None = None
    searches: list[Search] = []
    start = None
    choices = [option for option in options if hasattr(option, "subset")]
    for option in options:
        if option in choices:
            plain = searches[0] if searches else None
            search: Search = FilledSearch(
                measure, sizes, budget, option, patience, fixed, start, plain
            )
        else:
            search = Search(measure, sizes, budget, option, patience, fixed, start)
        try:
            largest = search.run_largest()
        except ValueError as error:
            if option is options[0]:
                raise
            warn(f"Planning without recomputation, which failed: {error}")
            continue
        searches.append(search)
        if largest is None:
            continue
        found = search.descend(largest) if option in choices else largest
        if best is None or best[0].is_beaten(best[1], found):
            best = search, found
        if largest.micro_batch_size == sizes[-1]:
            break
        # With recomputation, a step needs less.
        start = largest.micro_batch_size
    chosen = None if best is None else best[0].descend(best[1])
    return chosen, [trial for search in searches for trial in search.all_trials]
