"""Transfer with ModelMix and hidden state: the plans have the appendices' settings, and the tables are the runs'."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "experiments"))

import hidden_transfer as hidden  # noqa: E402
import modelmix_transfer as script  # noqa: E402


def test_the_plans_have_the_settings_of_the_appendix() -> None:
    plain, mixed, control = (script.make_plan(arm, 2.0, 0, 50_000) for arm in script.ARMS)
    assert (plain.steps, mixed.steps, control.steps) == (2700, 1500, 1500)
    for plan in (plain, mixed, control):
        assert plan.divisor == 1024
        assert plan.clipping.clip_norm == 0.1
        assert 1.99 < plan.guarantee().epsilon <= 2.0
    assert mixed.method.name == "modelmix"
    widths = mixed.method.tau_over_lr.over(1500)[[0, 499, 501, 1001]]  # type: ignore[attr-defined]
    assert list(widths) == pytest.approx([0.0075, 0.0075, 0.005, 0.0025])
    assert mixed.guarantee().beside["equal_variance_epsilon"] < mixed.guarantee().epsilon


def test_a_row_is_the_mean_over_its_seeds() -> None:
    runs = {
        str(seed): {"arm": "dpsgd", "target_epsilon": 2.0, "seed": seed, "accuracy": accuracy}
        for seed, accuracy in enumerate((0.8, 0.9))
    }
    (row,) = script.table(runs)
    assert (row["mean"], row["seeds"], row["published"]) == (pytest.approx(0.85), 2, 92.7)
    path = ROOT / "experiments" / "results" / "modelmix_transfer.json"
    if path.exists():
        document = json.loads(path.read_text(encoding="utf8"))
        assert document["table"] == script.table(document["runs"])


def test_the_hidden_states_plans_have_the_settings_of_its_appendix() -> None:
    rows = (*hidden.RELATIONS, hidden.DYNAMICS)
    plain, control, dynamics = (hidden.make_plan(row, 0, 50_000, 1280) for row in rows)
    assert (plain.steps, plain.divisor, plain.clipping.clip_norm) == (1953, 1024, 0.1)
    assert (dynamics.steps, dynamics.divisor) == (4800, 1024)
    assert [plan.relation for plan in (plain, control, dynamics)] == ["add-remove", "replace-one", "replace-one"]
    for plan in (plain, control, dynamics):
        assert 1.99 < plan.guarantee().epsilon <= 2.0


def test_the_hidden_states_table_is_that_of_its_runs() -> None:
    path = ROOT / "experiments" / "results" / "hidden_transfer.json"
    if not path.exists():
        pytest.skip("not run here")
    document = json.loads(path.read_text(encoding="utf8"))
    assert document["table"] == hidden.table(document["runs"])
