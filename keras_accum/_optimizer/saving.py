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


def split_window(
    saved: dict[str, Any],
    state: dict[str, keras.Variable],
    counters: dict[str, keras.Variable],
) -> tuple[dict[str, Any], dict[str, Any], set[str]]:
    """Take a checkpoint apart: the inner optimizer's state, the window's, and its sums.

    Args:
        saved: arrays by their name.
        state: what a window is saved of, by name.
        counters: what of it is there without sums.

    Returns:
        The inner optimizer's arrays, the window's, and the names that only a built
        optimizer has.
    """
    inner = {key: value for key, value in saved.items() if key.isdecimal()}
    window = {key: value for key, value in saved.items() if key in state}
    return inner, window, saved.keys() - inner.keys() - counters.keys()


def check_saved(
    inner: dict[str, Any],
    window: dict[str, Any],
    variables: Sequence[keras.Variable],
    state: dict[str, keras.Variable],
    open_window: set[str],
) -> None:
    """Refuse a checkpoint that does not fit, before anything of it is loaded.

    Raises:
        ValueError: if a variable of the window, or of the inner optimizer, is missing or
            of another shape.
    """
    wrong = _unlike(window, state) if open_window else []
    if wrong:
        raise ValueError(
            "The saved window does not fit the variables of this optimizer: "
            f"{', '.join(wrong)} are missing or of another shape. Build the model and "
            "the optimizer as they were when saved, then load."
        )
    expected = {str(i): v for i, v in enumerate(variables)}
    wrong = _unlike(inner, expected) if len(inner) == len(expected) else []
    if wrong:
        paths = ", ".join(expected[name].path for name in wrong)
        raise ValueError(
            "The saved state does not fit the variables of the inner optimizer: "
            f"{paths} have another shape. Build the model and the optimizer as they were "
            "when saved, then load."
        )


def _unlike(saved: dict[str, Any], state: dict[str, keras.Variable]) -> list[str]:
    return [
        name
        for name, variable in state.items()
        if name not in saved or tuple(saved[name].shape) != tuple(variable.shape)
    ]
