"""`AccumOptimizer`: one update of an inner optimizer per window.

What the class is, from its arguments to a micro-step. It rests on three that say what it
leaves to the inner optimizer (`inner.py`), what is saved (`saving.py`), and how the loss
is scaled (`loss_scale.py`). The end of a window is in `update.py`, in the order of the
contract; what a loss announces is in `announced.py`.
"""

import weakref
from collections.abc import Sequence
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf
from keras.optimizers import LossScaleOptimizer

from .._backend import replica
from .._backend.arrays import to_numpy
from .._backend.control import run_if
from .._backend.private import canaries
from .._backend.private.compiled import compiled_by_xla
from .._backend.private.fits import hear_fits, observe_fits
from .._backend.private.losses import (
    hear_losses,
    observe_training_losses,
)
from .._backend.private.optimizers import (
    compiling,
    index_of,
    restore_deferred,
    track_variable,
    trained_by,
)
from .._backend.private.strategies import patch_distribution_bugs
from .._backend.sizes import bytes_of
from .._backend.warn import warn
from .._core.checks import check_option, refuse_unknown_arguments
from .._core.gradients import Gradient, all_finite, check_gradients, name_of
from .._core.loss import warn_of_a_loop, warn_of_unsaid
from .._core.observed import Observed
from .._core.own_loss import depends_on_data
from .accumulator import Accumulator, Weight, after
from .announced import Heard, announce_weight, heard_losses
from .arguments import (
    REMEDIES,
    check_clipping,
    check_dtype,
    check_inner,
    check_nonfinite,
    check_scaler,
    check_weight,
    describe_optimizer,
    resolve_optimizer,
    scaler_settings,
)
from .loss_scale import ScalesLoss
from .no_update import Training, begin_fit, end_training, note_dropped
from .observer import WindowObserver, looks_at_each
from .pending import PendingWeight
from .update import EndOfWindow
from .window import AccumSteps, check_accum_steps, checked_steps, trace_schedule

REDUCTIONS = ("mean", "sum")
ON_NONFINITE = ("propagate", "skip_micro_batch", "skip_window", "raise")

# Those that hear of losses; Keras has its own functions again when they are gone.
_listening: "weakref.WeakSet[AccumOptimizer]" = weakref.WeakSet()


@keras.saving.register_keras_serializable(package="keras_accum")
class AccumOptimizer(ScalesLoss):
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

    Under `mixed_float16`, of the global policy, of the model or of a trained layer, or
    with a `LossScaleOptimizer` inside, the loss is scaled, unless the model is compiled
    with `auto_scale_loss=False`. Each micro-batch's loss is multiplied by its share of the
    window before it is differentiated, so that float16 overflows where the large batch
    does. The scale is constant
    within a window; an overflow anywhere in it skips the whole window and halves the scale
    once; its growth counts updates.

    Under a `tf.distribute` strategy each replica accumulates locally. At the end of a
    window gradients and weights are reduced once, and the result is clipped and applied.
    A custom loop passes gradients as Keras's losses make them: of a mean over the samples
    of the replica, divided by the number of replicas.

    Exactness: weights, slots and moving averages equal those of the large batch to
    float32 rounding (1e-6 relative) for linear optimizers. An optimizer that divides by
    its own statistics, as Adam does, can turn rounding into 2e-5. It does not hold for
    layers or losses that couple the samples of a batch, as BatchNormalization does.
    Several losses with different masks are exact only if their denominators are
    proportional; a warning says so. If a window's total weight is zero, the update is that
    of the regularizers and of weight decay, as in the large batch.

    Several optimizers in one `train_step`, as in a GAN, have windows of their own. If the
    critic is updated first, its update comes in the last micro-step. So only the
    generator's last micro-batch sees the new critic; in the large batch all samples do. To
    be exact, let the data yield the large batch, and take it apart for
    each in turn:

    ```python
    for loss_fn, optimizer, variables in self.players:
        loss, gradients = accumulate_gradients(
            loss_fn, variables, batch, micro_batch_size=4
        )
        optimizer.apply(gradients, variables)
    ```

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
        on_nonfinite: What to do about an infinity or a NaN in a gradient: `"propagate"`
            it, as Keras does; `"skip_micro_batch"`; `"skip_window"`; or `"raise"`, at once
            and with nothing changed (not possible in functions that XLA compiles). Where
            the loss is scaled dynamically, an overflow is expected and skips the window:
            only `"propagate"`, the default, and `"skip_window"` are accepted.
        name: String. The name of the optimizer.

    Raises:
        ValueError: for an optimizer that accumulates already or wraps one that does,
            `accum_steps` below 1, two ways of clipping at once, an unknown option, or an
            `on_nonfinite` that loss scaling would ignore.
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
        canaries.check()
        inner = resolve_optimizer(inner_optimizer)
        accum_steps = check_accum_steps(accum_steps)
        check_option("reduction", reduction, REDUCTIONS)
        check_option("on_nonfinite", on_nonfinite, ON_NONFINITE)
        dtype = check_dtype(accumulator_dtype)
        scaler = None
        if isinstance(inner, LossScaleOptimizer) and not isinstance(inner, type(self)):
            scaler, inner = inner, inner.inner_optimizer
            check_scaler(scaler)
        check_inner(inner)
        check_clipping(inner, adaptive_clip_factor)
        static_scale = None if scaler is not None else inner.loss_scale_factor
        check_nonfinite(on_nonfinite, scaled=scaler is not None)

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
        # Where the counters stood when the `fit` that is under way began.
        self.training: Training | None = None
        self._scaled.assign(scaler is not None)
        if scaler is not None and scaler.built:
            self.step_counter.assign(scaler.step_counter)
            self.dynamic_scale.assign(scaler.dynamic_scale)
        self._scales_by_itself = True
        self._model: Any = lambda: None  # The one that is compiled with this optimizer.
        self._announces = False
        self._first_is_unknown = False
        # What the first loss of a window was multiplied by, in an eager loop.
        self._factor: float | None = None
        # Set for the time of a `fit` by `AccumulationMonitor`.
        self.observer: WindowObserver | None = None
        self._sealed = True

    # -------------------------------------------------------------- meeting a model

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class. Keras asks for it when the optimizer is set on a model.

        It gives an optimizer no notice of that; but it asks of whatever is set on a model
        whether it is a variable or a layer, and `isinstance` reads this.
        """
        if self.__dict__.get("_sealed") and (found := compiling()) is not None:
            model, self._scales_by_itself = found
            self._model = weakref.ref(model)
            self._listen()
        return type(self)

    def _listen(self) -> None:
        """Hear of `fit` and of training losses, until this optimizer is gone."""
        if self not in _listening:
            _listening.add(self)
            observe_training_losses(announce_weight)
            observe_fits(begin_fit)
            weakref.finalize(self, hear_losses())
            weakref.finalize(self, hear_fits())
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
        self._listen()
        # Out of any graph that is being traced: variables outlive it.
        with tf.init_scope(), keras.name_scope(self.name, caller=self):
            if not self.inner_optimizer.built:
                self._build_inner(list(var_list))
            check_inner(self.inner_optimizer)  # A MultiOptimizer knows its parts now.
            accumulator = Accumulator(
                var_list, self.accumulator_dtype, weighted=self.reduction == "mean"
            )
        # `use_ema` is the inner optimizer's: sealed, this one would make averages too.
        del self.__dict__["_sealed"]
        keras.optimizers.Optimizer.build(self, list(var_list))
        self._sealed = True
        for variable in accumulator.variables:
            track_variable(self, variable)
        self._accumulator = accumulator
        self._strategy = replica.current()
        restore_deferred(self)

    def _build_inner(self, variables: list[keras.Variable]) -> None:
        try:
            self.inner_optimizer.build(variables)
        except Exception as error:
            if not _await_values(variables):
                raise
            name = type(self.inner_optimizer).__name__
            raise ValueError(
                f"{name} starts from the values of the weights, and this model creates "
                "its weights in the first training step, which has none for it yet. Build "
                "the model before: call it on a sample, `model(x[:1])`, or give it an "
                "`Input`."
            ) from error

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
        return 0 if not self.built else int(to_numpy(self._accumulator.length))

    @property
    def accumulator_bytes(self) -> int:
        """The memory of the accumulators on one replica; 0 before they are built."""
        sums = [] if not self.built else self._accumulator.sums
        return sum(map(bytes_of, sums))

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
                is NaN. By default that of the `compute_loss`, or of the one Keras loss,
                that was differentiated since the last `apply`; else 1, with a warning.

        Raises:
            ValueError: if gradients do not fit the variables, all are None, a variable
                was not there when the optimizer was built or comes twice, or the weight
                is negative.
                Nothing has changed then.
            tf.errors.InvalidArgumentError: for a gradient that is not finite, with
                `on_nonfinite="raise"`; in a graph, for a negative weight or a NaN. XLA
                leaves both checks out.
        """
        heard = heard_losses(self if self._matters() else None)
        if weight is not None:
            zero = tf.zeros(())
            self.apply_weighted(grads, trainable_variables, Weight(weight, zero))
            return
        known, pending = self._pending_weight.get()
        if self._heard_nothing_yet(known, heard):
            self._first_is_unknown = True
            self.apply_weighted(grads, trainable_variables, pending)
            self._accumulator.forget_reference()
            return
        announced = self._announces
        if tf.executing_eagerly() and self.reduction == "mean":
            announced = bool(known)
        value = self._weight_of(known, pending, heard)
        if not announced and self._matters():
            if value is None:
                variables = trainable_variables or (
                    trained_by(self) if self.built else ()
                )
                warn_of_unsaid(self, [term.kind for term in heard.terms], variables)
            scaled = self._multiplies_otherwise(heard.factors)
            warn_of_a_loop(self, heard.terms, heard.added, scaled)
        self.apply_weighted(grads, trainable_variables, value or pending)

    def _heard_nothing_yet(self, known: tf.Tensor, heard: Heard) -> bool:
        """Whether a loss may have been computed before this optimizer could hear of it.

        In an eager loop whose optimizer nobody has built, that is the first one's.
        """
        if self.built or not tf.executing_eagerly() or replica.distributed():
            return False
        weighs = self._matters() and self.reduction == "mean"
        return not heard.terms and not bool(known) and weighs

    def _matters(self) -> bool:
        """Whether a window may be of several micro-batches."""
        return self._accum_steps != 1

    def _weight_of(
        self, known: tf.Tensor, pending: Weight, heard: Heard
    ) -> Weight | None:
        """The weight of the one mean that was heard of; None if it was not one."""
        first_is_unknown, self._first_is_unknown = self._first_is_unknown, False
        if self.reduction == "sum" or [t.kind for t in heard.terms] != ["mean"]:
            return None
        if first_is_unknown:
            warn(
                "The loss of the first micro-batch was computed before this optimizer was "
                "built, so its weight is unknown: it gets the weight of the second. "
                "Build the optimizer before the loop, "
                "`optimizer.build(model.trainable_variables)`.",
                about=self,
            )
        weight = tf.cast(heard.terms[0].weight, pending.value.dtype)
        return Weight(tf.where(known, pending.value, weight), pending.samples)

    def _multiplies_otherwise(self, factors: Sequence[tf.Tensor]) -> bool:
        """Whether a loop multiplies the loss of each micro-batch by something else.

        In a graph: if the factor depends on data. In eager mode: if its value changes.
        """
        if len(factors) != 1 or factors[0].shape.rank != 0:
            return False
        if not tf.executing_eagerly():
            return depends_on_data(factors[0])
        if bool(self.is_first) or self._factor is None:
            self._factor = float(factors[0])
        return not np.isclose(float(factors[0]), self._factor, rtol=1e-4, atol=0.0)

    def apply_weighted(
        self,
        grads: Sequence[Gradient],
        trainable_variables: Sequence[keras.Variable] | None,
        weight: Weight,
        parts: Observed | None = None,
    ) -> None:
        """`apply` with a `Weight`, which also holds what to use if a window weighs 0.

        Args:
            grads: as for `apply`.
            trainable_variables: as for `apply`.
            weight: of the micro-batch.
            parts: what was seen of the parts of a batch that the step took apart.
        """
        grads = list(grads)
        if not grads:
            return
        replica.check_compilable()
        value, checks = check_weight(weight.value)
        variables = self._check(grads, trainable_variables)
        window = self._accumulator
        indices = [self._index(v) for v in variables]
        given = [g for g in grads if g is not None]
        with_gradient = [i for i, g in zip(indices, grads) if g is not None]
        self._warn_of_missing_in_graph(with_gradient)
        screened = [v for v, g in zip(variables, grads) if g is not None]
        guards, kept = self._screen(given, screened, value, parts)
        with tf.control_dependencies([*guards, *checks]):
            share = self._pending_weight.share()
            relative = window.add(
                grads, indices, Weight(value, weight.samples), share, kept
            )
            with tf.control_dependencies(after(given)):
                if self.observer is not None:
                    self.observer.build(len(window.sums))
                    self.observer.each = looks_at_each(self.observer, self)
                    self.observer.add(
                        grads,
                        indices,
                        window,
                        part=relative,
                        factor=tf.square(self._gradient_factor(share, parts)),
                        weighs=tf.not_equal(value, 0.0),
                        parts=parts,
                    )
                self._pending_weight.clear()
                replica.in_cross_replica(
                    lambda: run_if(
                        window.count(self._next_length),
                        lambda: EndOfWindow(self).update(with_gradient),
                    )
                )

    def _gradient_factor(self, share: tf.Tensor, parts: Observed | None) -> tf.Tensor:
        """The factor that turns incoming gradients into the mean gradient."""
        factor = 1.0 / tf.cast(share, "float32")
        if self.reduction == "mean" and parts is None:
            factor *= replica.count()  # As the accumulator does.
        if (scale := self._scale()) is not None:
            factor /= tf.cast(tf.convert_to_tensor(scale), "float32")
        return factor

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
            variables = trained_by(self)
        variables = list(variables)
        check_gradients(grads, variables)
        if not self.built:
            self.build(variables)
        for variable in variables:
            if index_of(self, variable) is None:
                raise ValueError(
                    f"Received a gradient for '{name_of(variable)}', which was not among "
                    "the variables that this optimizer was built with (a layer that was "
                    "frozen then, perhaps). After a change of `trainable`, compile the "
                    "model with a new optimizer: `model.compile(optimizer="
                    "AccumOptimizer.from_config(model.optimizer.get_config()), ...)`."
                )
        return variables

    def _index(self, variable: keras.Variable) -> int:
        index = index_of(self, variable)
        assert index is not None  # `_check` has seen it.
        return index

    def _warn_of_missing_in_graph(self, with_gradient: Sequence[int]) -> None:
        """Warn of variables without a gradient, as Keras does, once a trace.

        In eager mode only the end of the window knows, and warns.
        """
        if not tf.executing_eagerly():
            every = range(len(self._accumulator.sums))
            self.warn_of_missing([i for i in every if i not in set(with_gradient)])

    def warn_of_missing(self, indices: Sequence[int]) -> None:
        """Warn of variables that have no gradient, once for each set of them."""
        variables = [trained_by(self)[i] for i in indices]
        missing = tuple(name_of(v) for v in variables if getattr(v, "trainable", True))
        if not missing:
            return
        warn(
            f"Gradients do not exist for variables {list(missing)} in a window of "
            "micro-batches: the loss does not depend on them. They are left as they are.",
            about=self,
        )

    def _screen(
        self,
        grads: Sequence[tf.Tensor | tf.IndexedSlices],
        variables: Sequence[keras.Variable],
        weight: tf.Tensor,
        parts: Observed | None,
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
        names = [name_of(v) for v in variables]
        return [self._assert_finite(usable, grads, names, parts)], None

    def _assert_finite(
        self,
        finite: tf.Tensor,
        gradients: Sequence[tf.Tensor | tf.IndexedSlices],
        names: Sequence[str],
        parts: Observed | None,
    ) -> tf.Operation:
        if compiled_by_xla():
            raise ValueError(
                "Received `on_nonfinite='raise'` in a function that XLA compiles, where "
                "nothing can be raised. Pass `jit_compile=False` to `model.compile`, or "
                "use 'skip_window' or 'skip_micro_batch'."
            )
        bad = tf.boolean_mask(names, tf.stack([~all_finite([g]) for g in gradients]))
        message: list[Any] = [
            "A gradient holds an infinity or a NaN. Nothing was added to the window. Use "
            "on_nonfinite='skip_window' or 'skip_micro_batch' to train on without it.",
            "Micro-batch of the window, from 1:",
            tf.convert_to_tensor(self._accumulator.micro_step.value) + 1,
            *([] if parts is None else ["in it:", tf.cast(parts.step, "int32")]),
            "Variables:",
            tf.strings.reduce_join(bad, separator=", "),
        ]
        if self.observer is not None and self.observer.layers is not None:
            layers = self.observer.layers
            place = layers.seen() if parts is None else parts.layer
            message += ["First layer:", tf.gather(layers.said, tf.cast(place, "int32"))]
        return tf.debugging.Assert(finite, message)

    def _next_length(self) -> tf.Tensor:
        if self._schedule is None:
            return tf.convert_to_tensor(self._length.value)
        # Schedules take int32; beyond its range the last index stands for all.
        update = tf.convert_to_tensor(self.iterations)
        update = tf.cast(tf.minimum(tf.cast(update, "int64"), tf.int32.max), "int32")
        return checked_steps(self._schedule(update))

    def _current_length(self) -> tf.Tensor:
        """The length of the window that the next micro-batch belongs to."""
        if not self.built:
            return self._next_length()
        begins = tf.equal(self._accumulator.micro_step.value, 0)
        return tf.where(begins, self._next_length(), self._accumulator.length.value)

    @property
    def is_first(self) -> tf.Tensor:
        """Scalar bool, whether the next micro-batch is the first of a window."""
        if not self.built:
            return tf.constant(True)
        return tf.equal(self._accumulator.micro_step.value, 0)

    # -------------------------------------------------------- the end of a window

    def finalize_variable_values(self, var_list: Sequence[keras.Variable]) -> None:
        """Let the inner optimizer put its averages in place, as `fit` does at its end.

        Before the first update there are none, only zeros. With `flushes_at_end`, the
        open window is applied before: an update moves weights, not their averages.
        """
        if self.flushes_at_end:
            self.flush()
        end_training(self)
        if to_numpy(self.iterations) > 0:
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
                lambda: EndOfWindow(self).update([]),
            )
        )

    @tf.autograph.experimental.do_not_convert
    def reset(self) -> None:
        """Drop what the window holds. Weights and counters stay as they are."""
        if self.built:
            if tf.executing_eagerly():
                note_dropped(self)
            replica.run_on(self._strategy, self._drop)

    def _drop(self) -> None:
        self._accumulator.clear()
        replica.in_cross_replica(self._accumulator.restart)

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


def _await_values(variables: Sequence[keras.Variable]) -> bool:
    """Whether variables were created in the trace that this is called in.

    Some optimizers start from the values of what they train.
    """
    if replica.distributed():
        return False
    with tf.init_scope():
        values = [getattr(variable, "value", variable) for variable in variables]
        return any(isinstance(v, tf.Variable) and not v.is_initialized() for v in values)
