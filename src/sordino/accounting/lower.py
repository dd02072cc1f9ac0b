"""A certified lower bound on ε for releases that attain their dominating pair: it shows how tight the upper bound is.

Post-processing can't make two datasets easier to distinguish, so the PLD of a *coarsened* output bounds δ from below.
Outputs are first sorted into the bins [l_k, l_{k+1}] of their privacy loss; then bin k is mapped to the symbol k with
probability a_k and to k+1 otherwise. Symbol k thus collects parts of the bins on either side of l_k, and the a_k are
chosen so that its loss is at least l_k; it then counts as l_k. The error is of second order in the interval, as for
Connect-the-Dots, with the opposite sign.
"""

from __future__ import annotations

import math

import numpy as np

from sordino.accounting.pairs import Array, Bins, DominatingPair, GridTooLarge, Pmf, sort_into_bins

_CELLS = 1 << 17  # largest number of cells: the shares are computed one after the other, in Python
_ROUNDING = 1e-12  # relative to a cell: by how much the mean of a point may be below its value


def coarsen(pair: DominatingPair, interval: float, tail: float) -> Pmf:
    """A PLD that (P, Q) dominates. Losses below the grid are dropped; those above it count as its upper end."""
    return coarsened(sort_into_bins(pair, interval, tail), interval)


def coarsened(bins: Bins, interval: float) -> Pmf:
    """A PLD that is dominated by the pair whose losses were sorted into these bins."""
    if len(bins.losses) > _CELLS:
        raise GridTooLarge(f"{len(bins.losses)} bins")
    probs = balanced(bins.up, bins.down * math.exp(interval), bins.up + bins.down)
    probs[-1] += bins.p_outside[1]
    return Pmf(bins.first, probs, 0.0, np.zeros(len(probs)), _ROUNDING * interval)


def merged(q_mass: Array, ratio: Array, interval: float, drift: float) -> Pmf:
    """A PLD that is dominated by the pair of these atoms, whose masses are `q_mass` and ratio·q_mass.

    An atom between the points v_k = e^{kh} and v_{k+1}, at fraction u of the way, goes to v_{k+1} with probability u.
    The atoms at a point then have a mean near v_k: with V_k = Σ q·u(1−u) over the atoms of a cell of width d_k it
    exceeds v_k by d_k·V_k − d_{k−1}·V_{k−1} in total. Mass is exchanged between neighbours so that every mean is v_k.
    """
    if not len(ratio):
        raise GridTooLarge("no atom is left")
    logs = np.log(ratio)
    places = np.floor(logs / interval).astype(np.int64)
    first, size = int(places.min()), int(places.max() - places.min()) + 2
    if size > _CELLS:
        raise GridTooLarge(f"{size} points")
    points = np.exp((first + np.arange(size, dtype=np.float64)) * interval)
    up = np.clip(np.expm1(logs - places * interval) / math.expm1(interval), 0.0, 1.0)
    places -= first
    masses = np.bincount(places, q_mass * (1 - up), size) + np.bincount(places + 1, q_mass * up, size)
    split = np.bincount(places, q_mass * up * (1 - up), size)[:-1] * np.diff(points)
    excess = np.append(split, 0.0)
    excess[1:] -= split
    found = np.array(_evened(masses.tolist(), excess.tolist(), points.tolist()))
    return Pmf(first, found * points, 0.0, np.zeros(size), drift + _ROUNDING * interval)


def _evened(masses: list[float], excess: list[float], points: list[float]) -> list[float]:
    """Parts of each point's mass that are given to a neighbour, so that no mean is above or below its point.

    A point whose mean is too low takes mass from the point above it; then one whose mean is too high from the point
    below.
    """
    for k in range(len(masses) - 1):
        if excess[k] < 0:
            gained = excess[k + 1] + masses[k + 1] * (points[k + 1] - points[k])
            part = min(1.0, -excess[k] / gained) if gained > 0 else 1.0
            masses[k] += part * masses[k + 1]
            excess[k] = 0.0 if part < 1 else excess[k] + gained
            masses[k + 1] *= 1 - part
            excess[k + 1] *= 1 - part
    for k in range(len(masses) - 1, 0, -1):
        if excess[k] < 0:  # the point above has nothing left: it counts one point lower
            masses[k - 1] += masses[k]
            masses[k] = excess[k] = 0.0
        elif excess[k] > 0:
            lost = masses[k - 1] * (points[k] - points[k - 1]) - excess[k - 1]
            part = min(1.0, excess[k] / lost) if lost > 0 else 0.0
            masses[k] += part * masses[k - 1]
            excess[k] -= part * lost
            masses[k - 1] *= 1 - part
            excess[k - 1] *= 1 - part
    return masses


def balanced(above: Array, below: Array, masses: Array) -> Array:
    """Distributes the masses of cells to the points between them, such that no point has a larger value than its mass.

    Cell k lies between the points k and k+1; `above[k]` is the excess of its mass over point k, `below[k]` its deficit
    relative to point k+1. A share of each cell goes to the point below it, the rest to the one above; at
    almost every point excess and deficit cancel. Points with a deficit count one point lower.
    """
    keep = _shares(above, below)
    probs = np.append(keep * masses, 0.0)
    probs[1:] += (1 - keep) * masses
    short = np.ones(len(probs), dtype=bool)  # there is nothing above the last one
    short[0] = False
    short[1:-1] = keep[1:] * above[1:] < (1 - keep[:-1]) * below[:-1] * (1 - _ROUNDING)
    moved = np.where(short, probs, 0.0)
    probs -= moved
    probs[:-1] += moved[1:]
    return probs


def _shares(above: Array, below: Array) -> Array:
    """a_k in [0, 1] with a_k·above_k = (1 − a_{k−1})·below_{k−1}, from both ends to the middle, where there may be an
    excess.

    Solved upwards while the masses increase and downwards while they decrease, so that errors of a share shrink.
    """
    middle = int(np.argmax(above))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratios = below[:-1] / above[1:]  # of the point k+1
        upward = np.nan_to_num(ratios[:middle], nan=1.0, posinf=1e300).tolist()
        downward = np.nan_to_num(1 / ratios[middle:][::-1], nan=1.0, posinf=1e300).tolist()
    left = [0.5]
    for ratio in upward:
        left.append(min(1.0, (1 - left[-1]) * ratio))
    right = [0.5]
    for ratio in downward:
        right.append(max(0.0, 1 - right[-1] * ratio))
    shares = np.array(left[:-1] + right[::-1])
    # the two solutions meet at `middle`: the cell below it gives at most what the one above it can compensate
    if middle:
        lifted = shares[middle] * above[middle] / max(float(below[middle - 1]), 1e-300)
        shares[middle - 1] = max(float(shares[middle - 1]), 1 - lifted)
    return shares
