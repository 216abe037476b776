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
# Segments stand in for blocks if a trace says that they leave so much less.
MUCH_LESS = 0.9


class Family:
    """Blocks of which some or all can be recomputed.

    A block is recomputed as a whole, or but for the results of products inside, without
    which the rest costs little (Korthikanti et al., 2022, "Reducing Activation
    Recomputation in Large Transformer Models").

    Attributes:
        everything: what a plan calls recomputing all of them, as a whole.

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
                for kept in ([], inside)[: 2 if inside else 1]
            ]
            for parts, inside in zip(members, self._kept)
        ]
        self._name = name
        self._chosen: dict[Any, dict[int, list[Part]]] = {
            everything: {i: [] for i in range(len(members))}
        }

    def subset(self, share: float) -> tuple[Any, float]:
        """The cheapest of them that save `share` of what all save.

        Returns:
            What a plan calls them, and the share that they save.
        """
        share = min(max(int(share * PARTS), 1) / PARTS, 1.0)
        total = sum(ways[0][0] for ways in self._ways)
        chosen = cheapest_ways(self._ways, share * total)
        saved = sum(self._ways[i][way][0] for i, way in chosen.items())
        if not total or saved >= total:
            return self.everything, 1.0
        kept = {i: self._kept[i] if way else [] for i, way in chosen.items()}
        option = self._name(share, kept)
        self._chosen[option] = kept
        return option, saved / total

    def recompute(self, model: keras.Model, option: Any) -> Recomputation | None:
        """Recompute what a plan calls `option`; None if it is not of this family."""
        chosen = self._chosen.get(option)
        if chosen is None:
            return None
        kept = unique(part.operation for parts in chosen.values() for part in parts)
        return recompute_parts(model, [self._members[i] for i in chosen], kept)


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


def families_of(model: keras.Model) -> list[Family]:
    """What can be recomputed in part, by a trace.

    The blocks that repeat, or segments if these save much more. Nothing for a model that
    cannot be traced or cut, or is recomputed already.
    """
    parts = [
        Part(block, None, None, as_parts(products_inside(block)))
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
            return []
        try:
            trace = trace_step(model, parts)
        except ValueError:
            return []
    called = [[part] for part in parts if trace.is_called([part])]
    # In the order in which they run: of equal ones the first are recomputed.
    called.sort(key=trace.first_operation)
    left, plain = trace.peak(called), trace.peak([])
    if segments and trace.peak(segments) < MUCH_LESS * left:
        return [
            Family(trace, segments, SEGMENTS, lambda s, _: f"{SEGMENTS}, share={s:g}")
        ]
    if left == plain:
        return []
    paths = [part.operation.path for (part,) in called]

    def name(_: float, chosen: dict[int, list[Part]]) -> tuple[str, ...]:
        return tuple(
            with_kept(paths[i], [part.name for part in kept])
            for i, kept in chosen.items()
        )

    return [Family(trace, called, tuple(paths), name)]


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

    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def __call__(self, model: keras.Model, option: Any) -> Callable[[], None]:
        """Switch `option` on; returns what switches it off."""
        for family in self._families:
            if (handle := family.recompute(model, option)) is not None:
                return handle.undo
        return switch_on(model, option).undo
