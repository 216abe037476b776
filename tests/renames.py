"""What happens if Keras or TensorFlow renames a private part that the package uses.

    python tests/renames.py [NAME ...] [--without-canaries]

Renames each such name in turn, everywhere in the sources of Keras (or of TensorFlow, if
it is TensorFlow's) as they are imported, each in a process of its own, then makes objects
and trains on a few numbers (`renames_checks.py`). Writes who notices into docs/renames.md.
A row that is wrong without a word fails the script. Without names it takes all of them,
which is about ten minutes of CPU time.
"""

import argparse
import ast
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import sys

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

PACKAGE = pathlib.Path(__file__).parents[1] / "keras_accum"
# Private names without an underscore, and those that only TensorFlow defines.
WITHOUT_UNDERSCORE = {
    "autocast_scope",
    "call_signature_parameters",
    "current_call_ctx",
    "get_tf_dataset",
    "get_value",
    "global_seed_generator",
    "is_control_flow_graph",
    "is_input",
    "output_names",
    "quantization_mode",
    "quantized_call",
    "scale_loss_for_distribution",
    "state_mapping",
    "unlock",
    "unscale_loss_for_distribution",
}
OF_TENSORFLOW = {
    "_get_on_device_or_primary",
    "_handle_deferred_dependencies",
    "_lookup_dependency",
    "_rng",
    "_trackable_children",
    "is_control_flow_graph",
}
# Private methods of Keras that the package defines anew.
OVERRIDDEN = {*OF_TENSORFLOW, "_layers", "_moments", "_open_name_scope"}
# What is documented.
NOT_FOREIGN = {"_fields", "_getframe", "_replace"}


def names():
    """The private names that the package uses, and whether each is TensorFlow's."""
    found = {name: name in OF_TENSORFLOW for name in WITHOUT_UNDERSCORE}
    own, used = set(), set()
    for path in PACKAGE.rglob("*.py"):
        code = ast.parse(path.read_text())
        imported, modules = _imported(code)
        found |= imported
        own |= own_attributes(code)
        parts_of_names = _parts_of_names(code)
        for node in ast.walk(code):
            if isinstance(node, ast.Attribute):
                if isinstance(node.value, ast.Name) and node.value.id in modules:
                    found[node.attr] = modules[node.value.id]
                elif node.attr.startswith("_"):
                    used.add(node.attr)
            elif isinstance(node, ast.Constant) and node not in parts_of_names:
                used.update(re.findall(r"\A_\w+\Z", f"{node.value}"))
    keras_source = b"".join(p.read_bytes() for p in _sources("keras"))
    known = set(re.findall(rb"\b_\w+", keras_source))
    for name in used - (own - OVERRIDDEN) - NOT_FOREIGN:
        of_keras = name.encode() in known and not name.startswith("__")
        if name in OF_TENSORFLOW or of_keras:
            found.setdefault(name, name in OF_TENSORFLOW)
    return dict(sorted(found.items()))


def _imported(code):
    """Private names that `code` imports, and private modules, by the names they get."""
    names, modules = {}, {}
    for node in ast.walk(code):
        if not isinstance(node, ast.ImportFrom) or node.level:
            continue
        of_tensorflow = node.module.startswith("tensorflow.")
        for alias in node.names:
            if not of_tensorflow and not node.module.startswith("keras.src"):
                continue
            if alias.name.endswith("_pb2"):
                continue  # A format, not code.
            if _is_module(f"{node.module}.{alias.name}"):
                modules[alias.asname or alias.name] = of_tensorflow
            else:
                names[alias.name] = of_tensorflow
    return names, modules


def own_attributes(code):
    """The attributes and methods that classes in `code` define."""
    own = set()
    for node in ast.walk(code):
        if isinstance(node, ast.ClassDef):
            for held in ast.walk(node):
                if isinstance(held, ast.FunctionDef):
                    own.add(held.name)
                elif isinstance(held, ast.Name) and isinstance(held.ctx, ast.Store):
                    own.add(held.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            of_self = getattr(node.value, "id", None) in ("self", "cls")
            own |= {node.attr} if of_self else set()
        elif isinstance(node, ast.Dict):  # The body of a class, for `type`.
            keys = {key.value for key in node.keys if isinstance(key, ast.Constant)}
            own |= keys if "__module__" in keys else set()
    return own


_OF_SUFFIXES = ("endswith", "removesuffix")


def _parts_of_names(code):
    """Texts in `code` that are a part of a name: of f-strings, and suffixes."""
    parts = set()
    for node in ast.walk(code):
        if isinstance(node, ast.JoinedStr):
            parts.update(node.values)
        elif getattr(getattr(node, "func", None), "attr", "") in _OF_SUFFIXES:
            parts.update(node.args)
    return parts


def _folder(package):
    return pathlib.Path(importlib.util.find_spec(package).origin).parent


def _is_module(name):
    path = _folder(name.partition(".")[0]).parent / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").exists()


def _sources(package):
    return (p for p in _folder(package).rglob("*.py") if "_test.py" not in p.name)


def rename(name, of_tensorflow):
    """Have the modules that are imported from now on call `name` otherwise."""
    folders = ("keras/", "tensorflow/python/") if of_tensorflow else ("keras/",)
    token = re.compile(rb"\b%s\b" % name.encode())
    plain = importlib.machinery.SourceFileLoader.get_code

    def get_code(self, fullname):
        if any(f"site-packages/{folder}" in self.path for folder in folders):
            source = pathlib.Path(self.path).read_bytes()
            renamed = token.sub(name.encode() + b"_moved", source)
            if renamed != source:
                return compile(renamed, self.path, "exec", dont_inherit=True)
        return plain(self, fullname)

    importlib.machinery.SourceFileLoader.get_code = get_code


# --- In a process of its own.


def attempt(name, of_tensorflow, with_canaries):
    """Rename, import, train: how far it came, and what error ended it."""
    if name:
        rename(name, of_tensorflow)
    outcome = {"stage": "Keras itself"}
    try:
        import keras
        import numpy as np
        import tensorflow as tf

        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0],
            [tf.config.LogicalDeviceConfiguration()] * 2,
        )
        plain = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        plain.compile("sgd", "mse", run_eagerly=True)
        plain.train_on_batch(np.ones((1, 2)), np.ones((1, 1)))
        outcome["stage"] = "the import"
        import keras_accum as ka
        from keras_accum._backend.private import canaries

        if not with_canaries:
            canaries.check = lambda: None
        outcome["stage"] = "the first object"
        ka.AccumOptimizer("sgd", 2)
        import renames_checks

        for check in renames_checks.CHECKS:
            outcome["stage"] = check.__name__
            check()
        outcome["stage"] = None
    except BaseException as error:
        kind = "numbers" if isinstance(error, AssertionError) else "error"
        outcome[kind] = f"{type(error).__name__}: {error}".strip()
    return outcome


def in_process(*arguments):
    """What `attempt` gives, in a fork of this one, which has not used TensorFlow yet."""
    reader, writer = os.pipe()
    if not (child := os.fork()):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.write(writer, json.dumps(attempt(*arguments)).encode()[:4096])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as said:
        text = said.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"stage": "the process", "error": "it ended"}


def _import_tensorflow_alone():
    """Once for all forks; it would import Keras, with its names as they are."""
    if "tensorflow" not in sys.modules:
        sys.modules["keras"] = None
        importlib.import_module("tensorflow")
        del sys.modules["keras"]


def row(outcome):
    """Who notices, and whether it is noticed at all."""
    stage, error = outcome["stage"], " ".join(outcome.get("error", "").split())
    error = re.sub(r"\x1b\[\d*m", "", error)  # Colours.
    error = re.sub(r" \(/.*?\)", "", error).replace("|", "/")  # Paths of this machine.
    if stage is None:
        return "nothing differs", True
    if "numbers" in outcome:
        return f"WRONG, silently, in `{stage}`", False
    if stage == "Keras itself":
        return "Keras itself cannot do without", True
    if " was tested with " in error:
        what = error.partition("has moved: ")[2].partition(" Numbers could")[0]
        return f"{stage} names the versions: {what[:160]}", True
    return f"a bare error in `{stage}`: {error[:90]}", True


TABLE = PACKAGE.parent / "docs" / "renames.md"
INTRODUCTION = """# Private parts that could move

What happens if Keras {} or TensorFlow {} renames a private part that the package uses:
`python tests/renames.py` renames each in turn, trains on a few numbers, and writes this
table; a name without a row has not been tried. `python tests/renames.py
--without-canaries NAME` tells what a canary is for.

| renamed | of | who notices |
|---|---|---|
"""


def write(found, known):
    """Add rows to the table, in place of older ones of the same names."""
    old = TABLE.read_text().splitlines() if TABLE.exists() else []
    rows = {line.split("`")[1]: line for line in old if line.startswith("| `")}
    rows = {name: line for name, line in rows.items() if name in known} | found
    TABLE.parent.mkdir(exist_ok=True)
    version = importlib.metadata.version
    introduction = INTRODUCTION.format(version("keras"), version("tensorflow"))
    TABLE.write_text(introduction + "".join(f"{rows[n]}\n" for n in sorted(rows)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--without-canaries", action="store_true")
    given = parser.parse_args()
    sys.path[:0] = [str(PACKAGE.parent)]
    all_names, fine = names(), True
    selected = given.names or ["", *all_names]
    # TensorFlow is imported once, unless it is what is renamed.
    for name in sorted(selected, key=lambda name: not all_names.get(name, False)):
        of_tensorflow = all_names.get(name, False)
        if not of_tensorflow:
            _import_tensorflow_alone()
        what, noticed = row(in_process(name, of_tensorflow, not given.without_canaries))
        fine &= noticed
        owner = "TensorFlow" if of_tensorflow else "Keras"
        line = f"| `{name or '(none)'}` | {owner} | {what} |"
        print(line, flush=True)
        if name and not given.without_canaries:
            write({name: line}, all_names)
    sys.exit(not fine)


if __name__ == "__main__":
    main()
