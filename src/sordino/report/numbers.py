"""Formats numbers for the report. ε is rounded up, never down."""

from __future__ import annotations

import math
from typing import Any

from sordino.shown import down, up

_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def epsilon(value: Any) -> str:
    """Four significant digits, rounded up: the printed value is never below the computed one."""
    return up(value) if _is_number(value) else "–"


def lower(value: Any) -> str:
    """Four significant digits of a lower bound, rounded down."""
    return down(value) if _is_number(value) else "–"


def power(value: Any) -> str:
    """A δ, rounded up: 1e-05 → 10⁻⁵, 2.5e-06 → 2.5·10⁻⁶; other numbers are printed plainly."""
    if not _is_number(value) or value <= 0 or not math.isfinite(value):
        return plain(value)
    if 1e-3 <= value < 1e6:
        return up(value, 6)
    mantissa, _, exponent = f"{float(up(value, 6)):.5e}".partition("e")  # six digits: no further rounding
    factor = f"{float(mantissa):g}"
    ten = "10" + str(int(exponent)).translate(_SUPERSCRIPT)
    return ten if factor == "1" else f"{factor}·{ten}"


def plain(value: Any, digits: int = 6) -> str:
    """A number with at most `digits` significant digits, whole numbers with thin spaces; text as it is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "–" if value is None else str(value)
    if isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e15):
        return f"{int(value):,}".replace(",", " ") if abs(value) >= 10_000 else str(int(value))
    return f"{value:.{digits}g}"


def percent(value: Any) -> str:
    return f"{100 * value:.2f} %" if _is_number(value) else "–"


def most(value: Any) -> str:
    """A share that is promised not to be exceeded, in percent: rounded up."""
    return f"{up(100 * value)} %" if _is_number(value) else "–"


def seconds(value: Any) -> str:
    """12.3 s, 4 min 05 s, 2 h 03 min."""
    if not _is_number(value) or not math.isfinite(value):
        return "–"
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
