"""Which replicas XLA can compile for; `tests/distribution` has what replicas compute."""

from types import SimpleNamespace

import pytest
from helpers import assert_refused

from keras_accum._backend import replica

ON_CPUS = (
    "Received `jit_compile=True` under a strategy whose replicas are CPU devices, where "
    "TensorFlow compiles no collective operation. Write "
    "`model.compile(..., jit_compile=False)`."
)
ON_SEVERAL_GPUS = (
    "Received `jit_compile=True` under a strategy with several GPUs in one process, "
    "where XLA compiles a program for one device only. Write "
    "`model.compile(..., jit_compile=False)`."
)


@pytest.fixture
def replicas_on(monkeypatch):
    """Pretend that XLA compiles for a strategy with the given devices in this process."""

    def pretend(*devices, count=2, compiled=True):
        devices = [f"/job:worker/replica:0/task:0/device:{d}" for d in devices]
        strategy = SimpleNamespace(extended=SimpleNamespace(worker_devices=devices))
        monkeypatch.setattr(replica, "count", lambda: count)
        monkeypatch.setattr(replica, "compiled_by_xla", lambda: compiled)
        monkeypatch.setattr(replica, "current", lambda: strategy)

    return pretend


def test_several_gpus_of_one_process_are_refused(replicas_on):
    replicas_on("GPU:0", "GPU:1")
    assert_refused(replica.check_compilable, ValueError, ON_SEVERAL_GPUS)


@pytest.mark.parametrize("devices", [["CPU:0", "CPU:1"], ["CPU:0"], ["GPU:0", "CPU:0"]])
def test_cpus_are_refused_one_per_machine_too(replicas_on, devices):
    replicas_on(*devices)
    assert_refused(replica.check_compilable, ValueError, ON_CPUS)


def test_one_gpu_on_each_machine_is_not_refused(replicas_on):
    replicas_on("GPU:0")
    replica.check_compilable()


def test_one_replica_is_not_refused(replicas_on):
    replicas_on("CPU:0", count=1)
    replica.check_compilable()


def test_nothing_is_refused_outside_of_xla(replicas_on):
    replicas_on("CPU:0", "CPU:1", compiled=False)
    replica.check_compilable()
