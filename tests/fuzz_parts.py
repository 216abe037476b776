"""The models, losses, optimizers and data that a `Configuration` names."""

import contextlib
import functools

import keras
import numpy as np
import tensorflow as tf
from fuzz_configurations import OWN_STEPS, random_of

import keras_accum as ka

VOCABULARY, LENGTH, CLASSES = 9, 5, 3
layers = keras.layers


# ----------------------------------------------------------------------------- models


@contextlib.contextmanager
def policy(c):
    """The dtype policy of a configuration, for as long as its model lives."""
    name = {"all_float64": "float64"}.get(c.policy, c.policy)
    keras.config.set_dtype_policy("float32" if name.startswith("part_") else name)
    keras.config.set_floatx("float64" if c.policy == "all_float64" else "float32")
    try:
        yield
    finally:
        keras.config.set_dtype_policy("float32")
        keras.config.set_floatx("float32")


class Adds(layers.Layer):
    """Passes its input on, and adds a loss of it."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.supports_masking = kind, True

    def call(self, x):
        each = 0.1 * keras.ops.sum(x**2, axis=tuple(range(1, len(x.shape))))
        if self.kind == "mean":
            each = keras.ops.mean(each)
        elif self.kind == "total":
            each = keras.ops.sum(each)
        self.add_loss(keras.ops.cast(each, keras.config.floatx()))
        return x


class Attends(layers.Layer):
    """Self-attention with one argument."""

    def __init__(self):
        super().__init__()
        self.inside = layers.MultiHeadAttention(2, 3)

    def build(self, shape):
        self.inside.build(shape, shape)

    def call(self, x):
        return x + self.inside(x, x)


def trunk(c):
    """The layers up to the features that outputs are made of; the block among them."""
    options = {}
    if c.regularizer:
        options["kernel_regularizer"] = keras.regularizers.L2(0.05)
    if c.optimizer == "constraint":
        options["kernel_constraint"] = keras.constraints.MaxNorm(0.6)
    dense = functools.partial(layers.Dense, 4, "tanh", **options)
    if c.model == "mlp":
        found = [dense()]
    elif c.model == "conv":
        found = [layers.Conv2D(3, 2, activation="tanh", **options)]
        found += [block(c, layers.Conv2D(3, 2, activation="tanh")), layers.Flatten()]
    elif c.model == "attention":
        found = [dense(), block(c, Attends())]
    else:
        found = [layers.Embedding(VOCABULARY, 4, mask_zero=c.masked), dense()]
    if c.model == "gru":
        found.append(block(c, layers.GRU(3, return_sequences=True)))
    elif c.model in ("mlp", "tokens"):
        found.append(block(c, layers.Dense(4, "tanh")))
    if c.policy.startswith("part_"):
        dtype = {"part_float64": "float64", "part_float16": "mixed_float16"}[c.policy]
        found.append(layers.Dense(3, "tanh", dtype=dtype))
    if c.added == "activity":
        # Keras adds up losses of one type only.
        penalty, dtype = keras.regularizers.L2(0.1), keras.config.floatx()
        found.append(layers.Dense(3, activity_regularizer=penalty, dtype=dtype))
    elif c.added != "none":
        found.append(Adds(c.added))
    return found


def block(c, layer):
    """A layer with others around it, to be computed again, or not."""
    inside = [layers.Dense(4), layer]
    if c.random == "dropout":
        inside.insert(1, layers.Dropout(0.3))
    elif c.random == "batch_norm":
        inside.append(layers.BatchNormalization())
    made = keras.Sequential(inside, name="block_0")
    return ka.Recompute(made) if c.recompute == "layer" else made


def head():
    return layers.Dense(CLASSES, dtype=_loss_dtype())


def _loss_dtype():
    return keras.config.floatx() if "16" in keras.config.dtype_policy().name else None


def input_of(c):
    if c.tokens:
        return keras.Input((None,), dtype="int32")
    shape = {"mlp": (5,), "conv": (4, 4, 1), "attention": (3, 4)}[c.model]
    return keras.Input(shape)


def model_of(c):
    """The model of a configuration, not compiled, with weights by its seed."""
    keras.utils.set_random_seed(c.seed + 1)
    found = [*trunk(c), head()]
    if c.form == "sequential":
        model = keras.Sequential([input_of(c), *found])
    elif c.form == "subclass":
        model = Chain(found)
    else:
        model = _functional(c, found)
    if c.frozen:
        next(layer for layer in model.layers if layer.weights).trainable = False
    if c.recompute == "blocks":
        ka.recompute(model, "block_*")
    elif c.recompute == "segments":
        ka.recompute(model, segments=2)
    return model


class Chain(keras.Model):
    """Layers one after another, built by the first batch."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def call(self, x):
        for layer in self.inside:
            x = layer(x)
        return x


def _functional(c, found):
    inputs = input_of(c)
    x = inputs
    for layer in found[:-1]:
        x = layer(x)
    outputs = found[-1](x)
    if c.outputs > 1 or c.unused:
        flat = x
        if c.sequences:
            flat = layers.GlobalAveragePooling1D()(x)
        outputs = {"a": outputs}
        if c.outputs > 1:
            outputs["b"] = head()(flat)
        if c.unused:
            outputs["c"] = head()(flat)
    if c.route == "model":
        return ka.GradientAccumulationModel(inputs, outputs, **split_of(c))
    return _class_of(c)(inputs, outputs)


def split_of(c):
    """The arguments of `accumulate`."""
    name = {"k": "accum_steps", "m": "micro_batch_size"}[c.split[0]]
    return {name: int(c.split[1:])}


# ---------------------------------------------------------------- models of the user's


def _class_of(c):
    if c.route in OWN_STEPS:
        return {
            "own_step": OwnStep,
            "own_step_object": OwnStepObject,
            "own_step_twice": OwnStepTwice,
        }[c.route]
    made = {
        "keras": keras.Model,
        "plus": Plus,
        "own_mean": OwnMean,
        "sum_over_n": SumOverN,
        "by_batch": ByBatch,
    }[c.compute_loss]
    return _with_hook(made) if c.hook else made


@functools.cache
def _with_hook(made):
    return type(f"Hooked{made.__name__}", (made,), {"compute_loss_weight": _divisor})


def _divisor(self, x, y, y_pred, sample_weight):
    if sample_weight is None or isinstance(self, SumOverN):
        return keras.ops.cast(keras.ops.shape(y_pred)[0], "float32")
    return keras.ops.sum(keras.ops.cast(sample_weight, "float32"))


class Plus(keras.Model):
    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + 0.1 * keras.ops.cast(keras.ops.mean(y_pred**2), loss.dtype)


class OwnMean(keras.Model):
    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        each = keras.losses.MeanSquaredError(reduction="none")(y, y_pred)
        if sample_weight is None:
            return keras.ops.mean(each)
        weight = keras.ops.cast(sample_weight, each.dtype)
        return keras.ops.divide_no_nan(
            keras.ops.sum(each * weight), keras.ops.sum(weight)
        )


class SumOverN(keras.Model):
    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        total = keras.losses.MeanSquaredError(reduction="sum")(y, y_pred, sample_weight)
        return total / keras.ops.cast(keras.ops.shape(y_pred)[0], total.dtype)


class ByBatch(keras.Model):
    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        if sample_weight is not None:
            total = keras.ops.sum(sample_weight)
            sample_weight = sample_weight / keras.ops.maximum(total, 1)
        return super().compute_loss(x, y, y_pred, sample_weight, training)


class OwnStep(keras.Model):
    """The usual `train_step` of one's own."""

    def train_step(self, data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y, sample_weight)
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss}

    def loss_of(self, x, y, sample_weight):
        y_pred = self(x, training=True)
        return self.compute_loss(x, y, y_pred, sample_weight)


class OwnStepObject(OwnStep):
    """Calls its loss by itself."""

    def loss_of(self, x, y, sample_weight):
        return self.loss_object(y, self(x, training=True), sample_weight)


class OwnStepTwice(OwnStep):
    """The loss of the inputs, and of their negatives."""

    def loss_of(self, x, y, sample_weight):
        first = super().loss_of(x, y, sample_weight)
        return first + 0.5 * super().loss_of(-x, y, sample_weight)


# ----------------------------------------------------------------------------- losses


def per_sample(y, y_pred):
    square = tf.square(tf.cast(y, y_pred.dtype) - y_pred)
    return tf.reduce_mean(square, axis=list(range(1, len(square.shape))))


def per_element(y, y_pred):
    return tf.square(tf.cast(y, y_pred.dtype) - y_pred)


def valid(y, y_pred):
    return tf.boolean_mask(per_sample(y, y_pred), y[:, 0] > 0)


def scalar(y, y_pred):
    return tf.reduce_mean(per_sample(y, y_pred))


def total(y, y_pred):
    return tf.reduce_sum(per_sample(y, y_pred))


def coupled(y, y_pred):
    return tf.sqrt(tf.reduce_mean(per_sample(y, y_pred)) + 0.01) + tf.reduce_max(y_pred)


FUNCTIONS = {
    f.__name__: f for f in (per_sample, per_element, valid, scalar, total, coupled)
}


def loss_object(c, reduction=None):
    made = {
        "mse": keras.losses.MeanSquaredError,
        "huber": keras.losses.Huber,
        "scce": functools.partial(
            keras.losses.SparseCategoricalCrossentropy, from_logits=True
        ),
    }[c.loss]
    return made(reduction=reduction or c.reduction)


class Stripped(keras.losses.Loss):
    """The loss of the steps that are not padding (whose targets are -100)."""

    def __init__(self, inside):
        super().__init__(reduction=inside.reduction)
        self.inside = inside

    def call(self, y_true, y_pred):
        kept = y_true if len(y_true.shape) == 2 else y_true[..., 0]
        kept = kept > -50
        return self.inside.call(y_true[kept], y_pred[kept])


def called_loss(c, oracle=False):
    """What a step of the user's calls."""
    return (
        Stripped(loss_object(c)) if oracle and c.lengths == "unmasked" else loss_object(c)
    )


def loss_of(c, oracle=False):
    """What `compile` gets as `loss`."""
    if c.loss == "none":
        return None
    made = FUNCTIONS[c.loss] if c.loss in FUNCTIONS else called_loss(c, oracle)
    if c.outputs > 1:
        made = {"a": made, "b": loss_object(c)}
    elif c.unused:
        made = {"a": made}
    return made | {"c": None} if c.unused else made


def root(y, y_pred):
    y = keras.ops.cast(y, y_pred.dtype)
    return keras.ops.sqrt(keras.ops.mean(keras.ops.square(y - y_pred)))


def metrics_of(c):
    """The arguments of `compile` that say what to measure."""
    if c.metrics == "none":
        return {}
    made = "mae" if c.loss != "scce" else "sparse_categorical_accuracy"
    made = root if c.metrics == "scalar" else made
    found = [made]
    if c.outputs > 1 or c.unused:
        found = {"a": found} | ({"b": [made]} if c.outputs > 1 else {})
    return {"weighted_metrics" if c.metrics == "weighted" else "metrics": found}


# ------------------------------------------------------------------------- optimizers


def optimizer_of(c):
    """The optimizer that is to make one update per window."""
    o = keras.optimizers
    ema = {"use_ema": True, "ema_momentum": 0.5}
    made = {
        "momentum": lambda: o.SGD(0.2, momentum=0.9),
        "adam": lambda: o.Adam(0.05, epsilon=1e-2),
        "adamw": lambda: o.AdamW(0.05, epsilon=1e-2, weight_decay=0.1),
        "rmsprop": lambda: o.RMSprop(0.05, epsilon=1e-2),
        "ema": lambda: o.SGD(0.2, **ema),
        "ema_overwrite": lambda: o.SGD(0.2, ema_overwrite_frequency=2, **ema),
        "clipnorm": lambda: o.SGD(0.5, clipnorm=0.1),
        "global_clipnorm": lambda: o.SGD(0.5, global_clipnorm=0.2),
        "clipvalue": lambda: o.SGD(0.5, clipvalue=0.02),
        "schedule": lambda: o.SGD(o.schedules.ExponentialDecay(0.3, 1, 0.5)),
        "decay": lambda: o.SGD(0.2, weight_decay=0.2),
        "static_scale": lambda: o.SGD(0.2, loss_scale_factor=8.0),
    }.get(c.optimizer, lambda: o.SGD(0.2))()
    if c.optimizer == "loss_scale" or c.half:
        made = o.LossScaleOptimizer(made, initial_scale=256.0)
    return made


def wrapped(c):
    """`optimizer_of` inside of what accumulates."""
    steps = c.accum_steps
    if len(steps) > 1:
        function = lambda update: tf.where(update == 0, *steps)  # noqa: E731
    reduction = "sum" if sums(c) else "mean"
    return ka.AccumOptimizer(
        optimizer_of(c),
        steps[0] if len(steps) == 1 else function,
        reduction=reduction,
    )


def sums(c):
    """Whether the losses are sums over samples, as their user knows."""
    return c.reduction == "sum" or c.loss in ("total", "none_total")


# ------------------------------------------------------------------------------- data


def batches_of(c):
    """What is fed, batch by batch: tuples of inputs, targets and sample weights."""
    ends = np.cumsum(c.sizes)
    rows = [slice(end - size, end) for end, size in zip(ends, c.sizes)]
    x, y, weights = _arrays(c, int(ends[-1]), c.sizes[0])
    found = [(_take(x, s), _take(y, s), _take(weights, s)) for s in rows]
    if c.lengths not in ("trimmed", "unmasked"):
        return found
    held = [max(1, int((batch[0] != 0).sum(-1).max())) for batch in found]
    return [_cut(c, batch, length) for batch, length in zip(found, held)]


def joined(c, batches):
    """Batches as one: shorter sequences are padded, targets without a mask with -100."""

    def join(*arrays):
        if arrays[0] is None:
            return None
        longest = max(a.shape[1] for a in arrays) if arrays[0].ndim > 1 else 0
        masked = c.masked or arrays[0].dtype == "int32"
        padded = [
            np.pad(
                a,
                [(0, 0), (0, longest - a.shape[1])] + [(0, 0)] * (a.ndim - 2),
                constant_values=0 if masked else -100,
            )
            if a.ndim > 1
            else a
            for a in arrays
        ]
        return np.concatenate(padded)

    return tf.nest.map_structure(join, *batches)


def _arrays(c, n, first):
    rng = random_of(c, "data")
    spread = 1 + np.arange(n) % 3
    if c.tokens:
        x = rng.integers(1, VOCABULARY, (n, LENGTH)).astype("int32")
        _shorten(c, x, rng, first)
    else:
        shape = {"mlp": (5,), "conv": (4, 4, 1), "attention": (3, 4)}[c.model]
        x = rng.normal(size=(n, *shape)) * _over(spread, len(shape))
        x = x.astype(c.features)
    steps = x.shape[1:2] if c.sequences else ()
    y = _targets(c, rng, n, steps)
    weights = _weights(c, rng, n, steps, first)
    if c.outputs > 1 or c.unused:
        y = {"a": y}
        weights = None if weights is None else {"a": weights}
        if c.outputs > 1:
            y["b"] = _targets(c, rng, n, ())
        if c.outputs > 1 and weights is not None:
            weights["b"] = weights["a"].ravel()[::-1].copy()
    return x, y, weights


def _shorten(c, x, rng, first):
    """Pads `x`, by 0, as the configuration's lengths say."""
    if c.lengths == "equal":
        return
    if c.lengths == "unmasked":
        ends = np.cumsum(c.sizes)
        of_batch = rng.integers(1, LENGTH + 1, len(c.sizes))
        held = np.repeat(of_batch, np.diff([0, *ends]))
    else:
        held = rng.integers(1, LENGTH + 1, len(x))
    if c.lengths == "empty":
        held[:first] = 0
    for row, length in enumerate(held):
        x[row, length:] = 0


def _take(tree, rows):
    return tf.nest.map_structure(lambda a: None if a is None else a[rows], tree)


def _cut(c, batch, length):
    x, y, weights = batch
    of_steps = lambda a: a is not None and a.ndim > 1 and a.shape[1] == LENGTH  # noqa: E731
    cut = lambda a: a[:, :length] if of_steps(a) else a  # noqa: E731
    return tf.nest.map_structure(cut, (x, y, weights))


def _targets(c, rng, n, steps):
    if c.loss == "scce":
        # Float classes, which -100 may pad.
        return rng.integers(0, CLASSES, (n, *steps)).astype("float32")
    shape = (n, *steps, CLASSES)
    y = rng.normal(size=shape) * _over(1 + np.arange(n) % 4, len(shape) - 1) + 0.3
    return y.astype("float32")


def _weights(c, rng, n, steps, first):
    if c.weights in ("none", "class"):
        return None
    shape = (n, *steps) if c.weights == "timestep" else (n, *[1] * len(steps))
    w = rng.uniform(0.1, 3, shape)
    w[:first] *= 0.2
    if c.weights == "uniform":
        w[:] = 2
    elif c.weights == "zeros":
        w *= rng.integers(0, 2, shape)
    elif c.weights == "zero_batch":
        w[:first] = 0
    elif c.weights == "all_zero":
        w[:] = 0
    return w.astype("float32")


def _over(values, axes):
    return values.reshape(-1, *[1] * axes)
