"""Private thresholds: a noisy histogram of record norms per part, and bounds from it (Harder et al. 2018, Alg. 2).

One fresh Poisson batch; for each part of the coefficients a record adds 1 to the bin of its norm. With P parts a
record's contribution has l2 norm √P for every record, so the counts have sensitivity √P under add/remove; they are
released by `release()`, within the plan's budget. The new bound of a part is the upper edge of the bin that contains
the given quantile of the noisy counts: post-processing, as is everything trained with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sordino import checks
from sordino.errors import InputError
from sordino.methods.dp_mac.coefficients import Bounds, Coefficients, part_norms
from sordino.plan import ROUNDING_MARGIN, Plan, Statistic
from sordino.randomness import RandomSource
from sordino.release import Entry, Gaussian, release
from sordino.release.ledger import Ledger
from sordino.sampling import batches

PURPOSE = "mac-thresholds"
EDGES = tuple(2.0**power for power in range(-24, 13))
"""Upper edges of the bins, except the last; public, and the same for every dataset."""


@dataclass(frozen=True)
class PrivateThresholds:
    """When thresholds are measured, with how much noise, and at which quantile of the record norms they are set."""

    noise_multiplier: float
    every: int  # steps between two measurements; the first is before step 0
    quantile: float = 0.5

    def __post_init__(self) -> None:
        checks.noise_multiplier_value(self.noise_multiplier)
        checks.count("thresholds_every", self.every)
        checks.probability("thresholds_quantile", self.quantile, allow_one=False)

    def count(self, steps: int) -> int:
        return math.ceil(steps / self.every)

    def statistic(self, steps: int, sampling_rate: float) -> Statistic:
        """The statistic that a plan with that many steps declares for them."""
        return Statistic(PURPOSE, self.noise_multiplier, sampling_rate, self.count(steps))


def declared(plan: Plan, wanted: PrivateThresholds) -> None:
    """InputError unless the plan declares exactly these measurements."""
    if wanted.statistic(plan.steps, plan.sampling_rate) not in plan.statistics:
        raise InputError("the plan does not declare the private thresholds: give it their statistic()")


def measure(
    plan: Plan, coefficients: Coefficients, wanted: PrivateThresholds, number: int, *, records: int,
    source: RandomSource, ledger: Ledger, chunk: int,
) -> dict[str, float]:  # fmt: skip
    """The bounds after measurement `number` (0, 1, …), at the current weights."""
    counts = norm_counts(plan, coefficients, number, records, source, chunk)
    root = math.sqrt(len(counts))
    noisy = release(
        counts,
        sensitivity=root * (1 + ROUNDING_MARGIN),
        norm="l2",
        noise=Gaussian(wanted.noise_multiplier),
        source=source,
        ledger=ledger,
        entry=Entry(PURPOSE, number, plan.sampling.to_dict(), plan.relation),
    )
    return choose(noisy, coefficients.bounds(), wanted.quantile, wanted.noise_multiplier * root)


def norm_counts(
    plan: Plan, coefficients: Coefficients, number: int, records: int, source: RandomSource, chunk: int
) -> dict[str, Tensor]:
    """The number of records of a fresh batch in each bin of norms, part by part. Private: not released as such."""
    expansion = coefficients.expansion
    counts = {name: torch.zeros(len(EDGES) + 1, dtype=torch.float64) for name in coefficients.bounds()}
    # a separate draw, after all of training's: two releases from one draw would not compose as accounted
    at = plan.steps + 1 + number
    batch = next(batches(plan.sampling, records=records, steps=at + 1, source=source, chunk=chunk, start=at))
    edges = torch.tensor(EDGES, dtype=torch.float64)
    with torch.no_grad():
        for indices in batch.chunks():
            if not len(indices):
                continue
            for k, terms in enumerate(coefficients.terms(indices)):
                for part in expansion.parts:
                    norms = torch.nan_to_num(part_norms(terms, part, expansion).double(), nan=torch.inf)
                    bins = torch.bucketize(norms, edges)
                    counts[f"layers.{k}.{part}"] += torch.bincount(bins, minlength=len(EDGES) + 1)
    return counts


def choose(noisy: Mapping[str, Tensor], before: Bounds, quantile: float, noise: float) -> dict[str, float]:
    """The upper edge of the bin with the quantile; the previous bound if nothing exceeds the noise."""
    found = dict(before)
    for name, counts in noisy.items():
        kept = torch.where(counts > 2 * noise, counts, torch.zeros_like(counts))  # bins of noise only are ignored
        total = float(kept.sum())
        if total > 0:
            place = int(torch.searchsorted(kept.cumsum(0), quantile * total))
            found[name] = EDGES[min(place, len(EDGES) - 1)]
    return found
