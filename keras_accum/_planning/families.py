"""What a planner may recompute: families of blocks, from none of them to all."""

import collections
from collections.abc import Callable, Sequence
from typing import Any

import keras

from .._backend.private.layers import children, flatten_layers
from .._recompute.api import recompute_parts
from .._recompute.parts import Part, as_parts
from .._recompute.segments import Division
from .._recompute.share import cheapest
from .._recompute.weigh import Trace, trace_step
from .plan import SEGMENTS, switch_on

# Shares are rounded down to so many parts of one, so that they can be printed.
PARTS = 10_000
# Segments stand in for blocks if a trace says that they leave so much less.
MUCH_LESS = 0.9


class Family:
    """Blocks of which some or all can be recomputed.

    Attributes:
        everything: what a plan calls recomputing all of them.

    Args:
        trace: a trace of a training step.
        members: the blocks, each as the calls or the layer that is recomputed as one.
        everything: as above.
        name: gives, for a share and the indices of the members that are recomputed, what
            a plan calls that.
    """

    def __init__(
        self,
        trace: Trace,
        members: Sequence[Sequence[Part]],
        everything: Any,
        name: Callable[[float, list[int]], Any],
    ) -> None:
        self.everything = everything
        self._members = members
        self._saved = [trace.saving(parts) for parts in members]
        self._times = [trace.time(parts) for parts in members]
        self._name = name
        self._chosen: dict[Any, list[int]] = {everything: list(range(len(members)))}

    def subset(self, share: float) -> tuple[Any, float]:
        """The cheapest of them that save `share` of what all save.

        Returns:
            What a plan calls them, and the share that they save.
        """
        share = min(max(int(share * PARTS), 1) / PARTS, 1.0)
        total = sum(self._saved)
        chosen = cheapest(self._saved, self._times, share * total)
        saved = sum(self._saved[i] for i in chosen) / total if total else 1.0
        if len(chosen) == len(self._members) or saved >= 1.0:
            return self.everything, 1.0
        option = self._name(share, chosen)
        self._chosen[option] = chosen
        return option, saved

    def members(self, option: Any) -> list[Sequence[Part]] | None:
        """The blocks that `option` recomputes; None if it is not of this family."""
        chosen = self._chosen.get(option)
        return None if chosen is None else [self._members[i] for i in chosen]


def families_of(model: keras.Model) -> list[Family]:
    """What can be recomputed in part, by a trace.

    The blocks that repeat, or segments if these save much more. Nothing for a model that
    cannot be traced or cut, or is recomputed already.
    """
    parts = as_parts(repeated_blocks(model))
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

    def name(_: float, chosen: list[int]) -> tuple[str, ...]:
        return tuple(paths[i] for i in chosen)

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
            members = family.members(option)
            if members is not None:
                return recompute_parts(model, members).undo
        return switch_on(model, option).undo
