"""What accumulation costs on several replicas: CPU time, reductions, bytes reduced.

A window is k micro-batches on each of two replicas, and the update that they make. Two
logical CPUs are the replicas of a `MirroredStrategy`; or two processes those of a
`MultiWorkerMirroredStrategy`, which talk through 127.0.0.1 (`--strategies workers`):

- `floor`: k forward and backward passes on each replica, one reduction, one update
- `ours`: `keras_accum.AccumOptimizer(Adam(), accum_steps=k)`, k steps of `fit`
- `step`: `keras_accum.accumulate(model, accum_steps=k)`, one step of `fit`
- `each`: as an optimizer that reduces what it adds: k reductions, and one update
- `none`: no accumulation in plain Keras: k reductions and k updates

Reductions are counted as they run, by counters in the graphs. In the wide MLP there is
much to reduce and little to compute. Each strategy and k has processes of its own.

    PYTHONPATH=. python benchmarks/replicas.py --json replicas.json
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from common import WORKLOADS, format_table, make_model, measure, write_json

# Private: the public `CommunicationOptions` count nothing.
from tensorflow.python.distribute.cross_device_utils import CollectiveReplicaLauncher
from timing import Timing
from windows import Window, ratio, show, wall_ratio

import keras_accum

REPLICAS = 2
STRATEGIES = ("mirrored", "workers")
METHODS = ("floor", "ours", "step", "each", "none")
HEADER = ["replicas", "k", "what", *METHODS, "ours/floor", "step/floor"]


class Counter:
    """Counts reductions, and the bytes that one replica gives to them, as they run."""

    def __init__(self) -> None:
        self.counts = [tf.Variable(0, dtype="int64") for _ in range(2)]

    def add(self, tensors: Sequence[tf.Tensor]) -> None:
        """Count one reduction of `tensors`."""
        sizes = [t.dtype.size * tf.size(t, tf.int64) for t in tensors]
        for count, by in zip(self.counts, (1, tf.add_n(sizes)), strict=True):
            count.assign_add(by)

    def during(self, function: Window, windows: int = 2) -> list[float]:
        """Return the reductions and bytes of one call of `function`."""
        before = [int(count) for count in self.counts]
        for _ in range(windows):
            function()
        return [
            (int(count) - was) / windows
            for count, was in zip(self.counts, before, strict=True)
        ]


class CountingReductions(tf.distribute.ReductionToOneDevice):
    """Sums on one device, and counts."""

    counter: Counter

    def batch_reduce_implementation(
        self, reduce_op: Any, value_destination_pairs: Any, options: Any
    ) -> Any:
        """Count, and reduce."""
        self.counter.add([value.values[0] for value, _ in value_destination_pairs])
        return super().batch_reduce_implementation(
            reduce_op, value_destination_pairs, options
        )


def count_collectives(counter: Counter) -> None:
    """Count what the workers of a cluster reduce: a list of tensors is packed to one."""
    reduce = CollectiveReplicaLauncher.all_reduce

    def counted(self: Any, tensor: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(tensor, tf.IndexedSlices):
            counter.add([tensor])
        return reduce(self, tensor, *args, **options)

    CollectiveReplicaLauncher.all_reduce = counted


# ---------------------------------------------------------------------------- methods


class Bench:
    """The methods of one k under one strategy."""

    def __init__(self, strategy: tf.distribute.Strategy, k: int, model: str) -> None:
        self.strategy, self.k, self.workload = strategy, k, WORKLOADS[model]

    def batches(self, micro_batches: int) -> Any:
        """Return an endless iterator over batches of all replicas."""
        rows = self.workload.micro_batch * micro_batches * REPLICAS
        data = self.workload.sample(rows * 2, np.random.default_rng(0))
        whole = tf.data.Dataset.from_tensor_slices(data).batch(rows, drop_remainder=True)
        dataset = self.strategy.experimental_distribute_dataset(whole.repeat())
        return iter(dataset)

    def compile(
        self,
        optimizer: Callable[[], keras.optimizers.Optimizer],
        prepare: Callable[[keras.Model], object] = lambda model: None,
    ) -> keras.Model:
        """Return a compiled model whose optimizer is built."""
        with self.strategy.scope():
            model = make_model(self.workload)
            prepare(model)
            model.compile(optimizer(), self.workload.loss, jit_compile=False)
            model.optimizer.build(model.trainable_variables)
        return model

    def fit_window(self, model: keras.Model, calls: int) -> Window:
        """Return a window of `calls` steps of `fit`."""
        batches = self.batches(self.k // calls)
        model.make_train_function()

        def window() -> None:
            for _ in range(calls):
                model.train_function(batches)

        return window

    def ours(self) -> Window:
        adam = keras.optimizers.Adam
        make = functools.partial(keras_accum.AccumOptimizer, accum_steps=self.k)
        return self.fit_window(self.compile(lambda: make(adam())), self.k)

    def step(self) -> Window:
        split = functools.partial(keras_accum.accumulate, accum_steps=self.k)
        return self.fit_window(self.compile(keras.optimizers.Adam, split), 1)

    def none(self) -> Window:
        return self.fit_window(self.compile(keras.optimizers.Adam), self.k)

    def floor(self) -> Window:
        return self._passes(reduced=False)

    def each(self) -> Window:
        return self._passes(reduced=True)

    def _passes(self, reduced: bool) -> Window:
        """Return k passes and an update, with a reduction of each or of the last."""
        model = self.compile(keras.optimizers.Adam)
        batches, run = self.batches(1), self.strategy.run
        with self.strategy.scope():
            sums = [self._own(v.shape) for v in model.trainable_variables]

        def gradients(x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
            with tf.GradientTape() as tape:
                loss = model.compute_loss(x, y, model(x, training=True))
            return tape.gradient(loss, model.trainable_variables)

        def add(x: tf.Tensor, y: tf.Tensor) -> None:
            context = tf.distribute.get_replica_context()
            for held, g in zip(
                sums, context.all_reduce("SUM", gradients(x, y)), strict=True
            ):
                held.assign_add(g / REPLICAS)

        def update(grads: list[tf.Tensor]) -> None:
            # Keras reduces them: the k-th reduction. An argument has no device for it.
            grads = [tf.identity(g) for g in grads]
            model.optimizer.apply(grads, model.trainable_variables)

        def update_with_sums(x: tf.Tensor, y: tf.Tensor) -> None:
            total = zip(sums, gradients(x, y), strict=True)
            update([(held + g) / self.k for held, g in total])
            for held in sums:
                held.assign(tf.zeros(held.shape))

        graph = functools.partial(tf.function, autograph=False)
        passing = graph(lambda batch: run(gradients, args=batch))
        adding = graph(lambda batch: run(add, args=batch))
        updating = graph(lambda grads: run(update, args=(grads,)))
        closing = graph(lambda batch: run(update_with_sums, args=batch))

        def window() -> None:
            for _ in range(self.k - 1):
                (adding if reduced else passing)(next(batches))
            if reduced:
                closing(next(batches))
            else:
                updating(passing(next(batches)))

        return window

    @staticmethod
    def _own(shape: Any) -> tf.Variable:
        return tf.Variable(
            tf.zeros(shape),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )


# ---------------------------------------------------------------------- one case, alone


def make_strategy(name: str) -> tuple[tf.distribute.Strategy, Counter]:
    """Return two replicas of a kind, and what counts their reductions."""
    if name == "workers":
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        count_collectives(counter := Counter())
        return strategy, counter
    (cpu,) = tf.config.list_physical_devices("CPU")
    devices = [tf.config.LogicalDeviceConfiguration()] * REPLICAS
    tf.config.set_logical_device_configuration(cpu, devices)
    reductions = CountingReductions()
    strategy = tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(REPLICAS)], cross_device_ops=reductions
    )
    reductions.counter = Counter()
    return strategy, reductions.counter


def run_case(name: str, k: int, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one case in this process, which has to be a fresh one."""
    strategy, counter = make_strategy(name)
    bench = Bench(strategy, k, args.model)
    windows = {method: getattr(bench, method)() for method in METHODS}
    each = max(1, args.micro_steps // k)
    timings = measure(windows, rounds=args.rounds, turn_seconds=0, windows=each)
    return {
        "seconds": {method: dataclasses.asdict(t) for method, t in timings.items()},
        "reduced": {method: counter.during(w) for method, w in windows.items()},
    }


def launch(name: str, k: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure one case in fresh processes, one for each worker; return their figures."""
    count = REPLICAS if name == "workers" else 1
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        with contextlib.ExitStack() as held:
            sockets = [held.enter_context(socket.socket()) for _ in range(count)]
            for each in sockets:
                each.bind(("127.0.0.1", 0))
            addresses = [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]
        processes = []
        for index in range(count):
            task = {"type": "worker", "index": index}
            config = json.dumps({"cluster": {"worker": addresses}, "task": task})
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": "-1"}
            if name == "workers":
                environment["TF_CONFIG"] = config
            case = ["--case", name, str(k), str(folder / str(index))]
            command = [sys.executable, __file__, *case, "--model", args.model]
            command += ["--rounds", str(args.rounds)]
            command += ["--micro-steps", str(args.micro_steps)]
            process = subprocess.Popen(command, env=environment)
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        for process in processes:
            if process.wait(timeout=args.timeout):
                sys.exit(f"{name} k={k} failed")
        return [json.loads((folder / str(i)).read_text()) for i in range(count)]


def merge(found: Sequence[dict[str, Any]]) -> dict[str, Timing]:
    """Return what all processes took together: their CPU times added, the wall time."""
    return {
        method: Timing(
            [sum(cpu) for cpu in zip(*(f["seconds"][method]["cpu"] for f in found))],
            [max(wall) for wall in zip(*(f["seconds"][method]["wall"] for f in found))],
        )
        for method in METHODS
    }


# ------------------------------------------------------------------------------- report


def table_rows(
    name: str, k: int, timings: dict[str, Timing], found: dict[str, Any], rows: int
) -> list[list[str]]:
    """Return the rows of one case: times, reductions, bytes."""
    reduced = [found["reduced"][method] for method in METHODS]
    walls = [f"{1e3 * timings[method].wall_median:.0f}" for method in METHODS]
    against = [f"{ratio(timings, method, 'floor'):.2f}" for method in ("ours", "step")]
    slower = [
        f"{wall_ratio(timings, method, 'floor'):.2f}" for method in ("ours", "step")
    ]
    return [
        [name, str(k), "CPU ms", *(show(timings[m]) for m in METHODS), *against],
        [name, str(k), "wall ms", *walls, *slower],
        [name, str(k), "reductions", *(f"{count:g}" for count, _ in reduced), "", ""],
        [
            name,
            str(k),
            "kB a sample",
            *(f"{size / 1e3 / rows:,.1f}" for _, size in reduced),
            "",
            "",
        ],
    ]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    add("--k", nargs="+", type=int, default=[1, 4, 16])
    add("--model", choices=WORKLOADS, default="mlp")
    add("--rounds", type=int, default=7)
    add("--micro-steps", type=int, default=16, help="of each method in a round")
    add("--timeout", type=float, default=900, help="seconds for one case")
    add("--json", type=Path, help="write every figure of every round here")
    add("--case", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure all cases and print the table."""
    args = parse_arguments()
    if args.case:
        name, k, path = args.case
        Path(path).write_text(json.dumps(run_case(name, int(k), args)))
        return
    rows: list[list[str]] = []
    records: list[dict[str, object]] = []
    for name, k in itertools.product(args.strategies, args.k):
        found = launch(name, k, args)
        samples = k * REPLICAS * WORKLOADS[args.model].micro_batch
        rows += table_rows(name, k, merge(found), found[0], samples)
        records.append({"strategy": name, "k": k, "workers": found})
        print(f"measured {name} k={k}", file=sys.stderr)
        if args.json:
            write_json(args.json, records)
    print("A window: median ± half the distance of the quartiles\n")
    print(format_table(HEADER, rows))


if __name__ == "__main__":
    main()
