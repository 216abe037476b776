"""One finding of `diagnose`."""

import dataclasses
from typing import Literal, TypeAlias

Level: TypeAlias = Literal["exact", "differs", "unknown"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that accumulation does to a model, or cannot do for it.

    Attributes:
        rule: str, the name of the rule, the same in all versions.
        level: "exact", worth knowing, with equality kept; "differs" from the large batch;
            or "unknown", as only the data or a measurement can tell.
        layers: tuple of str, the paths of the layers that it is about; empty if it is
            about the model as a whole.
        message: str, what it is and why.
        remedy: str, a line of code that mends it, or checks it.
        source: str, where it is known from.
    """

    rule: str
    level: Level
    layers: tuple[str, ...]
    message: str
    remedy: str
    source: str

    def __str__(self) -> str:
        about = f" [{shortened(self.layers)}]" if self.layers else ""
        lines = [f"{self.level:8}{self.rule}{about}", self.message, f"> {self.remedy}"]
        return f"\n{_PAD}".join(lines)


_PAD = " " * 8


def shortened(layers: tuple[str, ...]) -> str:
    """Three names and a count."""
    more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
    return ", ".join(layers[:3]) + more
