"""README's Python code, run as it stands.

As a script it runs with the package that is installed, not with that of the checkout:

    pip install dist/keras_accum-*.whl && python tests/readme_code.py
"""

import pathlib
import re
import sys

import keras
import numpy as np

import keras_accum as ka

ROOT = pathlib.Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language, text=README):
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def run(code):
    """Run a block with the names that README takes for granted."""
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense
    hidden = [dense(4, "tanh") for _ in range(6)]
    model = keras.Sequential([keras.Input((4,)), *hidden, dense(1)])
    before = [w.copy() for w in model.get_weights()]
    rng = np.random.default_rng(0)
    names = {
        "model": model,
        "ka": ka,
        "keras": keras,
        "x": rng.normal(size=(256, 4)),
        "y": np.ones((256, 1)),
    }
    exec(code, names)
    assert int(model.optimizer.iterations) == 2
    assert np.abs(model.get_weights()[0] - before[0]).max() > 0


def main():
    place = pathlib.Path(ka.__file__).resolve()
    if ROOT in place.parents and "site-packages" not in place.parts:
        sys.exit(f"{place} is the checkout's: install the package first")
    codes = blocks("python")
    for code in codes:
        run(code)
    print(f"README's {len(codes)} blocks ran with {place.parent}, {ka.__version__}")


if __name__ == "__main__":
    main()
