"""The sum of n independent copies of L on a grid of equally spaced points kΔ (a lattice): one FFT for all n summands.

L is log-normal with mean 1 (allocation.py). Sums of lattice variables stay on the lattice, so only L is moved to it:

- `spread` moves the mass of a cell [kΔ, (k+1)Δ] to its two ends and preserves the mean: larger in the convex order;
- `contracted` merges parts of neighbouring cells so that the mean of each merged part is kΔ or slightly more, and
  counts the part as kΔ: smaller in the increasing convex order, which is the order of E(M − c)₊.

The n-th power of the transform has a bounded absolute rounding error, so the distribution of the sum is computed
under several exponential tilts e^{λS}. Each gives a bound on the probability of every point; the best one is
used, and near the centre of a tilt its relative error is about n·10⁻¹⁵. If one summand alone can make S large (few
batches, little noise), no tilt has its centre between the bulk and the largest values; far out in the tail the bounds
are then mostly rounding.

A lattice is efficient if L is narrow (much noise). With little noise L is much wider than Δ, and geometric.py is
faster.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft
from scipy.special import ndtr, ndtri

from sordino.accounting.lower import balanced
from sordino.accounting.pairs import Array, GridTooLarge

MOST_POINTS = 1 << 18
_LAW_POINTS = 1 << 15
_UNIT = 2.0**-52
_LEAST_LOG = -600.0  # numbers below e^−700 are slow to compute with and far below every error bound
_COARSE = 1e-3  # a relative error of a probability that is no longer small
_TILTS = 5  # number of tilts over the range of the sum
_ORDERS = np.geomspace(1 / 64, 4, 13)  # of Chernoff bounds, in units of the best order for a normal distribution


@dataclass(frozen=True)
class Law:
    """A variable on the lattice: masses[i] at the point first + i, in units of `step` (Δ).

    Orders of exponential moments are in units of 1/Δ, and points are counted from `centre`, near the mean: products of
    an order and a point are then small, and so are their rounding errors, which a sum of n summands multiplies by n.
    """

    step: float
    first: int
    masses: Array

    @property
    def centre(self) -> int:
        """A point near the mean, which is 1."""
        return round(1 / self.step)

    @functools.cached_property
    def points(self) -> Array:
        """The points relative to the centre, in units of Δ: whole numbers."""
        return (self.first - self.centre) + np.arange(len(self.masses), dtype=np.float64)

    @functools.cached_property
    def logs(self) -> Array:
        """The logarithms of the masses."""
        with np.errstate(divide="ignore"):
            found: Array = np.log(self.masses)
        return found

    def log_moment(self, order: float) -> float:
        """log E e^{order·(L − centre)}."""
        return _log_sum(self.logs + order * self.points)

    def log_moment_of_value(self, order: float) -> float:
        """log E L·e^{order·(L − centre)}, L in units of Δ."""
        with np.errstate(divide="ignore"):
            return _log_sum(self.logs + np.log(self.points + self.centre) + order * self.points)

    def tilted(self, order: float) -> tuple[Array, float, float]:
        """The masses tilted by e^{order·L}, with their mean (from the centre) and variance."""
        logs = self.logs + order * self.points
        weights = np.exp(np.maximum(logs - logs.max(), _LEAST_LOG))
        weights /= weights.sum()
        mean = float((weights * self.points).sum())
        return weights, mean, float((weights * (self.points - mean) ** 2).sum())


def _log_sum(logs: Array) -> float:
    top = float(logs.max())
    return top + math.log(float(np.exp(np.maximum(logs - top, _LEAST_LOG)).sum()))


@dataclass(frozen=True)
class Cells:
    """L divided into the cells of a lattice: P[L in cell], E[L; cell], and the parts below and above them."""

    step: float
    first: int
    masses: Array
    means: Array
    below: float  # P[L < first·Δ]
    above: float  # P[L > last·Δ]
    excess: float  # E(L − last·Δ)₊


def cells(sigma: float, step: float, share: float) -> Cells:
    """Cells outside of which at most `share` of the mass lies, and above which at most `share` of the expectation.

    Raises:
        GridTooLarge: there are too many of them.
    """
    scale = -float(ndtri(share))
    low = math.exp(-0.5 / sigma**2 - scale / sigma)
    high = math.exp(min(0.5 / sigma**2 + scale / sigma, 700.0))
    if (high - low) / step > _LAW_POINTS:
        raise GridTooLarge(f"a lattice of {step:.3g} up to {high:.3g}")
    first, last = max(math.floor(low / step), 0), math.ceil(high / step)
    with np.errstate(divide="ignore"):
        edges = np.log(np.arange(first, last + 1, dtype=np.float64) * step)
    masses, means = (interval_masses(edges * sigma + shift) for shift in (0.5 / sigma, -0.5 / sigma))
    beyond = max(float(means[-1]) - last * step * float(masses[-1]), 0.0)
    return Cells(step, first, masses[1:-1], means[1:-1], float(masses[0]), float(masses[-1]), beyond)


def interval_masses(points: Array) -> Array:
    """The masses of the normal distribution below, between and above the points, precise in both tails."""
    edges = np.concatenate([[-np.inf], points, [np.inf]])
    a, b = edges[:-1], edges[1:]
    result: Array = np.where(a > 0, ndtr(-a) - ndtr(-b), ndtr(b) - ndtr(a))
    return result


def _shares_above(found: Cells) -> Array:
    """E[(L − kΔ); cell]/Δ of each cell [kΔ, (k+1)Δ], between 0 and its mass."""
    lower = (found.first + np.arange(len(found.masses), dtype=np.float64)) * found.step
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.nan_to_num((found.means / found.masses - lower) / found.step, nan=0.5)
    clipped: Array = found.masses * np.clip(ratio, 0.0, 1.0)
    return clipped


def spread(found: Cells) -> Law:
    """L with each cell's mass moved to its two ends, mean preserved. Below the cells L is raised, above it is
    truncated."""
    up = _shares_above(found)
    masses = np.append(found.masses - up, 0.0)
    masses[1:] += up
    masses[0] += found.below
    masses[-1] += found.above
    return Law(found.step, found.first, masses)


def contracted(found: Cells) -> Law:
    """A variable below L in the increasing convex order. Mass below the cells is left out, above them it is
    truncated."""
    up = _shares_above(found)
    masses = balanced(up, found.masses - up, found.masses)
    masses[-1] += found.above
    return Law(found.step, found.first, masses)


@dataclass(frozen=True)
class Sum:
    """Bounds masses[i] on P[S = (first + i)·Δ] for a sum of n: upper or lower ones.

    `over` bounds E[S; S above the points], `under` bounds P[S below the points]. Of upper bounds, `coarse` is the
    fraction that is a bound on rounding errors, where it is not small.
    """

    first: int
    masses: Array
    over: float
    under: float
    coarse: Array


def summed(law: Law, count: int, share: float, *, above: bool) -> Sum:
    """The distribution of the sum of `count` copies, on points outside of which mass and expectation are at most
    `share`.

    Args:
        law: the distribution of one copy.
        count: the number of copies.
        share: the bound on what lies outside of the points.
        above: whether the masses are upper bounds.

    Raises:
        GridTooLarge: there are too many points.
    """
    first, last, over, under = _window(law, count, share)
    if last - first >= MOST_POINTS:
        raise GridTooLarge(f"{last - first + 1} points for a sum over batches")
    size = next_fast_len(last - first + 1, real=True)
    points = first + np.arange(last - first + 1, dtype=np.float64)  # from count·centre
    best = np.full(len(points), np.inf if above else -np.inf)
    coarse = np.zeros(len(points))
    for order in _tilts(law, count, first, last):
        weights, _, variance = law.tilted(order)
        power, error = _power(weights, law.first - law.centre, count, size, first, len(points))
        scale = count * law.log_moment(order) - order * points
        if above:
            bound = np.log(power + error) + scale
            part = error / (power + error)
            coarse = np.where(bound < best, np.where(part > _COARSE, part, 0.0), coarse)
            best = np.minimum(best, bound)
        else:  # what the transform aliases onto the points is subtracted as well
            surely = np.maximum(power - error - _outside(law, count, order, variance, (first, last)), 0.0)
            with np.errstate(divide="ignore"):
                best = np.maximum(best, np.log(surely) + scale)
    return Sum(first + count * law.centre, np.exp(np.minimum(best, 0.0)), over * law.step, under, coarse)


def _window(law: Law, count: int, share: float) -> tuple[int, int, float, float]:
    """(first point, last point, E[S; above], P[below]) by Chernoff bounds; points from count·centre."""
    unit = math.sqrt(-2 * math.log(share) / (count * max(law.tilted(0.0)[2], 0.25)))
    wanted = math.log(share)
    low, high = count * float(law.points[0]), count * float(law.points[-1])
    over = under = 0.0
    for order in (unit * _ORDERS).tolist():
        moment = (count - 1) * law.log_moment(order) + math.log(count) + law.log_moment_of_value(order)
        if (moment - wanted) / order < high:
            high, over = (moment - wanted) / order, share
        below = count * law.log_moment(-order)
        if (wanted - below) / order > low:
            low, under = (wanted - below) / order, share
    return math.floor(low), math.ceil(high), over, under


def _tilts(law: Law, count: int, first: int, last: int) -> list[float]:
    """Orders whose tilted sums have means at equal distances over the points; 0 is one of them."""
    _, mean, variance = law.tilted(0.0)
    found = [0.0]
    for end in (last / count, first / count):
        order = 0.0
        for aim in np.linspace(mean, end, _TILTS // 2 + 2)[1:-1].tolist():
            order = _order_with_mean(law, aim, order, (aim - mean) / max(variance, 0.25))
            found.append(order)
    return found


def _order_with_mean(law: Law, aim: float, start: float, step: float) -> float:
    """An order, from `start` on in the direction of `step`, whose tilted mean is near `aim`; any order is valid."""
    near, far, gap = start, start, abs(aim - law.tilted(start)[1])
    order = start
    for _ in range(40):
        order = far + step if near == far else (near + far) / 2
        missing = (aim - law.tilted(order)[1]) * math.copysign(1.0, step)
        if abs(missing) <= 0.25 * gap:
            break
        if missing < 0:
            far = order
        elif near == far:
            near = far = order
        else:
            near = order
    return order


def _outside(law: Law, count: int, order: float, variance: float, ends: tuple[int, int]) -> float:
    """A bound on the mass of the sum, tilted by `order`, outside of the points; `variance`: of the tilted
    distribution."""
    here = law.log_moment(order)
    unit = 8.0 / math.sqrt(count * max(variance, 0.25))
    sides = [0.0, 0.0]
    for s in (unit * _ORDERS).tolist():
        below = count * (law.log_moment(order - s) - here) + s * (ends[0] - 1)
        above = count * (law.log_moment(order + s) - here) - s * (ends[1] + 1)
        sides = [min(sides[0], below), min(sides[1], above)]
    possible = ends[0] > count * law.points[0], ends[1] < count * law.points[-1]
    return sum(math.exp(side) for side, there in zip(sides, possible, strict=True) if there)


def _power(weights: Array, start: int, count: int, size: int, first: int, points: int) -> tuple[Array, float]:
    """The distribution of the sum of `count` variables with these weights, modulo `size`, and a bound on each error.

    An output of the transform has an error of at most log₂(size) + 6 units of the l1 norm of its input; the logarithm
    of a number near 1 of 4 units, its argument of 2π units. The exponent n·log has n times these errors, and an error
    of the product Y in one frequency changes a probability by 1/size of it.
    """
    top = int(weights.argmax())
    folded = np.zeros(-(-len(weights) // size) * size)
    folded[: len(weights)] = weights
    folded = np.roll(folded.reshape(-1, size).sum(axis=0), -top)
    moved = float(weights[:top].sum() + weights[top + 1 :].sum())
    folded[0] = math.fsum([folded[0], -float(weights[top]), -moved])  # the total becomes 0
    base = 1 + rfft(folded)
    sizes = np.abs(base)
    with np.errstate(divide="ignore", invalid="ignore"):  # a zero of the transform: its power is 0
        product = np.exp(count * np.log(base))
    product = np.where(sizes > 0, product, 0.0)
    units = count * (2 * moved * (math.log2(size) + 6) + 12)
    rest = float((2 * np.minimum(sizes, 1.0) ** (count - 1)).sum()) * units
    rest += float((2 * np.abs(product)).sum()) * (2 * math.log2(size) + 16)
    offset = count * (start + top)
    found = np.roll(irfft(product, size), (offset - first) % size)[:points]
    return np.maximum(found, 0.0), _UNIT * rest / size
