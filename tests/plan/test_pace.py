"""How many steps fit a time."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sordino.errors import InputError
from sordino.plan.pace import MOST, Pace

SECONDS = st.floats(1e-6, 1e6)


@given(seconds=SECONDS, step=SECONDS, batch=st.floats(1, 1e6), rate=SECONDS)
def test_the_steps_fit_the_time_and_one_more_does_not(seconds: float, step: float, batch: float, rate: float) -> None:
    pace = Pace(seconds, step, 1 / rate)
    count, each = pace.fitting(batch), Fraction(step) + Fraction(batch) * Fraction(1 / rate)
    assert count * each <= Fraction(seconds) * (1 + Fraction(1, 10**11))
    assert count == MOST or (count + 1) * each > Fraction(seconds) * (1 - Fraction(1, 10**11))


def test_a_minute_of_tenths_of_a_second_has_600_steps() -> None:
    assert Pace.of(minutes=1, seconds_per_step=0.1).steps(50) == 600
    assert Pace.of(minutes=1, records_per_second=100).steps(50) == 120
    assert Pace.of(minutes=1, seconds_per_step=0.5, records_per_second=100).steps(50) == 60


def test_each_further_gaussian_takes_its_time() -> None:
    pace = Pace.of(minutes=1, seconds_per_step=0.1, seconds_per_noise=0.05)
    assert [pace.steps(50, noises) for noises in (1, 3, 19)] == [600, 300, 60]


def test_a_time_that_is_too_short_for_one_step_is_an_error_that_says_both_times() -> None:
    with pytest.raises(InputError, match="a step of 50 records takes 61 seconds, and the run may take 60"):
        Pace.of(minutes=1, seconds_per_step=61).steps(50)
    assert Pace.of(minutes=1, seconds_per_step=61).fitting(50) == 0
    assert Pace.of(minutes=1, seconds_per_step=60).fitting(50) == 1


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "2", True])
@pytest.mark.parametrize("name", ["minutes", "seconds_per_step", "records_per_second", "seconds_per_noise"])
def test_what_is_not_a_positive_number_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"^{name} must be"):
        Pace.of(**({"minutes": 1.0, "seconds_per_step": 1.0} | {name: value}))


@pytest.mark.parametrize(
    "values", [{"minutes": 1e308, "seconds_per_step": 1}, {"minutes": 1, "records_per_second": 1e-320}]
)
def test_times_that_a_double_can_not_hold_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="must be a finite number"):
        Pace.of(**values)


def test_the_time_of_a_step_must_be_given_and_the_error_says_who_measures_it() -> None:
    with pytest.raises(InputError, match=r"sordino doctor RECIPE.toml"):
        Pace.of(minutes=1)


def test_huge_and_tiny_numbers_have_a_number_of_steps() -> None:
    assert Pace.of(minutes=1e300, seconds_per_step=1).steps(5) == MOST
    assert Pace.of(minutes=1, seconds_per_step=1e-300).steps(5) == MOST
    assert Pace.of(minutes=1, records_per_second=1e300).steps(5) == MOST
    assert Pace.of(minutes=1, seconds_per_step=1, seconds_per_noise=1e300).fitting(5, 64) == 0


def test_what_was_given_is_stated() -> None:
    pace = Pace.of(minutes=3, seconds_per_step=0.5, records_per_second=100)
    assert pace.to_dict() == {
        "minutes": 3, "seconds_per_step": 0.5, "records_per_second": 100, "seconds_per_noise": 0.0,
    }  # fmt: skip
