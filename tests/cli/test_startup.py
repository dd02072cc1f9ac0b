"""Help is there at once: whatever only describes commands loads none of the libraries that carry them out."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from sordino.cli import _parser

SLOW = {"torch", "scipy", "dp_accounting", "numpy"}
RUN = """
import contextlib, io, json, shlex, sys
from sordino.cli import main
answers = []
for line in sys.argv[1:]:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        try:
            code = main(shlex.split(line))
        except SystemExit as ended:
            code = ended.code
    answers.append((code, text.getvalue()))
print(json.dumps([answers, list(sys.modules)]))
"""


def commands(parser: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words before --help, of the program and of all commands below it."""
    yield path
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from commands(below, (*path, name))


def run(lines: list[str]) -> tuple[list[str], set[str]]:
    """(what each command prints, the modules they loaded), one after the other; each has to end with 0."""
    done = subprocess.run([sys.executable, "-c", RUN, *lines], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers, loaded = json.loads(done.stdout)
    assert [code or 0 for code, _ in answers] == [0] * len(lines), done.stderr
    return [text for _, text in answers], set(loaded)


def test_help_and_version_load_nothing_slow() -> None:
    everything = [" ".join(words) for words in commands(_parser())]
    texts, loaded = run([*(f"{line} --help" for line in everything), "--version"])
    for line, text in zip(everything, texts[:-1], strict=True):
        assert text.startswith(f"usage: sordino {line}".rstrip())
    assert texts[-1].startswith("sordino ")
    assert not SLOW & loaded


def test_accounting_needs_no_torch() -> None:
    texts, loaded = run(
        [
            "account dpsgd --sampling-rate 0.01 --noise-multiplier 1.1 --steps 100 --delta 1e-5",
            "account hidden-state --records 1000 --steps 10 --lr 1 --strong-convexity 0.1 --smoothness 1 --delta 1e-5 "
            "--sampling full --noise-multiplier 3",
            "account modelmix --noise-multiplier 2 --tau-over-lr 0.3 --sampling-rate 0.02 --clip-norm 20 "
            "--expected-batch 1000 --steps 10 --delta 1e-5",
        ]
    )
    assert all(text.startswith("ε") for text in texts)
    assert "torch" not in loaded


@pytest.mark.parametrize("width", [50, 71, 80, 100])
def test_no_flag_is_cut_in_help(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    parser = _parser()
    for path in commands(parser):
        below = parser
        for word in path:
            (action,) = [one for one in below._actions if isinstance(one, argparse._SubParsersAction)]
            below = action.choices[word]
        assert not re.search(r"(^|\s)--?[a-z-]*-$", below.format_help(), re.MULTILINE), path


def test_python_without_docstrings_and_assertions_makes_plans() -> None:
    code = (
        "import sordino; print(sordino.dpsgd(epsilon=3.0, delta=1e-5, records=900, expected_batch=90, steps=9).steps)"
    )
    done = subprocess.run([sys.executable, "-OO", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "9\n"
