"""The layers of the package: a module imports from rows above its own, and no other."""

import ast
import pathlib

import pytest

import keras_accum

ROWS = [
    {"_keras_private"},
    {"_control", "_gradients", "_clipping", "_window", "_replica", "_shadow"},
    {"_nest", "_tie"},
    {"_passes"},
    {"_accumulator", "_arguments", "_checkpoint", "_loop", "_loss", "_batch_norm"}
    | {"_recompute_checks", "_select", "_dropout"},
    {"_recompute_core"},
    {"_segments"},
    {"_accumulate", "_optimizer", "_recompute"},
    {"_two_pass"},
    {"_train_step"},
    {"_oom"},
    {"_model", "_callbacks"},
    {"_schedules", "_budget", "_search", "_transaction"},
    {"_measure"},
    {"_plan", "_shortage"},
    {"_planner"},
    {"__init__"},
]
PACKAGE = pathlib.Path(keras_accum.__file__).parent


def imports(source):
    """The modules of the package that `source` imports."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            found |= {node.module} if node.module else {a.name for a in node.names}
    return found


def check(module, source):
    row = next(i for i, names in enumerate(ROWS) if module in names)
    above = set().union(*ROWS[:row])
    wrong = imports(source) - above
    assert not wrong, f"{module} imports {sorted(wrong)}, which stand beside or below it"


def test_every_module_has_its_row():
    modules = {path.stem for path in PACKAGE.glob("*.py")}
    assert modules == set().union(*ROWS)


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.stem)
def test_a_module_imports_from_above(path):
    check(path.stem, path.read_text())


def test_a_reversed_import_is_found():
    with pytest.raises(AssertionError, match="_window imports"):
        check("_window", "from ._optimizer import AccumOptimizer")
    with pytest.raises(AssertionError, match="_control imports"):
        check("_control", "from . import _replica")


def test_one_file_names_the_distribution_strategies():
    for path in PACKAGE.glob("*.py"):
        code = ast.parse(path.read_text())
        names = [
            node
            for node in ast.walk(code)
            if isinstance(node, ast.Attribute) and node.attr == "distribute"
        ]
        assert not names or path.stem == "_replica", f"{path.stem} names tf.distribute"


def test_one_file_imports_private_modules():
    for path in PACKAGE.glob("*.py"):
        private = [
            node.module
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom)
            and node.level == 0
            and node.module.startswith(
                ("keras.src", "tensorflow.python", "tensorflow.compiler")
            )
        ]
        assert not private or path.stem == "_keras_private", f"{path.stem}: {private}"
