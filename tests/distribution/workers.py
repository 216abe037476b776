"""Scenarios on several machines: two processes on 127.0.0.1 stand in for them.

    TF_CONFIG=... python tests/distribution/workers.py FOLDER NAME...

Both processes run the same scenarios in turn; `test_workers.py` starts and ends them.
`FOLDER` is one that both see. The oracle is plain Keras on one device, in each process.
"""

import contextlib
import json
import os
import pathlib
import signal
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import replicas
import tensorflow as tf
from helpers import assert_close, assert_differ, assert_equal, data, dense_model
from replicas import SAMPLES, accumulating, check, feed, sgd, started, train

# Private: the public `CommunicationOptions` count nothing.
from tensorflow.python.distribute.cross_device_utils import CollectiveReplicaLauncher
from text_models import cross_entropy, token_model, tokens

EPOCHS, LOST, BATCH, STEPS = 4, 2, 4, 3
SCENARIOS = {}


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


def index():
    """Which of the workers this is."""
    return json.loads(os.environ["TF_CONFIG"])["task"]["index"]


# ---------------------------------------------------------------- the same as one device


@scenario
def both_routes_equal_one_device(strategy, folder):
    """keras#20585. Of 13 samples in batches of 4, the last leaves one worker none."""
    check(dense_model, data(SAMPLES), strategy, "graph", metrics=["mae"])


@scenario
def tokens_are_counted_over_workers(strategy, folder):
    how = {"loss": cross_entropy(), "together": False, "control": False}
    check(token_model, tokens(SAMPLES), strategy, "graph", **how)


@scenario
def each_type_is_reduced_apart(strategy, folder):
    """TensorFlow makes no bfloat16 variables on several machines."""
    replicas.check_types(strategy, "graph", [("float64", "float32")])


@scenario
def a_coupled_loss_sees_the_samples_of_all_workers(strategy, folder):
    replicas.SCENARIOS["a_coupled_loss_sees_the_samples_of_all_replicas"](
        strategy, "graph"
    )


@scenario
def gradients_are_reduced_before_they_are_clipped_or_judged(strategy, folder):
    for name in (
        "gradients_are_clipped_after_they_are_reduced",
        "an_infinity_on_one_replica_skips_the_window_on_all",
        "an_overflow_on_one_replica_halves_the_scale_once",
        "values_that_overwrite_are_the_maximum_over_replicas",
    ):
        print(name)
        replicas.SCENARIOS[name](strategy, "graph")


@scenario
def an_infinity_on_worker_1_skips_the_update_on_both(strategy, folder):
    """In `fit`, in both routes. Worker 1 holds the second half of each batch."""
    x, y = data(16)
    bad = y.copy()
    bad[6] = np.inf  # In the second batch of 4: on worker 1.
    how = {"loss": "mse", "epochs": 1, "batch_size": 4}

    def scaled():
        return keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=8.0)

    fresh = dense_model().get_weights()
    optimizer = accumulating(steps=4, on_nonfinite="skip_window")
    model, _ = train(dense_model, (x, bad), optimizer, strategy, **how)
    assert_equal(model.get_weights(), fresh, "route optimizer")
    assert int(model.optimizer.skipped_windows.numpy()) == 1
    model, _ = train(dense_model, (x, y), optimizer, strategy, **how)
    assert_differ(model.get_weights(), fresh)

    how = {"loss": "mse", "epochs": 1, "split": {"micro_batch_size": 2}}
    for arrays, scale in (((x, bad), 4.0), ((x, y), 8.0)):
        model, _ = train(dense_model, arrays, scaled, strategy, **how)
        assert float(model.optimizer.dynamic_scale.numpy()) == scale
        if scale == 4.0:
            assert_equal(model.get_weights(), fresh, "route step")
        else:
            assert_differ(model.get_weights(), fresh)


@scenario
def a_window_goes_on_on_another_number_of_workers(strategy, folder):
    """All workers save together, each to a file of its own: all hold the same."""
    arrays = data(SAMPLES)
    oracle, _ = train(dense_model, arrays, sgd, loss="mse", epochs=1)
    path = folder / f"{index()}.weights.h5"
    model = started(strategy, arrays, "graph")
    feed(model, arrays, slice(0, 8))
    model.save_weights(path)
    for after in (strategy, None):
        other = started(after, arrays, "graph", lambda model: model.load_weights(path))
        assert int(other.optimizer.micro_step.numpy()) == 2
        feed(other, arrays, slice(8, None))
        assert_close(other.get_weights(), oracle.get_weights(), what=str(after))
    alone = started(strategy, arrays, "graph")
    alone.optimizer.accum_steps = 2
    feed(alone, arrays, slice(8, None))
    assert_differ(alone.get_weights(), oracle.get_weights())


@scenario
def each_step_logs_in_one_reduction(strategy, folder):
    """And a window makes one of its gradients; in the step, of the samples before too."""
    count = Count()
    how = {"loss": "mse", "epochs": 1, "metrics": ["mae", "mape"], "callbacks": [count]}

    def reductions(optimizer, **more):
        with count.counting():
            train(dense_model, data(24), optimizer, strategy, **how, **more)
        return int(count.reductions)

    # Of each step of `fit`: whether all workers have data, and the three logs.
    own = 2
    for steps in (1, 6):
        assert reductions(sgd, split={"accum_steps": steps}) == 2 + own
        found = reductions(accumulating(steps=steps), batch_size=4)
        assert found == 6 // steps + 6 * own, (steps, found)
    # The control.
    assert reductions(sgd, batch_size=4) == 6 + 6 * own


class Count(keras.callbacks.Callback):
    """Counts the reductions over workers in the training steps of an epoch."""

    def __init__(self):
        super().__init__()
        self.running, self.reductions = tf.Variable(0), None

    @contextlib.contextmanager
    def counting(self):
        running, reduce = self.running, CollectiveReplicaLauncher.all_reduce

        def counted(self, *args, **options):
            running.assign_add(1)
            return reduce(self, *args, **options)

        CollectiveReplicaLauncher.all_reduce = counted
        try:
            yield
        finally:
            CollectiveReplicaLauncher.all_reduce = reduce

    def on_epoch_begin(self, epoch, logs=None):
        self.running.assign(0)

    def on_train_batch_end(self, batch, logs=None):
        self.reductions = self.running.numpy()


# --------------------------------------------------------------------- a worker is lost


class Lose(keras.callbacks.Callback):
    """Does something on worker 1 in the middle of an epoch."""

    def __init__(self, deed, folder):
        super().__init__()
        self.deed, self.folder, self.epoch = deed, folder, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if index() == 1 and self.epoch == LOST and batch == 1:
            (self.folder / "lost").touch()
            self.deed()


def interrupted(strategy, folder, deed):
    """Train with a backup of each epoch; `deed` ends it on worker 1.

    An epoch has 4 micro-batches and a window 3: each epoch leaves one open.
    """
    backup = keras.callbacks.BackupAndRestore(str(folder / str(index())))
    callbacks = [backup] if deed is None else [backup, Lose(deed, folder)]
    how = {"loss": "mse", "batch_size": BATCH, "epochs": EPOCHS, "callbacks": callbacks}
    return train(dense_model, data(SAMPLES), accumulating(steps=STEPS), strategy, **how)


def fail():
    os._exit(7)


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def hang():
    time.sleep(600)


@scenario
def worker_1_dies(strategy, folder):
    interrupted(strategy, folder, fail)


@scenario
def worker_1_stops(strategy, folder):
    interrupted(strategy, folder, stop)


@scenario
def worker_1_hangs(strategy, folder):
    interrupted(strategy, folder, hang)


@scenario
def training_resumes(strategy, folder):
    """What `worker_1_dies` has left, against a run that nothing has interrupted."""
    for worker in (0, 1):
        assert (folder / str(worker) / "latest.weights.h5").exists()
    resumed, _ = interrupted(strategy, folder, None)
    whole, _ = interrupted(strategy, folder / "other", None)
    # Not to the bit: an open window is saved as its sum over the workers.
    assert_close(resumed.get_weights(), whole.get_weights())
    assert int(resumed.optimizer.iterations.numpy()) == EPOCHS * 4 // STEPS
    assert int(resumed.optimizer.micro_step.numpy()) == EPOCHS * 4 % STEPS
    # The control: without the window that was open when the backup was made.
    resumed.optimizer.flush()
    assert_differ(resumed.get_weights(), whole.get_weights())


def main():
    folder, *names = sys.argv[1:]
    options = None
    if names == ["worker_1_hangs"]:
        communication = tf.distribute.experimental.CommunicationOptions
        options = communication(timeout_seconds=5)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    for name in names:
        replicas.run(SCENARIOS[name], strategy, pathlib.Path(folder))
        print(replicas.PASSED, name, flush=True)


if __name__ == "__main__":
    main()
