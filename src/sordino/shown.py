"""Prints ε and δ: all rounding for output happens here. Upper bounds are rounded up, lower bounds are rounded down.

A float is taken as the shortest decimal that converts back to it: δ = 1e-05 prints as 1e-05, not as 1.001e-05.
"""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal


def up(value: float, digits: int = 4) -> str:
    """At most `digits` significant digits, never below the value: for every guaranteed ε and δ.

    Example:
        >>> up(2.00001), up(1e-5)
        ('2.001', '1e-05')
    """
    return _shown(value, digits, ROUND_CEILING)


def down(value: float, digits: int = 4) -> str:
    """At most `digits` significant digits, never above the value: for the lower bound of an audit."""
    return _shown(value, digits, ROUND_FLOOR)


def _shown(value: float, digits: int, rounding: str) -> str:
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    exact = Decimal(repr(float(value)))
    if not exact:
        return "0"
    rounded = exact.quantize(Decimal(1).scaleb(exact.adjusted() + 1 - digits), rounding=rounding).normalize()
    if -5 < rounded.adjusted() < 15:
        return format(rounded, "f")
    mantissa = format(rounded.scaleb(-rounded.adjusted()).normalize(), "f")
    return f"{mantissa}e{rounded.adjusted():+03d}"
