"""Train a small CNN on several machines and check it against one device.

Without `TF_CONFIG` in the environment, the script starts two workers of its own, as two
processes on this machine that talk through 127.0.0.1:

    python examples/train_multi_worker.py

On machines of your own, run it on each with that variable set (`index` differs):

    TF_CONFIG='{"cluster": {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]},
                "task": {"type": "worker", "index": 0}}'
    export TF_CONFIG
    python examples/train_multi_worker.py --backup-dir /shared/backup

Worker 0, the chief, prints and saves. When a worker dies, TensorFlow ends the others
with an error. The same command then resumes from the last epoch in `--backup-dir`:

    python examples/train_multi_worker.py --backup-dir /tmp/backup --lose-worker 3
    python examples/train_multi_worker.py --backup-dir /tmp/backup
"""

import replicated  # Before TensorFlow, which it keeps quiet.

# isort: split
import argparse
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import keras
import tensorflow as tf

# How long the other workers have to notice that one is gone (measured: 4 to 13).
SECONDS_TO_NOTICE = 60


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = replicated.make_parser(__doc__.splitlines()[0])
    add = parser.add_argument
    add("--backup-dir", type=Path, help="save each epoch here; all workers must see it")
    add(
        "--collective-timeout",
        type=float,
        default=300,
        help="seconds to wait for a worker that lives but does not come to a reduction",
    )
    add("--run-timeout", type=float, default=900, help="seconds for workers of its own")
    add("--lose-worker", type=int, help="let worker 1 die in this epoch, to see it")
    args = parser.parse_args(argv)
    replicated.check_arguments(args)
    return args


# ------------------------------------------------------------------------- one worker


class FollowingBackup(keras.callbacks.Callback):
    """Restores what the chief has saved, and saves along with it, to be thrown away.

    All workers have to save together: what each holds for itself is summed for it. And
    all have to resume from the same epoch, so that only the chief's files count.
    """

    def __init__(self, backup_dir: Path, scratch_dir: str) -> None:
        super().__init__()
        self.restoring = keras.callbacks.BackupAndRestore(str(backup_dir))
        self.saving = keras.callbacks.BackupAndRestore(scratch_dir)

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        """Restore what the chief restores."""
        for callback in (self.restoring, self.saving):
            callback.set_model(self.model)
        self.restoring.on_train_begin(logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Take part in the save."""
        self.saving.on_epoch_end(epoch, logs)


class Die(keras.callbacks.Callback):
    """Ends this process in the middle of an epoch, as a machine that fails does."""

    def __init__(self, epoch: int) -> None:
        super().__init__()
        self.epoch, self.now = epoch, 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Note which epoch it is."""
        self.now = epoch + 1

    def on_train_batch_end(
        self, batch: int, logs: dict[str, float] | None = None
    ) -> None:
        """Die, if this is the epoch for it."""
        if self.now == self.epoch and batch >= 5:
            os._exit(1)


def work(args: argparse.Namespace) -> None:
    """Be one of the workers that `TF_CONFIG` names; the chief compares at the end."""
    cluster = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    index = cluster.task_id or 0
    chief = cluster.task_type == "chief" or (
        index == 0 and "chief" not in cluster.cluster_spec().jobs
    )
    # A GPU would else round each factor of a product in float32 to 10 bits.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    # TensorFlow notices by itself, in seconds, a worker that is gone. For one that lives
    # and hangs it waits for ever, unless it is told how long.
    options = tf.distribute.experimental.CommunicationOptions(
        timeout_seconds=args.collective_timeout
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster, options)
    replicas = strategy.num_replicas_in_sync
    steps = replicated.announce(args, replicas)
    if chief:
        print(steps, flush=True)
    with contextlib.ExitStack() as stack:
        callbacks: list[keras.callbacks.Callback] = []
        if args.backup_dir and chief:
            callbacks.append(keras.callbacks.BackupAndRestore(str(args.backup_dir)))
        elif args.backup_dir:
            scratch = stack.enter_context(tempfile.TemporaryDirectory())
            callbacks.append(FollowingBackup(args.backup_dir, scratch))
        if args.lose_worker and index == 1:
            callbacks.append(Die(args.lose_worker))
        run = replicated.train(args, strategy, callbacks, "auto" if chief else 0)
    if chief:
        replicated.compare(run, args)


# -------------------------------------------------------------- two workers of its own


def free_addresses(count: int) -> list[str]:
    """Return `count` addresses on this machine that nobody listens to."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


def launch(command: Sequence[str], seconds: float, workers: int = 2) -> list[int | None]:
    """Run a command once for each worker; return their exit codes.

    The chief's output is shown as it comes, that of the others if they fail. Whatever
    happens, no process is left: None stands for one that had to be killed.
    """
    addresses = free_addresses(workers)
    with contextlib.ExitStack() as stack:
        outputs = [None] + [
            stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(1, workers)
        ]
        processes = []
        for index, output in enumerate(outputs):
            task = {"type": "worker", "index": index}
            config = {"cluster": {"worker": addresses}, "task": task}
            environment = {"TF_CONFIG": json.dumps(config), "CUDA_VISIBLE_DEVICES": "-1"}
            process = subprocess.Popen(
                command, env=os.environ | environment, stdout=output, stderr=output
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        codes = wait(processes, seconds)
        for index, output in enumerate(outputs):
            if output is not None and codes[index]:
                output.seek(0)
                print(f"\nWorker {index}:\n{output.read()[-2000:]}", file=sys.stderr)
    return codes


def wait(processes: Sequence[subprocess.Popen], seconds: float) -> list[int | None]:
    """Return the exit codes when all have ended, or time is up."""
    end = time.monotonic() + seconds
    noticed = False
    while time.monotonic() < end:
        codes = [process.poll() for process in processes]
        if None not in codes:
            break
        if any(codes) and not noticed:
            noticed = True
            end = min(end, time.monotonic() + SECONDS_TO_NOTICE)
        time.sleep(0.1)
    return [process.poll() for process in processes]


def main(argv: Sequence[str] | None = None) -> None:
    """Be a worker if `TF_CONFIG` says so; else start two."""
    args = parse_arguments(argv)
    logging.basicConfig(format="%(message)s")
    if "TF_CONFIG" in os.environ:
        work(args)
        return
    replicated.load_samples("digits", None)  # Prepared once, not by both at a time.
    given = sys.argv[1:] if argv is None else argv
    codes = launch([sys.executable, __file__, *given], args.run_timeout)
    if any(code != 0 for code in codes):
        resume = " The same command resumes." if args.backup_dir else ""
        raise SystemExit(f"The workers ended with the codes {codes}.{resume}")


if __name__ == "__main__":
    main()
