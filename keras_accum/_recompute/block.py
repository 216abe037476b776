"""Run a function now, forget what it computed, and run it again for its gradient.

Activation checkpointing (Chen et al., 2016, "Training Deep Nets with Sublinear Memory
Cost"): between the passes only arguments and results are kept. The second pass has to
compute what the first one did, so it gets what the first one had: the state it read
(seeds, moving statistics), masks, the compute type, the arguments that Keras passes down,
and what dropout dropped. State moves once, by the first pass; losses that layers add are
results like the others.

The bare mechanism is `tf.recompute_grad`, which is what `keras.remat` calls. It cannot
carry this: it runs the same function twice, so that dropout draws a second mask and
moving statistics move twice; in a graph it refuses keyword and boolean arguments; and it
ties the second pass to the first result's gradient only. Hence `tf.custom_gradient`, the
level below it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from .._backend.private.layers import (
    build_by_call,
    current_scope,
    flatten_layers,
    inherited,
    is_symbolic,
    save_context,
)
from .._backend.private.losses import is_sum, mark_as_sum, take_loss
from .._backend.private.tapes import could_record, unrecorded
from .barrier import optimization_barrier, release_together
from .checks import (
    CacheCheck,
    OperationCheck,
    check_assigned,
    check_captured,
    check_same,
    check_traced,
    check_traced_anew,
)
from .dropout import dropout_masks_kept
from .nest import Nest
from .passes import FirstPass, Pass, SecondPass


class Block:
    """A function whose intermediate results are not kept, but computed again.

    Attributes:
        function: what it calls, with the same arguments.
        name: what errors call it.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        layers: Sequence[keras.layers.Layer],
        name: str,
        *,
        verify: bool = False,
    ) -> None:
        self.function, self.name = function, name
        self._roots = layers
        self._verify, self._first_call = verify, True
        self.__wrapped__ = function  # For `inspect.signature`.

    @property
    def layers(self) -> list[keras.layers.Layer]:
        """The layers in it, at any depth."""
        found = [layer for root in self._roots for layer in [root, *flatten_layers(root)]]
        return list({id(layer): layer for layer in found}.values())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not _is_differentiated(args, kwargs):
            return self.function(*args, **kwargs)
        if self._first_call:
            check_traced(self)
            if not all(layer.built for layer in self.layers):
                build_by_call(self.function, *args, **kwargs)
            if self._verify:
                check_same(self, args, kwargs)
            if tf.executing_eagerly():
                OperationCheck(self).check_eagerly(*Nest((args, kwargs)).copied())
        result = _Recomputed(self, args, kwargs).call()
        self._first_call = False
        return result


def _is_differentiated(args: Any, kwargs: Any) -> bool:
    """Whether anybody may ask for a gradient, of a call that computes something.

    A function may be traced now and differentiated later: no tape is there to be seen,
    but `training` is.
    """
    training = kwargs.get("training")
    training = inherited("training") if training is None else training
    return (
        # Where it is a tensor, it may be true.
        (not (training is None or training is False) or could_record())
        and not is_symbolic()
        # The first pass of a block around this one keeps nothing anyway.
        and not isinstance(current_scope(), FirstPass)
    )


class _Outcome(NamedTuple):
    """What a pass came to.

    Attributes:
        outputs: what the function returned, taken apart.
        losses: what its layers added, in order.
        owners: the layer that added each.
        scope: the pass.
    """

    outputs: Nest
    losses: list[tf.Tensor]
    owners: list[keras.layers.Layer]
    scope: Any

    @property
    def results(self) -> list[tf.Tensor]:
        """Everything that has a gradient."""
        return [*self.outputs.differentiable, *self.losses]


class _Recomputed:
    """One call of a block."""

    def __init__(self, block: Block, args: Any, kwargs: Any) -> None:
        self.block = block
        self.arguments = Nest((args, kwargs))
        self.context = save_context()
        # In somebody's `StatelessScope` weights are tensors, to be differentiated by.
        self.weights = _mapped_weights(block.layers)
        weights = [current_scope().get_current_value(v) for v in self.weights]
        self.inputs = [*self.arguments.differentiable, *weights]

    def call(self) -> Any:
        """The outputs; the state has moved, and losses are added."""
        results = self._differentiable()(*self.inputs)
        outcome = self.outcome
        for variable in outcome.scope.assigned.values():
            variable.assign(outcome.scope.get_current_value(variable))
        count = len(outcome.outputs.differentiable)
        for layer, loss, before in zip(outcome.owners, results[count:], outcome.losses):
            if is_sum(before):
                mark_as_sum(loss)
            # Some models have an `add_loss` that refuses.
            keras.layers.Layer.add_loss(layer, loss)
        return outcome.outputs.pack(results[:count], outcome.outputs.nondifferentiable)

    def _differentiable(self) -> Callable[..., list[tf.Tensor]]:
        @tf.custom_gradient
        def call(*inputs: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
            outcome = self._first(inputs)
            self.outcome = outcome

            def gradient(*upstream: Any, variables: Any = None) -> Any:
                dense = [tf.convert_to_tensor(g) for g in upstream]
                found = self._second(inputs, outcome, dense, list(variables or []))
                inner, outer = found[: len(inputs)], found[len(inputs) :]
                return (inner, outer) if variables else inner

            # TensorFlow wants one at least; of this one nobody asks for the gradient.
            return outcome.results or [tf.zeros(())], gradient

        return call

    def _first(self, inputs: Sequence[tf.Tensor]) -> _Outcome:
        with unrecorded():
            inputs = [tf.identity(tensor) for tensor in inputs]
        others = self.arguments.nondifferentiable
        caches, operations = CacheCheck(self.block), OperationCheck(self.block)
        arguments = self._pack(inputs, others)
        outcome = self._run(FirstPass(self._mapping(inputs), inputs), arguments)
        self.arguments.drop_masks_of(arguments)
        caches.check()
        operations.check(outcome.scope)
        check_captured(self.block, outcome.results)
        check_assigned(self.block, outcome.scope)
        return outcome

    def _second(
        self,
        inputs: Sequence[tf.Tensor],
        outcome: _Outcome,
        upstream: list[tf.Tensor],
        variables: list[tf.Variable],
    ) -> list[Any]:
        """Gradients for the inputs and the variables, from those for the results."""
        first = outcome.scope
        moved = [i for i in first.state if i in first.assigned]
        tied = iter(
            optimization_barrier(
                [
                    *inputs,
                    *self.arguments.nondifferentiable,
                    *[first.state[i] for i in moved],
                    *[tensor for _, outputs in first.kept for tensor in outputs],
                    *first.drawn,
                ],
                upstream,
            )
        )
        inputs = _take(tied, inputs)
        others = _take(tied, self.arguments.nondifferentiable)
        state = {**first.state, **dict(zip(moved, _take(tied, moved)))}
        kept = [(key, _take(tied, outputs)) for key, outputs in first.kept]
        drawn = _take(tied, first.drawn)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([*inputs, *variables])
            scope = SecondPass({**state, **self._mapping(inputs)}, kept, drawn)
            with self.context():
                results = self._run(scope, self._pack(inputs, others)).results
        check_traced_anew(self.block, first, scope)
        sources = [*inputs, *variables]
        return release_together(
            tape.gradient(results, sources, output_gradients=upstream)
        )

    def _mapping(self, inputs: Sequence[tf.Tensor]) -> dict[int, tf.Tensor]:
        weights = inputs[len(self.arguments.differentiable) :]
        return {id(v): weight for v, weight in zip(self.weights, weights)}

    def _pack(self, inputs: Sequence[tf.Tensor], others: Sequence[tf.Tensor]) -> Any:
        """The arguments of the call, with these tensors in them."""
        return self.arguments.pack(inputs[: len(self.arguments.differentiable)], others)

    def _run(self, scope: Pass, arguments: Any) -> _Outcome:
        args, kwargs = arguments
        with dropout_masks_kept, scope:
            outputs = self.block.function(*args, **kwargs)
        layers = self.block.layers
        owners = [take_loss(layers, loss) for loss in scope.losses]
        return _Outcome(Nest(outputs), scope.losses, owners, scope)


def _take(tensors: Iterator[tf.Tensor], like: Sequence[Any]) -> list[tf.Tensor]:
    return [next(tensors) for _ in like]


def _mapped_weights(layers: Sequence[keras.layers.Layer]) -> list[keras.Variable]:
    """The weights that a `StatelessScope` around gives values for."""
    scope = current_scope()
    if scope is None:
        return []
    weights = {id(v): v for layer in layers for v in layer.trainable_variables}
    return [v for v in weights.values() if scope.get_current_value(v) is not None]
