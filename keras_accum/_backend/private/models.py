"""A model's compiled parts: built early, listed, and put back."""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import keras
import tensorflow as tf
from keras.src.backend import compute_output_spec
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer as Trainer

from .. import replica
from ..arrays import to_numpy
from ..attribute_patch import AttributePatch
from ..identity import unique
from .layers import flatten_layers
from .randomness import global_seed_generator


def build_for(model: keras.Model, data: Any) -> None:
    """Create what `model`, its metrics and its optimizer need for a batch like `data`.

    Keras creates it while tracing the first step; in a loop nothing can be created.
    """
    parts = [model, model._compile_metrics, model._compile_loss, model.optimizer]
    if all(part is None or part.built for part in parts):
        return
    try:
        with created_outside():
            model._symbolic_build(data_batch=data)
    except Exception:
        # Code for eager mode only, where loss and metrics can be created later.
        if not (tf.executing_eagerly() and model.built):
            raise
        model.optimizer.build(model.trainable_variables)


def build_compiled(
    model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any
) -> None:
    """Create what the compiled parts of `model` need, before a trace uses them.

    Keras does it while it uses them, and TensorFlow then traces the step again.
    """
    optimizer, loss, metrics = compiled_parts(model)
    if tf.executing_eagerly() or replica.distributed():
        return
    # A step of the user's may train other variables.
    if type(model).train_step is Trainer.train_step and not optimizer.built:
        with created_outside():
            optimizer.build(model.trainable_variables)
    x, y, y_pred, sample_weight = keras.tree.map_structure(
        _symbolic, (x, y, y_pred, sample_weight)
    )
    # What cannot be computed symbolically is left to Keras, and to a second trace.
    with contextlib.suppress(Exception), created_outside():
        if loss is not None and not loss.built:
            arguments = (x, y, y_pred, sample_weight)
            compute_output_spec(model._compute_loss, *arguments, training=False)
        if metrics is not None and not metrics.built:
            compute_output_spec(
                model.compute_metrics, x, y, y_pred, sample_weight=sample_weight
            )


def _symbolic(value: Any) -> Any:
    if value is None:
        return None
    return keras.KerasTensor(value.shape, keras.backend.standardize_dtype(value.dtype))


@contextlib.contextmanager
def created_outside() -> Iterator[None]:
    """Variables that are created inside belong to no function that is being traced.

    Else TensorFlow traces that function again, having created its variables. Under a
    strategy they are created by the strategy.
    """

    def create(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        return next_creator(**{**kwargs, "experimental_enable_variable_lifting": False})

    with tf.init_scope():
        if replica.distributed():
            yield
            return
        with tf.variable_creator_scope(create):
            yield


def compiled_parts(model: keras.Model) -> list[Any]:
    """What `compile` has set on a model: the optimizer, the losses, the metrics."""
    return [model.optimizer, model._compile_loss, model._compile_metrics]


Known = TypeVar("Known")


class OfCompilation(Generic[Known]):
    """What is known of a model as it is compiled; another `compile` begins anew.

    It keeps neither the model nor its compiled parts.

    Args:
        empty: makes the memory of a model that nothing is known of.
    """

    def __init__(self, empty: Callable[[], Known]) -> None:
        self._empty = empty
        self._found: weakref.WeakKeyDictionary[keras.Model, list[Any]]
        self._found = weakref.WeakKeyDictionary()

    def __call__(self, model: keras.Model) -> Known:
        """What is known of `model`, to be read and added to."""
        attributes = vars(model)
        parts = [attributes.get(name) for name in _PARTS]
        memories = self._found.setdefault(model, [])
        for kept, known in memories:
            if all(ref() is part for ref, part in zip(kept, parts)):
                return known
        # Stand-ins may be in the place of parts that come back.
        memories[:] = [m for m in memories if not any(ref.is_gone() for ref in m[0])]
        memories.append(([_Ref(part) for part in parts], known := self._empty()))
        return known


class _Ref:
    """A weak reference, also to None."""

    def __init__(self, part: Any) -> None:
        self._ref = None if part is None else weakref.ref(part)

    def __call__(self) -> Any:
        return self._ref and self._ref()

    def is_gone(self) -> bool:
        return self._ref is not None and self._ref() is None


_PARTS = ("optimizer", "_compile_loss", "_compile_metrics")
# What is replaced on a model while it trains.
_ATTRIBUTES = (*_PARTS, "train_function")


@contextlib.contextmanager
def parts_left_unbuilt(model: keras.Model) -> Iterator[None]:
    """Have stand-ins be built inside of the context, for the parts that are not built.

    After it, `model` has its own parts again, and the train function of before.
    """
    attributes = vars(model)  # past Keras, which tracks what is set on a model
    before = {name: attributes[name] for name in _ATTRIBUTES if name in attributes}
    try:
        attributes.update(unbuilt_parts(model))
        yield
    finally:
        for name in _ATTRIBUTES:
            attributes.pop(name, None)
        attributes.update(before)


def unbuilt_parts(model: keras.Model) -> dict[str, Any]:
    """Stand-ins for the compiled parts of a model that a first step would build.

    A part that Keras has built cannot be made unbuilt again.

    Returns:
        By the name of the model's attribute.
    """
    parts: dict[str, Any] = {}
    optimizer = model.optimizer
    if not optimizer.built:
        parts["optimizer"] = type(optimizer).from_config(optimizer.get_config())
    loss, metrics = model._compile_loss, model._compile_metrics
    if loss is not None and not loss.built:
        parts["_compile_loss"] = type(loss)(
            loss._user_loss,
            loss._user_loss_weights,
            loss.reduction,
            output_names=loss.output_names,
        )
    if metrics is not None and not metrics.built:
        parts["_compile_metrics"] = type(metrics)(
            metrics._user_metrics,
            metrics._user_weighted_metrics,
            output_names=metrics.output_names,
        )
    return parts


def all_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """The metrics of a model, also those that it was compiled with and has not built."""
    compiled = model._compile_metrics
    given = (
        []
        if compiled is None
        else [compiled._user_metrics, compiled._user_weighted_metrics]
    )
    found = [*model.metrics, *keras.tree.flatten(given)]
    found = [metric for metric in found if isinstance(metric, keras.metrics.Metric)]
    return unique(found)


def rows_tracked(model: keras.Model) -> float:
    """The samples by which Keras's step has averaged the loss, since it was reset.

    The metric is not always among `model.metrics`, and another may have its name.
    """
    if (tracker := model._loss_tracker) is None:
        return 0.0
    return float(to_numpy(tracker.count))


def state_of_layers(model: keras.Model) -> list[keras.Variable]:
    """What a pass through a model may assign: moving statistics, seeds, metrics.

    A weight that is frozen is none of it, however large. Keras tells it from a moving
    statistic only by the list that a layer keeps it in.
    """
    layers = flatten_layers(model)
    found = [variable for layer in layers for variable in layer._non_trainable_variables]
    found += [seed.state for layer in layers for seed in layer._seed_generators]
    found += [v for metric in all_metrics(model) for v in metric.variables]
    if (generator := global_seed_generator()) is not None:
        found.append(generator.state)
    return unique(found)


def call_traces(model: keras.Model) -> list[Any]:
    """The containers in which layers keep what their last call passed to `add_loss`."""
    return [
        container
        for layer in flatten_layers(model)
        for container in (layer._losses, layer._loss_ids)
    ]


@contextlib.contextmanager
def scalar_metrics(model: keras.Model, rows: int | None) -> Iterator[list[str]]:
    """The names of metrics that reduce a batch, as they are computed.

    Keras takes the mean of what a metric function returns, and does not tell of its shape.

    Args:
        model: the model.
        rows: the samples of the batch, if they are known.
    """
    found: list[str] = []
    compiled = model._compile_metrics
    metrics = [] if compiled is None else compiled.metrics
    wrappers = [m for m in metrics if isinstance(m, keras.metrics.MeanMetricWrapper)]

    def observed(metric: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        def compute(*args: Any, **kwargs: Any) -> Any:
            values = function(*args, **kwargs)
            if len(values.shape) == 0 or (rows or values.shape[0]) != values.shape[0]:
                found.append(metric.name)
            return values

        return compute

    patches = [AttributePatch(m, "_fn", observed(m, m._fn)) for m in wrappers]
    try:
        yield found
    finally:
        for patch in patches:
            patch.undo()
