"""The rules of `diagnose`, in one table: what, why, what to do, and where it is known from.

Each rule finds the layers that it is about, none of them for the model as a whole, and
may say another level than its own: the same thing can be exact in the step and differ in
the optimizer.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from .._backend.private.layers import is_in_remat_scope
from .._backend.private.optimizers import schedule_of
from .._batch_norm import AccumBatchNormalization
from .._core.gradients import sum_dtype
from .facts import Facts, names_of
from .finding import Finding, Level

_Layer: TypeAlias = keras.layers.Layer
_BatchNorm = keras.layers.BatchNormalization
_BatchNormLike = (_BatchNorm, keras.layers.SpectralNormalization)


@dataclasses.dataclass(frozen=True)
class Match:
    """That a rule applies: to which layers, and what else its message names."""

    layers: tuple[str, ...] = ()
    level: Level | None = None
    values: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Rule:
    """One row of the table.

    Attributes:
        name: of the rule.
        level: of its findings, unless a match says otherwise.
        why: what it is, and why it bends or breaks equivalence, or keeps it.
        remedy: a line of code.
        source: where it is known from.
        find: from the facts of a model to a `Match`, or None.
    """

    name: str
    level: Level
    why: str
    remedy: str
    source: str
    find: Callable[[Facts], Match | None]

    def apply(self, facts: Facts) -> Finding | None:
        """The finding of this rule for a model, if it applies."""
        match = self.find(facts)
        if match is None:
            return None
        level = match.level or self.level
        message, remedy = (t.format(**match.values) for t in (self.why, self.remedy))
        return Finding(self.name, level, match.layers, message, remedy, self.source)


# ------------------------------------------------------------------ how they look


def _of(layers: list[_Layer], level: Level | None = None, **values: Any) -> Match | None:
    return Match(names_of(layers), level, values) if layers else None


def _if(condition: Any, level: Level | None = None, **values: Any) -> Match | None:
    return Match((), level, values) if condition else None


def _trained_batch_norms(facts: Facts) -> list[_Layer]:
    """Those that see their batch; unread, those that are trained."""
    found = [
        x
        for x in facts.layers
        if isinstance(x, _BatchNorm)
        and not isinstance(x, AccumBatchNormalization)
        and x.trainable
        and not getattr(x, "synchronized", False)
    ]
    if facts.reading.y_pred is None:
        return found
    return [x for x in found if _is_coupled(facts, x) is not False]


def _is_coupled(facts: Facts, layer: _Layer) -> bool | None:
    """Whether a layer couples samples; None if it moves and could not be called alone."""
    if id(layer) in facts.reading.tried:
        return layer in facts.reading.coupled
    return None if facts.moved_in(layer) else False


def _moving_batch_norms(facts: Facts) -> Match | None:
    """Called with `training=False`, but with statistics that move."""
    return _of(
        [
            x
            for x in facts.layers
            if isinstance(x, _BatchNorm)
            and not isinstance(x, AccumBatchNormalization)
            and facts.moved_in(x)
            and _is_coupled(facts, x) is False
            and not getattr(x, "synchronized", False)
        ]
    )


def _is(kind: Any, **attributes: Any) -> Callable[[Facts], Match | None]:
    def find(facts: Facts) -> Match | None:
        return _of(
            [
                x
                for x in facts.layers
                if isinstance(x, kind)
                and all(getattr(x, k, None) == v for k, v in attributes.items())
            ]
        )

    return find


def _moving(facts: Facts) -> Match | None:
    return _of(
        [
            x
            for x in [facts.model, *facts.layers]
            if not isinstance(x, _BatchNormLike)
            and not getattr(x, "moves_state_per_update", False)
            and not getattr(x, "stateful", False)
            and facts.moved_in(x)
        ]
    )


def _coupled(facts: Facts) -> Match | None:
    layers = [x for x in facts.reading.coupled if not isinstance(x, _BatchNorm)]
    return _of([x for x in layers if not getattr(x, "stateful", False)])


def _random(facts: Facts) -> Match | None:
    return _of(facts.reading.drawing)


def _added_sums(facts: Facts) -> Match | None:
    return _if(facts.reading.sums, "differs" if facts.in_optimizer else "exact")


def _own_loss(facts: Facts) -> Match | None:
    if not facts.own_loss:
        return None
    hooked = getattr(facts.model, "compute_loss_weight", None) is not None
    exact = hooked or facts.two_pass or (facts.loss.known and facts.loss.understood)
    return Match(level="exact" if exact else "unknown")


def _scalar_loss(facts: Facts) -> Match | None:
    loss = facts.loss
    if not loss.scalar or facts.own_loss or _coupled_loss(facts):
        return None
    how = {
        "mean": "the mean over the samples, as accumulation takes it",
        "sum": "a sum, which accumulation takes for a mean",
        "ratio": "a quotient by something that depends on the data (a mask, a count)",
        "unknown": "and what it divides by cannot be known",
    }
    levels: dict[str, Level] = {"mean": "exact", "unknown": "unknown"}
    level = levels.get(loss.scalar, "differs")
    return Match(
        level="exact" if facts.two_pass else level, values={"how": how[loss.scalar]}
    )


def _coupled_loss(facts: Facts) -> Match | None:
    coupled = facts.loss.coupled and not facts.own_loss and facts.loss.scalar != "ratio"
    return _if(coupled, "exact" if facts.two_pass else "differs")


def _reduction(facts: Facts) -> Match | None:
    kinds = {str(kind) for kind in facts.loss.reductions}
    if facts.own_loss:
        return None
    mean = "sum_over_batch_size"
    if kinds & {"None", "none"}:
        return Match(values={"kind": "none", "remedy": mean})
    if not facts.accumulates:
        return None
    if facts.optimizer.reduction == "mean":
        return _if("sum" in kinds, kind="sum", remedy=mean)
    means = sorted(kinds - {"sum"})
    return _if(means, kind=means[0] if means else "", remedy="sum")


def _several(facts: Facts) -> Match | None:
    return _if(
        facts.in_optimizer and len(facts.loss.reductions) > 1 and facts.loss.varies
    )


def _clipping(facts: Facts) -> Match | None:
    names = ("clipnorm", "global_clipnorm", "clipvalue")
    given = [n for n in names if getattr(facts.inner, n, None) is not None]
    return _if(given, names=", ".join(given))


def _schedule(facts: Facts) -> Match | None:
    return _if(schedule_of(facts.inner) is not None)


def _grown(facts: Facts) -> Match | None:
    steps: Any = facts.optimizer.accum_steps if facts.accumulates else 1
    return _if(not callable(steps) and steps > 1, steps=steps)


def _unscaled(facts: Facts) -> Match | None:
    trained = [x for x in facts.layers if x.trainable_variables]
    low = [x for x in trained if x.compute_dtype == "float16"]
    if not low or not facts.compiled:
        return None
    scaler = isinstance(facts.optimizer, keras.optimizers.LossScaleOptimizer)
    if facts.accumulates:
        scaler = facts.optimizer._scales_by_itself or facts.optimizer.scales_dynamically
    return None if scaler else _of(low)


def _embeddings(facts: Facts) -> Match | None:
    tables = [x for x in facts.layers if isinstance(x, keras.layers.Embedding)]
    tables = [x for x in tables if x.trainable_variables]
    size = sum(
        int(np.prod(v.shape)) * tf.as_dtype(sum_dtype(v, None)).size
        for x in tables
        for v in x.trainable_variables
    )
    return _of(tables, size=f"{size / 2**20:.1f} MiB")


def _unread(facts: Facts) -> Match | None:
    return _if(facts.reading.y_pred is None)


def _unread_loss(facts: Facts) -> Match | None:
    read = facts.reading.y_pred is not None and facts.compiled
    return _if(
        read and not facts.loss.known and not facts.own_step and not facts.own_loss
    )


def _metrics(facts: Facts) -> Match | None:
    names = ", ".join(map(repr, facts.loss.batch_metrics))
    return _if(names and not facts.two_pass, names=names)


def _logged(facts: Facts) -> Match | None:
    return _if(facts.accumulates and facts.loss.varies and not facts.own_step)


def _keras_accumulates(facts: Facts) -> Match | None:
    steps = getattr(facts.inner, "gradient_accumulation_steps", None)
    return _if(steps, steps=steps)


# --------------------------------------------------------------------- the table

_IOFFE = "Ioffe and Szegedy 2015, Batch Normalization"
_KERAS = "Keras 3"

RULES = (
    Rule(
        "batch_normalization",
        "differs",
        "BatchNormalization normalizes each micro-batch by its own mean and variance, and "
        "moves its statistics once per micro-batch.",
        "ka.replace_batch_normalization(model)  # freeze=True is exact, for fine-tuning",
        _IOFFE,
        lambda facts: _of(_trained_batch_norms(facts)),
    ),
    Rule(
        "batch_normalization_moves",
        "differs",
        "A BatchNormalization that does not see its batch moves its statistics all the "
        "same, once per micro-batch. `training=False` in a `call` does not stop that.",
        "ka.replace_batch_normalization(model, freeze=True)",
        _KERAS,
        _moving_batch_norms,
    ),
    Rule(
        "batch_normalization_synchronized",
        "differs",
        "A synchronized BatchNormalization averages over replicas at each call, per "
        "micro-batch. In the step, under a strategy, it is refused.",
        "layer = keras.layers.GroupNormalization(groups=8)  # in its place",
        _IOFFE,
        _is(_BatchNorm, synchronized=True),
    ),
    Rule(
        "accum_batch_normalization",
        "differs",
        "AccumBatchNormalization moves its statistics once per update, but still "
        "normalizes each micro-batch by itself.",
        "ka.replace_batch_normalization(model, freeze=True)",
        _IOFFE,
        lambda facts: _of(
            [
                x
                for x in facts.layers
                if isinstance(x, AccumBatchNormalization) and x.trainable
            ]
        ),
    ),
    Rule(
        "batch_normalization_frozen",
        "exact",
        "A frozen BatchNormalization normalizes by the statistics that it has, the same "
        "for all micro-batches.",
        "layer.trainable = False  # as it is",
        _KERAS,
        _is(_BatchNorm, trainable=False),
    ),
    Rule(
        "spectral_normalization",
        "differs",
        "SpectralNormalization takes a power iteration and divides its kernel at each "
        "call, per micro-batch instead of per update.",
        "keras.layers.Dense(n, kernel_constraint=keras.constraints.MaxNorm(1.0))",
        "Miyato et al. 2018, Spectral Normalization",
        _is(keras.layers.SpectralNormalization),
    ),
    Rule(
        "moving_state",
        "differs",
        "A call assigns state of these layers (a codebook, an average), per micro-batch "
        "instead of per update.",
        "layer.trainable = False  # and move it in a callback, per update, not in `call`",
        "read: variables that a forward pass assigns",
        _moving,
    ),
    Rule(
        "coupled_layers",
        "differs",
        "What these layers give a sample depends on the other samples of its micro-batch.",
        "x = x - keras.ops.mean(x, axis=-1, keepdims=True)  # over features, not samples",
        "read: outputs for a batch and for its parts",
        _coupled,
    ),
    Rule(
        "stateful",
        "differs",
        "A stateful layer carries state from one micro-batch into the next, and is built "
        "for one batch size.",
        "keras.layers.LSTM(units, stateful=False)",
        _KERAS,
        _is(keras.layers.RNN, stateful=True),
    ),
    Rule(
        "randomness",
        "exact",
        "Random numbers are drawn for each micro-batch: others than the large batch would "
        "draw, of the same distribution.",
        "ka.check_equivalence(model, x, y)  # with the same numbers for each sample",
        "Srivastava et al. 2014, Dropout",
        _random,
    ),
    Rule(
        "added_vectors",
        "differs",
        "A layer passes one value per sample to `add_loss`. Keras adds them up: a sum, "
        "exact in the step; the optimizer takes it for a mean.",
        "ka.accumulate(model, accum_steps=8)",
        _KERAS,
        _added_sums,
    ),
    Rule(
        "added_batch_wide",
        "differs",
        "A layer adds a loss that is no mean over samples, but computed of the batch as a "
        "whole (load balancing, a batch statistic): it is computed per micro-batch.",
        "ka.accumulate(model, accum_steps=8, two_pass=True)  # computed in the loss",
        "Fedus et al. 2021, Switch Transformers, on load balancing",
        lambda facts: _if(facts.reading.batch_wide),
    ),
    Rule(
        "own_compute_loss",
        "unknown",
        "The model has a `compute_loss` of its own. It is exact if it is a sum of Keras "
        "losses; else micro-batches weigh by their samples.",
        "ka.accumulate(model, accum_steps=8, two_pass=True)  # or compute_loss_weight",
        _KERAS,
        _own_loss,
    ),
    Rule(
        "own_train_step",
        "unknown",
        "The model has a `train_step` of its own. A micro-batch weighs what the one Keras "
        "loss in it divides by; else 1, with a warning.",
        "optimizer.apply(gradients, variables, weight=...)  # see ka.check_equivalence",
        _KERAS,
        lambda facts: _if(facts.own_step),
    ),
    Rule(
        "scalar_loss",
        "unknown",
        "A loss function returns one number, {how}.",
        "def loss(y, y_pred): return per_sample  # Keras takes the mean; or two_pass=True",
        "read: the graph of the loss",
        _scalar_loss,
    ),
    Rule(
        "coupled_loss",
        "differs",
        "The loss is no mean over samples: that of a sample depends on the others of its "
        "micro-batch (contrastive, Dice over the batch, ranking). With `two_pass=True` it "
        "sees the whole batch.",
        "ka.accumulate(model, accum_steps=8, two_pass=True)",
        "Gao et al. 2021, Scaling Deep Contrastive Learning Batch Size",
        _coupled_loss,
    ),
    Rule(
        "loss_reduction",
        "differs",
        "A loss has `reduction='{kind}'`, which is refused here: a mean of sums is none, "
        "nor is a sum of means one, and one value per sample is no loss.",
        "loss = keras.losses.MeanSquaredError(reduction='{remedy}')",
        _KERAS,
        _reduction,
    ),
    Rule(
        "several_losses",
        "unknown",
        "Several losses with masks or weights may have different denominators; one "
        "gradient in the optimizer is weighted by the first.",
        "ka.accumulate(model, accum_steps=8)",
        "algebra: one weight per gradient",
        _several,
    ),
    Rule(
        "batch_metric",
        "differs",
        "The metric {names} returns one number for a batch: what is shown is the mean of "
        "the micro-batches' values. The update does not depend on it.",
        "ka.accumulate(model, accum_steps=8, two_pass=True)  # or one value per sample",
        _KERAS,
        _metrics,
    ),
    Rule(
        "loss_not_read",
        "unknown",
        "The loss could not be computed on made-up targets of the predictions' shape.",
        "ka.check_equivalence(model, x, y)",
        "read: the loss",
        _unread_loss,
    ),
    Rule(
        "not_read",
        "unknown",
        "The model could not be called on made-up samples: layers that couple samples, and "
        "state that moves, are known by class only.",
        "ka.check_equivalence(model, x, y)",
        "read: a forward pass",
        _unread,
    ),
    Rule(
        "keras_accumulation",
        "differs",
        "The optimizer accumulates by itself (gradient_accumulation_steps={steps}), as a "
        "mean of means, with averages and schedules that count micro-steps.",
        "ka.AccumOptimizer(keras.optimizers.SGD(), accum_steps={steps})",
        "keras-team/keras#20582",
        _keras_accumulates,
    ),
    Rule(
        "float16_unscaled",
        "unknown",
        "These layers compute in float16 and the loss is not scaled: small gradients "
        "vanish, and more of them in small micro-batches.",
        "optimizer = keras.optimizers.LossScaleOptimizer(optimizer)",
        "Micikevicius et al. 2018, Mixed Precision Training",
        _unscaled,
    ),
    Rule(
        "logged_loss",
        "exact",
        "The loss divides by tokens or weights. The update is exact; the `loss` that Keras "
        "logs is the mean of the micro-batches' by samples.",
        "ka.accumulate(model, accum_steps=8)  # logs the loss of the batch",
        _KERAS,
        _logged,
    ),
    Rule(
        "clipping",
        "exact",
        "The optimizer clips ({names}) once per update, the mean of the window: less "
        "often than the single micro-batches would be.",
        "optimizer.last_gradient_norm  # what is clipped",
        "Pascanu et al. 2013",
        _clipping,
    ),
    Rule(
        "moving_average",
        "exact",
        "The average of the weights (EMA) moves once per update: in fewer steps an epoch "
        "it reaches further back.",
        "optimizer.ema_momentum = momentum**accum_steps  # to reach as far back in samples",
        "Busbridge et al. 2023, How to Scale Your EMA",
        lambda facts: _if(getattr(facts.inner, "use_ema", False)),
    ),
    Rule(
        "schedule",
        "exact",
        "The learning rate schedule counts updates, not micro-batches.",
        "decay_steps = epochs * samples // effective_batch",
        "Goyal et al. 2017",
        _schedule,
    ),
    Rule(
        "learning_rate",
        "exact",
        "The batch is {steps} micro-batches: the update is that of the large batch with "
        "the same learning rate. If that was chosen for a micro-batch, it is small.",
        "ka.scale_learning_rate(rate, batch_size=effective, base_batch_size=micro)",
        "Goyal et al. 2017; Malladi et al. 2022 for Adam",
        _grown,
    ),
    Rule(
        "embeddings",
        "exact",
        "The sums of gradients of embeddings are as large as their tables: {size}, however "
        "few rows a micro-batch has.",
        "print(ka.plan(model, batch, memory_budget='8GiB'))",
        "tf.IndexedSlices",
        _embeddings,
    ),
    Rule(
        "remat_scope",
        "exact",
        "Layers made in a `keras.RematScope` are recomputed by Keras. Their random "
        "numbers may be drawn anew.",
        "ka.recompute(model, 'block_*')  # keeps the masks of dropout",
        "Chen et al. 2016",
        lambda facts: _of([x for x in facts.layers if is_in_remat_scope(x)]),
    ),
    Rule(
        "no_gradient",
        "exact",
        "Outputs do not depend on these trained weights, which stay as they are.",
        "layer.trainable = False",
        "read: the gradient of a forward pass",
        lambda facts: (
            Match(tuple(facts.reading.without_gradient))
            if facts.reading.without_gradient
            else None
        ),
    ),
)
