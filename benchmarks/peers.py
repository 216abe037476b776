"""Environments of the peers, and workers that run in them."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Environment:
    """Where a worker runs.

    Attributes:
        worker: the script, in this folder.
        installs: the arguments of `pip install`, a call each. None: the environment of
            this process.
        variables: what is set for the worker.
    """

    worker: str
    installs: tuple[tuple[str, ...], ...] = ()
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)


ENVIRONMENTS = {
    "keras": Environment("worker_keras.py"),
    "tf_keras": Environment(
        "worker_tf_keras.py",
        (
            ("tensorflow-cpu==2.21.0", "tf-keras==2.21.0"),
            ("--no-deps", "gradient-accumulator==0.5.2"),
        ),
        {"TF_USE_LEGACY_KERAS": "1"},
    ),
    "jax": Environment("worker_jax.py", (("jax==0.10.2", "optax==0.2.8"),)),
}


PATIENCE = 900  # seconds for one call; a worker that takes longer is ended


class PeerError(Exception):
    """A peer could not be installed, raised, or ended; says its last line."""


@functools.cache
def python_of(name: str, folder: Path) -> str | PeerError:
    """Returns the Python of an environment, or why there is none.

    It is made in `folder` if need be; what failed is not tried again.
    """
    try:
        return _python_of(name, folder)
    except PeerError as error:
        return error


def _python_of(name: str, folder: Path) -> str:
    environment = ENVIRONMENTS[name]
    if not environment.installs:
        return sys.executable
    place = folder / name
    python, done = place / "bin" / "python", place / "installed.json"
    wanted = json.dumps(environment.installs)
    if done.exists() and done.read_text() == wanted:
        return str(python)
    run([sys.executable, "-m", "venv", "--clear", str(place)])
    for arguments in environment.installs:
        run([str(python), "-m", "pip", "install", "--quiet", *arguments])
    done.write_text(wanted)
    return str(python)


def run(command: Sequence[str]) -> None:
    """Runs a command; raises `PeerError` with the last line that it said."""
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        raise PeerError(last_line(ended.stderr) or f"exit code {ended.returncode}")


def last_line(text: str) -> str:
    """Returns the last line that is not empty."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


class Worker:
    """A process in an environment that answers calls, one at a time."""

    def __init__(self, name: str, folder: Path) -> None:
        environment, python = ENVIRONMENTS[name], python_of(name, folder)
        if isinstance(python, PeerError):
            raise python
        variables = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "-1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(HERE.parent) if name == "keras" else "",
            **environment.variables,
        }
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in __exit__
        self._process = subprocess.Popen(
            [python, str(HERE / environment.worker)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=variables,
        )

    def call(self, name: str, **arguments: Any) -> Any:
        """Returns what a function of the worker returns; raises `PeerError`."""
        timer = threading.Timer(PATIENCE, self._process.kill)
        timer.start()
        try:
            assert self._process.stdin and self._process.stdout
            request = json.dumps({"call": name, **arguments})
            print(request, file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            raise PeerError(self._last_words())
        reply = json.loads(line)
        if "error" in reply:
            raise PeerError(reply["error"])
        return reply["result"]

    @property
    def alive(self) -> bool:
        """Whether the process still answers."""
        return self._process.poll() is None

    def _last_words(self) -> str:
        code = self._process.wait()
        self._said.seek(0)
        return last_line(self._said.read()) or f"ended with exit code {code}"

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.stdin:
            self._process.stdin.close()
        self._process.wait()
        self._said.close()
