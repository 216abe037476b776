"""A private part that moves is noticed before any number is wrong, and said by name."""

import ast
import inspect
import pathlib
import random
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
import renames
import tensorflow as tf
from helpers import assert_refused, dense_model
from keras.src.backend.tensorflow import trainer
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.losses import loss as keras_loss

import keras_accum as ka
from keras_accum._backend import private
from keras_accum._backend.private import canaries, layers, randomness, versions


def test_the_canaries_live_and_leave_the_caller_as_it_was():
    """Names, scopes and seeds: the next layer is called as it would be without them."""

    def seen():
        state = random.getstate()[1], np.random.get_state()[1].tolist()
        return state, layers.current_scope(), randomness.global_seed_generator()

    name, before = keras.layers.Dense(1).name, seen()
    with keras.StatelessScope() as scope:
        canaries.check.__wrapped__()
        assert layers.current_scope() is scope
    assert seen() == before
    assert (name, keras.layers.Dense(1).name) == ("dense", "dense_1")


def test_they_live_inside_of_a_graph_and_of_a_strategy():
    @tf.function
    def traced(x):
        canaries.check.__wrapped__()
        return x

    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        canaries.check.__wrapped__()
        traced(tf.constant(1.0))


def hide_reduction(patch):
    patch.delattr(TFOptimizer, "_all_reduce_sum_gradients")


def hide_listening(patch):
    reduce = keras_loss.reduce_weighted_values
    call = inspect.unwrap(keras.losses.Loss.__call__)
    plain = getattr(reduce, "__wrapped__", reduce)
    names = {**call.__globals__, reduce.__name__: plain}
    moved = type(call)(call.__code__, names, None, call.__defaults__)
    patch.setattr(keras.losses.Loss, "__call__", moved)


def hide_division(patch):
    patch.setattr(keras_loss, "reduce_values", lambda values, *_: tf.reduce_mean(values))


def hide_training_loss(patch):
    patch.setattr(keras.Model, "_compute_loss", keras.Model.compute_loss)
    patch.setattr(keras.Model, "train_step", lambda self, data: {})


def hide_mask(patch):
    patch.setattr(layers, "keras_mask", lambda tensor: None)


def hide_logits(patch):
    patch.setattr(keras.activations, "sigmoid", tf.sigmoid)


def hide_context(patch):
    get = layers.get_global_attribute
    patch.setattr(layers, "get_global_attribute", lambda name: get(f"{name}_moved"))


def hide_seed(patch):
    patch.setattr(randomness, "GLOBAL_SEED_GENERATOR", "moved")


def hide_regularizers(patch):
    patch.setattr(keras.Model, "_get_regularization_losses", lambda self: [])


def hide_workers(patch):
    patch.delattr(trainer, "_collective_all_reduce_multi_worker")


MOVED = {
    hide_reduction: "AttributeError: 'SGD' object has no attribute "
    "'_all_reduce_sum_gradients'.",
    hide_listening: "reductions of losses.",
    hide_division: "the division of losses by the number of replicas.",
    hide_training_loss: "`Model._compute_loss`.",
    hide_mask: "the mask of `Masking`.",
    hide_logits: "the logits of `sigmoid`.",
    hide_context: "the arguments that layers pass down.",
    hide_seed: "the global seed generator.",
    hide_regularizers: "the regularizers of weights.",
    hide_workers: "`_collective_all_reduce_multi_worker`.",
}


@pytest.mark.parametrize("hide", MOVED, ids=lambda hide: hide.__name__)
def test_what_moves_is_named_with_the_versions(hide, monkeypatch):
    canaries.check.__wrapped__()
    hide(monkeypatch)
    assert_refused(
        canaries.check.__wrapped__,
        RuntimeError,
        f"keras_accum {ka.__version__} was tested with TensorFlow 2.18 to 2.21 and Keras "
        f"3.10 to 3.15. It found TensorFlow {tf.__version__} with Keras "
        f"{keras.__version__}, in which a private part that it needs has moved: "
        f"{MOVED[hide]} Numbers could be wrong without a word, so it stops here. Install "
        "a version of Keras and TensorFlow that was tested, or a newer keras_accum.",
    )


def built(layer):
    layer.build((None, 5))


OBJECTS = {
    "AccumOptimizer": lambda: ka.AccumOptimizer("sgd", 2),
    "GradientAccumulationModel": lambda: ka.GradientAccumulationModel(accum_steps=2),
    "accumulate": lambda: ka.accumulate(dense_model(), accum_steps=2),
    "accumulate_gradients": lambda: ka.accumulate_gradients(
        tf.reduce_sum, [], tf.ones((2, 1)), accum_steps=2
    ),
    "plan": lambda: ka.plan(compiled_model(), np.ones((2, 5)), memory_budget="1GiB"),
    "replace_batch_normalization": lambda: ka.replace_batch_normalization(dense_model()),
    "recompute": lambda: ka.recompute(dense_model(), segments=2),
    "Recompute": lambda: built(ka.Recompute(keras.layers.Dense(2))),
    "AccumBatchNormalization": lambda: built(ka.AccumBatchNormalization()),
}


def compiled_model():
    model = dense_model()
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("name", OBJECTS)
def test_the_first_object_tries_them(name, monkeypatch):
    def die():
        raise RuntimeError("a canary died")

    monkeypatch.setattr(canaries, "check", die)
    with pytest.raises(RuntimeError, match="a canary died"):
        OBJECTS[name]()


def test_what_is_tried_is_tried_once(monkeypatch):
    calls = []
    monkeypatch.setattr(canaries, "CANARIES", [calls.append])
    canaries.check.cache_clear()
    for _ in range(3):
        canaries.check()
    assert len(calls) == 1


# What cannot be wrong without a word: missing, it raises where it is used.
LOUD = {
    "compiled.compiled_bytes": "asks the compiler, or raises",
    "compiled.device_limit": "asks the device, or raises",
    "fits.hear_fits": "replaces a method, or raises; a warning depends on it, no number",
    "fits.observe_fits": "adds to what is this package's",
    "data.first_batch": "calls adapters, or raises",
    "data.without_optional": "asks for a public class",
    "layers.is_stateful": "asks for a public class and attribute",
    "functions.captured": "is tested where functions are refused",
    "functions.elements_of_list": "tells sizes that choices depend on, no number",
    "graphs.example_arguments": "reads `_inputs_struct`, which has a canary",
    "graphs.functional_arguments": "is called, or raises",
    "graphs.pack_outputs": "reads `_outputs_struct`, which has a canary",
    "graphs.run_by": "replaces `_run_through_graph`, which has a canary",
    "graphs.runner_of": "reads `_run_through_graph`, which has a canary",
    "graphs.structures": "reads attributes that have a canary",
    "layers.attributes": "leaves out what nobody looks for",
    "layers.attributes_without_losses": "leaves out `_losses`, which has a canary",
    "layers.handles_of": "reads `_value`, which has a canary",
    "layers.build_by_call": "calls what is imported",
    "layers.own_state": "reads an attribute, or raises",
    "layers.renormalizes": "reads a public attribute",
    "layers.flatten_layers": "calls a method, or raises",
    "losses.compute_loss": "calls `_compute_loss`, which has a canary",
    "losses.added_losses": "reads what `call_losses` reads",
    "losses.call_losses_kept": "reads `_losses`, which has a canary",
    "losses.has_own_compute_loss": "compares public methods",
    "losses.hear_losses": "installs what has canaries",
    "losses.is_a_part": "asks what is this package's",
    "losses.is_listening": "asks what is this package's",
    "losses.is_sum": "asks for a mark of this package's",
    "losses.listen_to_added_losses": "replaces a public method",
    "losses.mark_as_sum": "sets a mark of this package's",
    "losses.multiply_summed_losses": "reads `_losses`, which has a canary",
    "losses.observe_training_losses": "replaces `_compute_loss`, which has a canary",
    "losses.parts_of_a_window": "sets what is this package's",
    "losses.remember_kinds": "keeps what is this package's",
    "losses.take_heard_losses": "asks what is this package's",
    "losses.tell_activity_losses": "is for versions that do not change any more",
    "losses.track_loss": "is what `tracked_apart` calls",
    "models.build_compiled": "else Keras builds them, and a step is traced twice",
    "models.build_for": "calls `_symbolic_build`, which has a canary",
    "models.compiled_parts": "reads attributes, or raises",
    "models.created_outside": "else a step is traced twice",
    "models.rows_tracked": "reads attributes, or raises",
    "models.parts_left_unbuilt": "sets attributes that have a canary",
    "optimizers.children_of": "calls a method, or raises",
    "optimizers.restore_deferred": "calls methods that have a canary",
    "randomness.random_state_kept": "puts back what has canaries",
    "strategies.local_component": "reads an attribute that has a canary",
    "strategies.components": "reads a public attribute, or there is one device",
    "strategies.patch_distribution_bugs": "mends what raises without it",
    "tapes.recorded": "is what `value_with_gradient_of` calls, which has a canary",
}


def test_each_private_part_has_a_canary_or_a_reason():
    folder = pathlib.Path(private.__file__).parent
    used = {
        ast.unparse(node)
        for node in ast.walk(ast.parse((folder / "canaries.py").read_text()))
        if isinstance(node, ast.Attribute)
    }
    parts = {
        f"{path.stem}.{node.name}"
        for path in folder.glob("*.py")
        if path.stem not in ("__init__", "canaries", "versions")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }
    assert parts - used == set(LOUD)


def test_each_part_is_imported_where_errors_name_the_versions():
    folder = pathlib.Path(private.__file__).parent
    named = {
        alias.name
        for name in ("__init__", "canaries")
        for node in ast.walk(ast.parse((folder / f"{name}.py").read_text()))
        if isinstance(node, ast.ImportFrom) and node.level == 1 and not node.module
        for alias in node.names
    }
    assert named == {path.stem for path in folder.glob("*.py")} - {"__init__"}


def test_each_private_name_has_been_renamed_and_none_is_silent():
    """`python tests/renames.py NAME` writes the row that is missing."""
    table = (pathlib.Path(__file__).parents[2] / "docs" / "renames.md").read_text()
    if f"Keras {keras.__version__} or TensorFlow {tf.__version__} " not in table:
        pytest.skip("the table is of other versions")
    rows = dict(re.findall(r"^\| `(\w+)` \| \w+ \| (.*) \|$", table, re.MULTILINE))
    assert set(rows) == set(renames.names())
    silent = [n for n, who in rows.items() if "WRONG" in who or who == "nothing differs"]
    assert not silent


@pytest.mark.parametrize(
    ("code", "attributes", "parts"),
    [
        ("class A:\n _a = 1\n def _b(self): self._c = 2", {"_a", "_b", "_c"}, set()),
        ("def _losses(): pass\n_x = 1", set(), set()),
        ("f'{a}_x'.removesuffix('_y') + '_z'", set(), {"_x", "_y"}),
    ],
)
def test_whose_a_name_is(code, attributes, parts):
    tree = ast.parse(code)
    own = renames.own_attributes(tree) - {"self"}
    assert own == attributes
    found = {getattr(node, "value", None) for node in renames._parts_of_names(tree)}
    assert {text for text in found if isinstance(text, str)} == parts


# --- Versions, backends, tf-keras.


@pytest.mark.parametrize(
    ("module", "found", "needed"),
    [(keras, "3.9.2", "Keras 3.10"), (tf, "2.17.1", "TensorFlow 2.18")],
)
def test_an_older_version_is_refused(module, found, needed, monkeypatch):
    monkeypatch.setattr(module, "__version__", found)
    name = needed.split()[0]
    assert_refused(
        versions.check_versions,
        ImportError,
        f"keras_accum needs {needed} or newer. Received: {name} {found}. Write `pip "
        f"install --upgrade {name.lower()}`.",
    )


@pytest.mark.parametrize("found", ["3.10.0", "3.16.0.dev202608", "4.0"])
def test_any_newer_version_is_tried(found, monkeypatch):
    monkeypatch.setattr(keras, "__version__", found)
    versions.check_versions()


@pytest.mark.slow_in("jax")
@pytest.mark.parametrize(
    ("before", "message"),
    [
        (
            "import keras; keras.config.backend = lambda: 'jax'",
            "keras_accum needs Keras on TensorFlow. Received: Keras on 'jax'. Set the "
            "environment variable KERAS_BACKEND=tensorflow before Keras is imported.",
        ),
        (
            "import os, sys; os.environ['KERAS_BACKEND'] = 'torch'\n"
            "sys.modules['torch'] = None",
            "keras_accum needs Keras on TensorFlow. Received: Keras on 'torch'. Set the "
            "environment variable KERAS_BACKEND=tensorflow before Keras is imported.",
        ),
        (
            "import sys; sys.modules['tensorflow'] = None",
            "keras_accum needs TensorFlow, and there is none. Write `pip install "
            "tensorflow`, or `pip install tensorflow-cpu`.",
        ),
    ],
    ids=["jax", "torch that is not installed", "none"],
)
def test_without_keras_on_tensorflow_the_import_says_so(before, message):
    code = (
        f"{before}\n"
        "try:\n    import keras_accum\n"
        "except ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == [message], done.stderr


def test_a_part_that_cannot_be_imported_is_named_with_the_versions():
    with (
        pytest.raises(ImportError, match=r"has moved: ImportError: cannot import name"),
        versions.explained_if_moved(ImportError),
    ):
        from keras.src.losses.loss import reduce_weighted_values_moved  # noqa: F401


class Legacy:
    """Stands for a model, a layer or an optimizer of tf-keras, which is not installed."""

    __module__ = "tf_keras.src.engine.training"

    def __repr__(self):
        return "<Legacy>"


OF_TF_KERAS = (
    "Received: <Legacy>. It is of tf-keras (Keras 2), and keras_accum is for Keras 3: "
    "make it with `import keras`. `tf.keras` is tf-keras where the environment variable "
    "TF_USE_LEGACY_KERAS is set."
)


@pytest.mark.parametrize(
    ("call", "error", "rule"),
    [
        (
            lambda: ka.AccumOptimizer(Legacy(), 2),
            TypeError,
            "`inner_optimizer` must be a Keras optimizer, the name of one in "
            "`keras.optimizers`, or its config.",
        ),
        (
            lambda: ka.accumulate(Legacy(), accum_steps=2),
            TypeError,
            "`model` must be a `keras.Model`.",
        ),
        (
            lambda: ka.plan(Legacy(), np.ones((2, 1)), memory_budget="1GiB"),
            TypeError,
            "`model` must be a `keras.Model`.",
        ),
        (
            lambda: ka.recompute(Legacy(), segments=2),
            TypeError,
            "`model` must be a `keras.Model`, or a layer.",
        ),
        (
            lambda: ka.Recompute(Legacy()),
            ValueError,
            "`layer` must be a Keras layer.",
        ),
    ],
    ids=["AccumOptimizer", "accumulate", "plan", "recompute", "Recompute"],
)
def test_what_is_of_tf_keras_is_refused(call, error, rule):
    assert_refused(call, error, f"{rule} {OF_TF_KERAS}")


def test_what_is_not_of_tf_keras_is_not_called_so():
    assert_refused(
        lambda: ka.accumulate(3, accum_steps=2),
        TypeError,
        "`model` must be a `keras.Model`. Received: 3",
    )
