"""Train a small CNN on several devices and check it against the large batch on one.

The same script runs on GPUs and, where there are none, on two logical CPUs:

    python examples/train_multi_gpu.py
    python examples/train_multi_gpu.py --devices gpu:4 --micro-batch-size 4
    python examples/train_multi_gpu.py --devices cpu:2 --route step

Each replica holds 16 samples in memory and all of them together make one update per 128,
with one reduction over the replicas. The script fails if the weights differ from those
of plain Keras on one device by more than rounding.
"""

import replicated  # Before TensorFlow, which it keeps quiet.

# isort: split
import argparse
import logging
import re
from collections.abc import Sequence

import tensorflow as tf


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = replicated.make_parser(__doc__.splitlines()[0])
    parser.add_argument(
        "--devices", default="auto", help="cpu:2, gpu:4; auto: all GPUs, or else cpu:2"
    )
    args = parser.parse_args(argv)
    replicated.check_arguments(args)
    return args


def make_strategy(devices: str) -> tf.distribute.MirroredStrategy:
    """Return a strategy on the devices that `--devices` names. To be called first."""
    gpus = tf.config.list_physical_devices("GPU")
    if devices == "auto":
        devices = f"gpu:{len(gpus)}" if gpus else "cpu:2"
    if not (match := re.fullmatch(r"(cpu|gpu):([1-9]\d*)", devices)):
        raise SystemExit(f"--devices {devices} is not auto, cpu:2, gpu:4 or the like.")
    kind, count = match[1].upper(), int(match[2])
    if kind == "GPU" and count > len(gpus):
        raise SystemExit(f"--devices {devices}: TensorFlow finds {len(gpus)} GPUs.")
    # A GPU would else round each factor of a product in float32 to 10 bits.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    if kind == "CPU":
        (cpu,) = tf.config.list_physical_devices("CPU")
        parts = [tf.config.LogicalDeviceConfiguration()] * count
        tf.config.set_logical_device_configuration(cpu, parts)
    return tf.distribute.MirroredStrategy([f"{kind}:{i}" for i in range(count)])


def main(argv: Sequence[str] | None = None) -> None:
    """Train on the replicas, then on one device, and compare."""
    args = parse_arguments(argv)
    logging.basicConfig(format="%(message)s")
    strategy = make_strategy(args.devices)
    devices = ", ".join(name.split("/")[-1] for name in strategy.extended.worker_devices)
    print(f"{replicated.announce(args, strategy.num_replicas_in_sync)}\non {devices}")
    replicated.compare(replicated.train(args, strategy), args)


if __name__ == "__main__":
    main()
