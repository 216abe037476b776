"""`AccumulationMonitor`: what accumulation does in `fit`, said and logged.

It also decides what becomes of a window that an epoch, or the training, leaves open.
"""

import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import keras
import tensorflow as tf

from ._backend.callback_order import call_first
from ._backend.memory import peak_bytes
from ._backend.private.models import rows_tracked
from ._backend.private.optimizers import trained_by
from ._core.checks import check_option
from ._core.gradients import name_of
from ._core.layer_watch import LayerWatch
from ._core.moving_state import (
    StateWatch,
    are_told,
    describe_moving,
    moving_layers,
    untold,
)
from ._optimizer.find import find_optimizers, has_known_train_step
from ._optimizer.no_update import (
    begin_training,
    describe_overflow,
    describe_skipping,
    end_training,
    number,
)
from ._optimizer.observer import UpdateLog, WindowObserver
from ._optimizer.wrapper import AccumOptimizer
from ._step.observer import observe, observer_of, stop_observing

TAILS = ("carry", "flush_epoch", "flush_end", "drop")

logger = logging.getLogger("keras_accum")


class AccumulationMonitor(keras.callbacks.Callback):
    """Logs the updates of an accumulating model, and closes windows that stay open.

    ```python
    model.fit(x, y, batch_size=16, callbacks=[AccumulationMonitor(tail="flush_epoch")])
    ```

    It watches each `AccumOptimizer` that the model trains with, also several that a
    `train_step` of your own keeps (a GAN's), wherever they are: in attributes, dicts,
    lists or nested models. Of a model in `accumulate`, or a `GradientAccumulationModel`,
    it watches the steps, which leave nothing open.

    At the start of training it writes to the logger `keras_accum`, at INFO: the effective
    batch, the updates per epoch, the memory of the accumulators; a question mark stands
    for what cannot be known. It warns of layers that move state at each call, of epochs
    without an update, of windows skipped for a whole epoch, with the loss scale and the
    dtype policy, and of micro-batches that no update will use.

    After each batch and each epoch it adds to the logs, and so to `History`,
    TensorBoard and the progress bar:

    - `updates`: updates made since the optimizer was constructed;
    - `gradient_norm`: L2 norm of the last update's mean gradient, before clipping; of an
      `AccumOptimizer`, and with `detailed=True` of any;
    - `loss_scale`: where the loss is scaled dynamically;
    - `skipped_windows`: windows skipped because of an overflow, an infinity or a NaN;
      where one can be skipped.

    With several optimizers each name begins with that of its optimizer, made of the
    attribute and the keys that lead to it: `d_optimizer_updates` for `model.d_optimizer`,
    `optimizers_d_updates` for `model.optimizers["d"]`.

    With `detailed=True`, in both routes, and over all replicas:

    - `clipped_gradient_norm`: the norm after clipping, and `clipped_share`, the share of
      updates so far that were clipped;
    - `samples_per_second`: since the beginning of the epoch, where samples are counted;
    - `peak_bytes`: the most memory in use on a GPU since the process began, or
      `tf.config.experimental.reset_memory_stats`; on no CPU;
    - a warning when a window was skipped, or a micro-batch left out, with the number of the
      micro-batch in its window and the variables whose gradient was not finite.

    With `check_numerics=True` all of that, and the warning, or the error of
    `on_nonfinite="raise"`, names the first layer whose output was not finite. It looks at
    each layer's output, which takes time.

    `noise_scale=True` logs what `detailed=True` does, and `noise_scale`: the gradient noise
    scale of McCandlish et al., in samples, by the norms of a micro-batch's gradient and of
    the update's, averaged over about 200 updates. It is near the critical batch size, from
    which on a larger batch saves few updates. It needs several micro-batches in an update,
    and leaves embeddings out; it is NaN before it is known, and where noise hides the
    gradient. Take it for an estimate: Merrill et al. measured critical batch sizes that it
    does not track.

    `on_update_end` is called after each update, for subclasses that log by update.

    It is called before the other callbacks, wherever it is in the list: they find these
    values, and the weights that a flush has updated. Reading the values waits for the step
    to finish.

    Args:
        tail: What to do with a window that is open at the end of an epoch:
            `"carry"` it into the next epoch; `"flush_epoch"`, update with it, before
            validation; `"flush_end"`, carry it, but update with it at the end of
            training; `"drop"` it. An update with a short window is divided by what the
            window really holds.
        noise_scale: bool, whether to estimate the gradient noise scale. It takes the norm
            of one micro-batch's gradients per update, and replica; of all, where some may
            be skipped as not finite.
        detailed: bool, whether to log what clipping leaves, speed, memory, and what was not
            finite.
        check_numerics: bool, whether to name the first layer that was not finite.
        verbose: int. 1 writes the line at the start of training to `sys.stderr` too,
            once, unless the logger shows it; 0 leaves it to the logger.

    Raises:
        ValueError: for another `tail`; and at the start of training, if the model does
            not accumulate; or for `noise_scale` with `two_pass`, whose loss couples the
            micro-batches.

    References:
        McCandlish et al., 2018, "An Empirical Model of Large-Batch Training"; Merrill et
        al., 2025, "Critical Batch Size Revisited".
    """

    def __init__(
        self,
        tail: Literal["carry", "flush_epoch", "flush_end", "drop"] = "carry",
        *,
        noise_scale: bool = False,
        detailed: bool = False,
        check_numerics: bool = False,
        verbose: int = 1,
    ) -> None:
        super().__init__()
        check_option("tail", tail, TAILS)
        self.tail = tail
        self.noise_scale = bool(noise_scale)
        self.check_numerics = bool(check_numerics)
        self.detailed = bool(detailed) or self.noise_scale or self.check_numerics
        self.verbose = verbose
        self._layers: LayerWatch | None = None
        self._values: dict[str, float] = {}
        self._shown: set[str] = set()
        self._began = 0.0
        self._watched: dict[int, _Windows | _Steps] = {}
        self._compiled: tuple[Any, Any] = (None, None)
        self._in_epoch = False
        self._batches = 0
        self._rows_before = 0.0
        self._state: StateWatch | None = None

    @property
    def optimizer(self) -> keras.optimizers.Optimizer:
        """The optimizer of the model that is trained."""
        return self.model.optimizer

    # -------------------------------------------------------------- whom it watches

    def _watch(self, has_stepped: bool = False) -> None:
        """Find the optimizers that are there now; forget those that are gone.

        What a new one has done before is not known if it `has_stepped` meanwhile.
        """
        found = _watchable(self.model)
        for key, watched in found.items():
            if key in self._watched:
                found[key] = self._watched[key]
            elif not has_stepped:
                watched.begin_epoch()
            found[key].prefix = f"{watched.name}: " if len(found) > 1 else ""
        self._watched = found
        self._compiled = (self.model.optimizer, self.model.train_function)

    def _watch_if_compiled(self, has_stepped: bool = False) -> None:
        """Follow the optimizer, if another callback has compiled the model."""
        now = (self.model.optimizer, self.model.train_function)
        if any(a is not b for a, b in zip(now, self._compiled)):
            self._watch(has_stepped)

    def _windows(self) -> "Iterator[_Windows]":
        return (w for w in self._watched.values() if isinstance(w, _Windows))

    # ------------------------------------------------------------------- the events

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Refuse a model without accumulation; name layers that move state."""
        call_first(self)
        self._watched = {}
        self._watch()
        if not self._watched:
            raise ValueError(
                "AccumulationMonitor watches a model that accumulates. Received one "
                f"compiled with {type(self.optimizer).__name__}: write `model.compile("
                "optimizer=AccumOptimizer(optimizer, accum_steps=...))`, or "
                "`accumulate(model, ...)`, or leave the callback out."
            )
        for windows in self._windows():
            windows.begin_training(self.model)
        if self.detailed:
            self._observe()
        self._warn_of_moving(moving_layers(self.model))
        self._state = StateWatch(self.model)

    def _observe(self) -> None:
        """Have steps be observed, which are traced anew."""
        two_pass = getattr(getattr(self.model, "accumulation", None), "two_pass", False)
        if self.noise_scale and two_pass:
            raise ValueError(
                "`noise_scale=True` compares the gradients of micro-batches with that of "
                "the batch. Received a model with `two_pass=True`, whose loss may couple "
                "them, so that they tell nothing of noise: leave `noise_scale` out."
            )
        windows = list(self._windows())
        with self.model.distribute_strategy.scope():
            if self.check_numerics:
                self._layers = LayerWatch(self.model)
            for watched in windows:
                optimizer = watched.optimizer
                optimizer.observer = WindowObserver(self._layers)
                if optimizer.built:
                    optimizer.observer.build(len(trained_by(optimizer)))
            if not windows:
                observer = observe(self.model, self._layers)
                if self.model.built:
                    observer.log.build(len(self.model.trainable_weights))
        self.model.make_train_function(force=True)
        train = self.model.train_function
        self.model.train_function = _UnlessItFails(train, self._stop_observing)
        self._watch()

    def _stop_observing(self) -> None:
        if not self.detailed:
            return
        for windows in self._windows():
            windows.optimizer.observer = None
        stop_observing(self.model)
        if self._layers is not None:
            self._layers.stop()
        self.model.train_function = None

    def on_update_end(self, update: int, logs: dict[str, Any]) -> None:
        """Called after each update, with its number and what is logged of it.

        Does nothing: for subclasses. With several optimizers it is called once for a step
        in which any of them has updated.
        """

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Note where the updates of this epoch begin."""
        for watched in self._watched.values():
            watched.say_late()
        self._watch()
        self._in_epoch, self._batches = True, 0
        self._began = time.perf_counter()
        self._rows_before = rows_tracked(self.model)
        for watched in self._watched.values():
            watched.begin_epoch()
        for windows in self._windows():
            # Between epochs only: an epoch that an error ends leaves its window open.
            windows.optimizer.flushes_at_end = False

    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Find the optimizer that is to be used, which a callback may have changed."""
        self._watch_if_compiled()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the values of the last update to the logs."""
        self._watch_if_compiled(has_stepped=True)
        self._batches = batch + 1
        if self._state is not None:
            self._warn_of_moving(untold(self.model, self._state.moved(self.model)))
            self._state = None
        for watched in self._watched.values():
            # Only now is the size of a micro-batch known, and the optimizer built.
            if not watched.announced and watched.is_used():
                watched.announced = True
                self._announce(watched)
        logs = {} if logs is None else logs
        before = [watched.updates for watched in self._watched.values()]
        if not self._add_values(logs):
            return
        after = [watched.updates for watched in self._watched.values()]
        if after != before:
            self.on_update_end(max(after), logs)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Close the window before the validation that ends an epoch."""
        self._end_epoch()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Close the window, and add the values of the last update to the logs."""
        self._end_epoch()
        last = epoch == self.params.get("epochs", 0) - 1
        for windows in self._windows():
            windows.optimizer.flushes_at_end = self.tail == "flush_end"
            if self.tail == "flush_end" and last:
                windows.optimizer.flush()  # Here already, for the logs of the last epoch.
        for watched in self._watched.values():
            told = f"{watched.prefix}Epoch {epoch + 1} has made no update: "
            if skipped := watched.skipped_all(self.model, self._batches):
                logger.warning("%s%s", told, skipped)
            elif idle := watched.idle():
                # If training ends here without any update, that says more.
                watched.late.append(told + idle)
        self._add_values(logs, epoch_ends=True)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Close the window, or warn that it stays open."""
        self._stop_observing()
        for windows in self._windows():
            windows.optimizer.flushes_at_end = False
            if self.tail == "flush_end":
                windows.optimizer.flush()  # For what `fit` has not flushed.
            end_training(windows.optimizer, windows.prefix)
            if not windows.has_trained():
                continue
            windows.say_late()
            if left := number(windows.optimizer.micro_step):
                logger.warning(
                    "%s%d micro-batches are left over in an open window: no update has "
                    "used them. The next `fit` goes on with them; `tail='flush_end'` "
                    "updates with them.",
                    windows.prefix,
                    left,
                )

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Forget what layers gave in a validation."""
        if self._layers is not None:
            self._layers.clear()

    def _end_epoch(self) -> None:
        if not self._in_epoch:
            return
        self._in_epoch = False
        for windows in self._windows():
            left = windows.end_epoch()
            if self.tail == "flush_epoch":
                windows.optimizer.flush()
            elif self.tail == "drop" and left:
                windows.optimizer.reset()
                logger.warning(
                    "%s%d micro-batches at the end of the epoch dropped.",
                    windows.prefix,
                    left,
                )

    # -------------------------------------------------------- what it says and logs

    def _announce(self, watched: "_Windows | _Steps") -> None:
        replicas = self.model.distribute_strategy.num_replicas_in_sync
        rows, steps = self._rows(replicas), self.params.get("steps")
        updates = "?"
        if steps:
            windows = steps * watched.windows_per_step(self._batches)
            updates = f"{self._updates(windows):g}"
        said = watched.describe(rows, replicas, updates)
        logger.info("%s%s", watched.prefix, said)
        if logger.isEnabledFor(logging.INFO) or watched.name in self._shown:
            return
        self._shown.add(watched.name)
        if self.verbose:
            print(f"{watched.prefix}{said}", file=sys.stderr, flush=True)

    def _updates(self, windows: float) -> float:
        """How many updates an epoch of so many windows makes."""
        whole = {"flush_epoch": math.ceil, "drop": math.floor}
        return whole[self.tail](windows) if self.tail in whole else windows

    def _rows(self, replicas: int) -> int:
        """The samples of a step on one replica, 0 where they are not known.

        Keras's own step, and this package's, count them for the mean of the loss. What a
        `train_step` of the user's feeds into that metric may count steps.
        """
        if not has_known_train_step(self.model):
            return 0
        seen = rows_tracked(self.model) - self._rows_before
        return round(seen / self._batches / replicas)

    def _warn_of_moving(self, layers: list[keras.layers.Layer]) -> None:
        if layers:
            are_told(self.model, layers)
            logger.warning("%s", describe_moving(layers))

    def _add_values(self, logs: dict[str, Any] | None, epoch_ends: bool = False) -> bool:
        """Add what is to be logged; whether any of it may have changed."""
        if logs is None:
            return False
        watched = self._watched.values()
        changed = [each.has_moved() for each in watched]
        if any(changed) or epoch_ends:
            self._values = self._read_values()
            self._explain_infinities()
        logs.update(self._values)
        return any(changed)

    def _explain_infinities(self) -> None:
        replicas = self.model.distribute_strategy.num_replicas_in_sync
        for watched in self._watched.values():
            for line in watched.describe_infinity(replicas, self._layers):
                logger.warning("%s%s", watched.prefix, line)

    def _read_values(self) -> dict[str, float]:
        found: dict[str, float] = {}
        several = len(self._watched) > 1
        rows = self._rows(1) if self.noise_scale and self._batches else 0
        for watched in self._watched.values():
            values = watched.values() | watched.observed(rows, self.noise_scale)
            watched.updates = int(values["updates"])
            for key, value in values.items():
                found[f"{watched.name}_{key}" if several else key] = value
        if not self.detailed:
            return found
        if has_known_train_step(self.model):
            seen = rows_tracked(self.model) - self._rows_before
            found["samples_per_second"] = seen / (time.perf_counter() - self._began)
        if (peak := peak_bytes()) is not None:
            found["peak_bytes"] = peak
        return found


class _UnlessItFails:
    """A `train_function` after whose failure nothing is observed.

    Keras tells callbacks of none. Callbacks find in it what they look for in the function.

    Args:
        train: the function.
        stop: what is called then.
    """

    def __init__(self, train: Callable[[Any], Any], stop: Callable[[], None]) -> None:
        self._train, self._stop = train, stop

    def __call__(self, iterator: Any) -> Any:
        try:
            return self._train(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            raise  # The data have ended.
        except BaseException:
            self._stop()
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._train, name)


class _Watched:
    """What the monitor knows of an optimizer.

    Attributes:
        name: by which its values are logged, among several.
        prefix: of what is said about it, among several.
        announced: whether its window has been described.
        late: what is said of an epoch when the next one begins.
        updates: those made when values were last read.
        seen: what the log held then.
        unit: what makes an update.
    """

    unit = "window"

    def __init__(self, name: str) -> None:
        self.name, self.prefix, self.announced = name, "", False
        self.updates = 0
        self.late: list[str] = []
        self.seen = UpdateLog().read()
        self._told = self.seen
        self._moved: tuple[int, ...] = ()

    @property
    def log(self) -> UpdateLog | None:
        """What is noted of the updates, if they are observed."""
        raise NotImplementedError

    def names(self) -> list[str]:
        """The names of the trained variables, as the log counts them."""
        raise NotImplementedError

    def counters(self) -> tuple[int, ...]:
        """Numbers of which one moves whenever there is anything new to log."""
        raise NotImplementedError

    def has_moved(self) -> bool:
        """Whether there may be something new to log since the last call."""
        before, self._moved = self._moved, self.counters()
        return before != self._moved

    def observed(self, rows: float, noise_scale: bool) -> dict[str, float]:
        """What is to be logged of what the log holds, with `rows` samples a step."""
        if self.log is None:
            return {}
        self.seen = seen = self.log.read()
        values = {
            "gradient_norm": seen.norm,
            "clipped_gradient_norm": seen.clipped_norm,
            "clipped_share": seen.clipped / max(seen.updates, 1.0),
        }
        if noise_scale:
            values["noise_scale"] = seen.noise_scale * rows if rows else math.nan
        return values

    def describe_infinity(self, replicas: int, layers: LayerWatch | None) -> list[str]:
        """What to say of windows, or micro-batches, skipped since the last call."""
        told, seen = self._told, self.seen
        if self.log is None or seen.infinities == told.infinities:
            return []
        self._told = seen
        names = self.names()
        bad = [names[i] for i in self.log.bad()]
        shown = ", ".join(bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
        skipped = seen.skipped > told.skipped
        what = f"A {self.unit} was skipped" if skipped else "A micro-batch was left out"
        where = f" on replica {seen.bad_replica + 1:g}" if replicas > 1 else ""
        line = (
            f"{what} after update {self.updates}: in micro-batch {seen.bad_step:g} of the "
            f"{self.unit}{where}, the gradient of {shown} was not finite."
        )
        if layers is not None:
            said = layers.said[round(seen.bad_layer)]
            line += f" First layer whose output was not finite: {said}."
        return [line]

    def say_late(self) -> None:
        for late in self.late:
            logger.warning("%s", late)
        self.late = []


class _Windows(_Watched):
    """An `AccumOptimizer`; `left` micro-batches were in its window after an epoch."""

    def __init__(self, name: str, optimizer: AccumOptimizer) -> None:
        super().__init__(name)
        self.optimizer = optimizer
        self.left = 0
        self._skips = True
        self.updates = number(optimizer.iterations)
        # Updates, skipped windows and micro-steps before the epoch, and updates before
        # training; -1 where that is not known, as updates were made before it watched.
        self._before = (-1, 0, 0)
        self._updates_before = -1

    @property
    def log(self) -> UpdateLog | None:
        observer = self.optimizer.observer
        return None if observer is None else observer.log

    def names(self) -> list[str]:
        return [name_of(v) for v in trained_by(self.optimizer)]

    def begin_training(self, model: keras.Model) -> None:
        begin_training(model, self.optimizer)
        self._updates_before = number(self.optimizer.iterations)

    def counters(self) -> tuple[int, ...]:
        updates = number(self.optimizer.iterations)
        if not self._moved or updates != self._moved[0]:
            self._skips = self.optimizer.scales_dynamically or (
                self.optimizer.on_nonfinite.startswith("skip")
            )
        if not self._skips:
            return (updates,)
        return (updates, number(self.optimizer.skipped_windows))

    def begin_epoch(self) -> None:
        self._before = self._counters()

    def end_epoch(self) -> int:
        self.left = number(self.optimizer.micro_step)
        return self.left

    def is_used(self) -> bool:
        return self.optimizer.window_length > 0

    def has_trained(self) -> bool:
        """Whether there has been an update since the beginning of training."""
        return number(self.optimizer.iterations) > self._updates_before

    def skipped_all(self, model: keras.Model, batches: int) -> str:
        """What to say if all windows of the epoch were skipped."""
        updates, skipped, _ = self._since()
        if updates or not skipped:
            return ""
        if self.optimizer.training is not None:  # Told once, not at the end again.
            self.optimizer.training.skipped = number(self.optimizer.skipped_windows)
        why = describe_skipping(model, self.optimizer)
        return f"all {skipped} windows were skipped. {why}"

    def idle(self) -> str:
        """What to say if no window of the epoch was filled."""
        updates, skipped, _ = self._since()
        if updates or skipped or self.left == self._before[2]:
            return ""
        return f"it has fewer micro-batches than a window ({self.left} held)."

    def windows_per_step(self, batches: int) -> float:
        """The windows that a step fills, by the first ones of the epoch."""
        length = self.optimizer.window_length
        updates, skipped, held = self._since()
        closed = updates + skipped
        if self._before[0] < 0 or (closed and callable(self.optimizer.accum_steps)):
            return 1 / length
        return (closed + held / length) / batches

    def describe(self, rows: int, replicas: int, updates: str) -> str:
        length = self.optimizer.window_length
        return (
            f"{rows or '?'} samples x {length} accum_steps x {replicas} replicas = "
            f"effective batch {rows * length * replicas or '?'}; {updates} updates per "
            f"epoch; accumulators: {self.optimizer.accumulator_bytes / 2**20:.1f} MiB"
        )

    def values(self) -> dict[str, float]:
        optimizer = self.optimizer
        values: dict[str, float] = {
            "updates": number(optimizer.iterations),
            "gradient_norm": number(optimizer.last_gradient_norm),
        }
        if optimizer.scales_dynamically or optimizer.on_nonfinite.startswith("skip"):
            values["skipped_windows"] = number(optimizer.skipped_windows)
        if optimizer.scales_dynamically:
            values["loss_scale"] = number(optimizer.dynamic_scale)
        return values

    def _counters(self) -> tuple[int, int, int]:
        optimizer = self.optimizer
        counters = (optimizer.iterations, optimizer.skipped_windows, optimizer.micro_step)
        updates, skipped, held = map(number, counters)
        return updates, skipped, held

    def _since(self) -> tuple[int, int, int]:
        now = zip(self._counters(), self._before)
        updates, skipped, held = (after - before for after, before in now)
        return updates, skipped, held


class _Steps(_Watched):
    """The optimizer of a model that accumulates in its step."""

    unit = "step"

    def __init__(self, model: keras.Model, accumulation: Any) -> None:
        super().__init__("optimizer")
        self.optimizer, self.accumulation = model.optimizer, accumulation
        self._model, self._updates_before, self._steps = model, -1, 0

    @property
    def log(self) -> UpdateLog | None:
        observer = observer_of(self._model)
        return None if observer is None else observer.log

    def names(self) -> list[str]:
        return [name_of(v) for v in self._model.trainable_weights]

    def observed(self, rows: float, noise_scale: bool) -> dict[str, float]:
        """As for any; and the steps that an overflow has skipped."""
        values = super().observed(rows, noise_scale)
        if values and isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer):
            values["skipped_windows"] = self.seen.skipped
        return values

    def counters(self) -> tuple[int, ...]:
        self._steps += 1  # Each step may log something.
        return (self._steps,)

    def begin_epoch(self) -> None:
        self._updates_before = number(self.optimizer.iterations)

    def skipped_all(self, model: keras.Model, batches: int) -> str:
        """What to say if all steps of the epoch were skipped."""
        scale = self.values().get("loss_scale")
        moved = number(self.optimizer.iterations) != self._updates_before
        if scale is None or moved or not batches:
            return ""
        return f"all {batches} steps were skipped. {describe_overflow(model, scale)}"

    def idle(self) -> str:
        return ""

    def is_used(self) -> bool:
        return True

    def windows_per_step(self, batches: int) -> float:
        return 1

    def describe(self, rows: int, replicas: int, updates: str) -> str:
        size, steps = self.accumulation.micro_batch_size, self.accumulation.accum_steps
        parts = f"micro-batches of {size}" if steps is None else f"{steps} micro-batches"
        return (
            f"{rows or '?'} samples x {replicas} replicas = effective batch "
            f"{rows * replicas or '?'}, in {parts}; {updates} updates per epoch, one a "
            "step: no window stays open"
        )

    def values(self) -> dict[str, float]:
        values: dict[str, float] = {"updates": number(self.optimizer.iterations)}
        scaled = isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer)
        if scaled and self.optimizer.built:
            values["loss_scale"] = number(self.optimizer.dynamic_scale)
        return values


def _watchable(model: keras.Model) -> dict[int, _Windows | _Steps]:
    """What there is to watch in the training of `model`, by the `id` of an optimizer."""
    found = find_optimizers(model)
    if found:
        return {id(o): _Windows(name, o) for name, o in found.items()}
    accumulation = getattr(model, "accumulation", None)
    if accumulation is None or not has_known_train_step(model):
        return {}
    return {id(model.optimizer): _Steps(model, accumulation)}
