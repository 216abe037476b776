"""The two passes of a recomputed call, as scopes that give variables their values.

The first pass notes what it reads, the second pass reads what was noted. Neither changes
a variable.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from .._backend.private.functions import is_in_function
from .._backend.private.layers import current_scope, is_watched, read
from .._backend.private.tapes import unrecorded, value_with_gradient_of
from .barrier import optimization_barrier
from .nest import Nest

# The calls whose outputs are kept, in order, each with its output tensors.
Kept: TypeAlias = "list[tuple[Keep, list[tf.Tensor]]]"


class Pass(keras.StatelessScope):
    """A scope in which variables have values of their own, and assignments stay inside.

    Args:
        values: the values of some variables, by the id of the variable.

    Attributes:
        assigned: the variables that were assigned, by id.
        read_in_functions: the variables that a `tf.function` read while TensorFlow traced
            it, by id.
    """

    def __init__(self, values: dict[int, tf.Tensor]) -> None:
        super().__init__(collect_losses=True)
        self.state_mapping.update(values)
        self.assigned: dict[int, keras.Variable] = {}
        self.read_in_functions: dict[int, keras.Variable] = {}
        self._graph = tf.compat.v1.get_default_graph()
        self._eager = tf.executing_eagerly()

    def is_here(self) -> bool:
        """Whether a tensor that is made now can be used in the pass: not in a loop."""
        return tf.compat.v1.get_default_graph() is self._graph

    def owns(self, tensor: tf.Tensor) -> bool:
        """Whether `tensor` can be used in the pass: it was not made in a loop."""
        return not tf.is_symbolic_tensor(tensor) or tensor.graph is self._graph

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        """The value of `variable` in this pass; None if it is the variable's own.

        The tensor is made outside of the loop or function that reads it. A variable that
        a loop reads is an argument of the loop, so a tape that watches the variable would
        differentiate the loop.
        """
        if self.is_here():
            return self._value_of(variable)
        if is_in_function(tf.compat.v1.get_default_graph(), self._graph):
            self.note_function(variable)
        with tf.init_scope() if self._eager else self._graph.as_default():
            return self._value_of(variable)

    def note_function(self, variable: keras.Variable) -> None:
        """Note that a `tf.function` reads `variable` while TensorFlow traces it."""
        self.read_in_functions[id(variable)] = variable

    def _value_of(self, variable: keras.Variable) -> tf.Tensor | None:
        return super().get_current_value(variable)

    def draw(self, draw: Callable[[], tf.Tensor], skip: Callable[[], Any]) -> tf.Tensor:
        """The random tensor of this place in the block.

        Args:
            draw: draws it.
            skip: moves the seed as `draw` does.
        """
        raise NotImplementedError

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """Note that a variable was assigned."""
        variable, _ = update
        self.assigned[id(variable)] = variable
        super().add_update(update)


class FirstPass(Pass):
    """Reads variables unseen by any tape, and notes their values.

    Args:
        values: as for `Pass`.
        after: seeds are available only when these tensors are. A seed depends on nothing
            else, so XLA would draw the random numbers of all blocks first and hold them.

    Attributes:
        state: the values that were read from outside, by the id of the variable. Weights
            are not among them: gradients go to the variable itself.
        kept: outputs of the layers that are wrapped in `Keep`.
        drawn: random tensors, in order.
    """

    def __init__(self, values: dict[int, tf.Tensor], after: Sequence[tf.Tensor]) -> None:
        super().__init__(values)
        self.outer = current_scope()
        self.after = after
        self.state: dict[int, tf.Tensor] = {}
        self.kept: Kept = []
        self.drawn: list[tf.Tensor] = []

    def again(
        self,
        inputs: Sequence[tf.Tensor],
        others: Sequence[tf.Tensor],
        upstream: Sequence[tf.Tensor],
    ) -> tuple["SecondPass", list[tf.Tensor], list[tf.Tensor]]:
        """The second pass, and `inputs` and `others` for it.

        All of it is available only when the gradients `upstream` are. State that the
        first pass only read needs no such barrier: it is in memory anyway.
        """
        moved = [i for i in self.state if i in self.assigned]
        kept = [tensor for _, outputs in self.kept for tensor in outputs]
        state = [self.state[i] for i in moved]
        held = [*inputs, *others, *state, *kept, *self.drawn]
        released = iter(optimization_barrier(held, upstream))
        inputs, others = _take(released, inputs), _take(released, others)
        values = {**self.state, **dict(zip(moved, _take(released, moved)))}
        kept = [(layer, _take(released, outputs)) for layer, outputs in self.kept]
        return SecondPass(values, kept, _take(released, self.drawn)), inputs, others

    def draw(self, draw: Callable[[], tf.Tensor], skip: Callable[[], Any]) -> tf.Tensor:
        """Draw it, unless the second pass of an outer block has it."""
        outer = self.outer
        given = isinstance(outer, SecondPass) and outer.is_here()
        self.drawn.append(outer.draw(draw, skip) if given else draw())
        return self.drawn[-1]

    def note_function(self, variable: keras.Variable) -> None:
        """Note it for the pass of an outer block, too."""
        super().note_function(variable)
        if isinstance(self.outer, Pass):
            self.outer.note_function(variable)

    def _value_of(self, variable: keras.Variable) -> tf.Tensor | None:
        value = super()._value_of(variable)
        if value is not None:
            return value
        value = None if self.outer is None else self.outer.get_current_value(variable)
        if value is None:
            with unrecorded():
                value = read(variable)
            if value is None or is_watched(variable):
                return value
        self.state[id(variable)] = value
        if value.dtype.is_floating or not self.after:
            return value
        return optimization_barrier([value], self.after)[0]


class SecondPass(Pass):
    """Reads what the first pass noted.

    Args:
        values: as for `Pass`.
        kept: the outputs that the first pass kept.
        drawn: the random tensors that it drew.
    """

    def __init__(
        self, values: dict[int, tf.Tensor], kept: Kept, drawn: Sequence[tf.Tensor]
    ) -> None:
        super().__init__(values)
        self._kept = kept
        self._drawn = iter(drawn)

    def draw(self, draw: Callable[[], tf.Tensor], skip: Callable[[], Any]) -> tf.Tensor:
        """The tensor that the first pass drew."""
        skip()
        return next(self._drawn)

    def take(self, layer: "Keep") -> list[tf.Tensor]:
        """The outputs of the next call of `layer`, from the first pass."""
        index = next(i for i, (kept, _) in enumerate(self._kept) if kept is layer)
        return self._kept.pop(index)[1]


def _take(tensors: Iterator[tf.Tensor], like: Sequence[Any]) -> list[tf.Tensor]:
    return [next(tensors) for _ in like]


def is_repeated() -> bool:
    """Whether the code that asks runs for the second time, in a second pass."""
    return isinstance(current_scope(), SecondPass)


class Keep:
    """The call of a layer in a block, whose outputs stay in memory.

    The second pass takes the outputs of the first. It calls the layer all the same, since
    the gradient of the layer may need what is computed inside; compilers leave out the
    rest.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = self.__wrapped__ = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self.function(*args, **kwargs)
        scope = current_scope()
        if not isinstance(scope, Pass) or not scope.is_here():
            return outputs  # A tensor that is made in a loop cannot leave it.
        if isinstance(scope, FirstPass):
            scope.kept.append((self, Nest(outputs).differentiable))
        elif isinstance(scope, SecondPass):
            nest = Nest(outputs)
            pairs = zip(scope.take(self), nest.differentiable)
            outputs = nest.pack(
                [value_with_gradient_of(value, again) for value, again in pairs],
                nest.nondifferentiable,
            )
        return outputs
