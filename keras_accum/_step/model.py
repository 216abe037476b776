"""Keras models whose training step takes the effective batch, micro-batch by micro-batch.

`fit`, `train_on_batch`, schedules, callbacks and metrics then mean what they mean for the
large batch: one step is one update.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import keras

from .._backend.private import canaries
from .._backend.private.graphs import Functional, functional_arguments, structures
from .._backend.private.losses import tell_activity_losses
from .._backend.private.strategies import patch_distribution_bugs
from .._backend.private.versions import legacy_hint
from .._core.checks import check_arguments, other_names, refuse_unknown_arguments
from .._core.loop import compiles_loop
from .._core.moving_state import moving_layers, warn_of_moving
from .retry import RetryingStep
from .settings import NAMES, OnOom, Settings
from .train_step import train_step


@keras.saving.register_keras_serializable(package="keras_accum")
class GradientAccumulationModel(keras.Model):
    """A `keras.Model` that trains on a batch at the memory of one micro-batch.

    ```python
    model = GradientAccumulationModel(inputs, outputs, accum_steps=8)
    model.compile("adamw", loss="sparse_categorical_crossentropy")
    model.fit(x, y, batch_size=128)  # 16 samples at a time in memory
    ```

    Also to be subclassed, with a `call` of your own. `accumulate` does the same for a
    model that exists already.

    Each loss is divided by its own denominator over the whole batch: samples, tokens
    under a mask, or the sum of sample weights, as its `reduction` says; several outputs
    with different masks are exact too. Loss, metrics, weights and slots equal those of
    the large batch to float32 rounding (1e-6 relative).

    A `compute_loss` of your own that calls Keras losses, or `super()`, is understood. For
    one that does not, micro-batches weigh by their samples; define

    ```python
    def compute_loss_weight(self, x, y, y_pred, sample_weight):
        return ...  # scalar: what compute_loss divided by
    ```

    to say otherwise.

    It does not hold for layers that couple the samples of a batch: BatchNormalization
    sees micro-batches (`AccumBatchNormalization` pools their statistics). For losses that
    do, pass `two_pass=True`.

    Args:
        *args: the inputs and outputs of a functional model, or nothing in a subclass.
        accum_steps: int, how many micro-batches to make of a batch.
        micro_batch_size: int, how many samples to have in a micro-batch. Exactly one of
            the two has to be given.
        two_pass: bool. True is exact for any loss of the predictions, also one that
            couples samples (contrastive, Dice over the batch, ranking). It costs one
            more forward pass, and the memory of the predictions.
        on_oom: what `fit` and `train_on_batch` do when a step runs out of memory:
            `"raise"`, or `"halve"` the micro-batch and try the same batch again, with
            the same random numbers. The update stays that of the whole batch. After 100
            steps in a row the size before is tried once more. Not on several replicas.
        **kwargs: as for `keras.Model`.

    Raises:
        ValueError, TypeError: for `accum_steps` and `micro_batch_size`.
    """

    def __init__(
        self,
        *args: Any,
        accum_steps: int | None = None,
        micro_batch_size: int | None = None,
        two_pass: bool = False,
        on_oom: OnOom = "raise",
        **kwargs: Any,
    ) -> None:
        check_arguments("GradientAccumulationModel", other_names(kwargs), NAMES)
        # Keras clones a functional model as `type(model)(inputs, outputs, name=...)`.
        settings: Settings | None = getattr(type(self), "_settings_of_clones", None)
        if settings is None or (accum_steps, micro_batch_size) != (None, None):
            settings = Settings(accum_steps, micro_batch_size, two_pass, on_oom)
        if functional_arguments(args, kwargs):
            # Keras would make every model of this class a functional one.
            functional: Any = _functional(type(self), settings)
            object.__setattr__(self, "__class__", functional)
        super().__init__(*args, **kwargs)
        canaries.check()
        tell_activity_losses()
        patch_distribution_bugs()
        self._settings = settings

    @property
    def accumulation(self) -> Settings:
        """How the model accumulates: its settings, as a model in `accumulate` has too."""
        return self._settings

    @property
    def accum_steps(self) -> int | None:
        """How many micro-batches are made of a batch, if that is what was given."""
        return self._settings.accum_steps

    @property
    def micro_batch_size(self) -> int | None:
        """How many samples a micro-batch has, if that is what was given."""
        return self._settings.micro_batch_size

    @property
    def two_pass(self) -> bool:
        """Whether the loss is taken over the whole batch, in two passes."""
        return self._settings.two_pass

    @property
    def on_oom(self) -> str:
        """What is done when a step runs out of memory."""
        return self._settings.on_oom

    def make_train_function(self, force: bool = False) -> Any:
        """The function that `fit` calls for each batch."""
        if self._settings.on_oom == "halve":
            return _make_retrying(self, self._settings, force)
        with _loop_in_graph(self):
            return super().make_train_function(force)

    def train_step(self, data: Any) -> dict[str, Any]:
        """Update once with a batch, one micro-batch in memory at a time."""
        return train_step(self, data, self._settings)

    def __reduce__(self) -> tuple[Any, ...]:
        """As Keras pickles a model, but by a class that pickle finds by its name.

        That of a functional model is made while the program runs.
        """
        load, arguments = super().__reduce__()
        return getattr(GradientAccumulationModel, load.__name__), arguments

    def get_config(self) -> dict[str, Any]:
        """The arguments of the constructor, serialised.

        A subclass with a constructor of its own has its own arguments.
        """
        config = super().get_config()
        if "layers" not in config:
            return config
        return {**config, **self._settings.to_dict()}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> "GradientAccumulationModel":
        """A model with the arguments in `config`, and no weights."""
        config = dict(config)
        if "layers" not in config:
            return cls(**config)
        # Older files do not have all of them.
        own = {name: config.pop(name) for name in NAMES if name in config}
        plain = keras.Model.from_config(config, custom_objects)
        inputs, outputs = structures(plain)
        return cls(inputs, outputs, name=plain.name, trainable=plain.trainable, **own)


def _functional(cls: type, settings: Settings) -> type:
    """`cls` as a functional model, saved and loaded by the name of `cls`.

    Made without settings of its own, as a clone is, a model has those given here.
    """
    return _make_functional(vars(cls).get("_class_of_user", cls), settings)


@functools.cache
def _make_functional(cls: Any, settings: Settings) -> type:
    names = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "_class_of_user": cls,
        "_settings_of_clones": settings,
    }
    functional = type(cls.__name__, (cls, Functional), names)
    package, _, name = keras.saving.get_registered_name(cls).rpartition(">")
    if package:
        keras.saving.register_keras_serializable(package, name)(functional)
        # By that name, `cls` is what is to be found: it makes either kind.
        keras.saving.get_custom_objects()[f"{package}>{name}"] = cls
    return functional


def _make_retrying(
    model: keras.Model, settings: Settings, force: bool = False
) -> RetryingStep:
    """A model's `make_train_function`, for `on_oom="halve"`."""
    if force or not isinstance(model.train_function, RetryingStep):
        model.train_function = RetryingStep(model, settings)
    return model.train_function


def _make_train_function(
    model: keras.Model, settings: Settings, force: bool = False
) -> Any:
    """The `make_train_function` of a model that `accumulate` was called with."""
    if settings.on_oom == "halve":
        return _make_retrying(model, settings, force)
    with _loop_in_graph(model):
        return type(model).make_train_function(model, force)


@contextlib.contextmanager
def _loop_in_graph(model: keras.Model) -> Iterator[None]:
    """Have Keras not compile a training step that compiles its parts by itself."""
    jit_compile = model.jit_compile
    model.jit_compile = compiles_loop(model)
    try:
        yield
    finally:
        model.jit_compile = jit_compile


@refuse_unknown_arguments("accumulate")
def accumulate(
    model: keras.Model,
    *,
    accum_steps: int | None = None,
    micro_batch_size: int | None = None,
    two_pass: bool | None = None,
    on_oom: OnOom | None = None,
) -> keras.Model:
    """Have a model that exists train on batches, one micro-batch in memory at a time.

    ```python
    model = keras.applications.ResNet50(weights=None)
    model = accumulate(model, micro_batch_size=4)
    model.compile("sgd", loss="categorical_crossentropy")
    model.fit(x, y, batch_size=128)
    ```

    Works in place: only the training step changes. What is saved, its weights, its
    config and its class are the model's own; a model loaded from it trains as usual
    until it is passed here too. `model.accumulation` holds the settings; other models do
    not have it. `del model.train_step, model.make_train_function, model.accumulation`,
    and compiling anew, undoes it.

    Warns of layers that move state at each call, as BatchNormalization does: they see one
    micro-batch at a time.

    Args:
        model: any Keras model: functional, Sequential, subclassed, loaded; compiled or
            not, built or not.
        accum_steps: as for `GradientAccumulationModel`.
        micro_batch_size: likewise.
        two_pass: likewise; by default as it is in a model that accumulates already, else
            False.
        on_oom: likewise; by default as it is, else "raise".

    Returns:
        `model` itself.

    Raises:
        TypeError: if it is no `keras.Model`.
        ValueError: if the model has a `train_step` of its own, which could not be split;
            and, with TypeError, for `accum_steps` and `micro_batch_size`.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"`model` must be a `keras.Model`. Received: {model!r}{legacy_hint(model)}"
        )
    was = settings_of(model)
    if two_pass is None:
        two_pass = was is not None and was.two_pass
    if on_oom is None:
        on_oom = "raise" if was is None else was.on_oom
    settings = Settings(accum_steps, micro_batch_size, two_pass, on_oom)
    canaries.check()
    tell_activity_losses()
    patch_distribution_bugs()
    _set(model, settings)
    if hasattr(type(model), "_settings_of_clones"):
        model.__class__ = _functional(type(model), settings)
    warn_of_moving(model, moving_layers(model))
    return model


def settings_of(model: keras.Model) -> Settings | None:
    """The settings by which `model` trains; None if it does not accumulate."""
    if isinstance(model, GradientAccumulationModel):
        return model._settings
    train_step = vars(model).get("train_step")
    return getattr(train_step, "keywords", {}).get("settings")


@contextlib.contextmanager
def trained_by(model: keras.Model, settings: Settings) -> Iterator[None]:
    """Have `model` train by `settings` inside of the context, and as before after it."""
    attributes = vars(model)  # past Keras, which tracks what is set on a model
    before = {name: attributes[name] for name in _ATTRIBUTES if name in attributes}
    _set(model, settings)
    try:
        yield
    finally:
        for name in _ATTRIBUTES:
            attributes.pop(name, None)
        attributes.update(before)


# What `_set` sets.
_ATTRIBUTES = (
    "_settings",
    "accumulation",
    "train_step",
    "make_train_function",
    "train_function",
)


def _set(model: keras.Model, settings: Settings) -> None:
    """Have `model` train by `settings`; its clones do not know of it.

    Raises:
        ValueError: if the model has a `train_step` of its own.
    """
    if isinstance(model, GradientAccumulationModel):
        model._settings = settings
    elif type(model).train_step is keras.Model.train_step:
        model.train_step = functools.partial(train_step, model, settings=settings)
        model.make_train_function = functools.partial(
            _make_train_function, model, settings
        )
        model.accumulation = settings
    else:
        raise ValueError(
            f"'{model.name}' has a `train_step` of its own ({type(model).__name__}."
            "train_step), which cannot be taken apart from outside. Accumulate in the "
            "optimizer instead: `model.compile(AccumOptimizer(optimizer, accum_steps=k), "
            "steps_per_execution=k)`, with data that yield micro-batches; or call "
            "`accumulate_gradients` in that `train_step`."
        )
    model.train_function = None
