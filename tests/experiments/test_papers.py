"""experiments/PAPERS.md says what the result files say, names files that exist, and leaves no row without a reason."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "experiments"))

import papers  # noqa: E402

ROWS = [row for rows in papers.PAPERS.values() for row in rows]


def test_the_page_is_what_the_result_files_say() -> None:
    assert papers.PAGE.read_text(encoding="utf8") == papers.page(), "run: python experiments/papers.py"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.item)
def test_a_row_names_files_that_exist_or_says_why_there_are_none(row: papers.Row) -> None:
    missing = [path for path in row.paths() if not (ROOT / path).exists()]
    assert not missing
    assert row.left or (row.built and row.tested)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.item)
def test_a_row_without_a_value_of_ours_says_why(row: papers.Row) -> None:
    ours, left = row.cells()[5:]
    assert left != "–" or ours != "–"
