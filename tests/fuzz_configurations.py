"""What `fuzz.py` draws: configurations, the values of their fields, and which go together.

A configuration is one line of text, `route=step model=gru mode=graph`: the fields that
differ from their defaults. The defaults, all together, are the simplest configuration,
and any single field at its default goes with any values of the fields before it.
"""

import dataclasses
import functools
import itertools
import typing

import hypothesis
import numpy as np
from hypothesis import strategies as st


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One training run, to be compared with the large batch.

    Attributes:
        recompute: how activations are computed again: "none", "blocks" by name,
            "segments", or "layer", `ka.Recompute` inside of the model.
        replicas: 1, or 2 logical devices under a MirroredStrategy.
        route: who accumulates: see `ROUTES`.
        model: "mlp", "conv", "attention", or, of tokens, "tokens" and "gru".
        form: how the model is made: functional, Sequential, or a subclass that is built
            by its first batch.
        outputs: 1, or 2, of which the second has no time steps.
        lengths: of the sequences of tokens: "equal"; "masked", all padded to one length;
            "trimmed", masked too, but each batch padded to its own longest; "empty", as
            "masked", but the first batch has no token; "unmasked", each batch of its own
            length.
        added: what a layer adds by `add_loss`: a mean or a sum over samples, a value for
            each sample, or an activity regularizer's.
        regularizer: the first kernel has an L2 penalty.
        loss: "mse", "huber", "scce"; of functions, see `FUNCTIONS`; "none" is no
            compiled loss, but what layers add.
        reduction: Keras's, of a loss object.
        compute_loss: "keras", or an override of the user's: see `OVERRIDES`.
        hook: the model says by `compute_loss_weight` what its override divides by.
        weights: sample weights: "none", "uniform", "varied", "zeros" (some), "zero_batch"
            (all of the first batch's), "all_zero", "timestep", "class".
        frozen: the first layer with weights is not trained.
        unused: there is an output without a loss.
        metrics: "none", "plain", "weighted", or "scalar", a function of the whole batch.
        optimizer: see `optimizer_of`.
        policy: the dtype policy: Keras's names, "part_" for one layer only, and
            "all_float64" for losses in float64 too.
        features: the dtype of inputs that are no tokens.
        sizes: the samples of each batch that is fed.
        accum_steps: the lengths of windows; the last one goes on.
        split: what `accumulate` gets: "k3" is `accum_steps=3`, "m2" is
            `micro_batch_size=2`.
        mode: "eager", "graph" or "xla".
        feed: what `fit` is given, or "train_on_batch".
        epochs: 1 or 2.
        tail: what becomes of a window that is open: "carry" it, "flush" it afterwards, or
            what the monitor does: "flush_epoch", "flush_end", "drop".
        steps_per_execution: as for `compile`.
        random: "none", "dropout" or "batch_norm", which no large batch equals: compared
            with the same run without recomputation.
        seed: of data and weights.
    """

    recompute: str = "none"
    replicas: int = 1
    route: str = "optimizer"
    model: str = "mlp"
    form: str = "functional"
    outputs: int = 1
    lengths: str = "equal"
    added: str = "none"
    regularizer: bool = False
    loss: str = "mse"
    reduction: str = "sum_over_batch_size"
    compute_loss: str = "keras"
    hook: bool = False
    weights: str = "none"
    frozen: bool = False
    unused: bool = False
    metrics: str = "none"
    optimizer: str = "sgd"
    policy: str = "float32"
    features: str = "float32"
    sizes: tuple[int, ...] = (3, 2)
    accum_steps: tuple[int, ...] = (1,)
    split: str = "k2"
    mode: str = "eager"
    feed: str = "sequence"
    epochs: int = 1
    tail: str = "carry"
    steps_per_execution: int = 1
    random: str = "none"
    seed: int = 0

    def __str__(self):
        fields = dataclasses.fields(self)
        changed = [(f, getattr(self, f.name)) for f in fields]
        changed = [(f.name, _text(v)) for f, v in changed if v != f.default]
        return " ".join(f"{name}={text}" for name, text in changed) or "route=optimizer"

    @property
    def accumulating(self):
        """Whether an `AccumOptimizer` is there."""
        return self.route in ACCUMULATING

    @property
    def splitting(self):
        """Whether batches are taken apart, by `accumulate` or `accumulate_gradients`."""
        return self.route in SPLITTING

    @property
    def looping(self):
        """Whether training is a loop of the user's, without `fit`."""
        return self.route in LOOPS

    @property
    def sequences(self):
        """Whether the first output, and its loss, has time steps."""
        return self.model in ("tokens", "gru", "attention")

    @property
    def tokens(self):
        return self.model in ("tokens", "gru")

    @property
    def masked(self):
        return self.lengths in ("masked", "trimmed", "empty")

    @property
    def half(self):
        """Whether some layer computes in float16, whose losses are scaled."""
        return self.policy in ("mixed_float16", "part_float16")

    @property
    def own_loss(self):
        """Whether the loss is a function, or an override, of the user's."""
        return self.loss in FUNCTIONS or self.compute_loss != "keras"

    @property
    def windows(self):
        """The indices of fed batches that make each update, over all epochs."""
        epochs = [list(range(len(self.sizes)))] * self.epochs
        found, held = [], []
        for epoch in epochs:
            for i in epoch:
                held.append(i)
                if len(held) == self.window_length(len(found)):
                    found.append(held)
                    held = []
            if held and self.tail == "flush_epoch":
                found.append(held)
            if self.tail in ("flush_epoch", "drop"):
                held = []
        if held and self.tail in ("flush", "flush_end"):
            found.append(held)
        return found

    def window_length(self, update):
        return self.accum_steps[min(update, len(self.accum_steps) - 1)]

    @property
    def ragged_end(self):
        """Whether some fed batch is in no update, or in one with another epoch's."""
        used = [i for window in self.windows for i in window]
        return self.epochs > 1 or used != list(range(len(self.sizes)))


# Routes, in the contract's words. "loop" leaves the weight of a micro-batch to
# `compute_loss`, "loop_weight" says it; "own_step" is a `train_step` that calls
# `compute_loss`, "own_step_object" one that calls a loss object, "own_step_twice" one
# that computes two losses. "model" is `GradientAccumulationModel`.
ACCUMULATING = (
    "optimizer",
    "both",
    "both_two_pass",
    "loop",
    "loop_weight",
    "own_step",
    "own_step_object",
    "own_step_twice",
    "gradients_optimizer",
)
SPLITTING = (
    "step",
    "model",
    "two_pass",
    "both",
    "both_two_pass",
    "gradients",
    "gradients_optimizer",
)
LOOPS = ("loop", "loop_weight", "gradients", "gradients_optimizer")
OWN_STEPS = ("own_step", "own_step_object", "own_step_twice")
ROUTES = tuple(dict.fromkeys((*ACCUMULATING, *SPLITTING, "plain")))
# Loss functions: what they return.
FUNCTIONS = (
    "per_sample",  # one value per sample
    "per_element",  # one for each element
    "valid",  # those of the samples that count, as many as there are
    "scalar",  # the mean
    "total",  # the sum
    "coupled",  # a number that is no mean over samples
)
# `compute_loss` of the user's.
OVERRIDES = (
    "plus",  # what Keras computes, and a penalty on the predictions
    "own_mean",  # the mean by sample weights, of a loss with reduction "none"
    "sum_over_n",  # a loss with reduction "sum", divided by the number of samples
    "by_batch",  # Keras's, with weights that are divided by their sum in the batch
)

_MODES = ("eager",) * 12 + ("graph",) * 5 + ("xla",)
OPTIONS = {
    "route": (
        *("optimizer", "step") * 3,
        *("model", "two_pass", "both", "both_two_pass") * 2,
        *("loop", "loop_weight", *OWN_STEPS, "gradients", "gradients_optimizer"),
        "plain",
    ),
    "model": ("mlp", "mlp", "tokens", "tokens", "conv", "attention", "gru"),
    "form": ("functional", "sequential", "subclass"),
    "outputs": (1, 1, 2),
    "lengths": ("equal", "masked", "trimmed", "empty", "unmasked"),
    "loss": (*("mse", "scce") * 3, "huber", *FUNCTIONS, "none"),
    "reduction": ("sum_over_batch_size", "sum", "mean", "mean_with_sample_weight"),
    "compute_loss": ("keras", *OVERRIDES),
    "hook": (False, True),
    "added": ("none",) * 4 + ("mean", "total", "per_sample", "activity"),
    "regularizer": (False, False, True),
    "weights": (
        *("none", "none", "uniform", "varied", "varied", "zeros"),
        *("zero_batch", "all_zero", "timestep", "class"),
    ),
    "frozen": (False,) * 5 + (True,),
    "unused": (False,) * 7 + (True,),
    "metrics": ("none", "none", "plain", "weighted", "scalar"),
    "optimizer": (
        *("sgd", "momentum", "adam", "adamw", "ema", "ema_overwrite", "clipnorm"),
        *("global_clipnorm", "clipvalue", "schedule", "decay", "constraint"),
        *("loss_scale", "static_scale", "rmsprop"),
    ),
    "policy": (
        *("float32",) * 8,
        *("float64", "all_float64", "part_float64", "mixed_bfloat16"),
        *("mixed_float16", "part_float16"),
    ),
    "features": ("float32",) * 9 + ("float64", "float16"),
    "split": ("k2", "k3", "k1", "k7", "m1", "m2", "m3"),
    "mode": _MODES,
    "feed": (
        *("sequence", "sequence", "arrays", "dataset", "unknown", "generator"),
        "train_on_batch",
    ),
    "epochs": (1, 1, 2),
    "tail": ("carry", "carry", "carry", "flush", "flush_epoch", "flush_end", "drop"),
    "steps_per_execution": (1, 1, 1, 2, 3),
    "random": ("none", "none", "dropout", "batch_norm"),
    "seed": tuple(range(4)),
}


def problem(c):
    """Why a configuration is none, or None: what Keras cannot do, or has no meaning."""
    for rule, why in _RULES:
        if rule(c):
            return why
    return None


_RULES = (
    (lambda c: c.recompute == "none" and c.route == "plain", "nothing to compare"),
    (lambda c: c.recompute == "none" and c.random != "none", "no large batch is equal"),
    (lambda c: c.replicas > 1 and c.looping, "loops run on one device"),
    (lambda c: c.replicas > 1 and c.mode == "xla", "refused by name"),
    (lambda c: c.replicas > 1 and c.random != "none", "differs by replica"),
    (
        lambda c: c.replicas > 1 and c.feed == "generator",
        "plain Keras loses all but the two batches that it has looked at",
    ),
    (lambda c: not c.accumulating and c.accum_steps != (1,), "no windows"),
    (lambda c: not c.splitting and c.split != "k2", "no split"),
    # Models.
    (lambda c: c.form != "functional" and (c.outputs > 1 or c.unused), "one output"),
    (lambda c: c.form != "functional" and c.model == "attention", "two arguments"),
    (lambda c: c.form == "subclass" and (c.looping or c.frozen), "not built"),
    (lambda c: c.form == "subclass" and c.replicas > 1, "not built"),
    (lambda c: c.form != "functional" and c.route == "model", "a functional class"),
    (lambda c: c.form != "functional" and c.route in OWN_STEPS, "a class of its own"),
    (lambda c: c.recompute == "segments" and c.form == "subclass", "no graph"),
    (lambda c: c.lengths != "equal" and not c.tokens, "no lengths"),
    (lambda c: c.lengths == "unmasked" and c.model != "tokens", "steps are coupled"),
    (lambda c: c.lengths == "unmasked" and c.outputs > 1, "steps are coupled"),
    (lambda c: c.features != "float32" and c.tokens, "tokens"),
    # Losses.
    (lambda c: c.loss in FUNCTIONS and c.outputs > 1, "functions of one output"),
    (lambda c: c.loss == "valid" and c.sequences, "samples that count"),
    (lambda c: c.loss in FUNCTIONS and c.masked, "shapes"),
    (lambda c: c.loss in FUNCTIONS and c.lengths == "unmasked", "padded"),
    (lambda c: c.loss == "none" and c.outputs > 1, "nothing compiled"),
    (
        lambda c: c.loss == "none" and c.added == "none" and not c.regularizer,
        "no loss at all",
    ),
    (lambda c: c.loss == "none" and c.route == "loop_weight", "no weight to say"),
    (
        lambda c: c.route == "own_step_object" and c.loss not in ("mse", "scce", "huber"),
        "a loss object",
    ),
    (
        lambda c: c.unused and c.route.startswith(("gradients", "loop_weight")),
        "one output",
    ),
    (
        lambda c: c.reduction != "sum_over_batch_size" and c.loss in (*FUNCTIONS, "none"),
        "functions have no reduction",
    ),
    (lambda c: c.compute_loss != "keras" and c.form != "functional", "a class"),
    (lambda c: c.compute_loss != "keras" and c.route in OWN_STEPS, "a class"),
    (lambda c: c.compute_loss != "keras" and c.route == "model", "a class"),
    (lambda c: c.compute_loss != "keras" and c.outputs > 1, "one output"),
    (lambda c: c.compute_loss != "keras" and c.sequences, "samples"),
    (lambda c: c.compute_loss != "keras" and c.looping, "weights are said"),
    (
        lambda c: (
            c.compute_loss in ("own_mean", "sum_over_n")
            and (c.loss != "mse" or c.reduction != "sum_over_batch_size")
        ),
        "an mse of its own",
    ),
    (
        lambda c: c.compute_loss == "by_batch" and c.loss not in ("mse", "scce", "huber"),
        "a loss object",
    ),
    (lambda c: c.hook and c.compute_loss not in ("own_mean", "sum_over_n"), "no need"),
    (lambda c: c.hook and not c.splitting, "not asked"),
    (
        lambda c: (
            (c.added != "none" or c.regularizer)
            and c.route in ("own_step_object", "gradients", "gradients_optimizer")
        ),
        "not in that loss",
    ),
    (lambda c: c.added != "none" and c.compute_loss in OVERRIDES[1:], "not in that loss"),
    (lambda c: c.regularizer and c.compute_loss in OVERRIDES[1:3], "not in that loss"),
    (lambda c: c.added != "none" and c.lengths != "equal", "padding is not masked"),
    (
        lambda c: c.route.startswith("gradients") and (c.loss != "mse" or c.outputs > 1),
        "the loop's own mse",
    ),
    (lambda c: c.route.startswith("gradients") and c.sequences, "samples"),
    (
        lambda c: (
            c.route.startswith("gradients") and c.reduction in ("mean", "sum_over_batch")
        ),
        "the loop's own mse",
    ),
    (
        lambda c: (
            c.route == "loop_weight"
            and (
                c.outputs > 1
                or c.loss not in ("mse", "scce", "huber")
                or c.lengths != "equal"
                or c.reduction == "mean"
            )
        ),
        "weights that are known by hand",
    ),
    (lambda c: c.route in OWN_STEPS[1:] and (c.outputs > 1 or c.unused), "one loss"),
    (lambda c: c.route == "own_step_twice" and c.tokens, "inputs are negated"),
    # Weights.
    (lambda c: c.weights == "timestep" and not c.sequences, "no time steps"),
    (lambda c: c.weights == "timestep" and c.outputs > 1, "one output has none"),
    (lambda c: c.weights == "timestep" and c.loss in FUNCTIONS, "shapes"),
    (
        lambda c: c.weights == "class" and (c.loss != "scce" or c.outputs > 1),
        "no classes",
    ),
    (lambda c: c.weights == "class" and c.sequences, "classes of samples"),
    (lambda c: c.weights == "class" and c.looping, "an argument of fit"),
    (lambda c: c.weights != "none" and c.loss == "none", "nothing to weight"),
    (lambda c: c.weights != "none" and c.lengths == "unmasked", "padded"),
    (lambda c: c.weights != "none" and c.loss in ("valid", "per_element"), "shapes"),
    (
        lambda c: (
            c.route.startswith("gradients")
            and c.weights != "none"
            and c.reduction == "sum_over_batch_size"
        ),
        "weights that are known by hand",
    ),
    # Metrics.
    (lambda c: c.metrics != "none" and (c.looping or c.route in OWN_STEPS), "no metrics"),
    (lambda c: c.metrics != "none" and c.loss == "none", "no targets"),
    (lambda c: c.metrics != "none" and c.lengths == "unmasked", "padded"),
    (lambda c: c.metrics == "scalar" and (c.masked or c.outputs > 1), "shapes"),
    (lambda c: c.metrics != "none" and c.unused, "Keras looks for targets"),
    (lambda c: c.metrics == "scalar" and c.loss == "scce", "of predictions"),
    # Optimizers and policies.
    (lambda c: c.half and c.optimizer == "static_scale", "-"),
    (lambda c: c.policy.startswith("part_") and c.form == "sequential", "-"),
    (lambda c: c.regularizer and c.policy == "float64", "Keras adds up unlike types"),
    (
        lambda c: c.optimizer == "global_clipnorm" and c.policy == "part_float64",
        "Keras adds up squares of unlike types",
    ),
    (lambda c: c.optimizer == "loss_scale" and c.policy == "mixed_bfloat16", "-"),
    (lambda c: c.optimizer in ("ema", "ema_overwrite") and c.tail == "flush", "order"),
    # Data and time.
    (
        lambda c: (
            c.feed == "arrays"
            and (
                c.lengths in ("trimmed", "unmasked")
                or len(set(c.sizes[:-1])) > 1
                or c.sizes[-1] > c.sizes[0]
            )
        ),
        "one batch size",
    ),
    (lambda c: c.feed != "sequence" and c.looping, "no fit"),
    (
        lambda c: c.feed == "generator" and (c.weights == "class" or c.epochs > 1),
        "Keras refuses",
    ),
    (
        lambda c: (
            c.feed == "train_on_batch"
            and (c.replicas > 1 or c.tail not in ("carry", "flush"))
        ),
        "no callbacks",
    ),
    (lambda c: c.feed == "train_on_batch" and c.steps_per_execution > 1, "no fit"),
    (lambda c: c.tail != "carry" and not c.accumulating, "no window"),
    (lambda c: c.tail not in ("carry", "flush") and c.looping, "no callbacks"),
    (lambda c: c.steps_per_execution > 1 and (c.looping or c.mode == "eager"), "no fit"),
    (lambda c: c.steps_per_execution > 1 and c.replicas > 1, "refused by TensorFlow"),
    (lambda c: c.mode == "xla" and c.lengths in ("trimmed", "unmasked"), "slow"),
    (lambda c: c.mode == "xla" and c.model == "conv", "slow"),
)


@st.composite
def configurations(draw, replicas=1, recompute=False):
    """Configurations that `problem` has nothing against."""
    c = Configuration(replicas=replicas)
    if recompute:
        how = draw(st.sampled_from(("blocks", "segments", "layer")))
        c = dataclasses.replace(c, recompute=how)
    for field in dataclasses.fields(Configuration)[2:]:
        options = OPTIONS.get(field.name) or _numbers(c, field.name)
        fits = {value: _fits(c, field.name, value) for value in set(options)}
        # Fields are drawn from unlike lists: of equal ones, hypothesis copies values.
        values = [(field.name, value) for value in options if fits[value]]
        c = dataclasses.replace(c, **dict([draw(st.sampled_from(values))]))
    assert problem(c) is None, c
    return c


def stream(seed, **drawn):
    """Endless configurations, all different, as hypothesis draws them.

    Args:
        seed: the same one gives the same configurations.
        drawn: the arguments of `configurations`.
    """
    seen = set()
    for part in itertools.count():
        for c in _some(f"{seed} {part}", **drawn):
            if c not in seen:
                seen.add(c)
                yield c


def _some(seed, **drawn):
    found = []

    # Of ten and more examples, hypothesis makes some as simple as they can be.
    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=9,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(configurations(**drawn))
    def draw(c):
        found.append(c)

    draw()
    return found


def _fits(c, name, value):
    if name in ("sizes", "accum_steps"):  # No rule is about them before the later fields.
        return True
    return problem(dataclasses.replace(c, **{name: value})) is None


def _numbers(c, name):
    if name == "sizes":
        return _sizes(4, (1, 2, 3, 3)) if c.accumulating else _sizes(8, (1, 2))
    if not c.accumulating:
        return [(1,)]
    return [(2,), (2,), (2,), (3,), (3,), (4,), (1,), (1, 2), (2, 1), (3, 2)]


@functools.cache
def _sizes(largest, shares):
    """Tuples of sizes, so many of each length, half of them of equal sizes."""
    sizes, found = range(1, largest + 1), []
    for length, share in enumerate(shares, 1):
        mixed = list(itertools.product(sizes, repeat=length))
        equal = [(size,) * length for size in sizes]
        times = largest ** (len(shares) - length)
        found += (mixed * times + equal * (len(mixed) * times // largest)) * share
    # Hypothesis prefers what is at the ends of a list.
    middle = len(found) // 3
    return found[middle:] + found[:middle]


def parse(line):
    """The configuration that a line stands for."""
    types = typing.get_type_hints(Configuration)
    given = {}
    for word in line.split():
        name, _, text = word.partition("=")
        if name not in types:
            raise ValueError(f"{name!r} is no field of a configuration")
        if types[name] is bool:
            given[name] = text == "True"
        elif types[name] in (int, str):
            given[name] = types[name](text)
        else:
            given[name] = tuple(int(number) for number in text.split(","))
    c = Configuration(**given)
    if why := problem(c):
        raise ValueError(f"this is no configuration: {why}. Received: {line}")
    return c


def simplest(c, fails):
    """A simpler configuration that fails likewise: fields back at their defaults.

    Args:
        c: the one that fails.
        fails: tells of another one whether it fails likewise.
    """
    tried, changed = {c}, True
    while changed:
        changed = False
        for simpler in _simpler(c):
            new = simpler not in tried and problem(simpler) is None
            tried.add(simpler)
            if new and fails(simpler):
                c, changed = simpler, True
                break
    return c


def _simpler(c):
    for field in reversed(dataclasses.fields(c)[2:]):
        short = field.name == "sizes" and len(c.sizes) == 1
        if getattr(c, field.name) != field.default and not short:
            yield dataclasses.replace(c, **{field.name: field.default})
    if c.recompute != "none":
        yield dataclasses.replace(c, recompute="none", random="none")
    for i in range(len(c.sizes)):
        if len(c.sizes) > 1:
            yield dataclasses.replace(c, sizes=c.sizes[:i] + c.sizes[i + 1 :])
    if len(c.accum_steps) > 1:
        yield dataclasses.replace(c, accum_steps=c.accum_steps[:1])


def _text(value):
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def random_of(c, purpose):
    """Random numbers that depend on the seed and the purpose alone."""
    return np.random.default_rng([c.seed, *purpose.encode()])
