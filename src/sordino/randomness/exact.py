"""Correctly rounded noise on the integers: the slow, exact path of the generator.

The generator draws Z = √(−2 ln U)·cos(2πV) (Box and Muller, 1958) or E = −ln U from uniform numbers with unlimited
digits and rounds `offset + scale · Z` to the nearest integer. Single or double precision (`boxmuller`) decides nearly
every rounding. Where it can't (a value within its error of a half-integer, an extreme U), the functions here decide
with 384 further random bits and 448-bit fixed-point arithmetic. The resulting integer is therefore distributed as
round(offset + scale · Z) for a real Gaussian Z up to a total variation of 2⁻²⁶⁰ per draw (less than the chance to guess
the generator's 256-bit key), on every machine and for every implementation of log and cos that is accurate to 4 units
in the last place.
The derivation is in docs/guarantees/noise.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

EXTRA_BITS = 384  # random bits appended to U and to V where double precision can't decide
_FRACTION = 448  # fractional bits of the fixed-point numbers below
_ONE = 1 << _FRACTION


def _arctan_of_inverse(n: int) -> int:
    """arctan(1/n) in fixed point, by its power series."""
    power = _ONE // n
    total, k = power, 1
    while power:
        power //= -n * n
        k += 2
        total += power // k
    return total


_PI = 16 * _arctan_of_inverse(5) - 4 * _arctan_of_inverse(239)  # Machin (1706)
_LN2 = sum((_ONE >> k) // k for k in range(1, _FRACTION))  # Σ 2⁻ᵏ/k


def _exp(x: int) -> int:
    """exp(x) for |x| ≤ 1: Taylor series at x/64, then six squarings."""
    x >>= 6
    term = total = _ONE
    k = 0
    while term not in (0, -1):
        k += 1
        term = (term * x >> _FRACTION) // k
        total += term
    for _ in range(6):
        total = total * total >> _FRACTION
    return total


def negative_log(numerator: int, bits: int) -> int:
    """−ln(numerator / 2^bits) in fixed point, for 0 < numerator < 2^bits; error below 2⁻⁴²²."""
    exponent = numerator.bit_length()
    mantissa = (numerator << _FRACTION) >> exponent  # in [1/2, 1)
    guess = int(math.ldexp(math.log(mantissa / _ONE), _FRACTION))
    e = _exp(guess)
    t = ((mantissa - e) << _FRACTION) // (mantissa + e)  # ln m = guess + 2 artanh t, |t| < 2⁻⁵⁰
    square, power, artanh, k = t * t >> _FRACTION, t, t, 1
    while power not in (0, -1):
        power = power * square >> _FRACTION
        k += 2
        artanh += power // k
    return (bits - exponent) * _LN2 - guess - 2 * artanh


def cos_sin(numerator: int, bits: int) -> tuple[int, int]:
    """(cos, sin) of 2π·numerator/2^bits in fixed point; error below 2⁻⁴²²."""
    quarter = 1 << (bits - 2)
    turns = (numerator + quarter // 2) // quarter
    angle = ((numerator - turns * quarter) * 2 * _PI) >> bits  # in [−π/4, π/4]
    angle >>= 4  # (cos, sin) of a sixteenth of the angle by Taylor series, then four doublings of the angle
    cos, sin, term, k = _ONE, 0, _ONE, 0
    while term not in (0, -1):
        k += 1
        term = (term * angle >> _FRACTION) // k
        if k & 1:
            sin += -term if k & 2 else term
        else:
            cos += -term if k & 2 else term
    for _ in range(4):
        cos, sin = (cos * cos - sin * sin) >> _FRACTION, (2 * cos * sin) >> _FRACTION
    return ((cos, sin), (-sin, cos), (-cos, -sin), (sin, -cos))[turns % 4]


def _round(value: int, fraction: int, scale: float, offset: float = 0.0) -> int:
    """The integer nearest to offset + scale · value / 2^fraction, with both floats taken at their exact values."""
    numerator, denominator = scale.as_integer_ratio()
    shift = fraction + denominator.bit_length() - 1
    total = value * numerator
    if offset:
        numerator, denominator = offset.as_integer_ratio()
        bits = denominator.bit_length() - 1
        total = (total << bits) + (numerator << shift)
        shift += bits
    return (2 * total + (1 << shift)) >> (shift + 1)


def extended(word: int, extra: bytes) -> int:
    """`word` followed by the extra bits and a final 1: the midpoint of the interval that the known bits leave."""
    return (word << EXTRA_BITS | int.from_bytes(extra, "little")) << 1 | 1


def as_float(value: int) -> float:
    """A number with `_FRACTION` fractional bits as a double."""
    return math.ldexp(value, -_FRACTION)


def exact_normal(
    u: int, v: int, extra: bytes, scale: float, offset: tuple[float, float] = (0.0, 0.0)
) -> tuple[int, int]:
    """round(offset + scale · Z) for two independent Z, from 63 bits of U, 64 signed bits of V and 96 extra bytes."""
    cos, sin = fixed_normal(u, v, extra)
    return _round(cos, 2 * _FRACTION, scale, offset[0]), _round(sin, 2 * _FRACTION, scale, offset[1])


def fixed_normal(u: int, v: int, extra: bytes) -> tuple[int, int]:
    """Two independent Z in fixed point with 896 fractional bits, of which the last 480 are undetermined."""
    half = EXTRA_BITS // 8
    log = negative_log(extended(u, extra[:half]), 63 + EXTRA_BITS + 1)
    radius = math.isqrt(2 * log << _FRACTION)
    cos, sin = cos_sin(extended(v, extra[half:]), 64 + EXTRA_BITS + 1)
    return radius * cos, radius * sin


def rounded_total(terms: Sequence[tuple[float, int]], scale: float, offset: float) -> int:
    """The integer nearest to offset + scale · Σ a·Z, for Z as `fixed_normal` gives them."""
    total = sum((Fraction(a) * z for a, z in terms), Fraction(0))
    exact = Fraction(offset) + Fraction(scale) * total / (1 << 2 * _FRACTION)
    return math.floor(exact + Fraction(1, 2))


def as_double(z: int) -> float:
    """A Z of `fixed_normal` as the nearest double."""
    return float(Fraction(z, 1 << 2 * _FRACTION))


def exact_exponential(u: int, extra: bytes, scale: float) -> int:
    """One rounded standard exponential from 63 bits of U and 48 extra bytes."""
    return _round(negative_log(extended(u, extra), 63 + EXTRA_BITS + 1), _FRACTION, scale)
