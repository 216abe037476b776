"""Bad arguments: what was received, the rule, the remedy; word for word."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_equal

import keras_accum as ka

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
    name = "GradientAccumulationOptimizer"
    refused(
        ValueError,
        message.format("LossScaleOptimizer"),
        ka.AccumOptimizer,
        scaler(scaler(keras.optimizers.SGD())),
        4,
    )
    inner = ka.AccumOptimizer("sgd", 2)
    refused(ValueError, message.format(name), ka.AccumOptimizer, inner, 4)


def test_an_inner_optimizer_that_accumulates_is_refused():
    message = (
        "The inner optimizer accumulates gradients itself. Received: "
        "{}(gradient_accumulation_steps=3). Leave that argument out and pass "
        "`accum_steps=3` here."
    )
    accumulating = keras.optimizers.Adam(gradient_accumulation_steps=3)
    refused(ValueError, message.format("Adam"), ka.AccumOptimizer, accumulating, 4)
    parts = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(accumulating))
    refused(ValueError, message.format("Adam"), ka.AccumOptimizer, parts, 4)


@pytest.mark.parametrize("inner", ["nosuch", "Optimizer2", 3, None, keras.optimizers.SGD])
def test_what_is_no_optimizer_is_refused(inner):
    message = (
        "`inner_optimizer` must be a Keras optimizer, the name of one in "
        f"`keras.optimizers`, or its config. Received: {inner!r}"
    )
    refused(TypeError, message, ka.AccumOptimizer, inner, 4)


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
    for inner in ("lamb", config, keras.optimizers.Lamb()):
        optimizer = ka.AccumOptimizer(inner, 2)
        assert type(optimizer.inner_optimizer) is keras.optimizers.Lamb
    assert float(ka.AccumOptimizer(config, 2).learning_rate.numpy()) == pytest.approx(
        0.01
    )


def test_gradients_without_variables_need_a_built_optimizer():
    message = (
        "Received gradients without variables, and the optimizer is not built yet. Pass "
        "the variables too, or call `optimizer.build(variables)` before."
    )
    optimizer = ka.AccumOptimizer("sgd", 2)
    refused(ValueError, message, optimizer.apply, [tf.constant([1.0])])
    assert not optimizer.built
