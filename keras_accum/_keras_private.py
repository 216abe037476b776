"""Private parts of Keras and TensorFlow that there is no public way around.

Each function says why it is needed. `tests/test_keras_private.py` fails by name when
one of them has moved.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.losses import loss as keras_loss
from keras.src.trainers.trainer import Trainer
from tensorflow.python.framework import ops
from tensorflow.python.ops import control_flow_util


def compiled_by_xla() -> bool:
    """Whether the function that is being traced will be compiled by XLA.

    XLA leaves assertions out without a word; what relies on one must know.
    """
    if tf.executing_eagerly():
        return False
    return control_flow_util.GraphOrParentsInXlaContext(ops.get_default_graph())


def flatten_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """The layers of `model` at any depth.

    `Model.layers` shows the first level only, and not what a layer holds inside.
    """
    return list(model._flatten_layers())


def leave_reduction_to_caller(optimizer: keras.optimizers.Optimizer) -> None:
    """Keep `optimizer` from summing gradients over replicas when it applies them.

    Keras does so after it has clipped. Gradients that are reduced already would be
    counted once per replica.
    """
    for part in [optimizer, *getattr(optimizer, "optimizers", [])]:
        part._all_reduce_sum_gradients = list


def restore_deferred(optimizer: keras.optimizers.Optimizer) -> None:
    """Give variables just created the values of a checkpoint that was restored before.

    TensorFlow does so where an attribute is set. An optimizer that names its children
    itself has to ask for it.
    """
    for name, child in optimizer._trackable_children().items():
        optimizer._handle_deferred_dependencies(name=name, trackable=child)


# --- What a loss divides by. Keras reduces a loss to its mean and forgets the
# denominator; `Loss.__call__` and `Trainer.compute_loss` have no hook. Two functions
# are therefore extended, once, without a change to what they return.

_listening = threading.local()


@contextlib.contextmanager
def listen_to_reductions(listener: Callable[..., None]) -> Iterator[None]:
    """Call `listener(values, sample_weight, mask, reduction)` for each loss reduced here.

    `values` are the losses per sample before they are weighted. Applies to this thread.
    """
    outer = getattr(_listening, "listener", None)
    _listening.listener = listener
    try:
        yield
    finally:
        _listening.listener = outer


def is_listening() -> bool:
    """Whether some caller up the stack listens to reductions already."""
    return getattr(_listening, "listener", None) is not None


@functools.cache
def observe_training_losses(
    around: Callable[[keras.Model], contextlib.AbstractContextManager[None]],
) -> None:
    """Have Keras compute each training loss of any model inside of `around(model)`.

    Args:
        around: gives the context manager for a model; called for training losses only,
            and only for the outermost call (an override that calls `super()` is one).
    """
    keras_loss.reduce_weighted_values = _audible(keras_loss.reduce_weighted_values)
    # `compute_loss` is what a train_step of the user's calls; `_compute_loss` is what
    # Keras's own calls, also when the user has overridden `compute_loss`.
    for name in ("compute_loss", "_compute_loss"):
        setattr(Trainer, name, _inside(around, getattr(Trainer, name)))


def _audible(reduce: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(reduce)
    def reduce_and_tell(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: Any = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        listener = getattr(_listening, "listener", None)
        if listener is not None:
            listener(values, sample_weight, mask, reduction)
        return reduce(values, sample_weight, mask, reduction, dtype)

    return reduce_and_tell


def _inside(
    around: Callable[..., Any], compute: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(compute)
    def compute_inside(
        self: Any,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        arguments = (self, x, y, y_pred, sample_weight, training)
        if not training or is_listening():
            return compute(*arguments)
        with around(self):
            return compute(*arguments)

    return compute_inside
