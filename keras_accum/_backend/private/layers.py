"""Layers and their calls: what travels with tensors, and what is around a call."""

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend import compute_output_spec
from keras.src.backend.common.global_state import (
    get_global_attribute,
    set_global_attribute,
)
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.utils.python_utils import is_default


def flatten_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """`model` itself and the layers inside of it, at any depth.

    `Model.layers` shows the first level only, and not what a layer holds inside.
    """
    return list(model._flatten_layers())


def call(
    model: keras.layers.Layer, *args: Any, training: bool = True, **kwargs: Any
) -> Any:
    """The predictions of `model` in training, with the argument if `call` takes it."""
    if model._call_has_training_arg:
        kwargs["training"] = training
    return model(*args, **kwargs)


def keras_mask(tensor: Any) -> tf.Tensor | None:
    """The mask that travels with a tensor through a model."""
    return getattr(tensor, "_keras_mask", None)


def with_keras_mask(tensor: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor:
    """`tensor` with a mask that travels with it."""
    if mask is not None:
        tensor._keras_mask = mask
    return tensor


def drop_keras_mask(tensor: tf.Tensor) -> None:
    """Have no mask travel with `tensor` any longer."""
    tensor._keras_mask = None


def read(variable: keras.Variable) -> tf.Tensor | None:
    """The value outside of any `StatelessScope`; None before it is initialised.

    Unlike `Variable.value`, not cast to the type that a layer around computes in.
    """
    return None if variable._value is None else tf.convert_to_tensor(variable._value)


def is_watched(variable: keras.Variable) -> bool:
    """Whether tapes watch `variable` by themselves: weights, frozen later or not.

    `Variable.trainable` is what is frozen; what TensorFlow was told is inside.
    """
    return bool(getattr(variable._value, "trainable", False))


def handles_of(variable: keras.Variable) -> list[tf.Tensor]:
    """What TensorFlow's operations call `variable` by, on each replica.

    `Variable.value` gives no `tf.Variable` inside of a `StatelessScope`.
    """
    value = variable._value
    return [own.handle for own in getattr(value, "values", [value])]


def current_scope() -> Any:
    """The innermost `StatelessScope`, or None; Keras has its class only."""
    return get_stateless_scope()


def is_symbolic() -> bool:
    """Whether Keras calls only to learn shapes; `keras.SymbolicScope` cannot be asked."""
    return in_symbolic_scope()


def save_context() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """What is around a call now, as a context manager to have it there again.

    That is the type that weights are cast to, and the arguments that layers pass down
    (`training`). Keras keeps both in attributes of the thread, without an interface.
    """
    names = ("autocast_scope", "current_call_ctx")
    saved = {name: copy.copy(get_global_attribute(name)) for name in names}

    @contextlib.contextmanager
    def restored() -> Iterator[None]:
        outer = {name: get_global_attribute(name) for name in names}
        try:
            for name in names:
                # A copy: layers change the arguments that they pass down.
                set_global_attribute(name, copy.copy(saved[name]))
            yield
        finally:
            for name in names:
                set_global_attribute(name, outer[name])

    return restored


def inherited(name: str) -> Any:
    """The argument `name` that the layer around passes down, None if there is none."""
    context = get_global_attribute("current_call_ctx")
    return None if context is None else context.get_value(name)


def keras_logits(tensor: Any) -> tf.Tensor | None:
    """What went into the softmax or sigmoid that `tensor` came out of, for the loss."""
    return getattr(tensor, "_keras_logits", None)


def with_keras_logits(tensor: tf.Tensor, logits: tf.Tensor | None) -> tf.Tensor:
    """`tensor` with the logits that losses look for."""
    if logits is not None:
        tensor._keras_logits = logits
    return tensor


def build_by_call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Have the layers that `function` calls create their variables, without a value.

    As `Layer.__call__` does with a layer that has no `build`.
    """

    def spec(value: Any) -> Any:
        is_tensor = isinstance(value, tf.Tensor)
        return keras.KerasTensor(value.shape, value.dtype.name) if is_tensor else value

    with tf.init_scope():
        args, kwargs = tf.nest.map_structure(spec, (args, kwargs))
        compute_output_spec(function, *args, **kwargs)


def call_method(layer: keras.layers.Layer) -> str:
    """The method of `layer` that its `__call__` calls."""
    return "call" if layer.quantization_mode is None else "quantized_call"


def is_in_remat_scope(layer: keras.layers.Layer) -> bool:
    """Whether `layer` was created in a `keras.RematScope`, which it remembers."""
    return layer._remat_mode is not None


def children(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """The layers directly inside of `layer`; only models have `layers`."""
    return list(layer._layers)


def own_state(layer: keras.layers.Layer) -> list[keras.Variable]:
    """The variables of `layer` itself that are no weights, such as moving statistics.

    Keras does not count the states of an RNN among its variables.
    """
    states = layer.states if is_stateful(layer) else []
    return [*layer._non_trainable_variables, *keras.tree.flatten(states or [])]


def is_stateful(layer: keras.layers.Layer) -> bool:
    """Whether `layer` is an RNN that goes on from the states of its last call."""
    return isinstance(layer, keras.layers.RNN) and layer.stateful


def attributes(value: Any) -> dict[str, Any]:
    """What was set on `value`, without the lists that TensorFlow keeps of it there."""
    return {n: held for n, held in vars(value).items() if not n.startswith("_self_")}


def attributes_without_losses(layer: keras.layers.Layer) -> dict[str, Any]:
    """What `layer` holds, apart from the losses that Keras collects of a call."""
    return {name: value for name, value in vars(layer).items() if name != "_losses"}


def has_build(layer: keras.layers.Layer) -> bool:
    """Whether `layer` has a `build` of its own; else Keras builds it by calling it."""
    return not is_default(layer.build)


@contextlib.contextmanager
def taking_more_weights(layer: keras.layers.Layer) -> Iterator[None]:
    """Have a layer that is built take further weights; Keras locks it against them."""
    layer._tracker.unlock()
    try:
        yield
    finally:
        layer._tracker.lock()


def renormalizes(layer: keras.layers.BatchNormalization) -> bool:
    """Whether `layer` does batch renormalization, which Keras has from 3.14 on."""
    return getattr(layer, "renorm", False)


class TakesMoments(keras.layers.BatchNormalization):
    """A BatchNormalization that hears the moments which it normalises by.

    Keras has no public way to ask for them; each version in use has this method.
    """

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        mean, variance = super()._moments(inputs, mask)
        self.take_moments(mean, variance, inputs, mask)
        return mean, variance

    def take_moments(self, mean: Any, variance: Any, inputs: Any, mask: Any) -> None:
        """Called with the moments of `inputs` where `mask`, if there is one, is true."""
        raise NotImplementedError


class NamelessWrapper(keras.layers.Wrapper):
    """A wrapper that is in no path: weights have the paths that they have without it.

    Keras puts the name of each layer into the paths of what is created inside of it.
    """

    def _open_name_scope(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def take_arguments(wrapper: keras.layers.Layer, layer: keras.layers.Layer) -> None:
    """Give `wrapper` the arguments of `layer`, passed on as they come.

    Keras reads them off the signatures of `call` and `build`, which a wrapper of any
    layer cannot write down.
    """
    wrapper.build.__signature__ = inspect.signature(layer.build)
    for name in (
        "_call_signature",
        "call_signature_parameters",
        "_call_has_training_arg",
        "_call_has_mask_arg",
        "_call_context_args",
        "_call_has_context_arg",
        "_allow_non_tensor_positional_args",
    ):
        setattr(wrapper, name, getattr(layer, name))
    wrapper._convert_input_args = False  # `layer` converts them.
