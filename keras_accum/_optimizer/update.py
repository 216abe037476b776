"""The end of a window, in nine steps; their numbers stand where they are done.

1. sum the weights over replicas; 2. reduce the gradients, once; 3. undo the loss scale;
4. judge finiteness on the result; 5. divide by the weight; 6. take the norm; 7. clip, once;
8. update: weight decay, step, averages, constraints, `iterations`; 9. clear by assignment.

Two are done elsewhere than their number says, with the same result: 1 and 2 are one
reduction, 3 and 5 one division, after 4 has judged the sums and 6 has taken their norm.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from .._backend import replica
from .._backend.control import run_either
from .._backend.private.optimizers import trained_by
from .._core.clipping import clip_adaptively
from .._core.gradients import all_finite, global_norm
from .._core.variables import read
from .accumulator import Reduced
from .averages import apply_reduced, overwrite_by_averages
from .observer import Seen, norm_after_clipping


class EndOfWindow:
    """Updates with what a window holds, for all replicas together.

    Args:
        optimizer: the `AccumOptimizer` that holds the window.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._window = optimizer._accumulator
        self._variables = trained_by(optimizer)

    def update(self, with_gradient: Sequence[int]) -> None:
        """Make the update, or skip it, and begin the next window.

        Args:
            with_gradient: the variables whose gradient the last micro-batch had.
        """
        self._for_those_with_gradient(with_gradient, self._update_or_skip)
        replica.in_replica(self._window.clear, True)  # 9
        self._window.restart()

    def _update_or_skip(self, indices: Sequence[int]) -> None:
        optimizer = self._optimizer
        reduced = replica.in_replica(self._reduce, indices)  # 1, 2
        scaled = optimizer.scales_dynamically
        if not (scaled or optimizer.on_nonfinite.startswith("skip")):
            self._update_each(indices, reduced)
            return
        usable = replica.local_result(replica.in_replica(_usable, reduced))  # 4
        if optimizer.observer is not None:
            replica.in_replica(self._note_infinity, reduced)
        run_either(
            usable,
            lambda: self._update_each(indices, reduced),
            lambda: optimizer.skipped_windows.assign_add(1),
        )
        if scaled:
            self._adapt_scale(usable)
        else:
            dropped = replica.local_result(
                replica.in_replica(lambda r: r.dropped, reduced)
            )
            optimizer.skipped_micro_batches.assign_add(tf.cast(dropped, "int64"))

    def _reduce(self, indices: Sequence[int]) -> Reduced:
        observer = self._optimizer.observer
        if observer is None:
            return self._window.reduce(indices)
        observer.build(len(self._variables))
        return self._window.reduce(indices, observer.to_reduce())

    def _note_infinity(self, reduced: Reduced) -> None:
        log = self._optimizer.observer.log
        log.note_infinity(~_usable(reduced), Seen(*reduced.further))

    def _update_each(self, indices: Sequence[int], reduced: Any) -> None:
        replica.in_replica(self._step, indices, reduced)
        overwrite_by_averages(self._optimizer.inner_optimizer)

    def _step(self, indices: Sequence[int], reduced: Reduced) -> None:
        """Make one step of the inner optimizer with the mean gradient of the window."""
        window, optimizer, sums = self._window, self._optimizer, reduced.sums
        variables = [self._variables[i] for i in indices]
        replaced = [window.overwrites[i] for i in indices]
        divisor = self._divisor(reduced.total)  # 3 and 5, in one division
        norm = global_norm([s for s, as_is in zip(sums, replaced) if not as_is])
        norm = tf.math.divide_no_nan(norm, tf.cast(divisor, norm.dtype))
        optimizer.last_gradient_norm.assign(norm)  # 6
        means = window.divide(indices, sums, divisor)
        grads = [tf.cast(mean, v.dtype) for mean, v in zip(means, variables)]
        if (factor := optimizer.adaptive_clip_factor) is not None:  # 7
            weights = [tf.convert_to_tensor(v) for v in variables]
            clipped = clip_adaptively(grads, weights, factor)
            grads = [g if r else c for g, c, r in zip(grads, clipped, replaced)]
        if optimizer.observer is not None:
            gradients = [i for i, as_is in enumerate(replaced) if not as_is]
            self._note_update(
                [indices[i] for i in gradients],
                [means[i] for i in gradients],
                [grads[i] for i in gradients],
                reduced,
            )
        if hasattr(optimizer.inner_optimizer, "optimizers"):
            # A MultiOptimizer takes the gradients of all variables, some of them None.
            held = dict(zip(indices, grads))
            variables = self._variables
            grads = [held.get(i) for i in range(len(variables))]
        apply_reduced(optimizer.inner_optimizer, grads, variables)  # 7, its own, and 8

    def _note_update(
        self,
        indices: Sequence[int],
        means: Sequence[tf.Tensor],
        grads: Sequence[tf.Tensor],
        reduced: Reduced,
    ) -> None:
        """Note the norms of an update: of the means, and of what clipping leaves."""
        optimizer, observer = self._optimizer, self._optimizer.observer
        variables = [self._variables[i] for i in indices]
        seen = Seen(*reduced.further)
        # A sum has the parts 1 / k of its micro-batches, and k times their mean.
        total = tf.cast(reduced.total, "float32")
        factor = 1.0 if self._window.weighted else tf.square(total)
        norm = read(optimizer.last_gradient_norm)
        dense = [m for i, m in zip(indices, means) if i in observer.dense]
        known = None if optimizer.adaptive_clip_factor is not None else norm
        observer.log.note(
            True,
            norm=norm,
            clipped_norm=norm_after_clipping(
                optimizer.inner_optimizer, grads, variables, known
            ),
            squares=tf.math.divide_no_nan(seen.squares * factor, total),
            part=tf.math.divide_no_nan(seen.part, total),
            count=seen.count,
            large=tf.square(norm if len(dense) == len(means) else global_norm(dense)),
            steps=tf.cast(self._window.micro_step.value, "float32"),
        )

    def _divisor(self, total: tf.Tensor) -> tf.Tensor:
        """What the window's sum is divided by: its weight, times the loss scale."""
        optimizer = self._optimizer
        divisor = tf.ones((), total.dtype) if optimizer.reduction == "sum" else total
        if (scale := optimizer._scale()) is None:
            return divisor
        return divisor * tf.cast(tf.convert_to_tensor(scale), divisor.dtype)

    def _adapt_scale(self, finite: tf.Tensor) -> None:
        """Halve the scale after an overflow; double it after enough updates without."""
        optimizer = self._optimizer
        updates = tf.convert_to_tensor(optimizer.step_counter.value) + 1
        grown = tf.greater_equal(updates, optimizer.dynamic_growth_steps)
        factor = tf.where(finite, tf.where(grown, 2.0, 1.0), 0.5)
        restart = tf.logical_or(grown, tf.logical_not(finite))
        optimizer.dynamic_scale.assign(optimizer.dynamic_scale.value * factor)
        optimizer.step_counter.assign(tf.where(restart, tf.zeros_like(updates), updates))

    def _for_those_with_gradient(
        self, with_gradient: Sequence[int], update: Callable[[list[int]], None]
    ) -> None:
        """Call `update` on the indices of the variables that had a gradient.

        A variable without any gradient in the window is left alone, as Keras leaves it:
        no decay, no momentum. So is one that was frozen meanwhile. What is known when
        tracing are the gradients of the last micro-batch; where others had one before
        it, all are updated.
        """
        every = [i for i, v in enumerate(self._variables) if _is_trained(v)]
        given = [i for i in every if i in set(with_gradient)]
        others = [i for i in every if i not in set(given)]
        if not others:
            update(given)
            return
        had_gradient = tf.convert_to_tensor(self._window.gradient_count.value) > 0
        if tf.executing_eagerly():
            found = set(np.flatnonzero(had_gradient.numpy()).tolist())
            self._optimizer.warn_of_missing([i for i in every if i not in found])
            update([i for i in every if i in found])
            return
        run_either(
            tf.reduce_any(tf.gather(had_gradient, others)),
            lambda: update(every),
            lambda: update(given) if given else None,
        )


def _is_trained(variable: keras.Variable) -> bool:
    return getattr(variable, "trainable", True)


def _usable(reduced: Reduced) -> tf.Tensor:
    """Whether the reduced window may be applied: finite, and not dropped whole."""
    emptied = tf.logical_and(
        tf.equal(reduced.total, 0.0), tf.greater(reduced.dropped, 0.0)
    )
    return tf.logical_and(all_finite(reduced.sums), tf.logical_not(emptied))
