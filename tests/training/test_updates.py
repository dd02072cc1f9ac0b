"""Averages of iterates against their definitions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sordino.errors import InputError
from sordino.training.updates import Average, Averaging


def average_of(values: list[float], averaging: Averaging) -> float | None:
    model = nn.Linear(1, 1, bias=False).double()
    average = Average.empty(model)
    for step, value in enumerate(values):
        with torch.no_grad():
            model.weight.fill_(value)
        average = average.include(model, averaging, step, len(values))
    mean = average.values()
    return None if mean is None else float(mean["weight"])


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-10, 10), min_size=1, max_size=20), st.floats(0, 0.99))
def test_ema_is_the_exponentially_weighted_mean(values: list[float], decay: float) -> None:
    weights = [decay ** (len(values) - 1 - i) for i in range(len(values))]
    expected = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    assert average_of(values, Averaging("ema", decay=decay)) == pytest.approx(expected, abs=1e-9)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-10, 10), min_size=1, max_size=20), st.floats(0.05, 1))
def test_tail_is_the_mean_of_the_last_part(values: list[float], tail: float) -> None:
    last = values[-max(1, round(tail * len(values))) :]
    assert average_of(values, Averaging("tail", tail=tail)) == pytest.approx(sum(last) / len(last), abs=1e-9)


def test_none_averages_nothing() -> None:
    assert average_of([1.0, 2.0], Averaging("none")) is None


@pytest.mark.parametrize("bad", [{"kind": "mean"}, {"decay": 1.0}, {"decay": float("nan")}, {"tail": 0.0}])
def test_bad_settings_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(InputError):
        Averaging(**bad)  # type: ignore[arg-type]
