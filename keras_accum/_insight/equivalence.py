"""`check_equivalence`: a window against the large batch, on the user's model and data.

What is compared are the gradients that reach the optimizer, before it clips or moves
anything; the state that a step moves besides; and what it logs. The large batch is one
plain Keras step. Rounding is measured: by the same step on the samples in another order
with each weight one rounding away, and by the norms of the micro-batches' gradients, each
of which is rounded by itself.
Random numbers are drawn by the sample, so that they are the same in both. If even the
large batch differs from itself, the report says so.

A difference is followed to the layer where it enters: the first one that gives a sample
something else in a micro-batch than in the large batch.
"""

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from .._backend.private import canaries
from .._backend.private.data import first_batch
from .._backend.private.layers import flatten_layers
from .._backend.private.randomness import random_state_kept
from .._backend.private.replay import RandomBySample
from .._backend.private.versions import legacy_hint
from .._backend.warn import collected_warnings
from .._core.checks import check_integer
from .._core.loop import check_batch, leaves, rows_of
from .._planning.transaction import preserving_state
from .._step.model import settings_of
from .report import MOST, Comparison, Kind, Report, Value
from .steps import Array, Run, Steps, route_of

# Of the dtypes that layers compute in, the relative distance of two numbers.
_EPSILONS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23}
_LEAST_EPSILON = 2.0**-52


def check_equivalence(
    model: keras.Model,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    accum_steps: int = 8,
    two_pass: bool = False,
) -> Report:
    """Measure whether micro-batches make the update of the large batch, on these data.

    ```python
    model.compile("adamw", loss=my_loss)
    report = ka.check_equivalence(model, x[:64], y[:64], accum_steps=8)
    print(report)  # which variables differ, by how much, and where it comes from
    ```

    It compares the gradient of each variable, the state that a step moves besides
    (moving statistics), the loss and the metrics, in the model's own precision, eagerly
    or in a graph as the model is compiled; XLA, which changes rounding only, is left out.
    It tells rounding, which it measures, from true differences, and draws the same random
    numbers (dropout, noise) for a sample in both.

    Measured is what the model is compiled for. With an `AccumOptimizer`, or a
    `train_step` of your own, micro-batches come one by one, and the optimizer accumulates
    them; a plain optimizer in a `train_step` of your own is taken as if `AccumOptimizer`
    were around it. Else the step takes the batch apart, as `accumulate` does.

    The model is afterwards what it was, to the bit: weights, optimizer, metrics, seeds.
    So it is after an error. It takes 4 steps on the large batch, which must fit into
    memory, and 2 forward passes where it looks for a layer. Tracing comes on top, and for
    a model that is nearly all weights, what it takes to read its gradients.

    Args:
        model: built and compiled, on one device.
        x: what `fit` takes: nested arrays or tensors, samples first; or a
            `tf.data.Dataset` whose first batch is the large batch.
        y: targets, likewise; None with a data set.
        sample_weight: of each sample, or as `fit` takes them; or None.
        accum_steps: int, how many micro-batches to make. Choose one that does not divide
            the samples, and data that differ in length and weight, to see most.
        two_pass: whether the step takes the loss over the whole batch, as in
            `accumulate`.

    Returns:
        A `Report`.

    Raises:
        TypeError: if `model` is no Keras model, or `accum_steps` no integer.
        ValueError: for a model that is not built or not compiled, or is on several
            replicas; fewer than 2 samples; `accum_steps` below 1; `two_pass` where
            the optimizer accumulates; or a `train_step` whose optimizers are not found.

    References:
        Higham, 2002, "Accuracy and Stability of Numerical Algorithms", section 4, on the
        rounding of sums in another order; Parker, 1997, "Monte Carlo Arithmetic", on
        measuring rounding by small random changes.
    """
    _check_model(model)
    accum_steps = check_integer("accum_steps", accum_steps, 1)
    inside = settings_of(model)
    two_pass = bool(two_pass) or (inside is not None and inside.two_pass)
    if two_pass and route_of(model) == "optimizer" and inside is None:
        raise ValueError(
            "`two_pass=True` belongs to a step that takes the batch apart. This model "
            "accumulates in its optimizer, or has a `train_step` of its own: leave "
            "`two_pass` out, or compile a model without a `train_step` with a plain "
            "optimizer."
        )
    canaries.check()
    with random_state_kept():
        batch = first_batch(
            x if y is None and sample_weight is None else (x, y, sample_weight)
        )
    batch, _ = check_batch(keras.utils.unpack_x_y_sample_weight(batch))
    if (rows := int(rows_of(batch))) < 2:
        raise ValueError(
            f"`x` must have at least 2 samples, to be taken apart. Received: {rows}"
        )
    jit_compile = model.jit_compile
    with (
        collected_warnings() as said,
        preserving_state(model),
        RandomBySample() as random,
    ):
        try:
            model.jit_compile = False
            steps = Steps(model, batch, accum_steps, two_pass, random)
            return _Measurement(steps).report(said)
        finally:
            model.jit_compile = jit_compile


def _check_model(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"`model` must be a `keras.Model`. Received: {model!r}{legacy_hint(model)}"
        )
    if not getattr(model, "compiled", False):
        raise ValueError(
            f"'{model.name}' is not compiled. `check_equivalence` takes training steps, "
            "which need an optimizer and a loss: call `model.compile(optimizer, loss)` "
            "before."
        )
    if not model.built and not model.variables:
        raise ValueError(
            f"'{model.name}' is not built: measuring would draw its first weights. Call "
            "it on a sample before, `model(x[:1])`, or give it an `Input`."
        )
    if model.distribute_strategy.num_replicas_in_sync > 1:
        raise ValueError(
            f"'{model.name}' is on {model.distribute_strategy.num_replicas_in_sync} "
            "replicas, and `check_equivalence` measures on one device. Make the same "
            "model outside of the strategy, and measure that."
        )


class _Measurement:
    """The steps that are compared, and what they came to."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.epsilon = _epsilon_of(steps.model)
        self.large = steps.large()
        self.window = steps.window()
        self.naive = steps.naive()
        self.count = len(steps.micro_batches())
        limit = min(1000 * self.epsilon, 0.1)
        self.nudged = steps.large(_shuffled(steps.batch), self.epsilon)
        self.nudges = _distances(self.nudged, self.large)
        self.replayed = True
        if self._apart() > limit:
            # The order matters, or something that cannot be drawn again.
            self.nudged = steps.large(nudge=self.epsilon)
            self.nudges = _distances(self.nudged, self.large)
            self.replayed = self._apart() <= limit

    def report(self, said: list[str]) -> Report:
        variables = tuple(map(self._gradient, range(len(self.steps.trained))))
        state = tuple(s for s in map(self._state, range(len(self.steps.others))) if s)
        values = [
            self._logged(name) for name in self.large.logs if name in self.window.logs
        ]
        logged = {value.name: value for value in values}
        differs = [v for v in (*variables, *state) if v.kind == "differs"]
        random = "replayed" if self.steps.random.drawn else "none"
        return Report(
            equal=self.replayed and not differs,
            loss=logged.pop("loss", None),
            metrics=logged,
            gradients={v.path: v.ratio for v in variables},
            first_layer=self._first_layer() if differs else None,
            naive={v.path: self._naive(i) for i, v in enumerate(variables)},
            variables=variables,
            state=state,
            route=self.steps.route,
            samples=int(rows_of(self.steps.batch)),
            accum_steps=self.count,
            randomness=random if self.replayed else "not replayed",  # type: ignore[arg-type]
            said=tuple(said),
        )

    # --------------------------------------------------------------- of one array

    def _gradient(self, index: int) -> Comparison:
        path = self.steps.trained[index].path
        large, window = self.large.gradients[index], self.window.gradients[index]
        if large is None and window is None:
            return Comparison(path, 0.0, 0.0, math.nan, "none")
        large, window = (np.zeros(1) if g is None else g for g in (large, window))
        floor, size = self._floor(index), _norm(large)
        error = _norm(window - large)
        kind: Kind = "equal" if error <= MOST * floor else "differs"
        if self.replayed and size <= _ZERO * (noise := self.nudges[index]):
            kind, floor = "zero", max(floor, noise)
        scale = size or floor or 1.0
        return Comparison(
            path, error / scale, floor / scale, _cosine(large, window), kind
        )

    def _floor(self, index: int) -> float:
        """How far rounding takes a gradient, in its own units."""
        rounding = self.epsilon * self.naive.norms[index] / self.count
        if self.epsilon > _EPSILONS["float32"] and self.replayed:
            # One rounding of a weight in a low precision is more than that of a sum.
            return rounding
        return max(self.nudges[index], rounding)

    def _apart(self) -> float:
        """How far rounding takes all gradients together, relative to their size."""
        size = math.hypot(*(_norm(g) for g in self.large.gradients if g is not None))
        return math.hypot(*self.nudges) / size if size else 0.0

    def _naive(self, index: int) -> float:
        """The error of the mean of means, in rounding floors."""
        large, naive = self.large.gradients[index], self.naive.gradients[index]
        if large is None and naive is None:
            return 0.0
        large, naive = (np.zeros(1) if g is None else g for g in (large, naive))
        error, floor = _norm(naive / self.count - large), self._floor(index)
        return error / floor if floor else math.inf if error else 0.0

    def _state(self, index: int) -> Comparison | None:
        runs = (self.large, self.window, self.nudged)
        before = self.steps.before[index]
        if all(np.array_equal(run.state[index], before) for run in runs[:2]):
            return None
        before = before.astype("float64")
        large, window, nudged = (run.state[index].astype("float64") for run in runs)
        move = large - before
        apart = _norm(nudged - large)
        floor = max(apart, self.epsilon * _norm(large))
        error, scale = _norm(window - large), _norm(move) or 1.0
        kind: Kind = "equal" if error <= MOST * floor else "differs"
        cosine = _cosine(move, window - before)
        path = self.steps.others[index].path
        return Comparison(path, error / scale, floor / scale, cosine, kind)

    def _logged(self, name: str) -> Value:
        large, window = self.large.logs[name], self.window.logs[name]
        apart = abs(self.nudged.logs[name] - large)
        rounding = max(self.epsilon, _EPSILONS["float32"]) * 4 * abs(large)
        return Value(name, large, window, max(apart, rounding))

    # ----------------------------------------------------------- where it comes from

    def _first_layer(self) -> str:
        limit = max(0.1 if self.epsilon > 1e-4 else 0.0, 1e-4)
        try:
            found = self.steps.outputs()
        except Exception:
            return "train_step"  # One that never calls the model as a whole.
        for path, large, window in zip(*found):
            for a, b in zip(large, window):
                if a.shape == b.shape and a.size and _far(a, b) > limit:
                    return path
        moved = (self._state(i) for i in range(len(self.steps.others)))
        for state in moved:
            if state is not None and state.kind == "differs":
                return state.path.rpartition("/")[0]
        return "loss"


# A gradient of less than so many rounding floors is zero.
_ZERO = 4.0


def _epsilon_of(model: keras.Model) -> float:
    """The relative distance of two numbers in the lowest precision that is computed in."""
    dtypes = {x.compute_dtype for x in flatten_layers(model) if x.weights}
    return max(
        (_EPSILONS.get(dtype, _LEAST_EPSILON) for dtype in dtypes), default=2.0**-23
    )


def _shuffled(batch: Any) -> Any:
    """The samples of a batch in another order; sparse ones as they are."""
    if any(isinstance(leaf, tf.SparseTensor) for leaf in leaves(batch)):
        return batch
    order = np.random.default_rng(0).permutation(int(rows_of(batch)))

    def reordered(leaf: Any) -> Any:
        return None if leaf is None else tf.gather(leaf, order)

    return tf.nest.map_structure(reordered, batch, expand_composites=False)


def _distances(run: Run, other: Run) -> list[float]:
    """How far each gradient of one is from that of the other; 0 where one has none."""
    return [
        0.0 if a is None or b is None else _norm(a - b)
        for a, b in zip(run.gradients, other.gradients)
    ]


def _norm(array: Array) -> float:
    square = _product(array, array)
    return math.sqrt(square) if square >= 0 else math.nan


def _product(one: Array, other: Array) -> float:
    """The sum of the products, in float64 only where float32 has no such number."""
    found = float(np.vdot(one, other))
    if found and _SMALL < abs(found) < _LARGE:
        return found
    return float(np.vdot(one.astype("float64"), other.astype("float64")))


_SMALL, _LARGE = 1e-25, 1e35  # Between them, squares of float32 are far from its ends.


def _cosine(one: Array, other: Array) -> float:
    size = _norm(one) * _norm(other)
    if not size or one.shape != other.shape:
        return math.nan
    return min(_product(one, other) / size, 1.0)


def _far(one: Array, other: Array) -> float:
    one, other = one.astype("float64"), other.astype("float64")
    size = float(np.abs(one).max())
    return float(np.abs(one - other).max()) / size if size else float(np.abs(other).max())
