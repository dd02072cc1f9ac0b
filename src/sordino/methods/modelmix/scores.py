"""Scores for releases with Gaussian (or Laplace) *and* uniform noise, for an auditor of ModelMix.

The density of the sum of the two on one coordinate, f_w = N(0, s²) * U[−w/2, w/2], is known, and so are the widths:
they are functions of iterates that the auditor sees. As in `scores`, a step shows a canary's coordinates with mean 0 or
a, and

    log((1−q)·f_w(o) + q·f_w(o−a)) − log f_w(o)

is the best score *if the widths are correct*. For wide uniform noise it is flat, so it would not detect that the noise
is narrower than claimed. So this auditor scores under each of a few hypotheses, and uses the one that explains all
releases best (a function of what was released, so the test remains valid). Even so the claim that is tested is a bound
with slack; `noise_check` tests the noise itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sordino.audit.noise_check import NoiseCheck
from sordino.audit.scores import StepScorer
from sordino.plan.core import Plan
from sordino.release import Laplace

SUSPICIONS: tuple[tuple[float, float], ...] = ((1.0, 1.0), (1.0, 0.0), (1.0, 0.5), (0.5, 0.5), (0.25, 0.25))
"""(factor on the gap between the iterates, factor on the least width): correct, gap not enforced, …"""

ALTERNATIVE = 0.5
"""The number of guesses is chosen to detect uniform noise that is too narrow by this factor."""


@dataclass(frozen=True)
class MixedScorer(StepScorer):
    """Log-likelihoods of one step with and without the canary, under each hypothesis. Poisson sampling, add-remove."""

    scale: float  # scale of the Gaussian or Laplace noise on each coordinate
    laplace: bool
    rate: float
    least: tuple[float, ...]  # the plan's least width at each step
    knows_sum: bool = True
    knows_draws: bool = False
    replace: bool = False

    @classmethod
    def of(cls, plan: Plan) -> MixedScorer:
        least = tuple(plan.method.least_width(plan, step) for step in range(plan.steps))
        scale = plan.noise.noise_multiplier * plan.sensitivity
        return cls(scale, isinstance(plan.noise, Laplace), plan.sampling_rate, least)

    def step(self, observed: Tensor, values: Tensor, drawn: Tensor | None, gaps: Tensor, step: int) -> Tensor:
        """(m, s) observed coordinates, canary values and gaps (in units of the sum) → (m, hypotheses, 2)."""
        columns = []
        for on_gap, on_least in SUSPICIONS:
            widths = (on_gap * gaps).clamp_min(on_least * self.least[step])
            absent = self._density(observed, widths).sum(1)
            present = self._density(observed - values, widths).sum(1)
            columns.append(torch.stack([self._mixed(present, absent), absent], dim=1))
        return torch.stack(columns, dim=1)

    def final(self, total: Tensor) -> Tensor:
        """The score of each canary under the hypothesis that explains all of them best, with even prior odds."""
        explained = torch.logsumexp(total, dim=2).sum(0)
        chosen = total[:, int(explained.argmax())]
        return chosen[:, 0] - chosen[:, 1]

    def noise_check(self) -> NoiseCheck:
        return NoiseCheck(self.scale, self.laplace)

    def widths(self, gaps: Tensor, step: int) -> Tensor:
        return gaps.clamp_min(self.least[step])

    def _mixed(self, present: Tensor, absent: Tensor) -> Tensor:
        if self.rate >= 1.0:
            return present
        return torch.logaddexp(absent + math.log1p(-self.rate), present + math.log(self.rate))

    def _density(self, x: Tensor, widths: Tensor) -> Tensor:
        density = log_laplace_uniform if self.laplace else log_gaussian_uniform
        return density(x / self.scale, widths / self.scale) - math.log(self.scale)

    def simulate(self, values: Tensor, steps: int, count: int = 20_000) -> tuple[Tensor, Tensor]:
        """Coins and scores of independent canaries if the uniform noise is ALTERNATIVE times the correct one."""
        generator = np.random.default_rng(20232)
        coins = torch.from_numpy(generator.random(count) < 0.5)
        own = values[:1].expand(count, -1)
        draw, total = generator.laplace if self.laplace else generator.normal, torch.zeros(())
        for step in range(steps):
            drawn = torch.from_numpy(generator.random(count) < self.rate) & coins
            noise = draw(scale=self.scale, size=tuple(own.shape))
            noise += ALTERNATIVE * self.least[step] * (generator.random(tuple(own.shape)) - 0.5)
            observed = torch.where(drawn[:, None], own, 0.0) + torch.from_numpy(noise)
            total = total + self.step(observed, own, None, torch.zeros_like(own), step)
        return coins, self.final(total)


def log_gaussian_uniform(x: Tensor, widths: Tensor) -> Tensor:
    """log of the density of N(0, 1) + U[−w/2, w/2] at x, without cancellation in the tails; w → 0 gives N(0, 1)."""
    narrow = widths < 1e-4  # the density then differs from the Gaussian's by less than w²·x²/24
    w = torch.where(narrow, torch.ones_like(widths), widths)
    near, far = torch.special.log_ndtr(w / 2 - x.abs()), torch.special.log_ndtr(-w / 2 - x.abs())
    mixed = near + torch.log(-torch.expm1(far - near)) - w.log()
    return torch.where(narrow, -x.square() / 2 - 0.5 * math.log(2 * math.pi), mixed)


def log_laplace_uniform(x: Tensor, widths: Tensor) -> Tensor:
    """The same for Laplace noise of scale 1."""
    narrow = widths < 1e-4
    w = torch.where(narrow, torch.ones_like(widths), widths)
    beyond = x.abs() - w / 2
    outside = -beyond + torch.log(-torch.expm1(-w)) - math.log(2)
    inside = torch.log1p(-0.5 * (torch.exp(beyond.clamp_max(0.0)) + torch.exp(-x.abs() - w / 2)))
    return torch.where(narrow, -x.abs() - math.log(2), torch.where(beyond > 0, outside, inside) - w.log())
