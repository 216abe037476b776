"""What Keras's optimizers and trainer do across replicas, left out or mended."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer


def components(variable: keras.Variable) -> list[tf.Variable]:
    """The variables behind a Keras variable: one on each replica that it was made for."""
    return list(getattr(variable.value, "values", [variable.value]))


def local_component(variable: tf.Variable) -> tf.Variable:
    """The part on this replica of a variable that each replica holds for itself.

    What a distributed variable does itself, it does on all replicas, or refuses.
    """
    local = getattr(variable, "_get_on_device_or_primary", None)
    return variable if local is None else local()


@contextlib.contextmanager
def replicas_left_to_caller(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Keep `optimizer` from what it does across replicas: the caller does it.

    Keras sums gradients over replicas after it has clipped each one's, and overwrites
    weights by their averages in a conditional of each replica's, which cannot be traced.
    """
    parts = _parts(optimizer)
    for part in parts:
        # Replicas enter and leave in turns, in threads: the last to leave restores.
        entered, frequency = _left.get(part, (0, part.ema_overwrite_frequency))
        _left[part] = (entered + 1, frequency)
        part._all_reduce_sum_gradients = list
        part.ema_overwrite_frequency = None
    try:
        yield
    finally:
        for part in parts:
            entered, frequency = _left.pop(part)
            if entered > 1:
                _left[part] = (entered - 1, frequency)
            else:
                del part._all_reduce_sum_gradients
                part.ema_overwrite_frequency = frequency


# How often each optimizer is inside of `replicas_left_to_caller`, and its
# `ema_overwrite_frequency` outside.
_left: weakref.WeakKeyDictionary[Any, tuple[int, Any]] = weakref.WeakKeyDictionary()


def overwriting_by_averages(
    optimizer: keras.optimizers.Optimizer,
) -> list[tuple[tf.Tensor, Callable[[], None], list[keras.Variable]]]:
    """For each part of `optimizer` that does it: if it is due, how, and to what.

    To be called for all replicas together, after an update.
    """
    parts = [p for p in _parts(optimizer) if p.use_ema and p.ema_overwrite_frequency]
    found: list[tuple[tf.Tensor, Callable[[], None], list[keras.Variable]]] = []
    for part in parts:
        due = tf.equal(part.iterations.value % part.ema_overwrite_frequency, 0)
        variables = list(part._trainable_variables)
        overwrite = part._overwrite_model_variables_with_average_value
        found.append((due, functools.partial(overwrite, variables), variables))
    return found


def _parts(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """The optimizers that update weights: inside of wrappers, and of a MultiOptimizer."""
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        return _parts(inner)
    return [optimizer, *getattr(optimizer, "optimizers", [])]


@functools.cache
def patch_distribution_bugs() -> None:
    """Have `fit` build and log under any strategy.

    To build a model, Keras takes the mean of a batch over replicas, which fails where
    they hold unlike shapes, or are on several machines; one replica's part will do. To
    log, it takes the mean of scalars over their first axis, which they do not have, on
    several machines.
    """
    trainer.TensorFlowTrainer._maybe_symbolic_build = _building_from_one(
        trainer.TensorFlowTrainer._maybe_symbolic_build
    )
    trainer.reduce_per_replica = _reducing_scalars(trainer.reduce_per_replica)


def _building_from_one(build: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(build)
    def build_from_one(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
        if iterator is None or self._distribute_strategy is None:
            build(self, iterator=iterator, data_batch=data_batch)
            return
        # The first step, from Keras 3.11 on the one after the last, and the batches.
        *_, batches = next(iter(iterator))
        local = self._distribute_strategy.experimental_local_results
        batch = tf.nest.map_structure(lambda value: local(value)[0], next(batches))
        build(self, data_batch=batch)

    return build_from_one


def _reducing_scalars(reduce: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(reduce)
    def reduce_scalars(values: Any, strategy: Any, reduction: str) -> Any:
        several = trainer._collective_all_reduce_multi_worker(strategy)
        if not several or reduction not in ("auto", "mean"):
            return reduce(values, strategy, reduction)
        # All logs of a step in one reduction, instead of one for each.
        pairs = [(value, value) for value in tf.nest.flatten(values)]
        means = strategy.extended.batch_reduce_to("MEAN", pairs)
        local = [strategy.experimental_local_results(mean)[0] for mean in means]
        return tf.nest.pack_sequence_as(values, local)

    return reduce_scalars
