"""Fast tests on pairs of versions of TensorFlow and Keras; prints a table of them.

    python tests/matrix.py                      # all pairs, oldest first
    python tests/matrix.py 2.18 3.10            # one of them, as CI does
    python tests/matrix.py --folder ~/versions  # keep the environments there

Each pair gets an environment of its own, with `tensorflow-cpu`. What an older Keras does
not have is skipped, and counted, with the reason that pytest shows.
"""

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile
import venv

ROOT = pathlib.Path(__file__).parents[1]
PAIRS = (
    ("2.18", "3.10"),
    ("2.19", "3.11"),
    ("2.20", "3.12"),
    ("2.20", "3.13"),
    ("2.21", "3.14"),
    ("2.21", "3.15"),
)
# The canaries, both routes against the large batch, and saves. Not compiled: XLA and
# graphs take most of the time, and what versions change is above them.
SELECTION = (
    "tests/backend",
    "tests/optimizer/test_state.py",
    "tests/optimizer/test_precision.py",
    "tests/step/test_train_step.py",
    "tests/step/test_two_pass.py",
)
WITHOUT = "not graph and not xla"


def run(pair, folder):
    """The counts and seconds that pytest prints for a pair, and whether all passed."""
    tensorflow, keras = pair
    home = folder / f"tensorflow-{tensorflow}-keras-{keras}"
    python = home / "bin" / "python"
    if not python.exists():
        venv.create(home, with_pip=True)
    pins = [f"tensorflow-cpu=={tensorflow}.*", f"keras=={keras}.*"]
    pins += re.findall(
        r"pytest(?:-xdist)?==[\d.]+", (ROOT / "pyproject.toml").read_text()
    )
    subprocess.run([python, "-m", "pip", "install", "--quiet", *pins, ROOT], check=True)
    subprocess.run([python, "-m", "pip", "check"], check=True)
    command = [python, "-m", "pytest", "-rs", *SELECTION, "-k", WITHOUT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(done.stdout[-4000:], file=sys.stderr)
    return done.stdout.strip().splitlines()[-1].strip("= "), done.returncode == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pair", nargs="*", help="TensorFlow's version, and Keras's")
    parser.add_argument("--folder", type=pathlib.Path)
    given = parser.parse_args()
    if len(given.pair) not in (0, 2):
        parser.error("give two versions, or none")
    fine = True
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or pathlib.Path(temporary)
        for pair in [tuple(given.pair)] if given.pair else PAIRS:
            counts, passed = run(pair, folder)
            fine &= passed
            print(f"| {pair[0]} | {pair[1]} | {counts} |", flush=True)
    sys.exit(not fine)


if __name__ == "__main__":
    main()
