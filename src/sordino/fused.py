"""The first stage of a rounded Gaussian sum as one compiled loop: faster, and the same integers to the last bit.

Where numba is installed (`pip install sordino[fast]`) and a release is large enough to be worth its import, the passes
of `boxmuller.Pairs.single` over a block become one loop in double precision. It uses the same digits of U and V and
keeps an integer only where its own error bound, 2⁻²⁰ (docs/guarantees/noise.md, section 3), leaves no other; what it
does not decide goes to the same further stages. So whether numba is there can't be told from the noise, only from the
clock.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from sordino.boxmuller import SINGLE_LOGS

WORTHWHILE = 1 << 16
"""Coordinates of a release from which the compiled loop is used: below, importing numba costs more than it saves."""

TOLERANCE = 2.0**-20
"""On the error of Z for every value of the digits that are not known, while log U stays in SINGLE_LOGS."""

Loop = Callable[[npt.NDArray[Any], npt.NDArray[np.uint32], float, float, npt.NDArray[np.bool_]], None]


@functools.cache
def loop() -> Loop | None:
    """values ← spacing · round(values/spacing + scale · Z) where that is decided; None without numba.

    Takes the values (n, float32 or float64), the digits (2 rows of ⌈n/2⌉), scale, spacing (a power of two), and a mask
    that says afterwards which pairs are undecided: their values are as they were. The last pair of an odd number of
    values is always left open. Compiled at the first call for a dtype, in about a second.
    """
    if importlib.util.find_spec("numba") is None:
        return None
    return _compiled()


def _compiled() -> Loop:
    from numba import njit

    # "contract" lets a·b + c be rounded once: an error less. A division by zero is no exception: m + 1 is not zero.
    options = {"error_model": "numpy", "fastmath": {"contract"}}
    as_int, as_double, rint = _intrinsics()

    @njit(inline="always", **options)  # type: ignore[untyped-decorator]
    def minus_log(u: Any) -> Any:
        """−ln(u·2⁻³²): u = 2ᵉ·m, ½ ≤ m² < 2, ln m = 2 artanh((m−1)/(m+1)); the first term left out is below 2⁻³²."""
        bits = as_int(np.float64(u)) + (0x3FF0000000000000 - 0x3FE6A09E667F3BCD)  # of 1, and of √½
        m = as_double((bits & 0x000FFFFFFFFFFFFF) + 0x3FE6A09E667F3BCD)
        s = (m - 1.0) / (m + 1.0)
        z = s * s
        series = 1.0 + z * (1 / 3 + z * (1 / 5 + z * (1 / 7 + z * (1 / 9 + z * (1 / 11)))))
        return (32.0 - np.float64((bits >> 52) - 1023)) * math.log(2.0) - 2.0 * s * series

    @njit(inline="always", **options)  # type: ignore[untyped-decorator]
    def cos_sin(v: Any) -> Any:
        """Of 2π·v·2⁻³², v signed: Taylor's series within an eighth of a turn; what is left out is below 2⁻²⁹."""
        quarter = (np.int64(v) + (1 << 29)) >> 30
        angle = np.float64(np.int64(v) - (quarter << 30)) * (2.0 * math.pi * 2.0**-32)
        z = angle * angle
        sin = angle * (1 + z * (-1 / 6 + z * (1 / 120 + z * (-1 / 5040 + z * (1 / 362880)))))
        cos = 1 + z * (-1 / 2 + z * (1 / 24 + z * (-1 / 720 + z * (1 / 40320 + z * (-1 / 3628800)))))
        turned = (quarter & 1) != 0
        first, second = (sin if turned else cos), (cos if turned else sin)
        return first * np.float64(1 - ((quarter + 1) & 2)), second * np.float64(1 - (quarter & 2))

    low, high = -SINGLE_LOGS[0], -SINGLE_LOGS[1]

    @njit(nogil=True, **options)  # type: ignore[untyped-decorator]
    def decide(values: Any, digits: Any, scale: float, spacing: float, undecided: Any) -> None:
        pairs, kind = digits.shape[1], values.dtype.type
        limit = 0.5 - scale * TOLERANCE
        inverse, step, zero = kind(1.0 / spacing), kind(spacing), kind(0)
        u, v, cosines, sines = digits[0], digits[1], values[:pairs], values[pairs:]
        undecided[len(sines) :] = True
        for i in range(len(sines)):
            log = minus_log(u[i])
            radius = scale * math.sqrt(2.0 * log)
            cos, sin = cos_sin(np.int32(v[i]))
            left, right = cosines[i] * inverse, sines[i] * inverse
            whole, other = rint(left), rint(right)
            left_sum = np.float64(left - whole) + radius * cos
            right_sum = np.float64(right - other) + radius * sin
            rounded, turned = rint(left_sum), rint(right_sum)
            far = max(abs(left_sum - rounded), abs(right_sum - turned))
            open_ = (log > low) | (log < high) | (far > limit)
            undecided[i] = open_
            # two integers are added in the dtype, rounded once; adding +0 makes one zero of two
            cosines[i] = cosines[i] if open_ else (whole + kind(rounded) + zero) * step
            sines[i] = sines[i] if open_ else (other + kind(turned) + zero) * step

    return decide  # type: ignore[no-any-return]


def _intrinsics() -> tuple[Any, Any, Any]:
    """A double's bits as an integer, the inverse, and rounding to the nearest integer: single instructions of LLVM."""
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    @intrinsic  # type: ignore[untyped-decorator]
    def as_int(_: Any, x: Any) -> Any:
        return types.int64(types.float64), lambda _c, builder, _s, given: builder.bitcast(given[0], ir.IntType(64))

    @intrinsic  # type: ignore[untyped-decorator]
    def as_double(_: Any, x: Any) -> Any:
        return types.float64(types.int64), lambda _c, builder, _s, given: builder.bitcast(given[0], ir.DoubleType())

    @intrinsic  # type: ignore[untyped-decorator]
    def rint(_: Any, x: Any) -> Any:
        def emit(_c: Any, builder: Any, _s: Any, given: Any) -> Any:
            return builder.call(builder.module.declare_intrinsic("llvm.rint", [given[0].type]), given)

        return x(x), emit

    return as_int, as_double, rint
