"""`plan`: from a memory budget to the micro-batch size, and what to recompute."""

import collections
import contextlib
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from .._backend.private import canaries
from .._backend.private.layers import children, flatten_layers
from .._backend.private.versions import legacy_hint
from .._core.loop import check_batch, leaves, rows_of, take
from .budget import parse_budget
from .measure import StepProfiler
from .plan import SEGMENTS, Plan, switch_on
from .search import Measure, Patience, Trial, candidates, choose
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

    It measures and does not guess. The training step of this model, with its optimizer
    and its loss, is compiled for a few micro-batch sizes; under XLA the compiler tells
    what memory each needs, elsewhere the step runs and the allocator tells. A line
    through what was measured says which size to try next, and nothing else: the size
    that is given has itself been measured and run. Of those that fit, the fastest is
    taken; that need not be the largest.

    The model, its optimizer, metrics and random state are afterwards what they were
    before, to the bit, also if planning fails or is interrupted.

    Memory is what the step needs all in all, on one device: weights, optimizer, the
    batch itself, sums of gradients, activations. What else lies on the device has to be
    left out of the budget. In a graph outside of XLA, operations run in an order that
    differs from step to step, and so does the peak: leave some percent of room.

    Args:
        model: built and compiled.
        batch: samples as `fit` takes them: `x`, or a tuple `(x, y)` or
            `(x, y, sample_weight)`, each nested arrays or tensors. They have to have the
            shapes and dtypes of the training's; their values do not matter.
        batch_size: int, the samples of an update, over all replicas. By default as many
            as `batch` has; where `batch` has fewer, they are repeated, and where it has
            more, the first are taken.
        memory_budget: of one device. An int (bytes), a text such as "8GiB" or "500MB", a
            float up to 1 (the share of the device's memory), or "device" (what is free).
        recompute: what to recompute in the backward pass: "auto" lets the search choose
            whether to recompute segments; False keeps everything; or a pattern of layer
            names, as `recompute` takes it.
        verbose: 1 shows progress, 0 nothing.

    Returns:
        A `Plan`.

    Raises:
        ValueError: if nothing fits, with the smallest size measured, what takes its
            memory and what would help; for a model that is not built or not compiled; and
            for arguments that make no sense.
        TypeError: for arguments of another kind.

    References:
        Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost", on
        recomputation. MosaicML Composer and Ultralytics search a micro-batch size by
        running out of memory, and by extrapolating.
    """
    _check_model(model)
    canaries.check()
    replicas = model.distribute_strategy.num_replicas_in_sync
    batch, batch_size = _batch(batch, batch_size, replicas)
    budget = parse_budget(memory_budget, held=_bytes_held(model))
    _check_recompute(recompute)
    rows = rows_of(batch)
    with preserving_state(model):
        meter = StepProfiler(model, batch, _switch_on)
        measure = _shown(meter.measure) if verbose else meter.measure
        best, trials = choose(
            measure,
            candidates(rows),
            budget,
            _options(model, recompute),
            Patience(),
            meter.gradient_sum_bytes,
            meter.held.total,
        )
        if best is None:
            raise ValueError(nothing_fits(trials, budget, meter.held, model))
    if verbose:
        print()
    return Plan(
        micro_batch_size=best.micro_batch_size,
        accum_steps=math.ceil(rows / best.micro_batch_size),
        recompute=best.recompute,
        batch_size=batch_size,
        replicas=replicas,
        budget_bytes=budget,
        peak_bytes=best.peak_bytes or 0,
        predicted_bytes=best.predicted_bytes,
        seconds=best.seconds or 0.0,
        held=meter.held,
        method=meter.method,
        trials=tuple(trials),
        _model=model,
    )


def _check_model(model: keras.Model) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"`model` must be a `keras.Model`. Received: {model!r}{legacy_hint(model)}"
        )
    if not getattr(model, "compiled", False):
        raise ValueError(
            f"'{model.name}' is not compiled: the training step that `plan` measures has "
            "an optimizer and a loss. Call `model.compile(optimizer, loss)` before."
        )
    if not model.built:
        raise ValueError(
            f"'{model.name}' is not built: planning would draw its first weights. Call "
            "it on a sample before, `model(x[:1])`, or give it an `Input`."
        )


def _batch(batch: Any, batch_size: int | None, replicas: int) -> tuple[Any, int]:
    """The samples of one replica, as `fit` makes tensors of them; and of all of them."""
    unpacked = keras.utils.unpack_x_y_sample_weight(batch)
    batch, _ = check_batch(tf.nest.map_structure(_as_fit_does, unpacked))
    given = int(rows_of(batch))
    if batch_size is None:
        batch_size = given
    if isinstance(batch_size, bool) or not isinstance(batch_size, (int, np.integer)):
        raise TypeError(f"`batch_size` must be an integer. Received: {batch_size!r}")
    if batch_size < replicas:
        least = "1" if replicas == 1 else f"the number of replicas, {replicas}"
        raise ValueError(f"`batch_size` must be at least {least}. Received: {batch_size}")
    rows = math.ceil(batch_size / replicas)
    if rows <= given:
        return take(batch, 0, rows), int(batch_size)
    if any(isinstance(leaf, tf.SparseTensor) for leaf in leaves(batch)):
        raise ValueError(
            f"`batch` has {given} samples for a batch of {batch_size}, and sparse "
            "tensors cannot be repeated. Pass as many samples as a batch has."
        )
    indices = tf.range(rows) % given

    def repeated(leaf: Any) -> Any:
        return None if leaf is None else tf.gather(leaf, indices)

    batch = tf.nest.map_structure(repeated, batch, expand_composites=False)
    return batch, int(batch_size)


def _as_fit_does(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray) and leaf.dtype == np.float64:
        return leaf.astype(keras.config.floatx())
    return leaf


def _bytes_held(model: keras.Model) -> int:
    """What the variables that exist already take of the device."""
    return sum(
        int(np.prod(v.shape)) * tf.as_dtype(v.dtype).size for v in variables(model)
    )


def _check_recompute(recompute: Any) -> None:
    if recompute is not False and not (isinstance(recompute, str) and recompute):
        raise TypeError(
            "`recompute` must be 'auto', False, or a pattern of layer names such as "
            f"'block_*'. Received: {recompute!r}"
        )


def _options(model: keras.Model, recompute: bool | str) -> list[Any]:
    """What to try, the cheapest in time first."""
    if recompute != "auto":
        return [recompute]
    for candidate in (SEGMENTS, _repeated_blocks(model)):
        # What cannot be cut, or is recomputed already, is no option.
        with contextlib.suppress(ValueError):
            switch_on(model, candidate).undo()
            return [False, candidate]
    return [False]


def _repeated_blocks(model: keras.Model) -> tuple[str, ...]:
    """The paths of the layers of that class which most layers with layers inside have."""
    blocks = [layer for layer in flatten_layers(model) if children(layer)]
    blocks = [layer for layer in blocks if layer is not model]
    if not blocks:
        return ()
    kind, count = collections.Counter(type(layer) for layer in blocks).most_common(1)[0]
    return tuple(x.path for x in blocks if type(x) is kind) if count > 1 else ()


def _switch_on(model: keras.Model, recompute: Any) -> Callable[[], None]:
    return switch_on(model, recompute).undo


def _shown(measure: Measure) -> Measure:
    """`measure`, with each trial shown in a progress bar."""
    bar = keras.utils.Progbar(
        None, stateful_metrics=["micro_batch_size", "MiB"], unit_name="trial"
    )
    done = 0

    def measure_and_show(size: int, recompute: Any, timed: bool) -> Trial:
        nonlocal done
        trial = measure(size, recompute, timed)
        done += 1
        shown: list[tuple[str, float]] = [("micro_batch_size", size)]
        if trial.peak_bytes is not None:
            shown.append(("MiB", trial.peak_bytes / 2**20))
        bar.update(done, shown, finalize=False)
        return trial

    return measure_and_show
