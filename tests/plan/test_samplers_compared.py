"""Which sampler for a budget: the planner's comparison, and the command."""

from __future__ import annotations

import json

import pytest

import sordino
from sordino.cli import main
from sordino.errors import InputError
from sordino.plan.samplers import compare_samplers


def test_allocation_is_recommended_with_the_noise_that_its_plan_has() -> None:
    found = compare_samplers(records=400, epochs=3, epsilon=3.0, delta=1e-5, batches=[8])
    poisson, allocated = found["rows"]
    assert found["recommended"] == "allocation"
    assert allocated["noise_multiplier"] < poisson["noise_multiplier"]
    plan = sordino.dpsgd(delta=1e-5, records=400, expected_batch=50, epochs=3, epsilon=3.0, sampling="allocation")
    assert allocated["noise_multiplier"] == pytest.approx(plan.noise.noise_multiplier, rel=1e-3)
    assert allocated["noise_per_step"] == allocated["noise_multiplier"] / 50
    assert max(row["epsilon"] for row in found["rows"]) <= 3.0


def test_full_batches_are_the_same_for_both() -> None:
    found = compare_samplers(records=400, epochs=3, epsilon=3.0, delta=1e-5, batches=[1])
    assert found["recommended"] == "poisson"


def test_the_command_compares_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    line = "plan --records 400 --epochs 2 --batches 4 --epsilon 3 --delta 1e-5 --json"
    assert main(line.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recommendation"] == "allocation"
    assert "more noise" in found["samplers"]["why"]
    assert main(["plan", "--records", "400", "--epsilon", "3", "--delta", "1e-5"]) == 2


def test_more_batches_than_records_are_an_error() -> None:
    with pytest.raises(InputError, match="more than the 4 records"):
        compare_samplers(records=4, epochs=1, epsilon=1.0, delta=1e-5, batches=[5])
