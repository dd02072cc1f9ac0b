"""A black-box audit: many models are trained with and without one record, and distinguished by its loss alone.

After Nasr et al. 2021 and Annamalai and De Cristofaro, "Nearly tight black-box auditing of differentially private
machine learning", 2024: the adversary sees the final model and may choose the dataset and the *initial* weights, since
the guarantee holds for all of them. If the other records have almost no gradient at these weights, they do not disturb
the audited record's contribution to each step, and its final loss is a function of the sum of its clipped gradients and
the noise.

Formal guarantee. Runs are independent. A first part of them only chooses the threshold; in the rest the numbers of true
and of false alarms are binomial, each bounded at half of the level (Clopper and Pearson). If the mechanism has the
plan's privacy profile, `holds` is False with probability at most 1 − confidence.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from sordino import checks
from sordino.audit.bounds import Curve, check_confidence
from sordino.audit.claims import largest_rejected
from sordino.errors import InputError
from sordino.plan import Plan
from sordino.records.gradients import plan_gradients
from sordino.release.ledger import Ledger
from sordino.shown import down, up
from sordino.training.steps import private_steps

PILOT = 0.2
"""The share of the runs that is used to choose the threshold."""

Loss = Callable[..., Tensor]


@dataclass(frozen=True)
class BlackBoxResult:
    """What the losses of one record revealed. `false_alarms` and `hits` are counts among `without` and `inside`."""

    epsilon_lower: float
    epsilon_claimed: float
    delta: float
    confidence: float
    runs: int
    inside: int
    hits: int
    without: int
    false_alarms: int
    steps: int
    holds: bool

    @property
    def sentence(self) -> str:
        verdict = "does not contradict" if self.holds else "CONTRADICTS"
        return (
            f"The black-box audit {verdict} the claim: ε ≥ {down(self.epsilon_lower)} at "
            f"{down(100 * self.confidence)} % confidence from {self.runs} models; the claim is "
            f"ε ≤ {up(self.epsilon_claimed)} (δ = {up(self.delta)})."
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields and the sentence, as JSON-serialisable values."""
        return {**asdict(self), "sentence": self.sentence}


def audit_black_box(
    plan: Plan,
    model: nn.Module,
    loss: Loss,
    dataset: tuple[Tensor, Tensor],
    record: tuple[Tensor, Tensor],
    *,
    runs: int = 400,
    lr: float = 0.01,
    confidence: float = 0.95,
    seed: int | None = None,
    say: Callable[[str], None] | None = None,
) -> BlackBoxResult:
    """Trains `runs` copies of `model` by the plan, half of them with the record, and distinguishes them by its loss.

    Args:
        plan: for as many records as the dataset and the record have together; add-remove.
        model: every run starts from its weights, which the adversary chooses.
        loss: `loss(outputs, targets)`, one value per row.
        dataset: the other records, inputs and targets.
        record: the audited record, input and target.
        runs: the number of models, at least 50.
        lr: the step size of plain SGD.
        confidence: of the bound.
        seed: makes the audit repeatable.
        say: called with a line of progress at intervals.

    Returns:
        The lower bound on ε and the verdict.

    Raises:
        InputError: the relation is not add-remove, or there are too few runs.
    """
    check_confidence(confidence)
    checks.whole("runs", runs, minimum=50)
    if plan.relation != "add-remove":
        raise InputError("the black-box audit removes one record: make the plan under add-remove")
    whole = tuple(torch.cat([part, one[None]]) for part, one in zip(dataset, record, strict=True))
    scores = np.empty(runs)
    coins = np.arange(runs) % 2 == 0  # as many with the record as without
    for number in range(runs):
        data = whole if coins[number] else dataset
        scores[number] = _score(
            plan, copy.deepcopy(model), loss, data, record, lr, None if seed is None else seed + number
        )
        if say is not None and number % 50 == 49:
            say(f"{number + 1} of {runs} models")
    pilot = max(20, round(PILOT * runs))
    threshold = _threshold(scores[:pilot], coins[:pilot], 1.0 - confidence, runs - pilot)
    return _judged(plan, scores[pilot:] > threshold, coins[pilot:], confidence, runs)


def _score(plan: Plan, model: nn.Module, loss: Loss, data: Any, record: Any, lr: float, seed: int | None) -> float:
    """The negative loss of the record at the end of one run."""
    run = replace(plan, insecure_seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    gradient_sum = plan_gradients(run, model, loss, data)
    with Ledger.open(None, run.to_dict()) as ledger:
        steps = private_steps(run, gradient_sum, records=len(data[1]), source=run.source(), ledger=ledger)
        for private in steps:
            private.assign(model)
            optimizer.step()
    with torch.no_grad():
        return -float(loss(model.double()(record[0][None].double()), record[1][None]).sum())


def _threshold(scores: Any, coins: Any, level: float, left: int) -> float:
    """The threshold with the largest expected bound if the scores were normal."""
    spread = max(float(np.sqrt(0.5 * (scores[coins].var() + scores[~coins].var()))), 1e-300)
    best, found = -np.inf, float(np.median(scores))
    for t in np.quantile(scores, np.linspace(0.02, 0.98, 49)):
        errors = [
            stats.norm.sf((t - scores[~coins].mean()) / spread),
            stats.norm.cdf((t - scores[coins].mean()) / spread),
        ]
        bounds = [stats.beta.ppf(1 - level / 2, left / 2 * e + 1, max(left / 2 * (1 - e), 1e-9)) for e in errors]
        promised = -stats.norm.ppf(bounds[0]) - stats.norm.ppf(bounds[1])
        if promised > best:
            best, found = float(promised), float(t)
    return found


def _judged(plan: Plan, alarms: Any, coins: Any, confidence: float, runs: int) -> BlackBoxResult:
    level = (1.0 - confidence) / 2
    inside, without = int(coins.sum()), int((~coins).sum())
    hits, false = int(alarms[coins].sum()), int(alarms[~coins].sum())
    true_least = stats.beta.ppf(level, hits, inside - hits + 1) if hits else 0.0
    false_most = stats.beta.ppf(1 - level, false + 1, without - false) if false < without else 1.0

    def rejected(curve: Curve) -> bool:
        return curve.least_false(float(true_least)) > float(false_most)

    claim = replace(plan, insecure_seed=None)
    lower, claimed = largest_rejected(claim, rejected), claim.guarantee().epsilon
    return BlackBoxResult(
        lower, claimed, plan.delta, confidence, runs, inside, hits, without, false, plan.steps, lower <= claimed
    )


def fitted(
    model: nn.Module, loss: Loss, dataset: tuple[Tensor, Tensor], *, steps: int = 2000, lr: float = 0.1
) -> nn.Module:
    """A copy of the model, trained without noise until its loss on the dataset is small.

    Its weights are initial weights that an adversary may choose. The dataset must be public.
    """
    copied = copy.deepcopy(model)
    optimizer = torch.optim.Adam(copied.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(copied(dataset[0]), dataset[1]).mean()
        torch.autograd.backward(value)
        optimizer.step()
        if float(value.detach()) < 1e-6:
            break
    optimizer.zero_grad(set_to_none=True)
    return copied
