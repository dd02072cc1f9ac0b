"""The joint cost of runs when later runs are chosen by looking at earlier ones.

Privacy loss distributions bound a composition of mechanisms that are fixed in advance. If the *parameters* of a run may
depend on what earlier runs released, composing PLDs gives no bound: for each output of the first run, the second can be
the one whose loss is worst there. A Rényi filter does give a bound. *Theorem* (Feldman and Zrnic 2021, with all records
in one filter): fix an order α. If for every sequence of outcomes the mechanisms' Rényi divergences of order α add up to
at most B, then the joint release has divergence at most B, however the mechanisms were chosen.

Runs that are (ε_j, δ_j)-differentially private enter as follows: each is, except for an event of probability δ_j, a
mechanism of pure loss ε_j (Kairouz, Oh and Viswanath 2015), whose divergence is at most min(ε_j, α·ε_j²/2) (Bun and
Steinke 2016, Prop. 3.3). Half of δ is reserved for these events, for every sequence of outcomes; the other half
converts B to ε (Canonne, Kamath and Steinke 2020, Prop. 12). The split of δ and the order are fixed in advance: they
are functions of the (ε, δ) that may be spent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from dp_accounting.rdp import rdp_privacy_accountant as google_rdp

from sordino.accounting.events import Release
from sordino.accounting.rdp import ORDERS, rdp_curve, supports

Releases = Sequence[tuple[Release, int]]


def filter_order(epsilon: float, delta: float) -> float:
    """The order at which (ε, δ) allows the largest divergence relative to that of Gaussian noise."""
    room = {order: (epsilon - _conversion(order, delta)) / order for order in ORDERS if order > 1}
    return max(room, key=lambda order: room[order])


def divergence(releases: Releases, order: float, relation: str) -> float:
    """An upper bound on the Rényi divergence of these releases at one order; infinite if none is known."""
    if not releases:
        return 0.0
    if not supports(releases, relation):
        return math.inf
    value = float(rdp_curve(releases, relation, (order,))[0])
    return value if math.isfinite(value) else math.inf


def pure_divergence(epsilon: float, order: float) -> float:
    """The Rényi divergence bound of a mechanism with pure loss ε."""
    return min(epsilon, order * epsilon * epsilon / 2) * (1 + 2.0**-50)


def filtered_epsilon(divergences: Sequence[float], failures: Sequence[float], order: float, delta: float) -> float:
    """ε at δ of adaptively chosen runs, from their divergences at the filter's order and the δ_j that some have.

    Infinite if the δ_j sum to more than half of δ.
    """
    if math.fsum(failures) * (1 + 1e-12) > delta / 2:
        return math.inf
    total = math.fsum(divergences) * (1 + 1e-12)
    return max(0.0, total + _conversion(order, delta)) if total else 0.0


def _conversion(order: float, delta: float) -> float:
    """The number that converts a divergence of this order to ε at δ/2 by addition."""
    huge = 1e6  # large enough that the conversion is not clipped at 0
    found, _ = google_rdp.compute_epsilon((order,), np.array([huge]), delta / 2)
    return float(found) - huge + 1e-9
