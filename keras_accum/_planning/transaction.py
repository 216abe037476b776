"""Train a model for a while, and put back all of its state, to the bit."""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import keras

from .._backend.identity import unique
from .._backend.private.models import all_metrics, call_traces, parts_left_unbuilt
from .._backend.private.randomness import random_state_kept
from .._backend.private.strategies import components


@contextlib.contextmanager
def preserving_state(model: keras.Model) -> Iterator[None]:
    """Let `model` train inside of the context, and undo it, also after an error.

    It puts back weights, optimizer, metrics, the seeds of layers, losses that layers
    noted, all random state outside of the model, and which parts have been built. It does
    not put back what a layer keeps where Keras does not see it.

    Memory: a copy of all variables, on the host.

    Args:
        model: a model that is built and compiled. Parts that its first step would build
            are replaced by copies inside of the context. Under a strategy, the context
            is entered in its scope.
    """
    metrics = [(metric, _contents(metric)) for metric in all_metrics(model)]
    traces = [(container, copy.copy(container)) for container in call_traces(model)]
    values = [(v, v.numpy()) for each in variables(model) for v in components(each)]
    with random_state_kept():
        try:
            with parts_left_unbuilt(model):
                yield
        finally:
            for metric, contents in metrics:
                _restore(metric, contents)
            for container, content in traces:
                container.clear()
                (container.extend if isinstance(content, list) else container.update)(
                    content
                )
            for variable, value in values:
                variable.assign(value)


def variables(model: keras.Model) -> list[keras.Variable]:
    """All variables of a model: its own, its optimizer's and its metrics', once each."""
    optimizer = model.optimizer
    parts = [model, optimizer, *all_metrics(model)]
    if (inner := getattr(optimizer, "inner_optimizer", None)) is not None:
        parts.append(inner)
    found = [variable for part in parts for variable in part.variables]
    return unique(found)


def _contents(
    metric: keras.metrics.Metric,
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """The attributes of a metric, and copies of its lists: a step may add to them."""
    attributes = dict(vars(metric))
    lists = {k: list(v) for k, v in attributes.items() if type(v) is list}
    return attributes, lists


def _restore(
    metric: keras.metrics.Metric, contents: tuple[dict[str, Any], dict[str, list[Any]]]
) -> None:
    attributes, lists = contents
    vars(metric).clear()
    vars(metric).update(attributes)
    for name, content in lists.items():
        attributes[name][:] = content
