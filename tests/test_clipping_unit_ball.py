"""Rows are put into the unit ball for every float: tiny, huge, subnormal, infinite, NaN."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sordino.clipping import in_unit_ball
from sordino.features.moment import second_moment, unit_rows
from sordino.methods.hidden_state.losses import Softmax
from sordino.methods.hidden_state.training import bounded

ANY = st.one_of(
    st.floats(),  # the whole range, with subnormal numbers, infinities and NaN
    st.integers(-1074, 1023).map(lambda e: math.ldexp(1.0, e)),
    st.sampled_from([5e-324, 2.2250738585072014e-308, 1.7976931348623157e308, math.inf, math.nan, 0.0]),
)
RADIUS = st.one_of(st.none(), st.floats(min_value=0, exclude_min=True, allow_infinity=False))


def exact_norm_squared(row: list[float]) -> Fraction:
    return sum((Fraction(x) ** 2 for x in row), Fraction(0))


@settings(max_examples=600, deadline=None)
@given(values=st.lists(ANY, min_size=1, max_size=12), radius=RADIUS)
@example(values=[5e-324, 5e-324], radius=5e-324)
def test_no_row_of_floats_is_longer_than_one_afterwards(values: list[float], radius: float | None) -> None:
    (row,) = in_unit_ball(torch.tensor([values], dtype=torch.float64), radius).tolist()
    assert exact_norm_squared(row) <= 1 + Fraction(1, 10**13)
    if not all(math.isfinite(v) for v in values):
        assert row == [0.0] * len(values)


@settings(max_examples=300, deadline=None)
@given(values=st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=8))
def test_a_row_that_is_not_tiny_has_norm_one_and_its_own_direction(values: list[float]) -> None:
    (row,) = in_unit_ball(torch.tensor([values], dtype=torch.float64), None).tolist()
    if max(map(abs, values)) < torch.finfo(torch.float64).tiny:
        assert row == [0.0] * len(values)
        return
    assert float(exact_norm_squared(row)) == pytest.approx(1, abs=1e-13)
    at = max(range(len(values)), key=lambda i: abs(values[i]))
    for given_value, found in zip(values, row, strict=True):
        assert found / row[at] == pytest.approx(float(Fraction(given_value) / Fraction(values[at])), abs=1e-14)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("radius", [None, 1e-3, 1.0, 1e6])
def test_every_kind_of_float_and_every_power_of_two(kind: torch.dtype, radius: float | None) -> None:
    powers = torch.tensor([math.ldexp(1.0, e) for e in range(-1074, 1024)], dtype=torch.float64).to(kind)
    rows = powers[:, None] * torch.tensor([1.0, -1.0, 0.5, 0.25], dtype=kind)
    assert float(in_unit_ball(rows, radius).norm(dim=1).max()) <= 1 + 1e-13


def test_numbers_that_the_platform_takes_for_zero_give_zero() -> None:
    rows = torch.tensor([[5e-324, 1e-310], [1e-307, 1e-307]], dtype=torch.float64)
    if not torch.set_flush_denormal(True):
        pytest.skip("this platform keeps subnormal numbers")
    try:
        found = in_unit_ball(rows, None)
    finally:
        torch.set_flush_denormal(False)
    assert found[0].tolist() == [0.0, 0.0]
    assert float(found[1].norm()) == pytest.approx(1)


@pytest.mark.parametrize("size", [1e-160, 1e-170, 1e-200, 1e-290, 1e-300, 1e-305, 5e-324, 1e200, 1e308])
def test_a_record_of_any_size_moves_the_sums_of_both_methods_by_at_most_its_bound(size: float) -> None:
    row = torch.full((1, 4), size, dtype=torch.float64)
    assert float(unit_rows(row, None).double().norm()) <= 1 + 1e-6
    assert float(second_moment(row, None).norm()) <= 1 + 1e-5
    assert float(bounded(row, 3.0, unit=True).norm()) <= 3 * (1 + 1e-13)
    residual = Softmax(3).residual(torch.zeros(1, 3, dtype=torch.float64), torch.tensor([0]))
    assert float((residual.T @ bounded(row, 1.0, unit=True)).norm()) <= math.sqrt(2) * (1 + 1e-13)


def test_rows_without_coordinates_stay_so() -> None:
    assert in_unit_ball(torch.zeros(3, 0), None).shape == (3, 0)
