"""What the documents say is so: commands, code, names and figures."""

import copy
import functools
import importlib.util
import os
import pathlib
import re

import forks
import keras
import pytest
import readme_code
from readme_code import README, blocks

import keras_accum as ka

ROOT = pathlib.Path(__file__).parent.parent


def load_script(path):
    """A script of the checkout as a module; what lies beside it is not importable."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


evidence_page = load_script(ROOT / "benchmarks" / "evidence_page.py")
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
# They make strategies, of which a process can have one.
IN_A_PROCESS = {"guides/several_gpus.md", "guides/several_machines.md"}


def program(page):
    """The code of a page from top to bottom, each line where the page has it."""
    lines, language = [], None
    for line in (DOCS / page).read_text().splitlines():
        if line.startswith("```"):
            language = line[3:] if language is None else None
            line = ""
        lines.append(line if language == "python" else "")
    return "\n".join(lines).rstrip() + "\n"


@pytest.mark.parametrize("page", [page for page in PAGES if program(page).strip()])
def test_code_of_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if page in IN_A_PROCESS:
        (tmp_path / "page.py").write_text(program(page))
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "-1",
            "PYTHONPATH": str(ROOT),
        }
        environment.pop("TF_CONFIG", None)
        code, printed = forks.run("page.py", timeout=300, environment=environment)
        assert code == 0, printed[-3000:]
        return
    monkeypatch.setattr(keras.Model, "compile", eagerly(keras.Model.compile))
    exec(compile(program(page), str(DOCS / page), "exec"), {"__name__": page})


def eagerly(compile_model):
    """`Model.compile`, in eager mode where nothing is said: it saves the tracing."""

    @functools.wraps(compile_model)
    def wrapped(*args, **kwargs):
        if not {"jit_compile", "run_eagerly"} & set(kwargs):
            kwargs["run_eagerly"] = True
        return compile_model(*args, **kwargs)

    return wrapped


def test_every_page_is_in_the_site_and_every_figure_has_a_script():
    named = re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text())
    assert sorted(named) == PAGES
    figures = list((DOCS / "figures").glob("*.png"))
    assert figures
    evidence = (DOCS / "evidence.md").read_text()
    for figure in figures:
        if figure.stem in evidence_page.BARS:
            assert f"(figures/{figure.name})" in evidence
        else:
            assert figure.with_suffix(".py").exists()
    assert set(evidence_page.BARS) <= {figure.stem for figure in figures}


def test_evidence_is_what_was_measured():
    results = evidence_page.load()
    assert (DOCS / "evidence.md").read_text() == evidence_page.page(results)
    assert evidence_page.readme_tables(results) in README


def test_evidence_follows_each_number_that_was_measured():
    results = evidence_page.load()
    page, tables = evidence_page.page(results), evidence_page.readme_tables(results)
    for change in (
        lambda r: r["equality"]["cases"][3]["methods"].update(keras={"crash": "Oh: no"}),
        lambda r: r["equality"]["cases"][3]["methods"]["keras"].update(
            error=0.1, warned=[]
        ),
        lambda r: find(r["time"])["MultiSteps"].update(cpu_ms=1234.5),
        lambda r: find(r["memory"])["MultiSteps"].update(peak=2**40),
        lambda r: r["time"].update(quick=not r["time"]["quick"]),
    ):
        changed = copy.deepcopy(results)
        change(changed)
        assert evidence_page.page(changed) != page
        assert evidence_page.readme_tables(changed) != tables


def test_evidence_says_what_failed():
    results = copy.deepcopy(evidence_page.load())
    weighted(results)["MultiSteps"] = {"crash": "OSError: the first"}
    find(results["time"])["MultiSteps"] = {"error": "OSError: the second"}
    find(results["memory"])["MultiSteps"] = {"error": "OSError: the third"}
    results["time"]["versions"]["jax"] = {"error": "ERROR: no such package"}
    page = evidence_page.page(results)
    for said in ("first", "second", "third"):
        assert f"`OSError: the {said}`" in page
    assert "The environment `jax` failed: `ERROR: no such package`." in page
    assert "| crash |" in evidence_page.readme_tables(results)


def weighted(results):
    (case,) = (c for c in results["equality"]["cases"] if c["case"] == "weights")
    return case["methods"]


def find(result):
    return evidence_page.find(result, "mlp", xla=True)


def test_reference_has_every_public_name():
    reference = (DOCS / "api.md").read_text()
    for name in vars(ka):
        assert name.startswith("_") or f"::: keras_accum.{name}\n" in reference
    # Of a member that is not there, the site would say nothing.
    for entry in reference.split("::: keras_accum.")[1:]:
        listed = re.search(r" members: \[(.*)\]", entry)
        for member in listed[1].split(", ") if listed else ():
            assert hasattr(getattr(ka, entry.split()[0]), member), member


def test_readme_has_two_commands_and_ci_runs_them():
    commands = [block.strip() for block in blocks("sh")]
    assert len(commands) == 2
    ci = (ROOT / ".ci" / "run").read_text()
    for command in commands:
        assert command in ci


@pytest.mark.parametrize("code", blocks("python"))
def test_readme_code_runs_as_it_stands(code):
    readme_code.run(code)


def test_readme_names_what_is_public():
    named = set(re.findall(r"\bka\.(\w+)", README))
    public = {name for name in vars(ka) if not name.startswith("_")}
    assert named <= public
    assert public - named <= {"GradientAccumulationOptimizer"}


def test_readme_is_short_and_its_links_and_its_measured_numbers_are_there():
    assert len(README.splitlines()) <= 150
    for path in re.findall(r"\]\(([\w/.]+)\)", README):
        assert (ROOT / path).exists(), path
    measured = (ROOT / "benchmarks" / "README.md").read_text()
    # Its table is compared with what was measured, above; the rest is here.
    costs = README.partition(evidence_page.END)[2].partition("## What is in it")[0]
    numbers = re.findall(r"\b\d+(?:\.\d+)?\b", costs)
    assert len(numbers) > 4
    for number in numbers:
        assert number in measured, number


def test_changelog_tells_of_every_public_name():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    for name in vars(ka):
        assert name.startswith("_") or f"`{name}`" in changelog


def test_files_that_the_readme_names_exist():
    for path in re.findall(r"`?((?:examples|benchmarks|keras_accum)/[\w./]*)", README):
        assert (ROOT / path).exists(), path
