"""Random allocation: every record once per epoch, in one of t batches, drawn uniformly and independently of others.

One epoch is dominated, under add/remove, by P = (1/t)·Σᵢ N(eᵢ, σ²I) against Q = N(0, σ²I) on ℝᵗ, and that pair is
attained (Chua et al. 2024, arXiv 2412.16802; proof for adaptive steps in docs/guarantees/allocation.md). Under Q the
likelihood ratio is M = (1/t)·Σᵢ Lᵢ with log Lᵢ independent N(−1/2σ², 1/σ²). Both hockey sticks are convex in M:

    H(P ‖ Q) = E_Q (M − e^ε)₊          H(Q ‖ P) = E_Q (1 − e^ε·M)₊

so a variable that is larger than M in the convex order gives a dominating pair, and one that is smaller gives a
dominated pair. Sums of independent variables preserve the convex order, so each L is put on a geometric grid and sums
stay on it (geometric.py); by repeated doubling, t summands take about log₂ t additions. The upper bound has its losses
on the grid and is composed directly.

An error of a sum of n of the t summands counts n/t in the result (relative variances of independent summands average),
so the grid of a sum of n can be coarser by √(t/n) for the same effect: grids stay small although L has a wide range.

For an epoch that ends after `seen` of its t batches, M = (1/t)·(Σ_{i ≤ seen} Lᵢ + t − seen).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from scipy.special import ndtr, ndtri

from sordino.accounting.geometric import MOST_CELLS, Contracted, Spread
from sordino.accounting.pairs import MAX_LOSS, Array, Bins, GridTooLarge, Pmf

_Item = TypeVar("_Item")

ROUNDING = 1e-12
"""Bound on the relative rounding error of a value of M: fewer than 60 additions, each within 2⁻⁴⁶."""
_MASS_ROUNDING = 1e-10  # bound on the relative error of a probability (a sum of positive numbers)


@dataclass(frozen=True)
class Epoch:
    """One epoch with Gaussian noise; the first `seen` of its `batches` batches were released."""

    noise_multiplier: float
    batches: int
    seen: int

    def stride(self, summands: int) -> int:
        """The step of the grid for a sum of `summands`, in final steps: a power of two, at most max(1, √(t/2n))."""
        return 1 << max(0, math.floor((math.log2(self.batches / summands) - 1) / 2))


@functools.lru_cache(32)
def epoch_pmfs(epoch: Epoch, interval: float, tail: float) -> tuple[Pmf, Pmf]:
    """Dominating PLDs of one epoch, for removing and for adding the record.

    Args:
        epoch: Noise and batches.
        interval: The step h of the grid of losses.
        tail: The probability that may be moved to an infinite loss by truncating tails.
    Raises:
        GridTooLarge: the losses do not fit.
    """
    found = _sum(epoch, interval, tail / (2 * epoch.batches.bit_length() + 2))
    values = np.exp(found.logs(interval))
    masses = found.masses * (1 + _MASS_ROUNDING)
    split = masses * _added(epoch)
    last = found.lower + len(masses) - 1
    forward = Pmf(found.lower, masses * values, found.lost * (1 + _MASS_ROUNDING), split * values, ROUNDING)
    backward = Pmf(-last, masses[::-1].copy(), found.zero * (1 + _MASS_ROUNDING), split[::-1].copy(), ROUNDING)
    return forward, backward


def _added(epoch: Epoch) -> float:
    """The relative variance that all spreads add to M, in units of h² (a spread adds a sixth of a squared cell)."""
    sizes = [epoch.seen >> shift for shift in range(epoch.seen.bit_length())]
    return sum(epoch.stride(n) ** 2 * n / epoch.batches / 6 for n in sizes)


def _sum(epoch: Epoch, interval: float, share: float) -> Spread:
    """The sum of `seen` summands L/t, by the binary digits of `seen`, and of the constant for the other batches."""

    def plus(left: tuple[Spread, int], right: tuple[Spread, int]) -> tuple[Spread, int]:
        summands = left[1] + right[1]
        added = left[0].plus(right[0], epoch.stride(summands), interval)
        return added.trimmed(interval, share, summands / epoch.batches), summands

    powers: list[tuple[Spread, int]] = _powers(replace(epoch, seen=epoch.batches), interval, share, _spread_one)
    found, _ = _repeated(powers, epoch.seen, plus)
    if epoch.seen < epoch.batches:
        found = found.plus(_spread_constant(1 - epoch.seen / epoch.batches, interval), 1, interval)
        return found.trimmed(interval, share, 1.0)
    return found.refined(1)


def _repeated(powers: list[_Item], times: int, plus: Callable[[_Item, _Item], _Item]) -> _Item:
    """one + … + one (`times` summands), by doubling; the powers of two in `times` are added from the smallest up.

    `powers` begins with one; further doublings are appended.
    """
    found = None
    for place in range(times.bit_length()):
        if place == len(powers):
            powers.append(plus(powers[-1], powers[-1]))
        if times >> place & 1:
            found = powers[place] if found is None else plus(found, powers[place])
    assert found is not None
    return found


@functools.lru_cache(4)
def _powers(
    epoch: Epoch, interval: float, share: float, make: Callable[[Epoch, float, float], _Item]
) -> list[tuple[_Item, int]]:
    """The known sums of 1, 2, 4, … summands; complete and partial epochs share them."""
    return [(make(epoch, interval, share), 1)]


def _cells(epoch: Epoch, interval: float, share: float) -> tuple[int, Array, Array, Array]:
    """The index of the first cell, log L at the edges, and P[L in cell] and E[L; cell], with the two outer cells."""
    sigma, step = epoch.noise_multiplier, epoch.stride(1) * interval
    shift, scale = math.log(epoch.batches), -float(ndtri(share))
    reach = 0.5 / sigma**2 + scale / sigma
    if reach > MAX_LOSS or 2 * reach / step > MOST_CELLS:
        raise GridTooLarge(f"losses up to {reach:.3g} on a grid of {step:.3g}")
    first, last = math.floor((-reach - shift) / step), math.ceil((reach - shift) / step)
    edges = np.arange(first, last + 1, dtype=np.float64) * step + shift
    return first, edges, _normal(edges * sigma + 0.5 / sigma), _normal(edges * sigma - 0.5 / sigma)


def _normal(points: Array) -> Array:
    """The masses of the normal distribution below, between and above the points, precise in both tails."""
    edges = np.concatenate([[-np.inf], points, [np.inf]])
    a, b = edges[:-1], edges[1:]
    result: Array = np.where(a > 0, ndtr(-a) - ndtr(-b), ndtr(b) - ndtr(a))
    return result


def _spread_one(epoch: Epoch, interval: float, share: float) -> Spread:
    """L/t on its grid, from above. Below the grid L is spread between 0 and the first point; above it is truncated."""
    first, edges, masses, means = _cells(epoch, interval, share)
    step = epoch.stride(1) * interval
    inner = masses[1:-1]
    with np.errstate(divide="ignore", invalid="ignore"):
        excess = means[1:-1] / inner * np.exp(-edges[:-1]) - 1
    up = inner * np.clip(np.nan_to_num(excess / math.expm1(step), nan=0.5), 0.0, 1.0)
    result = np.zeros(len(edges))
    result[:-1] += inner - up
    result[1:] += up
    stay = min(float(means[0]) * math.exp(-edges[0]), float(masses[0]))
    result[0] += stay
    result[-1] += masses[-1]
    return Spread(epoch.stride(1), first, result, float(masses[0]) - stay, float(means[-1]) / epoch.batches)


def _spread_constant(value: float, interval: float) -> Spread:
    place = math.floor(math.log(value) / interval)
    up = min(max(math.expm1(math.log(value) - place * interval) / math.expm1(interval), 0.0), 1.0)
    return Spread(1, place, np.array([1 - up, up]))


def epoch_bins(epoch: Epoch, interval: float, tail: float) -> Bins:
    """A pair that the epoch dominates (removing the record), with its losses sorted into the bins of the grid."""

    def plus(left: tuple[Contracted, int], right: tuple[Contracted, int]) -> tuple[Contracted, int]:
        summands = left[1] + right[1]
        return left[0].plus(right[0], epoch.stride(summands), interval).trimmed(tail), summands

    found, _ = _repeated(_powers(replace(epoch, seen=epoch.batches), interval, tail, _contracted), epoch.seen, plus)
    there = found.masses > 0
    q_mass, p_mass = found.masses[there], found.means[there] + found.masses[there] * (1 - epoch.seen / epoch.batches)
    return _bins(p_mass, q_mass, interval)


def _contracted(epoch: Epoch, interval: float, tail: float) -> Contracted:
    """L/t on its grid, from below."""
    first, _, masses, means = _cells(epoch, interval, tail)
    return Contracted(epoch.stride(1), first - 1, masses, means / epoch.batches).trimmed(tail)


def _bins(p_mass: Array, q_mass: Array, interval: float) -> Bins:
    """Atoms sorted by their loss; up + down is the P-mass of a bin, as in pairs.sort_into_bins."""
    losses = np.log(p_mass / q_mass)
    places = np.floor(losses / interval).astype(np.int64)
    first = int(places.min())
    grid = (first + np.arange(int(places.max()) - first + 2, dtype=np.float64)) * interval
    # for each atom separately, so that no difference of nearly equal sums is taken
    inside = np.clip(losses - grid[places - first], 0.0, interval)
    up = p_mass * np.expm1(-inside) / math.expm1(-interval)
    size = len(grid) - 1
    total: Array = np.bincount(places - first, p_mass, size).astype(np.float64)
    risen: Array = np.minimum(np.bincount(places - first, up, size), total)
    return Bins(first, grid, risen, total - risen, (0.0, 0.0), (0.0, 0.0))
