"""An audit of hidden-state plans: what *only the last iterate* reveals about canaries, in one run.

Canary j owns feature j. Its record has the features ±L·e_j, by a fair coin (replace-one: one for the other), and one of
the labels in turn, so it changes only column j of the weights (and the bias, which all labels change alike). With a
loss whose gradient is near its bound the column drifts by ±η·G·L/b in each step that uses the canary, and shrinks by
1 − ηλ in all: this is the worst case that the guarantee is calibrated to, up to the loss's own direction. All columns
get the same noise. The other records have zero features. The test is valid for any canaries, because the claim must
hold for *every* dataset and every auditor.

The auditor sees only the published weights, scores each canary by its column's projection onto the direction of its
first gradient, and guesses the coins of the most extreme ones, whose number was fixed before. Correct guesses become a
bound through the f-DP test of `bounds` against the plan's privacy profile. If the regulariser has no effect, or there
is too little noise, the columns drift further than the profile allows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sordino.audit.bounds import Curve, ProfileCurve, check_confidence, one_run_epsilon, rejects
from sordino.audit.claims import claim_family, largest_rejected
from sordino.audit.one_run import AuditResult
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
_SHARE = 0.05  # share of the canaries that are guessed to be in; the same share is guessed to be out
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
    """Runs the plan (or its first `steps` steps) on canaries and returns the verdict on its claim.

    `noise_scale` and `tamper` change the run but not the claim: they test the audit, not the plan.
    """
    check_confidence(confidence)
    method = _method(plan)
    count = min(DEFAULT_CANARIES, method.features, plan.records) if canaries is None else canaries
    if not 20 <= count <= min(method.features, plan.records):
        raise InputError(
            f"canaries = {count}: an audit of the last iterate needs 20 or more, each with a feature and a record; "
            f"the plan has {method.features} features and {plan.records} records"
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
    """One run with `release()`; each canary's score from the last iterate only."""
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
    """Labels in turn; for regression with one output, the target 1."""
    if method.loss.outputs == 1 and not isinstance(method.loss, OneVsRest):
        return torch.ones(records, dtype=torch.float64)
    return torch.arange(records) % max(2, method.loss.outputs)
