"""(ε, δ) of a mixture of Gaussian pairs: a record's participation is hidden, and given it the pair is μ-GDP.

Hockey-stick divergence is jointly convex, so δ(ε) ≤ Σ_i p_i·δ_{μ_i}(ε), with δ_μ(ε) = Φ(−ε/μ + μ/2) − e^ε·Φ(−ε/μ − μ/2)
(Balle & Wang 2018, Thm 8). Numbers are rounded so that ε is never below the exact value for the given mixture.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import erfcx, ndtr

Array = npt.NDArray[np.float64]

_ROUNDING = 1e-14  # relative error of Φ, erfcx, exp and the sums, relative to Φ(−a): a few units in the last place


@dataclass(frozen=True)
class GaussianMixture:
    """Component i, with probability `weights[i]`, is √squares[i]-GDP; the rest of the probability reveals nothing.

    `spread` says that the squares are a mean-preserving spread of the true ones (points moved apart on a grid): then
    δ_μ is replaced by a larger function that is convex in μ², for which spreading can only increase the bound. `excess`
    is the mean of what was truncated at the largest square, counted at the largest slope.
    """

    weights: Array
    squares: Array
    spread: bool = False
    excess: float = 0.0

    def delta(self, epsilon: float) -> float:
        """An upper bound on δ at ε ≥ 0."""
        if not self.spread:
            return float(self.weights @ gaussian_delta(self.squares, epsilon)) * (1 + _ROUNDING)
        # d²δ/d(μ²)² ≥ 0 iff ε²/μ² − μ²/4 ≥ 1: convex up to that point, and the tangent there lies above the rest
        bend = 2 * epsilon**2 / (1 + math.hypot(1, epsilon)) * (1 - 1e-15)
        if bend <= 1e-300:
            return 1.0
        slope = math.exp(-((epsilon / math.sqrt(bend) - math.sqrt(bend) / 2) ** 2) / 2) / math.sqrt(8 * math.pi * bend)
        beyond = np.maximum(self.squares - bend, 0.0)
        values = gaussian_delta(np.minimum(self.squares, bend), epsilon) + slope * beyond
        return min(1.0, float(self.weights @ values + slope * self.excess) * (1 + _ROUNDING))

    def epsilon(self, delta: float) -> float:
        """An upper bound on the smallest ε ≥ 0 with δ(ε) ≤ δ; infinite if none below 10⁹ suffices."""
        if self.delta(0.0) <= delta:
            return 0.0
        low, high = 0.0, 1.0
        while self.delta(high) > delta:
            low, high = high, 2 * high
            if high > 1e9:
                return math.inf
        while high - low > 1e-12 * high + 1e-15:
            middle = (low + high) / 2
            low, high = (low, middle) if self.delta(middle) <= delta else (middle, high)
        return high

    def scaled(self, factor: float, added: float = 0.0) -> GaussianMixture:
        """Every square times `factor`, plus `added`: for other noise, and for further Gaussian releases."""
        squares = np.asarray(self.squares * factor + added, dtype=np.float64)
        return GaussianMixture(self.weights, squares, self.spread, self.excess * factor)

    def with_rest(self, square: float) -> GaussianMixture:
        """The same with the remaining probability as a component of its own."""
        rest = max(0.0, 1.0 - float(self.weights.sum()))
        if rest == 0 or square == 0:
            return self
        return GaussianMixture(np.append(self.weights, rest), np.append(self.squares, square), self.spread, self.excess)


def gaussian_delta(squares: Array, epsilon: float) -> Array:
    """An upper bound on δ_μ(ε) for each μ² ≥ 0.

    With a = ε/μ − μ/2 and b = ε/μ + μ/2, e^ε·φ(b) = φ(a), so the second term is φ(a)·R(b) with the Mills ratio R: there
    is no power e^ε, and for a > 0 no difference of two vanishing numbers. δ_0 = 0.
    """
    mu = np.sqrt(squares)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        a = np.where(mu > 0, epsilon / mu - mu / 2, np.inf)
        b = np.where(mu > 0, epsilon / mu + mu / 2, np.inf)
        density = np.exp(-(np.minimum(np.abs(a), 1e150) ** 2) / 2)  # √(2π)·φ(a)
        first = np.where(a > 0, density * erfcx(a / math.sqrt(2)) / 2, ndtr(-a))
        second = density * erfcx(b / math.sqrt(2)) / 2
    above = (
        first - second + _ROUNDING * first * (1 + np.minimum(np.abs(a), 40.0) ** 2)
    )  # exp also rounds its argument a²/2
    return np.asarray(np.clip(np.where(mu > 0, above, 0.0), 0.0, 1.0), dtype=np.float64)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """An upper bound on ε of one μ-GDP release at δ."""
    return GaussianMixture(np.ones(1), np.array([mu**2])).epsilon(delta)
