"""What can be read of a model without its data: by a forward pass on made-up samples.

Whether a layer couples the samples of a batch is not a matter of its name. So each layer
is called on a few made-up samples at once, and on the same in two parts: one that gives a
sample something else couples them. The values of losses that layers add, and of the
compiled loss, are compared likewise. What a call assigns is seen in a scope that keeps
assignments to itself. Nothing of the model changes.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from .._backend.attribute_patch import AttributePatch
from .._backend.private.graphs import graph_of
from .._backend.private.layers import call, children, flatten_layers, own_state
from .._backend.private.losses import (
    added_losses,
    compute_loss,
    forget_call_losses,
    has_own_compute_loss,
    listen_to_reductions,
)
from .._backend.private.models import scalar_metrics
from .._backend.private.replay import RandomBySample
from .._core.own_loss import fall_apart, nothing_moves, understand
from .._optimizer.find import has_known_train_step
from .._optimizer.wrapper import AccumOptimizer
from .._step.model import settings_of

_PARTS = ((0, 1), (1, 3))
_SAMPLES = 3
# Of a dimension that a model leaves open.
_SIDE, _LENGTH = 96, 8


@dataclasses.dataclass
class Reading:
    """What a forward pass on made-up samples has shown.

    Attributes:
        y_pred: the predictions; None if the model could not be called.
        tried: the ids of layers of which it is known whether they couple samples.
        coupled: the innermost layers that give a sample something else in another batch.
        drawing: the innermost layers that draw random numbers.
        moved: the ids of variables that are assigned in a call.
        sums: the number of losses that layers add and that are sums over samples.
        batch_wide: the number of those that are no mean over samples.
        without_gradient: the paths of trained weights that the outputs do not depend on.
    """

    y_pred: Any = None
    tried: set[int] = dataclasses.field(default_factory=set)
    coupled: list[keras.layers.Layer] = dataclasses.field(default_factory=list)
    drawing: list[keras.layers.Layer] = dataclasses.field(default_factory=list)
    moved: set[int] = dataclasses.field(default_factory=set)
    sums: int = 0
    batch_wide: int = 0
    without_gradient: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class LossReading:
    """What the compiled loss is, by a call on made-up targets.

    Attributes:
        known: whether it could be computed.
        reductions: how Keras reduces each loss; None for one of several values.
        scalar: "" if each loss gives one value per sample; else how one that does not
            reduces them: "mean", "sum", "ratio" (by something that depends on the
            data), or "unknown".
        coupled: whether a sample's loss depends on the others of its batch.
        varies: whether a denominator depends on the data (a mask).
        understood: whether a `compute_loss` of the user's is a sum of Keras losses.
        batch_metrics: the names of metrics that give one number for a batch.
    """

    known: bool = False
    reductions: tuple[Any, ...] = ()
    scalar: str = ""
    coupled: bool = False
    varies: bool = False
    understood: bool = True
    batch_metrics: tuple[str, ...] = ()


class Facts:
    """A model, and what is read of it, once.

    Args:
        model: built; compiled or not.
    """

    def __init__(self, model: keras.Model) -> None:
        self.model = model
        everything = {id(x): x for x in flatten_layers(model) if x is not model}
        self.layers: list[keras.layers.Layer] = list(everything.values())
        self.compiled = bool(getattr(model, "compiled", False))
        self.optimizer: Any = model.optimizer if self.compiled else None
        self.accumulates = isinstance(self.optimizer, AccumOptimizer)
        self.settings = settings_of(model)
        self.own_step = not has_known_train_step(model)
        self.own_loss = has_own_compute_loss(model)
        self.two_pass = self.settings is not None and self.settings.two_pass
        self.in_optimizer = self.accumulates or self.own_step

    @property
    def inner(self) -> Any:
        """The innermost optimizer, which clips and averages; None without one."""
        optimizer = self.optimizer
        while getattr(optimizer, "inner_optimizer", None) is not None:
            optimizer = optimizer.inner_optimizer
        return optimizer

    @functools.cached_property
    def reading(self) -> Reading:
        """What a forward pass shows; without predictions where it cannot be made."""
        found = Reading()
        with contextlib.suppress(Exception):
            _read(self.model, found)
        return found

    @functools.cached_property
    def loss(self) -> LossReading:
        """What the compiled loss and metrics are, where they can be computed."""
        found = LossReading()
        if self.compiled and self.reading.y_pred is not None:
            with contextlib.suppress(Exception):
                _read_loss(self.model, self.reading.y_pred, found)
        return found

    def moved_in(self, layer: keras.layers.Layer) -> bool:
        """Whether a call assigns state of `layer` itself."""
        return any(id(v) in self.reading.moved for v in own_state(layer))


# --- The forward pass.


def made_up(model: keras.Model) -> Any:
    """Made-up inputs of `model`, `_SAMPLES` of them."""
    if (graph := graph_of(model)) is not None:
        specs = graph.input
    else:
        config = model.get_build_config() or {}
        shapes = config.get("shapes_dict") or {"x": config["input_shape"]}
        (shape,) = shapes.values()
        shape = keras.tree.map_shape_structure(tuple, shape)
        specs = keras.tree.map_shape_structure(
            lambda s: keras.KerasTensor(s, "float32"), shape
        )
    rng, top = np.random.default_rng(0), _top_of(model)
    return keras.tree.map_structure(lambda spec: _made_up(rng, spec, top), specs)


def _top_of(model: keras.Model) -> float:
    """Where the range of inputs ends: what the first `Rescaling` makes 1 of, if any.

    An image in parts of 255 that is rescaled again is nearly black all over: no sample
    of it differs from another.
    """
    scales = [x.scale for x in flatten_layers(model) if isinstance(x, _Rescaling)]
    known = scales and np.ndim(scales[0]) == 0 and float(scales[0])
    return 1 / abs(float(scales[0])) if known else 1.0


_Rescaling = keras.layers.Rescaling


def _made_up(rng: np.random.Generator, spec: Any, top: float = 1.0) -> tf.Tensor:
    open_size = _SIDE if len(spec.shape) >= 4 else _LENGTH
    shape = [_SAMPLES, *(open_size if n is None else n for n in spec.shape[1:])]
    dtype = tf.as_dtype(keras.backend.standardize_dtype(spec.dtype))
    if dtype.is_floating:
        return tf.cast(rng.uniform(0.0, top, shape), dtype)
    numbers = rng.integers(0, 2, shape)
    numbers[:, :1] = 1  # No sample is a mask of nothing.
    return tf.cast(numbers, dtype)


@dataclasses.dataclass
class _Call:
    layer: keras.layers.Layer
    args: Any
    kwargs: Any
    draws: bool


def _read(model: keras.Model, found: Reading) -> None:
    x = made_up(model)
    with RandomBySample() as random:
        with _recorded(model, random) as calls, tf.GradientTape() as tape:
            scope, y_pred, added = _forward(model, x)
            outputs = [*tf.nest.flatten(y_pred), *added]
            target = tf.add_n(
                [
                    tf.reduce_sum(tf.cast(t, "float32"))
                    for t in outputs
                    if t.dtype.is_floating
                ]
            )
        parts = [_rows(x, *part) for part in _PARTS]
        with _recorded(model, random):
            of_parts = [_forward(model, part)[1:] for part in parts]
        _note_drawing(calls, found)
        if any(
            _differ(_rows(y_pred, *part), y_part)
            for part, (y_part, _) in zip(_PARTS, of_parts)
        ):
            _find_coupled(model, calls, random, found)
        else:
            found.tried = {id(each.layer) for each in calls}
    found.moved = {
        id(v) for v in model.variables if scope.get_current_value(v) is not None
    } - {id(v) for v in model.trainable_variables if v.regularizer is not None}
    added_in_parts = [each for _, each in of_parts]
    if len({len(a) for a in (added, *added_in_parts)}) == 1:
        for whole, one, two in zip(added, *added_in_parts):
            if _far(whole, (one + 2 * two) / _SAMPLES):
                is_sum = not _far(whole, one + two)
                found.sums += is_sum
                found.batch_wide += not is_sum
    trained = [v for v in model.trainable_variables if id(v) not in found.moved]
    gradients = tape.gradient(target, [v.value for v in trained])
    # What only a frozen, moved or wrapped weight reaches is not asked for.
    found.without_gradient = [
        v.path for v, gradient in zip(trained, gradients) if gradient is None
    ]
    found.y_pred = y_pred


def _forward(model: keras.Model, x: Any) -> tuple[Any, Any, list[tf.Tensor]]:
    with nothing_moves(model) as scope:
        forget_call_losses(model)
        y_pred = call(model, x)
        added = [tf.reduce_sum(each.value) for each in added_losses(model)]
    forget_call_losses(model)
    return scope, y_pred, added


@contextlib.contextmanager
def _recorded(model: keras.Model, random: RandomBySample) -> Iterator[list[_Call]]:
    """The first call of each layer of `model`, inner ones first."""
    found: list[_Call] = []
    seen: set[int] = set()

    def recording(layer: keras.layers.Layer) -> Callable[..., Any]:
        inner = layer.call

        @functools.wraps(inner)
        def call_and_record(*args: Any, **kwargs: Any) -> Any:
            before = random.drawn
            with random.following((args, _tensors(kwargs)), layer.name):
                outputs = inner(*args, **kwargs)
            if id(layer) not in seen:
                seen.add(id(layer))
                found.append(_Call(layer, args, kwargs, random.drawn > before))
            return outputs

        return call_and_record

    patches: list[AttributePatch] = []
    try:
        for layer in flatten_layers(model):
            patches.append(AttributePatch(layer, "call", recording(layer)))
        yield found
    finally:
        while patches:
            patches.pop().undo()


def _tensors(value: Any) -> list[tf.Tensor]:
    leaves = tf.nest.flatten(value)
    return [leaf for leaf in leaves if isinstance(leaf, tf.Tensor) and _is_batch(leaf)]


def _is_batch(leaf: Any) -> bool:
    tensor = isinstance(leaf, (tf.Tensor, tf.Variable, np.ndarray))
    return tensor and len(leaf.shape) > 0 and leaf.shape[0] == _SAMPLES


def _rows(value: Any, first: int, last: int) -> Any:
    """The part of a batch, in what is nested; what is no batch as it is."""
    return tf.nest.map_structure(
        lambda leaf: leaf[first:last] if _is_batch(leaf) else leaf, value
    )


def _note_drawing(calls: list[_Call], found: Reading) -> None:
    named: set[int] = set()
    for each in calls:
        inside = {id(layer) for layer in _descendants(each.layer)}
        if each.draws and not inside & named:
            named.add(id(each.layer))
            found.drawing.append(each.layer)


def _find_coupled(
    model: keras.Model, calls: list[_Call], random: RandomBySample, found: Reading
) -> None:
    named: set[int] = set()
    for each in calls:
        inside = {id(layer) for layer in _descendants(each.layer)}
        if inside & named or not _tensors((each.args, each.kwargs)):
            continue
        # Layers that cannot be called so by themselves are in one that can.
        with contextlib.suppress(Exception):
            whole = _called(model, each, random, (0, _SAMPLES))
            depends = any(
                _differ(_rows(whole, *part), _called(model, each, random, part))
                for part in _PARTS
            )
            if depends:
                named.add(id(each.layer))
                again = _called(model, each, random, (0, _SAMPLES))
                repeatable = not _differ(whole, again)
                (found.coupled if repeatable else found.drawing).append(each.layer)
            found.tried.add(id(each.layer))


def _descendants(layer: keras.layers.Layer) -> Iterator[keras.layers.Layer]:
    for child in children(layer):
        yield child
        yield from _descendants(child)


def _called(
    model: keras.Model, each: _Call, random: RandomBySample, part: tuple[int, int]
) -> Any:
    """What a layer gives for a part of its samples, from the state that it has now."""
    args, kwargs = _rows(each.args, *part), _rows(each.kwargs, *part)
    layer, inputs = each.layer, (args, _tensors_of_rows(kwargs, part))
    with nothing_moves(model), random.following(inputs, layer.name):
        return layer(*args, **kwargs)


def _tensors_of_rows(kwargs: Any, part: tuple[int, int]) -> list[tf.Tensor]:
    rows = part[1] - part[0]
    leaves = tf.nest.flatten(kwargs)
    return [x for x in leaves if isinstance(x, tf.Tensor) and x.shape[:1] == [rows]]


def _differ(one: Any, other: Any) -> bool:
    """Whether two nests of floating tensors of the same shapes differ."""
    pairs = zip(tf.nest.flatten(one), tf.nest.flatten(other))
    return any(
        _far(a, b)
        for a, b in pairs
        if isinstance(a, tf.Tensor) and a.dtype.is_floating and a.shape == b.shape
    )


def _far(one: Any, other: Any) -> bool:
    limit = 0.1 if tf.as_dtype(one.dtype).size < 4 else 1e-3
    a, b = (np.asarray(tf.cast(t, "float64")) for t in (one, other))
    size = max(float(np.abs(a).max(initial=0)), float(np.abs(b).max(initial=0)))
    return float(np.abs(a - b).max(initial=0)) > limit * size


# --- The loss.


def _read_loss(model: keras.Model, y_pred: Any, found: LossReading) -> None:
    x = made_up(model)
    for y in _targets(y_pred):
        with contextlib.suppress(Exception):
            whole = _losses(model, x, y, y_pred)
            found.known = True
            break
    else:
        return
    parts = [
        _losses(model, *(_rows(v, *part) for v in (x, y, y_pred))) for part in _PARTS
    ]
    total, reductions = whole
    found.reductions = tuple(r[-1] for r in reductions)
    found.varies = any(
        mask is not None or reduction == "mean_with_sample_weight"
        for _, _, mask, reduction in reductions
    )
    scalars = [r for r in reductions if tf.convert_to_tensor(r[0]).shape.rank == 0]
    if scalars:
        found.scalar = _how_reduced(model, x, y, y_pred)
        mean = (parts[0][0] + 2 * parts[1][0]) / _SAMPLES
        plain = found.scalar != "sum"
        found.coupled = plain and _far(total, mean)
    else:
        values = [
            [tf.convert_to_tensor(r[0]) for r in reductions] for _, reductions in parts
        ]
        for i, (value, *_) in enumerate(reductions):
            joined = tf.concat([each[i] for each in values], 0)
            value = tf.convert_to_tensor(value)
            found.coupled |= value.shape == joined.shape and _far(value, joined)
    if has_own_compute_loss(model):
        found.understood = understand(model, (x, y, y_pred, None)).complete
        # It may do with sample weights what it cannot do without: divide by their sum.
        with contextlib.suppress(Exception):
            weight = tf.range(1.0, _SAMPLES + 1.0)
            weights = tf.nest.map_structure(lambda _: weight, y_pred)
            found.understood &= understand(model, (x, y, y_pred, weights)).complete
    elif not scalars:
        found.coupled |= fall_apart(model, (x, y, y_pred, None))
    arguments = {"x": x, "y": y, "y_pred": y_pred, "sample_weight": None}
    with contextlib.suppress(Exception):
        model.compute_metrics(**arguments)  # Builds them, where they are not.
        with scalar_metrics(model, _SAMPLES) as names:
            model.compute_metrics(**arguments)
        found.batch_metrics = tuple(dict.fromkeys(names))


def _targets(y_pred: Any) -> Iterator[Any]:
    """Made-up targets for predictions: of their shape, or classes."""
    rng = np.random.default_rng(1)

    def like(tensor: Any) -> Any:
        return tf.cast(rng.uniform(0.1, 0.9, tensor.shape), "float32")

    def classes(tensor: Any) -> Any:
        return tf.constant(rng.integers(0, 2, tensor.shape[:-1]), "int32")

    def column(tensor: Any) -> Any:
        return tf.expand_dims(classes(tensor), -1)

    for make in (like, classes, column):
        yield tf.nest.map_structure(make, y_pred)
    yield None


def _losses(
    model: keras.Model, x: Any, y: Any, y_pred: Any
) -> tuple[tf.Tensor, list[tuple[Any, ...]]]:
    reductions: list[tuple[Any, ...]] = []

    def note(*reduced: Any) -> Any:
        *description, loss = reduced
        reductions.append(tuple(description))
        return tf.reduce_sum(loss)

    with nothing_moves(model), listen_to_reductions(note):
        forget_call_losses(model)
        return compute_loss(model, x, y, y_pred, None), reductions


_PASSED_ON = (
    "Identity",
    "Cast",
    "EnsureShape",
    "Squeeze",
    "Reshape",
    "Neg",
    "Sqrt",
    "Mul",
)


def _how_reduced(model: keras.Model, x: Any, y: Any, y_pred: Any) -> str:
    """How a loss that returns one number makes it of the values of samples."""
    found: list[str] = []

    def note(values: Any, *rest: Any) -> Any:
        values = tf.convert_to_tensor(values)
        if values.shape.rank == 0:
            found.append(_last_reduction(values))
        return tf.reduce_sum(rest[-1])

    def traced(x: Any, y: Any, y_pred: Any) -> None:
        with nothing_moves(model), listen_to_reductions(note):
            compute_loss(model, x, y, y_pred, None)

    def spec(leaf: Any) -> Any:
        return (
            None if leaf is None else tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype)
        )

    specs = [tf.nest.map_structure(spec, value) for value in (x, y, y_pred)]
    tf.function(traced, autograph=False).get_concrete_function(*specs)
    kinds = dict.fromkeys(found)
    return next(iter(kinds)) if len(kinds) == 1 else "unknown"


def _last_reduction(tensor: tf.Tensor) -> str:
    op = tensor.op
    while op.type in _PASSED_ON:
        inputs = [t for t in op.inputs if t.op.type != "Const"]
        if op.type == "Sqrt" or (op.type == "Mul" and len(inputs) != 1):
            return "unknown"
        op = inputs[0].op
    kinds = {"Mean": "mean", "Sum": "sum", "RealDiv": "ratio", "DivNoNan": "ratio"}
    if op.type in ("RealDiv", "DivNoNan") and op.inputs[1].op.type == "Const":
        return _last_reduction(op.inputs[0])
    return kinds.get(op.type, "unknown")


def names_of(layers: Sequence[keras.layers.Layer]) -> tuple[str, ...]:
    """The paths of layers, or their names."""
    return tuple(layer.path or layer.name for layer in layers)
