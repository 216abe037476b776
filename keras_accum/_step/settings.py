"""How a model trains on a batch: the arguments of `accumulate`, in one object."""

import dataclasses
from typing import Any, Literal, TypeAlias

from .._core.checks import check_option
from .._core.loop import Split

OnOom: TypeAlias = Literal["raise", "halve"]
ON_OOM = ("raise", "halve")


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a training step takes a batch apart.

    Attributes:
        accum_steps: int or None, the number of micro-batches.
        micro_batch_size: int or None, the samples of a micro-batch. One of the two is
            None.
        two_pass: bool, whether the loss is computed over the whole batch, in two passes.
        on_oom: "raise" or "halve", what to do when a step runs out of memory.

    Raises:
        ValueError: unless exactly one of `accum_steps` and `micro_batch_size` is given,
            for one below 1, and for an unknown `on_oom`.
        TypeError: for one that is no integer.
    """

    accum_steps: int | None = None
    micro_batch_size: int | None = None
    two_pass: bool = False
    on_oom: OnOom = "raise"

    def __post_init__(self) -> None:
        split = self.split
        check_option("on_oom", self.on_oom, ON_OOM)
        object.__setattr__(self, "accum_steps", split.accum_steps)
        object.__setattr__(self, "micro_batch_size", split.micro_batch_size)
        object.__setattr__(self, "two_pass", bool(self.two_pass))

    @property
    def split(self) -> Split:
        """The part of the settings that says how large micro-batches are."""
        return Split(self.accum_steps, self.micro_batch_size)

    def in_micro_batches_of(self, size: int) -> "Settings":
        """The same settings, with micro-batches of `size` samples."""
        return dataclasses.replace(self, accum_steps=None, micro_batch_size=size)

    def to_dict(self) -> dict[str, Any]:
        """The settings by the names of the arguments of `accumulate`."""
        return dataclasses.asdict(self)


NAMES = tuple(field.name for field in dataclasses.fields(Settings))
