"""What is said where no micro-batch size fits: what takes the memory, what would help."""

import keras

from .budget import format_bytes
from .measure import BaselineMemory
from .search import Trial


def nothing_fits(
    trials: list[Trial], budget: int, held: BaselineMemory, model: keras.Model
) -> str:
    """The message, from what was measured.

    Args:
        trials: all of it.
        budget: bytes.
        held: what is there between steps.
        model: the model.
    """
    asked = f"No micro-batch size fits {format_bytes(budget)}."
    measured = [trial for trial in trials if trial.peak_bytes is not None]
    if not measured:
        sizes = ", ".join(str(trial.micro_batch_size) for trial in trials)
        return f"{asked} All that were tried ran out of memory: {sizes}."
    least = min(measured, key=lambda trial: trial.peak_bytes or 0)
    peak = least.peak_bytes or 0
    parts = {
        "weights": held.parameters,
        "optimizer": held.optimizer,
        "the batch itself": held.batch,
        "gradients and activations": peak - held.total,
    }
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
    most = max(parts, key=parts.__getitem__)
    help_ = "; ".join(_remedies(most, least, held, model))
    return (
        f"{asked} The smallest that was measured, {least.micro_batch_size}, needs "
        f"{format_bytes(peak)}: {listed}. Most of it: {most}. What would help: {help_}."
    )


def _remedies(
    most: str, least: Trial, held: BaselineMemory, model: keras.Model
) -> list[str]:
    found = []
    if most == "the batch itself":
        found.append(
            "data that yield micro-batches, with `AccumOptimizer`, so that the batch is "
            "never in memory as a whole"
        )
    if not least.recompute and most == "gradients and activations":
        found.append("recomputing activations (`recompute='auto'` or a pattern)")
    if model.dtype_policy.compute_dtype == "float32":
        found.append("mixed precision (`dtype='mixed_bfloat16'`) for the activations")
    if held.optimizer > held.parameters / 2:
        found.append("an optimizer with fewer slots, such as SGD")
    return [*found, "a larger `memory_budget`"]
