"""`recompute` and `Recompute`: activation checkpointing of layers, switched on and off.

A layer keeps its class, name, weights and config: only its `call` is shadowed, by what
runs it twice (`_recompute_core`). Or a graph of layers is run in segments (`_segments`).
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import keras

from .._backend.attribute_patch import AttributePatch
from .._backend.private import canaries
from .._backend.private.graphs import graph_of, nodes_of, run_by, runner_of
from .._backend.private.layers import (
    call_method,
    flatten_layers,
    has_build,
    is_in_remat_scope,
    take_arguments,
)
from .._backend.private.versions import legacy_hint
from .block import Block
from .passes import Keep
from .segments import GraphInSegments
from .select import Layer, Select, layers_inside, select_layers


class Recomputation:
    """What `recompute` switched on.

    Also a context manager: `with recompute(model, "block_*"): ...` ends with `undo`.

    Attributes:
        layers: names of the layers that are recomputed, in the order of the model; of
            segments, the names of their first and last layer, as `"first..last"`.
        kept: names of the layers inside of them whose outputs are kept.
    """

    def __init__(
        self,
        model: Layer,
        shadows: list[AttributePatch],
        layers: Sequence[str],
        kept: Sequence[Layer],
    ) -> None:
        self.layers = tuple(layers)
        self.kept = tuple(layer.name for layer in kept)
        self._model, self._shadows = model, shadows

    @property
    def active(self) -> bool:
        """Whether it is switched on still."""
        return bool(self._shadows)

    def undo(self) -> None:
        """Have the model train as it did before; nothing happens the second time."""
        while self._shadows:
            self._shadows.pop().undo()
        _trace_anew(self._model)

    def __enter__(self) -> "Recomputation":
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        state = "active" if self.active else "undone"
        return f"<Recomputation of {len(self.layers)} blocks, {state}: {self.layers}>"


def recompute(
    model: Layer,
    select: Select | None = None,
    *,
    segments: str | int | None = None,
    keep: str | Sequence[str] = (),
    verify: bool = False,
) -> Recomputation:
    """Have parts of `model` computed again in the backward pass, instead of kept.

    ```python
    recompute(model, "block_*")         # each layer of such a name
    recompute(model, segments="sqrt")   # or a chain, in about √N segments
    ```

    Of a part that is recomputed only arguments and results stay in memory between the
    two passes, and of each dropout its mask, a bit for each element. Loss, gradients and
    state are those of the plain model: the masks are the same, moving statistics move
    once, `add_loss` keeps its gradient.

    Works in place: weights, names, config and what is saved are the model's own; a model
    loaded from it, or a clone, trains as usual until it is passed here too. `predict` and
    `evaluate` are left alone. A training step that was traced before (in a `tf.function`
    of your own, or by the `fit` of a model around this one) goes on as it was: switch
    first, or compile anew.

    Select what holds several layers, such as a transformer's block: a single layer that
    has little inside keeps its argument instead of its result, which saves nothing. Of
    layers inside each other that match, the outermost is recomputed.

    Args:
        model: any Keras model, or a layer that has layers inside; compiled or not.
        select: which layers inside of it, at any depth. A pattern of their names with
            `*` and `?` (of their paths, if it has a `/`), a class or a tuple of classes,
            a function from a layer to bool, a layer, or a list of layers.
        segments: instead of `select`, for a built functional or `Sequential` model:
            into how many segments to cut it, an int of at least 2, or `"sqrt"` for the
            root of the number of its layers. Cuts are placed where they and the largest
            segment take least, skip connections included. All but the last segment,
            which is differentiated first, are recomputed.
        keep: patterns of names of layers inside of what is recomputed whose outputs are
            kept: `keep="*dense*"` recomputes attention and normalisation, not the
            products of matrices (Korthikanti et al., 2022, "Reducing Activation
            Recomputation in Large Transformer Models"). Saves time for layers without an
            activation function, in graphs and under XLA.
        verify: bool. In the first training step, call each part twice and compare: with
            its arguments in eager mode, with made-up ones of the same shape in a graph.

    Returns:
        A handle: `.layers` are the names of what is recomputed, `.undo()` switches it
        off. It is a context manager, too.

    Raises:
        ValueError: if nothing matches, the model is itself selected, a match is
            recomputed already or was made in a `keras.RematScope`, or `model` has no
            graph to cut. Later, in a training step: if a part cannot be computed twice,
            because it draws from TensorFlow's own random state, uses a tensor that it
            was not given and that needs a gradient, assigns to what is trained, or to a
            state inside of a loop of TensorFlow's, keeps a tensor on a layer, or, with
            `verify`, gives something else the second time.
        TypeError: for a `select` of no such kind.

    A part with several results, of which the loss uses some, gives zeros instead of None
    for weights that only the others depend on. Differentiation in forward mode does not
    see what is recomputed, and TensorFlow does not differentiate a loop around it.

    References:
        Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost".
    """
    if not isinstance(model, keras.layers.Layer):
        raise TypeError(
            "`model` must be a `keras.Model`, or a layer. Received: "
            f"{model!r}{legacy_hint(model)}"
        )
    if (select is None) == (segments is None):
        raise ValueError(
            "Give one of `select`, the layers to recompute, and `segments`, how to cut a "
            f"chain of layers. Received: select={select!r}, segments={segments!r}"
        )
    canaries.check()
    if segments is not None:
        return _recompute_segments(model, segments, keep, verify)
    return _recompute_layers(model, select_layers(model, select), keep, verify)


def _recompute_layers(
    model: Layer, layers: Sequence[Layer], keep: str | Sequence[str], verify: bool
) -> Recomputation:
    kept = layers_inside(layers, keep)
    for layer in [*layers, *kept]:
        _check_free(layer)
        _check_cell(model, layer)
    shadows = _keep(kept)
    for layer in layers:
        method = call_method(layer)
        block = Block(getattr(layer, method), [layer], layer.name, verify=verify)
        shadows.append(AttributePatch(layer, method, block))
    _trace_anew(model)
    return Recomputation(model, shadows, [layer.name for layer in layers], kept)


def _recompute_segments(
    model: Layer, segments: str | int, keep: str | Sequence[str], verify: bool
) -> Recomputation:
    graph = graph_of(model)
    if graph is None:
        raise ValueError(
            f"'{model.name}' has no graph of layers to cut into segments: it is "
            "subclassed, or a Sequential model that is not built. Build it first, or "
            "give the layers to recompute, as in `recompute(model, 'block_*')`."
        )
    if isinstance(runner_of(graph), GraphInSegments):
        raise ValueError(_TWICE.format(name=model.name))
    count = _count(segments, len(nodes_of(graph)))
    kept = layers_inside([graph], keep)
    for layer in kept:
        _check_free(layer)
        _check_cell(model, layer)
    run = GraphInSegments(graph, count, verify)
    shadows = [*_keep(kept), run_by(graph, run)]
    _trace_anew(model)
    return Recomputation(model, shadows, run.names, kept)


def _count(segments: str | int, steps: int) -> int:
    if segments == "sqrt":
        segments = max(2, round(steps**0.5))
    if isinstance(segments, bool) or not isinstance(segments, int):
        raise TypeError(
            f"`segments` must be 'sqrt' or an int. Received: {segments!r} of type "
            f"{type(segments).__name__}"
        )
    if not 2 <= segments <= steps:
        raise ValueError(
            "`segments` must be at least 2, since the last one is not recomputed, and at "
            f"most the number of layers, {steps}. Received: {segments}"
        )
    return segments


def _check_free(layer: Layer) -> None:
    if isinstance(vars(layer).get(call_method(layer)), (Block, Keep)):
        raise ValueError(_TWICE.format(name=layer.name))
    if is_in_remat_scope(layer):
        raise ValueError(
            f"'{layer.name}' was made in a `keras.RematScope`, which recomputes it in a "
            "way of its own. Make it outside of one."
        )


def _check_cell(model: Layer, layer: Layer) -> None:
    for loop in [model, *flatten_layers(model)]:
        inside = isinstance(loop, keras.layers.RNN) and layer in flatten_layers(loop)
        if inside and loop is not layer:
            raise ValueError(
                f"'{layer.name}' is called in the loop of '{loop.name}', which draws the "
                "dropout masks of its cells before, and drops them after. Recompute "
                f"'{loop.name}', or a layer around it."
            )


_TWICE = (
    "'{name}' is recomputed or kept already. Call `undo()` of the handle that "
    "`recompute` gave before, or leave it out."
)


def _keep(layers: Sequence[Layer]) -> list[AttributePatch]:
    methods = [(layer, call_method(layer)) for layer in layers]
    return [AttributePatch(x, method, Keep(getattr(x, method))) for x, method in methods]


def _trace_anew(model: Layer) -> None:
    if isinstance(model, keras.Model):
        model.train_function = None


@keras.saving.register_keras_serializable(package="keras_accum")
class Recompute(keras.layers.Wrapper):
    """A layer whose inside is computed again in the backward pass, instead of kept.

    ```python
    x = Recompute(TransformerBlock())(x, mask=mask)
    ```

    What `recompute` switches on in a model that exists, for a model to be built with: it
    is saved and loaded with the model. It takes the arguments of the layer, and has its
    name, its weights and their paths, its masks and shapes; the layer itself is `.layer`.

    In files of weights (`.weights.h5`) Keras nests what a wrapper holds: load those of a
    model without it by `set_weights(plain.get_weights())`.

    Args:
        layer: the layer; a block of several, since one alone keeps its argument instead
            of its result.
        **kwargs: as for `keras.layers.Layer`.

    Raises:
        ValueError: if `layer` is no Keras layer; and, in a training step, for what
            cannot be computed twice (see `recompute`).
    """

    def __init__(self, layer: keras.layers.Layer, **kwargs: Any) -> None:
        if isinstance(layer, keras.layers.Layer):
            kwargs = {"name": layer.name, "dtype": layer.dtype_policy, **kwargs}
        elif hint := legacy_hint(layer):
            raise ValueError(f"`layer` must be a Keras layer. Received: {layer!r}{hint}")
        super().__init__(layer, **kwargs)
        take_arguments(self, layer)
        self.supports_masking = layer.supports_masking
        self._block = Block(layer, [layer], layer.name)

    def build(self, *args: Any, **kwargs: Any) -> None:
        """Build the layer, unless it leaves that to its first call."""
        canaries.check()
        if not self.layer.built and has_build(self.layer):
            self.layer.build(*args, **kwargs)

    def _open_name_scope(self) -> contextlib.AbstractContextManager[None]:
        # Weights are called what they are called without this layer.
        return contextlib.nullcontext()

    def get_build_config(self) -> dict[str, Any] | None:
        """What the layer was built with."""
        return self.layer.get_build_config()

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer; in training, keep nothing of what it computes."""
        return self._block(*args, **kwargs)

    def compute_mask(self, *args: Any, **kwargs: Any) -> Any:
        """The mask that the layer gives."""
        return self.layer.compute_mask(*args, **kwargs)

    def compute_output_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The shape that the layer gives."""
        return self.layer.compute_output_shape(*args, **kwargs)

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        """The shape and type that the layer gives."""
        return self.layer.compute_output_spec(*args, **kwargs)
