"""The examples run, and print what they are to show."""

import os
import pathlib
import re

import forks
import numpy as np
import pytest

pytest.importorskip("tensorflow_datasets")

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
SECONDS = 300


def run(script, *options, code=0):
    """Run an example; raise unless it ends with `code`. Returns what it printed."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    environment.pop("TF_CONFIG", None)
    ended, printed = forks.run(
        EXAMPLES / script, *options, timeout=SECONDS, environment=environment
    )
    assert ended == code, printed[-4000:]
    return printed


def assert_compared(printed, first=1):
    """Raise unless a comparison was printed, from epoch `first`, of what was trained."""
    row = r"{} +(\S+) +(\S+)"
    assert re.search(row.format("weights +after epoch"), printed)[1] == str(first)
    apart, moved = (
        [float(value) for value in re.search(row.format(name), printed).groups()]
        for name in ("largest difference", "largest move since the start")
    )
    # The control: a run that does not train agrees too.
    assert max(apart) < 1e-5 and min(moved) > 1e-2
    assert "Checked: the weights differ by" in printed


# Both routes on replicas: `tests/distribution/test_replicas.py`.
@pytest.mark.slow
@pytest.mark.parametrize("route", ["step", "optimizer"])
def test_train_multi_gpu(route):
    options = ["--devices", "cpu:2", "--route", route, "--epochs", 2]
    printed = run("train_multi_gpu.py", *options)
    assert "16 samples x 4 accum_steps x 2 replicas = effective batch 128" in printed
    assert_compared(printed)


@pytest.mark.slow
def test_train_multi_gpu_takes_whole_micro_batches_only():
    options = ["--devices", "cpu:3", "--micro-batch-size", 16]
    printed = run("train_multi_gpu.py", *options, code=1)
    assert printed.rstrip().endswith(
        "--batch-size 128 is not a multiple of --micro-batch-size 16 x 3 replicas: an "
        "update takes whole micro-batches, as many on each replica. Use --batch-size 144."
    )


@pytest.mark.slow
def test_train_multi_worker():
    printed = run("train_multi_worker.py", "--epochs", 2)
    assert "16 samples x 4 accum_steps x 2 replicas = effective batch 128" in printed
    assert_compared(printed)


# `tests/distribution/test_workers.py` loses a worker, and resumes.
@pytest.mark.slow
def test_train_multi_worker_resumes_after_a_worker_was_lost(tmp_path):
    backup = tmp_path / "backup"
    options = ["--epochs", 3, "--backup-dir", backup]
    printed = run("train_multi_worker.py", *options, "--lose-worker", 2, code=1)
    assert "The workers ended with the codes [1, 1]. The same command resumes." in printed
    assert "Checked" not in printed and backup.exists()
    printed = run("train_multi_worker.py", *options)
    assert "16 samples x 4 accum_steps x 2 replicas = effective batch 128" in printed
    assert_compared(printed, first=2)
    # Epoch 1 of the run on one device alone.
    assert printed.count("Epoch 1/3") == 1 and not backup.exists()


def test_diagnose_model(tmp_path):
    printed = run("diagnose_model.py", "--output", tmp_path)
    assert (
        "Checked: BatchNormalization, contrastive loss, own masked loss differ, and are "
        "equal with the remedy."
    ) in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "models.png",
        "variables.png",
    ]


def test_quick_start():
    printed = run("quick_start.py")
    apart = re.findall(r"(.*\S) +differs by (\S+)", printed)
    assert [name for name, _ in apart] == [
        "in the optimizer",
        "in the step",
        "batches of 16",
    ]


@pytest.mark.slow  # `tests/step/test_keras_hub.py` trains such models by both routes.
def test_fine_tune_lora():
    pytest.importorskip("keras_hub")
    printed = run("fine_tune_lora.py", "--updates", 2)
    assert "KiB with LoRA" in printed
    assert "Checked: both routes train as the large batch does" in printed


def test_a_short_training_is_not_judged_and_a_long_one_is(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from comparison import judge_learning

    assert judge_learning(None, 1, 8, "epochs") is None
    assert judge_learning(None, 8, 8, "epochs") is None
    assert judge_learning("The score is 0.1.", 7, 8, "epochs") == (
        "Not judged: what was learnt in 7 epochs; 8 are the default. The score is 0.1."
    )
    for epochs in (8, 9):
        with pytest.raises(SystemExit) as error:
            judge_learning("The score is 0.1.", epochs, 8, "epochs")
        assert str(error.value) == "Failed to learn: The score is 0.1."


def test_numbers_that_differ_fail_however_short_the_training(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from comparison import Run
    from coupled import LARGE, SPLIT, TWO_PASS, check

    def after_one_epoch(weight):
        start, end = np.ones(1, "float32"), np.full(1, weight, "float32")
        return Run({}, [[start], [end]], 0.0)

    runs = {LARGE: after_one_epoch(2.0), SPLIT: after_one_epoch(3.0)}
    assert "Checked" in check({**runs, TWO_PASS: after_one_epoch(2.0)})
    with pytest.raises(SystemExit, match=r"^Failed: after epoch 1 the weights of two_"):
        check({**runs, TWO_PASS: after_one_epoch(2.01)})
