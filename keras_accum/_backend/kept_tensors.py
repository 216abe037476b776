"""Tensors of a call that layers keep in attributes, for others to read later."""

import contextlib
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from .attribute_patch import AttributePatch
from .private.layers import attributes_without_losses


class KeptTensors:
    """What layers keep of the calls after this was made.

    Args:
        layers: the layers.
    """

    def __init__(self, layers: Sequence[keras.layers.Layer]) -> None:
        self._layers = layers
        self._before = list(self._tensors())  # Referenced, so that their ids stay.

    def new(self) -> list[tuple[keras.layers.Layer, str]]:
        """The layers that keep a tensor of a call, and in which attribute."""
        known = {id(tensor) for _, _, tensor in self._before}
        found = [(x, name) for x, name, t in self._tensors() if id(t) not in known]
        return list(dict.fromkeys(found))

    def _tensors(self) -> Iterator[tuple[keras.layers.Layer, str, tf.Tensor]]:
        for layer in self._layers:
            for name, value in attributes_without_losses(layer).items():
                values = value.values() if isinstance(value, dict) else value
                several = isinstance(value, (dict, list, tuple))
                for item in values if several else [value]:
                    if isinstance(item, tf.Tensor):
                        yield layer, name, item

    @contextlib.contextmanager
    def out_of_reach(self) -> Iterator[None]:
        """Take away, inside, what is kept; whoever fails for want of it is told why.

        Raises:
            ValueError: if what runs inside fails, and something was kept.
        """
        kept = self.new()
        # Not None, which whoever reads it may ask for.
        patches = [AttributePatch(layer, name, object()) for layer, name in kept]
        try:
            yield
        except (AttributeError, TypeError, ValueError) as error:
            if not kept:
                raise
            names = ", ".join(f"`{layer.name}.{name}`" for layer, name in kept[:3])
            raise ValueError(
                f"The call of this model keeps tensors in {names}. With `two_pass=True` "
                "the loss and the metrics see the whole batch, and these tensors are of "
                "one micro-batch: they are out of reach there. Return them from `call`, "
                "with the predictions; or leave `two_pass` out."
            ) from error
        finally:
            for patch in patches:
                patch.undo()
