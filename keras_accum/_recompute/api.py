"""`recompute` and `Recompute`: switch activation checkpointing of layers on and off.

A layer keeps its class, name, weights and config. Only its `call` is shadowed, by one that
runs it twice (`block.py`). A graph of layers can also run in segments (`segments.py`).
"""

from collections.abc import Sequence
from typing import Any

import keras

from .._backend.attribute_patch import AttributePatch
from .._backend.private import canaries
from .._backend.private.graphs import run_by
from .._backend.private.layers import (
    NamelessWrapper,
    call_method,
    flatten_layers,
    has_build,
    is_in_remat_scope,
    take_arguments,
)
from .._backend.private.versions import legacy_hint
from .block import Block
from .parts import GraphInSegments, Part, as_parts, by_graph, is_recomputed
from .passes import Keep
from .segments import Division, name_of_segment
from .select import Layer, Select, layers_inside, select_layers
from .share import check_share, choose_share
from .weigh import trace_step


class Recomputation:
    """A handle of what `recompute` switched on.

    It is a context manager: `with recompute(model, "block_*"): ...` undoes it at the end.

    Attributes:
        layers: tuple of str, the names of the layers that are recomputed, in the order of
            the model. The name of a segment is `"first..last"`, after its first and last
            layer.
        kept: tuple of str, the names of the layers inside of these whose outputs are
            kept.
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
        """bool, whether it is still switched on."""
        return bool(self._shadows)

    def undo(self) -> None:
        """Let the model train as before. A second call does nothing."""
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
    share: float | None = None,
    keep: str | Sequence[str] = (),
    verify: bool = False,
) -> Recomputation:
    """Compute parts of `model` again in the backward pass, instead of keeping them.

    ```python
    recompute(model, "block_*")         # each layer of such a name
    recompute(model, segments="sqrt")   # or a chain, in about √N segments
    recompute(model, "block_*", share=0.5)  # or only as many as save half of what all do
    ```

    Between the two passes only the arguments and results of such a part stay in memory,
    and the mask of each dropout, one bit for each element. Loss, gradients and state are
    those of the plain model: masks are the same, moving statistics move once, and
    `add_loss` has its gradient.

    The model is changed in place. Its weights, names, config and files stay its own. A
    model that is loaded from a file, or cloned, trains as usual until it is passed to
    `recompute` too. `predict` and `evaluate` do not change. A training step that is
    already traced (in your own `tf.function`, or by `fit` of a model around this one)
    does not change either: call `recompute` before `compile`.

    Select layers that hold several others, such as the blocks of a transformer. A single
    layer with little inside keeps its argument instead of its result, which saves
    nothing. If a layer matches and so does one inside of it, the outer one is recomputed.

    Args:
        model: any Keras model, or a layer that has layers inside; compiled or not.
        select: which layers of it to recompute, at any depth. A pattern of names with `*`
            and `?` (of paths, if it has a `/`), a class or a tuple of classes, a function
            from a layer to bool, a layer, or a list of layers.
        segments: instead of `select`, for a built model: into how many segments to cut
            it. An int of at least 2, or `"sqrt"` for the root of the number of its
            layers. A training step is traced, which tells what each layer keeps; it does
            not run. Cuts are placed where the tensors that cross them and the largest
            segment take the least memory, skip connections included. Models and layers
            inside that hold more than a segment should are cut themselves: between the
            calls of a functional or `Sequential` model; of any other, the layers inside
            that have layers inside become a segment each. All segments but the last are
            recomputed; the last one is differentiated first.
        share: float above 0 and up to 1: recompute only as many of the selected layers,
            or of the segments, as save this share of the activations that all of them
            would save; those first that save most for the least time. A training step is
            traced, which tells bytes and operations; it does not run. `.layers` of the
            handle tells which were chosen. By default all are recomputed.
        keep: str or list of str, patterns of names of layers inside of recomputed ones.
            Their outputs are kept. `keep="*dense*"` recomputes attention and
            normalisation, but not the matrix products (Korthikanti et al., 2022,
            "Reducing Activation Recomputation in Large Transformer Models"). This saves
            time for layers without an activation function, in graphs and under XLA.
        verify: bool. In the first training step, call each part twice and compare the
            outputs: with its arguments in eager mode, with made-up ones of the same
            shapes in a graph.

    Returns:
        A handle. `.layers` are the names of what is recomputed, `.undo()` switches it
        off. It is also a context manager.

    Raises:
        ValueError: if nothing matches, the model itself is selected, a match is already
            recomputed or was created in a `keras.RematScope`, or `model` cannot be cut
            into segments, or not by "sqrt" so that it needs less memory (of an int that
            saves nothing, it warns); the message then names what would save more, if
            anything does. Later, in a training step, if a part
            cannot be computed twice: it draws from TensorFlow's own random state, uses a
            tensor that needs a gradient and is not an argument, assigns to trainable
            weights or inside of a TensorFlow loop, keeps a tensor in an attribute, or,
            with `verify`, returns something else the second time.
        TypeError: if `select`, `segments` or `share` has another type.

    If a part has several results and the loss uses only some of them, weights that only
    the others depend on get zeros as gradients instead of None. Forward-mode
    differentiation does not see recomputed parts, and TensorFlow does not differentiate a
    loop around them.

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
            "Pass exactly one of `select` (which layers to recompute) and `segments` "
            "(into how many segments to cut the model). Received: "
            f"select={select!r}, segments={segments!r}"
        )
    check_share(share)
    canaries.check()
    if segments is not None:
        return _recompute_segments(model, segments, share, keep, verify)
    return _recompute_layers(model, select_layers(model, select), share, keep, verify)


def _recompute_layers(
    model: Layer,
    layers: Sequence[Layer],
    share: float | None,
    keep: str | Sequence[str],
    verify: bool,
) -> Recomputation:
    kept = layers_inside(layers, keep)
    for layer in [*layers, *kept]:
        _check_free(layer)
        _check_cell(model, layer)
    if share is not None:
        parts, kept_parts = as_parts(layers), as_parts(kept)
        trace = trace_step(model, [*parts, *kept_parts])
        chosen = choose_share(trace, [[part] for part in parts], share, kept_parts)
        layers = [layers[i] for i in chosen]
        inside = {id(x) for layer in layers for x in flatten_layers(layer)}
        kept = [layer for layer in kept if id(layer) in inside]
    shadows = _keep(kept) + _as_blocks(layers, verify)
    _trace_anew(model)
    return Recomputation(model, shadows, [layer.name for layer in layers], kept)


def _recompute_segments(
    model: Layer,
    segments: str | int,
    share: float | None,
    keep: str | Sequence[str],
    verify: bool,
) -> Recomputation:
    if is_recomputed(model):
        raise ValueError(_TWICE.format(name=model.name))
    kept = layers_inside([model], keep)
    kept_parts = as_parts(kept)
    division = Division(model, _count(segments), kept_parts)
    found = division.segments
    if share is not None:
        chosen = choose_share(division.trace, found, share, kept_parts)
        found = [found[i] for i in chosen]
    return recompute_parts(model, found, kept, verify)


def recompute_parts(
    model: Layer,
    found: Sequence[Sequence[Part]],
    kept: Sequence[Layer] = (),
    verify: bool = False,
) -> Recomputation:
    """`recompute` for parts of `model`: calls of a graph in a row, or a layer, each."""
    layers = [part.operation for parts in found for part in parts if part.graph is None]
    for layer in [*layers, *kept]:
        _check_free(layer)
        _check_cell(model, layer)
    shadows = _keep(kept) + _as_blocks(layers, verify)
    calls = [parts for parts in found if parts[0].graph is not None]
    for graph in by_graph(part for parts in calls for part in parts):
        own = [parts for parts in calls if parts[0].graph is graph]
        runner = GraphInSegments.recomputing(graph, own, verify)
        shadows.append(run_by(graph, runner))
    _trace_anew(model)
    return Recomputation(model, shadows, [name_of_segment(s) for s in found], kept)


def _count(segments: str | int) -> int | None:
    if segments == "sqrt":
        return None
    if isinstance(segments, bool) or not isinstance(segments, int):
        raise TypeError(
            f"`segments` must be 'sqrt' or an int. Received: {segments!r} of type "
            f"{type(segments).__name__}"
        )
    return segments


def _check_free(layer: Layer) -> None:
    if isinstance(vars(layer).get(call_method(layer)), (Block, Keep)):
        raise ValueError(_TWICE.format(name=layer.name))
    if is_in_remat_scope(layer):
        raise ValueError(
            f"'{layer.name}' was created in a `keras.RematScope`, so Keras already "
            "recomputes it. Create it outside of the scope."
        )


def _check_cell(model: Layer, layer: Layer) -> None:
    for loop in flatten_layers(model):
        inside = isinstance(loop, keras.layers.RNN) and layer in flatten_layers(loop)
        if inside and loop is not layer:
            raise ValueError(
                f"'{layer.name}' is called in the loop of '{loop.name}', which draws the "
                "dropout masks of its cells outside of the loop. Recompute "
                f"'{loop.name}' instead, or a layer around it."
            )


_TWICE = (
    "'{name}' is already recomputed, or its outputs are already kept. Call `undo()` on "
    "the handle of that `recompute`, or do not select it again."
)


def _keep(layers: Sequence[Layer]) -> list[AttributePatch]:
    methods = [(layer, call_method(layer)) for layer in layers]
    return [AttributePatch(x, method, Keep(getattr(x, method))) for x, method in methods]


def _as_blocks(layers: Sequence[Layer], verify: bool) -> list[AttributePatch]:
    shadows = []
    for layer in layers:
        method = call_method(layer)
        block = Block(getattr(layer, method), [layer], layer.name, verify=verify)
        shadows.append(AttributePatch(layer, method, block))
    return shadows


def _trace_anew(model: Layer) -> None:
    if isinstance(model, keras.Model):
        model.train_function = None


@keras.saving.register_keras_serializable(package="keras_accum")
class Recompute(NamelessWrapper):
    """A layer that is computed again in the backward pass, instead of kept.

    ```python
    x = Recompute(TransformerBlock())(x, mask=mask)
    ```

    The layer form of `recompute`, for building models: it is saved and loaded with the
    model. It takes the arguments of `layer`, and has its name, its weights with their
    paths, its masks and its shapes. The layer itself is the attribute `layer`.

    In `.weights.h5` files Keras nests the weights of a wrapped layer. To load the weights
    of a model without the wrapper, use `set_weights(plain.get_weights())`.

    Args:
        layer: a Keras layer that holds several others, such as the block of a
            transformer. A single layer keeps its argument instead of its result.
        **kwargs: as for `keras.layers.Layer`.

    Raises:
        ValueError: if `layer` is no Keras layer. In a training step, if it cannot be
            computed twice (see `recompute`).
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
        """Build the layer, unless its first call builds it."""
        canaries.check()
        if not self.layer.built and has_build(self.layer):
            self.layer.build(*args, **kwargs)

    def get_build_config(self) -> dict[str, Any] | None:
        """The build config of the layer."""
        return self.layer.get_build_config()

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer. In training, keep nothing that it computes inside."""
        return self._block(*args, **kwargs)

    def compute_mask(self, *args: Any, **kwargs: Any) -> Any:
        """The mask that the layer computes."""
        return self.layer.compute_mask(*args, **kwargs)

    def compute_output_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The output shape of the layer."""
        return self.layer.compute_output_shape(*args, **kwargs)

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        """The output shape and dtype of the layer."""
        return self.layer.compute_output_spec(*args, **kwargs)
