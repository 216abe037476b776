"""What people ask of an optimizer, and mean the inner one."""

from collections.abc import Sequence
from typing import Any

import keras
from keras.optimizers import LossScaleOptimizer

# Settings of an optimizer that mean the inner one's.
INNER_SETTINGS = (
    "clipnorm",
    "clipvalue",
    "ema_momentum",
    "ema_overwrite_frequency",
    "global_clipnorm",
    "use_ema",
    "weight_decay",
)


class ReachesInner(LossScaleOptimizer):
    """An optimizer whose settings and methods, once it is made, are the inner one's."""

    @property
    def optimizers(self) -> list[keras.optimizers.Optimizer]:
        """The parts of an inner MultiOptimizer; missing for any other, as in Keras."""
        return self.inner_optimizer.optimizers

    @property
    def loss_scale_factor(self) -> float:
        """The constant loss scale that was set on the inner optimizer, or 1."""
        return self.__dict__.get("_static_scale") or 1.0

    @loss_scale_factor.setter
    def loss_scale_factor(self, value: float | None) -> None:
        # Keras's base class sets it while constructing; after that, only a wrapper does.
        if self.__dict__.get("_sealed"):
            raise ValueError(
                "Another optimizer was put around AccumOptimizer. A "
                "LossScaleOptimizer there would drop single micro-batches from a window, "
                "and count its growth in micro-steps. Write "
                "`AccumOptimizer(LossScaleOptimizer(inner), accum_steps=...)`, or leave "
                "it out: under mixed_float16 AccumOptimizer scales the loss by itself."
            )

    def exclude_from_weight_decay(
        self,
        var_list: Sequence[keras.Variable] | None = None,
        var_names: Sequence[str] | None = None,
    ) -> None:
        """Exclude variables from the inner optimizer's weight decay, before it is built.

        Args:
            var_list: variables.
            var_names: strings; variables with one of them in their path.
        """
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Set the variables of the inner optimizer, or all, in the order of `variables`.

        Args:
            weights: arrays.

        Raises:
            ValueError: if they fit neither.
        """
        inner = self.inner_optimizer.variables
        if len(weights) == len(inner):
            self.inner_optimizer.set_weights(weights)
            return
        if len(weights) != len(self.variables):
            raise ValueError(
                f"Received {len(weights)} arrays. The inner optimizer has {len(inner)} "
                f"variables, and {len(self.variables)} with the window's. Build the "
                "optimizer before, `optimizer.build(model.trainable_variables)`."
            )
        super().set_weights(weights)

    def __getattr__(self, name: str) -> Any:
        """What only the inner optimizer has, such as its `momentum` or `beta_1`."""
        inner = self.__dict__.get("inner_optimizer")
        if inner is None or name.startswith("_") or name == "optimizers":
            raise AttributeError(f"'{type(self).__name__}' has no attribute '{name}'")
        return getattr(inner, name)

    def __getattribute__(self, name: str) -> Any:
        """A setting that means the inner optimizer's, or the attribute itself."""
        if name in INNER_SETTINGS and "_sealed" in object.__getattribute__(
            self, "__dict__"
        ):
            return getattr(object.__getattribute__(self, "inner_optimizer"), name)
        return super().__getattribute__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, or the inner optimizer's setting of that name."""
        if name in INNER_SETTINGS and self.__dict__.get("_sealed"):
            setattr(self.inner_optimizer, name, value)
        else:
            super().__setattr__(name, value)
