"""An audit of hidden-state plans: what the *last iterate alone* gives away about canaries, in one run.

Canary j owns feature j. Its record has the features ±L·e_j, by a fair coin (replace-one: the one for the other), and
one of the labels in turn, so that all it ever moves is column j of the weights (and the bias, which all labels move
alike). With a loss whose gradient is near its bound the column drifts by ±η·G·L/b in each step that uses the canary,
and shrinks by 1 − ηλ in all: this is the worst case that the guarantee is calibrated to, up to the loss's own
direction. All columns get the same noise. The other records have zero features. That the claim holds for *every*
dataset and every auditor is what makes the test valid, whatever the canaries are.

The auditor sees the published weights and nothing else, scores each canary by its column's projection on the direction
of its first gradient, and guesses the coins of the most extreme ones, as many as were fixed before. Right guesses
become a bound through the f-DP test of `bounds` against the plan's own privacy profile. A regulariser that does not
act, or too little noise, makes the columns drift further than the profile allows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sordino.audit.bounds import Curve, ProfileCurve, check_confidence, one_run_epsilon, rejects
from sordino.audit.one_run import AuditResult, claim_family, largest_rejected
from sordino.errors import InputError
from sordino.methods.hidden_state.losses import OneVsRest
from sordino.methods.hidden_state.training import Records, descend
from sordino.plan.core import Plan
from sordino.randomness import RandomSource
from sordino.release.ledger import Ledger

if TYPE_CHECKING:
    from sordino.methods.hidden_state.method import HiddenState

BOUND = "f-DP, one run, last iterate only"
DEFAULT_CANARIES = 2000
_SHARE = 0.05  # of the canaries, guessed to be in; and as many to be out
_DELTAS = (1e-6, 1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.2, 0.4)


@dataclass(frozen=True, eq=False)
class FeatureCanaries:
    """One canary for each of the first features."""

    features: Tensor  # (records, features)
    labels: Tensor  # (records,)
    coins: Tensor  # (canaries,) bool


def audit_last_iterate(
    plan: Plan,
    *,
    canaries: int | None = None,
    steps: int | None = None,
    confidence: float = 0.95,
    seed: int | None = None,
    noise_scale: float = 1.0,
    tamper: Callable[[Plan], Plan] | None = None,
) -> AuditResult:
    """Runs the plan (or its first `steps` steps' worth of schedule) on canaries; the verdict on its claim.

    `noise_scale` and `tamper` break the run behind the accountant's back: they test the audit, not the plan.
    """
    check_confidence(confidence)
    method = _method(plan)
    count = min(DEFAULT_CANARIES, method.features, plan.records) if canaries is None else canaries
    if not 20 <= count <= min(method.features, plan.records):
        raise InputError(
            f"canaries = {count}: an audit of the last iterate needs at least 20, a feature and a record for each: the "
            f"plan has {method.features} features and {plan.records} records"
        )
    claim = replace(plan, steps=steps or plan.steps, statistics=(), insecure_seed=None)
    source = RandomSource.from_os() if seed is None else RandomSource.seeded(seed)
    marked = make_feature_canaries(claim, count, source)
    run = replace(claim.with_noise(claim.noise.noise_multiplier * noise_scale), insecure_seed=seed)
    scores = play_last_iterate(tamper(run) if tamper else run, marked, source)
    return judge_last_iterate(claim, scores, marked.coins, confidence)


def make_feature_canaries(plan: Plan, count: int, source: RandomSource) -> FeatureCanaries:
    """`count` canaries as the first records, zero features for the others; labels in turn."""
    method = _method(plan)
    coins = torch.from_numpy(source.stream("audit/coins", 0).bernoulli(0.5, count))
    features = torch.zeros(plan.records, method.features)
    features[torch.arange(count), torch.arange(count)] = method.feature_norm * (2.0 * coins - 1.0).float()
    return FeatureCanaries(features, _targets(method, plan.records), coins)


def play_last_iterate(plan: Plan, canaries: FeatureCanaries, source: RandomSource) -> Tensor:
    """One run through `release()`; each canary's score from the last iterate alone."""
    method, count = _method(plan), len(canaries.coins)
    records = Records.of((canaries.features, canaries.labels), method)
    with Ledger.open(None, plan.to_dict()) as ledger:
        iterate = descend(plan, records, source=source, ledger=ledger)
    start = torch.zeros(count, method.loss.outputs, dtype=torch.float64)
    pull = method.loss.residual(start, canaries.labels[:count])
    return -(iterate[:, :count].T * pull).sum(1)


def judge_last_iterate(claim: Plan, scores: Tensor, coins: Tensor, confidence: float) -> AuditResult:
    """The verdict on a claim from the scores of one run."""
    count, level = len(coins), 1.0 - confidence
    side = max(1, round(_SHARE * count))
    order = torch.argsort(scores)
    correct = int(coins[order[-side:]].sum()) + int((~coins[order[:side]]).sum())

    def rejected(curve: Curve) -> bool:
        return rejects(curve, correct, 2 * side, count, level)

    lower, claimed = largest_rejected(claim, rejected, claim_family(claim, profile)), claim.guarantee().epsilon
    return AuditResult(
        epsilon_lower=lower,
        epsilon_claimed=claimed,
        delta=claim.delta,
        confidence=confidence,
        canaries=count,
        guesses=2 * side,
        correct=correct,
        steps=claim.steps,
        relation=claim.relation,
        sampler=claim.sampling.name,
        holds=lower <= claimed,
        bound=BOUND,
        epsilon_lower_any=lower,
        epsilon_lower_point=one_run_epsilon(correct, 2 * side, count, claim.delta, confidence),
    )


def profile(plan: Plan) -> ProfileCurve:
    """The plan's privacy profile as a trade-off curve: ε at some values of δ, each from its accountant."""
    return ProfileCurve(tuple(plan.method.account(plan, delta).epsilon for delta in _DELTAS), _DELTAS)


def _method(plan: Plan) -> HiddenState:
    if plan.method.name != "hidden-state":
        raise InputError(f"this audit is for hidden-state plans; the plan's method is {plan.method.name!r}")
    return plan.method  # type: ignore[return-value]


def _targets(method: HiddenState, records: int) -> Tensor:
    """Labels in turn; for the regression of one number, the target 1."""
    if method.loss.outputs == 1 and not isinstance(method.loss, OneVsRest):
        return torch.ones(records, dtype=torch.float64)
    return torch.arange(records) % max(2, method.loss.outputs)
