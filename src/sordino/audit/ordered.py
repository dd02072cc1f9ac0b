"""Right guesses about the surest canaries, if canaries are independent: the exact distribution for the best auditor.

The f-DP bound of `sordino.audit.bounds` holds for every mechanism, also for one that publishes all coins with a
small probability. If the plan's own mechanism makes canaries independent (each has its own coordinates, its own noise
and its own draws), the claim does not allow that, and the order statistics of m
independent posteriors determine how many of the k surest guesses can be right (after Xiang, Wang, Xiao, Tian and Wang,
"Tight privacy audit in one run", 2025; theorem and proof in docs/guarantees/audit.md).

Let F = 1 − f for the claim's trade-off function f, symmetric, and g = F⁻¹ (`Curve.least_false`). Of a canary whose
coin is fair, the surest guesses "in" that have probability y under `in` have probability g(y) under `out`: (g(y) + y)/2
in all, and p(y) = y/(g(y) + y) of them are right. Given that the (k+1)-st surest of the m canaries is at y, the k
surer ones are independent, and their number of right guesses is Bin(k, p(y)).
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy.special import bdtrc, betainc

from sordino.audit.bounds import Curve, check_counts

Array = npt.NDArray[np.float64]

_FINE = 6_000
"""The number of points between 0 and 1 at which a curve is evaluated. Fewer make the p-value larger, never too
small."""


def p_value_ordered(curve: Curve, correct: int, guesses: int, canaries: int, *, one_sided: bool) -> float:
    """The largest probability of at least `correct` right guesses, for independent canaries under the curve's f-DP.

    Args:
        curve: the claim, the same in both directions (f = f⁻¹).
        correct: the number of right guesses.
        guesses: the number of guesses, fixed before the run.
        canaries: the number of canaries.
        one_sided: whether all guesses are `in`; otherwise each may be either.

    Returns:
        P[N* ≥ correct] for the auditor who guesses the surest canaries of the worst such mechanism, rounded up by the
        width of the grid.

    Raises:
        InputError: the counts are impossible.
    """
    check_counts(correct, guesses, canaries)
    if correct == 0:
        return 1.0
    true, false = _curve_points(curve)
    # of the canaries that are at least this sure
    share = (true + false) / 2 if one_sided else np.minimum(true + false, 1.0)
    # the (k+1)-st of m uniform shares is Beta(k+1, m−k); beyond 13 standard deviations its probability is negligible
    middle, left = (guesses + 1) / (canaries + 1), canaries - guesses
    spread = 13 * math.sqrt(middle / canaries) + 100 / canaries
    first = max(0, int(np.searchsorted(share, middle - spread)) - 1)
    last = int(np.searchsorted(share, middle + spread)) + 1
    true, false, share = true[first:last], false[first:last], share[first:last]
    accuracy = np.divide(true, true + false, out=np.ones_like(true), where=true + false > 0)
    # the accuracy decreases with the share, so each cell uses the accuracy of its lower end
    reached = betainc(guesses + 1, left, share) if left else np.where(share < 1.0, 0.0, 1.0)
    reached[0] = 0.0
    mass = np.diff(np.append(reached, 1.0))
    return min(1.0, float(np.sum(mass * bdtrc(correct - 1, guesses, accuracy))))


@lru_cache(maxsize=256)
def _curve_points(curve: Curve) -> tuple[Array, Array]:
    """(y, g(y)) from 0 to 1, y finer towards 0, where the surest guesses are."""
    small = np.geomspace(1e-9, 1e-3, _FINE // 10, endpoint=False)
    true = np.concatenate([[0.0], small, np.linspace(1e-3, 1.0, _FINE)])
    false = np.array([min(1.0, max(0.0, curve.least_false(y))) for y in true.tolist()[:-1]] + [1.0])
    return true, false
