"""The rooms of the package: which folder may import which, and who may touch what."""

import ast
import pathlib

import pytest

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
    "_callbacks": {"_backend", "_core", "_optimizer"},
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
