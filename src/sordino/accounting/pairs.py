"""Dominating pairs of one release, and their discrete privacy loss distributions (PLDs).

A *pair* (P, Q) of one-dimensional distributions dominates a release if the outputs of no two neighbouring datasets are
easier to distinguish (Zhu, Dong, Wang 2022, Def. 7). Everything is in units of the clip norm: one record moves the sum
by at most 1, and μ_s is the noise (Gaussian of standard deviation `scale`, or Laplace of that scale) shifted by s.

    kind        P                      Q                       theorem
    "remove"    (1−q)·μ₀ + q·μ₁        μ₀                      Zhu, Dong, Wang 2022, Thm 11 (Poisson, add/remove)
    "replace"   (1−q)·μ₀ + q·μ₁        (1−q)·μ₀ + q·μ₋₁        Lebeda et al. 2024, Prop. on substitution (Poisson)

The pair for adding a record is "remove" with P and Q swapped. `discretise` gives both directions.

Discretisation is Connect-the-Dots (Doroshenko, Ghazi, Kamath, Kumar, Manurangsi 2022, Alg. 1): the mass of a bin
[l, l+d] of losses is moved to its two ends so that the masses of the bin under P *and* under Q are preserved. The
result dominates (P, Q), so every ε computed from it is an upper bound. dp_accounting computes the same masses as second
differences of the hockey-stick curve, one Python call per grid point. Here they are computed from the masses of the
bin, vectorised and without that cancellation (which ruins grids finer than about 1e-6).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

Array = NDArray[np.float64]

# e^loss must stay far from the overflow of doubles; releases with larger losses are left to RDP
MAX_LOSS = 600.0
MAX_CELLS = 1 << 22
# a mass below this has lost digits, or all of them, in double precision
_LEAST_MASS = 1e-290
_FAR = math.exp(20)  # ratio of P and Q beyond which that matters


class GridTooLarge(Exception):
    """The privacy loss of this release does not fit on a grid; another accountant must be used."""


@dataclass(frozen=True)
class Pmf:
    """Privacy losses (lower + i)·d with probabilities probs[i], and an infinite loss with probability infinity.

    `split[i]`, in units of d², is an upper bound on the variance added by moving the mass of the bin below i to its
    ends. A loss may be wrong by `drift` (rounding), which is added to ε for each release. `coarse` is the part of the
    probability that is a bound on rounding errors.
    """

    lower: int
    probs: Array
    infinity: float
    split: Array
    drift: float = 0.0
    coarse: float = 0.0


@dataclass(frozen=True)
class Pair:
    """A dominating pair; `scale` is the noise in units of the shift."""

    noise: Literal["gaussian", "laplace"]
    scale: float
    rate: float
    kind: Literal["remove", "replace"] = "remove"

    def loss(self, x: float) -> float:
        """log P(x)/Q(x), non-decreasing in x."""
        right = _log_mix(self.rate, self._base_loss(x))
        return right if self.kind == "remove" else right - _log_mix(self.rate, self._base_loss(-x))

    def _base_loss(self, x: float) -> float:
        if self.noise == "gaussian":
            return (x - 0.5) / self.scale**2
        return (abs(x) - abs(x - 1)) / self.scale

    def edges(self, losses: Array) -> Array:
        """For each l the smallest x whose loss is at least l: −∞ below the range of losses, +∞ above it."""
        if self.kind == "replace":
            return _replace_edges(self.scale, self.rate, losses)
        base = _unmix(self.rate, losses)
        if self.noise == "gaussian":
            return 0.5 + self.scale**2 * base
        inside = (1 + self.scale * base) / 2
        limit = 1 / self.scale
        return np.where(base <= -limit, -np.inf, np.where(base > limit, np.inf, inside))

    def masses(self, edges: Array) -> tuple[Array, Array, Array]:
        """P(bin), Q(bin) and P(bin) − Q(bin) between neighbouring edges, each with a small relative error."""
        centre, right = self._mass(edges, 0.0), self._mass(edges, 1.0)
        p_mass = (1 - self.rate) * centre + self.rate * right
        if self.kind == "remove":
            return p_mass, centre, self.rate * (right - centre)
        left = self._mass(edges, -1.0)
        return p_mass, (1 - self.rate) * centre + self.rate * left, self.rate * (right - left)

    def _mass(self, edges: Array, shift: float) -> Array:
        z = (edges - shift) / self.scale
        a, b = z[:-1], z[1:]
        if self.noise == "gaussian":
            # mirrored on the right, so that both tails keep their relative precision
            return np.where(a > 0, ndtr(-a) - ndtr(-b), ndtr(b) - ndtr(a))
        low, high = _laplace_lower(a), _laplace_lower(b)
        return np.where(a > 0, _laplace_lower(-a) - _laplace_lower(-b), high - low)

    def range(self, tail: float) -> tuple[float, float]:
        """A range of losses outside which at most `tail` of P (above) and of Q (below) lies."""
        if self.noise == "laplace":
            return self.loss(-1.0), self.loss(2.0)
        z = -float(ndtri(tail / 2))
        shifted = -float(ndtri(min(0.5, tail / (2 * self.rate))))
        high = self.loss(max(self.scale * z, 1 + self.scale * shifted))
        return (-high if self.kind == "replace" else self.loss(-self.scale * z)), high


class DominatingPair(Protocol):
    """What the discretisation needs of a pair whose loss increases along a line."""

    def edges(self, losses: Array) -> Array: ...

    def masses(self, edges: Array) -> tuple[Array, Array, Array]: ...

    def range(self, tail: float) -> tuple[float, float]: ...


@dataclass(frozen=True)
class Bins:
    """The bins [l_k, l_{k+1}] of the losses; up + down is the P-mass of each, as Connect-the-Dots splits it."""

    first: int  # l_0 = first · interval
    losses: Array  # the ends of the bins
    up: Array
    down: Array
    p_outside: tuple[float, float]  # P-mass below and above all bins
    q_outside: tuple[float, float]


def sort_into_bins(pair: DominatingPair, interval: float, tail: float) -> Bins:
    """Bins that contain all but `tail` of P above, and of Q below."""
    low, high = pair.range(tail)
    if high > MAX_LOSS or (high - low) / interval > MAX_CELLS:
        raise GridTooLarge(f"losses from {low:.3g} to {high:.3g} on a grid of {interval:.3g}")
    # one spare cell on either side: rounding must not push an atom at the end of the range off the grid
    first, last = math.floor(low / interval) - 1, math.floor(high / interval) + 2
    losses: Array = np.arange(first, last + 1, dtype=np.float64) * interval
    edges = np.concatenate([[-np.inf], pair.edges(losses), [np.inf]])
    p_mass, q_mass, difference = pair.masses(edges)
    inner = p_mass[1:-1], q_mass[1:-1], difference[1:-1]
    _check_masses(inner[0], inner[1])
    # P − e^l·Q at the lower end and e^{l+d}·Q − P at the upper end of each bin, both non-negative
    above = np.maximum(_excess(*inner, losses[:-1]), 0.0)
    below = np.maximum(-_excess(*inner, losses[1:]), 0.0)
    up, down = above / -math.expm1(-interval), below / math.expm1(interval)
    p_outside, q_outside = (float(p_mass[0]), float(p_mass[-1])), (float(q_mass[0]), float(q_mass[-1]))
    return Bins(first, losses, up, down, p_outside, q_outside)


def _check_masses(p_mass: Array, q_mass: Array) -> None:
    """Refuses bins in which one of the two masses is too small for a double, and far below the other.

    Where P = 1e-150 at a loss of 500, Q = 1e-367 becomes 0, and what is computed from both is wrong in any direction.
    """
    least = np.minimum(p_mass, q_mass)
    if bool(((least < _LEAST_MASS) & (np.maximum(p_mass, q_mass) > _FAR * least)).any()):
        raise GridTooLarge("probabilities at large losses are too small for double precision")


def discretise(pair: DominatingPair, interval: float, tail: float) -> tuple[Pmf, Pmf]:
    """The PLDs of (P, Q) and of (Q, P) on multiples of `interval`; at most `tail` becomes an infinite loss."""
    bins = sort_into_bins(pair, interval, tail)
    forward = np.append(bins.down, 0.0)
    forward[1:] += bins.up
    mirror = np.exp(-bins.losses)  # the same masses under Q, at the losses −l
    backward = (forward * mirror)[::-1].copy()
    # counted at the upper end of the bin, where a tilt weighs it most
    spread = bins.up * bins.down / np.maximum(bins.up + bins.down, 1e-300)
    split, mirrored = np.append(0.0, spread), np.append(0.0, (spread * mirror[:-1])[::-1])
    forward[0] += bins.p_outside[0]
    backward[0] += bins.q_outside[1]
    last = bins.first + len(bins.losses) - 1
    return (
        Pmf(bins.first, forward, bins.p_outside[1], split),
        Pmf(-last, backward, bins.q_outside[0], mirrored),
    )


def _excess(p_mass: Array, q_mass: Array, difference: Array, losses: Array) -> Array:
    """P − e^l·Q: from P − Q where losses are small, from P and Q separately where P is far below Q."""
    return np.where(losses > -1, difference - np.expm1(losses) * q_mass, p_mass - np.exp(losses) * q_mass)


def mixture(parts: list[tuple[float, Pmf]]) -> Pmf:
    """The PLD if part i runs with probability w_i and the adversary learns which one ran (an upper bound)."""
    lower = min(pmf.lower for _, pmf in parts)
    upper = max(pmf.lower + len(pmf.probs) for _, pmf in parts)
    probs, split = np.zeros(upper - lower), np.zeros(upper - lower)
    for weight, pmf in parts:
        place = slice(pmf.lower - lower, pmf.lower - lower + len(pmf.probs))
        probs[place] += weight * pmf.probs
        split[place] += weight * pmf.split
    return Pmf(lower, probs, sum(weight * pmf.infinity for weight, pmf in parts), split)


def upper_envelope(forward: Pmf, backward: Pmf) -> Pmf:
    """The PLD of max(H_e^ε(P, Q), H_e^ε(Q, P)) if the first is larger for ε ≥ 0 and the second for ε < 0."""
    right, left = slice(1 - forward.lower, None), slice(0, -backward.lower)
    above, below = forward.probs[right], backward.probs[left]
    rest = max(0.0, 1 - float(above.sum()) - float(below.sum()) - forward.infinity)
    split = np.concatenate([backward.split[left], [backward.split[-backward.lower]], forward.split[right]])
    return Pmf(backward.lower, np.concatenate([below, [rest], above]), forward.infinity, split)


def _log_mix(rate: float, base: float) -> float:
    """log(1 − q + q·e^base)."""
    if base > 30:
        return base + math.log(rate) + math.log1p((1 - rate) / rate * math.exp(-base))
    return math.log1p(rate * math.expm1(base)) if rate < 1 else base


def _unmix(rate: float, losses: Array) -> Array:
    """The inverse of _log_mix; −∞ where l ≤ log(1 − q)."""
    if rate == 1:
        return losses
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        small = np.log1p(np.maximum(np.expm1(np.minimum(losses, 30.0)) / rate, -1.0))
        large = losses - math.log(rate) + np.log1p(-(1 - rate) * np.exp(-np.maximum(losses, 1.0)))
    return np.where(losses > 30, large, small)


def _replace_edges(scale: float, rate: float, losses: Array) -> Array:
    """Closed form for Gaussian noise: x = scale²·(l/2 + asinh(sinh(l/2)·e^{1/2scale²}·(1−q)/q))."""
    half = losses / 2
    if rate == 1:
        return scale**2 * half
    size = np.abs(half)
    with np.errstate(divide="ignore"):
        log_sinh = size + np.log(-np.expm1(-2 * size)) - math.log(2)
    argument = log_sinh + 0.5 / scale**2 + math.log1p(-rate) - math.log(rate)
    asinh = np.where(argument > 20, argument + math.log(2), np.arcsinh(np.exp(np.minimum(argument, 20.0))))
    result: Array = scale**2 * (half + np.sign(half) * asinh)
    return result


def _laplace_lower(z: Array) -> Array:
    """P[Laplace(1) ≤ z], precise in the lower tail."""
    return np.where(z < 0, 0.5 * np.exp(np.minimum(z, 0.0)), 1 - 0.5 * np.exp(-np.maximum(z, 0.0)))
