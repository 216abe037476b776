"""Worker for JAX: optax `MultiSteps`, and a hand-written `lax.scan` over micro-batches."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from answers import Windows, answer, run_and_listen
from cases import CASES, Case, error, initial_weights, make_data, rate
from heap import peak_above_level
from samples import sample_images, sample_tokens, sample_vectors

WINDOWS = Windows()
MICRO_BATCH = 8  # as in the workloads of `common.py`
HEADS = 4
Params = Any
# The name of the workload -> what makes its data.
SAMPLES = {"mlp": sample_vectors, "cnn": sample_images, "transformer": sample_tokens}
NONE = {
    "ema": "optax averages no weights",
    "constraint": "optax has no constraints on weights",
    "float16": "optax has no loss scale",
    "overflow": "optax has no loss scale",
    "statistics": "optax knows no layers",
    "replicas": "a loop for one device",
}


def versions() -> dict[str, str]:
    """Returns what was measured."""
    return {"jax": jax.__version__, "optax": optax.__version__}


def draw(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Returns a kernel of uniform values, as Keras draws them (Glorot)."""
    fans = int(np.prod(shape[:-2], initial=1)) * (shape[-2] + shape[-1])
    limit = np.sqrt(6 / fans)
    return rng.uniform(-limit, limit, shape).astype(np.float32)


def make_params(model: str) -> Params:
    """Returns the parameters of a workload's network."""
    rng = np.random.default_rng(0)
    dense = lambda a, b: {"w": draw(rng, a, b), "b": np.zeros(b, np.float32)}  # noqa: E731
    if model == "mlp":
        return [dense(1024, 1024) for _ in range(6)]
    if model == "cnn":
        sizes = [(3, 16), (16, 32), (32, 64), (64, 128)]
        kernels = [
            {"w": draw(rng, 3, 3, a, b), "b": np.zeros(b, np.float32)} for a, b in sizes
        ]
        return [*kernels, dense(128, 10)]
    norm = lambda: {"g": np.ones(128, np.float32), "b": np.zeros(128, np.float32)}  # noqa: E731
    block = lambda: {  # noqa: E731
        "n1": norm(),
        "qkv": [dense(128, 128) for _ in range(3)],
        "o": dense(128, 128),
        "n2": norm(),
        "up": dense(128, 512),
        "down": dense(512, 128),
    }
    embedding = rng.uniform(-0.05, 0.05, (1000, 128)).astype(np.float32)
    return {"e": embedding, "blocks": [block(), block()], "out": dense(128, 1000)}


def dense(p: Params, x: jax.Array) -> jax.Array:
    """Applies a dense layer."""
    return x @ p["w"] + p["b"]


def normalize(p: Params, x: jax.Array) -> jax.Array:
    """Applies a layer normalization, with the epsilon of Keras."""
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + 1e-3) * p["g"] + p["b"]


def attend(block: Params, x: jax.Array) -> jax.Array:
    """Applies self-attention of `HEADS` heads."""
    rows, length, width = x.shape
    split = lambda y: y.reshape(rows, length, HEADS, width // HEADS)  # noqa: E731
    q, k, v = (split(dense(p, x)) for p in block["qkv"])
    scores = jnp.einsum("rqhd,rkhd->rhqk", q, k) / np.sqrt(width // HEADS)
    mixed = jnp.einsum("rhqk,rkhd->rqhd", jax.nn.softmax(scores), v)
    return dense(block["o"], mixed.reshape(x.shape))


def apply_network(model: str, params: Params, x: jax.Array) -> jax.Array:
    """Returns the output of a workload's network; logits where there are labels."""
    if model == "mlp":
        for layer in params:
            x = jax.nn.relu(dense(layer, x))
        return x
    if model == "cnn":
        for i, p in enumerate(params[:-1]):
            stride = (1, 1) if i == 0 else (2, 2)
            x = jax.lax.conv_general_dilated(
                x, p["w"], stride, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(x + p["b"])
        return dense(params[-1], x.mean((1, 2)))
    x = params["e"][x]
    for block in params["blocks"]:
        x = x + attend(block, normalize(block["n1"], x))
        hidden = jax.nn.relu(dense(block["up"], normalize(block["n2"], x)))
        x = x + dense(block["down"], hidden)
    return dense(params["out"], x)


def loss_of(model: str, params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the mean loss of a workload."""
    found = apply_network(model, params, x)
    if model == "mlp":
        return jnp.mean((found - y) ** 2)
    return optax.softmax_cross_entropy_with_integer_labels(found, y).mean()


class Trainer:
    """A network in training; `window` trains on the batches of one update."""

    def __init__(self, method: str, model: str, k: int) -> None:
        rows = MICRO_BATCH * (k if method in ("large", "scan") else 1)
        self.calls = k if method == "MultiSteps" else 1
        data = SAMPLES[model](4 * rows, np.random.default_rng(0))
        parts = [a.reshape(4, rows, *a.shape[1:]) for a in data]
        # On the device before, so that a window has no more to do than to take them.
        self.batches = [tuple(jnp.asarray(a[i]) for a in parts) for i in range(4)]
        optimizer = optax.adam(1e-3)
        if method == "MultiSteps":
            optimizer = optax.MultiSteps(optimizer, every_k_schedule=k)
        gradient = jax.grad(functools.partial(loss_of, model))
        if method == "scan":
            gradient = scanned(gradient, k)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params: Params, state: Any, x: jax.Array, y: jax.Array) -> Any:
            updates, state = optimizer.update(gradient(params, x, y), state, params)
            return optax.apply_updates(params, updates), state

        self.step = step
        self.params = jax.tree.map(jnp.asarray, make_params(model))
        self.state = optimizer.init(self.params)
        self.taken = 0

    def window(self) -> None:
        """Makes one update."""
        for _ in range(self.calls):
            batch = self.batches[self.taken % len(self.batches)]
            self.taken += 1
            self.params, self.state = self.step(self.params, self.state, *batch)
        jax.block_until_ready(self.params)

    def extra_bytes(self) -> int:
        """Returns the bytes of the state beyond that of plain Adam."""
        return bytes_of(self.state) - bytes_of(optax.adam(1e-3).init(self.params))


def bytes_of(tree: Any) -> int:
    """Returns the bytes of all arrays."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def scanned(gradient: Callable[..., Params], k: int) -> Callable[..., Params]:
    """Returns the mean gradient over k micro-batches, which `lax.scan` takes in turn."""

    def mean(params: Params, x: jax.Array, y: jax.Array) -> Params:
        parts = tuple(a.reshape(k, -1, *a.shape[1:]) for a in (x, y))

        def add(sums: Params, part: tuple[jax.Array, jax.Array]) -> tuple[Params, None]:
            return jax.tree.map(jnp.add, sums, gradient(params, *part)), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        sums, _ = jax.lax.scan(add, zeros, parts)
        return jax.tree.map(lambda s: s / k, sums)

    return mean


def prepare(method: str, model: str, xla: bool, k: int) -> float:
    """Makes a window ready for `time`; all of JAX is compiled."""
    return WINDOWS.add(method, Trainer(method, model, k).window)


def memory(method: str, model: str, xla: bool, k: int) -> dict[str, float]:
    """Returns the bytes of a window: its peak, and what is held beyond plain Adam."""
    trainer = Trainer(method, model, k)
    peak = peak_above_level(trainer.window)
    held, parameters = trainer.extra_bytes(), bytes_of(trainer.params)
    return {"peak": peak, "held": held, "parameters": parameters}


def apply_case(case: Case, params: list[jax.Array], x: jax.Array) -> jax.Array:
    """Returns the output of a case's network."""
    if case.network == "tokens":
        embeddings, kernel, bias = params
        return embeddings[x] @ kernel + bias
    kernel, bias = params[:2]
    x = x @ kernel + bias
    if case.network == "normalized":
        x = (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-3) * params[4] + params[5]
    return jnp.tanh(x) @ params[2] + params[3]


def case_loss(case: Case, params: list[jax.Array], *batch: jax.Array) -> jax.Array:
    """Returns the mean loss of a batch, as the user of a loop writes it."""
    x, y, weights = batch
    found = apply_case(case, params, x)
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    if case.loss == "contrastive":
        left, right = jnp.split(found, 2, axis=1)
        return cross_entropy(left @ right.T, jnp.arange(len(x))).mean()
    if case.network == "tokens":
        valid = x != 0
        return jnp.sum(cross_entropy(found, y) * valid) / jnp.sum(valid)
    losses = ((found - y) ** 2).mean(1) * weights
    mean = losses.sum() / (weights.sum() if case.weighted == "weights" else len(x))
    if case.extra == "regularizer":
        mean += 0.05 * sum(jnp.sum(params[i] ** 2) for i in (0, 2))
    return mean


def make_optimizer(case: Case) -> optax.GradientTransformation:
    """Returns the optimizer of a case."""
    learning_rate: Any = rate(case)
    if case.extra == "schedule":
        learning_rate = optax.exponential_decay(rate(case), 1, 0.5)
    if case.optimizer == "adamw":
        return optax.adamw(learning_rate, weight_decay=0.1)
    if case.optimizer == "adam":
        return optax.adam(learning_rate)
    chain = [optax.sgd(learning_rate)]
    if "global_clipnorm" in case.options:
        chain.insert(0, optax.clip_by_global_norm(case.options["global_clipnorm"]))
    if "clipnorm" in case.options:
        chain.insert(0, clip_each(case.options["clipnorm"]))
    return optax.chain(*chain)


def clip_each(limit: float) -> optax.GradientTransformation:
    """Returns what scales each gradient whose norm is above `limit`."""

    def clip(gradient: jax.Array) -> jax.Array:
        return gradient * jnp.minimum(1.0, limit / jnp.linalg.norm(gradient))

    return optax.stateless(lambda updates, _: jax.tree.map(clip, updates))


def start_of(case: Case) -> list[np.ndarray]:
    """Returns the parameters that a case starts from."""
    arrays = initial_weights(case)
    if case.network == "normalized":
        arrays += [np.ones_like(arrays[1]), np.zeros_like(arrays[1])]
    return arrays


def train(case: Case, method: str) -> list[np.ndarray]:
    """Returns what a method leaves."""
    data, size = make_data(case), case.large
    optimizer: Any = make_optimizer(case)
    if method == "MultiSteps":
        optimizer = optax.MultiSteps(optimizer, every_k_schedule=case.accum_steps)
        size = case.micro_batch
    params = [jnp.asarray(a) for a in start_of(case)]
    state = optimizer.init(params)

    @jax.jit
    def step(params: Params, state: Any, *batch: jax.Array) -> Any:
        gradients = jax.grad(functools.partial(case_loss, case))(params, *batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    ones = np.ones(case.rows, np.float32)
    arrays = (data.x, data.y, ones if data.weights is None else data.weights)
    for i in range(0, case.rows, size):
        params, state = step(params, state, *(a[i : i + size] for a in arrays))
    return [np.asarray(p) for p in params]


def equality(case: str, method: str) -> dict[str, Any]:
    """Returns the error of a method in a case, and the warnings that it gave."""
    if case in NONE:
        return {"none": NONE[case]}
    found, warned = run_and_listen(lambda: train(CASES[case], method))
    large = train(CASES[case], "large")
    return {"error": error(found, large, start_of(CASES[case])), "warned": warned}


if __name__ == "__main__":
    calls = [versions, prepare, memory, equality]
    answer({call.__name__: call for call in calls} | {"time": WINDOWS.time})
