"""The report for machines with GPUs, made here on two logical CPUs."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
SECONDS = 600


@pytest.fixture(scope="module")
def gpu_check():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import gpu_check

        yield gpu_check
    finally:
        sys.path.remove(str(BENCHMARKS))


def run(*options, code=0):
    ended = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu_check.py"), *options],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "-1",
            "PYTHONPATH": str(BENCHMARKS.parent),
        },
    )
    assert ended.returncode == code, (ended.stdout + ended.stderr)[-4000:]
    return ended.stdout + ended.stderr


# Numbers of both routes on replicas: `test_replicas.py`. The report: the test below.
@pytest.mark.slow
def test_the_report_on_two_logical_cpus():
    printed = run("--devices", "cpu:2", "--quick")
    number = r"([\d.e+-]+) +"
    for count in (1, 2):
        for dtype, bound in (("float32", 1e-5), ("mixed_float16", 5e-2)):
            row = rf"\| {count} +\| {dtype} +" + rf"\| {number}" * 4 + r"\| right +\|"
            *ours, plain, moved = map(float, re.search(row, printed).groups())
            assert max(ours) < bound < moved
            assert count == 1 or plain > bound
    costs = r"\| 2 +\| float32 +\| 32 +" + rf"\| {number}" * 6
    assert min(map(float, re.search(costs, printed).groups())) > 0
    assert "All numbers are right." in printed


@pytest.mark.parametrize("route", [None, "optimizer", "step"])
def test_the_report_judges_what_was_measured(gpu_check, monkeypatch, capsys, route):
    def measured(function, case, method=None):
        if function is gpu_check.measure_method:
            return 12.5, None if method == "step" else 3.0
        wrong = route is not None and (case.count, case.dtype) == (2, "float32")
        good = {"optimizer": 1e-7, "step": 2e-7, "large": 1e-1, "moved": 1.0}
        return {**good, **({route: 0.5} if wrong else {})}

    monkeypatch.setattr(gpu_check, "in_own_process", measured)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--devices", "cpu:2", "--quick"])
    if route is None:
        gpu_check.main()
    else:
        with pytest.raises(SystemExit, match=r"A number is wrong\. Please report it"):
            gpu_check.main()
    printed = capsys.readouterr().out
    row = r"\| 2 +\| float32 +" + r"\| [\d.e+-]+ +" * 4 + r"\| (.*?) +\|"
    assert re.search(row, printed)[1] == (f"WRONG: {route}" if route else "right")
    assert printed.count("| right ") == (4 if route is None else 3)
    assert re.search(r"\| 2 +\| float32 +\| \d+ +" + r"\| 12.5 +" * 3, printed)
    assert ("All numbers are right." in printed) == (route is None)


def test_a_wrong_number_is_called_wrong(gpu_check):
    case = gpu_check.Case("GPU", 2, "float32", "cnn", k=2, windows=1, xla=False)
    good = {"optimizer": 1e-7, "step": 1e-7, "large": 1e-2, "moved": 1.0}
    assert gpu_check.verdict(case, good) == "right"
    for wrong in (1e-3, float("nan")):
        judged = gpu_check.verdict(case, {**good, "step": wrong})
        assert judged == "WRONG: step"
    for nothing in ({"large": 1e-7}, {"moved": 1e-7}):
        judged = gpu_check.verdict(case, {**good, **nothing})
        assert judged == "WRONG: the control agrees too, so that nothing is shown"


def test_devices_are_chosen_by_name(gpu_check):
    choose = gpu_check.choose_devices
    assert choose("auto", ["a", "b"]) == ("GPU", 2)
    assert choose("gpu:1", ["a", "b"]) == ("GPU", 1)
    assert choose("cpu:3", []) == ("CPU", 3)
    for devices in ("auto", "gpu:2"):
        with pytest.raises(SystemExit, match=r"TensorFlow finds 0 GPUs\. Try cpu:2\."):
            choose(devices, [])
    with pytest.raises(SystemExit, match="is not auto, cpu:2, gpu:4 or the like"):
        choose("tpu", [])
