"""What every test starts from: quiet TensorFlow, Keras's defaults, fixed seeds."""

import gc
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import pytest

# Each test clears Keras's session, which collects garbage: not among what was imported.
gc.collect()
gc.freeze()


@pytest.fixture(autouse=True)
def fresh_keras():
    """Undo what a test may set globally, so that no test sees another."""
    keras.backend.clear_session()
    # Every traced step leaves its graph behind (Keras's own too): the collection above
    # would look through those of all tests before, 3 seconds a test after 800 tests.
    gc.freeze()
    keras.config.set_dtype_policy("float32")
    keras.utils.set_random_seed(7)
    yield
    keras.config.set_dtype_policy("float32")


@pytest.fixture(params=["eager", "graph", "xla"])
def mode(request):
    """How a training step runs; `helpers.compile_in` takes it."""
    return request.param
