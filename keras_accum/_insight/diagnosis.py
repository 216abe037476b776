"""`diagnose`: what of a model bends or breaks equivalence, read before any training."""

import dataclasses
from typing import Any

import keras

from .._backend.private import canaries
from .._backend.private.randomness import random_state_kept
from .._backend.private.versions import legacy_hint
from .._backend.warn import collected_warnings
from .._planning.transaction import preserving_state
from .facts import Facts
from .finding import Finding, Level, shortened
from .rules import RULES


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found; `print(diagnosis)` shows a table.

    Attributes:
        model: str, the name of the model.
        findings: tuple of `Finding`, those that differ first.
    """

    model: str
    findings: tuple[Finding, ...]

    @property
    def clean(self) -> bool:
        """Whether nothing is known to differ, and nothing is unknown."""
        return all(finding.level == "exact" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """All of it, in types that JSON has."""
        return {**dataclasses.asdict(self), "clean": self.clean}

    def __str__(self) -> str:
        counts = dict.fromkeys(_LEVELS, 0)
        for finding in self.findings:
            counts[finding.level] += 1
        verdict = (
            "a window is the large batch, as far as a model tells."
            if self.clean
            else f"{counts['differs']} differ, {counts['unknown']} unknown."
        )
        return "\n".join([f"{self.model}: {verdict}", *map(str, self.findings)])

    def __rich__(self) -> Any:
        """The same as a table of the `rich` package, for its `print`."""
        from rich.table import Table

        table = Table(title=str(self).splitlines()[0])
        for name in ("level", "rule", "layers", "what", "remedy"):
            table.add_column(name)
        for f in self.findings:
            table.add_row(f.level, f.rule, shortened(f.layers), f.message, f.remedy)
        return table


_LEVELS: tuple[Level, ...] = ("differs", "unknown", "exact")


def diagnose(model: keras.Model) -> Diagnosis:
    """Say what in a model bends or breaks equivalence with the large batch.

    ```python
    model.compile("adamw", loss=my_loss)
    print(ka.diagnose(model))  # what differs, where, why, and a line that mends it
    ```

    Nothing is trained, and no data are needed: the model is called on three made-up
    samples, at once and in parts, and its loss on made-up targets. So layers and losses
    that couple the samples of a batch are found whatever they are, and so is state that
    moves at each call. What depends on the data (how many tokens a batch holds) is
    "unknown": `check_equivalence` measures it.

    It is about the route that the model is compiled for: an `AccumOptimizer`, or else a
    step that takes the batch apart. The model is afterwards what it was.

    Args:
        model: built; compiled, if its loss, metrics and optimizer are to be read too.

    Returns:
        A `Diagnosis`.

    Raises:
        TypeError: if `model` is no Keras model.
        ValueError: if it is not built.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"`model` must be a `keras.Model`. Received: {model!r}{legacy_hint(model)}"
        )
    if not model.built and not model.variables:
        raise ValueError(
            f"'{model.name}' is not built, so that its layers cannot be read. Call it on "
            "a sample before, `model(x[:1])`, or give it an `Input`."
        )
    canaries.check()
    facts = Facts(model)
    kept = preserving_state(model) if facts.compiled else random_state_kept()
    with collected_warnings(), kept:
        found = [finding for rule in RULES if (finding := rule.apply(facts)) is not None]
    ordered = sorted(found, key=lambda finding: _LEVELS.index(finding.level))
    return Diagnosis(model.name, tuple(ordered))
