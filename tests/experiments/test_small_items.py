"""Items of the papers at a small size: the plans are what their scripts say, and tables are those of the runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "experiments"))

import bias_small  # noqa: E402
import coupling_maps  # noqa: E402
import hidden_small  # noqa: E402
import mac_paper  # noqa: E402
import mac_steady  # noqa: E402
import modelmix_table1  # noqa: E402
import modelmix_variants  # noqa: E402
import step_costs  # noqa: E402

RESULTS = ROOT / "experiments" / "results"


def test_truncated_coordinates_take_less_noise_at_the_same_epsilon() -> None:
    plans = {arm: modelmix_variants.make_plan(arm, 0, 60_000) for arm in modelmix_variants.ARMS}
    for arm in modelmix_variants.TRUNCATED:
        assert 0.99 < plans[arm].guarantee().epsilon <= 1.0
    noise = {arm: plan.noise.noise_multiplier for arm, plan in plans.items()}
    assert noise["p = 100"] < noise["p = 25"] < noise["p = 1"] == noise["no mixing"] == noise["mean of two"]
    assert plans["no mixing"].guarantee().epsilon > 1.0  # Fig. 2 is at equal Gaussian noise, not at equal ε


def test_a_steadier_setting_is_judged_on_training_images_that_do_not_train(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    class Made:
        plan = None

    def sets_of(made: Any) -> Any:
        import torch

        images = torch.arange(4649.0)[:, None]
        return mac_steady.Sets((images, images), (images + 10_000, images + 10_000), torch.zeros(4649))

    monkeypatch.setattr(mac_steady, "made", lambda *given: Made())
    monkeypatch.setattr(mac_steady, "sets_of", sets_of)
    monkeypatch.setattr(mac_steady, "trained", lambda how, sets: seen.setdefault("sets", sets) and {})
    mac_steady.held_out("600 steps, lr 0.006", 0)
    trained, judged = seen["sets"].train[0].flatten(), seen["sets"].test[0].flatten()
    assert (len(trained), len(judged)) == (4000, 649)
    assert judged.max() < 10_000  # no test image
    assert not set(trained.tolist()) & set(judged.tolist())


@pytest.mark.parametrize(("epsilon", "here"), [(2.0, "1.100"), (8.0, "4.465")])
def test_the_printed_settings_of_dp_mac_have_the_epsilon_that_the_proof_note_states(epsilon: float, here: str) -> None:
    made, mac, plan = mac_paper.made("mnist", epsilon, 0)
    assert f"{plan.guarantee().epsilon:.3f}" == here  # DP-PCA included
    assert (mac.z.steps, mac.z.start, mac.bounds, made.widths) == (30, "forward", {"gradient": 0.3}, (60, 300, 10))
    assert (plan.steps, plan.expected_batch, plan.records) == (1800, 1000, 60_000)
    page = (ROOT / "docs" / "guarantees" / "dp_mac.md").read_text(encoding="utf8")
    assert f"| {epsilon:g} |" in page


TABLES = [modelmix_table1, modelmix_variants, mac_paper, mac_steady, bias_small, hidden_small]


@pytest.mark.parametrize("script", TABLES, ids=lambda s: s.__name__)
def test_a_table_is_that_of_its_runs(script: Any) -> None:
    path = RESULTS / f"{script.__name__}.json"
    if not path.exists():
        pytest.skip("not run yet")
    document = json.loads(path.read_text(encoding="utf8"))
    assert document["table"] == script.table(document["runs"])


def test_maps_are_those_of_the_result_file_and_the_best_is_their_best() -> None:
    if not coupling_maps.PATH.exists():
        pytest.skip("not run yet")
    document = json.loads(coupling_maps.PATH.read_text(encoding="utf8"))
    for name, text in coupling_maps.draw(document["maps"]).items():
        assert (coupling_maps.FIGURES / name).read_text(encoding="utf8") == text
    for part, rows in document["best"].items():
        key = coupling_maps.PARTS[part].partition("=")[0]
        assert rows == coupling_maps.best(document["maps"][part], key)


def test_the_best_of_a_map_is_the_largest_accuracy_at_each_value() -> None:
    rows = [
        {"settings": {"privacy.epsilon": e, "method.alpha": a, "train.lr": 0.1}, "mean": m}
        for e, a, m in ((2.0, 0.1, 0.5), (2.0, 0.5, 0.7), (8.0, 0.1, 0.8), (8.0, 0.5, None))
    ]
    found = coupling_maps.best({"table": rows}, "privacy.epsilon")
    assert [(row["alpha"], row["mean"]) for row in found] == [(0.5, 0.7), (0.1, 0.8)]


def test_core_hours_are_gradients_times_the_measured_cost() -> None:
    document = json.loads(step_costs.PATH.read_text(encoding="utf8"))
    cost = {row["what"]: row["seconds_per_record"] for row in document["networks"]}
    for row in document["items"]:
        assert row["core_hours"] == pytest.approx(row["gradients"] * cost[row["network"]] / 3600)
    assert {item for item, _, _ in step_costs.ITEMS} == {row["item"] for row in document["items"]}


def test_a_table_has_the_step_size_that_held_out_images_chose() -> None:
    def run(lr: float, accuracy: float, held_out: bool) -> dict[str, Any]:
        return {"part": "records", "column": "kept = 0", "lr": lr, "accuracy": accuracy, "held_out": held_out}

    runs = {"a": run(8.0, 0.7, True), "b": run(8.0, 0.9, False), "c": run(32.0, 0.8, True), "d": run(32.0, 0.6, False)}
    (row,) = bias_small.table(runs)
    assert (row["lr"], row["mean"], row["seeds"]) == (32.0, 0.6, 1)
