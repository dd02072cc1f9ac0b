"""Rényi accounting by dp_accounting, with the conventions and the rounding bounds that it leaves to the caller.

Two things are added to `dp_accounting.rdp`:
- Under replace-one its RdpAccountant takes a Gaussian's noise multiplier relative to the *replace-one* sensitivity,
  while its PLDAccountant takes it relative to the bound on one record (and doubles the shift itself). We always give
  the noise relative to the clip norm, so the multiplier is halved here for replace-one.
- For tiny rates and large noise its Rényi divergences consist of rounding errors, at times below zero, and are then
  read as ε = 0. A bound on that rounding is added to each of them.

The conversion is the tight one (Canonne, Kamath, Steinke 2020, Prop. 12), which is what compute_epsilon does.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import dp_accounting
import numpy as np
import numpy.typing as npt
from dp_accounting.rdp import rdp_privacy_accountant as google_rdp

from sordino.accounting.events import Release

_NEAR_ONE = (1.015, 1.02, 1.03, 1.04, 1.05, 1.06, 1.07, 1.08, 1.09)
ORDERS: tuple[float, ...] = (*_NEAR_ONE, *google_rdp.DEFAULT_RDP_ORDERS)
_LARGE = (2048, 4096, 8192, 16384)
_ROUNDING = 1e-14


def supports(releases: Sequence[tuple[Release, int]], relation: str) -> bool:
    """Whether dp_accounting has a Rényi bound for all of these releases."""
    return all(release.rdp_event(relation) is not None for release, _ in releases)


def rdp_epsilon(releases: Sequence[tuple[Release, int]], delta: float, relation: str) -> float:
    """ε at δ from Rényi divergences. The caller must check `supports` first."""
    epsilon, order = _epsilon(releases, delta, relation, ORDERS)
    if order == max(ORDERS):  # larger orders matter only for tiny ε with huge noise
        epsilon = min(epsilon, _epsilon(releases, delta, relation, _LARGE)[0])
    return epsilon


def _epsilon(
    releases: Sequence[tuple[Release, int]], delta: float, relation: str, orders: Sequence[float]
) -> tuple[float, float]:
    values = rdp_curve(releases, relation, orders)
    epsilon, order = google_rdp.compute_epsilon(orders, values, delta)
    return float(epsilon), float(order)


def rdp_curve(
    releases: Sequence[tuple[Release, int]], relation: str, orders: Sequence[float] = ORDERS
) -> npt.NDArray[np.float64]:
    """An upper bound on the Rényi divergence of the composition at each order. The caller must check `supports`."""
    neighbours = dp_accounting.NeighboringRelation
    google = neighbours.ADD_OR_REMOVE_ONE if relation == "add-remove" else neighbours.REPLACE_ONE
    accountant = google_rdp.RdpAccountant(orders, google)
    total = 0
    with _quiet():
        for release, count in releases:
            accountant.compose(release.rdp_event(relation), count)
            total += count
    values: npt.NDArray[np.float64] = np.maximum(accountant._rdp, 0.0)
    return values + total * _ROUNDING * (1 + np.log(orders))


@contextmanager
def _quiet() -> Iterator[None]:
    """Drops dp_accounting's warning for each order that it leaves out, which is sound: the order counts as infinite."""

    def drop(record: logging.LogRecord) -> bool:
        return "failed to converge" not in record.getMessage()

    logger = logging.getLogger("absl")
    logger.addFilter(drop)
    try:
        yield
    finally:
        logger.removeFilter(drop)
