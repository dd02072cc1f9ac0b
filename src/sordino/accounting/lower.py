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

_CELLS = 1 << 17  # a limit, because the shares are computed one after the other


def coarsen(pair: DominatingPair, interval: float, tail: float) -> Pmf:
    """A PLD that (P, Q) dominates. Losses below the grid are dropped; those above it count as its upper end."""
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
    # a symbol whose loss would be below its grid point counts one point lower
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
