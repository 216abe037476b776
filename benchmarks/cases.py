"""The cases of the equality table: data, weights and settings, in NumPy alone.

Every peer trains the same small networks on the same data, in its own environment, beside
a plain step of its own framework on the large batch. Micro-batches differ in scale, length
and weight, so that a mean, a sum, the first, the last and the largest of them all differ.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

MICRO_BATCH, WINDOW = 4, 4
FEATURES, UNITS, OUTPUTS = 5, 8, 4
WORDS, LENGTH, VECTOR = 12, 8, 6


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        title: what the row is about.
        network: "dense", "normalized" (with BatchNormalization) or "tokens".
        rows: samples that are trained on, once, in their order.
        large: samples of a large batch: one update each.
        micro_batch: samples of a micro-batch.
        optimizer: "sgd", "adam" or "adamw".
        options: arguments of the optimizer, by the names of Keras.
        weighted: whether samples have weights, and by what their loss is divided.
        loss: "mean", or "contrastive": each sample against the others of its batch.
        extra: what else is special, a word that each peer knows.
        compared: "weights" and the loss scale; or "statistics", the moving ones.
        tolerance: the error from which on a result is wrong.
    """

    title: str
    network: str = "dense"
    rows: int = 16
    large: int = 16
    micro_batch: int = MICRO_BATCH
    optimizer: str = "sgd"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    weighted: str = ""
    loss: str = "mean"
    extra: str = ""
    compared: str = "weights"
    tolerance: float = 1e-5

    @property
    def accum_steps(self) -> int:
        """Micro-batches of a full window."""
        return -(-self.large // self.micro_batch)


CASES = {
    "mean": Case("mean loss, equal micro-batches"),
    "tail": Case("13 samples in micro-batches of 4", rows=13, large=13),
    "open": Case("24 samples, windows of 16: the last stays open", rows=24, extra="open"),
    "weights": Case("sample weights, divided by samples", weighted="samples"),
    "weights_sum": Case("sample weights, divided by their sum", weighted="weights"),
    "tokens": Case("masked tokens, texts of unlike length", network="tokens"),
    "global_clipnorm": Case(
        "clipping by the global norm", options={"global_clipnorm": 0.1}
    ),
    "clipnorm": Case("clipping by each variable's norm", options={"clipnorm": 0.05}),
    "regularizer": Case("L2 regularizer", extra="regularizer"),
    "adam": Case("Adam, 3 updates", rows=48, optimizer="adam"),
    "adamw": Case("AdamW, weight decay, 3 updates", rows=48, optimizer="adamw"),
    "schedule": Case("learning-rate schedule, 3 updates", rows=48, extra="schedule"),
    "ema": Case(
        "moving average of weights, 3 updates",
        rows=48,
        options={"use_ema": True, "ema_momentum": 0.5},
    ),
    "constraint": Case("constraint on weights", extra="constraint"),
    "one": Case("windows of one micro-batch, 3 updates", rows=48, micro_batch=16),
    "float16": Case(
        "mixed_float16, loss scale, 2 updates", rows=32, extra="float16", tolerance=1e-2
    ),
    "overflow": Case(
        "mixed_float16, an overflow in the first of 2 windows",
        rows=32,
        extra="overflow",
        tolerance=1e-2,
    ),
    "normalization": Case("BatchNormalization: the update", network="normalized"),
    "statistics": Case(
        "BatchNormalization: moving statistics",
        network="normalized",
        compared="statistics",
    ),
    "contrastive": Case("contrastive loss", loss="contrastive"),
    "replicas": Case("two replicas", extra="replicas"),
}


@dataclasses.dataclass(frozen=True)
class Data:
    """What is trained on: inputs, targets, and weights of the samples or None."""

    x: np.ndarray
    y: np.ndarray
    weights: np.ndarray | None


def make_data(case: Case) -> Data:
    """Returns the data of a case, the same at each call."""
    rng = np.random.default_rng(7)
    # Each micro-batch of another scale, so that each has another gradient.
    scale = 0.3 + np.arange(case.rows) // MICRO_BATCH % WINDOW
    if case.network == "tokens":
        lengths = rng.permutation(np.linspace(1, LENGTH, case.rows).round().astype(int))
        words = rng.integers(1, WORDS, (case.rows, LENGTH + 1))
        words[np.arange(LENGTH + 1) > lengths[:, None]] = 0
        x, y = words[:, :-1].astype(np.int32), words[:, 1:].astype(np.int32)
    else:
        x = rng.normal(size=(case.rows, FEATURES)) * scale[:, None]
        y = rng.normal(size=(case.rows, OUTPUTS)) + scale[:, None] / 4
        x, y = x.astype(np.float32), y.astype(np.float32)
    if case.extra == "overflow":
        x[5, 2] = 6e4  # Finite in float16; what is multiplied by it is not.
        y[5] = -6e4
    weights = rng.uniform(0.1, 3.0, case.rows).astype(np.float32)
    return Data(x, y, weights if case.weighted else None)


def initial_weights(case: Case) -> list[np.ndarray]:
    """Returns the kernels and biases that every peer starts from, in their order."""
    rng = np.random.default_rng(3)

    def dense(inputs: int, units: int) -> list[np.ndarray]:
        kernel = rng.normal(size=(inputs, units)) / np.sqrt(inputs)
        return [kernel, 0.1 * rng.normal(size=units)]

    if case.network == "tokens":
        arrays = [rng.normal(size=(WORDS, VECTOR)), *dense(VECTOR, WORDS)]
    else:
        arrays = [*dense(FEATURES, UNITS), *dense(UNITS, OUTPUTS)]
    return [array.astype(np.float32) for array in arrays]


def rate(case: Case) -> float:
    """Returns the learning rate, the first one of a schedule.

    It is high where gradients are small: beside weights of 1, rounding would be all else.
    """
    if case.optimizer != "sgd":
        return 0.01
    return 2.0 if case.network == "tokens" or case.options else 0.1


def error(
    found: list[np.ndarray], large: list[np.ndarray], start: list[np.ndarray]
) -> float:
    """Returns the largest difference, in units of the largest change that was due."""

    def largest(left: list[np.ndarray], right: list[np.ndarray]) -> float:
        pairs = zip(left, right, strict=True)
        return max(float(np.abs(np.subtract(a, b, dtype=float)).max()) for a, b in pairs)

    return largest(found, large) / largest(large, start)
