"""The error where no micro-batch size fits: what needs the memory, what would help."""

import keras

from .budget import format_bytes, format_step
from .measure import BaselineMemory
from .search import Trial


def nothing_fits(
    trials: list[Trial],
    budget: int,
    held: BaselineMemory,
    floor: int,
    model: keras.Model,
) -> str:
    """The message of the error.

    Args:
        trials: all that were measured.
        budget: int, bytes.
        held: what is in memory between steps.
        floor: int, the least bytes of a step that are told from none.
        model: the model.
    """
    asked = f"No micro-batch size fits {format_bytes(budget)}."
    measured = [trial for trial in trials if trial.peak_bytes is not None]
    if not measured:
        sizes = ", ".join(str(trial.micro_batch_size) for trial in trials)
        return f"{asked} All sizes that were tried ran out of memory: {sizes}."
    least = min(measured, key=lambda trial: trial.peak_bytes or 0)
    peak = least.peak_bytes or 0
    step = peak - held.total
    parts = {
        "weights": held.parameters,
        "optimizer": held.optimizer,
        "the batch itself": held.batch,
    }
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
    listed += f", {_STEP} {format_step(step, floor)}"
    most = max({**parts, _STEP: step}.items(), key=lambda item: item[1])[0]
    help_ = "; ".join(_remedies(most, least, held, model))
    return (
        f"{asked} The smallest that was measured, {least.micro_batch_size}, needs "
        f"{format_bytes(peak)}: {listed}. Most of it: {most}. What would help: {help_}."
    )


_STEP = "gradients and activations"


def _remedies(
    most: str, least: Trial, held: BaselineMemory, model: keras.Model
) -> list[str]:
    found = []
    if most == "the batch itself":
        found.append(
            "data that yield micro-batches, with `AccumOptimizer`, so that the batch is "
            "never in memory as a whole"
        )
    if not least.recompute and most == _STEP:
        found.append("recomputing activations (`recompute='auto'` or a pattern)")
    if model.dtype_policy.compute_dtype == "float32":
        found.append("mixed precision (`dtype='mixed_bfloat16'`) for the activations")
    if held.optimizer > held.parameters / 2:
        found.append("an optimizer with fewer slots, such as SGD")
    return [*found, "a larger `memory_budget`"]
