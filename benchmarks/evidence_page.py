"""Writes docs/evidence.md, its figures and README's tables from benchmarks/results/.

Every number in them comes from those files (`run_all.py` measures); the text here has none.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "evidence.md"
FIGURES = ROOT / "docs" / "figures"
README = ROOT / "README.md"
BEGIN, END = "<!-- evidence -->\n", "<!-- /evidence -->\n"
MIB = 2.0**20
Results = Mapping[str, Any]

NAMES = {
    "accumulate": "`accumulate`",
    "AccumOptimizer": "`AccumOptimizer`",
    "keras": "Keras's `gradient_accumulation_steps`",
    "GradientAccumulateModel": "GradientAccumulator, model",
    "GradientAccumulateOptimizer": "GradientAccumulator, optimizer",
    "MultiSteps": "optax `MultiSteps`",
    "scan": "JAX `lax.scan`",
    "mean of means": "a loop",
    "floor": "floor",
    "plain": "one micro-batch",
    "large (keras)": "large batch, Keras",
    "large (tf_keras)": "large batch, tf-keras",
    "large (jax)": "large batch, JAX",
}
PACKAGES = {
    "keras_accum": "keras_accum",
    "keras": "Keras",
    "tensorflow": "TensorFlow",
    "tf-keras": "tf-keras",
    "gradient-accumulator": "GradientAccumulator",
    "jax": "JAX",
    "optax": "optax",
}
OURS = ("accumulate", "AccumOptimizer")
QUICK = "Measured with `--quick`, in few rounds: the figures are rough.\n\n"

INTRODUCTION = """# Evidence

`benchmarks/run_all.py` measures what is on this page, and writes it. No number is typed in
by hand: a test makes the page again from what was measured (`benchmarks/results/*.json`),
and compares.

"""
EQUALITY = """
## Is it right?

Each method trains the same small network on the same data. The oracle is a plain step on
the large batch, in the method's own framework. The error is the largest difference between
weights, in units of the largest change that the large batch makes to one. ✓ is right: an
error below 1e-5, in float16 below 1e-2. ✗ is wrong, and the number is the error. "Warned"
is said of a wrong result that the method itself told of; "refused", of a `ValueError`. A
dash: the method does not have this.

- `accumulate` and `AccumOptimizer` are this package, in the step and in the optimizer.
  Three cases need what the documents name for them: `tail="flush_epoch"` for a window that
  an epoch leaves open, `replace_batch_normalization` for moving statistics, `two_pass=True`
  for the contrastive loss.
- Keras is `gradient_accumulation_steps`, its own.
- A loop takes the mean of the micro-batches' gradients, and applies it with a plain
  optimizer.
- GradientAccumulator is `GradientAccumulateModel` and `GradientAccumulateOptimizer`, on
  tf-keras.
- optax is `MultiSteps`, around a loss that is a mean.

"""
TIME = """
## How long does an update take?

CPU time of the process, over all threads, for one update over {k} micro-batches of 8
samples: float32, Adam. The methods take turns, round by round, across processes. The first
number is the median of {rounds} rounds in milliseconds, with half the distance of the
quartiles; then the ratio of this median to that of `accumulate`; then wall time in
milliseconds.

- mlp: six dense layers of 1,024 units. It has many weights and little arithmetic, and so
  measures what is done to gradients. cnn: four convolutions on small images. transformer:
  two blocks of width 128 on 64 tokens.
- Keras and tf-keras train through the function that `fit` calls, on data in memory. JAX has
  its data on the device. It is always compiled, and so stands under XLA.
- floor: forward and backward passes, dispatched one by one, and one update. Gradients are
  not summed.
- `scan` is written by hand: `lax.scan` sums gradients of the micro-batches in one compiled
  step.

![CPU time of one update, for each method and model.](figures/evidence_time.png)

"""
MEMORY = """
## How much memory does it take?

The peak of the heap during one update, above what is held before, and what the method keeps
from step to step beyond plain Adam; in MiB, under XLA, on the shapes above. The heap is
counted by a library that knows none of the frameworks. "One micro-batch" is a plain step on
one micro-batch. All methods but the large batch keep a sum of gradients besides, one
float32 copy of the weights: {sums}.

![Memory of one update, for each method and model.](figures/evidence_memory.png)

"""
REST = """
## On which versions?

[Versions](versions.md): which pairs of TensorFlow and Keras were tested, and how.
[Keras's own tests](keras_suite.md): how they fare through this package.

## More

[Benchmarks](benchmarks.md) has longer series of this package alone: windows of other
lengths, recomputation, planning, replicas.
"""


def load() -> Results:
    """Returns what was measured, by group."""
    names = ("equality", "time", "memory")
    return {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in names}


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


class Notes:
    """Footnotes, each once, numbered in the order of their use."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def mark(self, text: str) -> str:
        """Returns the mark of a note."""
        text = text.replace("<", "&lt;").replace("|", "\\|")
        if text not in self.texts:
            self.texts.append(text)
        return f" <sup>{self.texts.index(text) + 1}</sup>"

    def __str__(self) -> str:
        lines = (f"{i}. {text}\n" for i, text in enumerate(self.texts, 1))
        return "\n" + "".join(lines) if self.texts else ""


def small(value: float) -> str:
    """Returns an error, short."""
    return "0" if value == 0 else f"{value:.2g}" if value >= 0.01 else f"{value:.0e}"


def is_right(outcome: Results, tolerance: float) -> bool:
    """Says whether a method equals the large batch."""
    return outcome.get("error", float("inf")) <= tolerance


def verdict(outcome: Results, tolerance: float, notes: Notes) -> str:
    """Returns a cell of the table of cases."""
    if "none" in outcome:
        return "-" + notes.mark(outcome["none"])
    if "crash" in outcome:
        word = "refused" if outcome["crash"].startswith("ValueError") else "crash"
        return word + notes.mark(code(outcome["crash"]))
    if is_right(outcome, tolerance):
        return f"✓ {small(outcome['error'])}"
    warned = "".join(", warned" + notes.mark(code(w)) for w in outcome["warned"][:1])
    return f"✗ {small(outcome['error'])}{warned}"


def code(text: str) -> str:
    """Returns what a program said, as code."""
    return f"``{text}``" if "`" in text else f"`{text}`"


def count(equality: Results, method: str) -> tuple[int, int]:
    """Returns the cases that a method has right, and those that it has."""
    had = [case for case in equality["cases"] if "none" not in case["methods"][method]]
    right = [c for c in had if is_right(c["methods"][method], c["tolerance"])]
    return len(right), len(had)


def about(result: Results) -> str:
    """Returns where, when and how a group was measured."""
    machine = result["machine"]
    versions: dict[str, str] = {}
    failed = []
    for name, found in result["versions"].items():
        if "error" in found:
            failed.append(f"The environment `{name}` failed: {code(found['error'])}.\n")
        versions |= {PACKAGES[k]: v for k, v in found.items() if k in PACKAGES}
    listed = ", ".join(f"{name} {number}" for name, number in versions.items())
    return (
        f"{QUICK if result['quick'] else ''}"
        f"{result['date']}, {machine['cpu']} ({machine['architecture']}, "
        f"{machine['cores']} cores, {machine['memory_gib']} GiB), {machine['system']}, "
        f"Python {machine['python']}; {listed}.\n{''.join(failed)}\n"
        f"```sh\n{result['command']}\n```\n\n"
    )


def equality_section(equality: Results) -> str:
    """Returns the table of cases."""
    notes = Notes()
    methods = list(equality["cases"][0]["methods"])
    rows = [
        [case["title"]]
        + [verdict(case["methods"][m], case["tolerance"], notes) for m in methods]
        for case in equality["cases"]
    ]
    counts = [count(equality, method) for method in methods]
    rows.append(["**right**", *(f"**{a} of {b}**" for a, b in counts)])
    names = NAMES | {"keras": "Keras"}
    header = ["case", *(names[method] for method in methods)]
    return EQUALITY + about(equality) + table(header, rows) + str(notes)


def methods_of(result: Results) -> list[str]:
    """Returns the methods of all cases, in the order of `NAMES`, bounds last."""
    found = {method for case in result["cases"] for method in case["methods"]}
    return [method for method in NAMES if method in found]


def time_section(time: Results) -> str:
    """Returns a table for each model."""
    text = TIME.format(k=time["k"], rounds=time["rounds"]) + about(time)
    notes = Notes()
    for model in dict.fromkeys(case["model"] for case in time["cases"]):
        compiled, plain = (find(time, model, xla) for xla in (True, False))
        rows = [
            [
                NAMES[method],
                *time_cells(compiled, method, notes),
                *time_cells(plain, method, notes),
            ]
            for method in methods_of(time)
        ]
        columns = ["CPU ms", "ratio", "wall ms"]
        header = ["", *(f"XLA: {c}" for c in columns), *(f"graph: {c}" for c in columns)]
        text += f"\n### {model}\n\n{table(header, rows)}"
    return text + str(notes)


def find(result: Results, model: str, xla: bool = True) -> Results:
    """Returns the methods of a case."""
    for case in result["cases"]:
        if case["model"] == model and case.get("xla", True) == xla:
            return case["methods"]
    return {}


def time_cells(methods: Results, method: str, notes: Notes) -> list[str]:
    """Returns a method's time, its ratio to ours, and its wall time."""
    found = methods.get(method)
    if found is None:
        return ["-"] * 3
    if "error" in found:
        return ["crash" + notes.mark(code(found["error"])), "-", "-"]
    ratio = found["cpu_ms"] / methods["accumulate"]["cpu_ms"]
    spread = f"&nbsp;±{100 * found['spread']:.0f}%"
    return [f"{found['cpu_ms']:.1f}{spread}", f"{ratio:.2f}", f"{found['wall_ms']:.1f}"]


def memory_section(memory: Results) -> str:
    """Returns one table for all models."""
    models = [case["model"] for case in memory["cases"]]
    copies = ", ".join(
        f"{model} {find(memory, model)['accumulate']['parameters'] / MIB:.1f} MiB"
        for model in models
    )
    notes = Notes()
    rows = [
        [NAMES[method], *(memory_cell(find(memory, m)[method], notes) for m in models)]
        for method in methods_of(memory)
    ]
    header = ["", *(f"{model}: peak + kept" for model in models)]
    text = MEMORY.format(sums=copies) + about(memory)
    return text + table(header, rows) + str(notes)


def memory_cell(found: Results, notes: Notes) -> str:
    """Returns a method's peak, what it keeps, and their sum."""
    if "error" in found:
        return "crash" + notes.mark(code(found["error"]))
    peak, held = found["peak"] / MIB, found["held"] / MIB
    return f"{peak:.1f} + {held:.1f} = **{peak + held:.1f}**"


def page(results: Results) -> str:
    """Returns docs/evidence.md."""
    return (
        INTRODUCTION
        + equality_section(results["equality"])
        + time_section(results["time"])
        + memory_section(results["memory"])
        + REST
    )


def readme_tables(results: Results) -> str:
    """Returns what stands between README's markers."""
    time, memory, equality = (results[name] for name in ("time", "memory", "equality"))
    models = [case["model"] for case in memory["cases"]]
    methods = ["large (keras)", *OURS, "keras", "GradientAccumulateModel"]
    methods += ["MultiSteps", "scan"]
    compared = equality["cases"][0]["methods"]
    rows = []
    for method in methods:
        right = "{} of {}".format(*count(equality, method)) if method in compared else "-"
        times = [short_time(find(time, model)[method]) for model in models]
        sizes = [short_memory(find(memory, model)[method]) for model in models]
        rows.append([NAMES[method], right, *times, *sizes])
    corner = "few rounds: rough" if time["quick"] else "method"
    header = [corner, "cases right", *(f"{m}, ms" for m in models)]
    header += [f"{m}, MiB" for m in models]
    return BEGIN + table(header, rows) + END


def short_time(found: Results) -> str:
    """Returns milliseconds."""
    return "crash" if "error" in found else short(found["cpu_ms"])


def short_memory(found: Results) -> str:
    """Returns MiB in all."""
    if "error" in found:
        return "crash"
    return short((found["peak"] + found["held"]) / MIB)


def short(value: float) -> str:
    """Returns a number of at least two digits."""
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}"


def with_tables(readme: str, results: Results) -> str:
    """Returns README with new tables."""
    before, _, rest = readme.partition(BEGIN)
    return before + readme_tables(results) + rest.partition(END)[2]


def write() -> None:
    """Writes the page, its figures, and README's tables; all groups have to be there."""
    results = load()
    PAGE.write_text(page(results))
    README.write_text(with_tables(README.read_text(), results))
    draw(results)


def draw(results: Results) -> None:
    """Draws both figures."""
    for name, (group, bar, unit) in BARS.items():
        draw_bars(FIGURES / f"{name}.png", results[group], bar, unit)


def time_bar(found: Results) -> tuple[float, float]:
    """Returns a time and its spread, in milliseconds."""
    return found["cpu_ms"], found["spread"] * found["cpu_ms"]


def memory_bar(found: Results) -> tuple[float, float]:
    """Returns the MiB of a method; they have no spread to speak of."""
    return (found["peak"] + found["held"]) / MIB, 0.0


# A figure -> its group, what its bars are, and their unit.
BARS = {
    "evidence_time": ("time", time_bar, "CPU milliseconds"),
    "evidence_memory": ("memory", memory_bar, "MiB"),
}


def draw_bars(path: Path, result: Results, bar: Any, unit: str) -> None:
    """Draws a panel of bars for each model; ours in colour, bounds in light grey."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    models = list(dict.fromkeys(case["model"] for case in result["cases"]))
    methods = methods_of(result)[::-1]
    size = (11, 0.32 * len(methods) + 1.1)
    figure, panels = plt.subplots(1, len(models), sharey=True, figsize=size)
    for axis, model in zip(panels, models, strict=True):
        found = find(result, model)
        for place, method in enumerate(methods):
            if "error" in found[method]:
                axis.text(0, place, " crash", va="center", fontsize=8)
                continue
            value, spread = bar(found[method])
            light = method.startswith("large") or method in ("floor", "plain")
            color = "#3f51b5" if method in OURS else "#d0d0d0" if light else "#8a8a8a"
            axis.barh(place, value, xerr=spread or None, color=color, ecolor="black")
            axis.text(value + spread, place, f" {short(value)}", va="center", fontsize=8)
        axis.set_title(model, fontsize=10)
        axis.set_xlabel(unit, fontsize=9)
        axis.set_xlim(0, 1.18 * axis.get_xlim()[1])
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    plain = [NAMES[method].replace("`", "") for method in methods]
    panels[0].set_yticks(range(len(methods)), plain)
    figure.tight_layout()
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)
