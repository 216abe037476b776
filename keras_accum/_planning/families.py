"""What a planner may recompute: families of blocks, from none of them to all."""

import collections
from collections.abc import Callable, Sequence
from typing import Any

import keras

from .._backend.identity import unique
from .._backend.private.layers import children, flatten_layers
from .._recompute.api import Recomputation, recompute_parts
from .._recompute.parts import Part, as_parts
from .._recompute.segments import Division
from .._recompute.select import products_inside
from .._recompute.share import cheapest_ways
from .._recompute.weigh import Trace, trace_step
from .plan import SEGMENTS, switch_on, with_kept

# Shares are rounded down to so many parts of one, so that they can be printed.
PARTS = 10_000
# Segments save most if a trace says that they leave so much less than blocks.
MUCH_LESS = 0.9


class Family:
    """Blocks of which some or all can be recomputed.

    A block is recomputed as a whole, or but for the results of products inside, without
    which the rest costs little (Korthikanti et al., 2022, "Reducing Activation
    Recomputation in Large Transformer Models").

    Attributes:
        everything: what a plan calls recomputing all of them, as a whole.
        saved: float, the bytes that this saves, by the trace.

    Args:
        trace: a trace of a training step.
        members: the blocks, each as the calls or the layer that is recomputed as one.
        everything: as above.
        name: gives, for a share and the members that are recomputed, by index, each with
            the parts inside whose results are kept, what a plan calls that.
    """

    def __init__(
        self,
        trace: Trace,
        members: Sequence[Sequence[Part]],
        everything: Any,
        name: Callable[[float, dict[int, list[Part]]], Any],
    ) -> None:
        self.everything = everything
        self._members = members
        self._kept = [_worth_keeping(trace, parts) for parts in members]
        # For each member its ways: as a whole, and but for what it keeps.
        self._ways = [
            [
                (trace.saving(parts, kept), trace.time(parts, kept))
                for kept in ([[], inside] if inside else [[]])
            ]
            for parts, inside in zip(members, self._kept)
        ]
        self.saved = sum(ways[0][0] for ways in self._ways)
        self._name = name
        self._chosen: dict[Any, dict[int, list[Part]]] = {
            everything: {i: [] for i in range(len(members))}
        }

    def cheapest(self, target: float) -> tuple[Any, float, float]:
        """The cheapest of them that save `target` bytes.

        Returns:
            What a plan calls them, the bytes that they save, and the time that they take.
        """
        share = target / self.saved if self.saved else 1.0
        share = min(max(int(share * PARTS), 1) / PARTS, 1.0)
        chosen = cheapest_ways(self._ways, share * self.saved)
        ways = [self._ways[i][way] for i, way in chosen.items()]
        saved, time = sum(way[0] for way in ways), sum(way[1] for way in ways)
        if saved >= self.saved:
            return self.everything, self.saved, time
        kept = {i: self._kept[i] if way else [] for i, way in chosen.items()}
        option = self._name(share, kept)
        self._chosen[option] = kept
        return option, saved, time

    def recompute(self, model: keras.Model, option: Any) -> Recomputation | None:
        """Recompute what a plan calls `option`; None if it is not of this family."""
        chosen = self._chosen.get(option)
        if chosen is None:
            return None
        kept = unique(part.operation for parts in chosen.values() for part in parts)
        return recompute_parts(model, [self._members[i] for i in chosen], kept)


class Choices:
    """Blocks, or segments: whichever saves enough in less time.

    Attributes:
        everything: what a plan calls recomputing all of the first family.

    Args:
        families: that with which a step needs least comes first.
    """

    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families
        self.everything = families[0].everything

    def subset(self, share: float) -> tuple[Any, float]:
        """The cheapest that saves `share` of what all of the first family save.

        Returns:
            What a plan calls it, and the share that it saves.
        """
        most = self._families[0].saved
        if not most:
            return self.everything, 1.0
        enough = [f for f in self._families if f.saved >= share * most]
        found = [family.cheapest(share * most) for family in enough]
        option, saved, _ = min(found, key=lambda choice: choice[2])
        return option, min(saved / most, 1.0)

    def recompute(self, model: keras.Model, option: Any) -> Recomputation | None:
        """Recompute what a plan calls `option`; None if it is not among them."""
        handles = (family.recompute(model, option) for family in self._families)
        return next((handle for handle in handles if handle is not None), None)


def _worth_keeping(trace: Trace, parts: Sequence[Part]) -> list[Part]:
    """The products inside whose results spare time; those of one name go together."""
    named: dict[str, list[Part]] = {}
    for part in parts:
        for inside in part.parts:
            if part.graph is None and trace.is_called([inside]):
                named.setdefault(inside.name, []).append(inside)
    whole = trace.time(parts)
    return [
        part
        for together in named.values()
        if trace.time(parts, together) < whole
        for part in together
    ]


def choices_of(model: keras.Model) -> Choices | None:
    """What can be recomputed in part, by a trace: blocks that repeat, or segments.

    None for a model that cannot be traced or cut, or is recomputed already.
    """
    # In eager mode the second pass computes all, also what is kept.
    keeps = not getattr(model, "run_eagerly", False)
    parts = [
        Part(block, None, None, as_parts(products_inside(block) if keeps else []))
        for block in repeated_blocks(model)
    ]
    try:
        recompute_parts(model, [[part] for part in parts]).undo()
    except ValueError:
        parts = []
    segments: list[Sequence[Part]] = []
    try:
        division = Division(model, None, parts)
        trace, segments = division.trace, division.segments
    except ValueError:
        if not parts:
            return None
        try:
            trace = trace_step(model, parts)
        except ValueError:
            return None
    blocks = [[part] for part in parts if trace.is_called([part])]
    # In the order in which they run: of equal ones the first are recomputed.
    blocks.sort(key=trace.first_operation)
    plain, left = trace.peak([]), trace.peak(blocks)
    families = [_blocks(trace, blocks)] if left < plain else []
    if segments:
        # Where it is much less that they leave, segments are what saves most.
        first = trace.peak(segments) < MUCH_LESS * left
        families.insert(0 if first else len(families), _segments(trace, segments))
    return Choices(families) if families else None


def _blocks(trace: Trace, blocks: Sequence[Sequence[Part]]) -> Family:
    paths = [part.operation.path for (part,) in blocks]

    def name(_: float, chosen: dict[int, list[Part]]) -> tuple[str, ...]:
        return tuple(
            with_kept(paths[i], [part.name for part in kept])
            for i, kept in chosen.items()
        )

    return Family(trace, blocks, tuple(paths), name)


def _segments(trace: Trace, segments: Sequence[Sequence[Part]]) -> Family:
    name = lambda share, _: f"{SEGMENTS}, share={share:g}"  # noqa: E731
    return Family(trace, segments, SEGMENTS, name)


def repeated_blocks(model: keras.Model) -> list[keras.layers.Layer]:
    """The layers of the most frequent class that has layers inside."""
    blocks = [layer for layer in flatten_layers(model) if children(layer)]
    blocks = [layer for layer in blocks if layer is not model]
    if not blocks:
        return []
    kind, count = collections.Counter(type(layer) for layer in blocks).most_common(1)[0]
    return [layer for layer in blocks if type(layer) is kind] if count > 1 else []


class Switch:
    """Switches on what a plan recomputes, without a trace for each time."""

    def __init__(self, choices: Choices | None) -> None:
        self._choices = choices

    def __call__(self, model: keras.Model, option: Any) -> Callable[[], None]:
        """Switch `option` on; returns what switches it off."""
        known = self._choices and self._choices.recompute(model, option)
        return (known or switch_on(model, option)).undo
