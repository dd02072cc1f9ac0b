"""The last-iterate audit stays below a true claim, and catches a regulariser that does not act and halved noise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sordino.audit.one_run import AuditResult
from sordino.errors import ClaimBroken, InputError
from sordino.methods.hidden_state import HiddenState, Huber, Loss, OneVsRest, Softmax, plan
from sordino.methods.hidden_state.audit import audit_last_iterate
from sordino.methods.hidden_state.schedules import closing
from sordino.plan import Plan


def contracting_plan(loss: Loss | None = None, **changes: object) -> Plan:
    """Steps shrink by a tenth, so that the claim is soon far below composition; as many records as features."""
    loss = loss or OneVsRest(1, cap=0.05)
    lr = 1.0 / loss.curvature
    options: dict[str, object] = {
        "loss": loss,
        "features": 800,
        "records": 800,
        "batch": 800,
        "sampling": "full",
        "epochs": 80,
        "regularisation": 0.1 / lr,
        "lr": lr,
        "bias": 0.0,
        "epsilon": 4.0,
        "delta": 1e-5,
    }
    return plan(**options | changes)  # type: ignore[arg-type]


def without_regulariser(run: Plan) -> Plan:
    """What a program does in which the regulariser's gradient is overwritten: everything else is as planned."""
    assert isinstance(run.method, HiddenState)
    return replace(run, method=replace(run.method, regularisation=1e-9))


PLANS = [
    contracting_plan(),
    contracting_plan(batch=200, sampling="partition", steps=100, epochs=None, noise_factors=closing(100, 1.0, 2.0)),
    contracting_plan(Huber(1, bound=0.2)),
    contracting_plan(Softmax(4, cap=0.05), bias=0.3, lr=8.0, regularisation=0.0125),
]


@pytest.mark.parametrize("made", PLANS, ids=["full", "partition", "huber", "softmax"])
def test_a_true_claim_stands_and_the_bound_is_not_far_below_it(made: Plan) -> None:
    found = audit_last_iterate(made, seed=0)
    assert found.holds, found.sentence
    assert found.epsilon_lower <= found.epsilon_claimed
    assert found.epsilon_lower > 0.2 * found.epsilon_claimed, found.sentence


def test_the_plan_counts_on_contraction() -> None:
    claimed = contracting_plan().guarantee()
    assert claimed.epsilon < 0.6 * claimed.beside["epsilon_if_every_iterate_were_seen"]


@pytest.mark.parametrize("made", PLANS[:2], ids=["full", "partition"])
def test_a_regulariser_that_does_not_act_is_caught(made: Plan) -> None:
    found = audit_last_iterate(made, seed=1, tamper=without_regulariser)
    assert not found.holds, found.sentence
    assert found.epsilon_lower > found.epsilon_claimed
    with pytest.raises(ClaimBroken):
        found.check()


@pytest.mark.parametrize("made", PLANS[:3], ids=["full", "partition", "huber"])
def test_halved_noise_is_caught(made: Plan) -> None:
    assert not audit_last_iterate(made, seed=2, noise_scale=0.5).holds


def test_a_true_claim_is_hardly_ever_broken() -> None:
    results: list[AuditResult] = [audit_last_iterate(PLANS[0], seed=seed) for seed in range(10, 15)]
    assert sum(not found.holds for found in results) <= 1


def test_what_can_t_be_audited() -> None:
    with pytest.raises(InputError, match="canaries"):
        audit_last_iterate(PLANS[0], canaries=801)
    with pytest.raises(InputError, match="hidden-state"):
        audit_last_iterate(Plan.dpsgd(delta=1e-5, records=100, expected_batch=10, steps=3, epsilon=3))
