"""Keras's own tests, run through the objects of the package.

    python tests/keras_suite.py                   # the tests that Keras was installed with
    python tests/keras_suite.py ~/keras           # those of a checkout of that version
    python tests/keras_suite.py --part callbacks  # one part

Each part runs twice: as it is, and with each optimizer as `AccumOptimizer(optimizer, 1)`
or each model as `accumulate(model, accum_steps=1)`. A test that passes as it is and fails
through the package needs a reason in `keras_suite_reasons.py`: without one, the script
fails. What changes is what the tests take for an optimizer or a model, nothing else.
"""

import argparse
import collections
import contextlib
import functools
import importlib
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import types

TESTS = pathlib.Path(__file__).parent
SECONDS = 180  # That a test may take.
TRAINERS = (
    "trainers/trainer_test.py",
    "trainers/compile_utils_test.py",
    "trainers/epoch_iterator_test.py",
    "models/model_test.py",
)
# What is tested, where in `keras/src`, and what goes through the package.
PARTS = {
    "optimizers": (("optimizers",), "instances"),
    "callbacks": (("callbacks",), "optimizer"),
    "callbacks, in the step": (("callbacks",), "step"),
    "trainers": (TRAINERS, "optimizer"),
    "trainers, in the step": (TRAINERS, "step"),
}
# Modules about an optimizer around others: that one is wrapped, the others are not.
OUTER = {
    "loss_scale_optimizer_test": "LossScaleOptimizer",
    "multi_optimizer_test": "MultiOptimizer",
}


# --- As a plugin of pytest, `-p keras_suite`. The environment says what to replace.


def pytest_configure(config):
    through = os.environ.get("KERAS_SUITE_THROUGH")
    if through in ("optimizer", "step"):
        _replace_compile(through)


def pytest_collectstart(collector):
    import pytest

    through = os.environ.get("KERAS_SUITE_THROUGH")
    if not isinstance(collector, pytest.Module):
        return
    stands_in = _models_as_trainers if through == "step" else contextlib.nullcontext
    try:
        with stands_in(), _jax_can_be_imported(collector.path.name):
            module = collector.obj
    except collector.CollectError:
        return  # pytest tries again, and tells.
    if through == "instances":
        _replace_optimizers(module)


def pytest_collection_modifyitems(items):
    done = _noted(pathlib.Path(os.environ["KERAS_SUITE_RESULTS"]))
    items[:] = [item for item in items if item.nodeid not in done]


def pytest_runtest_logstart(nodeid, location):
    _note(nodeid, "hung", f"It did not end in {SECONDS} s.")


def pytest_runtest_logreport(report):
    if report.failed or report.when == "call":
        crash = getattr(report.longrepr, "reprcrash", None)
        message = getattr(crash, "message", str(report.longrepr))
        _note(report.nodeid, report.outcome, message[:2000])
    elif report.skipped:
        _note(report.nodeid, "skipped", "")


def _note(nodeid, outcome, message):
    with open(os.environ["KERAS_SUITE_RESULTS"], "a") as results:
        print(json.dumps([nodeid, outcome, message]), file=results)


def _noted(path):
    """The last outcome and message of each test, by its name."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {name: (outcome, message) for name, outcome, message in map(json.loads, lines)}


class Through(type):
    """A stand-in for a class of optimizers, whose instances are wrapped."""

    original: type

    def __call__(cls, *args, **kwargs):
        return _wrapped(cls.original(*args, **kwargs))

    def __getattr__(cls, name):
        return getattr(cls.original, name)

    def __instancecheck__(cls, instance):
        inner = getattr(instance, "inner_optimizer", instance)
        return isinstance(inner, cls.original) or isinstance(instance, cls.original)


def _wrapped(optimizer):
    import keras_accum as ka

    if optimizer is None or isinstance(optimizer, ka.AccumOptimizer):
        return optimizer
    return ka.AccumOptimizer(optimizer, accum_steps=1)


def _replace_optimizers(module):
    """Have `module` find wrapped optimizers under the names that it has imported."""
    only = OUTER.get(module.__name__.rpartition(".")[2])
    for name, value in list(vars(module).items()):
        if only in (None, name):
            setattr(module, name, _stand_in(value))


def _stand_in(value):
    import keras

    of_keras = isinstance(value, types.ModuleType) and value.__name__.startswith("keras")
    if of_keras and value.__name__.rpartition(".")[2] in ("keras", "optimizers"):
        return _Module(value)
    if isinstance(value, type) and issubclass(value, keras.Optimizer):
        return Through(value.__name__, (), {"original": value})
    return value


class _Module:
    def __init__(self, module):
        self._module = module

    def __getattr__(self, name):
        return _stand_in(getattr(self._module, name))


def _replace_compile(through):
    """Have `compile` wrap the optimizer, or make the model accumulate in its step."""
    from keras.src.trainers.trainer import Trainer

    from keras_accum._backend.private import canaries

    canaries.check()  # They compile a model, as it is.
    plain = Trainer.compile

    def compile(self, optimizer="rmsprop", *args, **kwargs):
        import keras

        import keras_accum as ka

        if through == "optimizer":
            optimizer = _wrapped(keras.optimizers.get(optimizer))
        elif getattr(self, "accumulation", None) is None:
            ka.accumulate(self, accum_steps=1)
        return plain(self, optimizer, *args, **kwargs)

    Trainer.compile = compile


@contextlib.contextmanager
def _models_as_trainers():
    """Have tests make models, of which `accumulate` takes any, where they make trainers.

    Keras's own are layers with the trainer mixed in, without being a `keras.Model`.
    """
    import keras
    from keras.src.backend.tensorflow import trainer

    plain = trainer.TensorFlowTrainer

    class Trainer(keras.Model):
        def __init__(self):
            plain.__init__(self)

        # Those of the layer beside it, which `keras.Model` has its own of.
        def build(self, input_shape):
            return super(keras.Model, self).build(input_shape)

        def call(self, inputs):
            return super(keras.Model, self).call(inputs)

    trainer.TensorFlowTrainer = Trainer
    try:
        yield
    finally:
        trainer.TensorFlowTrainer = plain


@contextlib.contextmanager
def _jax_can_be_imported(name):
    """The tests of trainers import it for all backends; with TensorFlow few need it."""
    importlib.import_module("keras")  # Which asks for it too, and uses it if it is there.
    missing = name == "trainer_test.py" and importlib.util.find_spec("jax") is None
    if missing:
        sys.modules["jax"] = types.ModuleType("jax")
    try:
        yield
    finally:
        if missing:
            del sys.modules["jax"]


# --- As a script.


@functools.cache
def run(folders, checkout, through):
    """The outcome and message of each test, by its name."""
    paths = [checkout / "keras" / "src" / folder for folder in folders]
    environment = {
        **os.environ,
        "KERAS_BACKEND": "tensorflow",
        "KERAS_SUITE_THROUGH": through,
        "PYTHONPATH": os.pathsep.join(map(str, (checkout, TESTS.parent, TESTS))),
    }
    options = ["-q", "-c", os.devnull, "--rootdir", str(checkout), "--noconftest"]
    options += ["-p", "keras_suite", "-p", "no:cacheprovider", "-p", "no:randomly"]
    options += ["--continue-on-collection-errors"]
    options += ["-o", "python_files=*_test.py", "-W", "ignore"]
    # What hangs in TensorFlow cannot be interrupted: the process ends, with all stacks.
    options += ["-o", f"faulthandler_timeout={SECONDS}"]
    options += ["-o", "faulthandler_exit_on_timeout=true"]
    command = [sys.executable, "-m", "pytest", *options, *map(str, paths)]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        results = pathlib.Path(folder) / "results"
        environment["KERAS_SUITE_RESULTS"] = str(results)
        while True:
            done = subprocess.run(
                command, env=environment, cwd=folder, capture_output=True, text=True
            )
            print(done.stdout[-200:].strip().splitlines()[-1:], file=sys.stderr)
            before, found = len(found), _noted(results)
            if "Timeout (" in done.stderr and len(found) > before:
                print(done.stderr[-3000:], file=sys.stderr, flush=True)  # Go on after it.
            elif found:
                return found
            else:
                sys.exit(done.stdout[-3000:] + done.stderr[-3000:])


def compare(part, checkout):
    """What passed, what failed and why; whether each failure has its reason."""
    folders, through = PARTS[part]
    plain, found = run(folders, checkout, ""), run(folders, checkout, through)
    passing = [name for name, (outcome, _) in plain.items() if outcome == "passed"]
    if not passing:
        sys.exit(f"{part}: no test passes in plain Keras")
    failed = [name for name in passing if found.get(name, ["none"])[0] != "passed"]
    why = collections.Counter(map(reason_for, failed))
    for name in failed:
        if reason_for(name) is None:
            outcome, message = found.get(name, ("did not run", ""))
            print(f"WITHOUT A REASON: {name} {outcome}\n{message[:600]}\n", flush=True)
    counts = [len(passing), len(passing) - len(failed), len(failed)]
    counts.append(len(plain) - len(passing))
    row = f"| {part} | {' | '.join(map(str, counts))} |"
    reasons = [f"- {part} ({n}): {reason}." for reason, n in why.most_common() if reason]
    print("\n".join([row, *reasons]), flush=True)
    return row, reasons, None not in why


def reason_for(name):
    """Why a test fails here that plain Keras passes, or None."""
    from keras_suite_reasons import REASONS

    found = [reason for pattern, reason in REASONS if re.search(pattern, name)]
    return found[0] if found else None


TABLE = TESTS.parent / "docs" / "keras_suite.md"
INTRODUCTION = """# Keras's own tests, through the package

`python tests/keras_suite.py` runs the tests of the installed Keras, {}, twice: as they
are, and through `AccumOptimizer(optimizer, 1)` or `accumulate(model, accum_steps=1)`. It
writes this table. "Others" fail or are skipped in plain Keras too, mostly for a missing
package.

| tests of Keras | pass in plain Keras | pass through the package | fail | others |
|---|---|---|---|---|
"""


def write(version, part, row, reasons):
    """Put what was found of `part` into the table, in place of what stands there of it."""
    old = TABLE.read_text().splitlines() if TABLE.exists() else []
    rows = {p: line for p in PARTS for line in old if line.startswith(f"| {p} |")}
    why = {p: [line for line in old if line.startswith(f"- {p} (")] for p in PARTS}
    rows[part], why[part] = row, reasons
    lines = [rows[p] for p in PARTS if p in rows]
    lines += ["", "What a test does that fails, and how many of them do:", ""]
    lines += [line for p in PARTS for line in why[p]]
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(INTRODUCTION.format(version) + "\n".join(lines) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", nargs="?", type=pathlib.Path)
    parser.add_argument("--part", choices=PARTS, action="append")
    given = parser.parse_args()
    installed = pathlib.Path(importlib.util.find_spec("keras").origin).parents[1]
    checkout = (given.checkout or installed).expanduser().resolve()
    version = re.compile(r'__version__ = "(.*)"')
    versions = [
        version.search((folder / "keras" / "src" / "version.py").read_text())[1]
        for folder in (installed, checkout)
    ]
    if versions[0] != versions[1]:
        parser.error(f"Keras {versions[0]} is installed, the checkout has {versions[1]}")
    fine = True
    for part in given.part or PARTS:
        row, reasons, explained = compare(part, checkout)
        write(versions[0], part, row, reasons)
        fine &= explained
    sys.exit(not fine)


if __name__ == "__main__":
    main()
