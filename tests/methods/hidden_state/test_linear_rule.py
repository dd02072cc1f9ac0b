"""How to train a linear classifier by composition: the rule's numbers, and what they gain on rows that it never saw."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import sordino
from sordino.errors import InputError
from sordino.methods.hidden_state.comparison import Problem
from sordino.methods.hidden_state.linear_rule import proposal
from sordino.plan.pace import Pace
from sordino.training.updates import Averaging

PROBLEM = Problem(records=60000, features=784, classes=10, epsilon=3.0, delta=1e-5, max_epochs=60)
ROOT = Path(__file__).parents[3]


def test_the_proposal_keeps_the_budget_and_the_epochs() -> None:
    found = proposal(PROBLEM)
    assert 3.0 - 1e-3 <= found.epsilon <= 3.0
    assert found.steps == 400
    assert found.epochs == pytest.approx(400 * found.batch / 60000)
    assert found.epochs <= 60
    plan = sordino.dpsgd(
        records=60000, expected_batch=found.batch, steps=400, delta=1e-5, noise_multiplier=found.noise_multiplier,
        sampling="poisson", relation="replace-one", clip_norm=found.clip_norm,
    )  # fmt: skip
    assert plan.guarantee().epsilon == pytest.approx(found.epsilon, rel=1e-6)


def test_one_epoch_has_small_batches_and_as_many_steps_as_it_allows() -> None:
    found = proposal(replace(PROBLEM, max_epochs=1))
    assert found.steps == 60000 // found.batch == 256


@pytest.mark.parametrize("pace", [Pace(3.0, 0.01), Pace(3.0, per_record=1e-4)])
def test_a_time_that_is_too_short_for_400_steps_is_kept_and_used(pace: Pace) -> None:
    found = proposal(replace(PROBLEM, pace=pace))
    assert found.steps < 400
    assert found.steps * pace.step(found.batch) <= pace.seconds < (found.steps + 1) * pace.step(found.batch)


def test_a_time_that_is_too_short_for_the_smallest_batch_is_an_error() -> None:
    with pytest.raises(InputError, match="a step of 234 records takes 234 seconds, and the run may take 60"):
        proposal(replace(PROBLEM, pace=Pace(60.0, per_record=1.0)))


def test_a_long_time_changes_nothing() -> None:
    assert proposal(replace(PROBLEM, pace=Pace(1e6, 1.0, 1e-6))) == proposal(PROBLEM)


def test_features_are_scaled_to_one_length_whatever_their_bound() -> None:
    short, long = (proposal(replace(PROBLEM, max_epochs=1, feature_norm=norm)) for norm in (1.0, 28.0))
    assert short.feature_scale == 28 * long.feature_scale == 16
    assert replace(short, feature_scale=long.feature_scale) == long


@pytest.mark.parametrize(("records", "epsilon"), [(60000, 1.0), (4000, 1.0), (4000, 0.3)])
def test_the_step_size_keeps_the_noise_of_scores_bounded(records: int, epsilon: float) -> None:
    found = proposal(replace(PROBLEM, records=records, epsilon=epsilon))
    move = found.lr * found.clip_norm * 16
    assert found.score_noise == pytest.approx(move * found.noise_multiplier * math.sqrt(found.steps) / found.batch)
    assert move == pytest.approx(128) if found.score_noise < 3.99 else found.score_noise == pytest.approx(4)


def test_short_records_train_to_more_than_without_the_rule() -> None:
    """Gaussian classes far from the origin, whose records are at most 1 long: the bias took most of every gradient."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(4, (6000,), generator=generator)
    centres = 0.008 * torch.randn(4, 30, generator=generator) + 0.1
    inputs = centres[targets] + 0.03 * torch.randn(6000, 30, generator=generator)
    problem = Problem(records=4000, features=30, classes=4, epsilon=1.0, delta=1e-5, max_epochs=20)
    rule = proposal(problem)
    assert float(inputs.norm(dim=1).max()) < 1

    def accuracy(scale: float, clip_norm: float, lr: float, average: str) -> float:
        plan = sordino.dpsgd(
            records=4000, expected_batch=rule.batch, steps=rule.steps, epsilon=1.0, delta=1e-5, relation="replace-one",
            clip_norm=clip_norm, insecure_seed=1,
        )  # fmt: skip
        model = torch.nn.Linear(30, 4)
        torch.nn.init.zeros_(model.weight)
        torch.nn.init.zeros_(model.bias)
        settings = sordino.Settings(progress=False, averaging=Averaging(average))  # type: ignore[arg-type]
        rows = scale * inputs[:4000], targets[:4000]
        sordino.train(model, torch.nn.functional.cross_entropy, rows, plan, lr=lr, settings=settings)
        with torch.no_grad():
            return float((model(scale * inputs[4000:]).argmax(1) == targets[4000:]).double().mean())

    ruled = accuracy(rule.feature_scale, rule.clip_norm, rule.lr, rule.average)
    assert ruled > accuracy(1.0, 2.0, 10.0, "none") + 0.02


def test_the_page_says_what_the_proposal_reaches_beside_tuned_settings() -> None:
    document = json.loads((ROOT / "experiments" / "results" / "linear_rule.json").read_text(encoding="utf8"))
    page = (ROOT / "docs" / "tutorials" / "hidden_state.md").read_text(encoding="utf8")
    assert len(document["runs"]) >= 3
    for name, run in document["runs"].items():
        cells = [f"{100 * run[row]['accuracy']:.2f} ± {100 * run[row]['spread']:.2f}" for row in ("proposal", "tuned")]
        assert run["proposal"]["accuracy"] > run["tuned"]["accuracy"] - 0.005
        assert f"| {name} | {cells[0]} | {cells[1]} |" in page
