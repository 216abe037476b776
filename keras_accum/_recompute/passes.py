"""The two passes of a call that is recomputed, as scopes of Keras's variables.

The first notes what it reads; the second reads that. Neither changes a variable.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from .._backend.private.functions import is_in_function
from .._backend.private.layers import current_scope, is_watched, read
from .._backend.private.tapes import unrecorded, value_with_gradient_of
from .barrier import optimization_barrier
from .nest import Nest

# Calls whose outputs were kept, in order, with the tensors in them.
Kept: TypeAlias = "list[tuple[Keep, list[tf.Tensor]]]"


class Pass(keras.StatelessScope):
    """The variables as `values` has them, by id; what is assigned stays in here."""

    def __init__(self, values: dict[int, tf.Tensor]) -> None:
        super().__init__(collect_losses=True)
        self.state_mapping.update(values)
        self.assigned: dict[int, keras.Variable] = {}
        self.read_in_functions: dict[int, keras.Variable] = {}
        self._graph = tf.compat.v1.get_default_graph()
        self._eager = tf.executing_eagerly()

    def is_here(self) -> bool:
        """Whether what is made now can be used in the pass itself: not inside a loop."""
        return tf.compat.v1.get_default_graph() is self._graph

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        """The value of `variable` in this pass; None if it is the variable's own.

        Also inside of a loop or a function, the tensor is one of the pass: a variable
        that a loop reads is an argument of the loop, and a tape that watches the
        variable would differentiate the loop.
        """
        if self.is_here():
            return self._value_of(variable)
        if is_in_function(tf.compat.v1.get_default_graph(), self._graph):
            self.note_function(variable)
        with tf.init_scope() if self._eager else self._graph.as_default():
            return self._value_of(variable)

    def note_function(self, variable: keras.Variable) -> None:
        """Note that a `tf.function` reads `variable` while it is traced."""
        self.read_in_functions[id(variable)] = variable

    def _value_of(self, variable: keras.Variable) -> tf.Tensor | None:
        return super().get_current_value(variable)

    def owns(self, tensor: tf.Tensor) -> bool:
        """Whether `tensor` can be used in the pass itself."""
        return not tf.is_symbolic_tensor(tensor) or tensor.graph is self._graph

    def draw(self, draw: Callable[[], tf.Tensor], skip: Callable[[], Any]) -> tf.Tensor:
        """What `draw` gave, at this place, in the first pass; else what `skip` does."""
        raise NotImplementedError

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """Note that a variable was assigned."""
        variable, _ = update
        self.assigned[id(variable)] = variable
        super().add_update(update)


class FirstPass(Pass):
    """Reads variables from outside, apart from any tape, and remembers what it read.

    Seeds are not there before the tensors in `after` are: they depend on nothing else, so
    that XLA would draw the random numbers of all blocks first, and hold them.
    """

    def __init__(self, values: dict[int, tf.Tensor], after: Sequence[tf.Tensor]) -> None:
        super().__init__(values)
        self.outer = current_scope()
        self.after = after
        self.state: dict[int, tf.Tensor] = {}
        self.kept: Kept = []
        self.drawn: list[tf.Tensor] = []

    def draw(self, draw: Callable[[], tf.Tensor], skip: Callable[[], Any]) -> tf.Tensor:
        """What `draw` gives; inside of another block's second pass, what it gave."""
        outer = self.outer
        given = isinstance(outer, SecondPass) and outer.is_here()
        self.drawn.append(outer.draw(draw, skip) if given else draw())
        return self.drawn[-1]

    def note_function(self, variable: keras.Variable) -> None:
        """Note it for the pass of a block around this one, too."""
        super().note_function(variable)
        if isinstance(self.outer, Pass):
            self.outer.note_function(variable)

    def _value_of(self, variable: keras.Variable) -> tf.Tensor | None:
        """The value, which no tape sees: gradients go through the second pass."""
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
    """Has the outputs that the first pass kept, and what it drew."""

    def __init__(
        self, values: dict[int, tf.Tensor], kept: Kept, drawn: Sequence[tf.Tensor]
    ) -> None:
        super().__init__(values)
        self._kept = kept
        self._drawn = iter(drawn)

    def draw(self, draw: Callable[[], tf.Tensor], skip: Callable[[], Any]) -> tf.Tensor:
        """What the first pass drew."""
        skip()
        return next(self._drawn)

    def take(self, key: "Keep") -> list[tf.Tensor]:
        """What the next call of `key` gave in the first pass."""
        index = next(i for i, (found, _) in enumerate(self._kept) if found is key)
        return self._kept.pop(index)[1]


def is_repeated() -> bool:
    """Whether what runs has run before, in the first pass."""
    return isinstance(current_scope(), SecondPass)


class Keep:
    """A layer's call, whose outputs a block around it keeps.

    The second pass takes them as they are. The call itself is then needed only where its
    own gradient asks for what is inside of it: compilers leave the rest of it out.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = self.__wrapped__ = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self.function(*args, **kwargs)
        scope = current_scope()
        if not isinstance(scope, Pass) or not scope.is_here():
            return outputs  # What is inside of a loop cannot leave it.
        if isinstance(scope, FirstPass):
            scope.kept.append((self, Nest(outputs).differentiable))
        elif isinstance(scope, SecondPass):
            nest = Nest(outputs)
            pairs = zip(scope.take(self), nest.differentiable)
            outputs = nest.pack(
                [value_with_gradient_of(k, f) for k, f in pairs], nest.nondifferentiable
            )
        return outputs
