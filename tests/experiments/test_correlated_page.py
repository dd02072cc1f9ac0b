"""The table of the tutorial on correlated noise is that of its result file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import experiment

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["correlated", "correlated_again"])
def test_the_tutorial_shows_what_was_measured(name: str) -> None:
    script = experiment("correlated")
    document = json.loads((ROOT / "experiments" / "results" / f"{name}.json").read_text(encoding="utf8"))
    page = (ROOT / "docs" / "tutorials" / "correlated.md").read_text(encoding="utf8")
    lines = script.markdown(document["table"])
    assert len(lines) > 2
    assert [line for line in lines if line not in page] == []


def test_the_tutorial_on_dpsgd_says_what_optimizers_gained() -> None:
    document = json.loads((ROOT / "experiments" / "results" / "optimizers.json").read_text(encoding="utf8"))
    page = (ROOT / "docs" / "tutorials" / "dpsgd.md").read_text(encoding="utf8")
    rows = document["table"]["rows"]
    for name in ("doppler-sgd", "doppler-adam", "scaled-adam"):
        gains = [f"{100 * row['gain']:+.2f}" for row in rows if row["optimizer"] == name]
        assert " / ".join(gains) in page, name
        assert document["table"]["verdicts"][name] == "not kept"
    momentum = [f"{100 * row['accuracy']:.2f}" for row in rows if row["optimizer"] == "momentum"]
    assert " / ".join(momentum) in page


def test_the_tutorial_on_the_hidden_state_says_how_the_proposals_trained() -> None:
    document = json.loads((ROOT / "experiments" / "results" / "full_batch.json").read_text(encoding="utf8"))
    page = (ROOT / "docs" / "tutorials" / "hidden_state.md").read_text(encoding="utf8")
    rows = {row["row"]: row for row in document["table"]}
    proposal, first, tuned = rows["proposal"], rows["first-proposal"], rows["batch-4000-20"]
    assert (first["setting"]["batches"], first["setting"]["epochs"]) == (1, 1000)
    assert f"{100 * first['accuracy']:.2f} % (one seed)" in page
    assert len(document["runs"]["first-proposal"]["accuracies"]) == 1
    assert proposal["setting"]["epochs"] == 18
    for row in (proposal, tuned):
        assert f"{100 * row['accuracy']:.2f} ± {100 * row['spread']:.2f}" in page
    assert tuned["accuracy"] > first["accuracy"] > proposal["accuracy"]
