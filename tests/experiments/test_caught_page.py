"""The table of audits of allocation, correlated noise and users is that of its result file, and says what it should."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "experiments"))  # last, for what the experiment imports of its folder


def test_honest_runs_hold_and_every_broken_one_is_caught_and_the_page_says_so() -> None:
    spec = importlib.util.spec_from_file_location("caught_experiment", ROOT / "experiments" / "caught.py")
    assert spec is not None
    assert spec.loader is not None
    experiment = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(experiment)
    document = json.loads((ROOT / "experiments" / "results" / "caught.json").read_text(encoding="utf8"))
    page = (ROOT / "docs" / "guarantees" / "audit.md").read_text(encoding="utf8")
    assert [line for line in experiment.markdown(document["table"]) if line not in page] == []
    assert [row["case"] for row in document["table"]] == list(experiment.cases())
    for row in document["table"]:
        assert row["audits"] >= 3
        honest = row["case"].endswith("as claimed")
        assert row["broken"] == (0 if honest else row["audits"]), row["case"]
