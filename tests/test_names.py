"""The public names, their types, and nothing else."""

import inspect
import pathlib
import typing

import keras

import keras_accum as ka

NAMES = {
    "AccumBatchNormalization",
    "AccumOptimizer",
    "AccumulationMonitor",
    "Diagnosis",
    "Finding",
    "Frontier",
    "GradientAccumulationModel",
    "GradientAccumulationOptimizer",
    "GradualWarmup",
    "NominalBatchSize",
    "Plan",
    "Recompute",
    "Report",
    "accumulate",
    "accumulate_gradients",
    "check_equivalence",
    "diagnose",
    "frontier",
    "plan",
    "recompute",
    "replace_batch_normalization",
    "scale_learning_rate",
}


def test_the_public_names_are_these():
    assert {name for name in vars(ka) if not name.startswith("_")} == NAMES


def test_the_alias_is_the_same_object():
    assert ka.AccumOptimizer is ka.GradientAccumulationOptimizer


def test_every_public_argument_is_typed_and_every_name_documented():
    for name in NAMES:
        value = getattr(ka, name)
        assert inspect.getdoc(value)
        for member, function in inspect.getmembers(value, inspect.isfunction):
            if member.startswith("_") and member != "__init__":
                continue
            if not function.__module__.startswith("keras_accum"):
                continue
            hints = typing.get_type_hints(function)
            missing = set(inspect.signature(function).parameters) - set(hints) - {"self"}
            assert not missing, f"{name}.{member}: {missing}"
            assert member == "__init__" or inspect.getdoc(function)


def test_the_signature_is_the_contract():
    parameters = inspect.signature(ka.AccumOptimizer).parameters
    assert {name: p.default for name, p in parameters.items()} == {
        "inner_optimizer": inspect.Parameter.empty,
        "accum_steps": inspect.Parameter.empty,
        "reduction": "mean",
        "accumulator_dtype": None,
        "adaptive_clip_factor": None,
        "on_nonfinite": "propagate",
        "name": None,
    }
    assert all(p.kind is p.KEYWORD_ONLY for name, p in list(parameters.items())[2:])


def test_what_keras_reads_on_an_optimizer_is_there():
    optimizer = ka.AccumOptimizer("adam", 2)
    for name in (
        "apply_gradients",
        "build",
        "built",
        "finalize_variable_values",
        "inner_optimizer",
        "iterations",
        "learning_rate",
        "scale_loss",
        "variables",
    ):
        assert hasattr(optimizer, name)
    # Callbacks take an optimizer that has this for a MultiOptimizer.
    assert not hasattr(optimizer, "optimizers")
    assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def test_the_package_is_typed():
    assert (pathlib.Path(ka.__file__).parent / "py.typed").exists()
