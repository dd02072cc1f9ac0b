"""Rows are sampled, users are protected: at most k rows of a user take part, in tables, images and texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sordino
from small_audits import small_data, small_model
from sordino.accounting.account import account
from sordino.accounting.events import compose_events, grouped
from sordino.audit import audit_plan
from sordino.errors import InputError, Refused
from sordino.plan import Plan
from sordino.plan.spent import from_ledger
from sordino.records.reading import rows_of_users, users_of
from sordino.release import read_ledger

LOSS = torch.nn.CrossEntropyLoss(reduction="none")
USERS = [f"user {i % 7}" for i in range(60)]  # four users have nine rows, three have eight
KEPT = 7 * 3


def plan_of(**changes: Any) -> Plan:
    options: dict[str, Any] = {
        "unit": "user", "examples_per_user": 3, "records": KEPT, "expected_batch": 7, "steps": 4,
        "noise_multiplier": 2.0, "delta": 1e-3,
    }  # fmt: skip
    return sordino.dpsgd(**options | changes)


def test_the_plan_and_the_ledger_pay_for_the_mixture_over_a_users_rows(tmp_path: Path) -> None:
    plan = plan_of()
    alone = account(compose_events([(grouped(2.0, 1 / 3, 3), 4)]), 1e-3)
    assert plan.guarantee().epsilon == pytest.approx(alone.epsilon)
    assert plan.guarantee().epsilon > plan_of(examples_per_user=1).guarantee().epsilon
    assert Plan.from_dict(plan.to_dict()) == plan
    data = torch.randn(60, 4), torch.arange(60) % 2
    settings = sordino.Settings(progress=False)
    result = sordino.train(
        torch.nn.Linear(4, 2), LOSS, data, plan, lr=0.1, users=USERS, out=tmp_path, settings=settings
    )
    assert result.guarantee is not None
    assert (result.guarantee.unit, "2407.07737" in result.guarantee.theorem) == ("user", True)
    header, entries = read_ledger(tmp_path / "ledger.jsonl")
    assert from_ledger(header, entries, 1e-3)["epsilon"] == pytest.approx(alone.epsilon)


class Words(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = torch.nn.Embedding(11, 5), torch.nn.Linear(5, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(tokens).mean(1))


IMAGES = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(2 * 36, 2))


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (torch.nn.Linear(4, 2), torch.randn(60, 4)),
        (IMAGES, torch.randn(60, 1, 8, 8)),
        (Words(), torch.randint(0, 11, (60, 6))),
    ],
    ids=["table", "images", "texts"],
)
@pytest.mark.parametrize("rows", [{"examples_per_user": 3}, {"rows_per_user": 3, "records": 7, "expected_batch": 3}])
def test_tables_images_and_texts_are_trained_with_users(
    model: torch.nn.Module, inputs: torch.Tensor, rows: dict[str, int]
) -> None:
    plan = plan_of(**{"examples_per_user": None} | rows)
    settings = sordino.Settings(progress=False)
    result = sordino.train(model, LOSS, (inputs, torch.arange(60) % 2), plan, lr=0.1, users=USERS, settings=settings)
    assert result.guarantee is not None
    assert result.guarantee.unit == "user"


def test_a_user_keeps_the_same_rows_whoever_else_is_there() -> None:
    inputs, targets = torch.arange(60.0)[:, None], torch.zeros(60)
    whole = rows_of_users((inputs, targets), USERS, 3)
    kept = {float(x) for x in whole.rows(torch.arange(len(whole))).inputs.flatten()}
    assert len(whole) == KEPT
    others = [i for i in range(60) if USERS[i] != "user 2"]
    less = rows_of_users((inputs[others], targets[others]), [USERS[i] for i in others], 3)
    left = {float(x) for x in less.rows(torch.arange(len(less))).inputs.flatten()}
    assert left == {x for x in kept if USERS[int(x)] != "user 2"}
    assert len(kept - left) == 3


def test_what_is_not_accounted_is_refused() -> None:
    for changes in ({"sampling": "allocation"}, {"relation": "replace-one"}):
        with pytest.raises(Refused, match="examples_per_user"):
            plan_of(**changes)
    for wrong in ({"unit": "record"}, {"rows_per_user": 2}):
        with pytest.raises(InputError):
            plan_of(**wrong)
    data = torch.randn(60, 4), torch.arange(60) % 2
    with pytest.raises(Refused, match="the rows have no owners"):
        sordino.train(torch.nn.Linear(4, 2), LOSS, data, plan_of(), lr=0.1)


def test_an_audit_catches_users_that_are_counted_as_rows() -> None:
    shared: dict[str, Any] = {
        "records": 64, "expected_batch": 32, "steps": 8, "delta": 1e-4, "noise_multiplier": 2.0,
    }  # fmt: skip
    options: dict[str, Any] = {"canaries": 5000, "seed": 3, "rows_per_canary": 4}
    counted = audit_plan(sordino.dpsgd(**shared), small_model(), LOSS, small_data(), **options)
    assert not counted.holds, "the claim is about a row, and somebody has four"
    users = sordino.dpsgd(**shared, unit="user", examples_per_user=4)
    # `epsilon_lower` is about mechanisms of the plan's kind, which this is not; these two are below the truth here
    assert counted.epsilon_lower_point <= counted.epsilon_lower_any <= users.guarantee().epsilon
    assert counted.epsilon_claimed < counted.epsilon_lower_any <= counted.epsilon_lower


def test_canaries_are_users_where_the_plan_protects_users_and_half_the_noise_is_caught() -> None:
    plan = sordino.dpsgd(
        records=64, expected_batch=32, steps=8, delta=1e-4, epsilon=3.0, unit="user", examples_per_user=4
    )
    arguments = plan, small_model(), LOSS, small_data()
    honest = audit_plan(*arguments, canaries=1900, seed=3)
    assert honest.holds
    assert honest.epsilon_lower > 1.0, "four rows of each canary are seen"
    assert not audit_plan(*arguments, canaries=1900, seed=3, noise_scale=0.5).holds


def hand_written(plan: Plan, dataset: Any, records: int) -> None:
    gradients = sordino.record_gradients(torch.nn.Linear(4, 2), LOSS, dataset, plan.clipping)
    with sordino.Ledger.open(None, plan.to_dict()) as ledger:
        next(sordino.private_steps(plan, gradients, records=records, source=plan.source(), ledger=ledger))


def test_rows_are_not_taken_for_users_by_any_way_of_training() -> None:
    """`private_steps` once protected rows under a sentence about users, and `train` rows that came as RowsOfUsers."""
    data = torch.randn(60, 4), torch.arange(60) % 2
    drawn = plan_of(examples_per_user=None, records=60, expected_batch=20)
    for dataset, plan in ((data, drawn), (data, plan_of()), (rows_of_users(data, USERS, 3), drawn)):
        with pytest.raises(Refused, match="protects users"):
            hand_written(plan, dataset, plan.records)
    with pytest.raises(Refused, match="protects users"):
        hand_written(plan_of(), users_of(data, USERS, None), KEPT)
    with pytest.raises(Refused, match="protects users"):
        hand_written(plan_of(examples_per_user=2), rows_of_users(data, USERS, 3), KEPT)
    with pytest.raises(Refused, match="the rows have no owners"):
        sordino.train(torch.nn.Linear(4, 2), LOSS, rows_of_users(data, USERS, 3), drawn, lr=0.1)
    few = plan_of(examples_per_user=None, records=7, expected_batch=3)
    hand_written(few, users_of(data, USERS, None), 7)
    hand_written(plan_of(), rows_of_users(data, USERS, 3), KEPT)


def test_ids_that_are_masked_are_missing() -> None:
    data = torch.randn(4, 4), torch.arange(4) % 2
    with pytest.raises(InputError, match="missing"):
        users_of(data, np.ma.array([1, 1, 2, 2], mask=[0, 1, 0, 0]), None)
