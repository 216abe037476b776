"""Run a function, keep nothing that it computed, and run it again for its gradient.

This is activation checkpointing (Chen et al., 2016, "Training Deep Nets with Sublinear
Memory Cost"). Between the two passes only arguments and results stay in memory. The
second pass must compute what the first one did. It therefore gets what the first one had:
the state that it read (seeds, moving statistics), the masks of its dropout, the dtype
that weights are cast to, and the arguments that Keras passes down. State moves once, in
the first pass. Losses that layers add are results like the others.

`tf.recompute_grad`, which is what `keras.remat` calls, cannot do this. It runs the same
function twice, so dropout draws a second mask and moving statistics move twice. In a
graph it refuses keyword and boolean arguments. Its second pass waits for the gradient of
the first result only. Hence `tf.custom_gradient`, which it is made of.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from .._backend.identity import unique
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
from .barrier import release_together
from .checks import (
    CacheCheck,
    OperationCheck,
    check_assigned,
    check_call_is_no_function,
    check_captured,
    check_functions_are_traced_again,
    check_same,
)
from .dropout import dropout_masks_kept
from .nest import Nest
from .passes import FirstPass, Pass


class Block:
    """A function that is computed again in the backward pass.

    Attributes:
        function: the function; a block takes its arguments and returns its results.
        name: str, for errors.
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
        """The layers that the function calls, at any depth."""
        return unique(layer for root in self._roots for layer in flatten_layers(root))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not _is_differentiated(args, kwargs):
            return self.function(*args, **kwargs)
        if self._first_call:
            check_call_is_no_function(self)
            if not all(layer.built for layer in self.layers):
                build_by_call(self.function, *args, **kwargs)
            if self._verify:
                check_same(self, args, kwargs)
            if tf.executing_eagerly():
                OperationCheck(self).check_eagerly(*Nest((args, kwargs)).copied())
        outputs = _TwoPasses(self, args, kwargs).run()
        self._first_call = False
        return outputs


def _is_differentiated(args: Any, kwargs: Any) -> bool:
    """Whether somebody may ask for a gradient of this call.

    A function can be traced first and differentiated later. No tape is visible then, but
    the argument `training` is.
    """
    training = kwargs.get("training")
    training = inherited("training") if training is None else training
    return (
        # A tensor may be true.
        (not (training is None or training is False) or could_record())
        and not is_symbolic()
        # The first pass of an outer block keeps nothing anyway.
        and not isinstance(current_scope(), FirstPass)
    )


class _Outcome(NamedTuple):
    """The outcome of a pass.

    Attributes:
        outputs: what the function returned, taken apart.
        losses: the losses that layers added, in order.
        owners: the layer that added each loss.
        scope: the pass.
    """

    outputs: Nest
    losses: list[tf.Tensor]
    owners: list[keras.layers.Layer]
    scope: Any

    @property
    def results(self) -> list[tf.Tensor]:
        """All tensors that have a gradient."""
        return [*self.outputs.differentiable, *self.losses]


class _TwoPasses:
    """One call of a block."""

    def __init__(self, block: Block, args: Any, kwargs: Any) -> None:
        self.block = block
        self.arguments = Nest((args, kwargs))
        self.context = save_context()
        self.weights = _weights_of_scope(block.layers)

    def run(self) -> Any:
        """The outputs. The second pass runs when somebody asks for their gradient."""

        @tf.custom_gradient
        def call(*inputs: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
            first = self.first = self._first_pass(inputs)

            def gradient(*upstream: Any, variables: Any = ()) -> Any:
                found = self._gradients(inputs, first, upstream, variables)
                inner, outer = found[: len(inputs)], found[len(inputs) :]
                return (inner, outer) if variables else inner

            # TensorFlow requires a result. Nobody asks for the gradient of this one.
            return first.results or [tf.zeros(())], gradient

        weights = [current_scope().get_current_value(v) for v in self.weights]
        results = call(*self.arguments.differentiable, *weights)
        outputs, losses, owners, scope = self.first
        for variable in scope.assigned.values():
            variable.assign(scope.get_current_value(variable))
        count = len(outputs.differentiable)
        for layer, loss, before in zip(owners, results[count:], losses):
            if is_sum(before):
                mark_as_sum(loss)
            # Some models override `add_loss` to raise.
            keras.layers.Layer.add_loss(layer, loss)
        return outputs.pack(results[:count], outputs.nondifferentiable)

    def _first_pass(self, inputs: Sequence[tf.Tensor]) -> _Outcome:
        with unrecorded():
            inputs = [tf.identity(tensor) for tensor in inputs]
        caches, operations = CacheCheck(self.block), OperationCheck(self.block)
        arguments = self._arguments(inputs, self.arguments.nondifferentiable)
        outcome = self._pass(FirstPass(self._values(inputs), inputs), arguments)
        self.arguments.drop_masks_of(arguments)
        caches.check()
        operations.check(outcome.scope)
        check_captured(self.block, outcome.results)
        check_assigned(self.block, outcome.scope)
        return outcome

    def _gradients(
        self,
        inputs: Sequence[tf.Tensor],
        first: _Outcome,
        upstream: Sequence[Any],
        variables: Sequence[tf.Variable],
    ) -> list[Any]:
        """Gradients for `inputs` and `variables`, given those for the results."""
        upstream = [tf.convert_to_tensor(gradient) for gradient in upstream]
        others = self.arguments.nondifferentiable
        scope, inputs, others = first.scope.again(inputs, others, upstream)
        scope.state_mapping.update(self._values(inputs))
        sources = [*inputs, *variables]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sources)
            with self.context():
                second = self._pass(scope, self._arguments(inputs, others))
        check_functions_are_traced_again(self.block, first.scope, scope)
        found = tape.gradient(second.results, sources, output_gradients=upstream)
        return release_together(found)

    def _values(self, inputs: Sequence[tf.Tensor]) -> dict[int, tf.Tensor]:
        """The values of the weights that are tensors, by id."""
        values = inputs[len(self.arguments.differentiable) :]
        return {id(v): value for v, value in zip(self.weights, values)}

    def _arguments(self, inputs: Sequence[tf.Tensor], others: Sequence[tf.Tensor]) -> Any:
        """The arguments of the call, with these tensors in them."""
        return self.arguments.pack(inputs[: len(self.arguments.differentiable)], others)

    def _pass(self, scope: Pass, arguments: Any) -> _Outcome:
        args, kwargs = arguments
        with dropout_masks_kept, scope:
            outputs = self.block.function(*args, **kwargs)
        layers = self.block.layers
        owners = [take_loss(layers, loss) for loss in scope.losses]
        return _Outcome(Nest(outputs), scope.losses, owners, scope)


def _weights_of_scope(layers: Sequence[keras.layers.Layer]) -> list[keras.Variable]:
    """The weights that are tensors in a `StatelessScope` of the caller's."""
    scope = current_scope()
    if scope is None:
        return []
    weights = unique(v for layer in layers for v in layer.trainable_variables)
    return [v for v in weights if scope.get_current_value(v) is not None]
