"""Audits of self-augmentation and of both momenta: below their claims, and a bound that is broken is caught."""

from __future__ import annotations

from typing import Any

import pytest
from torch.nn.functional import cross_entropy

from small_audits import small_data, small_model, small_plan
from sordino.audit import AuditResult, audit_plan
from sordino.audit.faults import iterates_clipped_apart, views_clipped_apart
from sordino.audit.record_canaries import audit_record_vectors
from sordino.errors import InputError
from sordino.plan import Plan
from sordino.plan.contribution import Augmentation, InnerMomentum, RecordMomentum

HEIGHT, WIDTH = 30, 40
INNER, VIEWS = InnerMomentum(2, 0.5), Augmentation(views=4, erase=0.5, mixup=0.3)


def plan_of(**parts: Any) -> Plan:
    count = HEIGHT * WIDTH
    return Plan.dpsgd(epsilon=3.0, delta=1e-5, records=count, expected_batch=count, steps=6, **parts)


def audit(plan: Plan, **options: Any) -> AuditResult:
    return audit_record_vectors(plan, height=HEIGHT, width=WIDTH, seed=0, **options)


@pytest.mark.parametrize(
    "parts", [{"inner": INNER}, {"augmentation": VIEWS}, {"record_momentum": RecordMomentum(0.9)}], ids=str
)
def test_they_stay_below_their_claim_and_are_put_to_the_test(parts: dict[str, Any]) -> None:
    found = audit(plan_of(**parts))
    assert found.holds
    assert 1.0 < found.epsilon_lower <= found.epsilon_claimed == pytest.approx(3.0, abs=1e-3)


@pytest.mark.parametrize(
    ("parts", "fault"),
    [({"inner": INNER}, iterates_clipped_apart), ({"augmentation": VIEWS}, views_clipped_apart)],
    ids=["iterates", "views"],
)
def test_views_or_iterates_that_are_clipped_apart_and_summed_are_caught(parts: dict[str, Any], fault: Any) -> None:
    assert not audit(plan_of(**parts), gradients=fault).holds


def test_canaries_are_vectors_in_the_audit_of_any_model_and_it_takes_past_iterates_along() -> None:
    plan = small_plan(inner=INNER)
    found = audit_plan(plan, small_model(), cross_entropy, small_data(), seed=0)
    assert found.holds
    assert found.epsilon_lower > 0.3 * found.epsilon_claimed
    assert not audit_plan(plan, small_model(), cross_entropy, small_data(), seed=0, noise_scale=0.5).holds


def test_views_that_move_a_canary_to_another_s_place_are_refused() -> None:
    with pytest.raises(InputError, match="do not move pixels"):
        audit(plan_of(augmentation=Augmentation(views=2, flip=True)))
