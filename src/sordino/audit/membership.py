"""Membership inference against released models (LiRA), beside what the guarantee allows.

Carlini et al., "Membership inference attacks from first principles", 2022, the online attack: `shadows` models are
trained by the plan, each on every record with probability a half; for each record the losses of the models with and
without it are fitted by two normal distributions, and a further model's loss is scored by their log-likelihood ratio.
The curve of true over false alarms is what this adversary achieves over all records together; no adversary whatever
achieves more than 1 − f(false alarms) on one record, f the trade-off function of the guarantee.

It is a reading of an ordinary adversary on ordinary records: it may lie far below the curve that is allowed, and is no
bound on anything. It uses the records without protection: for public data, or for the owner's eyes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sordino import checks
from sordino.audit.bounds import Curve
from sordino.audit.one_run import claim_curve
from sordino.plan import Plan
from sordino.records.gradients import plan_gradients
from sordino.release.ledger import Ledger
from sordino.training.steps import private_steps

Floats = npt.NDArray[np.float64]
Loss = Callable[..., Tensor]
FALSE = tuple(float(x) for x in np.concatenate([np.geomspace(1e-3, 0.1, 21), np.linspace(0.15, 1.0, 18)]))


@dataclass(frozen=True)
class Membership:
    """True alarms at each of the false alarms, of the attack and of the best that the guarantee allows."""

    false: tuple[float, ...]
    true: tuple[float, ...]
    allowed: tuple[float, ...]
    records: int
    models: int

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "false": list(self.false), "true": list(self.true), "allowed": list(self.allowed),
            "records": self.records, "models": self.models,
        }  # fmt: skip


def membership(
    plan: Plan,
    model: nn.Module,
    loss: Loss,
    dataset: tuple[Tensor, Tensor],
    *,
    shadows: int = 32,
    targets: int = 4,
    lr: float = 0.1,
    seed: int = 0,
) -> Membership:
    """Trains `shadows` + `targets` models by the plan, each on a random half of the dataset.

    Args:
        plan: for about half as many records as the dataset has.
        model: its weights are where each model starts.
        loss: `loss(outputs, targets)`, one value per row.
        dataset: inputs and targets of the records that are told apart.
        shadows: models that the adversary fits its distributions to, at least 8.
        targets: models that are attacked.
        lr: the step size of plain SGD.
        seed: of the halves.

    Raises:
        InputError: a number is too small, or the plan is for another number of records.
    """
    checks.whole("shadows", shadows, minimum=8)
    checks.whole("targets", targets, minimum=1)
    generator = np.random.default_rng(seed)
    count, models = len(dataset[1]), shadows + targets
    inside = np.stack([generator.permutation(count) < count // 2 for _ in range(models)])
    scores = np.stack([_scores(plan, model, loss, dataset, inside[k], lr) for k in range(models)])
    ratios, members = _ratios(scores, inside, shadows)
    return Membership(FALSE, _true(ratios, members), allowed(claim_curve(plan), FALSE), count, models)


def _scores(plan: Plan, model: nn.Module, loss: Loss, dataset: Any, inside: npt.NDArray[np.bool_], lr: float) -> Floats:
    """The logit of the probability exp(−loss) of each record under one model trained on some of them."""
    copied, rows = copy.deepcopy(model), torch.from_numpy(np.flatnonzero(inside))
    some = tuple(part[rows] for part in dataset)
    optimizer = torch.optim.SGD(copied.parameters(), lr=lr)
    source = plan.source()
    with Ledger.open(None, plan.to_dict()) as ledger:
        made = plan_gradients(plan, copied, loss, some)
        for private in private_steps(plan, made, records=len(rows), source=source, ledger=ledger):
            private.assign(copied)
            optimizer.step()
    with torch.no_grad():
        values = loss(copied(dataset[0]), dataset[1], reduction="none").double().clamp(1e-12, 50.0)
        found: Floats = (-values - torch.log(-torch.expm1(-values))).numpy()
    return found


def _ratios(scores: Floats, inside: npt.NDArray[np.bool_], shadows: int) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Log-likelihood ratios of the attacked models' scores, and who was in."""
    known, member = scores[:shadows], inside[:shadows]
    whole = np.where(member, known, np.nan), np.where(member, np.nan, known)
    (mean_in, mean_out), spread = (np.nanmean(part, 0) for part in whole), [np.nanstd(part, 0) for part in whole]
    sd = np.maximum(np.sqrt(np.mean(np.square(spread), 0)), 1e-9)  # one for both: few shadows
    seen = scores[shadows:]
    ratios = ((seen - mean_out) ** 2 - (seen - mean_in) ** 2) / (2 * sd**2)
    return ratios.ravel(), inside[shadows:].ravel()


def _true(ratios: Floats, members: npt.NDArray[np.bool_]) -> tuple[float, ...]:
    """The share of members above the threshold that lets through at most this share of the others."""
    others = np.sort(ratios[~members])[::-1]
    places = [min(int(rate * len(others)), len(others) - 1) for rate in FALSE]
    return tuple(float((ratios[members] > others[place]).mean()) for place in places)


def allowed(curve: Curve, false: tuple[float, ...]) -> tuple[float, ...]:
    """1 − f at each rate of false alarms: the largest rate of true alarms that the guarantee allows."""
    found = []
    for rate in false:
        low, high = rate, 1.0
        for _ in range(50):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if curve.least_false(middle) <= rate else (low, middle)
        found.append(high)
    return tuple(found)


def membership_figure(found: Membership) -> str:
    """An SVG of both curves, on logarithmic axes from 0.001 to 1; colours are the page's."""
    size, left, top = 240, 46, 14

    def place(false: float, true: float) -> str:
        x, y = (min(max(math.log10(max(value, 1e-3)) / 3 + 1, 0.0), 1.0) for value in (false, true))
        return f"{left + size * x:.1f},{top + size * (1 - y):.1f}"

    def line(true: tuple[float, ...], style: str) -> str:
        points = " ".join(place(a, b) for a, b in zip(found.false, true, strict=True))
        return f'<polyline fill="none" stroke="currentColor" {style} points="{points}"/>'

    ticks = "".join(
        f'<text x="{left + size * k / 3:.0f}" y="{top + size + 16}" text-anchor="middle">{label}</text>'
        f'<text x="{left - 6}" y="{top + size * (1 - k / 3) + 4:.0f}" text-anchor="end">{label}</text>'
        for k, label in enumerate(("0.001", "0.01", "0.1", "1"))
    )
    title = (
        f"True over false alarms: the most that the guarantee allows (solid), LiRA with {found.models} models (dashed)"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + size + 20} {top + size + 26}" font-size="11" '
        f'fill="currentColor" role="img"><title>{title}</title>'
        f'<rect x="{left}" y="{top}" width="{size}" height="{size}" fill="none" stroke="currentColor" opacity="0.3"/>'
        + line(found.allowed, 'stroke-width="2"') + line(found.true, 'stroke-dasharray="6 4"')
        + line(found.false, 'stroke-dasharray="1 4"') + ticks + "</svg>"
    )  # fmt: skip
