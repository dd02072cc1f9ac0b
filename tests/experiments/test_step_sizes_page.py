"""The page on hidden state says what other step sizes than the proposed ones gain, as the file has it."""

from __future__ import annotations

import json
from pathlib import Path

from scripts import experiment

ROOT = Path(__file__).parents[2]


def test_the_table_is_that_of_the_file() -> None:
    document = json.loads((ROOT / "experiments" / "results" / "step_sizes.json").read_text(encoding="utf8"))
    page = (ROOT / "docs" / "tutorials" / "hidden_state.md").read_text(encoding="utf8")
    assert experiment("step_sizes").page(document["table"]) in page


def test_half_of_the_step_size_gains_on_words_and_loses_on_pixels_in_every_budget() -> None:
    document = json.loads((ROOT / "experiments" / "results" / "step_sizes.json").read_text(encoding="utf8"))
    rows = {(row["task"], row["factor"]): row for row in document["table"]}
    assert rows["imdb", 0.5]["least"] > 0 > rows["imdb", 2.0]["greatest"]
    for task in ("usps", "fashion-mnist", "usps-odd", "fashion-mnist-odd"):
        assert rows[task, 0.5]["median"] < 0
