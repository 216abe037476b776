"""Every optimizer that a `train_step` may apply is found, under a name of its own."""

import dataclasses
import types
from typing import Any

import keras
import pytest
from helpers import dense_model

import keras_accum as ka
from keras_accum._optimizer.find import find_optimizers


class Own(keras.Model):
    """A model with a training step of its own, which keeps what it is given."""

    def __init__(self, **kept):
        super().__init__()
        for name, value in kept.items():
            setattr(self, name, value)

    def train_step(self, data):
        return {}


@dataclasses.dataclass
class Kept:
    optimizer: Any


def accumulating():
    return ka.AccumOptimizer("sgd", 2)


def own(**kept):
    model = Own(**kept)
    model.compile()
    return model


@pytest.mark.parametrize(
    ("keep", "name"),
    [
        (lambda o: {"d_optimizer": o}, "d_optimizer"),
        (lambda o: {"_hidden": o}, "hidden"),
        (lambda o: {"optimizers": {"d": o}}, "optimizers_d"),
        (lambda o: {"optimizers": [keras.optimizers.SGD(), o]}, "optimizers_1"),
        (lambda o: {"optimizers": ({"a": [o]},)}, "optimizers_0_a_0"),
        (lambda o: {"kept": Kept(o)}, "kept_optimizer"),
        (lambda o: {"kept": types.SimpleNamespace(inside=o)}, "kept_inside"),
        (lambda o: {"critic": own(optimizer_of_it=o)}, "critic_optimizer_of_it"),
        (lambda o: {"models": [own(inner=o)]}, "models_0_inner"),
    ],
)
def test_an_optimizer_is_found_wherever_it_is_kept(keep, name):
    optimizer = accumulating()
    found = find_optimizers(own(**keep(optimizer), plain=keras.optimizers.Adam()))
    assert list(found) == [name]
    assert found[name] is optimizer


def test_an_optimizer_in_a_model_that_is_called_is_found_by_the_name_of_the_model():
    inner = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)], name="inner")
    inner.compile(accumulating())
    inputs = keras.Input((3,))

    class Functional(keras.Model):
        def train_step(self, data):
            return {}

    model = Functional(inputs, inner(inputs))
    assert find_optimizers(model) == {"inner_optimizer": inner.optimizer}


def test_one_that_is_kept_twice_is_found_once():
    optimizer = accumulating()
    model = own(first=optimizer, again=[optimizer])
    model.compile(optimizer)
    assert list(find_optimizers(model).values()) == [optimizer]


def test_names_that_would_be_alike_are_told_apart():
    one, two, three = accumulating(), accumulating(), accumulating()
    found = find_optimizers(own(a={"b_c": one, "b": {"c": two}}, _a={"b": [three]}))
    assert found == {"a_b_c": one, "a_b_c_2": two, "a_b_0": three}


def test_models_that_hold_each_other_are_gone_through_once():
    left, right = own(mine=accumulating()), own(mine=accumulating())
    left.other = {"right": right}
    right.__dict__["other"] = left
    assert set(find_optimizers(left)) == {"mine", "other_right_mine"}


@pytest.mark.parametrize("route", ["keras", "step", "both"])
def test_a_step_of_keras_applies_the_compiled_optimizer_only(route):
    critic = dense_model()
    critic.compile(accumulating())
    model = keras.Sequential([keras.Input((5,)), critic])
    model.spare = accumulating()
    if route != "keras":
        ka.accumulate(model, accum_steps=2)
    model.compile("sgd" if route == "step" else accumulating())
    expected = {} if route == "step" else {"optimizer": model.optimizer}
    assert find_optimizers(model) == expected
