"""ε and δ as text: the one place where they are rounded. What is promised is rounded up, a lower bound is rounded down.

A float stands for the shortest decimal that gives it back: δ = 1e-05 is shown as it is, not as 1.001e-05.
"""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal


def up(value: float, digits: int = 4) -> str:
    """At most `digits` significant digits, never less than the value: for every ε and δ that is printed."""
    return _shown(value, digits, ROUND_CEILING)


def down(value: float, digits: int = 4) -> str:
    """At most `digits` significant digits, never more than the value: for what an audit has shown."""
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
