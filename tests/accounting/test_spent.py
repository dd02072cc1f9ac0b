"""ε of a ledger's entries and along a run."""

from __future__ import annotations

import time
from typing import Any

import pytest

from sordino import Plan
from sordino.errors import InputError
from sordino.plan import Statistic
from sordino.plan.spent import epsilon_curve, from_ledger


def plan(**changes: Any) -> Plan:
    options: dict[str, Any] = {
        "noise_multiplier": 1.2,
        "delta": 1e-5,
        "records": 1000,
        "expected_batch": 50,
        "steps": 60,
    }
    return Plan.dpsgd(**options | changes)


def entries(plan: Plan, steps: int) -> list[dict[str, Any]]:
    """What release() writes for the plan's first steps, and for its statistics."""
    common = {"kind": "release", "relation": plan.relation, "secure": True, "norm": "l2", "coordinates": 7}
    lines = [
        {
            **common,
            "purpose": "gradient",
            "step": step,
            "mechanism": plan.noise.name,
            "noise_multiplier": plan.noise.noise_multiplier,
            "sensitivity": plan.sensitivity,
            "sampling": plan.sampling.to_dict(),
        }
        for step in range(steps)
    ]
    for statistic in plan.statistics:
        lines += [
            {
                **common,
                "purpose": statistic.purpose,
                "step": step,
                "mechanism": statistic.mechanism,
                "noise_multiplier": statistic.noise_multiplier,
                "sensitivity": 1.0,
                "sampling": {"name": "poisson", "sampling_rate": statistic.sampling_rate},
            }
            for step in range(statistic.count)
        ]
    return lines


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sampling": "partition"},
        {"sampling": "without-replacement"},
        {"sampling": "truncated-poisson", "cap": 70},
        {"relation": "replace-one"},
        {"statistics": (Statistic("mean", 5.0), Statistic("histogram", 8.0, sampling_rate=0.05, count=2))},
    ],
)
def test_a_complete_ledger_gives_the_plans_own_epsilon(changes: dict[str, Any]) -> None:
    this = plan(**changes)
    found = from_ledger(this.to_dict(), entries(this, this.steps), this.delta)
    promised = this.guarantee()
    assert found["epsilon"] == pytest.approx(promised.epsilon, rel=1e-9)
    assert (found["relation"], found["accountant"]) == (promised.relation, promised.accountant)
    assert found["releases"] == this.steps + sum(s.count for s in this.statistics)


def test_an_empty_ledger_has_spent_nothing() -> None:
    assert from_ledger(plan().to_dict(), [], 1e-5)["epsilon"] == 0


def test_part_of_a_run_costs_what_the_curve_says() -> None:
    this = plan()
    spent = from_ledger(this.to_dict(), entries(this, 20), this.delta)["epsilon"]
    assert spent == pytest.approx(epsilon_curve(this, [20, 60])[0], rel=1e-3)
    assert 0 < spent < this.guarantee().epsilon


def test_entries_are_believed_not_the_plan() -> None:
    """A release with less noise than planned costs more, whatever the header says."""
    this = plan()
    lines = entries(this, 20)
    lines[3]["noise_multiplier"] = 0.6
    honest = from_ledger(this.to_dict(), entries(this, 20), this.delta)["epsilon"]
    assert from_ledger(this.to_dict(), lines, this.delta)["epsilon"] > honest


def test_steps_of_a_partition_that_were_skipped_do_not_count() -> None:
    """20 batches an epoch: steps 0 and 20 hit the same records, steps 0 and 21 do not."""
    this = plan(sampling="partition")
    lines = entries(this, 60)
    once = from_ledger(this.to_dict(), [lines[0], lines[21]], this.delta)["epsilon"]
    twice = from_ledger(this.to_dict(), [lines[0], lines[20]], this.delta)["epsilon"]
    assert once < twice
    assert once == from_ledger(this.to_dict(), lines[:1], this.delta)["epsilon"]


def test_mixed_relations_have_no_epsilon() -> None:
    this = plan()
    lines = entries(this, 3)
    lines[1]["relation"] = "replace-one"
    with pytest.raises(InputError, match="mixes"):
        from_ledger(this.to_dict(), lines, 1e-5)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("noise_multiplier", 0.0, "noise_multiplier"),
        ("sampling", None, "no sampling"),
        ("sampling", {"name": "shuffle"}, "sampling"),
        ("mechanism", "uniform", "mechanism"),
        ("relation", None, "relation"),
    ],
)
def test_damaged_entries_are_input_errors(key: str, value: object, words: str) -> None:
    this = plan()
    lines = entries(this, 3)
    lines[2][key] = value
    with pytest.raises(InputError, match=words):
        from_ledger(this.to_dict(), lines, 1e-5)


def test_the_curve_rises_to_the_plans_epsilon_quickly() -> None:
    this = plan(records=60_000, expected_batch=600, steps=3000)
    points = list(range(100, 3001, 100))
    begin = time.process_time()
    curve = epsilon_curve(this, points)
    assert time.process_time() - begin < 8
    assert curve == sorted(curve)
    assert len(curve) == 30
    assert curve[-1] == this.guarantee().epsilon


def test_a_long_curve_is_bounded_by_its_next_point_and_keeps_the_callers_order() -> None:
    this = plan(steps=200)
    curve = epsilon_curve(this, range(200, 0, -1))
    assert curve == sorted(curve, reverse=True)
    assert curve[0] == this.guarantee().epsilon
    exact = epsilon_curve(this, [37])[0]
    assert curve[200 - 37] >= exact * (1 - 1e-3)
    assert epsilon_curve(this, []) == []
