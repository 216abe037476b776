"""One update over several machines is one step on the large batch on one device.

The scenarios of `workers.py` run in pairs of processes, on free ports of 127.0.0.1;
whatever happens, none of them is left.
"""

import contextlib
import json
import os
import pathlib
import socket
import time

import forks
import pytest
from groups import Ended, passed_in, run_group
from workers import SCENARIOS

SECONDS = 1200
HELPERS = str(pathlib.Path(__file__).parents[1])
PATHS = os.pathsep.join([HELPERS, os.environ.get("PYTHONPATH", "")])
# TensorFlow notices a lost worker in 4 to 13 seconds (measured, of many).
SECONDS_TO_NOTICE = 60
# Scenarios of tests of their own.
LOSSES = ("worker_1_dies", "worker_1_stops", "worker_1_hangs", "training_resumes")


def free_addresses(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


@contextlib.contextmanager
def workers(names, folder):
    """Two processes that run scenarios, killed at the end; and what they print."""
    addresses = free_addresses(2)
    script = pathlib.Path(__file__).with_name("workers.py")
    outputs = [folder / f"worker_{i}.log" for i in range(2)]
    with contextlib.ExitStack() as stack:
        processes = []
        for index, path in enumerate(outputs):
            task = {"type": "worker", "index": index}
            config = json.dumps({"cluster": {"worker": addresses}, "task": task})
            environment = {
                **os.environ,
                "PYTHONPATH": PATHS,
                "TF_CONFIG": config,
                "CUDA_VISIBLE_DEVICES": "-1",
            }
            process = forks.Running(script, [folder, *names], path, environment)
            stack.callback(process.kill)
            processes.append(process)
        yield processes, outputs


def run(names, folder):
    """Run scenarios in turn, up to the first that fails or takes too long."""
    end = time.monotonic() + SECONDS
    with workers(names, folder) as (processes, outputs):
        while time.monotonic() < end and any(p.poll() is None for p in processes):
            if any(p.poll() for p in processes):
                end = min(end, time.monotonic() + 1)  # The other cannot go on.
            time.sleep(0.1)
        codes = [process.poll() for process in processes]
        # The first to fail says why; the other, that it has lost the first.
        texts = [path.read_text() for path in outputs]
        printed = "\n".join([f"codes: {codes}", *(text[-4000:] for text in texts)])
        return Ended(codes == [0, 0], min(map(passed_in, texts), key=len), printed)


# What replicas of one process show too.
SLOW = (
    "each_type_is_reduced_apart",
    "a_coupled_loss_sees_the_samples_of_all_workers",
    "an_infinity_on_worker_1_skips_the_update_on_both",
    "each_step_logs_in_one_reduction",
)
SHARED = [name for name in SCENARIOS if name not in (*LOSSES, *SLOW)]


def test_on_two_workers(tmp_path):
    run_group(SHARED, lambda names: run(names, tmp_path))


@pytest.mark.slow
def test_the_rest_on_two_workers(tmp_path):
    run_group(list(SLOW), lambda names: run(names, tmp_path))


@pytest.mark.slow  # As on replicas.
def test_a_scenario_that_fails_is_seen(tmp_path):
    with pytest.raises(AssertionError, match=r"(?s)no_such fails:.*KeyError: 'no_such'"):
        run_group(["no_such"], lambda names: run(names, tmp_path))


def lose(name, folder, ends):
    """Let worker 1 be lost; worker 0 has to end with an error of one of `ends`, soon."""
    with workers([name], folder) as (processes, outputs):
        lost = folder / "lost"
        deadline = time.monotonic() + SECONDS
        while not lost.exists() and time.monotonic() < deadline:
            assert processes[0].poll() is None, outputs[0].read_text()[-4000:]
            time.sleep(0.1)
        code = processes[0].wait(timeout=SECONDS_TO_NOTICE)
        printed = outputs[0].read_text()
        assert code not in (0, None)
        assert any(end in printed for end in ends), printed[-4000:]


def test_a_worker_that_dies_ends_the_other_and_training_resumes(tmp_path):
    lose("worker_1_dies", tmp_path, ["UnavailableError"])
    run_group(["training_resumes"], lambda names: run(names, tmp_path))


@pytest.mark.slow  # To the other, it is as one that dies, and takes longer.
def test_a_worker_that_stops_ends_the_other(tmp_path):
    lose("worker_1_stops", tmp_path, ["UnavailableError"])


@pytest.mark.slow  # Waits for a timeout.
def test_a_worker_that_hangs_ends_the_other_by_the_timeout_that_was_set(tmp_path):
    lose("worker_1_hangs", tmp_path, ["DeadlineExceededError"])
