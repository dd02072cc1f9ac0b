"""The exact half of the generator against 600-bit arithmetic, and against its fast half."""

from __future__ import annotations

import hashlib
import random
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sordino.randomness import RandomSource, exact
from sordino.randomness import stream as randomness
from sordino.randomness.exact import _FRACTION, EXTRA_BITS, cos_sin, exact_exponential, exact_normal, negative_log

PI = Decimal(
    "3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534211706798214808651"
    "3282306647093844609550582231725359408128481117450284102701938521105559644622948954930381964428810975665933446"
)
BITS = 63 + EXTRA_BITS + 1  # of a U with all its digits


def fixed(value: int) -> Decimal:
    return Decimal(value) / Decimal(2) ** _FRACTION


@given(st.integers(1, BITS - 1), st.integers(0, 2 ** (BITS - 1) - 1), st.booleans())
@settings(deadline=None, max_examples=60)
def test_negative_log_is_right_to_422_bits_for_every_size_of_u(length: int, digits: int, near_one: bool) -> None:
    numerator = (digits % (1 << length)) | 1
    if near_one:
        numerator = (1 << BITS) - numerator
    with localcontext() as context:
        context.prec = 180
        exact = -(Decimal(numerator) / Decimal(2) ** BITS).ln()
        assert abs(fixed(negative_log(numerator, BITS)) - exact) < Decimal(2) ** -422


@given(st.integers(-(2**BITS), 2**BITS - 1))
@settings(deadline=None, max_examples=60)
def test_cos_and_sin_lie_on_the_circle_and_turn_with_the_angle(numerator: int) -> None:
    turn = BITS + 1
    cos, sin = cos_sin(numerator, turn)
    assert abs(cos * cos + sin * sin - (1 << 2 * _FRACTION)) < 1 << (2 * _FRACTION - 422)
    cos2, sin2 = cos_sin(2 * numerator, turn)  # the double-angle formulas
    assert abs(cos2 - ((cos * cos - sin * sin) >> _FRACTION)) < 1 << (_FRACTION - 422)
    assert abs(sin2 - ((2 * cos * sin) >> _FRACTION)) < 1 << (_FRACTION - 422)
    assert cos / 2**_FRACTION == pytest.approx(np.cos(2 * np.pi * (numerator / 2**turn)), abs=1e-14)
    assert sin / 2**_FRACTION == pytest.approx(np.sin(2 * np.pi * (numerator / 2**turn)), abs=1e-14)


@pytest.mark.parametrize("power", [3, 12, 60, 200])
def test_sine_of_an_angle_is_its_power_series(power: int) -> None:
    with localcontext() as context:
        context.prec = 200
        angle = 2 * PI / Decimal(2) ** power
        series, term, k = Decimal(0), angle, 1
        while abs(term) > Decimal(2) ** -600:
            series += term
            term *= -angle * angle / ((k + 1) * (k + 2))
            k += 2
        assert abs(fixed(cos_sin(1 << (BITS + 1 - power), BITS + 1)[1]) - series) < Decimal(2) ** -422


def test_the_further_digits_begin_with_those_of_earlier_versions() -> None:
    """So an insecure seed still gives the noise that it gave when 128 digits were used."""
    stream = RandomSource.seeded(5).stream("compare", 0)
    for words in (1, 2):
        digits = stream._extra(77, words)
        old = hashlib.blake2b((77).to_bytes(16, "little"), digest_size=16 * words, key=stream._refine_key).digest()
        for i in range(words):
            number = int.from_bytes(digits[48 * i : 48 * (i + 1)], "little")
            assert number >> (EXTRA_BITS - 128) == int.from_bytes(old[16 * i : 16 * (i + 1)], "little")
    assert stream._extra(77, 2)[:32] != stream._extra(78, 2)[:32]


def test_rounding_is_to_the_nearest_integer_on_both_sides_of_zero() -> None:
    one = 1 << _FRACTION
    assert [exact._round(one * k // 4, _FRACTION, 1.0) for k in (-5, -3, -1, 0, 1, 3, 5)] == [-1, -1, 0, 0, 0, 1, 1]
    assert exact._round(one, _FRACTION, 2.5e8) == 250_000_000


@pytest.mark.parametrize("scale", [2.0**28, 1.7 * 2.0**28, 2.0**40])  # at 2⁴⁰ a sixteenth is undecided
def test_the_fast_path_never_disagrees_with_the_exact_one(scale: float) -> None:
    """Every draw of the fast path, recomputed exactly from the same bits: the same integers."""
    pairs = 4_000
    stream, twin = (RandomSource.seeded(5).stream("compare", 0) for _ in range(2))
    fast = torch.empty(2 * pairs, dtype=torch.float64)
    stream.rounded_normal(fast, scale)
    words = twin.bits64(2 * pairs)
    u, v = words[:pairs] & np.uint64(2**63 - 1), words[pairs:].view(np.int64)
    for i in range(pairs):
        cos, sin = exact_normal(int(u[i]), int(v[i]), twin._extra(i, 2), scale)
        assert (fast[i].item(), fast[pairs + i].item()) == (cos, sin)


def test_the_fast_laplace_path_never_disagrees_with_the_exact_one() -> None:
    n, scale = 6_000, 1.9 * 2.0**39
    stream, twin = (RandomSource.seeded(6).stream("compare", 0) for _ in range(2))
    fast = torch.empty(n, dtype=torch.float64)
    stream.rounded_laplace(fast, scale)
    words = twin.bits64(n)
    for i, word in enumerate(words.tolist()):
        magnitude = exact_exponential(word & (2**63 - 1), twin._extra(i, 1), scale)
        assert fast[i].item() == (-magnitude if word >> 63 else magnitude)


def test_double_precision_stays_within_the_tolerance_that_the_proof_allows() -> None:
    """The error of √(−2 ln U)·cos(2πV) in torch's double precision, at random and at extreme U and V."""
    generator = random.Random(8)
    us = [generator.getrandbits(63) for _ in range(1_500)]
    us += [(1 << 63) - (generator.getrandbits(46) | 1 << 46) for _ in range(300)]  # radius a little over 2⁻⁸
    us += [generator.getrandbits(46) | 1 << 45 for _ in range(300)]  # U a little over 2⁻¹⁸
    vs = [generator.getrandbits(64) - (1 << 63) for _ in us]
    vs[:4] = [0, -1, -(1 << 63), (1 << 63) - 1]
    log_u = torch.tensor(us, dtype=torch.int64).to(torch.float64).mul_(2.0**-63).log_()
    angle = torch.tensor(vs, dtype=torch.int64).to(torch.float64).mul_(2.0 * np.pi * 2.0**-64)
    radius = log_u.clone().mul_(-2.0).sqrt_()
    low, high = randomness._NORMAL_LOGS
    inside = (log_u >= low) & (log_u <= high)
    assert inside.sum() > 2_090  # the extremes above are meant to lie just inside
    fast = torch.stack([radius * angle.cos(), radius * angle.sin()])
    worst = 0.0
    for i in inside.nonzero().flatten().tolist():
        exact = exact_normal(us[i], vs[i], bytes(2 * EXTRA_BITS // 8), 2.0**80)
        worst = max(worst, *(abs(fast[k, i].item() - exact[k] / 2.0**80) for k in (0, 1)))
    assert worst < 0.75 * randomness._TOLERANCE  # measured: half of it; the proof allows log and cos 4 ulp
