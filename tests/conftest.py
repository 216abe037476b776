"""What every test starts from: quiet TensorFlow, Keras's defaults, fixed seeds."""

import gc
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Else TensorFlow's CPU allocator counts memory only where oneDNN is on by default, which
# depends on the processor.
os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "1")

import keras
import pytest

# Each test clears Keras's session, which collects garbage: not among what was imported.
gc.collect()
gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark as slow the cases that `slow_in` and `slow_but` mean, before `-m` chooses."""
    for item in items:
        case = item.callspec.id if hasattr(item, "callspec") else ""
        named = {case, *case.split("-")}
        for marker in item.iter_markers("slow_in"):
            if named & set(marker.args):
                item.add_marker("slow")
        for marker in item.iter_markers("slow_but"):
            if case not in marker.args:
                item.add_marker("slow")


class LongFirst:
    """Orders tests so that two processes both begin with those that take minutes."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        long = [item for item in items if is_long(item)]
        rest = [item for item in items if not is_long(item)]
        middle = len(items) // 2 - len(long[::2])
        items[:] = [*long[::2], *rest[:middle], *long[1::2], *rest[middle:]]


def is_long(item):
    """Whether a test starts processes of its own, which import TensorFlow again."""
    return "distribution" in item.path.parts or item.path.name == "test_examples.py"


def pytest_configure(config):
    config.pluginmanager.register(LongFirst())


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
