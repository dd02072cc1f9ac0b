"""The score of an audit's canaries under correlated noise: the likelihood ratio of CX + Z, which is what was released.

An auditor who knows C multiplies what it sees by C: o_t = Σ_j c_j·y_{t−j} has independent noise again. A canary that
took part in the steps S with the vector v has the mean v·Σ_{j: t−j ∈ S} c_j in row t. Where batches are whole groups
its steps are known (the claim does not count on the group's secrecy), and the score is the log-likelihood ratio of all
rows. Where parts of groups are drawn, a participation at t moves the rows t … t + h − 1 alone, and the score is
Σ over the rounds of log((1−q) + q·e^ℓ), ℓ that of the block; whose group it is counts as unknown, each equally likely.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from sordino.audit.scores import ALTERNATIVE, StepScorer
from sordino.plan.core import Plan
from sordino.sampling import Cyclic

_SIMULATED = 4000


@dataclass(frozen=True, eq=False)
class CorrelatedScorer(StepScorer):
    """Scores of a run, step by step from step 0 on; `matrix` is the first column of C."""

    scale: float
    replace: bool
    groups: int
    rate: float
    matrix: Tensor
    knows_sum: bool = True
    laplace: bool = False
    _seen: list[Tensor] = field(default_factory=list)  # y of the steps so far, on the canaries' coordinates
    _drawn: list[Tensor] = field(default_factory=list)
    _blocks: list[Tensor] = field(default_factory=list)  # log-likelihood ratios of a participation in each step

    @classmethod
    def of(cls, plan: Plan, matrix: np.ndarray) -> CorrelatedScorer:
        """The scorer of a plan with cyclic sampling."""
        assert isinstance(plan.sampling, Cyclic)
        scale = plan.noise.noise_multiplier * plan.sensitivity
        return cls(
            scale, plan.relation == "replace-one", plan.sampling.batches, plan.sampling.sampling_rate,
            torch.from_numpy(np.array(matrix)),
        )  # fmt: skip

    @property
    def knows_draws(self) -> bool:  # type: ignore[override]
        """Whole groups: a canary's steps are those of its group."""
        return self.rate == 1

    def step(self, observed: Tensor, values: Tensor, drawn: Tensor | None, gaps: Tensor, step: int) -> Tensor:
        """(m, s) coordinates → what the step adds to each canary's score, (m,); `final` scores sampled batches."""
        if step == 0:
            for kept in (self._seen, self._drawn, self._blocks):
                kept.clear()
        self._seen.append(observed.clone())
        white = self._times(self._seen)  # row t of CX + Z, on these coordinates
        if drawn is not None:
            self._drawn.append(drawn.double())
            mean = self._times(self._drawn)[:, None] * values
            likelihood = ((white * mean - mean.square() / 2) / self.scale**2).sum(1)
            if not self.replace:
                return likelihood
            return (2 * white * mean / self.scale**2).sum(1)
        along, square = (white * values).sum(1) / self.scale**2, values.square().sum(1) / self.scale**2
        self._blocks.append(torch.zeros_like(along))
        for age in range(min(step + 1, self.groups)):
            factor = float(self.matrix[age])
            self._blocks[step - age] += factor * along - factor**2 / 2 * square
        return torch.zeros_like(along)

    def final(self, total: Tensor) -> Tensor:
        if not self._blocks:
            return total
        mixed = torch.stack([_mixed(block, self.rate) for block in self._blocks])
        by_group = torch.stack([mixed[group :: self.groups].sum(0) for group in range(min(self.groups, len(mixed)))])
        return torch.logsumexp(by_group, 0) - math.log(len(by_group))

    def simulate(self, values: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        """Canaries whose noise is what it should be."""
        generator = np.random.default_rng(20231)
        coins = torch.from_numpy(generator.random(_SIMULATED) < 0.5)
        own = values[:1].expand(_SIMULATED, -1)
        out = -own if self.replace else torch.zeros_like(own)
        vectors = torch.where(coins[:, None], own, out)
        group = torch.from_numpy(generator.integers(0, self.groups, _SIMULATED))
        undo = _inverse(self.matrix[:steps])
        noises: list[Tensor] = []
        total = torch.zeros(_SIMULATED, dtype=torch.float64)
        for step in range(steps):
            noises.append(torch.from_numpy(generator.normal(scale=self.scale * ALTERNATIVE, size=tuple(own.shape))))
            noise = sum(
                (float(undo[age]) * noises[step - age] for age in range(step + 1) if undo[age]), torch.zeros(())
            )
            member = group == step % self.groups
            drawn = member & torch.from_numpy(generator.random(_SIMULATED) < self.rate)
            observed = torch.where(drawn[:, None], vectors, 0.0) + noise
            total = total + self.step(observed, own, drawn if self.knows_draws else None, own, step)
        return coins, self.final(total)

    def _times(self, rows: list[Tensor]) -> Tensor:
        """Row t of C times these rows, t the last."""
        count = len(rows)
        weights = self.matrix[:count].flip(0)
        return torch.einsum("t,t...->...", weights, torch.stack(rows))


def _mixed(likelihood: Tensor, rate: float) -> Tensor:
    """log((1−q) + q·e^ℓ)."""
    kept = torch.full_like(likelihood, math.log1p(-rate))
    return torch.logaddexp(kept, likelihood + math.log(rate))


def _inverse(column: Tensor) -> list[float]:
    found = [1.0]
    for t in range(1, len(column)):
        found.append(-sum(float(column[j]) * found[t - j] for j in range(1, t + 1)))
    return [value if abs(value) > 1e-12 else 0.0 for value in found]
