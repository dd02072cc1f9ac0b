"""The page on coupling says what the result files say, and these what their runs do."""

from __future__ import annotations

import json

import pytest
import torch

from scripts import experiment

coupling, coupling_page = experiment("coupling"), experiment("coupling_page")


def test_the_page_says_what_the_result_files_say() -> None:
    page = coupling_page.PAGE.read_text("utf8")
    assert "<!-- accuracies -->" in page
    assert coupling_page.filled(page) == page, "run python experiments/coupling_page.py"


@pytest.mark.parametrize("part", ["mnist", "imdb"])
def test_a_table_is_that_of_its_runs(part: str) -> None:
    document = json.loads((coupling_page.RESULTS / f"coupling_{part}.json").read_text("utf8"))
    assert document["table"] == coupling.table(document["runs"], coupling.PARTS[part].epochs)
    assert {row["seeds"] for row in document["table"]} == {3}


def test_a_cell_is_the_mean_over_the_seeds_at_the_chosen_setting() -> None:
    run = {"part": "mnist", "column": "OnlyPub", "share": 0.05, "variant": 0.0, "epochs": 4.0, "held_out": False}
    tried = [run | {"held_out": True, "epochs": 2.5, "lr": lr, "accuracy": 1 - lr} for lr in (0.1, 0.2)]
    made = [run | {"lr": 0.1, "seed": seed, "accuracy": value} for seed, value in enumerate((0.5, 0.7))]
    other = run | {"lr": 0.2, "seed": 2, "accuracy": 0.0}
    (row,) = coupling.table({str(i): r for i, r in enumerate([*tried, *made, other])}, 4.0)
    assert (row["mean"], row["seeds"], row["lr"]) == (pytest.approx(0.6), 2, 0.1)
    assert coupling_page.cell(row, 3) == "60.00 ± 14.14 (2)"


def test_columns_after_a_warm_up_have_settings_of_their_own() -> None:
    runs = json.loads((coupling_page.RESULTS / "coupling_mnist_redrawn.json").read_text("utf8"))["runs"]
    tried = {run["column"] for run in runs.values() if run["held_out"]}
    assert {"NonPriv", "OnlyPriv+", "Coupling+", "AdaMix+", "DPMD+", "DOPE+"} <= tried
    assert {run["variant"] for run in runs.values() if run["column"] == "DPMD+"} == {1, 2}  # K
    assert {run["variant"] for run in runs.values() if run["column"] == "AdaMix+"} == {0, 5}  # projected or not


def test_the_sentences_on_the_columns_after_a_warm_up_are_those_of_the_file() -> None:
    text = " ".join(coupling_page.PAGE.read_text("utf8").split())
    document = json.loads((coupling_page.RESULTS / "coupling_mnist_redrawn.json").read_text("utf8"))
    at = {row["column"]: f"{100 * row['mean']:.2f}" for row in document["table"] if row["share"] in (0.05, None)}
    assert f"has {at['OnlyPriv+']}, Coupling+ {at['Coupling+']}, DOPE+ {at['DOPE+']}, DPMD+ with its K tuned " in text
    assert f"with its K tuned {at['DPMD+']};" in text
    runs = [run for run in document["runs"].values() if not run["held_out"] and run["share"] == 0.05]
    own, control = (
        {run["seed"]: run["accuracy"] for run in runs if run["column"] == name} for name in ("Coupling+", "OnlyPriv+")
    )
    gains = [f"{100 * (own[seed] - control[seed]):.2f}" for seed in sorted(own)]
    assert f"Coupling+ is {gains[0]} above, {gains[1][1:]} and {gains[2][1:]} below it" in text


@pytest.mark.parametrize("part", ["mnist", "cifar10"])
def test_redrawn_splits_have_other_public_rows_for_every_seed(part: str) -> None:
    document = json.loads((coupling_page.RESULTS / f"coupling_{part}_redrawn.json").read_text("utf8"))
    assert document["table"] == coupling.table(document["runs"], coupling.PARTS[part].epochs)
    made = [run for run in document["runs"].values() if not run["held_out"]]
    assert made
    assert all(run["redrawn"] and run["epsilon"] in (None, pytest.approx(2.0, rel=1e-3)) for run in made)


def test_the_resnet_18_has_the_size_of_the_one_for_imagenet_and_ends_in_one_position() -> None:
    model = experiment("coupling_training").network("resnet18", (3, 32, 32), 10)
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_181_642  # 11,689,512 with 1,000 classes
    assert model[:-3](torch.zeros(2, 3, 32, 32)).shape == (2, 512, 1, 1)


def test_a_smaller_delta_costs_more_than_table_6_prints() -> None:
    coupling_table6 = experiment("coupling_table6")
    rows = json.loads((coupling_page.RESULTS / "coupling_table6.json").read_text(encoding="utf8"))["rows"]
    assert all(row["small_delta_epsilon"] > row["printed"] + 0.02 for row in rows)
    again = coupling_table6.row(*coupling_table6.ROWS[1])
    assert again["small_delta_epsilon"] == pytest.approx(rows[1]["small_delta_epsilon"], rel=2e-3)
