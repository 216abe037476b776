"""Four models, read and measured, before and after the remedy that the reading names.

A clean one; BatchNormalization; a contrastive loss; and a masked loss as people write it,
that is wrong as soon as micro-batches hold unlike many valid entries. For each:
`ka.diagnose` without data, `ka.check_equivalence` on data, the remedy, and both again. What
is diagnosed has to be what is measured, or the script fails.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import keras
import numpy as np
from matplotlib.figure import Figure

import keras_accum as ka

SAMPLES, STEPS = 30, 8

Case = tuple[str, Callable[[], keras.Model], Callable[[keras.Model], keras.Model]]


def make_data() -> tuple[np.ndarray, np.ndarray]:
    """Inputs, and targets of which an uneven share is valid (at least 0.5)."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(SAMPLES, 8)).astype("float32")
    return x, rng.uniform(size=(SAMPLES, 4)).astype("float32") * x[:, :4]


def network(*middle: keras.layers.Layer) -> keras.Model:
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense
    return keras.Sequential(
        [keras.Input((8,)), dense(16, "gelu"), *middle, dense(8, "gelu"), dense(4)]
    )


def compiled(model: keras.Model, loss: object = "mse") -> keras.Model:
    model.compile("adamw", loss, run_eagerly=True)
    return model


def contrastive(y: object, y_pred: object) -> object:
    """Of each sample, how well its prediction tells its target from all others."""
    scores = keras.ops.matmul(y_pred, keras.ops.transpose(y))
    found = keras.ops.log_softmax(scores, axis=-1)
    return -keras.ops.diagonal(found)


def masked(y: object, y_pred: object) -> object:
    """The mean over valid entries, as people write it: one number for the batch."""
    valid = keras.ops.cast(y > 0.1, "float32")
    error = valid * keras.ops.square(y - y_pred)
    return keras.ops.sum(error) / keras.ops.sum(valid)


def frozen(model: keras.Model) -> keras.Model:
    return compiled(ka.replace_batch_normalization(model, freeze=True))


def in_two_passes(model: keras.Model) -> keras.Model:
    loss = model.loss
    return compiled(ka.accumulate(model, accum_steps=STEPS, two_pass=True), loss)


CASES: Sequence[Case] = (
    ("clean", lambda: compiled(network(keras.layers.Dropout(0.3))), lambda model: model),
    (
        "BatchNormalization",
        lambda: compiled(network(keras.layers.BatchNormalization())),
        frozen,
    ),
    ("contrastive loss", lambda: compiled(network(), contrastive), in_two_passes),
    ("own masked loss", lambda: compiled(network(), masked), in_two_passes),
)


def look(name: str, model: keras.Model) -> ka.Report:
    """Diagnose, measure, print both; fail unless they agree."""
    diagnosis = ka.diagnose(model)
    report = ka.check_equivalence(model, *make_data(), accum_steps=STEPS)
    print(f"\n=== {name}\n{diagnosis}\n\n{report}")
    if diagnosis.clean != report.equal:
        raise SystemExit(f"{name}: diagnosed {diagnosis.clean}, measured {report.equal}")
    return report


def draw(reports: dict[str, tuple[ka.Report, ka.Report]]) -> Figure:
    """The largest error of each model, before, after, and of a mean of means."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axis = figure.add_subplot()
    for i, (before, after) in enumerate(reports.values()):
        naive = max(v.floor * before.naive[v.path] for v in before.variables)
        floor = max(v.floor for v in after.variables)
        heights = [max(v.error for v in report.variables) for report in (before, after)]
        colors = ["C0" if report.equal else "C3" for report in (before, after)]
        axis.bar([i - 0.2, i + 0.2], heights, 0.36, color=colors)
        axis.plot([i - 0.4, i + 0.4], [floor] * 2, "k-", lw=2)
        axis.plot(i, naive, "o", color="0.45", mfc="none", ms=9)
        for x, text in ((i - 0.2, "before"), (i + 0.2, "after")):
            axis.annotate(
                text, (x, 1.6e-9), ha="center", va="bottom", color="w", fontsize=8
            )
    axis.set_xticks(range(len(reports)), list(reports))
    axis.set_yscale("log")
    axis.set_ylim(1e-9, 10)
    axis.set_ylabel("largest error of a gradient, relative")
    axis.set_title(
        "A window against the large batch, before and after the remedy\n"
        "red: differs, blue: equal; line: rounding; circle: a mean of means",
        fontsize=10,
    )
    axis.spines[["top", "right"]].set_visible(False)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("diagnose_model_output"))
    args = parser.parse_args(argv)
    reports = {}
    for name, make, mend in CASES:
        before = look(name, make())
        after = look(f"{name}, with the remedy", mend(make()))
        if not after.equal:
            raise SystemExit(f"{name}: the remedy did not help")
        reports[name] = before, after
    args.output.mkdir(parents=True, exist_ok=True)
    draw(reports).savefig(args.output / "models.png", dpi=120)
    reports["contrastive loss"][0].plot().savefig(args.output / "variables.png", dpi=120)
    differ = [name for name, (before, _) in reports.items() if not before.equal]
    print(f"\nChecked: {', '.join(differ)} differ, and are equal with the remedy.")


if __name__ == "__main__":
    main()
