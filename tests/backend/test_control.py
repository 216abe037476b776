"""What is left out where it could only disturb: assertions under XLA, a warning."""

import logging

import keras
import pytest
import tensorflow as tf

import keras_accum as ka
from keras_accum._backend import replica


def assertions_in(model, jit_compile):
    """How many assertions the traced training step has, in all of its functions."""
    step = tf.function(lambda x, y: model.train_step((x, y)), jit_compile=jit_compile)
    specs = [tf.TensorSpec((None, size)) for size in (4, 1)]
    graph = step.get_concrete_function(*specs).graph.as_graph_def()
    functions = [f.node_def for f in graph.library.function]
    return sum(
        node.op == "Assert" for nodes in [graph.node, *functions] for node in nodes
    )


@pytest.mark.slow_but("optimizer")
@pytest.mark.parametrize("route", ["optimizer", "step", "both"])
def test_xla_gets_no_assertions_of_each_of_which_it_would_warn(route):
    found = {}
    for jit_compile in (True, False):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD()
        if route != "optimizer":
            ka.accumulate(model, accum_steps=2)
        if route != "step":
            optimizer = ka.AccumOptimizer(optimizer, lambda update: 2)
        optimizer.build(model.trainable_variables)
        model.compile(optimizer, "mse", jit_compile=jit_compile)
        found[jit_compile] = assertions_in(model, jit_compile)
    assert found[True] == 0 < found[False]


def test_a_strategy_that_is_used_eagerly_is_not_warned_of(caplog):
    logger = tf.get_logger()
    said = "Using MirroredStrategy eagerly has significant overhead currently."
    filters = list(logger.filters)

    class Strategy:
        num_replicas_in_sync = 2

        def run(self, function):
            function()

    def function():
        logger.warning(said)
        logger.warning("Something else.")

    with caplog.at_level(logging.WARNING, logger.name):
        replica.run_on(Strategy(), function)
        assert [r.getMessage() for r in caplog.records] == ["Something else."]
        function()  # The control: outside of it, TensorFlow warns.
    assert said in [r.getMessage() for r in caplog.records]
    assert logger.filters == filters
