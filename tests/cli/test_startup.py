"""Help is there at once: whatever only describes commands loads none of the libraries that carry them out."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator

import pytest

from sordino.cli import _parser

SLOW = {"torch", "scipy", "dp_accounting", "numpy"}
RUN = """
import sys
from sordino.cli import main
try:
    code = main(sys.argv[1:])
finally:
    print(*sys.modules, file=sys.stderr)
sys.exit(code)
"""


def commands(parser: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words before --help, of the program and of all commands below it."""
    yield path
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from commands(below, (*path, name))


def run(*words: str) -> tuple[str, set[str]]:
    """(what the command prints, the modules it loaded); it has to end with 0."""
    done = subprocess.run([sys.executable, "-c", RUN, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, set(done.stderr.split())


@pytest.mark.parametrize("words", list(commands(_parser())), ids=" ".join)
def test_help_loads_nothing_slow(words: tuple[str, ...]) -> None:
    text, loaded = run(*words, "--help")
    assert text.startswith("usage: " + " ".join(("sordino", *words)))
    assert not SLOW & loaded


def test_version_loads_nothing_slow() -> None:
    text, loaded = run("--version")
    assert text.startswith("sordino ")
    assert not SLOW & loaded


@pytest.mark.parametrize(
    "line",
    [
        "account dpsgd --sampling-rate 0.01 --noise-multiplier 1.1 --steps 100 --delta 1e-5",
        "account hidden-state --records 1000 --steps 10 --lr 1 --strong-convexity 0.1 --smoothness 1 --delta 1e-5 "
        "--sampling full --noise-multiplier 3",
        "account modelmix --noise-multiplier 2 --tau-over-lr 0.3 --sampling-rate 0.02 --clip-norm 20 "
        "--expected-batch 1000 --steps 10 --delta 1e-5",
    ],
    ids=lambda line: line.split()[1],
)
def test_accounting_needs_no_torch(line: str) -> None:
    text, loaded = run(*line.split())
    assert text.startswith("ε")
    assert "torch" not in loaded
