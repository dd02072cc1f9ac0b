"""The successes among many rare independent trials, found in O(successes) instead of O(trials).

The number of failures before a success has P(G ≥ m) = (1 − p)^m, so G = ⌊−ln U / λ⌋ with λ = −ln(1 − p) and U uniform
(Devroye 1986, ch. X.2). Double precision decides the floor unless −ln U / λ is within its error of an integer. In that
case 384 further digits of U and 448-bit fixed point decide, as for the noise (`exact`; docs/guarantees/noise.md). So
every trial is a success with probability p = ⌊rate·2⁶⁴⌋/2⁶⁴, independently of the others, up to a total variation of
2⁻²⁶⁰ per draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from sordino.errors import InputError
from sordino.randomness.exact import EXTRA_BITS, as_float, extended, negative_log

RARE = 2.0**-5
"""The largest probability for which skipping pays; the smallest is 2⁻⁴⁰, for which the digits of λ suffice."""

_RAREST = 2.0**-40
_FEW = 1 << 47  # for a smaller U·2⁶³ the digits not drawn yet may change ln U by more than 2⁻⁴⁸
_BAND = 2.0**-46  # bounds the error of −ln U: 2⁻⁴⁸ for digits not drawn, 2⁻⁵³ for rounding U, 2 ulp of the log


Draw = Callable[[int], tuple[npt.NDArray[np.uint64], Callable[[int], bytes]]]
"""Maps n to n random words, and to a function that maps the index of a word to 48 further random bytes."""


def successes(draw: Draw, rate: float, trials: int) -> npt.NDArray[np.int64]:
    """The sorted indices of the trials that succeed; for rates between 2⁻⁴⁰ and `RARE`."""
    if not _RAREST <= rate <= RARE:
        raise InputError(f"skipping needs a rate between 2^-40 and 2^-5, got {rate}")
    threshold = math.floor(Fraction(rate) * 2**64)
    rate_exact = negative_log((1 << 64) - threshold, 64)  # λ in fixed point
    found, last = [], -1
    while last < trials:
        left = (trials - last) * rate
        gaps = _gaps(draw, rate_exact, math.ceil(left + 6 * math.sqrt(left) + 16))
        places = last + np.cumsum(gaps + 1)
        found.append(places)
        last = int(places[-1])
    chosen = np.concatenate(found)
    return chosen[: np.searchsorted(chosen, trials)]


def _gaps(draw: Draw, rate_exact: int, n: int) -> npt.NDArray[np.int64]:
    """n independent numbers of failures before a success."""
    rate = as_float(rate_exact)
    words, further = draw(n)
    heads = words >> np.uint64(1)  # 63 bits of U
    with np.errstate(divide="ignore"):  # U = 0 is decided exactly below
        value = -np.log((heads.astype(np.float64) + 0.5) * 2.0**-63) / rate
    gaps = np.floor(np.minimum(value, 2.0**62)).astype(np.int64)
    clear = np.abs(value - np.rint(value)) > _BAND / rate + 2.0**-50 * value
    open_ = np.flatnonzero(~clear | (heads < np.uint64(_FEW)))
    for place in open_:
        exact = negative_log(extended(int(heads[place]), further(int(place))), 63 + EXTRA_BITS + 1)
        gaps[place] = min(exact // rate_exact, 1 << 61)
    return gaps
