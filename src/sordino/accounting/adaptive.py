"""What runs cost together when later ones are chosen by looking at earlier ones.

Privacy loss distributions bound a composition whose mechanisms are fixed beforehand. Where the *parameters* of a run
may depend on what earlier runs released, their composition is no bound: for each output of the first run the second can
be the one whose loss is worst there. A Rényi filter is a bound. *Theorem* (Feldman and Zrnic 2021, with all records in
one filter): fix an order α. If in every course of events the mechanisms' Rényi divergences of order α add up to at most
B, then seeing all of them has a divergence of at most B, however they were chosen.

Runs that are (ε_j, δ_j)-differentially private enter it as follows: each is, but for an event of probability δ_j, a
mechanism of pure loss ε_j (Kairouz, Oh and Viswanath 2015), whose divergence is at most min(ε_j, α·ε_j²/2) (Bun and
Steinke 2016, Prop. 3.3). Half of δ is kept for these events, in every course of events; the other half converts B to ε
(Canonne, Kamath and Steinke 2020, Prop. 12). How δ is split, and the order, are fixed beforehand: they are functions of
the (ε, δ) that may be spent.
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
    """The order that leaves the most Gaussian noise's worth of divergence, of all that may be spent: (ε, δ)."""
    room = {order: (epsilon - _conversion(order, delta)) / order for order in ORDERS if order > 1}
    return max(room, key=lambda order: room[order])


def divergence(releases: Releases, order: float, relation: str) -> float:
    """The Rényi divergence of these releases at one order, an upper bound; infinite where no bound is known."""
    if not releases:
        return 0.0
    if not supports(releases, relation):
        return math.inf
    value = float(rdp_curve(releases, relation, (order,))[0])
    return value if math.isfinite(value) else math.inf


def pure_divergence(epsilon: float, order: float) -> float:
    """That of a mechanism of pure loss ε."""
    return min(epsilon, order * epsilon * epsilon / 2) * (1 + 2.0**-50)


def filtered_epsilon(divergences: Sequence[float], failures: Sequence[float], order: float, delta: float) -> float:
    """ε at δ of adaptively chosen runs: their divergences at the filter's order, and the δ_j of those that have one.

    Infinite where the δ_j take more than half of δ.
    """
    if math.fsum(failures) * (1 + 1e-12) > delta / 2:
        return math.inf
    total = math.fsum(divergences) * (1 + 1e-12)
    return max(0.0, total + _conversion(order, delta)) if total else 0.0


def _conversion(order: float, delta: float) -> float:
    """What is added to a divergence of this order to have ε at δ/2."""
    huge = 1e6  # far from where the conversion is cut at 0
    found, _ = google_rdp.compute_epsilon((order,), np.array([huge]), delta / 2)
    return float(found) - huge + 1e-9
