"""Sampled rows with user-level privacy: the pair of a user who has at most k rows (arXiv 2407.07737).

Each row is clipped and drawn by Poisson sampling at rate q. J ~ Bin(k, q) rows of the user are drawn, and they move the
sum by a vector of norm at most J. A mixture of Gaussians with such shifts is dominated by the one-dimensional mixture
with shifts J (Choquette-Choo et al. 2024, arXiv 2310.15526, Lemma 4.5; dp_accounting calls it
MixtureOfGaussiansDpEvent), and a user with fewer rows is a user some of whose rows are zero. So

    P = Σ_j Bin(k, q)(j)·N(j, σ²)    against    Q = N(0, σ²)

dominates a step, in units of the clip norm, for adding or removing a user with all rows. k equal rows attain it.

Only the likely ones of the k + 1 shifts are used. For an upper bound (`from_above`), larger shifts count as an infinite
loss if the user is removed, and are left out of P if the user is added: both divergences increase. Smaller shifts are
raised to the smallest one that is kept (Lemma 4.5: larger shifts dominate). For a lower bound, all other shifts are
left out of P.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr, ndtri
from scipy.stats import binom

from sordino.accounting.pairs import Array, Pmf, discretise

MOST_ROWS = 1000
_ROUNDS = 100
_NODES = 4096  # size of the table from which the inversion of the loss starts
_BLOCK = 1 << 19  # size of a block of points × shifts
_BINOMIAL = 1e-9  # bound on the relative error of binomial tails


@dataclass(frozen=True)
class GroupPair:
    """The pair above; `scale` is σ."""

    scale: float
    rate: float
    rows: int

    def total_variation(self) -> float:
        """An upper bound on the total variation of P and Q: that of the largest shift, times the probability of any
        row."""
        touched = -math.expm1(self.rows * math.log1p(-self.rate)) if self.rate < 1 else 1.0
        return touched * math.erf(self.rows / self.scale / 2 / math.sqrt(2))

    def from_above(self, interval: float, tail: float) -> tuple[Pmf, Pmf]:
        """The PLDs for removing and for adding the user; at most `tail` becomes an infinite loss."""
        low, high, weights = self._likely(tail / 4)
        beyond = float(binom.sf(high, self.rows, self.rate)) * (1 + _BINOMIAL)
        below = float(binom.cdf(low - 1, self.rows, self.rate)) * (1 + _BINOMIAL)
        weights[0] += below
        forward, backward = discretise(Mixture(self.scale, low, weights), interval, tail / 2)
        return Pmf(forward.lower, forward.probs, forward.infinity + beyond, forward.split), backward

    def attained(self, tail: float) -> Mixture:
        """A mixture that nowhere has more mass than P."""
        low, _, weights = self._likely(tail)
        return Mixture(self.scale, low, weights * (1 - _BINOMIAL))

    def _likely(self, tail: float) -> tuple[int, int, Array]:
        """(least, largest, probabilities) of the number of rows; less than `tail` lies outside."""
        counts = np.arange(self.rows + 1)
        high = int(np.argmax(binom.sf(counts, self.rows, self.rate) <= tail))
        low = min(int(np.argmax(binom.cdf(counts, self.rows, self.rate) > tail)), high)
        weights: Array = np.exp(binom.logpmf(counts[low : high + 1], self.rows, self.rate))
        return low, high, weights


@dataclass(frozen=True, eq=False)
class Mixture:
    """P = Σ weights[i]·N(least + i, σ²), whose mass may be below 1, against Q = N(0, σ²)."""

    scale: float
    least: int
    weights: Array

    @property
    def shifts(self) -> Array:
        """The means of the Gaussians."""
        return self.least + np.arange(len(self.weights), dtype=np.float64)

    def losses(self, x: Array) -> tuple[Array, Array]:
        """log P(x)/Q(x), which is increasing and convex in x, and its derivative."""
        shifts, found = self.shifts, np.empty((2, len(x)))
        logs = np.log(np.maximum(self.weights, 1e-300)) - shifts**2 / 2 / self.scale**2
        for part in self._blocks(len(x)):
            terms = logs + np.multiply.outer(x[part], shifts / self.scale**2)
            top = terms.max(axis=1)
            np.exp(np.maximum(terms - top[:, None], -700.0), out=terms)
            total = terms.sum(axis=1)
            found[0, part] = top + np.log(total)
            found[1, part] = (terms * shifts).sum(axis=1) / total / self.scale**2
        return found[0], found[1]

    def _blocks(self, count: int) -> Iterator[slice]:
        size = max(1, _BLOCK // len(self.weights))
        for start in range(0, count, size):
            yield slice(start, start + size)

    def edges(self, losses: Array) -> Array:
        """The smallest x whose loss is at least l; −∞ below the range of losses.

        Newton's method from a table point whose loss is too large: on a convex function it does not overshoot the
        solution.
        """
        inside = np.full(losses.shape, True)
        if self.least == 0:
            inside = losses > math.log(self.weights[0]) + 1e-12
        result = np.full(losses.shape, -np.inf)
        wanted = losses[inside]
        if len(wanted):
            result[inside] = self._inverted(wanted)
        return result

    def _inverted(self, wanted: Array) -> Array:
        low, high = -self.scale, self.scale
        for _ in range(_ROUNDS):
            ends = self.losses(np.array([low, high]))[0]
            if ends[0] < wanted.min() and ends[1] >= wanted.max():
                break
            low = 2 * low if ends[0] >= wanted.min() else low
            high = 2 * high if ends[1] < wanted.max() else high
        nodes = np.linspace(low, high, _NODES)
        table = np.maximum.accumulate(self.losses(nodes)[0])
        x = nodes[np.minimum(np.searchsorted(table, wanted), _NODES - 1)]
        todo = np.arange(len(x))
        for _ in range(_ROUNDS):
            value, slope = self.losses(x[todo])
            with np.errstate(divide="ignore", invalid="ignore"):
                step = np.nan_to_num((value - wanted[todo]) / slope, nan=0.0, posinf=0.0, neginf=0.0)
            x[todo] -= step
            todo = todo[np.abs(step) > 1e-14 * (1 + np.abs(x[todo]))]
            if not len(todo):
                break
        return np.maximum.accumulate(x) if bool((np.diff(wanted) >= 0).all()) else x

    def masses(self, edges: Array) -> tuple[Array, Array, Array]:
        """P(bin), Q(bin) and P(bin) − Q(bin) of the bins between neighbouring edges."""
        centre = self._mass(edges, 0.0)
        p_mass, difference = np.zeros_like(centre), np.zeros_like(centre)
        for weight, shift in zip(self.weights.tolist(), self.shifts.tolist(), strict=True):
            part = centre if shift == 0 else self._mass(edges, shift)
            p_mass += weight * part
            difference += weight * (part - centre)
        return p_mass, centre, difference - (1 - math.fsum(self.weights)) * centre

    def _mass(self, edges: Array, shift: float) -> Array:
        z = (edges - shift) / self.scale
        a, b = z[:-1], z[1:]
        return np.where(a > 0, ndtr(-a) - ndtr(-b), ndtr(b) - ndtr(a))

    def range(self, tail: float) -> tuple[float, float]:
        """An interval of losses that contains all of P (above) and of Q (below) except `tail`."""
        share = np.minimum(0.5, tail / len(self.weights) / np.maximum(self.weights, 1e-300))
        high = float(np.max(self.shifts - self.scale * ndtri(share)))
        low = self.scale * float(ndtri(tail / 2))
        ends = self.losses(np.array([low, high]))[0]
        return float(ends[0]), float(ends[1])
