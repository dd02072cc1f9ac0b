"""The pages say what the result file says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import experiment

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "experiments" / "results" / "mac.json"


def test_the_pages_are_filled_from_the_result_file() -> None:
    module = experiment("mac_page")
    found = module.blocks(json.loads(RESULTS.read_text()))
    for path in module.PAGES:
        text = path.read_text("utf8")
        assert module.filled(text, found) == text, f"{path.name} is not up to date: python experiments/mac_page.py"


@pytest.mark.parametrize(("epsilon", "least"), [("0.5", 0.88), ("2", 0.94), ("8", 0.96)])
def test_mnist_reaches_what_was_asked_for(epsilon: str, least: float) -> None:
    document = json.loads(RESULTS.read_text())
    runs = [r for name, r in document["mnist"].items() if name.startswith(f"eps={epsilon},") and "dp-mac" in name]
    assert len({r["seed"] for r in runs}) == 3
    assert all(r["epsilon"] <= float(epsilon) and r["relation"] == "add-remove" and r["delta"] == 1e-5 for r in runs)
    assert min(r["test_accuracy"] for r in runs) >= least


def test_mac_without_privacy_is_within_a_point_of_back_propagation() -> None:
    cells = json.loads(RESULTS.read_text())["summary"]["not_private"]
    best = max(cells[f"mnist, mac, {how}"]["mean"] for how in ("paper's Z-steps", "backward start"))
    assert best >= cells["mnist, back-propagation"]["mean"] - 0.01


def test_the_audits_stay_below_the_claim_and_catch_half_the_noise() -> None:
    audits = json.loads(RESULTS.read_text())["summary"]["audit"]
    assert audits["1.0"]["claims_broken"] == 0
    assert audits["0.5"]["claims_broken"] == audits["0.5"]["of"] >= 6


def test_the_drawn_figures_are_those_of_the_result_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    import mac_figures

    monkeypatch.setattr("sys.argv", ["mac_figures.py", "--check"])
    assert mac_figures.main() == 0, "run python experiments/mac_figures.py"
    drawn = json.loads((RESULTS.parent / "mac_fig4.json").read_text())["figure_4"]
    again = mac_figures.fourth()
    for name, found in drawn.items():
        assert found["objective"] == pytest.approx(again[name]["objective"], abs=1e-9)
        assert found["second order"] == pytest.approx(again[name]["second order"], abs=1e-9)
        zero = found["weight"].index(0.0)
        assert found["second order"][zero] == pytest.approx(found["objective"][zero])
    assert min(drawn["input layer"]["second order"]) < -0.005
    assert min(drawn["input layer"]["objective"]) >= 0
