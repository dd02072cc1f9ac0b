"""A histogram of record norms, which the plan accounts for: a report shows record norms in no other form.

It is drawn from one fresh Poisson batch at the published weights: each of its records adds one to the bin of its
gradient's norm (a norm that is not finite counts in the last bin). Adding or removing a record changes one count by
one, so the counts have l2 sensitivity 1 for all data; `release()` adds the noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from sordino.errors import Refused
from sordino.plan import Plan, Statistic
from sordino.randomness import RandomSource
from sordino.records.gradients import GradientSum
from sordino.release import Entry, Gaussian, release
from sordino.release.ledger import Ledger
from sordino.sampling import LogicalBatch, Poisson, batches
from sordino.training.steps import summed

PURPOSE = "record-norms"
EDGES = (0.0, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Lower edges of the bins, in clip norms; the last bin is open. Public, and the same for every dataset."""


@dataclass(frozen=True)
class NormHistogram:
    """Noisy shares of the records by gradient norm, and the standard deviation of their noise."""

    edges: Sequence[float]  # lower edges, in the gradient's units
    shares: Sequence[float]  # noisy: may be negative, need not sum to 1
    noise_std: float

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def norm_histogram(noise_multiplier: float, sampling_rate: float) -> Statistic:
    """The statistic that a plan declares for the histogram."""
    return Statistic(purpose=PURPOSE, noise_multiplier=noise_multiplier, sampling_rate=sampling_rate, count=1)


def declared(plan: Plan) -> Statistic | None:
    """The plan's declaration, or None."""
    return next((s for s in plan.statistics if s.purpose == PURPOSE), None)


def check_declared(plan: Plan) -> None:
    """Refuses a declaration that differs from the histogram that would be released."""
    statistic, sampling = declared(plan), plan.sampling
    if statistic is None:
        return
    if not isinstance(sampling, Poisson):
        raise Refused("the histogram of record norms is proven for Poisson sampling only: leave it out")
    if statistic.sampling_rate < sampling.sampling_rate:
        raise Refused(
            f"the histogram of record norms is drawn at the plan's sampling rate, {sampling.sampling_rate:g}; it was "
            f"declared at {statistic.sampling_rate:g}, which costs less: declare it at the plan's rate"
        )


def release_histogram(
    plan: Plan, gradient_sum: GradientSum, *, records: int, source: RandomSource, ledger: Ledger, chunk: int
) -> NormHistogram | None:
    """The histogram that the plan declared; None if it declared none, or the ledger already contains it."""
    statistic = declared(plan)
    if statistic is None or (source.secure and ledger.last_step(PURPOSE) >= 0):
        return None
    check_declared(plan)
    batch = _fresh_batch(plan, records, source, chunk)
    bounds = torch.tensor(EDGES[1:]) * plan.clipping.clip_norm
    norms = summed(gradient_sum, batch, source).norms
    bins = torch.bucketize(torch.nan_to_num(norms.float(), nan=torch.inf), bounds, right=True)
    counts = torch.bincount(bins, minlength=len(EDGES)).to(torch.float64)
    noisy = release(
        {"counts": counts},
        sensitivity=1.0,
        norm="l2",
        noise=Gaussian(statistic.noise_multiplier),
        source=source,
        ledger=ledger,
        entry=Entry(purpose=PURPOSE, step=0, sampling=plan.sampling.to_dict(), relation=plan.relation),
    )["counts"]
    expected = plan.expected_batch
    return NormHistogram(
        edges=[edge * plan.clipping.clip_norm for edge in EDGES],
        shares=(noisy / expected).tolist(),
        noise_std=statistic.noise_multiplier / expected,
    )


def _fresh_batch(plan: Plan, records: int, source: RandomSource, chunk: int) -> LogicalBatch:
    """A batch drawn separately, after those of training: two releases of one batch would not compose as accounted."""
    last = plan.steps
    return next(batches(plan.sampling, records=records, steps=last + 1, source=source, chunk=chunk, start=last))
