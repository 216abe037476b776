"""Processes that begin with TensorFlow imported: forks of one that has done nothing else.

Importing TensorFlow and Keras takes a process five seconds of CPU time, longer than most
of what it is started for. So scripts run in forks of a process that has imported both and
used neither: what TensorFlow does once in a process, it does in each fork.
"""

import atexit
import multiprocessing
import os
import pathlib
import runpy
import sys
import tempfile
from typing import NamedTuple

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["keras", "keras_accum"])


class Ended(NamedTuple):
    """What a script ended with: None for a code if it took too long."""

    returncode: int | None
    printed: str


class Running:
    """A script in a process of its own; killed at the end of the context.

    Args:
        script: a path.
        arguments: of the command line.
        output: the path of a file for all that is printed.
        environment: all variables of the environment; `PYTHONPATH` counts too.
        folder: where it runs; by default, here.
    """

    def __init__(self, script, arguments, output, environment, folder=None):
        arguments = [str(script), *map(str, arguments)]
        folder = str(folder or pathlib.Path.cwd())
        how = (arguments, str(output), dict(environment), folder)
        self._process = _context.Process(target=_run, args=how)
        pathlib.Path(output).touch()
        self._process.start()

    def poll(self):
        """The code that it has ended with; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout=None):
        """As `poll`, after so many seconds at most."""
        self._process.join(timeout)
        return self._process.exitcode

    def kill(self):
        """End it, if it has not ended."""
        self._process.kill()
        self._process.join()


def run(script, *arguments, timeout, environment, folder=None):
    """Run a script; returns how it `Ended`."""
    with tempfile.TemporaryDirectory() as temporary:
        output = pathlib.Path(temporary) / "output"
        process = Running(script, arguments, output, environment, folder)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        return Ended(code, output.read_text(errors="replace"))


def _run(arguments, output, environment, folder):
    """In the fork: become what `python SCRIPT ARGUMENT...` would be."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    # Those of the server, which print to what it has.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    script, *_ = sys.argv = arguments
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [str(pathlib.Path(script).resolve().parent), *filter(None, paths)]
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # Private: a fork ends without them.
