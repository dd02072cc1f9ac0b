"""ε of random allocation in less than two seconds, with a lower bound: the result file, and the page that quotes it."""

from __future__ import annotations

import json
import math
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENT = json.loads((ROOT / "benchmarks" / "results" / "epochs.json").read_text(encoding="utf8"))
ROWS = DOCUMENT["rows"]


def test_every_plan_was_answered_in_time() -> None:
    assert len(ROWS) == DOCUMENT["plans"] == 350
    assert all(row["epsilon"] > 0 for row in ROWS)
    assert max(row["seconds"] for row in ROWS) == DOCUMENT["slowest_seconds"] < 2
    assert (max(row["batches"] for row in ROWS), max(row["epochs"] for row in ROWS)) == (10**4, 10**12)


def test_the_page_says_what_the_file_says() -> None:
    page = " ".join((ROOT / "docs" / "guarantees" / "allocation.md").read_text(encoding="utf8").split())
    without = [row["epochs"] for row in ROWS if not row["epsilon_lower"]]
    ratios = {row["epochs"]: 1.0 for row in ROWS}
    for row in ROWS:
        assert (row["epsilon_lower"] or 0.0) <= row["epsilon"]
        ratios[row["epochs"]] = min(ratios[row["epochs"]], (row["epsilon_lower"] or 0.0) / row["epsilon"])
    assert f"took {math.ceil(100 * DOCUMENT['slowest_seconds']) / 100} seconds at most" in page
    assert f"{len(without)} have no lower bound above 0, all with {min(without):,} or more epochs" in page
    assert f"at least {100 * min(r for epochs, r in ratios.items() if epochs <= 1000):.1f} % of the upper one" in page
