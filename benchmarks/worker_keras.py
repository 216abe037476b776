"""Worker for Keras 3: this package, Keras's own accumulation, loops, and bounds."""

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import optimizer_overhead
import tensorflow as tf
from answers import Windows, answer, run_and_listen
from cases import (
    CASES,
    FEATURES,
    LENGTH,
    OUTPUTS,
    UNITS,
    VECTOR,
    WORDS,
    Case,
    error,
    initial_weights,
    make_data,
    rate,
)
from heap import peak_above_level
from windows import Case as TimedCase
from windows import compile_model, fit_window, floor_window, large_window, micro_window

import keras_accum as ka

WINDOWS = Windows()


def versions() -> dict[str, str]:
    """Returns what was measured."""
    return {"tensorflow": tf.__version__, "keras": keras.__version__} | {
        "keras_accum": ka.__version__
    }


def make_window(method: str, case: TimedCase) -> Callable[[], object]:
    """Returns a window of a method, through what `fit` calls."""
    adam, k = keras.optimizers.Adam, case.k
    if method == "floor":
        return floor_window(case, steps=1)
    if method == "large":
        return large_window(case)
    if method == "plain":  # one micro-batch, no accumulation
        return fit_window(compile_model(case, adam()), case, case.workload.micro_batch)
    if method == "accumulate":
        return large_window(case, functools.partial(ka.accumulate, accum_steps=k))
    if method == "AccumOptimizer":
        return micro_window(case, ka.AccumOptimizer(adam(), accum_steps=k), steps=1)
    assert method == "keras"
    return micro_window(case, adam(gradient_accumulation_steps=k), steps=1)


def prepare(method: str, model: str, xla: bool, k: int) -> float:
    """Makes a window ready for `time`."""
    return WINDOWS.add(method, make_window(method, TimedCase(model, xla, k)))


def memory(method: str, model: str, xla: bool, k: int) -> dict[str, float]:
    """Returns the bytes of a window: its peak, and what is held beyond plain Adam."""
    case = TimedCase(model, xla, k)
    window = case if method != "plain" else TimedCase(model, xla, 1)
    peak = peak_above_level(make_window(method, window))
    methods = {"AccumOptimizer": "ours", "keras": "keras"}
    state = optimizer_overhead.extra_state(case)
    held = state[methods[method]] if method in methods else 0
    return {"peak": peak, "held": held, "parameters": state["parameters"]}


def make_network(case: Case) -> keras.Model:
    """Returns the network of a case, with the weights that it starts from."""
    options: dict[str, Any] = {}
    if case.extra == "regularizer":
        options = {"kernel_regularizer": keras.regularizers.L2(0.05)}
    if case.extra == "constraint":
        options = {"kernel_constraint": keras.constraints.UnitNorm(axis=0)}
    dense = functools.partial(keras.layers.Dense, **options)
    if case.network == "tokens":
        inputs = keras.Input((LENGTH,), dtype="int32")
        x = keras.layers.Embedding(WORDS, VECTOR, mask_zero=True)(inputs)
        outputs = dense(WORDS)(x)
    else:
        inputs = keras.Input((FEATURES,))
        x = dense(UNITS)(inputs)
        if case.network == "normalized":
            x = keras.layers.BatchNormalization(momentum=0.9)(x)
        outputs = dense(OUTPUTS)(keras.layers.Activation("tanh")(x))
    model = keras.Model(inputs, outputs)
    kernels = [w for w in model.weights if w.path.split("/")[-1] in KERNELS]
    for variable, value in zip(kernels, initial_weights(case), strict=True):
        variable.assign(value)
    return model


KERNELS = ("kernel", "bias", "embeddings")


def contrastive(_: tf.Tensor, pairs: tf.Tensor) -> tf.Tensor:
    """Tells each sample's first half by its second half, among those of the batch."""
    left, right = tf.split(pairs, 2, axis=1)
    scores = tf.matmul(left, right, transpose_b=True)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(
        tf.range(tf.shape(scores)[0]), scores
    )


def make_loss(case: Case) -> Any:
    """Returns the loss of a case."""
    if case.loss == "contrastive":
        return contrastive
    if case.network == "tokens":
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if case.weighted == "weights":
        return keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    return keras.losses.MeanSquaredError()


def make_optimizer(case: Case, options: Mapping[str, Any]) -> keras.optimizers.Optimizer:
    """Returns the optimizer of a case, with more options."""
    learning_rate: Any = rate(case)
    if case.extra == "schedule":
        learning_rate = keras.optimizers.schedules.ExponentialDecay(rate(case), 1, 0.5)
    k = keras.optimizers
    classes = {"sgd": k.SGD, "adam": k.Adam, "adamw": k.AdamW}
    if case.optimizer == "adamw":
        options = {"weight_decay": 0.1, **options}
    optimizer = classes[case.optimizer](learning_rate, **case.options, **options)
    if case.extra in ("float16", "overflow"):
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    return optimizer


def fit(case: Case, method: str) -> keras.Model:
    """Returns the network of a case, trained by a method."""
    data, k = make_data(case), case.accum_steps
    options = {"gradient_accumulation_steps": k} if method == "keras" else {}
    optimizer = make_optimizer(case, options)
    model = make_network(case)
    if method in ("accumulate", "AccumOptimizer") and case.compared == "statistics":
        ka.replace_batch_normalization(model)
    if method == "AccumOptimizer":
        optimizer = ka.AccumOptimizer(optimizer, accum_steps=k)
    if method == "accumulate":
        ka.accumulate(model, accum_steps=k, two_pass=case.loss == "contrastive")
    model.compile(optimizer, make_loss(case), jit_compile=False)
    if method == "mean of means":
        loop(case, model)
        return model
    callbacks = []
    if method == "AccumOptimizer" and case.extra == "open":
        callbacks = [ka.AccumulationMonitor(tail="flush_epoch")]
    whole = method in ("large", "accumulate")
    model.fit(
        data.x,
        data.y,
        sample_weight=data.weights,
        batch_size=case.large if whole else case.micro_batch,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )
    return model


def loop(case: Case, model: keras.Model) -> None:
    """Trains as many loops do: each window's update is by the mean of its gradients."""
    data, optimizer = make_data(case), model.optimizer
    variables = model.trainable_variables
    optimizer.build(variables)
    for window in range(0, case.rows, case.large):
        gradients = []
        end = min(window + case.large, case.rows)
        for start in range(window, end, case.micro_batch):
            rows = slice(start, min(start + case.micro_batch, end))
            weights = None if data.weights is None else data.weights[rows]
            with tf.GradientTape() as tape:
                predicted = model(data.x[rows], training=True)
                loss = model.compute_loss(data.x[rows], data.y[rows], predicted, weights)
                loss = optimizer.scale_loss(loss)
            gradients.append(tape.gradient(loss, variables))
        means = [
            tf.add_n([tf.convert_to_tensor(g) for g in each]) / len(each)
            for each in zip(*gradients, strict=True)
        ]
        optimizer.apply(means, variables)
    optimizer.finalize_variable_values(variables)


def strategy_of(case: Case, method: str) -> contextlib.AbstractContextManager[object]:
    """Returns the scope to train in: for two replicas, but not of the large batch."""
    if case.extra == "replicas" and method != "large":
        return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope()
    return contextlib.nullcontext()


def observe(case: Case, model: keras.Model) -> list[np.ndarray]:
    """Returns what is compared."""
    if case.compared == "statistics":
        return [np.array(w) for w in model.non_trainable_weights if "moving" in w.path]
    found = [np.array(w) for w in model.trainable_weights]
    if case.extra == "overflow":  # in units of the first scale
        found.append(np.array(model.optimizer.dynamic_scale) / 2.0**15)
    return found


def train(case: Case, method: str) -> list[np.ndarray]:
    """Returns what a method leaves."""
    policy = "mixed_float16" if case.extra in ("float16", "overflow") else "float32"
    keras.config.set_dtype_policy(policy)
    with strategy_of(case, method):
        return observe(case, fit(case, method))


@functools.cache
def large_batch(name: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns what a plain step on the large batch leaves, and what it starts from."""
    case = CASES[name]
    found = train(case, "large")
    model = make_network(case)
    if case.extra == "overflow":
        return found, [*(np.array(w) for w in model.trainable_weights), np.ones(())]
    return found, observe(case, model)


def equality(case: str, method: str) -> dict[str, Any]:
    """Returns the error of a method in a case, and the warnings that it gave."""
    if CASES[case].extra == "replicas" and method == "mean of means":
        return {"none": "a loop for one device"}
    found, warned = run_and_listen(lambda: train(CASES[case], method))
    return {"error": error(found, *large_batch(case)), "warned": warned}


def main() -> None:
    """Answers until the parent ends."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, logical)
    calls = [versions, prepare, memory, equality]
    answer({call.__name__: call for call in calls} | {"time": WINDOWS.time})


if __name__ == "__main__":
    main()
