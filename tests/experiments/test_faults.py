"""A short form of experiments/faults.py: no traceback, nothing left behind, no entry lost, no step drawn twice."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

import sordino

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "experiments"))

from faulty import commands, datasets, disk, malicious, recipes, runs  # type: ignore[import-not-found] # noqa: E402
from faulty.outcome import Tally  # type: ignore[import-not-found] # noqa: E402


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SORDINO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SORDINO_TRACEBACK", "1")


def test_mutated_recipes_are_refused_by_a_sentence(tmp_path: Path) -> None:
    tally = Tally()
    with recipes.small_world():
        for seed in range(1, 80):
            if seed % 10:  # the others are whole runs
                recipes.fuzz(seed, tally, tmp_path / "try")
    assert tally.tried == 72
    assert not tally.uncaught
    assert tally.outcomes["exit 2"] > 40


def test_damaged_datasets_are_refused_by_a_sentence(tmp_path: Path) -> None:
    tally = Tally()
    for seed in range(120):
        datasets.fuzz(seed, tally, tmp_path / "try")
    assert not tally.uncaught
    assert tally.outcomes["exit 2"] > 60


def test_what_is_said_of_a_damaged_dataset_does_not_depend_on_its_content(tmp_path: Path) -> None:
    """A message that held a value, a size or a checksum would differ from one damage to the next."""
    said = set()
    for seed in range(150):
        said |= {text for text in [datasets.complaint(seed, tmp_path / "try")] if text}
    assert len(said) < 50
    assert not [text for text in said if re.search(r"0x[0-9a-f]+ !=|b'|position \d|line \d", text)]


@pytest.mark.parametrize(
    "line",
    [
        "account dpsgd --noise-multiplier=1 --steps=" + "9" * 400 + " --delta=1e-5 --sampling-rate=0.01",
        "account dpsgd --noise-multiplier=nan --steps=5 --delta=1e-5 --sampling-rate=0.01",
        "plan --records=600 --features=20 --epsilon=3 --delta=1e-5 --feature-norm=2147483648 --max-epochs=20",
        "plan --records=600 --features=20 --epsilon=3 --delta=1e-5 --feature-norm=1 --weight-norm=1e300 --max-epochs=9",
        "calibrate hidden-state --records=600 --batch=60 --epochs=5 --lr=1e-17 --strong-convexity=0.02 "
        "--smoothness=1.02 --delta=1e-5 --epsilon=3",
    ],
)
def test_numbers_without_bounds_are_refused_by_a_sentence(line: str, tmp_path: Path) -> None:
    from sordino.cli import main

    tally = Tally()
    tally.add(commands.tried(lambda: main(line.split())), line)
    assert dict(tally.outcomes) == {"exit 2": 1}


def test_no_fault_loses_an_entry_or_draws_a_step_twice(tmp_path: Path) -> None:
    tally = Tally()
    found = disk.sweep(tally, tmp_path / "try", limit=10, seed=3)
    assert tally.tried == 10
    assert not tally.uncaught
    assert (found["entries_lost"], found["steps_redrawn"]) == (0, 0)


def test_a_damaged_run_is_refused_or_is_whole(tmp_path: Path) -> None:
    tally = Tally()
    with runs.small_runs():
        for seed in range(40):
            runs.fuzz(seed, tally, tmp_path / "try")
    assert not tally.uncaught
    assert not tally.left_behind
    assert tally.outcomes["exit 3"] > 4
    assert tally.outcomes["exit 0"] > 4, "also what can be told is tried"


def test_a_run_directory_that_somebody_made_up_is_read_or_refused(tmp_path: Path) -> None:
    """The hashes agree with what was changed, so the readers behind them are tried; the last four were tracebacks."""
    tally = Tally()
    with runs.small_runs():
        for seed in (*range(40), 54, 164, 1428, 1464):
            malicious.fuzz(seed, tally, tmp_path / "try")
    assert not tally.uncaught
    assert not tally.left_behind
    assert tally.outcomes["exit 0"] > 10
    assert tally.outcomes["exit 2"] > 2


def test_asserts_narrow_types_and_guard_nothing() -> None:
    """`python -O` removes them, so none may stand between a wrong value and the ledger."""
    found = []
    for path in Path(sordino.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
            if isinstance(node, ast.Assert) and not _narrows(node.test):
                found.append(f"{path.name}:{node.lineno}")
    assert not found


def _narrows(test: ast.expr) -> bool:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _narrows(test.operand)
    if isinstance(test, ast.BoolOp):
        return all(map(_narrows, test.values))
    if isinstance(test, ast.Call):
        return isinstance(test.func, ast.Name) and test.func.id == "isinstance"
    return isinstance(test, ast.Compare) and all(isinstance(op, ast.Is | ast.IsNot) for op in test.ops)
