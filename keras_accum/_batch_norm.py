"""`AccumBatchNormalization`: moving statistics that see a window as one batch.

Of micro-batches j with n_j entries, mean m_j and variance v_j, the window has the mean
M = Σ n_j m_j / Σ n_j and, by the law of total variance, the variance
Σ n_j (v_j + (m_j - M)²) / Σ n_j. Both are kept up to date micro-batch by micro-batch
(Chan, Golub and LeVeque, 1983, "Algorithms for Computing the Sample Variance").
"""

from typing import Any

import keras
import tensorflow as tf

from ._backend import replica
from ._backend.private import canaries
from ._backend.private.layers import (
    flatten_layers,
    renormalizes,
    taking_more_weights,
)
from ._backend.private.versions import legacy_hint
from ._recompute.passes import is_repeated


@keras.saving.register_keras_serializable(package="keras_accum")
class AccumBatchNormalization(keras.layers.BatchNormalization):
    """BatchNormalization whose moving statistics move once per update.

    It normalises each micro-batch by that micro-batch's mean and variance, as
    BatchNormalization does: a window is therefore not the large batch, and micro-batches
    should not be tiny. But `moving_mean` and `moving_variance`, which prediction uses,
    take one step of the user's `momentum` per window, towards the mean and the variance
    of all of its entries together; BatchNormalization takes one step per micro-batch,
    and forgets the variance between them.

    Works in both routes: with `AccumOptimizer`, and in an accumulating model. Elsewhere
    it is BatchNormalization. Within a window the statistics hold what they would be if
    it ended there. One call per training step is pooled; a layer that is called several
    times in a step pools its last.

    `replace_batch_normalization` puts it into a model that exists.

    Args:
        **kwargs: as for `keras.layers.BatchNormalization`.

    Raises:
        ValueError: for `renorm=True`, which has statistics of its own.

    References:
        Ioffe and Szegedy, 2015, "Batch Normalization".
    """

    moves_state_per_update = True  # Not named among the layers that do so per call.

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if renormalizes(self):
            raise ValueError(
                "AccumBatchNormalization does not pool the statistics of batch "
                "renormalization. Received: renorm=True. Use "
                "`keras.layers.BatchNormalization(renorm=True)`, which moves them per "
                "micro-batch."
            )
        self._last = _Call()

    @classmethod
    def convert(cls, layer: keras.layers.Layer) -> keras.layers.Layer:
        """A copy of a layer, pooled if it is a BatchNormalization: for `clone_model`.

        ```python
        clone = keras.models.clone_model(
            model, clone_function=AccumBatchNormalization.convert
        )
        ```

        `replace_batch_normalization` does the same in place, in any kind of model.

        Args:
            layer: any layer.

        Returns:
            A new `AccumBatchNormalization` for a BatchNormalization, a new layer of its
            own class for any other; with its config and, if it is built, its weights.
        """
        plain = type(layer) is keras.layers.BatchNormalization
        kind = cls if plain else type(layer)
        converted = kind.from_config(layer.get_config())
        if layer.built and layer.weights:
            converted.build_from_config(layer.get_build_config())
            for variable, value in zip(converted.weights, layer.get_weights()):
                variable.assign(value)
        return converted

    def build(self, input_shape: Any) -> None:
        """Create the weights of BatchNormalization, and those of the window."""
        canaries.check()
        super().build(input_shape)
        self._add_window_weights()

    def _add_window_weights(self) -> None:
        shape = tuple(self.moving_mean.shape)

        def window_weight(name: str, shape: tuple[int, ...]) -> keras.Variable:
            return self.add_weight(
                shape=shape,
                name=name,
                initializer="zeros",
                trainable=False,
                autocast=False,
            )

        self.base_mean = window_weight("base_mean", shape)
        self.base_variance = window_weight("base_variance", shape)
        self.window_mean = window_weight("window_mean", shape)
        self.window_squares = window_weight("window_squares", shape)
        self.window_count = window_weight("window_count", ())

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        """Normalise `inputs`; in training, by their own statistics."""
        before = (
            tf.convert_to_tensor(self.moving_mean),
            tf.convert_to_tensor(self.moving_variance),
        )
        outputs = super().call(inputs, training=training, mask=mask)
        # Recomputed for its gradient, it is the call that was pooled already.
        if training and self.trainable and not is_repeated():
            self._last.before = before
        return outputs

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        mean, variance = super()._moments(inputs, mask)
        if mask is None:
            entries = tf.size(inputs) // inputs.shape[self.axis]
        else:
            entries = tf.reduce_sum(tf.cast(mask, "int32"))
        self._last.moments = (mean, variance, tf.cast(entries, "float32"))
        return mean, variance

    def begin_window(
        self, mean: tf.Tensor, variance: tf.Tensor, first: tf.Tensor
    ) -> None:
        """Forget the window if `first`, which began with these moving statistics."""
        first = tf.convert_to_tensor(first)
        for variable, value in ((self.base_mean, mean), (self.base_variance, variance)):
            variable.assign(tf.where(first, value, tf.convert_to_tensor(variable)))
        count = tf.convert_to_tensor(self.window_count)
        self.window_count.assign(tf.where(first, 0.0, count))

    def pool(self) -> None:
        """Add the statistics of the last call to the window, and move to what it has."""
        mean, variance, entries = self._last.moments
        self._last = _Call()
        held = tf.convert_to_tensor(self.window_count)
        total = held + entries
        share = tf.math.divide_no_nan(entries, total)
        old_mean = tf.where(held > 0, tf.convert_to_tensor(self.window_mean), 0.0)
        squares = tf.where(held > 0, tf.convert_to_tensor(self.window_squares), 0.0)
        gap = tf.cast(mean, "float32") - old_mean
        new_mean = old_mean + gap * share
        squares += tf.cast(variance, "float32") * entries + tf.square(gap) * held * share
        self.window_mean.assign(new_mean)
        self.window_squares.assign(squares)
        self.window_count.assign(total)
        pooled = (new_mean, tf.math.divide_no_nan(squares, total))
        moving = (self.moving_mean, self.moving_variance)
        base = (self.base_mean, self.base_variance)
        for variable, start, value in zip(moving, base, pooled):
            start = tf.convert_to_tensor(start)
            variable.assign(start * self.momentum + value * (1.0 - self.momentum))


def replace_batch_normalization(
    model: keras.Model, *, freeze: bool = False
) -> keras.Model:
    """Have each BatchNormalization of a model that exists pool its statistics.

    ```python
    model = keras.applications.ResNet50(weights="imagenet")
    model = accumulate(replace_batch_normalization(model), micro_batch_size=4)
    ```

    Works in place, at any depth: in functional, Sequential and nested models, and in
    layers that others hold in an attribute. Each `keras.layers.BatchNormalization`
    becomes an `AccumBatchNormalization`; it keeps its name, its weights, whether it is
    trained, and its place in the model, so that predictions are the same to the bit. A
    checkpoint of the model as it was has to be loaded before. Compile afterwards.

    Training still normalises each micro-batch by its own statistics. With `freeze=True`
    nothing is replaced: the layers are frozen, normalise by the statistics that they
    have, and do not couple the samples of a batch any longer. Accumulation is then that
    of the large batch with the same layers frozen, which suits fine-tuning.

    Args:
        model: any Keras model that is built.
        freeze: freeze the layers instead, those of subclasses of BatchNormalization too.

    Returns:
        `model` itself.

    Raises:
        TypeError: if it is no `keras.Model`.
        ValueError: if the model, or a BatchNormalization in it, is not built; and, unless
            `freeze`, for one with `renorm=True`, one of a subclass, or one that
            `recompute` has switched on.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"`model` must be a `keras.Model`. Received: {model!r}{legacy_hint(model)}"
        )
    if not model.built:
        raise ValueError(
            f"'{model.name}' is not built: layers that it makes when it is built could "
            "not be replaced. Call it on a sample before, `model(x[:1])`."
        )
    canaries.check()
    kind = keras.layers.BatchNormalization
    found = [layer for layer in flatten_layers(model) if isinstance(layer, kind)]
    plain = [x for x in found if not isinstance(x, AccumBatchNormalization)]
    if not freeze:
        for layer in plain:
            _check_replaceable(layer)
        with model.distribute_strategy.scope():
            for layer in plain:
                _replace(layer)
    for layer in found if freeze else ():
        layer.trainable = False
    model.train_function = None
    return model


def _check_replaceable(layer: keras.layers.BatchNormalization) -> None:
    name = f"'{layer.name}'"
    if type(layer) is not keras.layers.BatchNormalization:
        raise ValueError(
            f"{name} is a {type(layer).__name__}, a subclass of BatchNormalization, "
            "whose statistics may be its own. Derive it from AccumBatchNormalization, or "
            "write `replace_batch_normalization(model, freeze=True)`."
        )
    if renormalizes(layer):
        raise ValueError(
            f"{name} has `renorm=True`, whose statistics AccumBatchNormalization does "
            "not pool. Write `replace_batch_normalization(model, freeze=True)`."
        )
    if not layer.built:
        raise ValueError(
            f"{name} is not built. Call the model on a sample before, `model(x[:1])`."
        )
    if "call" in vars(layer):
        raise ValueError(
            f"The call of {name} is recomputed. Call `recompute` after "
            "`replace_batch_normalization`."
        )


def _replace(layer: keras.layers.BatchNormalization) -> None:
    """Make `layer` an AccumBatchNormalization, in whatever holds it and calls it."""
    layer.__class__ = AccumBatchNormalization
    with taking_more_weights(layer):
        layer._add_window_weights()
    layer._last = _Call()


class _Call:
    """What the last call of a layer met: statistics before it, and its own."""

    before: tuple[tf.Tensor, tf.Tensor] | None = None
    moments: tuple[tf.Tensor, tf.Tensor, tf.Tensor]


def check_statistics(model: keras.Model) -> None:
    """Refuse layers that talk to other replicas at each call, which no loop can hold.

    Raises:
        ValueError: for a BatchNormalization with `synchronized=True`, under a strategy.
    """
    if replica.count() == 1:
        return
    for layer in flatten_layers(model):
        if getattr(layer, "synchronized", False):
            raise ValueError(
                f"The layer '{layer.name}' has `synchronized=True`: it averages its "
                "statistics over the replicas at each call, which cannot be done in a "
                "loop over micro-batches. Use `synchronized=False`, or accumulate in the "
                "optimizer, with `AccumOptimizer`."
            )


def begin_windows(model: keras.Model, first: tf.Tensor | bool) -> None:
    """Before the micro-batches of a step: begin a window, if this is the first of it."""
    for layer in _layers(model):
        mean = tf.convert_to_tensor(layer.moving_mean)
        layer.begin_window(mean, tf.convert_to_tensor(layer.moving_variance), first)


def pool_calls(model: keras.Model) -> None:
    """After a micro-batch: add what its call met."""
    for layer in _layers(model):
        if layer._last.before is not None:
            layer.pool()


def pool_first_or_next(model: keras.Model, first: tf.Tensor | bool) -> None:
    """After a micro-batch that may have begun a window, which is known only now."""
    for layer in _layers(model):
        if layer._last.before is not None:
            layer.begin_window(*layer._last.before, first)
            layer.pool()


def forget_calls(model: keras.Model) -> None:
    """Drop what calls met that were no training."""
    for layer in _layers(model):
        layer._last = _Call()


def _layers(model: keras.Model) -> list[AccumBatchNormalization]:
    layers = flatten_layers(model)
    return [layer for layer in layers if isinstance(layer, AccumBatchNormalization)]
