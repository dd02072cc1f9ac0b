"""The Python on every page runs as it is printed, what a page says it prints it prints, and commands parse."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import shlex
from pathlib import Path

import pytest

from sordino.cli import _parser

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


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_commands_of_a_page_are_accepted_by_their_parsers(page: Path) -> None:
    for block in re.findall(r"```console\n(.*?)```", page.read_text(encoding="utf8"), re.S):
        for line in block.splitlines():
            command = line.strip().removeprefix("$ ")
            if command.startswith("sordino "):
                _parser().parse_args(shlex.split(command, comments=True)[1:])


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
