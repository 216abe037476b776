"""Check the numbers on a machine with GPUs, and what they cost there, in one command.

    PYTHONPATH=. python benchmarks/gpu_check.py
    PYTHONPATH=. python benchmarks/gpu_check.py --devices gpu:2 --model transformer
    PYTHONPATH=. python benchmarks/gpu_check.py --devices cpu:2 --quick

It prints a report to paste, and fails if a number is wrong. On one device and on all, in
float32 and in mixed_float16, both routes train on uneven sample weights and a short last
batch; the largest difference of a weight from plain Keras on one device is compared with
what rounding explains. Plain Keras on the same replicas is the control: each divides by
its own sum of weights. Then a window's wall time, and the peak of what TensorFlow has
allocated on a device. Each part has a process of its own.
"""

import argparse
import contextlib
import dataclasses
import functools
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf
from common import WORKLOADS, describe_machine, format_table, in_own_process, make_model

import keras_accum

# What rounding explains of a difference, in units of the largest weight of a variable. In
# float16 it is about the biases, which are small: 1e-2 was measured, on CPUs.
BOUNDS = {"float32": 1e-5, "mixed_float16": 5e-2}
METHODS = ("large", "optimizer", "step")
MIB = 2.0**20


@dataclasses.dataclass(frozen=True)
class Case:
    """What one process does.

    Attributes:
        kind: "CPU" or "GPU".
        count: the number of devices; of one, without a strategy.
        dtype: the dtype policy.
        model: the name of a workload.
        k: micro-batches per update and replica.
        windows: how many windows to time.
        xla: whether to compile with XLA.
    """

    kind: str
    count: int
    dtype: str
    model: str
    k: int
    windows: int
    xla: bool

    @property
    def rows(self) -> int:
        """The samples of one update."""
        return self.k * self.count * WORKLOADS[self.model].micro_batch


# --------------------------------------------------------------------- in one process


def make_strategy(case: Case) -> tf.distribute.Strategy | None:
    """Return a strategy on the devices of a case; None for one device."""
    # A GPU would else round each factor of a product in float32 to 10 bits.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    keras.config.set_dtype_policy(case.dtype)
    if case.kind == "CPU":
        (cpu,) = tf.config.list_physical_devices("CPU")
        parts = [tf.config.LogicalDeviceConfiguration()] * case.count
        tf.config.set_logical_device_configuration(cpu, parts)
    if case.count == 1:
        return None
    return tf.distribute.MirroredStrategy(device_names(case))


def device_names(case: Case) -> list[str]:
    """Return the names of the devices of a case."""
    return [f"{case.kind}:{i}" for i in range(case.count)]


@dataclasses.dataclass
class Trainer:
    """A compiled model, and how it takes its data.

    Attributes:
        model: compiled.
        rows: the samples of one step of `fit`.
        steps: the steps of `fit` that make an update.
        strategy: where the model lives.
    """

    model: keras.Model
    rows: int
    steps: int
    strategy: tf.distribute.Strategy | None

    def batches(self, arrays: tuple[np.ndarray, ...]) -> Iterator:
        """Return an endless iterator over the batches of `arrays`, the last one short."""
        dataset = tf.data.Dataset.from_tensor_slices(arrays).batch(self.rows).repeat()
        if self.strategy is not None:
            dataset = self.strategy.experimental_distribute_dataset(dataset)
        return iter(dataset)


def make_trainer(
    case: Case, method: str, strategy: tf.distribute.Strategy | None
) -> Trainer:
    """Return what trains by `method` on the replicas of `strategy`."""
    rows, steps = case.rows, 1
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = make_model(WORKLOADS[case.model])
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        if case.dtype == "mixed_float16":
            # Low enough that nothing overflows. At Keras's 2 ** 15 the large batch and
            # its micro-batches overflow, and skip updates, at different times.
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=64)
        if method == "step":
            keras_accum.accumulate(model, accum_steps=case.k)
        elif method == "optimizer":
            optimizer = keras_accum.AccumOptimizer(optimizer, case.k)
            rows, steps = rows // case.k, case.k
        loss = "mean_squared_error"
        if "categorical" in WORKLOADS[case.model].loss:
            loss = keras.losses.SparseCategoricalCrossentropy(
                reduction="mean_with_sample_weight"
            )
        model.compile(optimizer, loss, jit_compile=case.xla)
        model.optimizer.build(model.trainable_variables)
        model.make_train_function()
    return Trainer(model, rows, steps, strategy)


def weights_after(trainer: Trainer, arrays: tuple[np.ndarray, ...]) -> list[np.ndarray]:
    """Return the weights after three epochs of `arrays`, each with a short last batch."""
    batches, optimizer = trainer.batches(arrays), trainer.model.optimizer
    for _ in range(3):
        for _ in range(-(-len(arrays[0]) // trainer.rows)):
            trainer.model.train_function(batches)
        if isinstance(optimizer, keras_accum.AccumOptimizer):
            optimizer.flush()
    return trainer.model.get_weights()


def gap(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """Return the largest difference, in units of the largest weight of its variable."""
    pairs = zip(found, expected, strict=True)
    return float(
        np.max([np.abs(a - b).max() / max(np.abs(b).max(), 1e-12) for a, b in pairs])
    )


def check_equality(case: Case) -> dict[str, float]:
    """Return how far each route, and the control, end from plain Keras on one device."""
    strategy, rng = make_strategy(case), np.random.default_rng(1)
    # One large batch, and one with a micro-batch and a half.
    rows = case.rows + 3 * WORKLOADS[case.model].micro_batch // 2
    x, y = WORKLOADS[case.model].sample(rows, rng)
    weight = rng.uniform(0.1, 4.0, y.shape if y.ndim == 2 else rows).astype("float32")
    arrays = (x, y, np.sort(weight, axis=0))
    trained = functools.partial(make_trainer, case)
    oracle = weights_after(trained("large", None), arrays)
    gaps = {
        method: gap(weights_after(trained(method, strategy), arrays), oracle)
        for method in ("optimizer", "step", "large")
    }
    start = make_model(WORKLOADS[case.model]).get_weights()
    return {**gaps, "moved": gap(start, oracle)}


def measure_method(case: Case, method: str) -> tuple[float, float | None]:
    """Return the median wall time of a window in ms, and the peak in MiB of a device."""
    trainer = make_trainer(case, method, make_strategy(case))
    sampled = WORKLOADS[case.model].sample(case.rows, np.random.default_rng(0))
    batches, times = trainer.batches(sampled), []
    for turn in range(case.windows + 2):
        if turn == 2:  # Traced, and the iterator filled.
            reset_peaks(case)
        start = time.perf_counter()
        for _ in range(trainer.steps):
            trainer.model.train_function(batches)
        # Reading a weight waits for what a GPU still has to do.
        trainer.model.trainable_variables[-1].numpy()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[2:]), peak(case)


def reset_peaks(case: Case) -> None:
    """Start to watch the memory anew."""
    for name in device_names(case):
        tf.config.experimental.reset_memory_stats(name)


def peak(case: Case) -> float | None:
    """Return the largest peak of a device in MiB; None where nobody counts."""
    info = tf.config.experimental.get_memory_info
    return max(info(name)["peak"] for name in device_names(case)) / MIB


# ------------------------------------------------------------------------------- report


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--devices", default="auto", help="cpu:2, gpu:4; auto: all GPUs")
    add("--model", choices=["cnn", "transformer"], default="cnn")
    add("--k", type=int, default=8, help="micro-batches per update and replica")
    add("--windows", type=int, default=20, help="to time")
    add("--jit-compile", action="store_true", help="XLA; one device only")
    add("--quick", action="store_true", help="k=2; 2 windows, on all devices in float32")
    args = parser.parse_args()
    if args.quick:
        args.k, args.windows = 2, 2
    return args


def name_gpus() -> list[str]:
    """Return the names of the GPUs."""
    details = tf.config.experimental.get_device_details
    gpus = tf.config.list_physical_devices("GPU")
    return [details(gpu).get("device_name", "GPU") for gpu in gpus]


def choose_devices(devices: str, gpus: list[str]) -> tuple[str, int]:
    """Return the kind and number of the devices that `--devices` names."""
    if devices == "auto":
        devices = f"gpu:{len(gpus)}"
    if not (match := re.fullmatch(r"(cpu|gpu):(\d+)", devices)):
        sys.exit(f"--devices {devices} is not auto, cpu:2, gpu:4 or the like.")
    kind, count = match[1].upper(), int(match[2])
    if count < 1 or (kind == "GPU" and count > len(gpus)):
        sys.exit(f"--devices {devices}: TensorFlow finds {len(gpus)} GPUs. Try cpu:2.")
    return kind, count


def verdict(case: Case, gaps: dict[str, float]) -> str:
    """Return "right", or what is wrong with the differences of a case."""
    bound = BOUNDS[case.dtype]
    wrong = [m for m in ("optimizer", "step") if not gaps[m] <= bound]  # NaN fails.
    if wrong:
        return f"WRONG: {' and '.join(wrong)}"
    if gaps["moved"] <= 10 * bound or (case.count > 1 and gaps["large"] <= bound):
        return "WRONG: the control agrees too, so that nothing is shown"
    return "right"


def main() -> None:
    """Check, measure, print, and fail if a number is wrong."""
    args = parse_arguments()
    gpus = name_gpus()
    kind, most = choose_devices(args.devices, gpus)
    make: Callable[..., Case] = functools.partial(
        Case, kind, model=args.model, k=args.k, windows=args.windows, xla=args.jit_compile
    )
    cases = [make(n, dtype) for n in sorted({1, most}) for dtype in BOUNDS]
    equality, costs, wrong = [], [], False
    for case in cases:
        print(f"{case.count} {kind}, {case.dtype}", file=sys.stderr)
        gaps = in_own_process(check_equality, case)
        judged = verdict(case, gaps)
        wrong |= judged != "right"
        shown = [f"{gaps[m]:.1e}" for m in ("optimizer", "step", "large", "moved")]
        equality.append([case.count, case.dtype, *shown, judged])
        if args.quick and (case.count, case.dtype) != (most, "float32"):
            continue
        found = [in_own_process(measure_method, case, method) for method in METHODS]
        costs.append(
            [
                case.count,
                case.dtype,
                case.rows,
                *(f"{milliseconds:.1f}" for milliseconds, _ in found),
                *("?" if mib is None else f"{mib:.0f}" for _, mib in found),
            ]
        )

    print(f"\n## keras_accum on {most} {kind}\n")
    machine = describe_machine() | {"gpus": ", ".join(gpus) or "none"}
    for name, value in machine.items():
        print(f"- {name}: {value}")
    print(
        f"- {args.model}, k={args.k}, XLA {'on' if args.jit_compile else 'off'}, no TF32"
    )
    print("\nLargest difference of a weight from plain Keras on one device, relative\n")
    header = ["devices", "dtype", "AccumOptimizer", "accumulate", "plain Keras there"]
    print(format_table([*header, "moved", ""], equality))
    print("\nWall time of a window in ms, and peak memory of a device in MiB\n")
    names = ["large batch", "AccumOptimizer", "accumulate"]
    columns = [f"{name}, {unit}" for unit in ("ms", "MiB") for name in names]
    print(format_table(["devices", "dtype", "samples", *columns], costs))
    if wrong:
        sys.exit("\nA number is wrong. Please report it with all of the above.")
    print("\nAll numbers are right.")


if __name__ == "__main__":
    main()
