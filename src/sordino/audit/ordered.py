"""Right guesses among the surest canaries, when canaries are independent: the exact law of the best auditor.

The f-DP bound of `sordino.audit.bounds` holds for every mechanism, also for one that publishes all coins at once with a
small probability. Where the plan's own mechanism makes canaries independent (each has coordinates of its own, with
noise of its own, and is drawn by itself), no such conspiracy is part of the claim, and the order statistics of m
independent posteriors say how many of the k surest guesses can be right (after Xiang, Wang, Xiao, Tian and Wang, "Tight
privacy audit in one run", 2025; theorem and proof in docs/guarantees/audit.md).

Let F = 1 − f for the claim's trade-off function f, symmetric, and g = F⁻¹ (`Curve.least_false`). Of a canary whose
coin is fair, the surest guesses "in" that have probability y under `in` have probability g(y) under `out`: (g(y) + y)/2
in all, and p(y) = y/(g(y) + y) of them are right. Given that the (k+1)-st surest of the m canaries stands at y, the k
above it are independent, and their right guesses are Bin(k, p(y)).
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
"""Points between 0 and 1 at which a curve is looked at. Fewer make the p-value larger, never too small."""


def p_value_ordered(curve: Curve, correct: int, guesses: int, canaries: int, *, one_sided: bool) -> float:
    """The largest probability of at least `correct` right guesses, for independent canaries under the curve's f-DP.

    Args:
        curve: the claim, the same in both directions (f = f⁻¹).
        correct: how many guesses are right.
        guesses: how many were made, fixed before the run.
        canaries: among how many.
        one_sided: whether all guesses say `in`; otherwise each says what it likes.

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
    share = (true + false) / 2 if one_sided else np.minimum(true + false, 1.0)  # of all canaries that are this sure
    # the (k+1)-st of m uniform shares is Beta(k+1, m−k); 13 standard deviations away there is nothing to count
    middle, left = (guesses + 1) / (canaries + 1), canaries - guesses
    spread = 13 * math.sqrt(middle / canaries) + 100 / canaries
    first = max(0, int(np.searchsorted(share, middle - spread)) - 1)
    last = int(np.searchsorted(share, middle + spread)) + 1
    true, false, share = true[first:last], false[first:last], share[first:last]
    accuracy = np.divide(true, true + false, out=np.ones_like(true), where=true + false > 0)
    # the accuracy falls with the share, so each cell counts with the accuracy of its lower end
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
