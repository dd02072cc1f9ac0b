"""A schedule is a plain value that gives a number for each step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sordino.errors import InputError
from sordino.schedule import Schedule, constant, pieces

POSITIVE = st.floats(1e-6, 1e6)


def test_pieces_hold_until_the_next_one_starts() -> None:
    assert pieces((0, 0.05), (0.5, 0.025)).over(4).tolist() == [0.05, 0.05, 0.025, 0.025]
    assert pieces((0, 3.0), (0.5, 1.0)).over(3).tolist() == [3.0, 3.0, 1.0]


@pytest.mark.parametrize("kind", ["linear", "geometric", "cosine"])
def test_a_curve_runs_from_its_first_value_to_its_last(kind: str) -> None:
    values = Schedule(kind, (4.0, 1.0)).over(101)
    assert values[0] == pytest.approx(4.0)
    assert values[-1] == pytest.approx(1.0)
    assert (np.diff(values) < 0).all()
    middle = {"linear": 2.5, "geometric": 2.0, "cosine": 2.5}[kind]
    assert values[50] == pytest.approx(middle)


@given(kind=st.sampled_from(["linear", "geometric", "cosine"]), first=POSITIVE, last=POSITIVE, steps=st.integers(1, 50))
def test_every_schedule_survives_its_dictionary_and_stays_positive(
    kind: str, first: float, last: float, steps: int
) -> None:
    schedule = Schedule(kind, (first, last))
    assert Schedule.from_dict(schedule.to_dict()) == schedule
    values = schedule.over(steps)
    assert values.shape == (steps,)
    assert (values > 0).all()
    listed = Schedule("listed", tuple(values.tolist()))
    assert Schedule.from_dict(listed.to_dict()).over(steps).tolist() == values.tolist()


def test_a_plain_number_is_a_constant() -> None:
    assert Schedule.from_dict(0.5) == constant(0.5)
    assert constant(0.5).is_constant
    assert pieces((0, 2.0), (0.5, 2.0)).is_constant
    assert not Schedule("linear", (1.0, 2.0)).is_constant


@pytest.mark.parametrize(
    ("kind", "values", "says"),
    [
        ("wavy", (1.0,), "one of pieces"),
        ("linear", (1.0,), "two values"),
        ("linear", (1.0, 0.0), "greater than 0"),
        ("linear", (1.0, float("nan")), "finite"),
        ("pieces", ((0.1, 1.0),), "start at 0"),
        ("pieces", ((0.0, 1.0), (0.0, 2.0)), "and increase"),
        ("pieces", (1.0, 2.0), "pairs"),
        ("pieces", (), "start at 0"),
    ],
)
def test_what_is_no_schedule_is_said_to_be_none(kind: str, values: tuple[float, ...], says: str) -> None:
    with pytest.raises(InputError, match=says):
        Schedule(kind, values)


def test_a_list_must_have_a_value_for_each_step() -> None:
    with pytest.raises(InputError, match="lists 2 values, the plan has 3 steps"):
        Schedule("listed", (1.0, 2.0)).over(3)
    with pytest.raises(InputError, match="number or"):
        Schedule.from_dict({"kind": "linear"})
