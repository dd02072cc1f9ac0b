"""Sampled rows with user-level privacy: the pair of a user who has at most k rows (arXiv 2407.07737).

Each row is clipped and drawn by Poisson sampling at rate q. J ~ Bin(k, q) rows of the user are drawn, and they move the
sum by a vector of norm at most J. A mixture of Gaussians with such shifts is dominated by the one-dimensional mixture
with shifts J (Choquette-Choo et al. 2024, arXiv 2310.15526, Lemma 4.5; dp_accounting calls it
MixtureOfGaussiansDpEvent), and a user with fewer rows is a user some of whose rows are zero. So

    P = Σ_j Bin(k, q)(j)·N(j, σ²)    against    Q = N(0, σ²)

dominates a step, in units of the clip norm, for adding or removing a user with all their rows. k equal rows attain it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import logsumexp, ndtr, ndtri
from scipy.stats import binom

from sordino.accounting.pairs import Array

MOST_ROWS = 1000
_ROUNDS = 200


@dataclass(frozen=True)
class GroupPair:
    """The pair above; `scale` is σ."""

    scale: float
    rate: float
    rows: int

    def _log_weights(self) -> Array:
        values: Array = binom.logpmf(np.arange(self.rows + 1), self.rows, self.rate)
        return values

    def losses(self, x: Array) -> Array:
        """log P(x)/Q(x), increasing in x."""
        shifts = np.arange(self.rows + 1)
        terms = self._log_weights() + (np.multiply.outer(x, shifts) - shifts**2 / 2) / self.scale**2
        found: Array = logsumexp(terms, axis=-1)
        return found

    def edges(self, losses: Array) -> Array:
        """The smallest x whose loss is at least l, by bisection (the loss increases); −∞ below the range of losses."""
        least = float(self._log_weights()[0])
        inside = losses > least + 1e-12
        low, high = np.full(losses.shape, -1.0), np.full(losses.shape, 1.0)
        for _ in range(_ROUNDS):
            low = np.where(self.losses(low) >= losses, 2 * low, low)
            high = np.where(self.losses(high) < losses, 2 * high, high)
            if bool(((self.losses(low) < losses) | ~inside | (low < -1e6 * self.scale)).all()) and bool(
                (self.losses(high) >= losses).all()
            ):
                break
        for _ in range(_ROUNDS):
            middle = (low + high) / 2
            above = self.losses(middle) >= losses
            low, high = np.where(above, low, middle), np.where(above, middle, high)
            if bool((high - low <= 1e-14 * (1 + np.abs(high))).all()):
                break
        return np.where(inside, high, -np.inf)

    def masses(self, edges: Array) -> tuple[Array, Array, Array]:
        """P(bin), Q(bin) and P(bin) − Q(bin) of the bins between neighbouring edges."""
        weights = np.exp(self._log_weights())
        centre = self._mass(edges, 0.0)
        p_mass, difference = weights[0] * centre, np.zeros_like(centre)
        for shift in range(1, self.rows + 1):
            part = self._mass(edges, float(shift))
            p_mass, difference = p_mass + weights[shift] * part, difference + weights[shift] * (part - centre)
        return p_mass, centre, difference

    def _mass(self, edges: Array, shift: float) -> Array:
        z = (edges - shift) / self.scale
        a, b = z[:-1], z[1:]
        return np.where(a > 0, ndtr(-a) - ndtr(-b), ndtr(b) - ndtr(a))

    def range(self, tail: float) -> tuple[float, float]:
        """A range of losses outside which at most `tail` of P (above) and of Q (below) lies."""
        weights = np.exp(self._log_weights())
        share = np.minimum(0.5, tail / (self.rows + 1) / np.maximum(weights, 1e-300))
        high = float(np.max(np.arange(self.rows + 1) - self.scale * ndtri(share)))
        low = self.scale * float(ndtri(tail / 2))
        ends = self.losses(np.array([low, high]))
        return float(ends[0]), float(ends[1])

    def total_variation(self) -> float:
        """An upper bound on the total variation of P and Q: P[any row is drawn] times that of the largest shift."""
        touched = -math.expm1(self.rows * math.log1p(-self.rate)) if self.rate < 1 else 1.0
        return touched * math.erf(self.rows / self.scale / 2 / math.sqrt(2))
