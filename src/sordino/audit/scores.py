"""How likely is it that a canary was in? The log-likelihood ratio of everything released, canary by canary.

Given what the auditor knows, a release shows a canary's coordinates o = mean + noise, where the mean is 0 when
the sampler did not draw the canary, and otherwise a = +c·v (in) or b (out: 0 under add-remove, −c·v under
replace-one). With ℓ(x) = log p(o | mean x) − log p(o | mean 0) the score of a step is

    log((1−q) + q·e^ℓ(a)) − log((1−q) + q·e^ℓ(b))      (the optimal test, by Neyman and Pearson)

which at small q is far stronger than the inner product Σ_t ⟨o_t, v⟩: a few large terms count, not all.

What the auditor may know without stepping outside the claim (docs/guarantees/audit.md):

    poisson            the sum over the real records of each step: it is independent of the canaries' draws
    partition          that, and in which batch each canary lies: the claim does not count on the shuffle
    other samplers     nothing: real draws tell of canary draws there, and the amplification is part of the claim; the
                       other records of such an audit have zero gradients (the claim holds for every dataset)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import binom
from torch import Tensor

from sordino.audit.bounds import Curve, combined, most_correct, p_value_curve, rejects
from sordino.audit.noise_check import NoiseCheck
from sordino.plan.core import Plan
from sordino.release import Laplace
from sordino.sampling import Allocation, Cyclic, Partition, Poisson

MOST_SHARE = 0.2
"""Of the canaries that may be guessed. Guesses in the middle are nearly coin tosses."""

LEAST_GUESSES = 350
"""Where there are canaries enough. Fewer guesses show hardly more, and then a verdict hangs on a handful of coins: a
mechanism at its claim is called broken once in 600 runs with 156 guesses of 7,800, once in 280,000 with 390."""

MOST_GUESSES = 12_000
"""The bound is a recursion over the right guesses; more of them are weaker anyway."""

SIMULATED = 20_000, 1_000_000
"""Canaries that are simulated, at least and at most: as many as there are, between these."""

Family = Callable[[float], Curve]
"""The claim's curve with the noise multiplied by 2ˣ: a stronger claim for larger x."""

ALTERNATIVE = 1.0
"""The number of guesses is chosen to show the most of a mechanism whose noise is this factor of the claim's."""


class StepScorer:
    """How one step is scored, canary by canary. Nothing in it depends on the records."""

    scale: float
    laplace: bool
    knows_sum: bool
    knows_draws: bool

    def step(self, observed: Tensor, values: Tensor, drawn: Tensor | None, gaps: Tensor, step: int) -> Tensor:
        """(m, s) observed coordinates, canary values and gaps → what `final` makes scores of, summed over steps."""
        raise NotImplementedError

    def final(self, total: Tensor) -> Tensor:
        """From the sum over the steps to the score of each canary."""
        raise NotImplementedError

    def simulate(self, values: Tensor, steps: int, count: int) -> tuple[Tensor, Tensor]:
        """Coins and scores of `count` simulated canaries under the alternative that guesses are chosen for."""
        raise NotImplementedError

    def noise_check(self) -> NoiseCheck | None:
        """A test of the noise itself, where it has a uniform part."""
        return None

    def widths(self, gaps: Tensor, step: int) -> Tensor:
        """The widths that the plan states for the uniform part."""
        return gaps


@dataclass(frozen=True)
class Scorer(StepScorer):
    """The score of one step under a plan. Nothing in it depends on the records."""

    scale: float  # of the noise on each coordinate
    laplace: bool
    rate: float  # that a step draws a given canary
    replace: bool  # replace-one: out means −c·v instead of nothing
    knows_sum: bool
    knows_draws: bool
    rows: int = 1  # records of each canary, each of which a step draws by itself

    @classmethod
    def of(cls, plan: Plan) -> Scorer:
        sampling = plan.sampling
        return cls(
            scale=plan.noise.noise_multiplier * plan.sensitivity,
            laplace=isinstance(plan.noise, Laplace),
            rate=plan.sampling_rate,
            replace=plan.relation == "replace-one",
            knows_sum=isinstance(sampling, Poisson | Partition | Allocation | Cyclic),
            knows_draws=isinstance(sampling, Partition),
            rows=plan.examples_per_user or 1,
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
        """From the sum over the steps to the score: it is that sum."""
        return total

    def simulate(self, values: Tensor, steps: int, count: int = SIMULATED[0]) -> tuple[Tensor, Tensor]:
        return simulate(self, values, steps, count)

    def _likelihood(self, observed: Tensor, mean: Tensor) -> Tensor:
        if self.laplace:
            return ((observed.abs() - (observed - mean).abs()) / self.scale).sum(1)
        return ((observed * mean - mean.square() / 2) / self.scale**2).sum(1)

    def _of_rows(self, observed: Tensor, values: Tensor) -> Tensor:
        """log Σ_j Bin(rows, q)(j)·e^ℓ(j·v): so many of the canary's rows were drawn."""
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
    """The score that fits what the plan releases."""
    return plan.method.scorer(plan) or Scorer.of(plan)


@dataclass(frozen=True)
class Guesses:
    """How many canaries of a run are guessed to be in (those with the highest scores) and to be out (the lowest)."""

    inside: int
    outside: int

    @property
    def total(self) -> int:
        return self.inside + self.outside

    def places(self, canaries: int) -> float:
        """The m of the bound: half of the canaries where all guesses say the same (docs/guarantees/audit.md)."""
        return canaries if self.inside and self.outside else canaries / 2

    def rejects(self, curve: Curve, correct: Sequence[int], canaries: int, level: float) -> bool:
        """Whether so many right guesses, in each of some independent runs, are too many for the curve."""
        if len(correct) == 1:
            return rejects(curve, correct[0], self.total, self.places(canaries), level)
        values = {v: p_value_curve(curve, v, self.total, self.places(canaries)) for v in set(correct)}
        return combined([values[v] for v in correct]) < level

    def correct(self, scores: Tensor, coins: Tensor) -> int:
        order = torch.argsort(scores)
        top, bottom = order[len(order) - self.inside :], order[: self.outside]
        return int(coins[top].sum()) + int((~coins[bottom]).sum())


def choose_guesses(
    scorer: StepScorer, values: Tensor, steps: int, canaries: int, family: Family, level: float, runs: int = 1
) -> Guesses:
    """The numbers of guesses in each run that promise the largest bound, by a simulation of public constants only.

    Fixed before the run and independent of it, so the test stays valid without a correction. What they promise is
    the bound itself, for the claim's own curves, at a standard deviation below the expected right guesses.
    """
    coins, scores = scorer.simulate(values, steps, min(max(SIMULATED[0], canaries), SIMULATED[1]))
    best, found = math.inf, Guesses(max(1, canaries // 20), max(1, canaries // 20))
    for guesses in _numbers(canaries, runs):
        part = len(scores) / canaries
        share = Guesses(round(guesses.inside * part), round(guesses.outside * part))
        accuracy = min(share.correct(scores, coins) / share.total, 1.0 - 1.0 / share.total)
        spread = math.sqrt(guesses.total * accuracy * (1.0 - accuracy) / runs)
        right = [max(0, math.floor(guesses.total * accuracy - spread))] * runs
        promised = least_noise(lambda curve: guesses.rejects(curve, right, canaries, level), family, 5)  # noqa: B023
        if promised < best:
            best, found = promised, guesses
    return found


def _numbers(canaries: int, runs: int) -> Iterator[Guesses]:
    """Numbers of guesses, each √2 times the one before: all `in`, or half of them `out`."""
    least = min(max(10, LEAST_GUESSES // runs), max(10, canaries // 10))
    total = float(least)
    while total <= max(least, min(MOST_SHARE * canaries, MOST_GUESSES)):
        yield Guesses(round(total), 0)
        yield Guesses(round(total / 2), round(total / 2))
        total *= math.sqrt(2)


def least_noise(rejected: Callable[[Curve], bool], family: Family, halvings: int) -> float:
    """The least x for which the claim with 2ˣ times the noise is rejected, by bisection; inf if none is.

    Between an eighth of the plan's noise and four times as much. `rejected` must be monotone along the family.
    """
    low, high = (-3.0, 0.0) if rejected(family(0.0)) else (0.0, 2.0)
    if high > 0.0 and not rejected(family(high)):
        return math.inf
    for _ in range(halvings):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if rejected(family(middle)) else (middle, high)
    return high


def least_rejected(curve: Curve, guesses: int, canaries: int, level: float) -> int:
    """The smallest number of right guesses that rejects the curve; guesses + 1 if none does."""
    low = min(math.floor(most_correct(curve, guesses, canaries)), guesses)  # never rejected: it can happen
    high = guesses + 1
    while high - low > 1:
        middle = (low + high) // 2
        if rejects(curve, middle, guesses, canaries, level):
            high = middle
        else:
            low = middle
    return high


def simulate(
    scorer: Scorer, values: Tensor, steps: int, count: int = SIMULATED[0], noise: float = ALTERNATIVE
) -> tuple[Tensor, Tensor]:
    """Coins and scores of independent canaries when the noise is `noise` times what it should be."""
    generator = np.random.default_rng(20231)
    coins = torch.from_numpy(generator.random(count) < 0.5)
    own = values[:1].expand(count, -1)
    mean = torch.where(coins[:, None], own, -own if scorer.replace else torch.zeros_like(own))
    scores = torch.zeros(count, dtype=torch.float64)
    if scorer.knows_draws:  # a canary's own steps are all that counts
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
