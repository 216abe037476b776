"""`plan`: from a memory budget to the micro-batch size, and what to recompute."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from .._backend.arrays import to_numpy
from .._backend.private import canaries
from .._backend.private.data import first_batch
from .._backend.private.randomness import random_state_kept
from .._backend.private.versions import legacy_hint
from .._backend.replica import local_parts
from .._backend.sizes import bytes_of
from .._core.loop import check_batch, leaves, rows_of, take
from .._optimizer.window import trace_schedule
from .._optimizer.wrapper import AccumOptimizer
from .budget import parse_budget
from .choose import choose
from .families import Choices, Switch, choices_of
from .measure import BaselineMemory, StepProfiler
from .plan import Plan, describe_trial
from .search import Fixed, Measure, Patience, Trial, candidates
from .shortage import nothing_fits
from .transaction import preserving_state, variables


def plan(
    model: keras.Model,
    batch: Any,
    *,
    batch_size: int | None = None,
    memory_budget: int | float | str,
    recompute: bool | str = "auto",
    verbose: int = 1,
) -> Plan:
    """The micro-batch size with which a batch trains fastest within a memory budget.

    ```python
    model.compile("adamw", loss="sparse_categorical_crossentropy")
    plan = keras_accum.plan(model, (x[:128], y[:128]), memory_budget="8GiB")
    print(plan)
    model = plan.apply()
    model.fit(x, y, batch_size=128)
    ```

    Every size that a plan names has been measured. The training step of this model, with
    its optimizer and its loss, is compiled for a few micro-batch sizes; under XLA the
    compiler tells what memory each needs, elsewhere the step runs and its peak is
    measured. A line through what was measured says which size to try next, and nothing
    else. Of the sizes that fit, the fastest is chosen, which need not be the largest. A
    tie goes to the fewest micro-batches: a smaller size has to save more than 5 % of the
    time of a larger one, timed before it and again after it; and so does recomputation.

    The model, its optimizer, metrics and random state are afterwards what they were
    before, to the bit, also if planning fails or is interrupted.

    Memory is all that a step needs on one device: weights, optimizer, the batch itself,
    sums of gradients, activations. Leave anything else on the device out of the budget.
    In a graph outside of XLA, operations run in an order that differs from step to step,
    and so does the peak: leave some percent of room.

    Under a strategy the plan is for each replica. An `AccumOptimizer` updates once per
    window of steps, so that an update has the samples of all of them.

    Args:
        model: built and compiled.
        batch: what `fit` takes: `x`, or a tuple `(x, y)` or `(x, y, sample_weight)`, each
            nested arrays or tensors; or a `tf.data.Dataset` of batches, a
            `keras.utils.PyDataset` or a generator, whose first batch is planned for (a
            generator has one batch less afterwards). Shapes and dtypes have to be those
            of training; values do not matter.
        batch_size: int, the effective batch: the samples of an update, over all replicas
            and the whole window of an `AccumOptimizer`. By default `batch` is what one
            step gets. Where `batch` has too few samples, they are repeated, and where it
            has too many, the first are taken.
        memory_budget: of one device. An int (bytes), a string such as "8GiB" or "500MB",
            a float up to 1 (the share of the device's memory), or "device" (all that is
            free).
        recompute: what to recompute in the backward pass: "auto" lets the search choose,
            for each size only as many of the blocks that repeat, or of the segments, as
            the budget demands; False keeps everything; or a pattern of layer names, as
            `recompute` takes it.
        verbose: 1 prints a line for each size that is measured, 0 nothing.

    Returns:
        A `Plan`.

    Raises:
        ValueError: if nothing fits, with the smallest size measured, what needs its
            memory and what would help; for a model that is not built or not compiled; and
            for arguments out of their range.
        TypeError: for arguments of a wrong type.

    References:
        Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost", on
        recomputation. MosaicML Composer and Ultralytics search a micro-batch size by
        running out of memory, and by extrapolating.
    """
    check_model(model)
    canaries.check()
    check_recompute(recompute)
    task = Task.prepare(model, batch, batch_size)
    budget = parse_budget(memory_budget, sum(map(bytes_of, variables(model))))
    with model.distribute_strategy.scope(), preserving_state(model):
        choices = choices_of(model) if recompute == "auto" else None
        profiler = StepProfiler(model, task.samples, Switch(choices))
        held, floor = profiler.held, profiler.floor
        best, trials = choose(
            shown(profiler) if verbose else profiler.measure,
            candidates(task.rows),
            budget,
            _options(recompute, choices),
            Patience(),
            Fixed(held.total, profiler.gradient_sum_bytes, floor),
        )
        if best is None:
            raise ValueError(nothing_fits(trials, budget, held, floor, model))
    if verbose:
        print()
    return task.plan(best, trials, budget, held, floor, profiler.method)


@dataclasses.dataclass(frozen=True)
class Task:
    """What to plan for.

    Attributes:
        model: built and compiled.
        samples: of one step on one replica, as `train_step` takes them.
        batch_size: int, the effective batch.
        replicas: int.
        window: int, the steps of one update.
    """

    model: keras.Model
    samples: Any
    batch_size: int
    replicas: int
    window: int

    @classmethod
    def prepare(cls, model: keras.Model, batch: Any, batch_size: int | None) -> "Task":
        """The task of a model and data as `plan` takes them."""
        strategy, window = model.distribute_strategy, _window(model)
        samples, given = _samples(batch, batch_size, strategy, window)
        total = given * window if batch_size is None else int(batch_size)
        return cls(model, samples, total, strategy.num_replicas_in_sync, window)

    @property
    def rows(self) -> int:
        """The samples of one step on one replica."""
        return int(rows_of(self.samples))

    def plan(
        self,
        best: Trial,
        trials: Sequence[Trial],
        budget: int,
        held: BaselineMemory,
        floor: int,
        method: str,
    ) -> Plan:
        """The plan that chooses `best` of `trials`."""
        return Plan(
            micro_batch_size=best.micro_batch_size,
            accum_steps=math.ceil(self.rows / best.micro_batch_size),
            recompute=best.recompute,
            batch_size=self.batch_size,
            replicas=self.replicas,
            window=self.window,
            budget_bytes=budget,
            peak_bytes=best.peak_bytes or 0,
            predicted_bytes=best.predicted_bytes,
            floor_bytes=floor,
            seconds=best.seconds or 0.0,
            held=held,
            method=method,
            trials=tuple(trials),
            _model=self.model,
        )


def check_model(model: Any) -> None:
    """Refuse a model that cannot be measured."""
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"`model` must be a `keras.Model`. Received: {model!r}{legacy_hint(model)}"
        )
    if not getattr(model, "compiled", False):
        raise ValueError(
            f"'{model.name}' is not compiled. `plan` measures the training step, which "
            "needs an optimizer and a loss: call `model.compile(optimizer, loss)` before."
        )
    if not model.built:
        raise ValueError(
            f"'{model.name}' is not built: planning would draw its first weights. Call "
            "it on a sample before, `model(x[:1])`, or give it an `Input`."
        )


def _window(model: keras.Model) -> int:
    """The steps of one update: the window of an `AccumOptimizer` that begins next."""
    optimizer = model.optimizer
    if not isinstance(optimizer, AccumOptimizer):
        return 1
    steps = optimizer.accum_steps
    if not callable(steps):
        return steps
    update = tf.constant(int(to_numpy(optimizer.iterations)), "int32")
    return int(trace_schedule(steps)(update))


def _samples(
    data: Any, batch_size: int | None, strategy: Any, window: int
) -> tuple[Any, int]:
    """The samples of one step on one replica, and how many `data` had for all replicas.

    Args:
        data: what `fit` takes.
        batch_size: int, the effective batch, or None for as many samples as `data` has.
        strategy: of the model.
        window: int, the steps of one update.
    """
    replicas = strategy.num_replicas_in_sync
    rows = wanted = None
    if batch_size is not None:
        _check_batch_size(batch_size, replicas, window)
        rows = math.ceil(batch_size / (replicas * window))
        wanted = rows * replicas
    with random_state_kept():
        first = first_batch(data, wanted)
    parts = [
        check_batch(keras.utils.unpack_x_y_sample_weight(part))[0]
        for part in local_parts(strategy, first)
    ]
    given = sum(int(rows_of(part)) for part in parts)
    batch = max(parts, key=lambda part: int(rows_of(part)))
    if rows is None:
        rows = math.ceil(given / replicas)
    enough = rows <= int(rows_of(batch))
    return (take(batch, 0, rows) if enough else _repeat(batch, rows)), given


def _check_batch_size(batch_size: int, replicas: int, window: int) -> None:
    if isinstance(batch_size, bool) or not isinstance(batch_size, (int, np.integer)):
        raise TypeError(f"`batch_size` must be an integer. Received: {batch_size!r}")
    if batch_size < (least := replicas * window):
        counted = (
            ""
            if least == 1
            else f", replicas ({replicas}) times the steps of an `AccumOptimizer`'s "
            f"window ({window})"
        )
        raise ValueError(
            f"`batch_size` must be at least {least}{counted}. Received: {batch_size}"
        )
    if batch_size % window:
        raise ValueError(
            "`batch_size` counts the samples of an update, and must be a multiple of the "
            f"steps of an `AccumOptimizer`'s window, {window}. Received: {batch_size}"
        )


def _repeat(batch: Any, rows: int) -> Any:
    """`batch` with `rows` samples, repeated from the first."""
    given = int(rows_of(batch))
    if any(isinstance(leaf, tf.SparseTensor) for leaf in leaves(batch)):
        raise ValueError(
            f"`batch` has {given} samples for a step of {rows}, and sparse tensors "
            "cannot be repeated. Pass as many samples as a step has."
        )
    indices = tf.range(rows) % given

    def repeated(leaf: Any) -> Any:
        return None if leaf is None else tf.gather(leaf, indices)

    return tf.nest.map_structure(repeated, batch, expand_composites=False)


def check_recompute(recompute: Any) -> None:
    """Refuse what cannot say what to recompute."""
    if recompute is not False and not (isinstance(recompute, str) and recompute):
        raise TypeError(
            "`recompute` must be 'auto', False, or a pattern of layer names such as "
            f"'block_*'. Received: {recompute!r}"
        )


def _options(recompute: bool | str, choices: Choices | None) -> list[Any]:
    """What to recompute in the trials, the cheapest in time first."""
    if recompute != "auto":
        return [recompute]
    return [False] if choices is None else [False, choices]


def shown(profiler: StepProfiler) -> Measure:
    """`profiler.measure`, which prints each trial in a line."""
    least = profiler.held.total + profiler.floor

    def measure_and_print(size: int, recompute: Any, timed: bool) -> Trial:
        trial = profiler.measure(size, recompute, timed)
        print(f"Tried {describe_trial(trial, least)}", flush=True)
        return trial

    return measure_and_print
