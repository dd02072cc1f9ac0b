"""One coordinate of ModelMix: noise plus a uniform, shifted by one record's contribution; its moments and worst shift.

All in units of the noise's scale (a Gaussian's standard deviation, a Laplace's scale): f is the density of N + U with U
uniform of width `width`, P₀ = f, P_v = f(· − v), λ = log P_v/P₀. f is log-concave and even. Two things are computed:

    moments      M_v(u) = E_{P₀}[e^{uλ}], for real and complex u, as the excess M_v(u) − 1 (precise for tiny shifts)
    worst case   which of the vectors with Σ size(v_j) ≤ c distinguishes the two datasets best
                 (size = v² and l2 clipping for Gaussian noise, |v| and l1 clipping for Laplace noise)

The theorems (width, worst case, the criterion that `margin` verifies) are proved in docs/guarantees/modelmix.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr

Array = NDArray[np.float64]
Complex = NDArray[Any]

_POINTS, _WEIGHTS = np.polynomial.legendre.leggauss(20)
_TAIL = 12.0  # standard deviations beyond which a Gaussian is truncated: less than 1e-32
_LOG_ROOT = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True)
class Coordinate:
    """N + U: `noise` of scale 1 plus a uniform of width `width` > 0."""

    noise: Literal["gaussian", "laplace"]
    width: float

    def log_density(self, o: Array) -> Array:
        inner, outer = np.abs(o) + self.width / 2, np.abs(o) - self.width / 2  # distances to the far and near edge
        if self.noise == "gaussian":
            near = log_ndtr(-outer)
            return near + np.log(-np.expm1(log_ndtr(-inner) - near)) - math.log(self.width)
        inside = -np.expm1(np.minimum(outer, 0.0)) - np.expm1(-inner)
        tail = -np.maximum(outer, 0.0) + math.log(-math.expm1(-self.width))
        return np.where(outer < 0, np.log(np.maximum(inside, 1e-300)), tail) - math.log(2 * self.width)

    def score(self, o: Array) -> Array:
        """−(log f)′, odd and non-decreasing."""
        inner, outer = np.abs(o) + self.width / 2, np.abs(o) - self.width / 2
        if self.noise == "gaussian":
            log_mass = self.log_density(o) + math.log(self.width) + _LOG_ROOT
            size = np.exp(-(outer**2) / 2 - log_mass) - np.exp(-(inner**2) / 2 - log_mass)
        else:
            inside = (np.exp(np.minimum(outer, 0.0)) - np.exp(-inner)) / (2 * self.width)
            size = np.where(outer < 0, inside * np.exp(-self.log_density(o)), 1.0)
        return np.asarray(np.sign(o) * size)


def size(noise: str, shift: float) -> float:
    """The part of the clipping budget that a shift uses: l2 clipping for Gaussian noise, l1 for Laplace."""
    return shift**2 if noise == "gaussian" else shift


@dataclass(frozen=True)
class Nodes:
    """A quadrature for P₀ that is precise for e^{uλ}, 0 ≤ Re u ≤ `top`: E_{P₀}[g] = Σ mass · g."""

    o: Array
    mass: Array
    ratio: Array  # λ


@lru_cache(maxsize=64)
def nodes(coordinate: Coordinate, shift: float, top: float, fineness: int = 1) -> Nodes:
    """Gauss–Legendre on panels of at most one scale around both edges of the uniform; flat parts are one panel."""
    half = coordinate.width / 2
    if coordinate.noise == "gaussian":
        reach = _TAIL + top * shift  # e^{uλ}·f is f shifted by at most Re(u)·v
        left, right = (-half - _TAIL, -half + _TAIL + reach), (half - _TAIL - shift, half + reach)
        marks: list[float] = []
    else:
        reach = 40.0
        left, right = (-half - reach, -half + shift + reach), (half - reach, half + shift + reach)
        marks = [-half, -half + shift, half, half + shift]  # where f, or f(· − v), has a kink
    spans = [left, (left[1], right[0]), right] if left[1] < right[0] else [(left[0], right[1])]
    edges = []
    for index, (low, high) in enumerate(spans):
        flat = len(spans) == 3 and index == 1
        cuts = sorted({low, high, *(m for m in marks if low < m < high)})
        for a, b in pairwise(cuts):
            edges.append(np.linspace(a, b, 2 if flat else 1 + fineness * max(1, math.ceil(b - a)))[:-1])
    ends = np.concatenate([*edges, [spans[-1][1]]])
    halves = np.diff(ends)[:, None] / 2
    o = ((ends[:-1, None] + halves) + halves * _POINTS).ravel()
    logs = coordinate.log_density(o)
    return Nodes(o, (halves * _WEIGHTS).ravel() * np.exp(logs), coordinate.log_density(o - shift) - logs)


def excess(at: Nodes, orders: Any) -> Any:
    """M(u) − 1 = E[e^{uλ} − 1 − u(e^λ − 1)] for an array of real or complex u; every term is small if λ is."""
    u = np.asarray(orders)[..., None]
    with np.errstate(over="ignore"):
        return (np.expm1(u * at.ratio) - u * np.expm1(at.ratio)) @ at.mass


SHIFTS = (0.1, 0.3, 0.5, 0.7, 0.85, 1.0)  # shifts at which the worst case is verified, in units of the largest one


@lru_cache(maxsize=256)
def margin(coordinate: Coordinate, shift: float, level: int) -> float:
    """The smallest relative margin of the criterion S_level for all shifts up to `shift`; positive: it is met.

    S_j: E_{P_v}[e^{jY}·L(Y − y)·(A₁ − A₂)] ≥ 0 for all y and all shifts v₁ > v₂, where Y = λ₁ + λ₂, L is the logistic
    function and A_i = ∂λ_i/∂o_i over the derivative of size(v_i). S_0 … S_j make the Rényi divergence of the sampled
    pair Schur-convex in the sizes of the shifts at every order in (1, j + 2], fractional ones included: then the
    worst case is shifts as unequal as the clipping allows. Divided by size(v₁) − size(v₂), so that it does not vanish
    with the shifts; −1 if rounding does not allow a decision.
    """
    shift = max(shift, 0.5)  # a result for larger shifts holds for smaller ones; tiny ones are lost in rounding
    coordinate = Coordinate(coordinate.noise, max(coordinate.width, 0.1))  # below that, the margin scales with width⁴
    shifts = shift * np.array(SHIFTS)
    worst = math.inf
    for offset in (0.5,) if shift <= 2 else (0.3, 0.7):
        u = level + offset + 1j * np.arange(0.0, 9.0, 0.2 * min(offset, 1 - offset))  # π/sin decays like e^{−π|Im u|}
        found = [(v, *_slope_moments(coordinate, float(v), u)) for v in shifts]
        for two, one in combinations(found, 2):
            worst = min(worst, _pair_margin(coordinate, one, two, u, level))
    for end in (level, level + 1):  # y → −∞ and y → ∞: the powers e^{jY} themselves
        slopes = [(v, _slope_moments(coordinate, float(v), np.array([end + 0j]))[0][0].real) for v in shifts]
        for (v2, a2), (v1, a1) in pairwise(slopes):
            room = size(coordinate.noise, v1) - size(coordinate.noise, v2)
            worst = min(worst, float((a1 - a2 - 1e-13 * a1) / (a1 + a2)) / room)
    return worst


Moments = tuple[float, Complex, Complex, float, float]


def _slope_moments(coordinate: Coordinate, shift: float, u: Complex) -> tuple[Complex, Complex, float, float]:
    """E_{P_v}[e^{uλ}·A] and E_{P_v}[e^{uλ}], both divided by the latter at Re u; mean and variance of λ there."""
    at = nodes(coordinate, shift, float(u[0].real) + 1)
    weights = at.mass * np.exp((1 + u[0].real) * at.ratio)
    kept = weights > 1e-19 * weights.max()
    weights, ratio, o = weights[kept], at.ratio[kept], at.o[kept]
    total = float(weights.sum())
    mean = float(weights @ ratio) / total
    variance = float(weights @ (ratio - mean) ** 2) / total
    waves = np.exp(1j * np.outer(u.imag, ratio))
    slope = coordinate.score(o) - coordinate.score(o - shift)
    if coordinate.noise == "gaussian":
        slope = slope / shift
    return waves @ (weights * slope) / total, waves @ weights / total, mean, variance


def _pair_margin(coordinate: Coordinate, one: Moments, two: Moments, u: Complex, level: int) -> float:
    """The margin of one pair of shifts at several y, by Mellin inversion: L(x) = (1/2πi)∫ π/sin(πu)·e^{ux} du."""
    (v1, a1, m1, mean1, var1), (v2, a2, m2, mean2, var2) = one, two
    y = mean1 + mean2 + math.sqrt(var1 + var2) * np.linspace(-2.5, 2.5, 11)
    kernel = np.pi / np.sin(np.pi * (u - level)) * np.exp(-1j * np.outer(y, u.imag))
    kernel[:, 0] /= 2  # the other half of the line is the complex conjugate
    first, second = (kernel @ (a1 * m2)).real, (kernel @ (a2 * m1)).real
    noise = 1e-13 * float(np.abs(kernel).sum(axis=1).max()) * (abs(a1[0]) + abs(a2[0]))
    total = first + second
    if float(total.min()) <= 10 * noise:
        return -1.0
    return float(((first - second - noise) / total).min()) / (size(coordinate.noise, v1) - size(coordinate.noise, v2))
