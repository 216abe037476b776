"""Bad arguments: what was received, the rule, the remedy; word for word."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_equal, since_keras

import keras_accum as ka

multi_optimizer = since_keras("3.15", "MultiOptimizer")

STEPS = (
    "`accum_steps` must be an integer of at least 1, the micro-batches that make one "
    "update, or a function from the update index to one. Received: {}. To train without "
    "accumulation, pass 1."
)


def refused(kind, message, function, *args, **kwargs):
    with pytest.raises(kind) as error:
        function(*args, **kwargs)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("steps", "kind"),
    [
        (0, ValueError),
        (-1, ValueError),
        (2.0, TypeError),
        (True, TypeError),
        (None, TypeError),
        ("4", TypeError),
    ],
)
def test_steps_that_are_no_count_are_refused(steps, kind):
    refused(kind, STEPS.format(repr(steps)), ka.AccumOptimizer, "sgd", steps)


def test_steps_are_refused_when_set_too_and_stay_as_they_were():
    optimizer = ka.AccumOptimizer("sgd", 3)
    for steps, kind in [(0, ValueError), (1.5, TypeError), ("2", TypeError)]:
        refused(kind, STEPS.format(repr(steps)), setattr, optimizer, "accum_steps", steps)
    assert optimizer.accum_steps == 3


def test_a_schedule_with_a_bad_result_is_refused_before_training():
    where = "{} from the schedule at update {}"
    for schedule, received, update, kind in [
        (lambda update: 0, "np.int32(0)", 0, ValueError),
        (lambda update: 3 - update, "np.int32(0)", 3, ValueError),
        (lambda update: 2.0, "np.float32(2.0)", 0, TypeError),
        (lambda update: update > 3, "np.False_", 0, TypeError),
    ]:
        message = STEPS.format(where.format(received, update))
        refused(kind, message, ka.AccumOptimizer, "sgd", schedule)


def test_a_schedule_with_a_bad_result_later_on_stops_a_graph():
    surprise = tf.Variable(2)
    optimizer = ka.AccumOptimizer("sgd", lambda update: surprise)
    variable = keras.Variable([1.0])
    optimizer.build([variable])
    surprise.assign(0)
    step = tf.function(lambda: optimizer.apply([tf.constant([1.0])], [variable]))
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="must be an integer of at least 1"
    ):
        step()
    assert_equal(variable, np.array([1.0]))


def test_a_schedule_cannot_be_exchanged():
    message = (
        "`accum_steps` can be set to an integer only, and only if it was one at "
        "construction. Received: {}, for an optimizer constructed with {}. To change a "
        "schedule, construct a new optimizer."
    )

    def schedule(update):
        return 2

    scheduled, plain = ka.AccumOptimizer("sgd", schedule), ka.AccumOptimizer("sgd", 2)
    refused(
        TypeError, message.format(3, repr(schedule)), setattr, scheduled, "accum_steps", 3
    )
    refused(
        TypeError,
        message.format(repr(schedule), 2),
        setattr,
        plain,
        "accum_steps",
        schedule,
    )


def test_wrappers_do_not_nest():
    message = (
        "Received a {} inside of another wrapper. One wrapper accumulates and scales the "
        "loss: pass the innermost optimizer to it, `AccumOptimizer(inner, "
        "accum_steps=...)`."
    )
    scaler = keras.optimizers.LossScaleOptimizer
    refused(
        ValueError,
        message.format("LossScaleOptimizer"),
        ka.AccumOptimizer,
        scaler(scaler(keras.optimizers.SGD())),
        4,
    )
    inner = ka.AccumOptimizer("sgd", 2)
    refused(ValueError, message.format("AccumOptimizer"), ka.AccumOptimizer, inner, 4)


def test_an_inner_optimizer_that_accumulates_is_refused():
    message = (
        "The inner optimizer accumulates gradients itself. Received: "
        "{}(gradient_accumulation_steps=3). Leave that argument out and pass "
        "`accum_steps=3` here."
    )
    accumulating = keras.optimizers.Adam(gradient_accumulation_steps=3)
    refused(ValueError, message.format("Adam"), ka.AccumOptimizer, accumulating, 4)
    scaled = keras.optimizers.LossScaleOptimizer(accumulating)
    refused(ValueError, message.format("Adam"), ka.AccumOptimizer, scaled, 4)


@multi_optimizer
def test_a_part_that_accumulates_is_refused():
    message = (
        "The inner optimizer accumulates gradients itself. Received: "
        "Adam(gradient_accumulation_steps=3). Leave that argument out and pass "
        "`accum_steps=3` here."
    )
    accumulating = keras.optimizers.Adam(gradient_accumulation_steps=3)
    parts = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(accumulating))
    refused(ValueError, message, ka.AccumOptimizer, parts, 4)


@multi_optimizer
def test_a_part_that_is_known_from_the_variables_on_is_refused_when_they_come():
    accumulating = keras.optimizers.Adam(gradient_accumulation_steps=3)
    plain = keras.optimizers.SGD()
    for chosen in (plain, accumulating):
        parts = keras.optimizers.MultiOptimizer(lambda variable, chosen=chosen: chosen)
        optimizer = ka.AccumOptimizer(parts, 4)
        if chosen is plain:
            optimizer.build([keras.Variable([1.0])])
            continue
        message = (
            "The inner optimizer accumulates gradients itself. Received: "
            "Adam(gradient_accumulation_steps=3). Leave that argument out and pass "
            "`accum_steps=3` here."
        )
        refused(ValueError, message, optimizer.build, [keras.Variable([1.0])])
        assert not optimizer.built


INNER = (
    "`inner_optimizer` must be a Keras optimizer, the name of one in `keras.optimizers`, "
    "or its config. Received: {!r}{}"
)


@pytest.mark.parametrize(
    ("inner", "hint"),
    [
        ("nosuch", ""),
        ("optimizer", ""),
        ("LossScaleOptimizer", ""),
        (3, ""),
        (None, ""),
        ({"config": {}}, ""),
        (keras.optimizers.SGD, ". That is a class: pass an instance of it, `SGD(...)`."),
        ("adamm", ". Did you mean 'adam'?"),
        ("Adam_W", ". Did you mean 'adamw'?"),
        ({"class_name": "RMSPropp", "config": {}}, ". Did you mean 'rmsprop'?"),
    ],
)
def test_what_is_no_optimizer_is_refused(inner, hint):
    refused(TypeError, INNER.format(inner, hint), ka.AccumOptimizer, inner, 4)


ARGUMENTS = (
    "Its arguments are `inner_optimizer`, `accum_steps`, `reduction`, "
    "`accumulator_dtype`, `adaptive_clip_factor`, `on_nonfinite`, `name`."
)
IN_THE_DATA = (
    "The data say it: `model.fit(..., batch_size=...)` is the micro-batch of all "
    "replicas together."
)
TO_THE_INNER = (
    "Pass it to the inner optimizer: `AccumOptimizer(keras.optimizers.Adam({}=...), "
    "accum_steps=...)`."
)


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("accumulation_steps", 8, "Did you mean `accum_steps=8`?"),
        ("gradient_accumulation_steps", 8, "Did you mean `accum_steps=8`?"),
        ("steps", 8, "Did you mean `accum_steps=8`?"),
        ("acum_step", 8, "Did you mean `accum_steps=8`?"),
        ("reductions", "sum", "Did you mean `reduction='sum'`?"),
        ("optimizer", "sgd", "Did you mean `inner_optimizer`?"),
        ("clipnorm", 1.0, TO_THE_INNER.format("clipnorm")),
        ("learning_rate", 0.1, TO_THE_INNER.format("learning_rate")),
        (
            "initial_scale",
            2.0,
            "Pass it to a scaler inside: `AccumOptimizer(keras.optimizers."
            "LossScaleOptimizer(optimizer, initial_scale=...), accum_steps=...)`.",
        ),
        ("micro_batch_size", 4, IN_THE_DATA),
        ("minibatch_size", 4, IN_THE_DATA),
        ("colour", "red", ARGUMENTS),
    ],
)
def test_an_unknown_argument_is_told_what_was_meant(name, value, remedy):
    message = f"`AccumOptimizer` has no argument `{name}`. Received: {name}={value!r}. "
    refused(TypeError, message + remedy, ka.AccumOptimizer, "adam", **{name: value})
    refused(TypeError, message + remedy, ka.AccumOptimizer, "adam", 4, **{name: value})


def test_a_missing_argument_is_told_by_python():
    refused(
        TypeError,
        "AccumOptimizer.__init__() missing 1 required positional argument: 'accum_steps'",
        ka.AccumOptimizer,
        "adam",
    )


def test_unknown_options_are_refused():
    refused(
        ValueError,
        "`reduction` must be one of 'mean', 'sum'. Received: 'max'",
        ka.AccumOptimizer,
        "sgd",
        2,
        reduction="max",
    )
    refused(
        ValueError,
        "`on_nonfinite` must be one of 'propagate', 'skip_micro_batch', 'skip_window', "
        "'raise'. Received: 'ignore'",
        ka.AccumOptimizer,
        "sgd",
        2,
        on_nonfinite="ignore",
    )
    refused(
        ValueError,
        "`accumulator_dtype` must be one of 'float32', 'float64'. Received: 'float16'",
        ka.AccumOptimizer,
        "sgd",
        2,
        accumulator_dtype="float16",
    )


@pytest.mark.parametrize("factor", [0, -0.1, "0.1", True])
def test_adaptive_clip_factors_are_numbers_above_zero(factor):
    message = (
        f"`adaptive_clip_factor` must be a number above 0, or None. Received: {factor!r}"
    )
    refused(ValueError, message, ka.AccumOptimizer, "sgd", 2, adaptive_clip_factor=factor)


def test_two_ways_of_clipping_are_refused():
    message = (
        "Gradients are clipped in one way. Received: adaptive_clip_factor=0.1 and "
        "SGD(clipnorm=1.0). Leave one of the two out."
    )
    inner = keras.optimizers.SGD(clipnorm=1.0)
    refused(ValueError, message, ka.AccumOptimizer, inner, 2, adaptive_clip_factor=0.1)


def test_names_configs_and_instances_make_the_same_optimizer():
    config = keras.optimizers.serialize(keras.optimizers.Lamb(0.01))
    for inner in ("lamb", "LAMB", config, keras.optimizers.Lamb()):
        optimizer = ka.AccumOptimizer(inner, 2)
        assert type(optimizer.inner_optimizer) is keras.optimizers.Lamb
    assert float(ka.AccumOptimizer(config, 2).learning_rate.numpy()) == pytest.approx(
        0.01
    )


@keras.saving.register_keras_serializable("tests_of_arguments")
class Doubled(keras.optimizers.SGD):
    """An optimizer that Keras does not have."""


class Unregistered(keras.optimizers.SGD):
    """One that only `custom_objects` tell of."""


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Adam", keras.optimizers.Adam),
        ("aDAM", keras.optimizers.Adam),
        ("lamb", keras.optimizers.Lamb),
        ("tests_of_arguments>Doubled", Doubled),
    ],
)
def test_configs_are_those_that_keras_takes(name, kind):
    config = {"class_name": name, "config": {"learning_rate": 0.125}}
    before = str(config)
    optimizer = ka.AccumOptimizer(config, 2)
    assert type(optimizer.inner_optimizer) is kind
    assert float(optimizer.learning_rate.numpy()) == 0.125
    assert str(config) == before
    by_name = ka.AccumOptimizer(name, 2)
    assert type(by_name.inner_optimizer) is kind
    assert float(by_name.learning_rate.numpy()) != 0.125
    without = ka.AccumOptimizer({"class_name": name}, 2)
    assert type(without.inner_optimizer) is kind


def test_a_config_of_a_scaler_keeps_its_settings():
    scaler = keras.optimizers.LossScaleOptimizer(Doubled(0.125), initial_scale=8.0)
    full = keras.optimizers.serialize(scaler)
    for config in (full, {k: full[k] for k in ("class_name", "config")}):
        optimizer = ka.AccumOptimizer(config, 2)
        assert type(optimizer.inner_optimizer) is Doubled
        assert optimizer.initial_scale == 8.0


def test_a_written_config_of_the_whole_finds_its_inner_optimizer():
    config = {
        "inner_optimizer": {"class_name": "Unregistered", "config": {"momentum": 0.5}},
        "accum_steps": 3,
    }
    custom = {"Unregistered": Unregistered}
    optimizer = ka.AccumOptimizer.from_config(config, custom)
    assert type(optimizer.inner_optimizer) is Unregistered
    assert (optimizer.inner_optimizer.momentum, optimizer.accum_steps) == (0.5, 3)
    with pytest.raises(TypeError, match="`inner_optimizer` must be a Keras optimizer"):
        ka.AccumOptimizer.from_config(config)


def test_a_file_under_the_former_name_loads():
    now = ka.AccumOptimizer("sgd", 3)
    config = keras.saving.serialize_keras_object(now)
    assert config["class_name"] == "AccumOptimizer"
    assert config["registered_name"] == "keras_accum>AccumOptimizer"
    config["class_name"] = "GradientAccumulationOptimizer"
    config["registered_name"] = "keras_accum>GradientAccumulationOptimizer"
    config["module"] = "keras_accum._optimizer"
    loaded = keras.saving.deserialize_keras_object(config)
    assert type(loaded) is ka.AccumOptimizer
    assert loaded.get_config() == now.get_config()


def ramp(update):
    return 2


@pytest.mark.parametrize(
    ("make", "shown"),
    [
        (
            lambda: ka.AccumOptimizer("adam", 8),
            "AccumOptimizer(Adam, accum_steps=8, reduction='mean')",
        ),
        (
            lambda: ka.AccumOptimizer(
                keras.optimizers.LossScaleOptimizer(keras.optimizers.Lion()),
                ramp,
                reduction="sum",
                accumulator_dtype="float64",
                adaptive_clip_factor=0.1,
                on_nonfinite="skip_window",
            ),
            "AccumOptimizer(LossScaleOptimizer(Lion), accum_steps=ramp, reduction='sum', "
            "accumulator_dtype='float64', adaptive_clip_factor=0.1, "
            "on_nonfinite='skip_window')",
        ),
        pytest.param(
            lambda: ka.AccumOptimizer(
                keras.optimizers.MultiOptimizer(
                    keras.optimizers.OptimizerMap(
                        keras.optimizers.SGD(), {"a": keras.optimizers.Adam()}
                    )
                ),
                ka.NominalBatchSize(64, micro_batch_size=16),
            ),
            "AccumOptimizer(MultiOptimizer(Adam, SGD), accum_steps=NominalBatchSize(64, "
            "micro_batch_size=16, warmup_updates=0), reduction='mean')",
            marks=multi_optimizer,
        ),
    ],
)
def test_the_repr_shows_what_matters(make, shown):
    assert repr(make()) == shown


def test_the_repr_follows_a_change():
    optimizer = ka.AccumOptimizer("adam", 8)
    optimizer.accum_steps = 4
    assert repr(optimizer) == "AccumOptimizer(Adam, accum_steps=4, reduction='mean')"


def test_gradients_without_variables_need_a_built_optimizer():
    message = (
        "Received gradients without variables, and the optimizer is not built yet. Pass "
        "the variables too, or call `optimizer.build(variables)` before."
    )
    optimizer = ka.AccumOptimizer("sgd", 2)
    refused(ValueError, message, optimizer.apply, [tf.constant([1.0])])
    assert not optimizer.built
