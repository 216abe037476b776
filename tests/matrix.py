"""A fast selection of the tests on pairs of versions of TensorFlow and Keras.

    python tests/matrix.py                      # all pairs; writes docs/versions.md
    python tests/matrix.py 2.18 3.10            # one of them, as CI does
    python tests/matrix.py --folder ~/versions  # keep the environments there
    python3.13 tests/matrix.py 2.21 3.15 --add  # another Python; adds a row to the table

Each pair gets an environment of its own, with `tensorflow-cpu`. What an older Keras does
not have is skipped, with the reason.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
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
# Of each folder what versions can change: canaries, private parts, both routes against the
# large batch, saves; slow cases too. Not compiled by XLA, which takes most of the time.
# What is indented is a case of the test above; without one, all of them run.
SELECTION = """
backend/test_canaries.py
backend/test_private.py
core/test_accumulate_gradients.py::test_sparse_gradients_equal_the_dense_one
optimizer/test_equivalence.py::test_constraints_and_regularisers_count_once_per_update
optimizer/test_equivalence.py::test_sgd_with_momentum_equals_numpy
optimizer/test_equivalence.py::test_tokens_and_not_samples_weigh_a_micro_batch
    keras mask-graph-sum_over_batch_size
    ignore_class-eager-mean_with_sample_weight
optimizer/test_equivalence.py::test_what_the_inner_optimizer_counts_in_updates_stays_in_updates
    scheduled-eager
    overwriting-graph
optimizer/test_in_keras_hands.py
optimizer/test_keras_callbacks.py::test_keras_22959_swap_ema_weights_sees_the_wrapped_optimizer
optimizer/test_precision.py::test_a_constant_scale_is_applied_and_undone_once
optimizer/test_precision.py::test_fit_skips_a_window_with_an_overflow_as_the_large_batch
optimizer/test_state.py::test_a_checkpoint_of_a_plain_loss_scale_optimizer_loads
optimizer/test_state.py::test_a_checkpoint_of_the_plain_inner_optimizer_loads
optimizer/test_state.py::test_an_inner_optimizer_of_any_make_is_restored
optimizer/test_state.py::test_classes_of_the_users_own_are_found_by_name
optimizer/test_state.py::test_training_resumed_in_mid_window_is_the_uninterrupted_one_to_the_bit
step/test_loss_kinds.py::test_a_sum_a_mean_and_a_regularizer_in_one_loss
step/test_own_loss.py::test_what_is_understood_is_exact_without_a_word
step/test_train_step.py::test_a_saved_accumulating_model_keeps_its_settings
step/test_train_step.py::test_every_kind_of_model_is_exact
step/test_train_step.py::test_every_reduction_of_a_weighted_loss_is_exact
step/test_train_step.py::test_mixed_float16_is_scaled_once
step/test_train_step.py::test_two_outputs_with_two_masks_are_exact
step/test_two_pass.py::test_a_loss_that_couples_samples_is_exact
step/test_two_pass.py::test_masks_travel_from_the_first_pass_to_the_loss
step/test_two_pass.py::test_metrics_inside_layers_see_every_sample_once
recompute/test_dropout.py::test_layers_that_drop
    eager-GRU
    graph-SpatialDropout1D
    graph-MultiHeadAttention
recompute/test_recompute.py::test_a_softmax_at_the_end_of_a_block_gives_the_loss_its_logits
recompute/test_recompute.py::test_a_step_is_that_of_the_plain_model
    wrapper-graph
    segments-graph
    class-eager
    blocks-eager
recompute/test_recompute.py::test_masks_travel_through
    segments-eager
    wrapper-eager
recompute/test_recompute.py::test_mixed_precision
    mixed_bfloat16-eager-1e-07
recompute/test_recompute_segments.py::test_skip_connections_are_respected
recompute/test_recompute_switch.py::test_the_wrapper_is_saved_and_loaded
test_batch_norm.py::test_replaced_layers_predict_to_the_bit_and_pool_their_statistics
    Holds
test_batch_norm.py::test_files_of_weights_fit_a_model_before_and_after_it_is_replaced
    False-sequential
test_batch_norm.py::test_a_class_that_makes_its_layers_anew_loads_what_it_saved
test_batch_norm.py::test_statistics_inside_of_the_step_are_those_of_the_large_batch
planning/test_transaction.py::test_training_goes_on_as_if_nothing_had_been_planned
distribution/test_replicas.py::test_on_two_replicas
    short batches
"""
INTRODUCTION = """# Versions

TensorFlow from 2.18 and Keras from 3.10 on. `python tests/matrix.py` runs a selection of
the tests, named there, on each pair below, and writes this table. What is skipped is of a
newer Keras. The newest pair gets all tests that are not marked slow, in `.ci/run`.

| TensorFlow | Keras | Python | tests |
|---|---|---|---|
"""


def selected():
    """The tests of the selection, as pytest calls them."""
    tests = []
    for line in SELECTION.strip().splitlines():
        if not line.startswith(" "):
            name = f"tests/{line}"
            tests.append(name)
        elif tests[-1] == name:
            tests[-1] = f"{name}[{line.strip()}]"
        else:
            tests.append(f"{name}[{line.strip()}]")
    return tests


def install(pair, folder):
    """Make the environment of a pair, or complete it; returns its interpreter."""
    tensorflow, keras = pair
    home = folder / f"tensorflow-{tensorflow}-keras-{keras}"
    python = home / "bin" / "python"
    if not python.exists():
        venv.create(home, with_pip=True)
    pins = [f"tensorflow-cpu=={tensorflow}.*", f"keras=={keras}.*"]
    pins += re.findall(
        r"pytest(?:-xdist)?==[\d.]+", (ROOT / "pyproject.toml").read_text()
    )
    pip = [python, "-m", "pip"]
    subprocess.run([*pip, "install", "--quiet", *pins, "-e", ROOT], check=True)
    subprocess.run([*pip, "check"], check=True)
    return python


def run(pair, folder):
    """The row of the table for a pair, and whether all passed."""
    python = install(pair, folder)
    command = [python, "-m", "pytest", "-rsfE", "--tb=short", "-k", "not xla", "-m", ""]
    command += selected()
    begun, before = time.monotonic(), os.times()
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
    after, wall = os.times(), time.monotonic() - begun
    cpu = after.children_user - before.children_user
    cpu += after.children_system - before.children_system
    print(f"{wall:.0f} s, {cpu:.0f} s of CPU time", flush=True)
    found = subprocess.check_output(
        [
            python,
            "-c",
            "import importlib.metadata, platform; version = importlib.metadata.version;"
            "print(version('tensorflow-cpu'), version('keras'), platform.python_version())",
        ],
        text=True,
    )
    counts = re.findall(r"\d+ (?:passed|failed|skipped|errors?)", done.stdout[-300:])
    row = " | ".join([*found.split(), ", ".join(counts)])
    return f"| {row} |\n", done.returncode == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pair", nargs="*", help="TensorFlow's version, and Keras's")
    parser.add_argument("--folder", type=pathlib.Path)
    parser.add_argument("--install", action="store_true", help="only the environments")
    parser.add_argument("--add", action="store_true", help="write the row of one pair")
    given = parser.parse_args()
    if len(given.pair) not in (0, 2):
        parser.error("give two versions, or none")
    rows, fine = [], True
    pairs = [tuple(given.pair)] if given.pair else PAIRS
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or pathlib.Path(temporary)
        if given.install:
            for pair in pairs:
                install(pair, folder)
            return
        for pair in pairs:
            row, passed = run(pair, folder)
            rows.append(row)
            fine &= passed
            print(row, flush=True)
    if given.add or not given.pair:
        write(rows, keep=given.add)
    sys.exit(not fine)


def write(rows, keep):
    """Write the table, with the other rows of the one that is there if they `keep`."""
    table = ROOT / "docs" / "versions.md"
    if keep:
        old = table.read_text().removeprefix(INTRODUCTION).splitlines(keepends=True)
        rows = [*old, *rows]
    # The last one of the same three versions.
    by_versions = {tuple(row.split("|")[:4]): row for row in rows}
    table.write_text(INTRODUCTION + "".join(map(by_versions.get, sorted(by_versions))))


if __name__ == "__main__":
    main()
