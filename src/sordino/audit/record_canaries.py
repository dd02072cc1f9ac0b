"""Canaries that are records: they pass through views, iterates, clipping and noise like any other record.

The canaries of `sordino.audit.one_run` are vectors that are clipped already, so they detect noise that is too small but
not clipping that fails. Here a canary is a picture with one bright pixel, the model is one linear map and the loss is
linear in its output, so the canary's gradient is that pixel, at every iterate, and its clipped vector is ± clip_norm on
one coordinate of its own. If a mechanism clips each view, or each iterate, before it sums, a canary contributes more
than that, and the guesses show it.

Formal guarantee, as for `audit_plan`: if what is run has the plan's privacy profile, `holds` is False with
probability at most 1 − confidence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sordino.audit.bounds import check_confidence
from sordino.audit.canaries import Canaries
from sordino.audit.claims import claim_family
from sordino.audit.guesses import choose_guesses
from sordino.audit.one_run import AuditResult, judge
from sordino.audit.scores import Scorer
from sordino.audit.updates import Trail
from sordino.errors import InputError
from sordino.plan import Plan
from sordino.randomness import RandomSource
from sordino.records.gradients import GradientSum, plan_gradients
from sordino.release.ledger import Ledger
from sordino.training.steps import private_steps

BRIGHT = 8.0
"""A pixel's value over the clip norm: its gradient is clipped even if seven of eight views have erased it."""

Gradients = Callable[..., GradientSum]
"""As `plan_gradients`: (plan, model, loss, dataset, past=…) → gradient sum."""


def audit_record_vectors(
    plan: Plan,
    *,
    height: int = 40,
    width: int = 50,
    lr: float = 0.1,
    confidence: float = 0.95,
    seed: int | None = None,
    gradients: Gradients = plan_gradients,
) -> AuditResult:
    """Runs the plan with height × width canaries and guesses which of them are records, by fair coins.

    Views must not move pixels (crop, flip) or change words: use erase and mixup. There are no other records: the
    auditor would subtract their sums. `gradients` replaces the plan's own gradient sum: it tests the audit.

    Raises:
        InputError: the views move pixels, or the plan does not use add-remove and l2 clipping.
    """
    check_confidence(confidence)
    augmentation = plan.contribution.augmentation
    if augmentation is not None and (augmentation.crop or augmentation.flip or augmentation.word_dropout):
        raise InputError("the audit's canaries are single pixels: audit views that do not move pixels (erase, mixup)")
    if plan.relation != "add-remove" or plan.clipping.norm != "l2":
        raise InputError("canaries that are records need add-remove and l2 clipping: use audit_plan")
    source = RandomSource.from_os() if seed is None else RandomSource.seeded(seed)
    canaries = _marked(plan, height * width, source)
    members = torch.nonzero(canaries.coins).flatten()
    claim = replace(plan, records=len(canaries), statistics=(), insecure_seed=None)
    scorer = Scorer.of(claim)
    family = claim_family(claim)
    guesses = choose_guesses(scorer, canaries.values, claim.steps, len(canaries), family, confidence)
    run = replace(claim, records=len(members), insecure_seed=seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(height * width, 1, bias=False))
    scores = _play(run, model, _pictures(canaries, members, height, width), scorer, canaries, lr, source, gradients)
    return judge(claim, [(scores, canaries.coins)], guesses, confidence, family)


def _marked(plan: Plan, count: int, source: RandomSource) -> Canaries:
    """Canary i has weight i; its sign and its coin are fair."""
    signs = torch.from_numpy(source.stream("audit/signs", 0).bernoulli(0.5, count)).double() * 2 - 1
    coins = torch.from_numpy(source.stream("audit/coins", 0).bernoulli(0.5, count))
    values = (plan.clipping.clip_norm * signs)[:, None]
    return Canaries(("1.weight",), torch.arange(count)[:, None], values, coins, plan.relation)


def _pictures(canaries: Canaries, members: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """One bright pixel each; the target is the sign."""
    bound = canaries.values[members, 0]
    pictures = torch.zeros(len(members), height * width)
    pictures[torch.arange(len(members)), members] = BRIGHT * bound.abs().float()
    return pictures.reshape(-1, 1, height, width), torch.sign(bound).float()


def _linear(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs[:, 0] * targets


def _play(
    plan: Plan,
    model: nn.Module,
    dataset: tuple[Tensor, Tensor],
    scorer: Scorer,
    canaries: Canaries,
    lr: float,
    source: RandomSource,
    gradients: Gradients,
) -> Tensor:
    """The score of each canary after all steps."""
    trail = Trail(model, plan)
    gradient_sum = gradients(plan, model, _linear, dataset, past=lambda: trail.past)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    total: Any = 0.0
    with Ledger.open(None, plan.to_dict()) as ledger:
        for private in private_steps(plan, gradient_sum, records=plan.records, source=source, ledger=ledger):
            observed = canaries.flat(private.gradients) * plan.divisor
            total = total + scorer.step(observed[canaries.coordinates], canaries.values)
            trail.keep()
            private.assign(model)
            optimizer.step()
    return scorer.final(total)
