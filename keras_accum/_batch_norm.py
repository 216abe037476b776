"""`AccumBatchNormalization`: moving statistics that see a window as one batch.

Of micro-batches j with n_j entries, mean m_j and variance v_j, the window has the mean
M = Σ n_j m_j / Σ n_j and, by the law of total variance, the variance
Σ n_j (v_j + (m_j - M)²) / Σ n_j. Both are kept up to date micro-batch by micro-batch
(Chan, Golub and LeVeque, 1983, "Algorithms for Computing the Sample Variance").
"""

from typing import Any, Self

import keras
import tensorflow as tf

from ._backend import replica
from ._backend.private import canaries
from ._backend.private.layers import (
    TakesMoments,
    flatten_layers,
    renormalizes,
    taking_more_weights,
)
from ._backend.private.versions import legacy_hint
from ._backend.warn import warn
from ._recompute.passes import is_repeated


@keras.saving.register_keras_serializable(package="keras_accum")
class AccumBatchNormalization(TakesMoments):
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
    times in a step pools its last, and warns.

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
        self._open_window = _Window.of(self)

    def load_own_variables(self, store: Any) -> None:
        """Load the statistics, from which a window goes on that the file does not hold."""
        super().load_own_variables(store)
        window = self._open_window
        window.base_mean.assign(tf.cast(self.moving_mean, window.base_mean.dtype))
        window.base_variance.assign(
            tf.cast(self.moving_variance, window.base_variance.dtype)
        )

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
            self._last.calls += 1
        return outputs

    def take_moments(self, mean: Any, variance: Any, inputs: Any, mask: Any) -> None:
        """Keep the moments of a call, and how many entries it had."""
        if mask is None:
            entries = tf.size(inputs) // inputs.shape[self.axis]
        else:
            entries = tf.reduce_sum(tf.cast(mask, "int32"))
        self._last.moments = (mean, variance, entries)

    def begin_window(
        self, mean: tf.Tensor, variance: tf.Tensor, first: tf.Tensor
    ) -> None:
        """Forget the window if `first`, which began with these moving statistics."""
        window = self._open_window
        first = tf.convert_to_tensor(first)
        for variable, value in (
            (window.base_mean, mean),
            (window.base_variance, variance),
        ):
            value = tf.cast(value, variable.dtype)
            variable.assign(tf.where(first, value, tf.convert_to_tensor(variable)))
        count = tf.convert_to_tensor(window.count)
        window.count.assign(tf.where(first, tf.zeros_like(count), count))

    def pool(self) -> None:
        """Add the statistics of the last call to the window, and move to what it has."""
        if self._last.calls > 1:
            warn(
                f"'{self.name}' is called {self._last.calls} times in a step. "
                "AccumBatchNormalization pools the last call only, so that its moving "
                "statistics are not those of the large batch, which move at each call. "
                "Use a layer of its own for each call, or freeze this one.",
                about=self,
            )
        window, dtype = self._open_window, self._open_window.count.dtype
        mean, variance, entries = (tf.cast(x, dtype) for x in self._last.moments)
        self._last = _Call()
        held = tf.convert_to_tensor(window.count)
        total = held + entries
        share = tf.math.divide_no_nan(entries, total)
        old_mean = tf.where(held > 0, tf.convert_to_tensor(window.mean), 0.0)
        squares = tf.where(held > 0, tf.convert_to_tensor(window.squares), 0.0)
        gap = mean - old_mean
        new_mean = old_mean + gap * share
        squares += variance * entries + tf.square(gap) * held * share
        window.mean.assign(new_mean)
        window.squares.assign(squares)
        window.count.assign(total)
        pooled = (new_mean, tf.math.divide_no_nan(squares, total))
        moving = (self.moving_mean, self.moving_variance)
        base = (window.base_mean, window.base_variance)
        for variable, start, value in zip(moving, base, pooled):
            start = tf.convert_to_tensor(start)
            value = start * self.momentum + value * (1.0 - self.momentum)
            variable.assign(tf.cast(value, variable.dtype))


class _Window(keras.layers.Layer):
    """What a layer's window holds; where it began, and its statistics up to now.

    A layer of its own, so that the file of a model with AccumBatchNormalization can be
    loaded into one with BatchNormalization, and the other way round: Keras refuses a
    layer with another number of weights, and does not look at layers that one lacks.
    """

    moves_state_per_update = True

    @classmethod
    def of(cls, layer: keras.layers.BatchNormalization) -> Self:
        """The window of a layer that is built, empty."""
        # At least float32: a count, and sums over many micro-batches.
        dtype = keras.backend.result_type(layer.variable_dtype, "float32")
        window = cls(name="window", dtype=dtype, trainable=False)
        window.build(layer.moving_mean.shape)
        return window

    def build(self, shape: tuple[int, ...]) -> None:
        """Create the weights, for statistics of this shape."""

        def weight(name: str, shape: tuple[int, ...]) -> keras.Variable:
            return self.add_weight(
                shape, "zeros", trainable=False, autocast=False, name=name
            )

        self.base_mean = weight("base_mean", shape)
        self.base_variance = weight("base_variance", shape)
        self.mean = weight("window_mean", shape)
        self.squares = weight("window_squares", shape)
        self.count = weight("window_count", ())

    def load_own_variables(self, store: Any) -> None:
        """Load the window, or none: the file may be of a BatchNormalization."""
        if len(store.keys()):
            super().load_own_variables(store)
        else:
            self.count.assign(tf.zeros_like(self.count))


@keras.saving.register_keras_serializable(
    package="keras_accum", name="ReplacedBatchNormalization"
)
class _Replacement(AccumBatchNormalization):
    """What `replace_batch_normalization` puts in place of a BatchNormalization."""


# Files name a layer's weights by its class: so a file of the model as it was can be loaded
# afterwards, and a class of models that makes its layers anew can load what it saved.
_Replacement.__name__ = keras.layers.BatchNormalization.__name__


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
    trained, and its place in the model, so that predictions are the same to the bit. It
    is still called BatchNormalization in summaries and in files, and a file of the model
    as it was can be loaded before or afterwards. A model of a class of its own makes its
    layers anew when it is loaded: replace them again. Compile afterwards.

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
    layer.__class__ = _Replacement
    with taking_more_weights(layer):
        layer._open_window = _Window.of(layer)
    layer._last = _Call()


class _Call:
    """What the last call of a layer met: statistics before it, and its own."""

    calls = 0  # In training, since the last was pooled.
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
    """Drop what calls met that are none of the micro-batch that comes next."""
    for layer in _layers(model):
        layer._last = _Call()


def window_variables(model: keras.Model) -> list[keras.Variable]:
    """What AccumBatchNormalization keeps of open windows, besides its statistics."""
    return [v for layer in _layers(model) for v in layer._open_window.weights]


def _layers(model: keras.Model) -> list[AccumBatchNormalization]:
    layers = flatten_layers(model)
    return [layer for layer in layers if isinstance(layer, AccumBatchNormalization)]
