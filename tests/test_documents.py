"""What the documents say is so: commands, code, names and figures."""

import functools
import os
import pathlib
import re
import subprocess
import sys

import keras
import pytest
import readme_code
from readme_code import README, blocks

import keras_accum as ka

ROOT = pathlib.Path(__file__).parent.parent


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
        ended = subprocess.run(
            [sys.executable, "page.py"],
            capture_output=True,
            text=True,
            timeout=300,
            env=environment,
        )
        assert ended.returncode == 0, ended.stderr[-3000:]
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
    for figure in figures:
        assert figure.with_suffix(".py").exists()


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
    assert public - named <= {
        "GradientAccumulationOptimizer",
        "GradientAccumulationModel",
    }
    assert "`GradientAccumulationModel`" in README


def test_readme_is_short_and_its_links_and_its_measured_numbers_are_there():
    assert len(README.splitlines()) <= 150
    for path in re.findall(r"\]\(([\w/.]+)\)", README):
        assert (ROOT / path).exists(), path
    measured = (ROOT / "benchmarks" / "README.md").read_text()
    costs = README.partition("## What it costs")[2].partition("## What is in it")[0]
    numbers = re.findall(r"\b\d+\.\d+\b", costs)
    assert len(numbers) > 15
    for number in numbers:
        assert number in measured, number


def test_changelog_tells_of_every_public_name():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    for name in vars(ka):
        assert name.startswith("_") or f"`{name}`" in changelog


def test_files_that_the_readme_names_exist():
    for path in re.findall(r"`?((?:examples|benchmarks|keras_accum)/[\w./]*)", README):
        assert (ROOT / path).exists(), path
