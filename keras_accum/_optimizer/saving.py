"""How a checkpoint of the optimizer is laid out.

The inner optimizer's variables stand under their numbers, as it would save them itself;
the window's stand beside them, by name. A checkpoint without a window is one of the inner
optimizer, or of a `LossScaleOptimizer` around it.
"""

import copy
from collections.abc import Sequence
from typing import Any, Self

import keras

from .._backend.private.optimizers import NamesChildren, children_of
from .._backend.warn import warn
from .arguments import resolve_optimizer
from .inner import ReachesInner


class SavesWindow(NamesChildren, ReachesInner):
    """An optimizer that is saved with its open window, laid out as the inner one is."""

    def save_own_variables(self, store: Any) -> None:
        """Save the inner optimizer's variables as it would itself, and then the window's.

        With its layout kept, a checkpoint of the inner optimizer and one of the wrapper
        differ in the window's entries alone.
        """
        self.inner_optimizer.save_own_variables(store)
        for name, variable in self._window_state().items():
            store[name] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Load what `save_own_variables` saved, or a checkpoint without a window.

        The latter comes from the inner optimizer on its own, or from a
        `LossScaleOptimizer` around it. The window is then empty.

        Raises:
            ValueError: if what was saved belongs to other variables. Nothing has changed
                then.
        """
        saved = {key: store[key] for key in list(store.keys())}
        state = self._window_state()
        inner, window, open_window = split_window(saved, state, self._counters())
        if not window:
            inner, window = split_scaler(inner, self.inner_optimizer.variables)
        if self.built:
            # All of it before any of it: a file that does not fit changes nothing.
            check_saved(inner, window, self.inner_optimizer.variables, state, open_window)
        elif open_window:
            warn(
                f"Skipping variable loading for optimizer '{self.name}': the saved one "
                "has a window, and this one is not built. Build it before, "
                "`optimizer.build(model.trainable_variables)`, to go on in that window."
            )
        self.inner_optimizer.load_own_variables(inner)
        self.reset()
        for name, value in window.items():
            state[name].assign(value)

    def _window_state(self) -> dict[str, keras.Variable]:
        """The variables that make an interrupted window go on, by name."""
        accumulator = self._accumulator.variables if self.built else []
        return self._counters() | {v.name: v for v in accumulator}

    def _counters(self) -> dict[str, keras.Variable]:
        counters = [
            self.step_counter,
            self.dynamic_scale,
            self._scaled,
            self._skipped_windows,
            self._skipped_micro_batches,
            self._last_gradient_norm,
        ]
        return {variable.name: variable for variable in counters}

    def __dir__(self) -> list[str]:
        """All attributes, but for the inner optimizer.

        Keras's saving walks through `dir()`, and would save it a second time.
        """
        return [name for name in super().__dir__() if name != "inner_optimizer"]

    def _checkpointed(self, **kwargs: Any) -> dict[str, Any]:
        """What `tf.train.Checkpoint` saves: the inner's state, and then the window's.

        As in `save_own_variables`, so that a checkpoint of the inner optimizer loads.
        """
        return {**children_of(self.inner_optimizer, **kwargs), **self._window_state()}

    def _check_checkpointed(self, name: str) -> None:
        """Refuse the `tf.train.Checkpoint` of a `LossScaleOptimizer`.

        It holds an iteration and a learning rate of its own under the names of the inner
        optimizer's.
        """
        if name == "inner_optimizer":
            raise ValueError(
                "Received a tf.train.Checkpoint of a LossScaleOptimizer. Restore it with "
                "`tf.train.Checkpoint(optimizer=...)` of a LossScaleOptimizer, and pass "
                "that to AccumOptimizer; or save the model with `save_weights`."
            )

    def get_config(self) -> dict[str, Any]:
        """The arguments of the constructor, serialised."""
        steps = self._accum_steps
        return {
            "name": self.name,
            "inner_optimizer": self._inner_config(),
            "accum_steps": (
                keras.saving.serialize_keras_object(steps) if callable(steps) else steps
            ),
            "reduction": self.reduction,
            "accumulator_dtype": self.accumulator_dtype,
            "adaptive_clip_factor": self.adaptive_clip_factor,
            "on_nonfinite": self.on_nonfinite,
        }

    def _inner_config(self) -> dict[str, Any]:
        config = keras.saving.serialize_keras_object(self.inner_optimizer)
        if self._static_scale is not None:
            config["config"]["loss_scale_factor"] = self._static_scale
        if not self._scaler_inside:
            return config
        return {
            "module": "keras.optimizers",
            "class_name": "LossScaleOptimizer",
            "config": {
                "name": "loss_scale_optimizer",
                "inner_optimizer": config,
                "initial_scale": self.initial_scale,
                "dynamic_growth_steps": self.dynamic_growth_steps,
            },
            "registered_name": None,
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> Self:
        """An optimizer with the arguments in `config`, and no state."""
        config = copy.deepcopy(config)  # Keras takes a nested config apart
        inner = config["inner_optimizer"]
        config["inner_optimizer"] = resolve_optimizer(inner, custom_objects)
        if isinstance(config["accum_steps"], dict):
            config["accum_steps"] = keras.saving.deserialize_keras_object(
                config["accum_steps"], custom_objects=custom_objects
            )
        return cls(**config)


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
