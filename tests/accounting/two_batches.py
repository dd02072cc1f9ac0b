"""δ of an epoch of which two batches were released, composed with other releases: quadrature that is split at its kink.

It shares nothing with the accountant. With M = (L₁ + L₂ + t − 2)/t and R the likelihood ratio of the other releases,

    removing: E(M·R − e^ε)₊ = E[R/t·E(L₁ + L₂ − c)₊],      c = t·e^ε/R − t + 2
    adding:   E(1 − e^ε·M·R)₊ = E[e^ε·R/t·E(c − L₁ − L₂)₊],  c = t·e^−ε/R − t + 2

The inner expectations are over L₁ > L₂ in closed form, and over L₂ by Gauss–Legendre rules on either side of L₂ = c/2,
where the closed form is not smooth; the outer one is a trapezoidal rule, whose integrand is smooth.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

Array = npt.NDArray[np.float64]
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(160)
_PANELS = 3


def delta(batches: int, sigma: float, epsilon: float, *, removing: bool, others: list[tuple[float, float]]) -> float:
    """δ at ε; `others` are (sampling rate, noise multiplier) of Poisson-sampled Gaussians, one at most below rate 1."""
    s, ratios, weights = 1 / sigma, np.ones(1), np.ones(1)
    for rate, noise in others:
        z = np.linspace(-14 - 1 / noise, 14 + 2.2 / noise, 401)
        ratio = 1 - rate + rate * np.exp(z / noise - 0.5 / noise**2)
        ratios = np.multiply.outer(ratios, ratio).ravel()
        weights = np.multiply.outer(weights, _density(z) * (z[1] - z[0])).ravel()
    levels = batches * math.exp(epsilon if removing else -epsilon) / ratios - (batches - 2)
    if removing:
        return float((weights * ratios / batches * _above(levels, s)).sum())
    return float((weights * ratios / batches * math.exp(epsilon) * _below(levels, s)).sum())


def _above(levels: Array, s: float) -> Array:
    """E(L₁ + L₂ − c)₊."""
    found = np.maximum(2 - levels, 0.0)
    inside = levels > 0
    c = levels[inside][:, None]
    middle = np.clip(np.log(c / 2) / s + s / 2, -16 - s, 16 + 2.5 * s)
    total = np.zeros(len(c))
    for low, high in ((np.full_like(middle, -16 - s), middle), (middle, np.full_like(middle, 16 + 2.5 * s))):
        z, w = _panels(low, high)
        second = np.exp(s * z - s * s / 2)
        least = np.maximum(second, c - second)  # L₁ is larger than L₂, and the sum larger than c
        total += (w * np.maximum(_mean(least, s) + (second - c) * _mass(least, s), 0)).sum(1)
    found[inside] = 2 * total
    return found


def _below(levels: Array, s: float) -> Array:
    """E(c − L₁ − L₂)₊."""
    found = np.zeros_like(levels)
    inside = levels > 0
    c = levels[inside][:, None]
    middle = np.clip(np.log(c / 2) / s + s / 2, -16 - s, 16 + 2.5 * s)
    z, w = _panels(np.full_like(middle, -16 - s), middle)
    second = np.exp(s * z - s * s / 2)
    most = np.maximum(c - second, second)
    mass, mean = _mass(second, s) - _mass(most, s), _mean(second, s) - _mean(most, s)
    found[inside] = 2 * (w * np.maximum((c - second) * mass - mean, 0)).sum(1)
    return found


def _panels(low: Array, high: Array) -> tuple[Array, Array]:
    """Nodes between the ends, in several panels, and their weights times the normal density."""
    edges = [low + (high - low) * part / _PANELS for part in range(_PANELS + 1)]
    halves = [(b - a) / 2 for a, b in itertools.pairwise(edges)]
    z = np.concatenate([a + h * (1 + _NODES) for a, h in zip(edges, halves, strict=False)], axis=1)
    return z, np.concatenate([h * _WEIGHTS for h in halves], axis=1) * _density(z)


def _density(z: Array) -> Array:
    found: Array = np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return found


def _mass(value: Array, s: float) -> Array:
    """P[L > value]."""
    found: Array = ndtr(-(np.log(value) / s + s / 2))
    return found


def _mean(value: Array, s: float) -> Array:
    """E[L; L > value]."""
    found: Array = ndtr(-(np.log(value) / s - s / 2))
    return found
