"""Hockey-stick divergences by plain quadrature: the oracle that the accountant's tests compare with."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom, norm

Mixture = list[tuple[float, float]]  # (weight, mean) of Gaussians with a common standard deviation


def divergence(p: Mixture, q: Mixture, sigma: float, epsilon: float) -> float:
    """∫ max(0, p − e^ε q) of two mixtures on the line."""
    means = [mean for _, mean in p + q]
    x = np.linspace(min(means) - 14 * sigma, max(means) + 14 * sigma, 60_001)
    gap = _density(p, x, sigma) - math.exp(epsilon) * _density(q, x, sigma)
    return float(np.trapezoid(np.maximum(gap, 0.0), x))


def _density(mixture: Mixture, x: NDArray[np.float64], sigma: float) -> NDArray[np.float64]:
    return sum(weight * norm.pdf(x, mean, sigma) for weight, mean in mixture)


def planar_divergence(p: list, q: list, sigma: float, epsilon: float) -> float:
    """The same for mixtures of round Gaussians in the plane, means as (x, y)."""
    axis = np.linspace(-1 - 9 * sigma, 1 + 9 * sigma, 401)
    x, y = np.meshgrid(axis, axis)

    def density(mixture: list) -> NDArray[np.float64]:
        return sum(w * np.exp(-((x - a) ** 2 + (y - b) ** 2) / (2 * sigma**2)) for w, (a, b) in mixture) / (
            2 * math.pi * sigma**2
        )

    gap = density(p) - math.exp(epsilon) * density(q)
    return float(np.maximum(gap, 0.0).sum() * (axis[1] - axis[0]) ** 2)


def truncated_poisson(others: int, rate: float, cap: int, record: float | None, other: float) -> Mixture:
    """The exact law of a truncated Poisson batch's sum: `others` records of one value, and perhaps one of another."""
    sums: dict[float, float] = {}

    def add(probability: float, value: float) -> None:
        sums[value] = sums.get(value, 0.0) + probability

    for drawn in range(others + 1):
        p = float(binom.pmf(drawn, others, rate))
        if record is None:
            add(p, min(drawn, cap) * other)
            continue
        add(p * (1 - rate), min(drawn, cap) * other)
        if drawn + 1 <= cap:
            add(p * rate, drawn * other + record)
        else:
            kept = cap / (drawn + 1)
            add(p * rate * kept, (cap - 1) * other + record)
            add(p * rate * (1 - kept), cap * other)
    return [(weight, mean) for mean, weight in sums.items()]
