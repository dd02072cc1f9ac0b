"""Membership inference against models of a recipe (LiRA), compared with what its guarantee allows.

Carlini et al., "Membership inference attacks from first principles", 2022, the online attack: `shadows` models are
trained by the recipe, two on each of some random splits into halves; for each record the losses of the models with and
without it are fitted by two normal distributions, and a further model's loss is scored by their log-likelihood ratio.
The curve of true against false alarms is what this adversary achieves over all records together; no adversary can
achieve more than 1 − f(false alarms) on one record, where f is the trade-off function of the guarantee.

This measures an ordinary adversary on ordinary records: the result may lie far below the allowed curve and is not a
bound. **Which records.** The measurement is a function of the records without noise. So the models are
trained on the recipe's *test* rows, which are assumed to be public, by the recipe's own pipeline with the plan's noise,
sampling rate and steps; the private records, and the model that was trained on them, are not used.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import cross_entropy

from sordino import checks
from sordino.audit.bounds import Curve
from sordino.audit.claims import claim_curve
from sordino.errors import InputError
from sordino.files import json_bytes, make_folder, write_atomically
from sordino.plan import Plan
from sordino.split import Split

if TYPE_CHECKING:
    from sordino.runs.work import Work

Floats = npt.NDArray[np.float64]
FALSE = tuple(float(x) for x in np.concatenate([np.geomspace(1e-3, 0.1, 21), np.linspace(0.15, 1.0, 18)]))


@dataclass(frozen=True)
class Membership:
    """True alarm rates at several false alarm rates, of the attack and of the best attack that the guarantee allows."""

    false: tuple[float, ...]
    true: tuple[float, ...]
    allowed: tuple[float, ...]
    records: int
    models: int

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON-serialisable values."""
        return {
            "false": list(self.false), "true": list(self.true), "allowed": list(self.allowed),
            "records": self.records, "models": self.models,
        }  # fmt: skip


def membership(
    work: Work,
    *,
    rows: int = 1000,
    shadows: int = 32,
    targets: int = 4,
    seed: int = 0,
    say: Callable[[str], None] | None = None,
) -> Membership:
    """Trains `shadows` + `targets` models by the recipe, each on a random half of its first test rows.

    Args:
        work: the recipe's data, model and plan.
        rows: the largest number of test rows to attack.
        shadows: models to which the adversary fits its distributions, at least 8.
        targets: models that are attacked.
        seed: of the halves; the noise stays secret.
        say: called with a line of progress.

    Returns:
        The true alarm rates of the attack, and those that the guarantee allows.

    Raises:
        InputError: a number is too small, or the recipe has fewer than 20 test rows, statistics, public rows or users.
    """
    checks.whole("shadows", shadows, minimum=8)
    checks.whole("targets", targets, minimum=1)
    split = work.dataset.test
    count, models = min(checks.whole("rows", rows, minimum=20), len(split)), shadows + targets
    if count < 20:
        raise InputError(f"the recipe has {count} public test rows: membership inference needs at least 20")
    if work.plan.statistics or work.plan.public is not None or work.plan.unit != "record":
        raise InputError("membership inference supports plans without statistics, public rows and users only")
    split = Split(split.inputs[:count], split.targets[:count])
    plan = _sized(work.plan, count // 2)
    generator = np.random.default_rng(seed)
    halves = [generator.permutation(count) < count // 2 for _ in range((models + 1) // 2)]
    inside = np.stack([side for half in halves for side in (half, ~half)])[:models]  # each record is in as often as out
    scores = []
    for number in range(models):
        scores.append(_scores(work, plan, split, inside[number]))
        if say is not None:
            say(f"{number + 1} of {models} models")
    ratios, members = _ratios(np.stack(scores), inside, shadows)
    return Membership(FALSE, _true(ratios, members), allowed(claim_curve(plan), FALSE), count, models)


def _sized(plan: Plan, records: int) -> Plan:
    """The same noise, steps and sampling rate on another number of records."""
    share = records / plan.records
    known = {one.name for one in fields(plan.sampling)}
    counts = {name: max(1, round(getattr(plan.sampling, name) * share)) for name in ("batch", "cap") if name in known}
    sampling = replace(plan.sampling, **counts)
    divisor = float(counts["batch"]) if "batch" in counts else plan.divisor * share
    return replace(plan, records=records, sampling=sampling, divisor=divisor, insecure_seed=None)


def _scores(work: Work, plan: Plan, split: Split, inside: npt.NDArray[np.bool_]) -> Floats:
    """The logit of the probability exp(−loss) of each record under one model trained on some of them."""
    rows = torch.from_numpy(np.flatnonzero(inside))
    some = Split(split.inputs[rows], split.targets[rows])
    few = Split(split.inputs[:1], split.targets[:1])  # the evaluation during training is not used
    with tempfile.TemporaryDirectory(prefix="sordino-membership-") as folder:
        made = work.changed(plan, replace(work.dataset, train=some, test=few))
        model = made.train(Path(folder), resume=False).model.eval()
    with torch.no_grad():
        values = cross_entropy(model(split.inputs).double(), split.targets, reduction="none").clamp(1e-12, 50.0)
        found: Floats = (-values - torch.log(-torch.expm1(-values))).numpy()
    return found


def _ratios(scores: Floats, inside: npt.NDArray[np.bool_], shadows: int) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Log-likelihood ratios of the attacked models' scores, and the true membership."""
    known, member = scores[:shadows], inside[:shadows]
    whole = np.where(member, known, np.nan), np.where(member, np.nan, known)
    (mean_in, mean_out), spread = (np.nanmean(part, 0) for part in whole), [np.nanstd(part, 0) for part in whole]
    sd = np.maximum(np.sqrt(np.mean(np.square(spread), 0)), 1e-9)  # one for both, because there are few shadows
    seen = scores[shadows:]
    ratios = ((seen - mean_out) ** 2 - (seen - mean_in) ** 2) / (2 * sd**2)
    return ratios.ravel(), inside[shadows:].ravel()


def _true(ratios: Floats, members: npt.NDArray[np.bool_]) -> tuple[float, ...]:
    """The share of members above the threshold that at most this share of non-members exceeds."""
    others = np.sort(ratios[~members])[::-1]
    places = [min(int(rate * len(others)), len(others) - 1) for rate in FALSE]
    return tuple(float((ratios[members] > others[place]).mean()) for place in places)


def allowed(curve: Curve, false: tuple[float, ...]) -> tuple[float, ...]:
    """1 − f at each false alarm rate: the largest true alarm rate that the guarantee allows."""
    found = []
    for rate in false:
        low, high = rate, 1.0
        for _ in range(50):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if curve.least_false(middle) <= rate else (low, middle)
        found.append(high)
    return tuple(found)


def write_membership(found: Membership, out: Path | str) -> Path:
    """Writes `out/membership.json` atomically; a report of that directory then shows it."""
    path = Path(out) / "membership.json"
    make_folder(path.parent)
    write_atomically(path, json_bytes(found.to_dict()))
    return path
