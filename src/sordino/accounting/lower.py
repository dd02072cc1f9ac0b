"""A certified lower bound on ε for the releases whose dominating pair is attained: it shows how tight the upper one is.

Post-processing an output cannot make two datasets easier to tell apart, so the PLD of a *coarsened* output bounds δ
from below. The outputs are first sorted into the bins [l_k, l_{k+1}] of their privacy loss; then bin k is sent to the
symbol k with probability a_k and to k+1 otherwise. Symbol k thus collects parts of the bins on either side of l_k, and
the a_k are chosen so that its loss is l_k or a little more; then it counts as l_k. The error is of second order in the
interval, as that of Connect-the-Dots is, with the other sign.
"""

from __future__ import annotations

import math

import numpy as np

from sordino.accounting.pairs import Array, Bins, GridTooLarge, Pair, Pmf, sort_into_bins

_CELLS = 1 << 17  # the shares are found one after the other


def coarsen(pair: Pair, interval: float, tail: float) -> Pmf:
    """A PLD that (P, Q) dominates. Losses below the grid are dropped, those above it count as its upper end."""
    return coarsened(sort_into_bins(pair, interval, tail), interval)


def coarsened(bins: Bins, interval: float, drift: float = 0.0) -> Pmf:
    """A PLD that is dominated by the pair whose losses were sorted into these bins."""
    if len(bins.losses) > _CELLS:
        raise GridTooLarge(f"{len(bins.losses)} bins")
    up, down = bins.up, bins.down
    masses = up + down
    keep = _shares(up.tolist(), (down * math.exp(interval)).tolist())
    stay, rise = keep * masses, (1 - keep) * masses
    probs = np.zeros(len(masses) + 1)
    probs[:-1] += stay
    probs[1:] += rise
    # symbols whose loss would fall short of their grid point count one point lower
    short = np.zeros(len(probs), dtype=bool)
    short[1:-1] = keep[1:] * up[1:] < (1 - keep[:-1]) * down[:-1] * math.exp(interval) * (1 - 1e-12)
    short[-1] = True
    moved = np.where(short, probs, 0.0)
    probs -= moved
    probs[:-1] += moved[1:]
    probs[-1] += bins.p_outside[1]
    return Pmf(bins.first, probs, 0.0, np.zeros(len(probs)), drift)


def _shares(up: list[float], needed: list[float]) -> Array:
    """a_k ≥ 1/2 with a_k·up_k ≥ (1 − a_{k−1})·needed_{k−1} wherever a_k ≤ 1 allows it."""
    result = np.empty(len(up))
    share = 1.0
    for k, mass in enumerate(up):
        want = (1 - share) * needed[k - 1] if k else 0.0
        share = min(1.0, max(0.5, want / mass)) if mass > 0 else 1.0
        result[k] = share
    return result
