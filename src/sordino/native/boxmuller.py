"""round(offset + scale · Z) for real Gaussians Z, computed in float32 if that is certain and in double if it is not.

Formal contract. Z = √(−2 ln U)·cos 2πV and √(−2 ln U)·sin 2πV (Box and Muller, 1958) for real uniform U, V of which
only the first digits are known. A stage computes offset + scale · Z from them with an error that
docs/guarantees/noise.md section 3 bounds for *all* possible further digits. If the bound leaves one nearest
integer, the result is that integer; every other pair is reported as undecided and is computed with more digits of the
same U and V: in double precision here, then in the 448-bit arithmetic of `randomness.exact`. So the integers do not
depend on which stage decided, nor on the rounding of the platform's log, cos and sin, as long as these are within 4
units in the last place.

| stage  | known digits of U, V | error of Z   | decides unless                                   |
|--------|----------------------|--------------|--------------------------------------------------|
| single | 32, 32               | < 2⁻¹⁷       | U < 2⁻¹³, R < 2⁻⁵, or within scale·2⁻¹⁷ + 2⁻²⁴ of a half-integer |
| double | 63, 64               | < 2⁻⁴⁰       | U < 2⁻²⁴, R < 2⁻¹², or within scale·2⁻⁴⁰ of a half-integer |
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import numpy.typing as npt

# Coordinates per block: small enough for the buffers to stay in the cache, large enough for few calls. The buffers are
# numpy's, which take half the time of torch's within other work and are never divided over threads.
BLOCK = 1 << 16
MAX_SCALE = 2.0**12  # of the single stage: beyond it, too few pairs are decided to save time

# Bounds within which each precision may decide, derived in docs/guarantees/noise.md section 3.
SINGLE_TOLERANCE = 2.0**-17
SINGLE_ADDITION = 2.0**-24  # rounding of an offset in [−½, ½] to float32, and of the sum
SINGLE_LOGS = (-13 * math.log(2.0), -(2.0**-11))  # below, U's unknown digits matter; above, √ magnifies errors
DOUBLE_TOLERANCE = 2.0**-40
DOUBLE_LOGS = (-24 * math.log(2.0), -(2.0**-25))


@functools.lru_cache
def single_limit(scale: float) -> np.float32:
    """The largest distance from an integer at which the single stage may decide a sum."""
    return np.float32(np.nextafter(np.float32(0.5 - (scale * SINGLE_TOLERANCE + SINGLE_ADDITION)), np.float32(0)))


class Pairs:
    """A block of pairs in float32: buffers, allocated once for all blocks of this size, and the first stage.

    `words` are the random digits: the first row of their uint32 view is those of U, the second, as signed numbers,
    those of V. `whole` and `rounded` have the cosines' coordinates in the first half, the sines' in the second.
    """

    def __init__(self, pairs: int, dtype: np.dtype[Any]) -> None:
        self.words = np.empty(pairs, dtype="<u8")
        self.digits = self.words.view("<u4").reshape(2, pairs)
        self._w = self.digits[1].view("<i4")
        self.whole = np.empty(2 * pairs, dtype)
        floats = np.empty((5, pairs), np.float32)
        self._radius, self.total, self.rounded = floats[0], floats[1:3], floats[3:].reshape(-1)
        self._open = np.empty((2, pairs), np.bool_)

    def single(self, offset: npt.NDArray[Any], scale: float) -> npt.NDArray[np.intp]:
        """rounded ← round(offset + scale · Z) for |offset| ≤ ½; returns the pairs that it could not decide."""
        outside = self.approximate(offset, scale)
        flat = self.total.reshape(-1)
        np.rint(flat, out=self.rounded)
        np.subtract(flat, self.rounded, out=flat)
        np.abs(flat, out=flat)
        np.greater(self.total, single_limit(scale), out=self._open)
        outside |= self._open[0]
        outside |= self._open[1]
        return outside.nonzero()[0]

    def approximate(self, offset: npt.NDArray[Any], scale: float) -> npt.NDArray[np.bool_]:
        """total ← offset + scale · Z to within scale·2⁻¹⁷ + 2⁻²⁴, except at the returned mask, where U is extreme."""
        radius, total, angle = self._radius, self.total, self.total[1]
        radius[...] = self.digits[0]
        np.multiply(radius, np.float32(2.0**-32), out=radius)
        np.log(radius, out=radius)
        outside: npt.NDArray[np.bool_] = radius < np.float32(SINGLE_LOGS[0])
        outside |= radius > np.float32(SINGLE_LOGS[1])
        np.multiply(radius, np.float32(-2.0 * scale * scale), out=radius)
        np.sqrt(radius, out=radius)
        angle[...] = self._w
        np.multiply(angle, np.float32(2.0 * math.pi * 2.0**-32), out=angle)
        np.cos(angle, out=total[0])
        np.sin(angle, out=angle)
        np.multiply(total, radius, out=total)
        flat = total.reshape(-1)
        np.add(flat[: len(offset)], offset, out=flat[: len(offset)], casting="same_kind")
        return outside


def extended(
    digits: npt.NDArray[np.uint32], further: npt.NDArray[np.uint32]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """63 digits of U and 64 (signed) of V: two rows of 32 digits, followed by those of `further`."""
    words = digits.astype(np.uint64)
    words <<= np.uint64(32)
    words |= further
    return (words[0] >> np.uint64(1)).view(np.int64), words[1].view(np.int64)


def double(
    u: npt.NDArray[np.int64], v: npt.NDArray[np.int64], offset: npt.NDArray[np.float64], scale: float
) -> tuple[npt.NDArray[np.float64], list[int]]:
    """round(offset + scale · Z) as two rows (cosines, sines), and the pairs that are undecided.

    `u` and `v` are 63 and 64 signed digits, `offset` has two rows of numbers in [−½, ½].
    """
    radius, total = u * 2.0**-63, np.empty_like(offset)  # U ∈ [u, u+1]·2⁻⁶³
    np.log(radius, out=radius)
    undecided = (radius < DOUBLE_LOGS[0]) | (radius > DOUBLE_LOGS[1])
    radius *= -2.0 * scale * scale
    np.sqrt(radius, out=radius)
    angle = v * (2.0 * math.pi * 2.0**-64)  # V ∈ [v, v+1]·2⁻⁶⁴ ⊂ [−½, ½]
    np.cos(angle, out=total[0])
    np.sin(angle, out=total[1])
    total *= radius
    total += offset
    rounded = np.rint(total)
    total -= rounded
    np.abs(total, out=total)
    open_ = total > 0.5 - scale * DOUBLE_TOLERANCE
    undecided |= open_[0]
    undecided |= open_[1]
    return rounded, undecided.nonzero()[0].tolist()
