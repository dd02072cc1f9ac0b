"""How to train by the last iterate: the rule's numbers, the budget, and what the page says of both ways."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sordino.errors import InputError
from sordino.methods.hidden_state import train_hidden
from sordino.methods.hidden_state.comparison import Problem
from sordino.methods.hidden_state.hidden_rule import (
    RISES,
    expected_losses,
    hidden_plan,
    hidden_proposal,
    losses_of,
)
from sordino.methods.hidden_state.linear_rule import proposal
from sordino.plan.pace import Pace

PROBLEM = Problem(records=4000, features=30, classes=3, epsilon=3.0, delta=1e-5, max_epochs=20)
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("changes", [{}, {"max_epochs": 1}, {"records": 60000}, {"epsilon": 0.3}, {"records": 5}])
def test_the_proposal_keeps_the_budget_the_epochs_and_the_noise_of_scores(changes: dict[str, float]) -> None:
    problem = replace(PROBLEM, **changes)  # type: ignore[arg-type]
    found = hidden_proposal(problem, 30, 3)
    assert problem.epsilon * (1 - 1e-3) <= found.epsilon <= problem.epsilon
    assert found.steps * found.batch <= problem.max_epochs * problem.records
    assert found.rise in RISES
    if found.steps > 1 and problem.max_epochs > 1:
        assert found.score_noise < 2.2


@pytest.mark.parametrize(
    "pace", [Pace(2.0, 1e-3), Pace(2.0, per_record=1e-4), Pace(2.0, 1e-3, 1e-4), Pace(0.2, per_record=1e-4)]
)
def test_the_proposal_keeps_the_time_and_uses_it(pace: Pace) -> None:
    found = hidden_proposal(replace(PROBLEM, pace=pace), 30, 3)
    seconds = found.steps * pace.step(found.batch)
    assert 0.5 * pace.seconds < seconds <= pace.seconds
    assert PROBLEM.epsilon * (1 - 1e-3) <= found.epsilon <= PROBLEM.epsilon


def test_a_long_time_changes_nothing() -> None:
    assert hidden_proposal(replace(PROBLEM, pace=Pace(1e6, 1.0, 1e-6)), 30, 3) == hidden_proposal(PROBLEM, 30, 3)


def test_a_time_that_is_too_short_for_a_step_is_an_error() -> None:
    with pytest.raises(InputError, match="the time is too short"):
        hidden_proposal(replace(PROBLEM, pace=Pace(1.0, 2.0)), 30, 3)


def test_the_plan_is_that_of_the_proposal() -> None:
    found = hidden_proposal(PROBLEM, 30, 3)
    plan = hidden_plan(PROBLEM, 30, 3, found)
    assert plan.noise.noise_multiplier == found.noise_multiplier
    assert plan.guarantee().epsilon == found.epsilon
    assert plan.relation == "replace-one"
    run = plan.method.run(plan)  # type: ignore[attr-defined]
    assert found.lr == run.step_sizes[0]
    variance = sum((16 * lr * std) ** 2 for lr, std in zip(run.step_sizes, run.noise_stds, strict=True))
    assert found.score_noise == pytest.approx(math.sqrt(variance))
    assert found.movement == pytest.approx(found.steps * found.lr * math.sqrt(2) * 0.1 * math.hypot(16, 1) * 16)


def test_the_proposal_trains() -> None:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(3, (6000,), generator=generator)
    inputs = 2.0 * torch.randn(3, 30, generator=generator)[targets] + torch.randn(6000, 30, generator=generator)
    problem = replace(PROBLEM, max_epochs=4)
    plan = hidden_plan(problem, 30, 3, hidden_proposal(problem, 30, 3))
    model = train_hidden(plan, (inputs[:4000], targets[:4000]), progress=False).model
    with torch.no_grad():
        assert float((model(inputs[4000:]).argmax(1) == targets[4000:]).double().mean()) > 0.9


def test_expected_losses_fall_with_movement_and_grow_with_noise() -> None:
    assert expected_losses(50_000, 2.0, last=True) == pytest.approx((0.1 + 16 / 33, 0.92 + 16 / 33))
    assert expected_losses(50_000, 2.0, last=False) == pytest.approx((0.1 + 4 / 33, 0.92 + 4 / 33))
    found = proposal(PROBLEM)
    movement = found.lr * found.clip_norm * 16 * found.steps
    assert losses_of(found) == expected_losses(movement, found.score_noise, last=False)


def test_the_page_says_what_both_ways_reach() -> None:
    document = json.loads((ROOT / "experiments" / "results" / "hidden_rule.json").read_text(encoding="utf8"))
    page = (ROOT / "docs" / "tutorials" / "hidden_state.md").read_text(encoding="utf8")
    assert len(document["runs"]) >= 6
    for name, run in document["runs"].items():
        ways = [run[way] for way in ("composition", "hidden_state")]
        cells = [f"{100 * way['accuracy']:.2f} ± {100 * way['spread']:.2f}" for way in ways]
        costs = ["{:.1f} to {:.1f}".format(*way["expected_losses"]) for way in ways]
        assert f"| {name} | {cells[0]} | {cells[1]} | {costs[0]} | {costs[1]} |" in page
        assert all(len(way["accuracies"]) == 3 for way in ways)
