"""The score of an audit's canaries under correlated noise: the likelihood ratio of CX + Z, which was released.

An auditor who knows C multiplies the observations by C: o_t = Σ_j c_j·y_{t−j} has independent noise. If batches are
whole groups, a canary of group g with vector v has mean v·Σ_{s ≤ t, s ≡ g} c_{t−s} in row t: ℓ_g is the log-likelihood
ratio of all rows. If parts of groups are sampled, a participation at s moves only the rows s … s + h − 1, and
ℓ_g = Σ over the rounds of log((1−q) + q·e^ℓ), where ℓ is that of the block. The group of a canary is not used (a record
that does not take part has none): the score is the log of the mean of e^{ℓ_g} over the groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sordino.audit.scores import ALTERNATIVE, StepScorer
from sordino.plan.core import Plan
from sordino.sampling import Cyclic

_SIMULATED = 20_000


@dataclass(frozen=True, eq=False)
class CorrelatedScorer(StepScorer):
    """Scores of a run, step by step from step 0 on; `matrix` is the first column of C."""

    scale: float
    replace: bool
    groups: int
    rate: float
    matrix: Tensor
    knows_sum: bool = True
    knows_draws: bool = False
    laplace: bool = False
    independent: bool = True  # each coordinate has its own noise, correlated over the steps only
    _seen: list[Tensor] = field(default_factory=list)  # y of the steps so far, on the canaries' coordinates
    _blocks: list[Tensor] = field(default_factory=list)  # log-likelihood ratios: of each group, or of each step

    @classmethod
    def of(cls, plan: Plan, matrix: npt.NDArray[np.float64]) -> CorrelatedScorer:
        """The scorer of a plan with cyclic sampling."""
        assert isinstance(plan.sampling, Cyclic)
        scale = plan.noise.noise_multiplier * plan.sensitivity
        column = torch.from_numpy(np.array(matrix))
        sampling = plan.sampling
        return cls(scale, plan.relation == "replace-one", sampling.batches, sampling.sampling_rate, column)

    def step(self, observed: Tensor, values: Tensor, drawn: Tensor | None, gaps: Tensor, step: int) -> Tensor:
        """(m, s) observed coordinates and canary values; `final` computes the score."""
        if step == 0:
            self._seen.clear()
            self._blocks.clear()
        self._seen.append(observed.clone())
        weights = self.matrix[: step + 1].flip(0)
        white = torch.einsum("t,tms->ms", weights, torch.stack(self._seen))  # row t of CX + Z
        along, square = (white * values).sum(1) / self.scale**2, values.square().sum(1) / self.scale**2
        if step < self.groups or self.rate < 1:
            self._blocks.append(torch.zeros_like(along))
        if self.rate == 1:
            for group, block in enumerate(self._blocks):
                block += self._ratio(self._mean(step, group), along, square)
        else:
            for age in range(min(step + 1, self.groups)):
                self._blocks[step - age] += self._ratio(float(self.matrix[age]), along, square)
        return torch.zeros_like(along)

    def _mean(self, step: int, group: int) -> float:
        """The factor on v in this row for a record that takes part in all steps of its group."""
        return float(self.matrix[(step - group) % self.groups : step - group + 1 : self.groups].sum())

    def _ratio(self, factor: float, along: Tensor, square: Tensor) -> Tensor:
        """The log-likelihood ratio of factor·v against 0; under replace-one against −factor·v."""
        return 2 * factor * along if self.replace else factor * along - factor**2 / 2 * square

    def final(self, total: Tensor) -> Tensor:
        """The score over all groups, each equally likely."""
        rows = torch.stack(self._blocks)
        if self.rate < 1:
            kept, drawn = math.log1p(-self.rate), math.log(self.rate)
            rows = torch.logaddexp(torch.full_like(rows, kept), rows + drawn)
            rows = torch.stack([rows[group :: self.groups].sum(0) for group in range(min(self.groups, len(rows)))])
        return torch.logsumexp(rows, 0) - math.log(len(rows))

    def simulate(self, values: Tensor, steps: int, count: int) -> tuple[Tensor, Tensor]:
        """Coins and scores of `count` simulated canaries, with the noise that the plan states."""
        count = min(count, _SIMULATED)
        generator = np.random.default_rng(20231)
        coins = torch.from_numpy(generator.random(count) < 0.5)
        own = values[:1].expand(count, -1)
        vectors = torch.where(coins[:, None], own, -own if self.replace else torch.zeros_like(own))
        group = torch.from_numpy(generator.integers(0, self.groups, count))
        undo = _inverse(self.matrix[:steps])
        noises = torch.from_numpy(generator.normal(scale=self.scale * ALTERNATIVE, size=(steps, *own.shape)))
        total = torch.zeros(count, dtype=torch.float64)
        for step in range(steps):
            noise = torch.einsum("t,tms->ms", undo[: step + 1].flip(0), noises[: step + 1])
            taken = (group == step % self.groups) & torch.from_numpy(generator.random(count) < self.rate)
            observed = torch.where(taken[:, None], vectors, 0.0) + noise
            total = total + self.step(observed, own, None, own, step)
        return coins, self.final(total)


def _inverse(column: Tensor) -> Tensor:
    """The coefficients of C⁻¹."""
    found = torch.zeros_like(column)
    found[0] = 1.0
    for t in range(1, len(column)):
        found[t] = -(column[1 : t + 1] * found[:t].flip(0)).sum()
    return found
