"""The page of what was tried agrees with the result files, and nothing in them was found, lost or not caught."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "experiments"))

import trust  # type: ignore[import-not-found] # noqa: E402


def test_the_page_is_what_the_files_say() -> None:
    assert (ROOT / "docs" / "trust.md").read_text(encoding="utf8") == trust.page(trust.known_rows())


def test_nothing_was_found_in_the_recipes_that_were_attacked() -> None:
    rows = trust.known_rows()
    assert len(rows) >= 5
    assert not [row["found"] for row in rows if row["found"]]
    assert all(row["audit"] is None or row["audit"]["epsilon_lower"] <= row["audit"]["epsilon_claimed"] for row in rows)


def test_no_fault_was_uncaught_or_lost_anything() -> None:
    faults = trust.read("faults.json")
    assert set(faults["parts"]) >= {"recipes", "datasets", "commands", "runs", "disk"}
    assert [faults[key] for key in ("uncaught", "left_behind", "entries_lost", "steps_redrawn")] == [0, 0, 0, 0]


def test_the_audit_shows_seven_tenths_of_a_true_epsilon_and_calls_none_broken() -> None:
    found = trust.read("audit_strength.json")["table"]
    strong = {row["rate"]: row["median_share"] for row in found["white"] if row["runs"] > 1}
    assert strong[1.0] >= 0.7
    assert strong[0.25] >= 0.7
    assert found["false"]["1"]["audits"] >= 200
    assert found["false"]["1"]["called_broken"] == 0
