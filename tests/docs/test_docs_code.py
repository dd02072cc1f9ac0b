"""The Python on every page runs as it is printed, what a page says it prints it prints, and commands parse."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import runpy
import shlex
import tomllib
from pathlib import Path

import pytest

from models.conftest import _OPERATORS
from small_recipes import small_toml
from sordino.cli import _parser
from sordino.runs.compare_suite import Suite
from sordino.runs.recipe import Recipe

OPERATORS = _OPERATORS  # transformers imports torchvision: tests/models/conftest.py

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
EXAMPLES = sorted(ROOT.glob("examples/*.py"))
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```\n(?:\n?<!-- prints -->\n```text\n(.*?)^```\n)?", re.S | re.M)
NOT_RUN = "# not run: "


def blocks(page: Path) -> list[tuple[str, str | None]]:
    """Each block of Python and what the page says it prints; blocks that begin with `# not run: why` are left out."""
    found = [(code, printed or None) for _, code, printed in BLOCK.findall(page.read_text(encoding="utf8"))]
    return [(code, printed) for code, printed in found if not code.startswith(NOT_RUN)]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


WITH_CODE = [page for page in PAGES if blocks(page) and page.name != "README.md"]
"""The README's code is run by tests/docs/test_readme.py."""


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_CODE, ids=name)
def test_the_python_of_a_page_runs_and_prints_what_the_page_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for code, printed in blocks(page):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, name(page), "exec"), namespace)
        if printed is not None:
            assert out.getvalue().split() == printed.split()


def test_every_page_with_python_is_found_and_every_output_has_its_block() -> None:
    assert len(WITH_CODE) > 10
    for page in PAGES:
        text = page.read_text(encoding="utf8")
        assert text.count("```python\n") == len(BLOCK.findall(text)), f"{name(page)}: a block that no test sees"
        shown = sum(printed != "" for _, _, printed in BLOCK.findall(text))
        assert text.count("<!-- prints -->") == shown, f"{name(page)}: an output that belongs to no block"


def test_no_python_is_hidden_in_an_indented_block() -> None:
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf8"), flags=re.S)
        hidden = re.findall(r"^ {4,}(?:import |from \w+[\w.]* import |\w+ = \w+[.\w]*\().*$", text, re.M)
        assert not hidden, f"{name(page)}: write ```python, so that it is run: {hidden[0]}"


def commands(page: Path) -> list[str]:
    """Every line of a page's code that calls sordino: in any fence, or indented; continued lines joined."""
    text = re.sub(r"```(?:python|toml)\n.*?```", "", page.read_text(encoding="utf8"), flags=re.S)
    fenced = re.findall(r"```\w*\n(.*?)```", text, re.S)
    indented = re.findall(r"^ {4,}(.*)$", re.sub(r"```.*?```", "", re.sub(r" *\\\n *", " ", text), flags=re.S), re.M)
    lines = [line for block in fenced for line in re.sub(r" *\\\n *", " ", block).splitlines()] + indented
    found = [line.strip().removeprefix("$ ") for line in lines]
    return [line for line in found if line.startswith("sordino ") or "-m sordino " in line]


def accepted(line: str) -> None:
    """SystemExit or AssertionError unless the line is a call that its parser accepts; a pattern has known flags."""
    line = line.partition("-m sordino ")[2] or line.removeprefix("sordino ")
    words = shlex.split(re.split(r" # | {3,}", line)[0], comments=True)
    pattern = any(mark in line for mark in ("…", "[", "|"))
    if not pattern:
        _parser().parse_args(words)
        return
    parser = _parser()
    while parser._subparsers is not None:
        (action,) = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
        choices = [one for one in words.pop(0).split("|") if one]
        assert set(choices) <= set(action.choices), line
        parser = action.choices[choices[0]]
    known = {option for one in parser._actions for option in one.option_strings}
    assert {word.strip("[]") for word in words if word.strip("[").startswith("--")} <= known, line


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"], ids=name)
def test_the_commands_of_a_page_are_accepted_by_their_parsers(page: Path) -> None:
    for line in commands(page):
        accepted(line)


def test_commands_are_found_and_wrong_ones_are_not_accepted() -> None:
    assert len(commands(ROOT / "README.md")) > 10
    for wrong in ("sordino trian x.toml", "sordino train x.toml --sett a=b", "sordino train x.toml [--otu DIR]"):
        with pytest.raises((SystemExit, AssertionError)):
            accepted(wrong)


TOML = re.compile(r"```toml\n(.*?)```", re.S)


@pytest.mark.parametrize("page", [page for page in PAGES if TOML.search(page.read_text(encoding="utf8"))], ids=name)
def test_the_recipes_of_a_page_have_known_keys(page: Path, tmp_path: Path) -> None:
    for block in TOML.findall(page.read_text(encoding="utf8")):
        document = tomllib.loads(block)
        if "methods" in document:
            (tmp_path / "suite.toml").write_text(block, encoding="utf8")
            (tmp_path / "linear.toml").write_text(small_toml(), encoding="utf8")
            assert Suite.read(tmp_path / "suite.toml").jobs
        else:
            Recipe.from_dict({**tomllib.loads(small_toml()), **document})


@pytest.mark.slow
@pytest.mark.parametrize("script", EXAMPLES, ids=name)
def test_an_example_runs_as_it_is(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    assert "ε = 3.000" in capsys.readouterr().out
    assert not list(tmp_path.iterdir()), "an example leaves nothing behind"


def test_there_are_examples_and_each_says_how_it_is_run() -> None:
    assert len(EXAMPLES) >= 4
    for script in EXAMPLES:
        assert f"python {name(script)}" in script.read_text(encoding="utf8")
