"""What TensorFlow makes of several GPUs under XLA, on CPUs and without XLA.

    python tests/distribution/no_merge_call.py

There it needs no `merge_call`: each replica reduces by collective operations in its own
context. A variable that all replicas share still merges at each assignment on one, and
cannot in control flow. `test_no_merge_call.py` runs this in a process of its own, since
TensorFlow is patched.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf
from helpers import data, dense_model
from replicas import SAMPLES, SCENARIOS, check, train

# Private: nothing public says which way to take.
from tensorflow.python.distribute import mirrored_strategy


def every_setting():
    """Whatever happens once per update: clipping, decay, averages that overwrite."""
    return keras.optimizers.SGD(
        0.5,
        momentum=0.9,
        global_clipnorm=0.1,
        weight_decay=0.1,
        use_ema=True,
        ema_momentum=0.5,
        ema_overwrite_frequency=2,
    )


def both_routes_equal_one_device(strategy):
    """Of 13 samples in batches of 4, the last leaves one replica none."""
    how = {"together": False, "control": False, "rtol": 2e-6}
    check(dense_model, data(SAMPLES), strategy, "graph", every_setting, **how)


def the_loss_scale_adapts_to_all_replicas(strategy):
    for name in (
        "an_overflow_on_one_replica_halves_the_scale_once",
        "an_infinity_on_one_replica_skips_the_window_on_all",
    ):
        SCENARIOS[name](strategy, "graph")


def plain_keras_cannot_scale_the_loss(strategy):
    """The control: TensorFlow does take the other way. Without a scale, Keras trains."""

    def scaled():
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))

    try:
        train(dense_model, data(SAMPLES), scaled, strategy, loss="mse", epochs=1)
    except RuntimeError as error:
        assert "`merge_call` called while defining a new graph" in str(error)
    else:
        raise AssertionError("Keras's LossScaleOptimizer has trained")


def main():
    mirrored_strategy.MirroredExtended._use_merge_call = lambda self: False
    (cpu,) = tf.config.list_physical_devices("CPU")
    devices = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, devices)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    both_routes_equal_one_device(strategy)
    the_loss_scale_adapts_to_all_replicas(strategy)
    plain_keras_cannot_scale_the_loss(strategy)


if __name__ == "__main__":
    main()
