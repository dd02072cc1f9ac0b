"""Audits of correlated noise: below the claim, and broken runs are caught."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy as mean_cross_entropy

import sordino
from small_audits import small_data, small_model
from sordino.audit import audit_plan
from sordino.audit.attack_noise import tests as noise_tests_of
from sordino.audit.noise_check import worst
from sordino.audit.sampling_check import sampling_findings
from sordino.audit.tap import Call, watched
from sordino.methods.correlated.sensitivity import column_norm, sensitivity
from sordino.plan import Plan
from sordino.release import noise as released
from sordino.sampling import Cyclic


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return mean_cross_entropy(outputs, targets, reduction="none")


def plan_of(**changes: Any) -> Plan:
    options: dict[str, Any] = {
        "records": 64,
        "expected_batch": 16,
        "steps": 16,
        "epsilon": 3.0,
        "delta": 1e-4,
    } | changes
    return sordino.correlated(**options)


def audited(plan: Plan, **options: Any) -> Any:
    return audit_plan(plan, small_model(), cross_entropy, small_data(), canaries=7000, seed=1, **options)


FIXED: dict[str, Any] = {"strategy": "inverse-root", "bands": 4, "groups": 4}
SAMPLED: dict[str, Any] = {"strategy": "banded-lambda", "value": 0.5, "bands": 2, "groups": 2}


def test_an_audit_of_a_fixed_order_stays_below_its_claim() -> None:
    found = audited(plan_of(**FIXED))
    assert found.holds
    assert found.epsilon_lower > 1.0, "it sees something"


def test_half_the_noise_is_caught() -> None:
    assert not audited(plan_of(**FIXED), noise_scale=0.5).holds


def test_a_sensitivity_of_one_participation_is_caught() -> None:
    plan = plan_of(**FIXED)
    strategy = plan.method.strategy  # type: ignore[attr-defined]
    once = column_norm(strategy, steps=16) / sensitivity(strategy, steps=16, separation=4)
    assert once < 0.5
    assert not audited(plan, noise_scale=once).holds


def test_sampled_groups_stay_below_their_claim_and_half_the_noise_does_not() -> None:
    plan = plan_of(**SAMPLED)
    assert audited(plan).holds
    assert not audited(plan, noise_scale=0.5).holds


def calls_of(plan: Plan) -> list[Call]:
    with watched() as seen:
        sordino.train(
            small_model(), cross_entropy, small_data(), plan, lr=0.1, settings=sordino.Settings(progress=False)
        )
    return seen.calls


def test_the_attack_takes_off_earlier_noise_and_finds_what_is_left_as_it_should_be() -> None:
    found, count = noise_tests_of(calls_of(plan_of(**FIXED, noise_multiplier=1.0, epsilon=None)))
    assert count == 16 * 7850
    assert worst(found)[1] > 1e-6


def test_the_attack_finds_fresh_noise_in_the_place_of_earlier_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    original = released._add_mixture

    def fresh(parts: Any, out: Any, earlier: Any, *rest: Any) -> None:
        original(parts, out, {}, *rest)

    monkeypatch.setattr(released, "_add_mixture", fresh)
    name, p = worst(noise_tests_of(calls_of(plan_of(**FIXED, noise_multiplier=1.0, epsilon=None)))[0])
    assert p < 1e-6, name


def test_the_attack_finds_halved_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    original = released.rounded_mixture

    def halved(values: Any, out: Any, terms: Any, scale: float, *rest: Any) -> None:
        original(values, out, terms, scale / 2, *rest)

    monkeypatch.setattr(released, "rounded_mixture", halved)
    name, p = worst(noise_tests_of(calls_of(plan_of(**FIXED, noise_multiplier=1.0, epsilon=None)))[0])
    assert p < 1e-6, name


def test_the_groups_are_what_is_claimed_and_records_of_two_groups_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(**FIXED, records=800, expected_batch=200)
    assert sampling_findings(plan, seed=1)[1] == []
    assert sampling_findings(plan_of(**SAMPLED, records=800, expected_batch=200), seed=1)[1] == []
    from sordino import sampling

    def anew(cyclic: Cyclic, records: int, source: Any, start: int) -> Any:
        return sampling._allocation(cyclic.batches, records, source, start)

    monkeypatch.setattr(sampling, "_cyclic", anew)
    assert sampling_findings(plan, seed=1)[1] == ["a record participates in the steps of two groups"]
