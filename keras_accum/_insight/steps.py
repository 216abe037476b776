"""Training steps that keep their gradients: of the large batch, and of a window."""

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.optimizers import LossScaleOptimizer

from .._backend.arrays import to_numpy
from .._backend.attribute_patch import AttributePatch
from .._backend.identity import unique
from .._backend.private.layers import call, flatten_layers
from .._backend.private.losses import take_heard_losses
from .._backend.private.models import build_for, state_of_layers
from .._backend.private.replay import RandomBySample
from .._batch_norm import window_variables
from .._core.loop import Split, rows_of, take
from .._core.own_loss import nothing_moves
from .._optimizer.find import has_known_train_step
from .._optimizer.wrapper import AccumOptimizer
from .._step.model import settings_of
from .._step.settings import Settings
from .._step.train_step import train_step
from .outputs import recorded_outputs
from .recorder import Recorder

Array = np.ndarray[Any, Any]
# An overflow of float16 takes a scale 16 times as small, and again.
_MOST_OVERFLOWS, _OVERFLOW_FACTOR = 6, 16.0


@dataclasses.dataclass(frozen=True)
class Run:
    """What a step, or several on parts of a batch, came to.

    Attributes:
        gradients: arrays in float32 or float64, one for each trained variable, added up
            over steps; None where a variable had no gradient.
        norms: the norms of the gradients, added up over steps.
        logs: the numbers that the last step returned, by name.
        state: what the other variables hold afterwards, likewise.
    """

    gradients: list[Array | None]
    norms: list[float]
    logs: dict[str, float]
    state: list[Array]


class Steps:
    """Takes steps of a model that train nothing; its state is put back before each.

    To be used inside of `preserving_state`.

    Args:
        model: a compiled model.
        batch: `(x, y, sample_weight)`, the large batch, of tensors.
        accum_steps: how many micro-batches to make of it.
        two_pass: as in `accumulate`.
        random: draws random numbers by the sample.
    """

    def __init__(
        self,
        model: keras.Model,
        batch: Any,
        accum_steps: int,
        two_pass: bool,
        random: RandomBySample,
    ) -> None:
        self.model, self.batch, self.random = model, batch, random
        self.accum_steps = accum_steps
        self.route = route_of(model)
        self._known = has_known_train_step(model)
        self._inside = settings_of(model) if self.route == "optimizer" else None
        settings = self._inside or Settings(accum_steps=accum_steps)
        self._settings = dataclasses.replace(settings, two_pass=two_pass)
        self._optimizers = _optimizers_of(model, self._known)
        self.trained = list(model.trainable_variables)
        self._functions: dict[str, Any] = {}
        self._scale_factor = 1.0
        if self._known:
            build_for(model, batch)
        everything = unique([*model.variables, *state_of_layers(model)])
        self._before = [(v, tf.identity(tf.convert_to_tensor(v))) for v in everything]
        self.others = _moving(model, self._before)
        self.before = [_array(v) for v in self.others]

    # ------------------------------------------------------------------ the steps

    def large(self, batch: Any = None, nudge: float = 0.0) -> Run:
        """A plain Keras step on the large batch, or on another one.

        Args:
            batch: the other one.
            nudge: by how much of itself each weight is moved before, up or down.
        """
        batches = [self.batch if batch is None else batch]
        return self._run("plain", batches, nudge)

    def naive(self) -> Run:
        """A plain Keras step on each micro-batch."""
        return self._run("plain", self.micro_batches())

    def window(self) -> Run:
        """The window: micro-batches one by one, or a step that takes the batch apart."""
        if self.route == "optimizer":
            return self._run("window", self.micro_batches())
        return self._run("window", [self.batch])

    def micro_batches(self) -> list[Any]:
        """The large batch, taken apart."""
        parts, first = [], 0
        groups = Split(accum_steps=self.accum_steps).groups(int(rows_of(self.batch)))
        for count, size in groups:
            for _ in range(int(count)):
                parts.append(take(self.batch, first, size))
                first += int(size)
        return parts

    def outputs(self) -> tuple[list[str], list[list[Array]], list[list[Array]]]:
        """What each layer gives: the paths, of the large batch, and of micro-batches.

        Without an effect on any state. Of micro-batches, the rows of all of them.
        """
        paths: list[str] = []

        def forward(batch: Any) -> list[list[tf.Tensor]]:
            with nothing_moves(self.model), recorded_outputs(self.model) as found:
                call(self.model, batch[0])
            paths[:] = [output.layer.path or output.layer.name for output in found]
            return [output.tensors for output in found]

        function = self._traced("forward", forward)
        self._put_back()
        with self._following():
            whole = function(self.batch)
            parts = [function(part) for part in self.micro_batches()]
        joined = [
            [np.concatenate([np.asarray(p[i][j]) for p in parts]) for j in range(len(ts))]
            if all(t.shape.rank for t in ts)
            else []
            for i, ts in enumerate(whole)
        ]
        return paths, [[np.asarray(t) for t in ts] for ts in whole], joined

    # --------------------------------------------------------------- how they run

    def _run(self, kind: str, batches: list[Any], nudge: float = 0.0) -> Run:
        for _ in range(_MOST_OVERFLOWS):
            recorders = self._install(kind)
            logs = self._steps(kind, batches, nudge)
            if _heard(recorders) or not self._scales():
                break
            self._functions.clear()  # They hold the optimizers with the scale before.
            self._scale_factor /= _OVERFLOW_FACTOR
        if not _heard(recorders) and self.trained and not self._scales():
            raise ValueError(_UNHEARD.format(name=self.model.name))
        return Run(
            *_recorded(recorders, self.trained), logs, [_array(v) for v in self.others]
        )

    def _steps(self, kind: str, batches: list[Any], nudge: float) -> dict[str, float]:
        self._put_back()
        if nudge:
            self._nudge(nudge)
        self.model.reset_metrics()
        take_heard_losses()  # Those of other steps weigh nothing in this one.
        function = self._traced(
            kind, self._plain if kind == "plain" else self._accumulating
        )
        logs: list[dict[str, float]] = []
        with self._following():
            for batch in batches:
                logs.append(_numbers(function(batch)))
        # A metric goes on from batch to batch; what else a step returns does not.
        metrics = _numbers(self.model.get_metrics_result())
        rows = [float(rows_of(batch)) for batch in batches]
        return {
            name: value
            if metrics.get(name) == value
            else float(np.average([each[name] for each in logs], weights=rows))
            for name, value in logs[-1].items()
        }

    def _put_back(self) -> None:
        for variable, value in self._before:
            variable.assign(value)

    def _nudge(self, share: float) -> None:
        for index, variable in enumerate(self.trained):
            value = tf.convert_to_tensor(variable)
            bits = tf.random.stateless_uniform(
                value.shape, (0, index), None, None, tf.uint32
            )
            by = share * tf.abs(value)
            variable.assign(value + tf.where(bits < 2**31, by, -by))

    def _plain(self, batch: Any) -> Any:
        if self._known:
            # Past a `train_step` of this package.
            return keras.Model.train_step(self.model, batch)
        return self._own(batch)

    def _accumulating(self, batch: Any) -> Any:
        if not self._known:
            return self._own(batch)
        if self.route == "step" or self._inside is not None:
            return train_step(self.model, batch, self._settings)
        return keras.Model.train_step(self.model, batch)

    def _own(self, batch: Any) -> Any:
        with self.random.following(batch, "train_step"):
            return self.model.train_step(_without_none(batch)) or {}

    @contextlib.contextmanager
    def _following(self) -> Iterator[None]:
        """Have random numbers follow what the model is called with."""
        inner = self.model.call

        def call_following(*args: Any, **kwargs: Any) -> Any:
            with self.random.following((args[:1], kwargs.get("inputs")), "call"):
                return inner(*args, **kwargs)

        patch = AttributePatch(self.model, "call", call_following)
        try:
            yield
        finally:
            patch.undo()

    def _traced(self, key: str, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        if self.model.run_eagerly:
            return step
        if key not in self._functions:
            self._functions[key] = self._trace(step)
        return self._functions[key]

    def _trace(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`step` in a graph, one for batches of all sizes."""
        flat = tf.nest.flatten(self.batch)
        given = [i for i, leaf in enumerate(flat) if leaf is not None]

        def packed(*leaves: Any) -> Any:
            everything: list[Any] = [None] * len(flat)
            for i, leaf in zip(given, leaves):
                everything[i] = leaf
            return step(tf.nest.pack_sequence_as(self.batch, everything))

        # A stateful layer is built for one size.
        one_size = any(getattr(x, "stateful", False) for x in flatten_layers(self.model))
        signature = None if one_size else [_any_size(flat[i]) for i in given]
        traced = tf.function(packed, signature, autograph=False)

        def call_traced(batch: Any) -> Any:
            leaves = tf.nest.flatten(batch)
            return traced(*(leaves[i] for i in given))

        return call_traced

    # ------------------------------------------------------------ what records them

    def _install(self, kind: str) -> list[Recorder]:
        """Put optimizers that record into the model, for steps of a kind."""
        key = f"optimizers of {kind}"
        if key not in self._functions:
            self._functions[key] = {
                name: self._recording(optimizer, kind)
                for name, optimizer in self._optimizers.items()
            }
        recorders = []
        for name, optimizer in self._functions[key].items():
            vars(self.model)[name] = optimizer  # past Keras, which would track it
            recorder: Any = optimizer
            while not isinstance(recorder, Recorder):
                recorder = recorder.inner_optimizer
            recorder.clear()
            recorders.append(recorder)
        return recorders

    def _recording(self, optimizer: Any, kind: str) -> Any:
        recorder: Any = Recorder(self.trained, _learning_rate(optimizer))
        scale = _scale_of(optimizer, self.model)
        if scale is not None:
            recorder = LossScaleOptimizer(
                recorder, initial_scale=scale * self._scale_factor
            )
        elif (static := optimizer.loss_scale_factor) not in (None, 1.0):
            recorder.loss_scale_factor = static
        if kind == "plain" or self.route == "step":
            recorder.build(self.trained)
            return recorder
        windows = AccumOptimizer(
            recorder,
            accum_steps=len(self.micro_batches()),
            reduction=getattr(optimizer, "reduction", "mean"),
            accumulator_dtype=getattr(optimizer, "accumulator_dtype", None),
        )
        windows._model = weakref.ref(self.model)  # It is never compiled with it.
        windows._scales_by_itself = scale is not None
        windows.build(self.trained)
        return windows

    def _scales(self) -> bool:
        return any(
            _scale_of(o, self.model) is not None for o in self._optimizers.values()
        )


_UNHEARD = (
    "No gradient of '{name}' reached an optimizer that is an attribute of the model. "
    "`check_equivalence` puts others in their place, to see the gradients: keep each "
    "optimizer in an attribute, `self.optimizer` or `self.d_optimizer`, and apply it in "
    "`train_step`."
)


def route_of(model: keras.Model) -> Any:
    """Where a model accumulates, or would: in its "optimizer" or in its "step"."""
    windows = isinstance(model.optimizer, AccumOptimizer)
    return "step" if has_known_train_step(model) and not windows else "optimizer"


def _optimizers_of(model: keras.Model, known: bool) -> dict[str, Any]:
    held = {"optimizer": model.optimizer}
    if not known:
        held |= vars(model)
    kind = keras.optimizers.Optimizer
    return {name: value for name, value in held.items() if isinstance(value, kind)}


def _learning_rate(optimizer: Any) -> float:
    return float(to_numpy(optimizer.learning_rate))


def _scale_of(optimizer: Any, model: keras.Model) -> float | None:
    """The loss scale that a step begins with, where it is dynamic."""
    if isinstance(optimizer, AccumOptimizer):
        if not (optimizer.scales_dynamically or _will_scale(optimizer, model)):
            return None
    elif not isinstance(optimizer, LossScaleOptimizer):
        return None
    elif not optimizer.built:
        return optimizer.initial_scale
    return float(to_numpy(optimizer.dynamic_scale))


def _will_scale(optimizer: AccumOptimizer, model: keras.Model) -> bool:
    """Whether an `AccumOptimizer` will turn loss scaling on when it meets the loss."""
    if not optimizer._scales_by_itself:
        return False
    other = AccumOptimizer("sgd", accum_steps=1)
    other.enable_scaling_if_float16(model)
    everywhere = keras.config.dtype_policy().compute_dtype == "float16"
    return everywhere or other.scales_dynamically


def _heard(recorders: list[Recorder]) -> bool:
    return any(
        float(tf.reduce_max(tf.convert_to_tensor(r.counts))) > 0 for r in recorders
    )


def _recorded(
    recorders: list[Recorder], trained: list[keras.Variable]
) -> tuple[list[Array | None], list[float]]:
    counts = np.sum([_array(r.counts) for r in recorders], axis=0)
    norms = np.sum([_array(r.norms) for r in recorders], axis=0)
    gradients: list[Array | None] = [
        functools.reduce(np.add, [_array(r.sums[i]) for r in recorders])
        if counts[i]
        else None
        for i in range(len(trained))
    ]
    return gradients, norms.tolist()


def _moving(model: keras.Model, held: list[Any]) -> list[keras.Variable]:
    """The variables that a step may move besides gradients: no seeds, no metrics."""
    own = {id(v) for v in model.variables}
    of_windows = {id(v) for v in window_variables(model)}
    metrics = {id(v) for metric in model.metrics for v in metric.variables}
    return [
        v
        for v, _ in sorted(held, key=lambda pair: bool(pair[0].trainable))
        if id(v) in own
        and id(v) not in metrics
        and "seed_generator" not in v.path
        and id(v) not in of_windows
    ]


def _array(variable: Any) -> Array:
    """The value, in float32 or float64."""
    found = to_numpy(variable)
    return found if found.dtype in ("float32", "float64") else found.astype("float64")


def _numbers(logs: Any) -> dict[str, float]:
    """The scalars among what a step returns, by name."""
    values = {name: _array(value) for name, value in logs.items()}
    return {name: float(value) for name, value in values.items() if value.ndim == 0}


def _any_size(leaf: Any) -> Any:
    """What `fit` tells a step of a tensor: its shape, but for the number of samples."""
    shape = [None, *leaf.shape[1:]]
    if isinstance(leaf, tf.RaggedTensor):
        ragged = tf.type_spec_from_value(leaf)
        return tf.RaggedTensorSpec(
            shape, leaf.dtype, ragged.ragged_rank, ragged.row_splits_dtype
        )
    if isinstance(leaf, tf.SparseTensor):
        return tf.SparseTensorSpec(shape, leaf.dtype)
    return tf.TensorSpec(shape, leaf.dtype)


def _without_none(batch: Any) -> Any:
    """A batch as `fit` passes it to a `train_step` of the user's."""
    return keras.utils.pack_x_y_sample_weight(*batch)
