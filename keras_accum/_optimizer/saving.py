"""How a checkpoint of the optimizer is laid out.

The inner optimizer's variables stand under their numbers, as it would save them itself;
the window's stand beside them, by name. A checkpoint without a window is one of the inner
optimizer, or of a `LossScaleOptimizer` around it.
"""

from collections.abc import Sequence
from typing import Any

import keras


def split_scaler(
    saved: dict[str, Any], variables: Sequence[keras.Variable]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Take a checkpoint apart: the inner optimizer's state, and the loss scale's.

    A `LossScaleOptimizer` saves an iteration and a learning rate that it does not use,
    its step counter, its scale, and then the variables of the optimizer inside.

    Args:
        saved: arrays by their number.
        variables: those of the inner optimizer.
    """
    inner = {str(i): saved[str(i + 4)] for i in range(len(saved) - 4)}
    shapes = [tuple(v.shape) for v in variables]
    if [tuple(value.shape) for value in inner.values()] != shapes:
        return saved, {}
    scaler = {
        "step_counter": saved["2"],
        "dynamic_scale": saved["3"],
        "scales_dynamically": True,
    }
    return inner, scaler


def check_saved_window(saved: dict[str, Any], state: dict[str, keras.Variable]) -> None:
    wrong = [
        name
        for name, variable in state.items()
        if name not in saved or tuple(saved[name].shape) != tuple(variable.shape)
    ]
    if wrong:
        raise ValueError(
            "The saved window does not fit the variables of this optimizer: "
            f"{', '.join(wrong)} are missing or of another shape. Build the model and "
            "the optimizer as they were when saved, then load."
        )
