"""Worker for GradientAccumulator, which runs on tf-keras (`TF_USE_LEGACY_KERAS=1`)."""

import contextlib
import functools
import importlib.metadata
from collections.abc import Callable
from typing import Any

import numpy as np
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
from common import WORKLOADS, endless_batches
from gradient_accumulator import (
    AccumBatchNormalization,
    GradientAccumulateModel,
    GradientAccumulateOptimizer,
)
from heap import peak_above_level

WINDOWS = Windows()
MODEL, OPTIMIZER = "GradientAccumulateModel", "GradientAccumulateOptimizer"
keras = tf.keras


def versions() -> dict[str, str]:
    """Returns what was measured."""
    names = ["tensorflow", "tf-keras", "gradient-accumulator"]
    return {name: importlib.metadata.version(name) for name in names}


def compile_window(
    method: str, model: str, xla: bool, k: int
) -> tuple[keras.Model, Callable[[], object]]:
    """Returns a model, and a window of a method through what `fit` calls."""
    workload = WORKLOADS[model]
    network = workload.build(k=keras)
    if method == MODEL:
        network = GradientAccumulateModel(
            accum_steps=k, inputs=network.inputs, outputs=network.outputs
        )
    optimizer = keras.optimizers.Adam()
    if method == OPTIMIZER:
        legacy = keras.optimizers.legacy.Adam()
        optimizer = GradientAccumulateOptimizer(legacy, accum_steps=k)
    network.compile(optimizer, workload.loss, jit_compile=xla)
    large = method == "large"
    rows = workload.micro_batch * (k if large else 1)
    batches = iter(endless_batches(workload, rows))
    network.make_train_function()

    def window() -> None:
        for _ in range(1 if large else k):
            network.train_function(batches)

    return network, window


def prepare(method: str, model: str, xla: bool, k: int) -> float:
    """Makes a window ready for `time`."""
    return WINDOWS.add(method, compile_window(method, model, xla, k)[1])


def memory(method: str, model: str, xla: bool, k: int) -> dict[str, float]:
    """Returns the bytes of a window: its peak, and what is held beyond plain Adam."""
    network, window = compile_window(method, model, xla, k)
    peak = peak_above_level(window)
    plain = 4 * WORKLOADS[model].build(k=keras).count_params()
    held = 4 * network.count_params() - plain  # The model keeps its sums as weights.
    if method == OPTIMIZER:
        sums = [network.optimizer.get_slot(w, "ga") for w in network.trainable_weights]
        held = sum(v.dtype.size * v.shape.num_elements() for v in sums)
    return {"peak": peak, "held": held, "parameters": plain}


def make_network(case: Case, method: str) -> keras.Model:
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
            x = normalization(case, method)(x)
        outputs = dense(OUTPUTS)(keras.layers.Activation("tanh")(x))
    if method == MODEL:
        model = GradientAccumulateModel(
            accum_steps=case.accum_steps,
            mixed_precision=case.extra in ("float16", "overflow"),
            experimental_distributed_support=case.extra == "replicas",
            inputs=inputs,
            outputs=outputs,
        )
    else:
        model = keras.Model(inputs, outputs)
    kernels = [w for w in model.weights if w.name.split("/")[-1][:-2] in KERNELS]
    for variable, value in zip(kernels, initial_weights(case), strict=True):
        variable.assign(value)
    return model


KERNELS = ("kernel", "bias", "embeddings")


def normalization(case: Case, method: str) -> keras.layers.Layer:
    """Returns the peer's layer where its statistics are compared, else Keras's."""
    if case.compared == "statistics" and method != "large":
        return AccumBatchNormalization(accum_steps=case.accum_steps, momentum=0.9)
    return keras.layers.BatchNormalization(momentum=0.9)


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
    return keras.losses.MeanSquaredError()


def make_optimizer(case: Case, method: str) -> Any:
    """Returns the optimizer of a case; the wrapper wants one of the older kind."""
    learning_rate: Any = rate(case)
    if case.extra == "schedule":
        learning_rate = keras.optimizers.schedules.ExponentialDecay(rate(case), 1, 0.5)
    options = dict(case.options)
    clipping = {}
    module = keras.optimizers
    if method == OPTIMIZER and case.optimizer != "adamw" and "use_ema" not in options:
        # It never asks the inner optimizer to clip, and takes these arguments itself.
        clipping, options, module = options, {}, keras.optimizers.legacy
    if case.optimizer == "adamw":
        optimizer = module.AdamW(learning_rate, weight_decay=0.1, **options)
    else:
        classes = {"sgd": module.SGD, "adam": module.Adam}
        optimizer = classes[case.optimizer](learning_rate, **options)
    if method == OPTIMIZER:
        optimizer = GradientAccumulateOptimizer(
            optimizer, accum_steps=case.accum_steps, **clipping
        )
    if case.extra in ("float16", "overflow"):
        optimizer = keras.mixed_precision.LossScaleOptimizer(optimizer)
    return optimizer


def strategy_of(case: Case, method: str) -> contextlib.AbstractContextManager[object]:
    """Returns the scope to train in: for two replicas, but not of the large batch."""
    if case.extra == "replicas" and method != "large":
        return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope()
    return contextlib.nullcontext()


def fit(case: Case, method: str) -> keras.Model:
    """Returns the network of a case, trained by a method."""
    data, large = make_data(case), method == "large"
    model = make_network(case, method)
    model.compile(make_optimizer(case, method), make_loss(case))
    model.fit(
        data.x,
        data.y,
        sample_weight=data.weights,
        batch_size=case.large if large else case.micro_batch,
        shuffle=False,
        verbose=0,
    )
    return model


def observe(case: Case, model: keras.Model) -> list[np.ndarray]:
    """Returns what is compared."""
    if case.compared == "statistics":
        return [w.numpy() for w in model.non_trainable_weights if "moving" in w.name]
    found = [w.numpy() for w in model.trainable_weights]
    if case.extra == "overflow":  # in units of the first scale
        found.append(np.array(model.optimizer.loss_scale) / 2.0**15)
    return found


def train(case: Case, method: str) -> list[np.ndarray]:
    """Returns what a method leaves."""
    policy = "mixed_float16" if case.extra in ("float16", "overflow") else "float32"
    keras.mixed_precision.set_global_policy(policy)
    with strategy_of(case, method):
        return observe(case, fit(case, method))


@functools.cache
def large_batch(name: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns what a plain step on the large batch leaves, and what it starts from."""
    case = CASES[name]
    found = train(case, "large")
    model = make_network(case, "large")
    if case.extra == "overflow":
        return found, [*(w.numpy() for w in model.trainable_weights), np.ones(())]
    return found, observe(case, model)


def equality(case: str, method: str) -> dict[str, Any]:
    """Returns the error of a method in a case, and the warnings that it gave."""
    if CASES[case].weighted == "weights":
        return {"none": "tf-keras has no loss that is divided by the sum of weights"}
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
