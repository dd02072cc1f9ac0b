"""Log-likelihood ratio of all releases for each canary: was it in or out?

Given what the auditor knows, a release shows a canary's coordinates o = mean + noise, where the mean is 0 if
the sampler did not draw the canary, and otherwise a = +c·v (in) or b (out: 0 under add-remove, −c·v under
replace-one). With ℓ(x) = log p(o | mean x) − log p(o | mean 0) the score of a step is

    log((1−q) + q·e^ℓ(a)) − log((1−q) + q·e^ℓ(b))      (the optimal test, by Neyman and Pearson)

which at small q is much stronger than the inner product Σ_t ⟨o_t, v⟩: a few large terms dominate it.

What the auditor may know under the claim (docs/guarantees/audit.md):

    poisson            the sum over the real records of each step: it is independent of the canaries' draws
    partition          the same, and each canary's batch: the claim does not rely on the shuffle
    other samplers     nothing: the draws of real records depend on those of the canaries, and the claim relies on
                       these draws. The real records of such an audit have zero gradients (the claim holds for every
                       dataset)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import binom
from torch import Tensor

from sordino.audit.noise_check import NoiseCheck
from sordino.plan.core import Plan
from sordino.release import Laplace
from sordino.sampling import Allocation, Cyclic, Partition, Poisson

SIMULATED = 20_000, 1_000_000
"""Bounds on the number of simulated canaries, which is otherwise that of the audit."""

ALTERNATIVE = 1.0
"""The number of guesses is chosen for the largest bound if the noise is this factor of the claim's."""


class StepScorer:
    """Scores one step, canary by canary. It does not depend on the records."""

    scale: float
    laplace: bool
    knows_sum: bool
    knows_draws: bool
    independent: bool = False
    """Whether the plan's own mechanism makes canaries independent, given their coins (docs/guarantees/audit.md)."""

    def step(self, observed: Tensor, values: Tensor, drawn: Tensor | None, gaps: Tensor, step: int) -> Tensor:
        """(m, s) observed coordinates, canary values and gaps → terms that are summed over steps, for `final`."""
        raise NotImplementedError

    def final(self, total: Tensor) -> Tensor:
        """From the sum over the steps to the score of each canary."""
        raise NotImplementedError

    def simulate(self, values: Tensor, steps: int, count: int) -> tuple[Tensor, Tensor]:
        """Coins and scores of `count` simulated canaries under the alternative for which the guesses are chosen."""
        raise NotImplementedError

    def noise_check(self) -> NoiseCheck | None:
        """A test of the noise itself, if it has a uniform part."""
        return None

    def widths(self, gaps: Tensor, step: int) -> Tensor:
        """The widths that the plan states for the uniform part."""
        return gaps


@dataclass(frozen=True)
class Scorer(StepScorer):
    """The score of one step under a plan. It does not depend on the records."""

    scale: float  # of the noise on each coordinate
    laplace: bool
    rate: float  # the probability that a step draws a given canary
    replace: bool  # replace-one: out means −c·v instead of 0
    knows_sum: bool
    knows_draws: bool
    rows: int = 1  # records per canary, each drawn separately
    independent: bool = False

    @classmethod
    def of(cls, plan: Plan) -> Scorer:
        # each record is drawn separately, or its draws are known
        apart = isinstance(plan.sampling, Poisson | Partition | Allocation | Cyclic)
        return cls(
            scale=plan.noise.noise_multiplier * plan.sensitivity,
            laplace=isinstance(plan.noise, Laplace),
            rate=plan.sampling_rate,
            replace=plan.relation == "replace-one",
            knows_sum=apart,
            knows_draws=isinstance(plan.sampling, Partition),
            rows=plan.examples_per_user or 1,
            independent=apart,
        )

    def step(
        self,
        observed: Tensor,
        values: Tensor,
        drawn: Tensor | None = None,
        gaps: Tensor | None = None,
        step: int = 0,
    ) -> Tensor:
        """(m, s) observed coordinates, (m, s) canary values, (m,) drawn or not if that is known → (m,)."""
        if self.rows > 1:
            return self._of_rows(observed, values) - (self._of_rows(observed, -values) if self.replace else 0.0)
        present = self._likelihood(observed, values)
        absent = self._likelihood(observed, -values) if self.replace else torch.zeros_like(present)
        if drawn is not None:
            return torch.where(drawn, present - absent, 0.0)
        return self._mixed(present) - self._mixed(absent)

    def final(self, total: Tensor) -> Tensor:
        """From the sum over the steps to the score: the sum itself."""
        return total

    def simulate(self, values: Tensor, steps: int, count: int = SIMULATED[0]) -> tuple[Tensor, Tensor]:
        return simulate(self, values, steps, count)

    def _likelihood(self, observed: Tensor, mean: Tensor) -> Tensor:
        if self.laplace:
            return ((observed.abs() - (observed - mean).abs()) / self.scale).sum(1)
        return ((observed * mean - mean.square() / 2) / self.scale**2).sum(1)

    def _of_rows(self, observed: Tensor, values: Tensor) -> Tensor:
        """log Σ_j Bin(rows, q)(j)·e^ℓ(j·v), where j of the canary's rows are drawn."""
        weights = binom.logpmf(np.arange(self.rows + 1), self.rows, self.rate)
        terms = [float(w) + self._likelihood(observed, j * values) for j, w in enumerate(weights)]
        return torch.logsumexp(torch.stack(terms), 0)

    def _mixed(self, likelihood: Tensor) -> Tensor:
        """log((1−q) + q·e^ℓ)."""
        if self.rate >= 1.0:
            return likelihood
        kept = torch.full_like(likelihood, math.log1p(-self.rate))
        return torch.logaddexp(kept, likelihood + math.log(self.rate))


def scorer_of(plan: Plan) -> StepScorer:
    """The scorer for what the plan releases."""
    return plan.method.scorer(plan) or Scorer.of(plan)


def simulate(
    scorer: Scorer, values: Tensor, steps: int, count: int = SIMULATED[0], noise: float = ALTERNATIVE
) -> tuple[Tensor, Tensor]:
    """Coins and scores of independent canaries if the noise is `noise` times the claimed noise."""
    generator = np.random.default_rng(20231)
    coins = torch.from_numpy(generator.random(count) < 0.5)
    own = values[:1].expand(count, -1)
    mean = torch.where(coins[:, None], own, -own if scorer.replace else torch.zeros_like(own))
    scores = torch.zeros(count, dtype=torch.float64)
    if scorer.knows_draws:  # only the canary's own steps matter
        steps = max(1, round(steps * scorer.rate))
    draw = generator.laplace if scorer.laplace else generator.normal
    for _ in range(steps):
        rate = 1.0 if scorer.knows_draws else scorer.rate
        taken = generator.random(count) < rate if scorer.rows == 1 else generator.binomial(scorer.rows, rate, count)
        drawn = torch.from_numpy(taken).double()
        noisy = torch.from_numpy(draw(scale=scorer.scale * noise, size=tuple(own.shape)))
        observed = drawn[:, None] * mean + noisy
        scores += scorer.step(observed, own, drawn > 0 if scorer.knows_draws else None)
    return coins, scores
