"""The table of audits of allocation, correlated noise and users is that of its result file, and says what it should."""

from __future__ import annotations

import json
from pathlib import Path

from scripts import experiment

ROOT = Path(__file__).parents[2]


def test_honest_runs_hold_and_every_broken_one_is_caught_and_the_page_says_so() -> None:
    script = experiment("caught")
    document = json.loads((ROOT / "experiments" / "results" / "caught.json").read_text(encoding="utf8"))
    page = (ROOT / "docs" / "guarantees" / "audit.md").read_text(encoding="utf8")
    assert [line for line in script.markdown(document["table"]) if line not in page] == []
    assert [row["case"] for row in document["table"]] == list(script.cases())
    for row in document["table"]:
        assert row["audits"] >= 3
        honest = row["case"].endswith("as claimed")
        assert row["broken"] == (0 if honest else row["audits"]), row["case"]
