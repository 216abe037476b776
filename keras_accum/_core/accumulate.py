"""`accumulate_gradients`: a batch's loss and gradient, with one micro-batch's memory.

The functional core: no Keras model, no optimizer. Micro-batch i with mean loss L_i,
gradient g_i and weight w_i gives

    loss = Σ w_i L_i / Σ w_i        gradient = Σ w_i g_i / Σ w_i
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from .._backend.private import canaries
from .._backend.private.losses import (
    Differentiated,
    listen_to_added_losses,
    listen_to_reductions,
    loss_call,
    parts_of_a_window,
)
from .._backend.warn import warn
from .checks import check_option, refuse_unknown_arguments
from .gradients import Gradient, add, divide_no_nan, scalar_dtype, sum_dtype, weigh
from .loop import Split, check_batch, for_each_micro_batch, rows_of
from .loss import LossTerm, describe, loss_of_none, warn_of_coupled
from .observed import Observed, Observer, nothing
from .own_loss import couples_samples, is_term_of
from .regularizers import share_regularizers

# From a micro-batch and its number of samples to a mean loss, its weight (None for the
# number of samples), and further scalars to be averaged likewise.
LossFunction: TypeAlias = Callable[
    [Any, tf.Tensor], tuple[tf.Tensor, tf.Tensor | None, list[tf.Tensor]]
]


class BatchGradients(NamedTuple):
    """What the micro-batches of one batch came to.

    Attributes:
        loss: scalar tensor, float32 or float64 as the variables are: the mean loss, or
            the sum of the losses.
        gradients: one for each variable, in float32 at least; None where every
            micro-batch had none.
        weight: scalar tensor, the sum of the weights.
        parts: scalar tensors, the means of the further values that the loss
            function gave.
        divisor: scalar tensor, what the sum of the weighted gradients was
            divided by.
        rest: scalar, what the batch counts by in a further window that weighs nothing.
        observed: what an observer has seen of the micro-batches, or None.
        share: scalar, what part the batch has of the sum that its gradients go into.
    """

    loss: tf.Tensor
    gradients: list[tf.Tensor | None]
    weight: tf.Tensor
    parts: list[tf.Tensor]
    divisor: tf.Tensor
    rest: tf.Tensor | float = 0.0
    observed: Observed | None = None
    share: tf.Tensor | float = 1.0


@tf.autograph.experimental.do_not_convert
@refuse_unknown_arguments("accumulate_gradients")
def accumulate_gradients(
    loss_fn: Callable[[Any], Any],
    variables: Sequence[keras.Variable | tf.Variable],
    batch: Any,
    *,
    accum_steps: int | None = None,
    micro_batch_size: int | None = None,
    reduction: str = "mean",
    scale_loss: Callable[[tf.Tensor], tf.Tensor] | None = None,
) -> tuple[tf.Tensor, list[tf.Tensor | None]]:
    """The loss of a batch and its gradients, computed one micro-batch after another.

    ```python
    def loss_fn(micro_batch):
        x, y = micro_batch
        return keras.ops.mean(keras.ops.square(model(x, training=True) - y))

    @tf.function
    def train_step(batch):
        loss, gradients = accumulate_gradients(
            loss_fn, model.trainable_variables, batch, micro_batch_size=4
        )
        optimizer.apply(gradients, model.trainable_variables)
        return loss
    ```

    In a `tf.function`, the micro-batches run in a loop of the graph: `loss_fn` is traced
    once, and the activations of one micro-batch are in memory at a time. Build the model
    before: variables cannot be created in a loop.

    Under a `tf.distribute` strategy, call it on each replica, with the samples there, and
    pass `optimizer.apply(..., weight=...)` what they weigh. Keras's losses divide by the
    number of replicas, as optimizers expect: divide a loss of your own likewise.

    Args:
        loss_fn: from a micro-batch, structured as `batch`, to its mean loss (a scalar),
            or to a pair of its mean loss and its weight: the denominator of that mean,
            such as the number of valid tokens. Without a weight, it is what the Keras
            loss in it was divided by, if there is one, or the number of samples. A
            micro-batch of weight 0 adds nothing, even if its loss is NaN.
        variables: the variables to differentiate by, all of them built.
        batch: nested tensors, ragged ones too, whose first dimension is the samples', of
            any size; None stays None.
        accum_steps: int, how many micro-batches to make. The first ones have one sample
            more where the batch does not divide; a batch of fewer samples makes as many
            micro-batches as it has samples.
        micro_batch_size: int, how many samples each has, except for a shorter last one.
            Exactly one of `accum_steps` and `micro_batch_size` has to be given.
        reduction: `"mean"`, or `"sum"` for a loss that is a sum: losses and gradients
            are added up, and weights are not asked for.
        scale_loss: `optimizer.scale_loss`, for float16: applied to each loss before it
            is differentiated. The gradients come scaled, as `optimizer.apply` expects.

    Returns:
        The loss, a scalar, float32 at least, never scaled; and a list with the gradient
        for each variable, a dense tensor of the variable's shape, in float32 at least, or
        None if the loss does not depend on it.

    Raises:
        ValueError: for a batch without samples, tensors that differ in their first
            dimension, scalars, a loss that is no scalar, or a Keras loss that is a sum
            where `reduction` says mean, or the other way.
        tf.errors.InvalidArgumentError: the same in a graph, where sizes are known only
            when it runs.

    References:
        Goyal et al., 2017, "Accurate, Large Minibatch SGD", section 3, on what has to be
        normalised by what.
    """
    canaries.check()
    split = Split(accum_steps, micro_batch_size)
    check_option("reduction", reduction, ("mean", "sum"))
    batch, checks = check_batch(batch)
    with tf.control_dependencies(checks), parts_of_a_window():
        alone = split.accum_steps == 1
        function = _LossFunction(loss_fn, reduction, variables, rows_of(batch), alone)
        window = value_and_gradients(
            function.loss_of, variables, batch, split, reduction, scale_loss=scale_loss
        )
        function.check_factors()
    return window.loss, window.gradients


class _LossFunction:
    """A loss function of the user's, which may give a weight or not, as one that does.

    Where losses are added up, micro-batches share the regularizers by their samples.
    """

    def __init__(
        self,
        loss_fn: Callable[[Any], Any],
        reduction: str,
        variables: Sequence[keras.Variable | tf.Variable],
        rows: int | tf.Tensor,
        alone: bool,
    ) -> None:
        self._loss_fn, self._reduction = loss_fn, reduction
        self._variables, self._rows, self._alone = variables, rows, alone
        # For the loss function, AutoGraph: this package's own code does without.
        eager = tf.executing_eagerly()
        self._compute = self._weighted if eager else tf.function(self._weighted)
        # In eager mode: the gradients that reach Keras losses, and what is in them.
        self._upstream: list[tuple[Differentiated, float]] = []

    def loss_of(self, micro_batch: Any, rows: tf.Tensor) -> tuple[Any, Any, list[Any]]:
        """A micro-batch's loss, its weight, and nothing else."""
        return (*self._compute(micro_batch), [])

    def _weighted(self, micro_batch: Any) -> tuple[Any, Any]:
        adds_up = self._reduction == "sum"
        share = tf.cast(rows_of(micro_batch) / self._rows, "float32")
        once = share_regularizers(self._variables, share if adds_up else None)
        with record_losses(micro_batch) as heard, listen_to_added_losses() as added, once:
            result = self._loss_fn(micro_batch)
        return self._judged(result, heard, added, micro_batch)

    @tf.autograph.experimental.do_not_convert
    def _judged(
        self, result: Any, heard: list["HeardTerm"], added: list[str], micro_batch: Any
    ) -> tuple[Any, Any]:
        loss, weight = _loss_and_weight(result, heard, self._reduction)
        if self._alone:
            return loss, weight
        mean = self._reduction == "mean"
        if any(
            kind != self._reduction or (mean and weight is not None) for kind in added
        ):
            warn(_ADDED[self._reduction], about=self._loss_fn)
        if len(heard) == 1 and result is loss and loss is not heard[0].loss:
            self._look_at_factor(loss, weight, heard[0], rows_of(micro_batch))
        return loss, weight

    def _look_at_factor(
        self, loss: tf.Tensor, weight: Any, heard: "HeardTerm", rows: Any
    ) -> None:
        """Note what a loss multiplies a Keras loss by; in a graph, judge it."""
        if heard.differentiated is not None:
            # A loss that weighs by its samples is differentiated by its share of them.
            by_rows = (
                self._reduction == "mean" and weight is None and loss.dtype.size >= 4
            )
            self._upstream.append((heard.differentiated, float(rows) if by_rows else 1.0))
        elif tf.is_symbolic_tensor(loss) and not is_term_of(loss, heard.loss):
            warn(_SCALED, about=self._loss_fn)

    def check_factors(self) -> None:
        """Warn if micro-batches multiply their Keras losses by something else."""
        factors = [
            float(entry.upstream) / rows
            for entry, rows in self._upstream
            if entry.upstream is not None
        ]
        if not np.allclose(factors, factors[:1], rtol=1e-4, atol=0.0):
            warn(_SCALED, about=self._loss_fn)


_SCALED = (
    "`loss_fn` multiplies its Keras loss by something else in each micro-batch, as in "
    "`loss * samples` or `sqrt(loss)`. Micro-batches weigh by what the Keras loss was "
    "divided by, which is not the large batch then. Return a pair, the loss and its "
    "weight: what it was divided by."
)
_ADDED = {
    "mean": (
        "Layers add losses in `loss_fn` (`add_loss`, an activity regularizer). If the loss "
        "contains them (`model.losses`), they are weighted as it is: as a mean over "
        "samples. It is not the large batch if they are sums, or if masks or sample "
        "weights give the loss another denominator. `accumulate(model, ...)` is exact for "
        "both."
    ),
    "sum": (
        "Layers add losses in `loss_fn` (`add_loss`, an activity regularizer) that may be "
        "means over samples. If the loss contains them (`model.losses`), the means of the "
        "micro-batches are added up. `accumulate(model, ...)` is exact."
    ),
}


@tf.autograph.experimental.do_not_convert
def record_losses(micro_batch: Any) -> Any:
    """Record the `LossTerm` of each Keras loss of a micro-batch, with the loss."""
    rows = rows_of(micro_batch)
    return _record_losses(rows if isinstance(rows, int) else None)


class HeardTerm(NamedTuple):
    """A Keras loss of a micro-batch.

    Attributes:
        term: what it is.
        loss: its value.
        differentiated: tells the gradient that reaches it, in eager mode.
    """

    term: LossTerm
    loss: tf.Tensor
    differentiated: Differentiated | None


@contextlib.contextmanager
def _record_losses(rows: int | None) -> Iterator[list[HeardTerm]]:
    heard: list[HeardTerm] = []

    def note(*reduced: Any) -> tf.Tensor:
        *described, loss = reduced
        loss, entry = loss_of_none(loss), None
        if tf.executing_eagerly() and loss.shape.rank == 0:
            entry = Differentiated()
            loss = entry.noted(loss)
        heard.append(HeardTerm(describe(*described, rows=rows), loss, entry))
        if (call := loss_call()) is not None and couples_samples(call):
            warn_of_coupled(call.loss)
        return loss

    with listen_to_reductions(note):
        yield heard


@tf.autograph.experimental.do_not_convert
def _loss_and_weight(
    result: Any, heard: list[HeardTerm], reduction: str
) -> tuple[Any, Any]:
    """What a loss function gave, and its weight; None for the number of samples."""
    if isinstance(result, (tuple, list)):
        shapes = [tuple(tf.convert_to_tensor(part).shape) for part in result]
        if len(result) != 2 or shapes[1] != ():
            raise ValueError(
                "`loss_fn` must return a scalar, the mean loss of the micro-batch, or a "
                "pair of it and its weight, the scalar that it was divided by. Received "
                f"{len(result)} values, of the shapes {', '.join(map(str, shapes))}."
            )
        return result[0], result[1]
    for term, loss, _ in heard:
        if result is loss and term.kind in ("mean", "sum") and term.kind != reduction:
            raise ValueError(
                f"`loss_fn` returns a Keras loss that is a {term.kind}. Received: "
                f"reduction={reduction!r}. Pass `reduction={term.kind!r}`."
            )
    varying = [term.weight for term, *_ in heard if term.varies]
    if reduction == "sum" or not varying:
        return result, None
    if len(heard) == 1 and _is_here(varying[0]):
        return result, varying[0]
    warn(
        "What `loss_fn` divides by is not known: it computes several Keras losses, or in a "
        "function of its own. Micro-batches weigh by their samples. Return a pair, the "
        "loss and its weight: what it was divided by."
    )
    return result, None


def _is_here(tensor: tf.Tensor) -> bool:
    """Whether a tensor can be used where this is called."""
    if not tf.is_symbolic_tensor(tensor):
        return True
    return not tf.executing_eagerly() and (
        tensor.graph is tf.compat.v1.get_default_graph()
    )


def value_and_gradients(
    loss_of: LossFunction,
    variables: Sequence[keras.Variable | tf.Variable],
    batch: Any,
    split: Split,
    reduction: str = "mean",
    *,
    scale_loss: Callable[[tf.Tensor], tf.Tensor] | None = None,
    parts: int = 0,
    divisor_of: Callable[[tf.Tensor], tf.Tensor] | None = None,
    jit_compile: bool | None = None,
    observer: Observer | None = None,
) -> BatchGradients:
    """`accumulate_gradients` for a `loss_of` with `parts` scalars to be averaged too.

    The gradients are divided by `divisor_of` the sum of the weights; by default by that
    sum itself, as the losses are. `jit_compile` is for each micro-step alone. `observer`
    is to see the gradients of each micro-batch.
    """
    values = [
        getattr(v, "value", v) if isinstance(v, keras.Variable) else v for v in variables
    ]
    dtype = scalar_dtype(variables)
    has_gradient = [False] * len(values)

    def step(micro_batch: Any, rows: tf.Tensor, state: Any) -> Any:
        sums, values_sum, total, reference, seen = state
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(values)
            loss, weight, others = loss_of(micro_batch, rows)
            loss = _scalar(loss)
            # A share of the samples is never 0 nor above 1: it goes to one scalar, not to
            # all gradients. In float16, they have the size of the large batch's then.
            scaled_loss_first = weight is None and loss.dtype.size >= 4
            weight = tf.cast(rows if weight is None else weight, dtype)
            if reduction == "sum":
                weight = tf.ones((), dtype)
            # Other weights are taken in units of the first: equal ones add gradients as
            # they are.
            unit_is_batch_size = scaled_loss_first and reduction == "mean"
            first = tf.cast(rows_of(batch), dtype) if unit_is_batch_size else weight
            reference = tf.where(tf.equal(reference, 0.0), first, reference)
            relative = tf.math.divide_no_nan(weight, reference)
            target = loss if scale_loss is None else scale_loss(loss)
            if scaled_loss_first:
                target *= tf.cast(relative, target.dtype)
        gradients: list[Gradient] = tape.gradient(target, values)
        for i, gradient in enumerate(gradients):
            has_gradient[i] = has_gradient[i] or gradient is not None
        sums = [
            s
            if g is None
            else add(s, g if scaled_loss_first else weigh(g, relative, s.dtype))
            for s, g in zip(sums, gradients)
        ]
        values_sum = [
            v + tf.math.multiply_no_nan(tf.cast(value, dtype), relative)
            for v, value in zip(values_sum, [loss, *others])
        ]
        if observer is not None:
            # A gradient that has its weight already is to lose it.
            inverse = tf.math.divide_no_nan(tf.ones((), dtype), relative)
            seen = observer.see(
                seen,
                gradients,
                range(len(values)),
                relative,
                tf.square(inverse) if scaled_loss_first else 1.0,
                weighs=relative > 0,
            )
        return sums, values_sum, total + relative, reference, seen

    zero = tf.zeros((), dtype)
    zeros = [tf.zeros(v.shape, sum_dtype(v, None)) for v in values]
    seen: Any = ()  # A loop in a graph takes no None.
    share: tf.Tensor | float = 1.0
    if observer is not None:
        observer.begin()
        seen = nothing(len(values))
    start = (zeros, [zero] * (1 + parts), zero, zero, seen)
    state = for_each_micro_batch(step, batch, start, split, jit_compile)
    sums, means, total, reference, seen = state
    divisor = tf.ones((), dtype) if reduction == "sum" else total
    loss, *others = [tf.math.divide_no_nan(mean, divisor) for mean in means]
    weight = whole = total * reference
    if divisor_of is not None:
        whole = tf.cast(divisor_of(weight), dtype)
        divisor = tf.math.divide_no_nan(whole, reference)
    gradients = [
        divide_no_nan(s, divisor) if known else None
        for s, known in zip(sums, has_gradient)
    ]
    if observer is not None:
        inverse = tf.math.divide_no_nan(1.0, tf.cast(total, "float32"))
        seen = seen._replace(squares=seen.squares * inverse, part=seen.part * inverse)
        share = tf.math.divide_no_nan(total, tf.cast(divisor, total.dtype))
    return BatchGradients(
        loss, gradients, weight, others, whole, observed=seen or None, share=share
    )


def _scalar(loss: Any) -> tf.Tensor:
    loss = tf.convert_to_tensor(loss)
    if loss.shape.rank != 0:
        raise ValueError(
            "`loss_fn` must return a scalar, the mean loss of the micro-batch, or a pair "
            f"of it and its weight. Received a loss of shape {tuple(loss.shape)}: take "
            "its mean, and pass `reduction='sum'` if you take its sum."
        )
    return loss
