"""A model's compiled parts: built early, listed, and put back."""

from typing import Any

import keras
import tensorflow as tf

from .layers import flatten_layers
from .randomness import global_seed_generator


def build_for(model: keras.Model, data: Any) -> None:
    """Create what `model`, its metrics and its optimizer need for a batch like `data`.

    Keras creates it while tracing the first step; in a loop nothing can be created.
    """
    parts = [model, model._compile_metrics, model._compile_loss, model.optimizer]
    if all(part is None or part.built for part in parts):
        return
    with tf.init_scope():
        model._symbolic_build(data_batch=data)


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
    return list({id(metric): metric for metric in found}.values())


def state_of_layers(model: keras.Model) -> list[keras.Variable]:
    """What a pass through a model may assign: moving statistics, seeds, metrics.

    A weight that is frozen is none of it, however large. Keras tells it from a moving
    statistic only by the list that a layer keeps it in.
    """
    layers = [model, *flatten_layers(model)]
    found = [variable for layer in layers for variable in layer._non_trainable_variables]
    found += [seed.state for layer in layers for seed in layer._seed_generators]
    found += [v for metric in all_metrics(model) for v in metric.variables]
    if (generator := global_seed_generator()) is not None:
        found.append(generator.state)
    return list({id(variable): variable for variable in found}.values())


def call_traces(model: keras.Model) -> list[Any]:
    """The containers in which layers keep what their last call passed to `add_loss`."""
    return [
        container
        for layer in [model, *flatten_layers(model)]
        for container in (layer._losses, layer._loss_ids)
    ]
