"""The rooms of the package: which folder may import which, and who may touch what."""

import ast
import pathlib

import keras
import pytest
import tensorflow as tf
from renames import own_attributes

import keras_accum

# The table of ARCHITECTURE.md: what a folder, or a file beside them, may import.
MAY_IMPORT = {
    "_backend": set(),
    "_core": {"_backend"},
    "_recompute": {"_backend"},
    "_batch_norm": {"_backend", "_recompute"},
    "_optimizer": {"_backend", "_core", "_batch_norm"},
    "_step": {"_backend", "_core", "_batch_norm", "_optimizer"},
    "_planning": {"_backend", "_core", "_recompute", "_optimizer", "_step"},
    "_insight": {
        *("_backend", "_core", "_batch_norm", "_optimizer", "_step", "_planning"),
    },
    "_callbacks": {"_backend", "_core", "_optimizer", "_step"},
    "_schedules": {"_core"},
}
PACKAGE = pathlib.Path(keras_accum.__file__).parent
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def module(path):
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def imports(name, source):
    """The modules of the package that module `name` imports, dotted from the package."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = name.split(".")[: -node.level]
            stem = [*base, *([node.module] if node.module else [])]
            found |= (
                {".".join(stem)}
                if node.module
                else {".".join([*stem, a.name]) for a in node.names}
            )
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [a.name for a in node.names]
            absolute = [node.module] if isinstance(node, ast.ImportFrom) else names
            assert not any(n.startswith("keras_accum") for n in absolute), name
    return found


def check(name, source):
    room = name.partition(".")[0]
    rooms = {found.partition(".")[0] for found in imports(name, source)}
    wrong = rooms - MAY_IMPORT[room] - {room}
    assert not wrong, f"{name} may not import {sorted(wrong)}"


def test_every_room_has_its_row():
    assert {module(path).partition(".")[0] for path in MODULES} == set(MAY_IMPORT)


def test_the_rooms_have_an_order():
    below = {}
    for room, allowed in MAY_IMPORT.items():
        assert allowed <= set(below), f"{room} may import what stands below it"
        below[room] = allowed


@pytest.mark.parametrize("path", MODULES, ids=module)
def test_a_module_imports_what_its_room_may(path):
    check(module(path), path.read_text())


def test_no_two_modules_import_each_other():
    arrows = {module(p): imports(module(p), p.read_text()) for p in MODULES}
    left = {name: set(to) & set(arrows) for name, to in arrows.items()}
    while free := [name for name, to in left.items() if not to & set(left)]:
        for name in free:
            del left[name]
    assert not left, f"a circle among {sorted(left)}"


def test_a_reversed_import_is_found():
    with pytest.raises(AssertionError, match=r"_core\.loss may not import"):
        check("_core.loss", "from .._optimizer.wrapper import AccumOptimizer")
    with pytest.raises(AssertionError, match=r"_backend\.control may not import"):
        check("_backend.control", "from .._core import loop")


def test_one_file_names_the_distribution_strategies():
    for path in MODULES:
        code = ast.parse(path.read_text())
        names = [
            node
            for node in ast.walk(code)
            if isinstance(node, ast.Attribute) and node.attr == "distribute"
        ]
        assert not names or module(path) == "_backend.replica", path


def test_one_folder_imports_private_modules():
    for path in MODULES:
        private = [
            node.module
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom)
            and node.level == 0
            and node.module.startswith(
                ("keras.src", "tensorflow.python", "tensorflow.compiler")
            )
        ]
        assert not private or "_backend.private" in module(path), f"{path}: {private}"


# --------------------------------------------------- attributes that others keep private

# `sys` and named tuples document these.
PUBLIC = {"_getframe", "_current_frames", "_replace", "_asdict", "_fields"}
MARK = "_keras_accum"  # On objects of others.
CLASSES = [
    keras.Layer,
    keras.Loss,
    keras.Metric,
    keras.Model,
    keras.Variable,
    keras.layers.BatchNormalization,
    keras.layers.Wrapper,
    keras.optimizers.LossScaleOptimizer,
    keras.optimizers.SGD,
    tf.GradientTape,
    tf.Graph,
    tf.Tensor,
    tf.Variable,
    tf.distribute.Strategy,
]


def is_private(name):
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__")


def foreign_names(source, own):
    """The private names of others that a module reads, or overrides."""
    found, code = set(), ast.parse(source)
    methods = {
        held
        for node in ast.walk(code)
        if isinstance(node, ast.ClassDef)
        for held in node.body
        if isinstance(held, ast.FunctionDef)
    }
    for node in ast.walk(code):
        name = node.attr if isinstance(node, ast.Attribute) else None
        if isinstance(node, ast.Constant):  # As `getattr` takes it.
            name = node.value
        if node in methods:
            name = node.name
        if not is_private(name) or not name.isidentifier():
            continue
        if name not in own | PUBLIC and not name.startswith(MARK):
            found.add(name)
    return found


@pytest.fixture(scope="module")
def own():
    names = {n for p in MODULES for n in own_attributes(ast.parse(p.read_text()))}
    # An override is a use: the name is still Keras's or TensorFlow's.
    return names - {name for cls in CLASSES for name in dir(cls)}


def test_one_folder_touches_private_attributes(own):
    found = {}
    for path in MODULES:
        names = foreign_names(path.read_text(), own)
        if names and "_backend.private" not in module(path):
            found[module(path)] = names
    assert not found, f"private names of Keras or TensorFlow belong in _backend: {found}"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("model._loss_tracker.update_state(1)", "_loss_tracker"),
        ("x = [variable._value]", "_value"),
        ("getattr(optimizer, '_var_key')", "_var_key"),
        ("self._trainable_variables", "_trainable_variables"),
        ("class A(Layer):\n def _moments(self): pass", "_moments"),
        # A function of that name is no attribute.
        ("def _learning_rate(x): getattr(x, '_learning_rate')", "_learning_rate"),
    ],
)
def test_a_private_attribute_is_found(own, source, name):
    assert foreign_names(source, own) == {name}


def test_a_private_attribute_of_the_packages_own_is_allowed(own):
    assert foreign_names("optimizer._of_mine", own) == {"_of_mine"}
    code = ast.parse("class A:\n def f(self):\n  self._of_mine = 1")
    assert foreign_names("optimizer._of_mine", own | own_attributes(code)) == set()
    assert foreign_names("loss._keras_accum_mark = 1", own) == set()
