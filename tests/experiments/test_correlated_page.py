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


def test_the_tutorial_says_how_often_the_planner_fails_and_where_correlated_noise_gains() -> None:
    page = " ".join((ROOT / "docs" / "tutorials" / "correlated.md").read_text(encoding="utf8").split())
    first, second = (
        json.loads((ROOT / "experiments" / "results" / f"{name}.json").read_text(encoding="utf8"))["table"]
        for name in ("correlated_again", "correlated")
    )
    one, two = first["summary"], second["summary"]
    assert f"in {one['planner_fails']} of {one['rows']} rows of the first table" in page
    assert f"in {two['planner_fails']} of {two['rows']} of the second (all with one epoch)" in page
    assert all(row["epochs"] == 1 for row in second["rows"] if row["fails"])
    pairs = two["called_different"]
    numbers = [pairs[key] for key in ("pairs", "told_apart_as_expected", "told_apart_against", "expected_sign")]
    assert "in the second {} pairs: {}, {} and {}.".format(*numbers) in page
    correlations = [f"{part['correlation_with_the_model']:.2f}" for part in (one, two)]
    assert "is {} in the first table and {} in the second".format(*correlations) in page
    gains = {
        (row["task"], row["batches"], row["epsilon"]): pair["measured"]
        for row in second["rows"]
        for pair in row["pairs"]
        if row["epochs"] > 1 and pair["ways"] == ["allocation", "correlated"] and abs(pair["standard_errors"]) > 2.5
    }
    told = {("imdb", 200, 8.0): 0.4, ("usps", 200, 8.0): 1.4, ("fashion-mnist", 200, 8.0): 0.4,
            ("usps", 40, 1.0): -1.0, ("fashion-mnist", 40, 8.0): -0.6}  # fmt: skip
    assert {key: round(value, 1) for key, value in gains.items()} == told
    assert "(IMDb 0.4, USPS 1.4, Fashion-MNIST 0.4 points), and at ε = 1 on none" in page


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
