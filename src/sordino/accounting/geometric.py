"""Sums of independent positive random variables on geometric grids, larger or smaller in the convex order.

A variable takes values e^{k·stride·h}. The sum of two such variables has values between these points:

- `Spread` (from above) moves each value to its two neighbours and preserves the mean: a mean-preserving spread;
- `Contracted` (from below) replaces the values in a cell by their mean: a conditional expectation.

The sum e^{ih} + e^{jh} = e^{jh}·(1 + e^{(i−j)h}) is at a distance from the point j that depends on j − i only.
Differences whose sums fall into the same cell above j are handled together: one short convolution for each cell. If the
difference is so large that the sum stays in the cell of j, prefix sums are used. Only products and sums of positive
numbers occur, so every probability has a small relative error.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from sordino.accounting.pairs import Array, GridTooLarge
from sordino.native.convolutions import add_convolutions

MOST_CELLS = 1 << 15
_MOST_LOGS = 690.0  # length of a grid: quotients of its values are finite doubles
_ALIKE = 4  # grids whose steps differ by at most this factor are converted to the finer one
_FEW_PAIRS = 1 << 18  # of values of other grids: they are added one by one, which takes no longer than a conversion
_PAIRS = 1 << 17  # pairs of values added at a time
_MOST_POINTS = 1 << 22  # of a grid before its tails are cut: 32 MB


@dataclass(frozen=True)
class Spread:
    """masses[i] is the probability of the value e^{(lower+i)·stride·h}, `zero` that of 0.

    `lost` is the expectation that was truncated at the top.
    """

    stride: int
    lower: int
    masses: Array
    zero: float = 0.0
    lost: float = 0.0

    def logs(self, interval: float) -> Array:
        """The logarithms of the values."""
        return (self.lower + np.arange(len(self.masses), dtype=np.float64)) * (self.stride * interval)

    def plus(self, other: Spread, stride: int, interval: float) -> Spread:
        """The sum with an independent variable, spread onto the grid of `stride`, a divisor of both strides."""
        if _pair_by_pair(self, other, interval):
            return self._plus_unlike(other, stride, interval)
        common = min(self.stride, other.stride)
        a = self.refined(common)
        b = a if other is self else other.refined(common)
        step, fine, ratio = common * interval, stride * interval, common // stride
        places = _places(step, fine)
        low = min(a.lower, b.lower)
        result = np.zeros(_size(a, b, low, ratio, fine))
        if max(len(a.masses), len(b.masses)) * step > _MOST_LOGS:
            raise GridTooLarge("quotients of the values of a sum over batches are no doubles")
        for large, small, factor, least in _orders(a, b):
            start = (large.lower - low) * ratio
            near = _Near(large, small, factor, least, places)
            near.add(small.masses, near.often * (1 - near.up), large.masses, result, start, ratio)
            near.add(small.masses, near.often * near.up, large.masses, result, start + 1, ratio)
            # e^{jh} + s with s < e^{jh}·(e^fine − 1) rises to the next point with probability s / (e^{jh}·(e^fine − 1))
            scale = small.lower * step
            mass = factor * large.masses * _far(small, small.masses, places.reach, large)
            mean = _far(small, small.masses * np.exp(small.logs(interval) - scale), places.reach, large)
            there = np.minimum(scale - large.logs(interval), 0.0)  # positive: nothing is far below it
            up_mass = factor * large.masses * mean * np.exp(there) / math.expm1(fine)
            up_mass = np.minimum(up_mass, mass)
            _add(result, start, ratio, mass - up_mass + factor * small.zero * large.masses)
            _add(result, start + 1, ratio, up_mass)
        return Spread(stride, low * ratio, result, a.zero * b.zero, a.lost + b.lost)

    def _plus_unlike(self, other: Spread, stride: int, interval: float) -> Spread:
        """The same for grids with very different steps, pair by pair."""
        pairs = _Pairs(self, other, stride, interval)
        result = np.zeros(pairs.size)
        for rows, places, excess in pairs.blocks():
            up = np.clip(np.expm1(excess) / math.expm1(pairs.fine), 0.0, 1.0)
            both = (other.masses[rows, None] * self.masses).ravel()
            upper = both * up
            result += np.bincount(places, both - upper, pairs.size) + np.bincount(places + 1, upper, pairs.size)
        result[pairs.here - pairs.first] += other.zero * self.masses
        result[pairs.there - pairs.first] += self.zero * other.masses
        return Spread(stride, pairs.first, result, self.zero * other.zero, self.lost + other.lost)

    def refined(self, stride: int) -> Spread:
        """The same variable on a finer grid."""
        ratio = self.stride // stride
        if ratio == 1:
            return self
        masses = np.zeros(_affordable((len(self.masses) - 1) * ratio + 1))
        masses[::ratio] = self.masses
        return Spread(stride, self.lower * ratio, masses, self.zero, self.lost)

    def trimmed(self, interval: float, share: float, weight: float) -> Spread:
        """The variable on fewer points, larger in the convex order except for the expectation that is lost.

        The largest values are truncated to the last kept point; their expectation loses at most share·weight. The
        smallest are spread between 0 and the first kept point; 0 gets at most `share`.
        """
        logs, masses = self.logs(interval), self.masses
        beyond = np.cumsum(masses[:0:-1])[::-1]  # P[S > v_k]
        above = np.append(np.cumsum((beyond * np.diff(np.exp(logs)))[::-1])[::-1], 0.0)  # E (S − v_k)₊
        last = int(np.argmax(above <= share * weight))
        first = min(int(np.searchsorted(np.cumsum(masses), share)), last)
        if last - first >= MOST_CELLS:
            raise GridTooLarge(f"{last - first + 1} cells for a sum over batches")
        kept = masses[first : last + 1].copy()
        kept[-1] += masses[last + 1 :].sum()
        stay = masses[:first] * np.exp(logs[:first] - logs[first])
        kept[0] += stay.sum()
        zero = self.zero + float((masses[:first] - stay).sum())
        return Spread(self.stride, self.lower + first, kept, zero, self.lost + float(above[last]))


@dataclass(frozen=True)
class Contracted:
    """masses[i] is the probability of the value means[i]/masses[i], which lies near e^{(lower+i)·stride·h}."""

    stride: int
    lower: int
    masses: Array
    means: Array

    def plus(self, other: Contracted, stride: int, interval: float) -> Contracted:
        """The sum with an independent variable; pairs whose nominal points have their sum in one cell are merged."""
        if _pair_by_pair(self, other, interval):
            return self._plus_unlike(other, stride, interval)
        common = min(self.stride, other.stride)
        a = self._refined(common)
        b = a if other is self else other._refined(common)
        fine, ratio = stride * interval, common // stride
        places = _places(common * interval, fine)
        low = min(a.lower, b.lower)
        masses = np.zeros(_size(a, b, low, ratio, fine))
        means = masses.copy()
        for large, small, factor, least in _orders(a, b):
            start = (large.lower - low) * ratio
            near = _Near(large, small, factor, least, places)
            near.add(small.masses, near.often, large.masses, masses, start, ratio)
            near.add(small.masses, near.often, large.means, means, start, ratio)
            near.add(small.means, near.often, large.masses, means, start, ratio)
            mass = factor * _far(small, small.masses, places.reach, large)
            mean = factor * _far(small, small.means, places.reach, large)
            _add(masses, start, ratio, large.masses * mass)
            _add(means, start, ratio, large.means * mass + large.masses * mean)
        return Contracted(stride, low * ratio, masses, means)

    def _plus_unlike(self, other: Contracted, stride: int, interval: float) -> Contracted:
        """The same for grids with very different steps, pair by pair."""
        pairs = _Pairs(self, other, stride, interval)
        masses, means = np.zeros((2, pairs.size))
        for rows, places, _ in pairs.blocks():
            mass, mean = other.masses[rows, None], other.means[rows, None]
            masses += np.bincount(places, (mass * self.masses).ravel(), pairs.size)
            means += np.bincount(places, (mean * self.masses + mass * self.means).ravel(), pairs.size)
        return Contracted(stride, pairs.first, masses, means)

    def _refined(self, stride: int) -> Contracted:
        ratio = self.stride // stride
        if ratio == 1:
            return self
        masses, means = np.zeros((2, _affordable((len(self.masses) - 1) * ratio + 1)))
        masses[::ratio], means[::ratio] = self.masses, self.means
        return Contracted(stride, self.lower * ratio, masses, means)

    def trimmed(self, share: float) -> Contracted:
        """The same with the smallest and the largest values merged; they have at most `share` of mass and mean."""
        first = int(np.searchsorted(np.cumsum(self.masses), share))
        last = len(self.means) - 1 - int(np.searchsorted(np.cumsum(self.means[::-1]), share * self.means.sum()))
        first = min(first, last)
        if last - first >= MOST_CELLS:
            raise GridTooLarge(f"{last - first + 1} cells for a sum over batches")
        masses, means = self.masses[first : last + 1].copy(), self.means[first : last + 1].copy()
        for kept, everything in ((masses, self.masses), (means, self.means)):
            kept[0] += everything[:first].sum()
            kept[-1] += everything[last + 1 :].sum()
        return Contracted(self.stride, self.lower + first, masses, means)


_Variable = TypeVar("_Variable", Spread, Contracted)


@dataclass(frozen=True)
class _Places:
    """For the differences d < reach: the cell of the finer grid that contains log(1 + e^{−d·step}), counted from the
    larger value, and the part of the mass that goes to the upper end of that cell."""

    cells: NDArray[np.int64]
    up: Array
    reach: int


@functools.lru_cache(64)
def _places(step: float, fine: float) -> _Places:
    """Beyond `reach` the sum of two values stays in the cell of the larger one, even after rounding."""
    reach = _affordable(math.ceil(max(-math.log(math.expm1(fine)), 0.0) / step) + 2)
    excess = np.log1p(np.exp(-np.arange(reach) * step))
    cells = np.floor(excess / fine)
    up = np.clip(np.expm1(excess - cells * fine) / math.expm1(fine), 0.0, 1.0)
    return _Places(cells.astype(np.int64), up, reach)


class _Near(Generic[_Variable]):
    """The pairs of a point of `large` and a point of `small` that is `least` to reach − 1 points below it."""

    def __init__(self, large: _Variable, small: _Variable, factor: float, least: int, places: _Places) -> None:
        self.offset = large.lower - small.lower
        self.counts = len(large.masses), len(small.masses)
        self.least = max(least, self.offset - self.counts[1] + 1)
        self.stop = max(min(places.reach, self.offset + self.counts[0]), self.least)
        self.often = np.full(self.stop - self.least, factor)  # how often a pair with this difference occurs
        if self.least == 0:
            self.often[:1] = 1.0
        self.cells = places.cells[self.least : self.stop]
        self.up = places.up[self.least : self.stop]

    def groups(self) -> NDArray[np.int64]:
        """Rows (first and last + 1 point of `large`, first and last + 1 difference − least, cell) of equal cells."""
        edges = np.flatnonzero(np.diff(self.cells, prepend=-1, append=-1))  # cells are not negative
        first, end = edges[:-1] + self.least, edges[1:] + self.least
        start = np.maximum(first - self.offset, 0)
        stop = np.maximum(np.minimum(self.counts[0], self.counts[1] - self.offset + end - 1), start)
        return np.stack([start, stop, edges[:-1], edges[1:], self.cells[edges[:-1]]], 1)

    def add(self, values: Array, weights: Array, factors: Array, result: Array, start: int, ratio: int) -> None:
        """result[start + cell + ratio·p] += factors[p] · Σ_d weights[d − least]·values[p − d], for each point p of
        `large` and each cell, over the differences d of this cell; values: at the points of `small`."""
        around = len(self.often)
        padded = np.pad(values, around)
        groups, shift = self.groups() + np.array([0, 0, 0, 0, start]), self.offset - self.least + around
        add_convolutions(padded, weights, factors, groups, ratio, shift, result)


class _Pairs:
    """All pairs of values of two variables, in blocks, and where their sums are on the grid of `stride`."""

    def __init__(self, left: _Variable, right: _Variable, stride: int, interval: float) -> None:
        self.fine = stride * interval
        self.here = (left.lower + np.arange(len(left.masses))) * (left.stride // stride)
        self.there = (right.lower + np.arange(len(right.masses))) * (right.stride // stride)
        self.first = int(min(self.here[0], self.there[0]))
        last = int(max(self.here[-1], self.there[-1]))
        self.size = _affordable(last - self.first + math.ceil(math.log(2) / self.fine) + 3)

    def blocks(self) -> Iterator[tuple[slice, NDArray[np.int64], Array]]:
        """(rows of `there`, the grid point below the sum of each pair, the log of the sum relative to that point)."""
        count = max(1, _PAIRS // len(self.here))
        for start in range(0, len(self.there), count):
            rows = slice(start, start + count)
            other = self.there[rows, None]
            excess = np.log1p(np.exp(-self.fine * np.abs(self.here - other)))
            cells = np.floor(excess / self.fine)
            places = np.maximum(self.here, other) + cells.astype(np.int64) - self.first
            yield rows, places.ravel(), (excess - cells * self.fine).ravel()


def _pair_by_pair(a: _Variable, b: _Variable, interval: float) -> bool:
    """Whether the pairs of values are added one by one, because the coarser grid is not worth converting to the finer
    one: their steps are very different, and there are few pairs, or the converted grid would be too large."""
    finer, coarser = sorted((a.stride, b.stride))
    if coarser <= _ALIKE * finer:
        return False
    points = max(len(one.masses) * (one.stride // finer) for one in (a, b))
    large = points > _MOST_POINTS or points * finer * interval > _MOST_LOGS
    return large or len(a.masses) * len(b.masses) <= _FEW_PAIRS


def _orders(a: _Variable, b: _Variable) -> list[tuple[_Variable, _Variable, float, int]]:
    """(larger, smaller, multiplicity, least difference) such that each pair of values occurs once.

    For a variable with itself, each pair with a difference counts twice; `_Near` counts the others once.
    """
    return [(a, a, 2.0, 0)] if a is b else [(b, a, 1.0, 0), (a, b, 1.0, 1)]


def _size(a: _Variable, b: _Variable, low: int, ratio: int, fine: float) -> int:
    last = max(a.lower + len(a.masses), b.lower + len(b.masses)) - 1
    return _affordable((last - low) * ratio + math.ceil(math.log(2) / fine) + 3)


def _affordable(points: int) -> int:
    """Returns the number; raises GridTooLarge if a grid of so many points would need too much memory."""
    if points > _MOST_POINTS:
        raise GridTooLarge(f"{points:.3g} points for a sum over batches")
    return points


def _far(small: _Variable, values: Array, reach: int, large: _Variable) -> Array:
    """At each point p of `large`: the sum of the values of `small` at p − reach and below."""
    index = large.lower + np.arange(len(large.masses)) - reach - small.lower + 1
    total: Array = np.append(0.0, np.cumsum(values))[np.clip(index, 0, len(values))]
    return total


def _add(result: Array, start: int, ratio: int, values: Array) -> None:
    result[start : start + (len(values) - 1) * ratio + 1 : ratio] += values
