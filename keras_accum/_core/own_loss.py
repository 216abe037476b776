"""What a loss, or a `compute_loss`, of the user's makes of a batch.

A batch can be split exactly if the loss is a plain sum of Keras losses, times constants,
and of regularizers, and each of those is a mean or sum over samples. Two tests tell. The
graph of a `compute_loss` is read: from the total, through additions and constant factors,
to the losses that Keras has reduced. And the rule is tried on numbers that are made up: the
loss of a few samples at once, and split. What passes is exact; all else weighs by samples,
with a warning.
"""

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from .._backend.arrays import to_numpy
from .._backend.private.layers import read
from .._backend.private.losses import (
    LossCall,
    compute_loss,
    has_own_compute_loss,
    listen_to_reductions,
)
from .._backend.private.models import OfCompilation
from .loss import LossTerm, describe, loss_of_none
from .regularizers import without_regularizers

# From (x, y, y_pred, sample_weight) to the loss.
Compute = Callable[..., tf.Tensor]
# Makes floats of a shape up.
Draw = Callable[[np.random.Generator, Sequence[int]], np.ndarray]

_PASSED_ON = {
    "Identity",
    "Cast",
    "EnsureShape",
    "Squeeze",
    "ExpandDims",
    "Reshape",
    "Neg",
}
_OF_SHAPE_ALONE = {"OnesLike", "ZerosLike", "Shape", "Size"}
_ADDED_UP = {"AddV2", "Add", "AddN", "Sub", "Pack"}
_DEEPEST = 100
_SAMPLES = (1, 4)
_SPLIT = (slice(0, _SAMPLES[0]), slice(*_SAMPLES))


class Understanding(NamedTuple):
    """What is known of a loss.

    Attributes:
        terms: indices of the Keras losses that it is a plain sum of.
        complete: whether there is nothing else in it.
        adds_up: whether the losses of micro-batches, but for regularizers, add up to that
            of the batch, if all of its terms are sums.
    """

    terms: frozenset[int]
    complete: bool
    adds_up: bool = True


def what_is_known(
    model: keras.Model,
    arguments: Any,
    compiled: Sequence[LossTerm],
    traced: tuple[tf.Tensor, Sequence[tf.Tensor], Sequence[tf.Tensor]],
) -> Understanding:
    """What is known of a training loss of `model`, whoever computes it.

    Args:
        model: the model.
        arguments: `x, y, y_pred, sample_weight`, as a loss is computed of.
        compiled: the Keras losses in it, in the order in which they were computed.
        traced: the loss, those losses, and what layers had added (see `understand`).
    """
    if has_own_compute_loss(model):
        return understand(model, arguments, traced)
    kinds = [term.kind for term in compiled]
    losses = [loss for loss in keras.tree.flatten(model.loss) if loss is not None]
    # One that reduces by itself, in a `__call__` of its own, is not among the terms.
    if "unknown" not in kinds and (
        len(kinds) < len(losses) or fall_apart(model, arguments)
    ):
        sums = frozenset(i for i, kind in enumerate(kinds) if kind == "sum")
        return Understanding(sums, False)
    return Understanding(frozenset(range(len(kinds))), True)


def understand(
    model: keras.Model,
    arguments: Any,
    traced: tuple[tf.Tensor, Sequence[tf.Tensor], Sequence[tf.Tensor]] | None = None,
) -> Understanding:
    """What the loss of a model with its own `compute_loss` is made of.

    Args:
        model: the model.
        arguments: `x, y, y_pred, sample_weight`, as a loss is computed of.
        traced: a loss of them in a graph, the Keras losses in it, in the order in which
            they were computed, and what layers had added. Traced here if it is None or
            was computed in eager mode.
    """
    known = _known(model)
    key = kind_of(arguments)
    if key not in known:
        known[key] = _understand(model, arguments, traced)
    return known[key]


# By the kind of batch.
_known: OfCompilation[dict[Any, Understanding]] = OfCompilation(dict)


def kind_of(arguments: Any) -> Any:
    leaves = tf.nest.flatten(arguments)
    return tuple(
        None if leaf is None else (tf.as_dtype(leaf.dtype), tuple(leaf.shape[1:]))
        for leaf in leaves
    )


def _understand(model: keras.Model, arguments: Any, traced: Any) -> Understanding:
    nothing = Understanding(frozenset(), False)

    def compute(*arguments: Any) -> tf.Tensor:
        with nothing_moves(model):
            return compute_loss(model, *arguments)

    try:
        if traced is None or not tf.is_symbolic_tensor(traced[0]):
            traced = _trace(compute, arguments)
    except Exception:
        return nothing  # What cannot be traced cannot be read.
    total, reduced, added = traced
    reader = _Reader(reduced, added)
    complete = reader.read(total)
    complete &= sorted(reader.found.items()) == [(i, 1) for i in range(len(reduced))]
    terms = frozenset(reader.found)
    if not complete or _holds_on_made_up(compute, arguments, terms) is not True:
        return nothing
    return Understanding(terms, True, _adds_up_on_made_up(model, compute, arguments))


def _adds_up_on_made_up(model: keras.Model, compute: Compute, arguments: Any) -> bool:
    """Whether made-up samples have the loss of two parts together: no term is there twice.

    True if that cannot be said. Regularizers are left out: they count once anyway.
    """
    try:
        with tf.init_scope(), without_regularizers(model):
            whole, *parts = [
                _loss_of(compute, batch, frozenset(), [], 1.0)[0]
                for batch in _whole_and_parts(arguments, positive)
            ]
    except Exception:
        return True
    return bool(np.isclose(sum(parts), whole, rtol=1e-4, atol=1e-6))


def _whole_and_parts(arguments: Any, draw: Any, *labels: Any) -> list[Any]:
    """Made-up samples, and the two parts that they are split into.

    Args:
        arguments: `y, y_pred`, or `x, y, y_pred, sample_weight`.
        draw: makes floats up.
        labels: the integers and the floats among which `y` is; those of `draw` if none.
    """
    rng = np.random.default_rng(0)
    count = _SAMPLES[1]
    batch = tf.nest.map_structure(lambda spec: made_up(rng, spec, count, draw), arguments)
    if labels:
        index = 0 if len(batch) == 2 else 1

        def label(value: tf.Tensor | None) -> tf.Tensor | None:
            if value is None:
                return None
            among = labels[1] if value.dtype.is_floating else labels[0]
            return tf.cast(tf.constant(rng.choice(among, value.shape)), value.dtype)

        labeled = tf.nest.map_structure(label, batch[index])
        batch = [*batch[:index], labeled, *batch[index + 1 :]]
    return [batch] + [
        tf.nest.map_structure(lambda t, rows=rows: None if t is None else t[rows], batch)
        for rows in _SPLIT
    ]


# Labels to try, integers and floats: those that mark "no label", and several classes.
_LABELS = (
    ([0, 1, -1, -100], [0.3, 0.0, -1.0, -100.0]),
    ([0, 1, 2, 3], [0.2, 1.0, 3.0, 30.0]),
    ([0, 1, 255], [0.2, 0.7, np.nan]),
)


def _trace(compute: Compute, arguments: Any) -> Any:
    reduced: list[tf.Tensor] = []
    total: list[tf.Tensor] = []

    def note(*described: Any) -> tf.Tensor:
        reduced.append(loss_of_none(described[-1]))
        return reduced[-1]

    def traced(arguments: Any) -> None:
        with listen_to_reductions(note):
            total.append(compute(*arguments))

    with tf.init_scope():
        specs = tf.nest.map_structure(_spec, arguments)
        tf.function(traced, autograph=False).get_concrete_function(specs)
    return total[0], reduced, ()


def _spec(leaf: Any) -> Any:
    return None if leaf is None else tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype)


@contextlib.contextmanager
def nothing_moves(model: keras.Model) -> Iterator[keras.StatelessScope]:
    """What is assigned inside, or added as a loss, goes nowhere but into the scope."""
    # A stateless scope does not look outside for what a regulariser reads. A scope
    # around this one may hold tensors of another graph.
    regularized = [v for v in model.trainable_variables if v.regularizer is not None]
    weights = [(v, read(v)) for v in regularized]
    with keras.StatelessScope(weights, collect_losses=True) as scope:
        yield scope


class _Reader:
    """Reads a graph from a loss back to the terms that it is a sum of."""

    def __init__(self, reduced: Sequence[tf.Tensor], added: Sequence[tf.Tensor]) -> None:
        self._terms = {_key(tensor): i for i, tensor in enumerate(reduced)}
        self._added = {_key(tensor) for tensor in added}
        self._constant: dict[Any, bool] = {}
        self._depth = 0
        self.found: dict[int, int] = {}

    def read(self, total: tf.Tensor) -> bool:
        """Whether `total` is a sum of known terms; `found` counts them, all of them."""
        known, left = True, [total]
        while left:  # Not by recursion: a sum of all regularizers is hundreds deep.
            tensor = _outside(left.pop())
            if (index := self._terms.get(_key(tensor))) is not None:
                self.found[index] = self.found.get(index, 0) + 1
            elif _key(tensor) not in self._added and not self.is_constant(tensor):
                parts = self._parts(tensor.op)
                known &= parts is not None
                left += parts or ()
        return known

    def _parts(self, op: tf.Operation) -> list[tf.Tensor] | None:
        """What an operation adds up, times constants; None for another operation."""
        inputs = list(op.inputs)
        if op.type in _PASSED_ON:
            return inputs[:1]
        if op.type in _ADDED_UP:
            return inputs
        if op.type == "Sum" or (op.type == "Mean" and inputs[0].shape.rank == 0):
            return inputs[:1] if self._adds_up_terms(inputs[0]) else None
        if op.type == "Mul":
            constant = [self.is_constant(each) for each in inputs]
            return [inputs[constant.index(True) - 1]] if any(constant) else None
        if op.type in ("RealDiv", "DivNoNan"):
            return inputs[:1] if self.is_constant(inputs[1]) else None
        return None

    def _adds_up_terms(self, tensor: tf.Tensor) -> bool:
        """Of a list of losses, or of what a layer added: not of the values of samples."""
        tensor = _outside(tensor)
        listed = tensor.op.type == "Pack" or tensor.shape.rank == 0
        return listed or _key(tensor) in self._added

    def is_constant(self, tensor: tf.Tensor) -> bool:
        """Whether `tensor` depends on variables and constants alone, not on data."""
        if not tf.is_symbolic_tensor(tensor) or tensor.dtype == tf.resource:
            return True
        key = _key(tensor)
        if key not in self._constant:
            if self._depth == _DEEPEST:
                return False  # Far below are the layers of a model.
            self._constant[key] = False  # In a loop, the question comes back here.
            self._depth += 1
            self._constant[key] = self._depends_on_no_data(tensor)
            self._depth -= 1
        return self._constant[key]

    def _depends_on_no_data(self, tensor: tf.Tensor) -> bool:
        if _key(tensor) in self._terms or _key(tensor) in self._added:
            return False
        if (outside := _outside(tensor)) is not tensor:
            return self.is_constant(outside)
        if tensor.op.type in ("Const", "ReadVariableOp"):
            return True
        if tensor.op.type in _OF_SHAPE_ALONE and tensor.op.inputs[0].shape.rank == 0:
            return True
        inputs = tensor.op.inputs
        return len(inputs) > 0 and all(self.is_constant(each) for each in inputs)


def is_term_of(total: tf.Tensor, loss: tf.Tensor) -> bool:
    """Whether a tensor of a graph has `loss` in it as it is, or times a constant."""
    reader = _Reader([loss], ())
    reader.read(total)
    return bool(reader.found)


def depends_on_data(tensor: tf.Tensor) -> bool:
    """Whether a tensor of a graph depends on more than variables and constants."""
    return not _Reader((), ()).is_constant(tensor)


def _key(tensor: tf.Tensor) -> Any:
    return (
        (id(tensor.graph), tensor.name) if tf.is_symbolic_tensor(tensor) else id(tensor)
    )


def _outside(tensor: tf.Tensor) -> tf.Tensor:
    """What a function captured as `tensor`, from outside; or `tensor` itself."""
    if not tf.is_symbolic_tensor(tensor) or tensor.op.type != "Placeholder":
        return tensor
    for outer, inner in getattr(tensor.graph, "captures", ()):
        if inner.name == tensor.name:
            return outer
    return tensor


def _holds_on_made_up(
    compute: Compute, arguments: Any, terms: frozenset[int] | None
) -> bool | None:
    """Whether made-up samples have the same loss at once and split into two.

    None if that cannot be said: made-up numbers may be no labels.
    """
    holds: list[bool | None] = []
    drawn: list[tuple[Any, ...]] = [(positive,), (_any,)]
    for how in [*drawn, *((positive, *labels) for labels in _LABELS)]:
        with tf.init_scope(), contextlib.suppress(Exception):
            holds.append(_holds_on(compute, _whole_and_parts(arguments, *how), terms))
    known = [each for each in holds if each is not None]
    return all(known) if known else None


def _holds_on(
    compute: Compute, whole_and_parts: Any, terms: frozenset[int] | None
) -> bool | None:
    batch, *parts = whole_and_parts
    whole, met = _loss_of(compute, batch, frozenset(), [], 1.0)
    if terms is None:
        terms = frozenset(range(len(met)))
    # What a batch divides by is what its parts do, together.
    each = [_loss_of(compute, part, frozenset(), [], 1.0)[1] for part in parts]
    weights = [
        tf.add_n([t.weight for t in same]) if same[0].kind == "mean" else None
        for same in zip(*each)
    ]
    total = 0.0
    for rows, part in zip(_SPLIT, parts):
        inverse = _SAMPLES[1] / (rows.stop - rows.start)
        total += _loss_of(compute, part, terms, weights, inverse)[0] / inverse
    if not np.isfinite(whole):
        return None
    # A part may have no loss, 0 / 0: the whole is then no mean over samples.
    return bool(np.isclose(total, whole, rtol=1e-4, atol=1e-6))


def _loss_of(
    compute: Compute,
    batch: Any,
    understood: frozenset[int],
    weights: Sequence[tf.Tensor | None],
    inverse: float,
) -> tuple[Any, list[LossTerm]]:
    """The loss of a batch; or of a part of one, each term times its factor."""
    met: list[LossTerm] = []

    def adjust(*reduced: Any) -> tf.Tensor:
        *described, loss = reduced
        term, loss = describe(*described), loss_of_none(loss)
        index = len(met)
        met.append(term)
        if index not in understood:
            return loss
        if term.kind == "sum":
            return loss * inverse
        if term.kind == "mean" and weights[index] is not None:
            share = tf.math.divide_no_nan(term.weight, weights[index]) * inverse
            return loss * tf.cast(share, loss.dtype)
        return loss

    with listen_to_reductions(adjust):
        loss = compute(*batch)
    return to_numpy(loss).astype("float64"), met


def positive(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    """Numbers that most functions take: probabilities, and what has a logarithm."""
    return rng.uniform(0.1, 0.9, shape)


def _any(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    return rng.normal(size=shape)


def made_up(
    rng: np.random.Generator, spec: Any, rows: int, draw: Draw = positive
) -> tf.Tensor | None:
    """Samples of the shape and dtype of `spec`, in float32 at least."""
    if spec is None:
        return None
    shape = [rows, *[3 if size is None else size for size in spec.shape[1:]]]
    dtype = tf.as_dtype(spec.dtype)
    if dtype.is_floating:
        return tf.constant(draw(rng, shape), dtype if dtype.size >= 4 else tf.float32)
    return tf.constant(rng.integers(0, 2, shape), dtype)


# --- Losses of Keras's kind: compiled, or called in a loop.


def fall_apart(model: keras.Model, arguments: Any) -> bool:
    """Whether a compiled loss of the user's is more than its samples' losses together.

    One whose values depend on the whole batch, or that reduces by itself. Keras's losses
    are trusted, except those with an `axis` argument, which are tried, and `Circle`, which
    always compares samples.

    Args:
        model: the model, whose `compute_loss` is Keras's.
        arguments: `x, y, y_pred, sample_weight`, as a loss is computed of.
    """
    losses = keras.tree.flatten(model.loss)
    if any(map(_compares_samples, losses)):
        return True
    if all(map(_is_of_keras, losses)):
        return False
    known = _tried(model)
    key = kind_of(arguments)
    if key not in known:

        def compute(*arguments: Any) -> tf.Tensor:
            with nothing_moves(model):
                return compute_loss(model, *arguments)

        known[key] = _holds_on_made_up(compute, arguments, None) is False
    return known[key]


# By the kind of batch.
_tried: OfCompilation[dict[Any, bool]] = OfCompilation(dict)


def couples_samples(call: LossCall) -> bool:
    """Whether a loss is known not to be made of losses of its samples alone."""
    loss, *arguments = call
    if _compares_samples(loss):
        return True
    if _is_of_keras(loss):
        return False
    known = _coupled.setdefault(loss, {})
    key = kind_of(arguments)
    if key not in known:

        def compute(*arguments: Any) -> tf.Tensor:
            return loss(*arguments)

        known[key] = _holds_on_made_up(compute, arguments, None) is False
    return known[key]


_coupled: "weakref.WeakKeyDictionary[keras.losses.Loss, dict[Any, bool]]"
_coupled = weakref.WeakKeyDictionary()


def _compares_samples(loss: Any) -> bool:
    """Whether a loss is one of Keras's that looks at pairs of samples."""
    named = isinstance(loss, str) and loss.lower() in ("circle",)
    return named or isinstance(loss, keras.losses.Circle)


def _is_of_keras(loss: Any) -> bool:
    """Whether a loss is one of Keras's that takes samples one by one."""
    if isinstance(loss, str):
        try:
            loss = keras.losses.get(loss)
        except ValueError:
            return False
    made_of = [loss]
    if isinstance(loss, keras.losses.Loss):
        if _has_an_axis(loss):
            return False
        made_of = [type(loss), *([loss.fn] if hasattr(loss, "fn") else [])]
    return all(
        x is None or getattr(x, "__module__", "").startswith("keras.") for x in made_of
    )


def _has_an_axis(loss: keras.losses.Loss) -> bool:
    """Whether a loss takes an axis that may be that of the samples.

    Not all of Keras's tell which they have: `CosineSimilarity` does not.
    """
    takes = "axis" in inspect.signature(type(loss)).parameters
    return takes and getattr(loss, "axis", None) != -1
