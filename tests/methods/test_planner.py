"""Which way for a budget: the planner's comparison, and the command."""

from __future__ import annotations

import json

import pytest

import sordino
from sordino.cli import main
from sordino.errors import InputError
from sordino.methods.planner import Budget, compare_batches, compare_ways


def test_many_epochs_at_a_small_epsilon_want_allocation_with_the_noise_that_its_plan_has() -> None:
    found = compare_ways(Budget(400, 8, 20, 0.5, 1e-5))
    poisson, allocated, _ = found["rows"]
    assert found["recommended"] == "allocation"
    assert allocated["noise_multiplier"] < poisson["noise_multiplier"]
    plan = sordino.dpsgd(delta=1e-5, records=400, expected_batch=50, epochs=20, epsilon=0.5, sampling="allocation")
    assert allocated["noise_multiplier"] == pytest.approx(plan.noise.noise_multiplier, rel=1e-3)
    assert allocated["noise_per_step"] == allocated["noise_multiplier"] / 50


def test_one_epoch_at_a_large_epsilon_wants_correlated_noise_with_the_noise_that_its_plan_has() -> None:
    found = compare_ways(Budget(4000, 40, 1, 8.0, 1e-5))
    assert found["recommended"] == "correlated"
    plan = sordino.correlated(delta=1e-5, records=4000, expected_batch=100, epochs=1, epsilon=8.0)
    row = found["rows"][2]
    assert row["noise_multiplier"] == pytest.approx(plan.noise.noise_multiplier, rel=1e-3)
    assert row["groups"] == plan.sampling.batches  # type: ignore[union-attr]


def test_full_batches_need_the_same_noise_with_both_samplers() -> None:
    poisson, allocated, _ = compare_ways(Budget(400, 1, 3, 3.0, 1e-5))["rows"]
    assert poisson["noise_multiplier"] == pytest.approx(allocated["noise_multiplier"])


def test_the_command_compares_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    line = "plan --records 400 --epochs 2 --batches 4 --epsilon 3 --delta 1e-5 --json"
    assert main(line.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recommendation"] == found["ways"]["recommended"]
    assert [row["way"] for row in found["ways"]["rows"]] == ["poisson", "allocation", "correlated"]
    steps = "plan --records 400 --steps 8 --batches 4 --epsilon 3 --delta 1e-5 --json"
    assert main(steps.split()) == 0
    assert json.loads(capsys.readouterr().out) == found
    assert main(["plan", "--records", "400", "--epsilon", "3", "--delta", "1e-5"]) == 2
    assert main(["plan", "--records", "400", "--epsilon", "3", "--delta", "1e-5", "--steps", "3"]) == 2


def test_more_batches_than_records_are_an_error() -> None:
    with pytest.raises(InputError, match="more than the 4 records"):
        compare_batches(records=4, epochs=1, epsilon=1.0, delta=1e-5, batches=[5])
