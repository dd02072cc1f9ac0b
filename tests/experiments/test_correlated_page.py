"""The table of the tutorial on correlated noise is that of its result file."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_tutorial_shows_what_was_measured() -> None:
    spec = importlib.util.spec_from_file_location("correlated_experiment", ROOT / "experiments" / "correlated.py")
    assert spec is not None
    assert spec.loader is not None
    experiment = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(experiment)
    document = json.loads((ROOT / "experiments" / "results" / "correlated.json").read_text(encoding="utf8"))
    page = (ROOT / "docs" / "tutorials" / "correlated.md").read_text(encoding="utf8")
    lines = experiment.markdown(document["table"])
    assert len(lines) > 2
    assert [line for line in lines if line not in page] == []
