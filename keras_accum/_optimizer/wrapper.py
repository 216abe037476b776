"""`AccumOptimizer`: one update of an inner optimizer per window.

The order at the end of a window is the contract of this file; `_close_window` reads in
that order: weights and gradients are summed over replicas, the loss scale is undone,
finiteness is judged on the result, the sum is divided by the weight, its norm noted, it
is clipped, the inner optimizer updates, and the accumulators are cleared.
"""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf
from keras.optimizers import LossScaleOptimizer

from .._backend import replica
from .._backend.control import run_either, run_if
from .._backend.private import canaries
from .._backend.private.compiled import compiled_by_xla
from .._backend.private.layers import flatten_layers
from .._backend.private.losses import call_losses, observe_training_losses
from .._backend.private.optimizers import restore_deferred
from .._backend.private.strategies import (
    overwriting_by_averages,
    patch_distribution_bugs,
    replicas_left_to_caller,
)
from .._backend.warn import warn
from .._batch_norm import pool_first_or_next
from .._core.checks import check_option, refuse_unknown_arguments
from .._core.clipping import clip_adaptively
from .._core.gradients import Gradient, all_finite, check_gradients, global_norm, name_of
from .._core.loss import batch_weight, is_a_part, record_terms
from .accumulator import Accumulator, PendingWeight
from .arguments import (
    REMEDIES,
    check_clipping,
    check_dtype,
    check_inner,
    check_weight,
    describe_optimizer,
    resolve_optimizer,
    scaler_settings,
)
from .saving import check_saved_window, split_scaler
from .window import AccumSteps, check_accum_steps, checked_steps, trace_schedule

REDUCTIONS = ("mean", "sum")
ON_NONFINITE = ("propagate", "skip_micro_batch", "skip_window", "raise")

# The weight of the micro-batch whose loss was computed last in this thread, between
# `compute_loss` and `apply`, and the optimizer that it is meant for.


@keras.saving.register_keras_serializable(package="keras_accum")
class AccumOptimizer(LossScaleOptimizer):
    """Accumulates the gradients of a window of micro-batches into one update.

    `GradientAccumulationOptimizer` is the same class. The data yield micro-batches; every
    `accum_steps`-th call of `apply` updates the weights, and that update is the one
    that the window's samples would make as one large batch:

    ```python
    model.compile(optimizer=AccumOptimizer("adamw", accum_steps=8), loss="mse")
    model.fit(x, y, batch_size=16)  # updates as a batch of 128
    ```

    Micro-batches weigh what they hold. In `model.fit` the weight is the denominator of
    the compiled loss: samples, tokens under the mask, or the sum of sample weights, as
    its `reduction` says. A custom loop passes it: `apply(..., weight=...)`.

    Between the ends of windows nothing of the inner optimizer runs. Its clipping, weight
    decay, moving averages, constraints and learning rate schedule see one gradient per
    update, and `iterations` counts updates.

    Under `mixed_float16`, of the global policy or of any layer of the model, or with a
    `LossScaleOptimizer` inside, the loss is scaled. The scale is constant within a
    window; an overflow anywhere in it skips the whole window and halves the scale once;
    its growth counts updates.

    Under a `tf.distribute` strategy each replica adds up for itself. At the end of a
    window gradients and weights are reduced once, and the result is clipped and applied.
    A custom loop passes gradients as Keras's losses make them: of a mean over the samples
    of the replica, divided by the number of replicas.

    Exactness: weights, slots and moving averages equal those of the large batch to
    float32 rounding (1e-6 relative) for linear optimizers. An optimizer that divides by
    its own statistics, as Adam does, can turn rounding into 2e-5. It does not hold for
    layers or losses that couple the samples of a batch, as BatchNormalization does.
    Several losses with different masks are exact only if their denominators are
    proportional; a warning says so. A window whose weight is zero in all updates with a
    gradient of zero.

    Memory: one float32 copy of the trained variables, whatever their dtype.

    Args:
        inner_optimizer: A Keras optimizer, its name or config, or a
            `keras.optimizers.LossScaleOptimizer` around one, whose settings are taken
            over. It must not accumulate gradients itself.
        accum_steps: int of at least 1, the micro-batches of a window; 1 is the inner
            optimizer itself. Or a function from the index of an update (a scalar int32
            tensor, 0 for the first) to such an int; it may use `if`, or
            `keras.ops.where`. A change takes effect at the next window.
        reduction: `"mean"`, the weighted mean over the window, for losses that are
            means; or `"sum"`, for losses with `reduction="sum"`.
        accumulator_dtype: `"float32"` or `"float64"`. By default each variable's own,
            but float32 at least.
        adaptive_clip_factor: float above 0. Clips each unit's gradient to this multiple
            of the norm of its weights (adaptive gradient clipping, Brock et al. 2021),
            once per window. Instead of the inner optimizer's own clipping.
        on_nonfinite: What to do about an infinity or a NaN in a gradient, where the
            loss is not scaled dynamically: `"propagate"` it, as Keras does;
            `"skip_micro_batch"`; `"skip_window"`; or `"raise"`, at once and with
            nothing changed (not possible in functions that XLA compiles).
        name: String. The name of the optimizer.

    Raises:
        ValueError: for an optimizer that accumulates already or wraps one that does,
            `accum_steps` below 1, two ways of clipping at once, or an unknown option.
        TypeError: for `accum_steps` that is no integer, or an `inner_optimizer` that is
            no optimizer.

    References:
        Goyal et al., 2017, "Accurate, Large Minibatch SGD", on what an update over
        several workers or passes has to mean; Micikevicius et al., 2018, "Mixed
        Precision Training", on dynamic loss scaling.
    """

    _accumulator: Accumulator  # made by `build`

    @refuse_unknown_arguments("AccumOptimizer", REMEDIES)
    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer | str | dict[str, Any],
        accum_steps: AccumSteps,
        *,
        reduction: Literal["mean", "sum"] = "mean",
        accumulator_dtype: str | None = None,
        adaptive_clip_factor: float | None = None,
        on_nonfinite: Literal[
            "propagate", "skip_micro_batch", "skip_window", "raise"
        ] = "propagate",
        name: str | None = None,
    ) -> None:
        inner = resolve_optimizer(inner_optimizer)
        accum_steps = check_accum_steps(accum_steps)
        check_option("reduction", reduction, REDUCTIONS)
        check_option("on_nonfinite", on_nonfinite, ON_NONFINITE)
        dtype = check_dtype(accumulator_dtype)
        scaler = None
        if isinstance(inner, LossScaleOptimizer) and not isinstance(inner, type(self)):
            scaler, inner = inner, inner.inner_optimizer
        check_inner(inner)
        check_clipping(inner, adaptive_clip_factor)
        static_scale = None if scaler is not None else inner.loss_scale_factor

        settings = {} if scaler is None else scaler_settings(scaler)
        super().__init__(inner, name=name, **settings)
        self.reduction = reduction
        self.accumulator_dtype = dtype
        self.adaptive_clip_factor = adaptive_clip_factor
        self.on_nonfinite = on_nonfinite
        self._scaler_inside = scaler is not None
        self._static_scale = static_scale
        self._accum_steps = accum_steps
        self._add_counters()
        self._pending_weight = PendingWeight()
        # Set for the time of a `fit` by `AccumulationMonitor(tail="flush_end")`.
        self.flushes_at_end = False
        self._scaled.assign(scaler is not None)
        if scaler is not None and scaler.built:
            self.step_counter.assign(scaler.step_counter)
            self.dynamic_scale.assign(scaler.dynamic_scale)
        self._sealed = True
        canaries.check()
        observe_training_losses(_announce_weight)
        patch_distribution_bugs()

    # ------------------------------------------------------------------ variables

    def _add_counters(self) -> None:
        def counter(name: str, dtype: str, initial: float) -> keras.Variable:
            # TensorFlow 2.18 makes no bool of a `Constant(0)`.
            constant = keras.initializers.Constant(initial) if initial else "zeros"
            return self.add_variable(
                shape=(),
                dtype=dtype,
                initializer=constant,
                aggregation="only_first_replica",
                name=name,
            )

        self.step_counter = counter("step_counter", "int64", 0)
        self.dynamic_scale = counter("dynamic_scale", "float32", self.initial_scale)
        self._scaled = counter("scales_dynamically", "bool", 0)
        self._skipped_windows = counter("skipped_windows", "int64", 0)
        self._skipped_micro_batches = counter("skipped_micro_batches", "int64", 0)
        self._last_gradient_norm = counter("last_gradient_norm", "float32", 0)
        steps = self._accum_steps
        self._length = counter("accum_steps", "int64", 1 if callable(steps) else steps)
        self._schedule = trace_schedule(steps) if callable(steps) else None

    def build(self, var_list: Sequence[keras.Variable]) -> None:
        """Create the accumulators and the variables of the inner optimizer.

        Args:
            var_list: the variables to train.
        """
        if self.built:
            return
        # Out of any graph that is being traced: variables outlive it.
        with tf.init_scope(), keras.name_scope(self.name, caller=self):
            if not self.inner_optimizer.built:
                self.inner_optimizer.build(list(var_list))
            check_inner(self.inner_optimizer)  # A MultiOptimizer knows its parts now.
            accumulator = Accumulator(
                var_list, self.accumulator_dtype, weighted=self.reduction == "mean"
            )
        keras.optimizers.Optimizer.build(self, list(var_list))
        for variable in accumulator.variables:
            self._track_variable(variable)
        self._accumulator = accumulator
        self._strategy = replica.current()
        restore_deferred(self)

    @property
    def micro_step(self) -> keras.Variable | int:
        """How many micro-batches the window holds; 0 before the first `apply`."""
        return 0 if not self.built else self._accumulator.micro_step

    @property
    def skipped_windows(self) -> keras.Variable:
        """How many windows were skipped because of an overflow, an infinity or a NaN."""
        return self._skipped_windows

    @property
    def skipped_micro_batches(self) -> keras.Variable:
        """How many micro-batches `on_nonfinite="skip_micro_batch"` has left out."""
        return self._skipped_micro_batches

    @property
    def last_gradient_norm(self) -> keras.Variable:
        """The L2 norm of the last update's mean gradient, unscaled, before clipping."""
        return self._last_gradient_norm

    @property
    def accum_steps(self) -> AccumSteps:
        """The micro-batches of a window, or the schedule of them. Settable.

        Setting it to another int takes effect at the next window, without retracing.
        """
        return self._accum_steps

    @accum_steps.setter
    def accum_steps(self, accum_steps: int) -> None:
        if self._schedule is not None or callable(accum_steps):
            raise TypeError(
                "`accum_steps` can be set to an integer only, and only if it was one at "
                f"construction. Received: {accum_steps!r}, for an optimizer constructed "
                f"with {self._accum_steps!r}. To change a schedule, construct a new "
                "optimizer."
            )
        self._accum_steps = check_accum_steps(accum_steps)
        self._length.assign(self._accum_steps)

    @property
    def window_length(self) -> int:
        """The micro-batches of the window that is open; changes at its end."""
        return (
            0
            if not self.built
            else int(keras.ops.convert_to_numpy(self._accumulator.length))
        )

    @property
    def accumulator_bytes(self) -> int:
        """The memory of the accumulators on one replica; 0 before they are built."""
        sums = [] if not self.built else self._accumulator.sums
        return sum(v.value.dtype.size * int(np.prod(v.shape)) for v in sums)

    @property
    def optimizers(self) -> list[keras.optimizers.Optimizer]:
        """The parts of an inner MultiOptimizer; missing for any other, as in Keras."""
        return self.inner_optimizer.optimizers

    @property
    def loss_scale_factor(self) -> float:
        """The constant loss scale that was set on the inner optimizer, or 1."""
        return self.__dict__.get("_static_scale") or 1.0

    @loss_scale_factor.setter
    def loss_scale_factor(self, value: float | None) -> None:
        # Keras's base class sets it while constructing; after that, only a wrapper does.
        if self.__dict__.get("_sealed"):
            raise ValueError(
                "Another optimizer was put around AccumOptimizer. A "
                "LossScaleOptimizer there would drop single micro-batches from a window, "
                "and count its growth in micro-steps. Write "
                "`AccumOptimizer(LossScaleOptimizer(inner), accum_steps=...)`, or leave "
                "it out: under mixed_float16 AccumOptimizer scales the loss by itself."
            )

    # ----------------------------------------------------------------- loss scale

    @tf.autograph.experimental.do_not_convert
    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """Multiply a loss by the loss scale, if there is one.

        The scale is dynamic if a `LossScaleOptimizer` was passed in; if the global dtype
        policy, or a layer of the model in `fit`, is `mixed_float16`; or if the graph that
        is being traced computes anything in float16. An eager loop of your own, for a
        model with a `mixed_float16` policy of its own, passes a `LossScaleOptimizer` in.

        Args:
            loss: scalar float tensor.

        Returns:
            The scaled loss, whose gradients `apply` expects.

        Raises:
            ValueError: if `loss` comes from this function already.
        """
        if getattr(loss, "_keras_accum_scaled", False):
            raise ValueError(
                "Received a loss that `scale_loss` has scaled already. Scale it once: "
                "`model.fit` calls `scale_loss` itself."
            )
        policy = keras.config.dtype_policy()
        if policy.compute_dtype == "float16" or _graph_computes_in_float16():
            self.scales_dynamically = True
        if (scale := self._scale()) is None:
            return loss
        loss = tf.convert_to_tensor(loss)
        scaled = tf.multiply(loss, tf.cast(scale, loss.dtype))
        scaled._keras_accum_scaled = True
        return scaled

    @property
    def scales_dynamically(self) -> bool:
        """Whether the loss is scaled by `dynamic_scale`: once it is, it stays so."""
        with tf.init_scope():  # Known while tracing; a variable, to be saved and loaded.
            return bool(keras.ops.convert_to_numpy(self._scaled))

    @scales_dynamically.setter
    def scales_dynamically(self, value: bool) -> None:
        with tf.init_scope():
            self._scaled.assign(value)

    def enable_scaling_if_float16(self, model: keras.Model) -> None:
        """Scale the loss from now on if a layer of `model` computes in float16."""
        if any(layer.compute_dtype == "float16" for layer in flatten_layers(model)):
            self.scales_dynamically = True

    def _scale(self) -> keras.Variable | float | None:
        return self.dynamic_scale if self.scales_dynamically else self._static_scale

    # --------------------------------------------------------------------- a step

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(
        self,
        grads_and_vars: Any,
        weight: tf.Tensor | float | None = None,
    ) -> keras.Variable:
        """`apply`, for pairs of a gradient and a variable; returns `iterations`."""
        grads, variables = zip(*grads_and_vars)
        self.apply(grads, variables, weight)
        return self.iterations

    @tf.autograph.experimental.do_not_convert
    def apply(
        self,
        grads: Sequence[Gradient],
        trainable_variables: Sequence[keras.Variable] | None = None,
        weight: tf.Tensor | float | None = None,
    ) -> None:
        """Add the gradients of one micro-batch; at the end of a window, update.

        Args:
            grads: the gradient of the micro-batch's loss for each variable, as
                `scale_loss` scaled it: a tensor, a `tf.IndexedSlices`, or None.
            trainable_variables: the variables, in the order of `grads`. By default those
                that the optimizer was built with.
            weight: scalar, the denominator of the micro-batch's mean loss: its samples,
                tokens, or sum of sample weights. 0 leaves it out, even if its gradient
                is NaN. By default what `model.compute_loss` divided by if it was called
                before, else 1.

        Raises:
            ValueError: if gradients do not fit the variables, all are None, a variable
                was not there when the optimizer was built, or the weight is negative.
                Nothing has changed then.
            tf.errors.InvalidArgumentError: for a gradient that is not finite, with
                `on_nonfinite="raise"`; in a graph, for a negative weight or a NaN. XLA
                leaves both checks out.
        """
        grads = list(grads)
        if not grads:
            return
        replica.check_compilable()
        announced = self._pending_weight.pop()
        weight, checks = check_weight(announced if weight is None else weight)
        variables = self._check(grads, trainable_variables)
        window = self._accumulator
        indices = [self._get_variable_index(v) for v in variables]
        given = [i for i, g in zip(indices, grads) if g is not None]

        guards, kept = self._screen([g for g in grads if g is not None], weight)
        with tf.control_dependencies([*guards, *checks]):
            window.add(grads, indices, weight, kept)
            replica.in_cross_replica(
                lambda: run_if(
                    window.count(self._next_length),
                    lambda: self._close_window(given),
                )
            )

    def _check(
        self, grads: list[Gradient], variables: Sequence[keras.Variable] | None
    ) -> list[keras.Variable]:
        """The variables that belong to `grads`, known to this optimizer."""
        if variables is None:
            if not self.built:
                raise ValueError(
                    "Received gradients without variables, and the optimizer is not "
                    "built yet. Pass the variables too, or call "
                    "`optimizer.build(variables)` before."
                )
            variables = self._trainable_variables
        variables = list(variables)
        check_gradients(grads, variables)
        if not self.built:
            self.build(variables)
        for variable in variables:
            if self._var_key(variable) not in self._trainable_variables_indices:
                raise ValueError(
                    f"Received a gradient for '{name_of(variable)}', which was not among "
                    "the variables that this optimizer was built with (a layer that was "
                    "frozen then, perhaps). After a change of `trainable`, compile the "
                    "model with a new optimizer: `model.compile(optimizer="
                    "AccumOptimizer.from_config(model.optimizer.get_config()), ...)`."
                )
        return variables

    def _screen(
        self, grads: Sequence[tf.Tensor | tf.IndexedSlices], weight: tf.Tensor
    ) -> tuple[list[tf.Operation], tf.Tensor | None]:
        """By `on_nonfinite`: what must hold before anything changes, and what to keep.

        Returns:
            Operations that have to run first, and whether to keep the micro-batch.
        """
        if self.scales_dynamically or self.on_nonfinite in ("propagate", "skip_window"):
            return [], None
        # What weighs nothing adds nothing: it may be NaN.
        usable = tf.logical_or(all_finite(grads), tf.equal(weight, 0.0))
        if self.on_nonfinite == "skip_micro_batch":
            return [], usable
        return [_assert_finite(usable)], None

    def _next_length(self) -> tf.Tensor:
        if self._schedule is None:
            return tf.convert_to_tensor(self._length.value)
        update = tf.cast(tf.convert_to_tensor(self.iterations), "int32")
        return checked_steps(self._schedule(update))

    # -------------------------------------------------------- the end of a window

    def _close_window(self, given: Sequence[int]) -> None:
        """Update with what the window holds, and begin the next one.

        Runs for all replicas together. `given` are the variables whose gradient the
        last micro-batch had.
        """
        self._for_those_reached(given, self._update_or_skip)
        replica.in_replica(self._accumulator.clear, True)
        self._accumulator.restart()

    def _for_those_reached(self, given: Sequence[int], update: Any) -> None:
        """Call `update` on the indices of the variables that the window has reached.

        A variable without any gradient in the window is left alone, as Keras leaves it:
        no decay, no momentum. What is known when tracing are the gradients of the last
        micro-batch; where others have been reached before it, all are updated.
        """
        every = range(len(self._accumulator.sums))
        others = [i for i in every if i not in set(given)]
        if not others:
            update(given)
            return
        reached = tf.convert_to_tensor(self._accumulator.reached.value) > 0
        if tf.executing_eagerly():
            update(np.flatnonzero(reached.numpy()).tolist())
            return
        run_either(
            tf.reduce_any(tf.gather(reached, others)),
            lambda: update(list(every)),
            lambda: update(given) if given else None,
        )

    def _update_or_skip(self, indices: Sequence[int]) -> None:
        sums = replica.in_replica(self._accumulator.reduce, indices)
        if not (self.scales_dynamically or self.on_nonfinite.startswith("skip")):
            self._update_each(indices, sums)
            return
        usable = replica.local_result(replica.in_replica(self._usable, sums))
        run_either(
            usable,
            lambda: self._update_each(indices, sums),
            lambda: self._skipped_windows.assign_add(1),
        )
        if self.scales_dynamically:
            self._adapt_scale(usable)
        else:
            dropped = replica.local_result(replica.in_replica(lambda s: s[-1], sums))
            self._skipped_micro_batches.assign_add(tf.cast(dropped, "int64"))

    def _usable(self, sums: Sequence[tf.Tensor]) -> tf.Tensor:
        """Whether the reduced window may be applied: finite, and not dropped whole."""
        *gradients, total, dropped = sums
        emptied = tf.logical_and(tf.equal(total, 0.0), tf.greater(dropped, 0.0))
        return tf.logical_and(all_finite(gradients), tf.logical_not(emptied))

    def _update_each(self, indices: Sequence[int], sums: Any) -> None:
        replica.in_replica(self._update, indices, sums)
        overwrite_by_averages(self.inner_optimizer)

    def _update(self, indices: Sequence[int], sums: Sequence[tf.Tensor]) -> None:
        """Make one step of the inner optimizer with the mean gradient of the window."""
        window = self._accumulator
        variables = [self._trainable_variables[i] for i in indices]
        divisor = tf.ones(()) if self.reduction == "sum" else sums[-2]
        if (scale := self._scale()) is not None:
            divisor = divisor * tf.cast(scale, "float32")
        replaced = [window.overwrites[i] for i in indices]
        norm = global_norm([s for s, as_is in zip(sums, replaced) if not as_is])
        self._last_gradient_norm.assign(tf.math.divide_no_nan(norm, divisor))
        means = window.divide(indices, sums, divisor)
        grads = [tf.cast(mean, v.dtype) for mean, v in zip(means, variables)]
        if (factor := self.adaptive_clip_factor) is not None:
            weights = [tf.convert_to_tensor(v) for v in variables]
            clipped = clip_adaptively(grads, weights, factor)
            grads = [g if r else c for g, c, r in zip(grads, clipped, replaced)]
        if hasattr(self.inner_optimizer, "optimizers"):
            # A MultiOptimizer takes the gradients of all variables, some of them None.
            held = dict(zip(indices, grads))
            variables = self._trainable_variables
            grads = [held.get(i) for i in range(len(variables))]
        apply_reduced(self.inner_optimizer, grads, variables)

    def _adapt_scale(self, finite: tf.Tensor) -> None:
        """Halve the scale after an overflow; double it after enough updates without."""
        updates = tf.convert_to_tensor(self.step_counter.value) + 1
        grown = tf.greater_equal(updates, self.dynamic_growth_steps)
        factor = tf.where(finite, tf.where(grown, 2.0, 1.0), 0.5)
        restart = tf.logical_or(grown, tf.logical_not(finite))
        self.dynamic_scale.assign(self.dynamic_scale.value * factor)
        self.step_counter.assign(tf.where(restart, tf.zeros_like(updates), updates))

    def finalize_variable_values(self, var_list: Sequence[keras.Variable]) -> None:
        """Let the inner optimizer put its averages in place, as `fit` does at its end.

        Before the first update there are none, only zeros. With `flushes_at_end`, the
        open window is applied before: an update moves weights, not their averages.
        """
        if self.flushes_at_end:
            self.flush()
        if keras.ops.convert_to_numpy(self.iterations) > 0:
            self.inner_optimizer.finalize_variable_values(var_list)

    @tf.autograph.experimental.do_not_convert
    def flush(self) -> None:
        """Update now with what the window holds, divided by what it really weighs.

        Does nothing if the window is empty. Under a strategy, to be called from outside
        of its replicas, or on each of them.
        """
        if self.built:
            replica.run_on(self._strategy, self._flush)

    def _flush(self) -> None:
        replica.in_cross_replica(
            lambda: run_if(
                tf.greater(self._accumulator.micro_step.value, 0),
                lambda: self._close_window([]),
            )
        )

    @tf.autograph.experimental.do_not_convert
    def reset(self) -> None:
        """Drop what the window holds. Weights and counters stay as they are."""
        if self.built:
            replica.run_on(self._strategy, self._drop)

    def _drop(self) -> None:
        self._accumulator.clear()
        replica.in_cross_replica(self._accumulator.restart)

    # ---------------------------------------------------------------------- state

    def save_own_variables(self, store: Any) -> None:
        """Save the inner optimizer's variables as it would itself, and then the window's.

        With its layout kept, a checkpoint of the inner optimizer and one of the wrapper
        differ in the window's entries alone.
        """
        self.inner_optimizer.save_own_variables(store)
        for name, variable in self._window_state().items():
            store[name] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Load what `save_own_variables` saved, or a checkpoint without a window.

        The latter comes from the inner optimizer on its own, or from a
        `LossScaleOptimizer` around it. The window is then empty.

        Raises:
            ValueError: if the saved window belongs to other variables. Nothing has
                changed then.
        """
        saved = {key: store[key] for key in list(store.keys())}
        state = self._window_state()
        inner = {key: value for key, value in saved.items() if key.isdecimal()}
        window = {key: value for key, value in saved.items() if key in state}
        open_window = saved.keys() - inner.keys() - self._counters().keys()
        if not window:
            inner, window = split_scaler(inner, self.inner_optimizer.variables)
        elif self.built and open_window:
            check_saved_window(window, state)
        elif open_window:
            warn(
                f"Skipping variable loading for optimizer '{self.name}': the saved one "
                "has a window, and this one is not built. Build it before, "
                "`optimizer.build(model.trainable_variables)`, to go on in that window."
            )
        self.inner_optimizer.load_own_variables(inner)
        self.reset()
        for name, value in window.items():
            state[name].assign(value)

    def _window_state(self) -> dict[str, keras.Variable]:
        """The variables that make an interrupted window go on, by name."""
        accumulator = self._accumulator.variables if self.built else []
        return self._counters() | {v.name: v for v in accumulator}

    def _counters(self) -> dict[str, keras.Variable]:
        counters = [
            self.step_counter,
            self.dynamic_scale,
            self._scaled,
            self._skipped_windows,
            self._skipped_micro_batches,
            self._last_gradient_norm,
        ]
        return {variable.name: variable for variable in counters}

    def __dir__(self) -> list[str]:
        """All attributes, but for the inner optimizer.

        Keras's saving walks through `dir()`, and would save it a second time.
        """
        return [name for name in super().__dir__() if name != "inner_optimizer"]

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict:
        """What `tf.train.Checkpoint` saves: the inner's state, and then the window's.

        As in `save_own_variables`, so that a checkpoint of the inner optimizer loads.
        """
        if save_type != "checkpoint":
            return super()._trackable_children(save_type, **kwargs)
        children = self.inner_optimizer._trackable_children(save_type, **kwargs)
        return {**children, **self._window_state()}

    def _lookup_dependency(self, name: str, cached_dependencies: Any = None) -> Any:
        """Refuse the `tf.train.Checkpoint` of a `LossScaleOptimizer`.

        It holds an iteration and a learning rate of its own under the names of the inner
        optimizer's.
        """
        if name == "inner_optimizer" and cached_dependencies is not None:
            raise ValueError(
                "Received a tf.train.Checkpoint of a LossScaleOptimizer. Restore it with "
                "`tf.train.Checkpoint(optimizer=...)` of a LossScaleOptimizer, and pass "
                "that to AccumOptimizer; or save the model with `save_weights`."
            )
        return super()._lookup_dependency(name, cached_dependencies)

    def get_config(self) -> dict[str, Any]:
        """The arguments of the constructor, serialised."""
        steps = self._accum_steps
        return {
            "name": self.name,
            "inner_optimizer": self._inner_config(),
            "accum_steps": (
                keras.saving.serialize_keras_object(steps) if callable(steps) else steps
            ),
            "reduction": self.reduction,
            "accumulator_dtype": self.accumulator_dtype,
            "adaptive_clip_factor": self.adaptive_clip_factor,
            "on_nonfinite": self.on_nonfinite,
        }

    def _inner_config(self) -> dict[str, Any]:
        config = keras.saving.serialize_keras_object(self.inner_optimizer)
        if self._static_scale is not None:
            config["config"]["loss_scale_factor"] = self._static_scale
        if not self._scaler_inside:
            return config
        return {
            "module": "keras.optimizers",
            "class_name": "LossScaleOptimizer",
            "config": {
                "name": "loss_scale_optimizer",
                "inner_optimizer": config,
                "initial_scale": self.initial_scale,
                "dynamic_growth_steps": self.dynamic_growth_steps,
            },
            "registered_name": None,
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> "AccumOptimizer":
        """An optimizer with the arguments in `config`, and no state."""
        config = copy.deepcopy(config)  # Keras takes a nested config apart
        inner = config["inner_optimizer"]
        config["inner_optimizer"] = resolve_optimizer(inner, custom_objects)
        if isinstance(config["accum_steps"], dict):
            config["accum_steps"] = keras.saving.deserialize_keras_object(
                config["accum_steps"], custom_objects=custom_objects
            )
        return cls(**config)

    def __repr__(self) -> str:
        inner = describe_optimizer(self.inner_optimizer)
        if self._scaler_inside:
            inner = f"LossScaleOptimizer({inner})"
        steps = getattr(self._accum_steps, "__name__", repr(self._accum_steps))
        options = {
            "accumulator_dtype": (self.accumulator_dtype, None),
            "adaptive_clip_factor": (self.adaptive_clip_factor, None),
            "on_nonfinite": (self.on_nonfinite, "propagate"),
        }
        said = [f"{k}={v!r}" for k, (v, default) in options.items() if v != default]
        shown = [inner, f"accum_steps={steps}", f"reduction={self.reduction!r}", *said]
        return f"{type(self).__name__}({', '.join(shown)})"


GradientAccumulationOptimizer = AccumOptimizer
# The name in files that were saved under it.
keras.saving.get_custom_objects()["keras_accum>GradientAccumulationOptimizer"] = (
    AccumOptimizer
)


def apply_reduced(
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[tf.Tensor | None],
    variables: Sequence[keras.Variable],
) -> None:
    """`optimizer.apply`, on each replica, for gradients that are reduced already.

    `overwrite_by_averages` has to follow, for all replicas together.
    """
    if not replica.distributed():
        optimizer.apply(gradients, variables)
        return
    with replicas_left_to_caller(optimizer):
        optimizer.apply(gradients, variables)


def overwrite_by_averages(optimizer: keras.optimizers.Optimizer) -> None:
    """What `ema_overwrite_frequency` asks for, where Keras cannot do it by itself."""
    if not replica.distributed():
        return
    for due, overwrite, variables in overwriting_by_averages(optimizer):

        def overwrite_and_constrain(
            overwrite: Any = overwrite, variables: Any = variables
        ) -> None:
            overwrite()
            replica.in_replica(_constrain, variables)

        run_if(due, overwrite_and_constrain)


def _constrain(variables: Sequence[keras.Variable]) -> None:
    for variable in variables:
        if variable.constraint is not None:
            variable.assign(variable.constraint(variable))


def _assert_finite(finite: tf.Tensor) -> tf.Operation:
    if compiled_by_xla():
        raise ValueError(
            "Received `on_nonfinite='raise'` in a function that XLA compiles, where "
            "nothing can be raised. Pass `jit_compile=False` to `model.compile`, or use "
            "'skip_window' or 'skip_micro_batch'."
        )
    return tf.debugging.Assert(
        finite,
        [
            "A gradient holds an infinity or a NaN. Nothing was added to the window. Use "
            "on_nonfinite='skip_window' or 'skip_micro_batch' to train on without it."
        ],
    )


def _graph_computes_in_float16() -> bool:
    if tf.executing_eagerly():
        return False
    operations = tf.compat.v1.get_default_graph().get_operations()
    return any(t.dtype == tf.float16 for op in operations for t in op.outputs)


@contextlib.contextmanager
def _announce_weight(model: keras.Model) -> Iterator[None]:
    """Note what the training loss that is computed inside of this context weighs."""
    optimizer = getattr(model, "optimizer", None)
    if not isinstance(optimizer, AccumOptimizer):
        yield
        return
    with record_terms() as terms:
        yield
    weight = batch_weight(terms, call_losses(model), optimizer.reduction == "sum")
    if not is_a_part():
        optimizer._pending_weight.set(weight)
    optimizer.enable_scaling_if_float16(model)
    pool_first_or_next(model, tf.equal(optimizer.micro_step, 0))
