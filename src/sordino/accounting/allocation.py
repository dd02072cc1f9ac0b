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

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from scipy.special import ndtri

from sordino.accounting.geometric import MOST_CELLS, Contracted, Spread
from sordino.accounting.lattice import cells, contracted, interval_masses, spread, summed
from sordino.accounting.lower import merged
from sordino.accounting.pairs import MAX_LOSS, Array, GridTooLarge, Pmf

_Item = TypeVar("_Item")

ROUNDING = 1e-12
"""Bound on the relative error of a value of M by rounding: less than 60 additions, each within 2⁻⁴⁶."""
COARSEST = 64.0  # largest cell of log L: e^{MAX_LOSS + COARSEST} is a double
_MOST_WORK = 40000  # limit on additions on geometric grids, in convolutions of few points (about 10 µs each)
_MOST_LOG = 690.0  # e^−690 is a double with all digits; Q at the largest losses is P there divided by e^loss
_SLOW_SHARE = 1e-120  # with smaller tails products of masses are no normal doubles, which take several times as long
_LEAST_SHARE = 1e-300
_MASS_ROUNDING = 1e-10  # bound on the relative error of a probability: sums of positive numbers


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
def epoch_pmfs(epoch: Epoch, interval: float, tail: float, lattice: bool = True) -> tuple[Pmf, Pmf]:
    """Dominating PLDs of one epoch, for removing and for adding the record.

    Args:
        epoch: Noise and batches.
        interval: The step h of the grid of losses.
        tail: The probability that may be moved to an infinite loss by truncating tails.
        lattice: Whether sums may be computed on a lattice.

    Raises:
        GridTooLarge: the losses do not fit.
    """
    coarse = 0.0, 0.0
    try:
        if not lattice:
            raise GridTooLarge("no lattice is wanted")
        found, added, coarse = _on_lattice(epoch, interval, tail)
    except GridTooLarge:
        found = _sum(epoch, interval, tail / (2 * epoch.batches.bit_length() + 2))
        added = np.full(len(found.masses), _added(epoch))
    if float(found.logs(interval)[-1]) - math.log(tail) > _MOST_LOG:
        raise GridTooLarge("probabilities at large losses are too small for double precision")
    values = np.exp(found.logs(interval))
    masses = found.masses * (1 + _MASS_ROUNDING)
    split = masses * added
    last = found.lower + len(masses) - 1
    lost, zero = found.lost * (1 + _MASS_ROUNDING), found.zero * (1 + _MASS_ROUNDING)
    forward = Pmf(found.lower, masses * values, lost, split * values, ROUNDING, coarse[0])
    backward = Pmf(-last, masses[::-1].copy(), zero, split[::-1].copy(), ROUNDING, coarse[1])
    return forward, backward


def _on_lattice(epoch: Epoch, interval: float, tail: float) -> tuple[Spread, Array, tuple[float, float]]:
    """(upper bound, added variance, mass under P and Q that is rounding) of M: one sum on a lattice, which is
    spread onto the geometric grid once."""
    share, step = tail / 4, _lattice_step(epoch, interval)
    law = cells(epoch.noise_multiplier, step, share / epoch.seen)
    total = summed(spread(law), epoch.seen, share, above=True)
    values = _means(epoch, total.first, len(total.masses), step)
    there = values > 0
    upper, logs = total.masses[there], np.log(values[there])
    places = np.floor(logs / interval).astype(np.int64)
    up = upper * np.clip(np.expm1(logs - places * interval) / math.expm1(interval), 0.0, 1.0)
    first = int(places[0])
    size = int(places[-1]) - first + 2
    masses = np.zeros(size)
    masses += np.bincount(places - first, upper - up, size)
    masses += np.bincount(places - first + 1, up, size)
    lost = epoch.seen / epoch.batches * law.excess + total.over / epoch.batches
    if epoch.seen < epoch.batches:
        lost += total.over / float(total.first + len(values)) / step  # P[S above the points], for the remaining batches
    zero = epoch.seen * law.below + total.under + float(total.masses[~there].sum())
    grid = np.exp((first + np.arange(len(masses), dtype=np.float64)) * interval)
    added = 1 / 6 + epoch.seen * (step / epoch.batches / interval / grid) ** 2 / 6
    rounding = total.coarse[there] * upper
    return Spread(1, first, masses, zero, lost), added, (float(rounding @ values[there]), float(rounding.sum()))


def _lattice_step(epoch: Epoch, interval: float) -> float:
    """The step at which spreading L onto the lattice adds as much to the variance of M as spreading M onto the grid."""
    return interval * math.sqrt(epoch.batches)


def _means(epoch: Epoch, first: int, count: int, step: float) -> Array:
    """The values of M at that many points of the lattice of the sum."""
    points = (first + np.arange(count, dtype=np.float64)) * step
    return (points + (epoch.batches - epoch.seen)) / epoch.batches


def _added(epoch: Epoch) -> float:
    """The relative variance that all spreads add to M, in units of h² (a spread adds a sixth of a squared cell)."""
    sizes = [epoch.seen >> shift for shift in range(epoch.seen.bit_length())]
    return sum(epoch.stride(n) ** 2 * n / epoch.batches / 6 for n in sizes)


def _sum(epoch: Epoch, interval: float, share: float) -> Spread:
    """The sum of `seen` summands L/t, by the binary digits of `seen`, and of the constant for the other batches."""

    _check_work(epoch, interval, share, _MOST_WORK)

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


def _check_work(epoch: Epoch, interval: float, share: float, most: float) -> None:
    """Raises GridTooLarge if the additions on geometric grids would take much more than a second."""
    doublings = [1 << shift for shift in range(1, epoch.seen.bit_length())]
    partial = [epoch.seen & (2 * bit - 1) for bit in doublings if epoch.seen & bit and epoch.seen & (bit - 1)]
    convolutions = sum(math.log(2) / (epoch.stride(count) * interval) for count in doublings + partial)
    reach = 0.5 / epoch.noise_multiplier**2 - float(ndtri(share)) / epoch.noise_multiplier
    length = 1.5 * float(np.logaddexp(0.0, reach - math.log(epoch.batches))) / interval
    if convolutions * (1 + length / 2700) > (most if share > _SLOW_SHARE else most / 3):
        raise GridTooLarge(f"{convolutions:.3g} convolutions of {length:.3g} points for sums over batches")


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
    if reach > MAX_LOSS or 2 * reach / step > MOST_CELLS or step > COARSEST:
        raise GridTooLarge(f"losses up to {reach:.3g} on a grid of {step:.3g}")
    first, last = math.floor((-reach - shift) / step), math.ceil((reach - shift) / step)
    edges = np.arange(first, last + 1, dtype=np.float64) * step + shift
    return first, edges, interval_masses(edges * sigma + 0.5 / sigma), interval_masses(edges * sigma - 0.5 / sigma)


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


def epoch_from_below(epoch: Epoch, interval: float, tail: float, lattice: bool = True) -> Pmf:
    """A PLD that the epoch dominates (removing the record)."""
    if lattice:
        with contextlib.suppress(GridTooLarge):
            return _lattice_from_below(epoch, interval, tail)
    return _geometric_from_below(epoch, interval, tail)


def _lattice_from_below(epoch: Epoch, interval: float, tail: float) -> Pmf:
    share, step = tail / 4, _lattice_step(epoch, interval)
    law = contracted(cells(epoch.noise_multiplier, step, share / epoch.seen))
    # further out, because what the transform aliases is subtracted
    total = summed(law, epoch.seen, max(share**2, _LEAST_SHARE), above=False)
    values = _means(epoch, total.first, len(total.masses), step)
    there = (total.masses > 0) & (values > 0)
    return merged(total.masses[there] * (1 - _MASS_ROUNDING), values[there], interval, ROUNDING)


def _geometric_from_below(epoch: Epoch, interval: float, tail: float) -> Pmf:
    _check_work(epoch, interval, tail, _MOST_WORK / 2)  # masses and means

    def plus(left: tuple[Contracted, int], right: tuple[Contracted, int]) -> tuple[Contracted, int]:
        summands = left[1] + right[1]
        return left[0].plus(right[0], epoch.stride(summands), interval).trimmed(tail), summands

    found, _ = _repeated(_powers(replace(epoch, seen=epoch.batches), interval, tail, _contracted), epoch.seen, plus)
    there = found.masses > 0
    ratio = found.means[there] / found.masses[there] + (1 - epoch.seen / epoch.batches)
    return merged(found.masses[there], ratio, interval, ROUNDING)


def _contracted(epoch: Epoch, interval: float, tail: float) -> Contracted:
    """L/t on its grid, from below."""
    first, _, masses, means = _cells(epoch, interval, tail)
    return Contracted(epoch.stride(1), first - 1, masses, means / epoch.batches).trimmed(tail)
