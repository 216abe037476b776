"""Which versions of TensorFlow and Keras there are, and which the package knows.

An older one than it needs is refused when the package is imported. A newer one than it
was tested with is not: what has moved there is found by `canaries`.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

_OTHER_BACKEND = (
    "keras_accum needs Keras on TensorFlow. Received: Keras on {!r}. Set the environment "
    "variable KERAS_BACKEND=tensorflow before Keras is imported."
)

try:
    import keras
except ModuleNotFoundError as error:
    missing = str(error.name).partition(".")[0]
    if missing in ("jax", "torch", "openvino"):  # A backend that is not installed.
        raise ImportError(_OTHER_BACKEND.format(missing)) from error
    if missing != "tensorflow":
        raise
    raise ImportError(
        "keras_accum needs TensorFlow, and there is none. Write `pip install tensorflow`, "
        "or `pip install tensorflow-cpu`."
    ) from error

OLDEST = {"TensorFlow": "2.18", "Keras": "3.10"}
NEWEST_TESTED = {"TensorFlow": "2.21", "Keras": "3.15"}


def check_backend() -> None:
    """Refuse Keras on JAX, PyTorch or anything else; before TensorFlow is imported.

    Raises:
        ImportError: if Keras does not run on TensorFlow.
    """
    backend = keras.config.backend()
    if backend != "tensorflow":
        raise ImportError(_OTHER_BACKEND.format(backend))


def check_versions() -> None:
    """Refuse versions that lack what the package needs.

    Raises:
        ImportError: if TensorFlow or Keras is older than `OLDEST`.
    """
    for name, found in versions().items():
        if _numbers(found) < _numbers(OLDEST[name]):
            raise ImportError(
                f"keras_accum needs {name} {OLDEST[name]} or newer. Received: {name} "
                f"{found}. Write `pip install --upgrade {name.lower()}`."
            )


@contextlib.contextmanager
def explained_if_moved(error_type: type[Exception]) -> Iterator[None]:
    """Say which versions were tested where a private part has moved away.

    Args:
        error_type: what to raise instead of whatever is raised inside.
    """
    try:
        yield
    except Moved as error:
        raise error_type(_explanation(str(error))) from None
    except Exception as error:
        raise error_type(_explanation(f"{type(error).__name__}: {error}.")) from error


class Moved(Exception):
    """A private part is not where it was, or does not what it did."""


def _explanation(what: str) -> str:
    """What to say of a private part that is not where it was."""
    package = sys.modules[__name__.partition(".")[0]]
    tested = " and ".join(
        f"{name} {OLDEST[name]} to {NEWEST_TESTED[name]}" for name in OLDEST
    )
    found = " with ".join(f"{name} {version}" for name, version in versions().items())
    return (
        f"keras_accum {package.__version__} was tested with {tested}. It found {found}, "
        f"in which a private part that it needs has moved: {what} Numbers could be wrong "
        "without a word, so it stops here. Install a version of Keras and TensorFlow "
        "that was tested, or a newer keras_accum."
    )


def versions() -> dict[str, str]:
    """The versions that are in use, by name."""
    import tensorflow as tf  # Not before the backend is known to be it.

    return {"TensorFlow": tf.__version__, "Keras": keras.__version__}


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def legacy_hint(value: Any) -> str:
    """What to add to "Received: value" if it is of tf-keras (Keras 2); else nothing."""
    classes = value.__mro__ if isinstance(value, type) else type(value).__mro__
    if not any(c.__module__.partition(".")[0] == "tf_keras" for c in classes):
        return ""
    return (
        ". It is of tf-keras (Keras 2), and keras_accum is for Keras 3: make it with "
        "`import keras`. `tf.keras` is tf-keras where the environment variable "
        "TF_USE_LEGACY_KERAS is set."
    )
