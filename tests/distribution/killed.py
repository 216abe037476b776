"""A training process that is killed again and again, and goes on from what it saved.

    python tests/distribution/killed.py --kills 20

SIGKILL comes at random moments, while a file is written included. The run has to end
with the weights of one that nothing disturbs. `test_killed.py` does this with few kills.

Each life of a process is a fork of this one, which has imported TensorFlow and computes
nothing itself: a life starts in no time.
"""

import argparse
import json
import os
import pathlib
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import h5py
import keras
import numpy as np
import tensorflow as tf
from helpers import assert_close, assert_equal, data, dense_model, slots
from replicas import scope_of

import keras_accum as ka

# An epoch has 3 micro-batches and a window 4: what is saved is an open window, mostly.
EPOCHS, SAMPLES, BATCH, STEPS = 9, 12, 4, 4
SAVES = SAMPLES // BATCH


# ------------------------------------------------------------------ the life of a process


def life(kind, replicas, folder, graph, pipe):
    """Train to the end, from what is saved in `folder`; leave the state in `end.npz`."""
    strategy = strategy_of(replicas)
    train = TRAIN.get(kind, undisturbed)
    train(strategy, folder, graph, Beat(pipe))


def strategy_of(replicas):
    if replicas == 1:
        return None
    (cpu,) = tf.config.list_physical_devices("CPU")
    devices = [tf.config.LogicalDeviceConfiguration()] * replicas
    tf.config.set_logical_device_configuration(cpu, devices)
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])


class Beat(keras.callbacks.Callback):
    """Tells of each micro-batch by a byte, before anything is saved."""

    def __init__(self, pipe):
        super().__init__()
        self.pipe = pipe

    def on_train_batch_end(self, batch, logs=None):
        os.write(self.pipe, b"1")


class EachEpoch(keras.callbacks.Callback):
    """Saves after as many micro-batches as make an epoch of the others."""

    def __init__(self, step, save):
        super().__init__()
        self.step, self.save = step, save

    def on_train_batch_end(self, batch, logs=None):
        self.step += 1
        if self.step % SAVES == 0:
            self.save(self.step)


def new_model(strategy, graph):
    with scope_of(strategy):
        model = dense_model()
        inner = keras.optimizers.SGD(0.2, momentum=0.9)
        optimizer = ka.AccumOptimizer(inner, accum_steps=STEPS)
        optimizer.build(model.trainable_variables)
        model.compile(optimizer, "mse", run_eagerly=not graph, jit_compile=False)
    return model


def fit(model, epochs, **how):
    x, y = data(SAMPLES)
    model.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, **how)


def from_step(model, step, callbacks):
    """Train on the micro-batches from number `step` on."""
    x, y = (np.tile(array, (EPOCHS, 1))[step * BATCH :] for array in data(SAMPLES))
    if len(x):
        how = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
        model.fit(x, y, callbacks=callbacks, **how)


def undisturbed(strategy, folder, graph, beat):
    model = new_model(strategy, graph)
    from_step(model, 0, [beat])
    end(model, folder)


def with_checkpoint(strategy, folder, graph, beat):
    """Writes the state and the number of micro-batches as one: all of it, or nothing."""
    model, step = new_model(strategy, graph), tf.Variable(0, dtype="int64")
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer, step=step)
    manager = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=2)
    checkpoint.restore(manager.latest_checkpoint)

    def save(number):
        step.assign(number)
        manager.save()

    from_step(model, int(step), [beat, EachEpoch(int(step), save)])
    end(model, folder)


def with_keras_file(strategy, folder, graph, beat):
    """Writes a file each time. Half of one is an error: then the one before is used."""
    model, first = None, 0
    for path in sorted(folder.glob("*.keras"), reverse=True):
        try:
            with scope_of(strategy):
                model = keras.saving.load_model(path)
        except ValueError as error:
            assert "Please ensure the file is an accessible `.keras` zip" in str(error)
            note(folder, "half a file")
            path.unlink()
        else:
            first = int(path.stem)
            break
    model = model or new_model(strategy, graph)

    def save(number):
        model.save(folder / f"{number:04}.keras")
        for old in sorted(folder.glob("*.keras"))[:-2]:
            old.unlink()

    from_step(model, first, [beat, EachEpoch(first, save)])
    end(model, folder)


class Apart(Exception):
    """A backup's weights are those of another epoch than it says."""


class Together(keras.callbacks.Callback):
    """Raises `Apart` after a backup was restored, if need be."""

    def on_train_begin(self, logs=None):
        optimizer = self.model.optimizer
        done = int(optimizer.iterations.numpy()) * STEPS
        done += int(optimizer.micro_step.numpy())
        if done != (self.model._initial_epoch or 0) * SAVES:
            raise Apart


def with_backup(strategy, folder, graph, beat):
    """Keras writes the weights, and then the number of the epoch, each in place.

    Of half the weights it uses the backup before, if there is one. Killed in between, it
    repeats an epoch; of half a number, or of half the first weights, it ends with an
    error. Then the backup before is put back here, or nothing.
    """
    backup = keras.callbacks.BackupAndRestore(
        folder / "backup", double_checkpoint=True, delete_checkpoint=False
    )
    weights = folder / "backup" / "latest.weights.h5"
    if weights.exists() and is_half(weights):
        note(folder, "half the weights")
    while True:
        model = new_model(strategy, graph)
        try:
            fit(model, EPOCHS, callbacks=[beat, backup, Together()])
            break
        except (Apart, json.JSONDecodeError, OSError) as error:
            note(folder, f"{type(error).__name__} of a backup")
            put_back(folder / "backup")
    end(model, folder)


def is_half(path):
    try:
        h5py.File(path).close()
    except OSError:
        return True
    return False


def put_back(folder):
    for name in ("latest.weights.h5", "training_metadata.json"):
        before = folder / f"{name}.bkp"
        if before.exists():
            shutil.copy(before, folder / name)
        else:
            (folder / name).unlink(missing_ok=True)


TRAIN = {"checkpoint": with_checkpoint, "keras": with_keras_file, "backup": with_backup}


def note(folder, what):
    with (folder / "notes").open("a") as file:
        file.write(f"{what}\n")


def end(model, folder):
    """Leave all state, whole or not at all."""
    optimizer = model.optimizer
    counters = [optimizer.iterations.numpy(), optimizer.micro_step.numpy()]
    arrays = [*counters, *model.get_weights(), *slots(optimizer)]
    np.savez(folder / "unfinished.npz", *arrays)
    (folder / "unfinished.npz").rename(folder / "end.npz")


# ------------------------------------------------------------------------- and its death


def live(kind, replicas, folder, graph, moment=None):
    """A life in a fork; whether it was killed before it was over.

    `moment` is a number of micro-batches, and then a share of the time that one takes
    with what it saves, at the most; or None, to let it live.
    """
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        code = 1
        try:
            os.close(read)
            life(kind, replicas, folder, graph, write)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(write)
    if moment is not None:
        beats, share = moment
        gaps, last = [0.0], None
        while beats and os.read(read, 1):  # Nothing, if the process ends.
            now = time.monotonic()
            if last is not None:
                gaps.append(now - last)
            beats, last = beats - 1, now
        time.sleep(share * max(gaps))
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    os.close(read)
    killed = os.WIFSIGNALED(status)
    assert killed or os.WEXITSTATUS(status) == 0, "see above what was raised"
    return killed


def final_state(folder):
    with np.load(folder / "end.npz") as arrays:
        return list(arrays.values())


def check(kind, replicas, kills, expected, rng, graph=False):
    """Kill a run `kills` times, or several that end before; compare how each ends.

    Returns:
        A `Counter` of what happened.
    """
    seen = Counter()
    while seen["kills"] < kills:
        seen["runs"] += 1
        with tempfile.TemporaryDirectory() as root:
            folder = pathlib.Path(root)
            # On the average, all kills that are left come in one run.
            most = 2 * EPOCHS * SAVES / (kills - seen["kills"] + 1)
            killed = True
            while killed:
                moment = None
                if seen["kills"] < kills:
                    moment = rng.integers(1, max(most, 2), endpoint=True), rng.uniform()
                killed = live(kind, replicas, folder, graph, moment)
                seen["kills"] += killed
            if replicas == 1:
                assert_equal(final_state(folder), expected, kind)
            else:
                # An open window is saved as its sum over the replicas.
                assert_close(final_state(folder), expected, what=kind)
            if (notes := folder / "notes").exists():
                seen.update(notes.read_text().splitlines())
    return seen


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", default=TRAIN, choices=TRAIN)
    parser.add_argument("--replicas", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--graph", action="store_true", help="train in a graph")
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    for replicas in args.replicas:
        with tempfile.TemporaryDirectory() as folder:
            live(None, replicas, pathlib.Path(folder), args.graph)
            expected = final_state(pathlib.Path(folder))
        for kind in args.kinds:
            begin = time.monotonic()
            seen = check(kind, replicas, args.kills, expected, rng, args.graph)
            took = time.monotonic() - begin
            print(f"{kind}, {replicas}: {dict(seen)}, {took:.0f} s", flush=True)


if __name__ == "__main__":
    main()
