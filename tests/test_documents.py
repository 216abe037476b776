"""What the documents say is so: commands, code, names and figures."""

import pathlib
import re

import keras
import numpy as np
import pytest

import keras_accum as ka

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_readme_has_two_commands_and_ci_runs_them():
    commands = [block.strip() for block in blocks("sh")]
    assert len(commands) == 2
    ci = (ROOT / ".ci" / "run").read_text()
    for command in commands:
        assert command in ci


@pytest.mark.parametrize("code", blocks("python"))
def test_readme_code_runs_as_it_stands(code):
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense
    model = keras.Sequential([keras.Input((4,)), dense(4), dense(1)])
    before = [w.copy() for w in model.get_weights()]
    rng = np.random.default_rng(0)
    names = {
        "model": model,
        "ka": ka,
        "keras": keras,
        "x": rng.normal(size=(256, 4)),
        "y": np.ones((256, 1)),
    }
    exec(code, names)
    assert int(model.optimizer.iterations) == 2
    assert np.abs(model.get_weights()[0] - before[0]).max() > 0


def test_readme_names_what_is_public():
    named = set(re.findall(r"\bka\.(\w+)", README))
    public = {name for name in vars(ka) if not name.startswith("_")}
    assert named <= public
    assert public - named <= {
        "GradientAccumulationOptimizer",
        "GradientAccumulationModel",
    }
    assert "`GradientAccumulationModel`" in README


def test_changelog_tells_of_every_public_name():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    for name in vars(ka):
        assert name.startswith("_") or f"`{name}`" in changelog


def test_files_that_the_readme_names_exist():
    for path in re.findall(r"`?((?:examples|benchmarks|keras_accum)/[\w./]*)", README):
        assert (ROOT / path).exists(), path
