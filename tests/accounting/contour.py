"""δ(ε) of composed mixtures of Gaussians by a contour integral: a reference that shares nothing with the accountant.

With the privacy loss L of the composition and any θ > 0,

    E(1 − e^{ε−L})₊ = (1/2π)·∫ M(θ+is)·e^{−(θ+is)ε} / ((θ+is)(1+θ+is)) ds,    M(z) = E e^{zL} = Π ∫ P^{1+z}·Q^{−z} dx

(Alghamdi et al. 2023, the saddle-point accountant). Both integrands are analytic, so trapezoidal sums converge
exponentially. There is no grid of losses, no rounding of losses and no FFT. What is too hard raises `TooHard`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import minimize_scalar

Parts = tuple[tuple[float, float], ...]  # (weight, mean) of Gaussians


class TooHard(Exception):
    """The integral needs too many points, or cancels."""


@dataclass(frozen=True)
class Pair:
    """P against Q, both mixtures of Gaussians of standard deviation σ; `fine` divides the steps of all sums."""

    sigma: float
    p: Parts
    q: Parts
    fine: int = 1

    def swapped(self) -> Pair:
        return Pair(self.sigma, self.q, self.p, self.fine)

    def tilted(self, theta: float, most: float) -> tuple[float, Any, Any]:
        """log E e^{θL}, and the tilted distribution of L as weights and values, for orders up to θ + i·most."""
        x = self._points(theta, most)
        losses = self._log_ratio(x, self.p) - self._log_ratio(x, self.q)
        logs = self._log_ratio(x, self.p) - x**2 / 2 / self.sigma**2 + theta * losses
        logs += math.log(x[1] - x[0]) - math.log(self.sigma) - 0.5 * math.log(2 * math.pi)
        weights = np.exp(logs - logs.max())
        return float(logs.max()) + math.log(weights.sum()), weights / weights.sum(), losses

    def _log_ratio(self, x: Any, parts: Parts) -> Any:
        """log of the mixture over N(0, σ²), precise near 0."""
        small, large = np.full_like(x, math.fsum(w for w, _ in parts) - 1), np.full_like(x, -np.inf)
        for weight, mean in parts:
            exponent = (x * mean - mean**2 / 2) / self.sigma**2
            small += weight * np.expm1(np.minimum(exponent, 50.0))
            large = np.logaddexp(large, math.log(weight) + exponent)
        return np.where(np.abs(small) < 0.5, np.log1p(np.maximum(small, -0.9)), large)

    def _points(self, theta: float, most: float) -> Any:
        means = [mean for _, mean in self.p + self.q]
        span = max(means) - min(means)
        low, high = min(means) - 60 * self.sigma - 2 * theta * span, max(means) + 60 * self.sigma + 2 * theta * span
        for _ in range(40):  # to where the tilted density is within e^−50 of its maximum
            x = np.linspace(low, high, 6001)
            logs = (1 + theta) * self._log_ratio(x, self.p) - theta * self._log_ratio(x, self.q)
            logs -= x**2 / 2 / self.sigma**2
            inside = np.flatnonzero(logs > logs.max() - 50)
            left, right = x[max(inside[0] - 1, 0)], x[min(inside[-1] + 1, 6000)]
            if right - left > 0.5 * (high - low):
                break
            low, high = left, right
        step = min(
            self.sigma / 3 / math.sqrt(1 + theta), self.sigma**2 / 2 / span,
            math.pi * self.sigma**2 / 1.5 / span / max(most, 1e-9),
        )  # fmt: skip
        count = max(200, int((right - left) / step * self.fine) + 2)
        if count > 60_000:
            raise TooHard(f"{count} points")
        return np.linspace(left, right, count)


def poisson(sigma: float, rate: float, shift: float = 1.0) -> Pair:
    """The pair of a Poisson sample, for removing a record."""
    mixed = ((1 - rate, 0.0), (rate, shift)) if rate < 1 else ((1.0, shift),)
    return Pair(sigma, mixed, ((1.0, 0.0),))


def log_delta(parts: Sequence[tuple[Pair, int]], epsilon: float) -> tuple[float, float]:
    """(log δ(ε), θ) of the composition; near ε, log δ falls by θ per unit.

    Raises:
        TooHard: the result would not be precise.
    """

    def bound(log_theta: float) -> float:
        theta = math.exp(log_theta)
        total = sum(count * pair.tilted(theta, 0.0)[0] for pair, count in parts)
        return float(total - theta * epsilon - math.log(theta) - math.log1p(theta))

    found = minimize_scalar(bound, bounds=(-18, 20), method="bounded", options={"xatol": 0.02})
    theta, fine = math.exp(found.x), parts[0][0].fine
    spread = math.sqrt(sum(count * _variance(*pair.tilted(theta, 0.0)[1:]) for pair, count in parts))
    step = 2 * math.pi * min(theta / (max(-found.fun, 1) + 32), 1 / (22 * spread), (1 + theta) / 60) / fine
    most = 8.6 / spread * fine
    for _ in range(9):
        value, scale, rest = _sum(parts, epsilon, theta, step, most)
        if rest < 1e-9 * abs(value):
            return math.log(value) + scale - theta * epsilon, theta
        most *= 2
    raise TooHard("the transform decays slowly")


def _variance(weights: Any, values: Any) -> float:
    return float(weights @ (values - weights @ values) ** 2)


def _sum(
    parts: Sequence[tuple[Pair, int]], epsilon: float, theta: float, step: float, most: float
) -> tuple[float, float, float]:
    """(the integral divided by e^scale, scale, a bound on what was left out)."""
    if most / step > 30_000:
        raise TooHard(f"{most / step:.0f} points of the contour")
    s = np.arange(int(most / step) + 2) * step
    exponent, scale = np.zeros(len(s), dtype=complex), 0.0
    for pair, count in parts:
        cumulant, weights, losses = pair.tilted(theta, most)
        mean, scale = float(weights @ losses), scale + count * cumulant
        for start in range(0, len(s), 256):
            part = slice(start, start + 256)
            turned = np.exp(1j * np.outer(s[part], losses - mean)) - 1
            exponent[part] += count * (np.log1p(turned @ weights) + 1j * s[part] * mean)
    z = theta + 1j * s
    values = np.exp(exponent - 1j * s * epsilon) / (z * (1 + z))
    total = float((2 * values.real.sum() - values.real[0]) * step / 2 / math.pi)
    if total <= 1e-8 * np.abs(values).sum() * step:
        raise TooHard("the integral cancels")
    return total, scale, float(np.abs(values[-max(3, len(s) // 50) :]).max() * most)
