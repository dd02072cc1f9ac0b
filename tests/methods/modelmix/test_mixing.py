"""The update of ModelMix in its two parts: descent from the mean of two iterates, and widths for the release."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sordino.errors import InputError
from sordino.training.updates import AveragingSGD


def run(first: float, gradients: list[float], lr: float) -> list[float]:
    weight = nn.Parameter(torch.tensor([first], dtype=torch.float64))
    optimizer = AveragingSGD([weight], lr=lr)
    seen = [first]
    for gradient in gradients:
        weight.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
        seen.append(float(weight.detach()))
    return seen


@settings(deadline=None, max_examples=50)
@given(st.floats(-5, 5), st.lists(st.floats(-5, 5), min_size=1, max_size=12), st.floats(0.01, 2))
def test_each_step_descends_from_the_mean_of_the_last_two_iterates(
    first: float, gradients: list[float], lr: float
) -> None:
    iterates = [first, first]  # w_{−1} = w_0
    for gradient in gradients:
        iterates.append((iterates[-1] + iterates[-2]) / 2 - lr * gradient)
    assert run(first, gradients, lr) == pytest.approx(iterates[1:], abs=1e-9)


def test_the_earlier_iterate_is_the_one_before_mixing_and_survives_a_checkpoint() -> None:
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = AveragingSGD([weight], lr=0.5)
    assert torch.equal(optimizer.previous(weight), weight), "before the first step both are w_0"
    weight.grad = torch.tensor([2.0])
    optimizer.step()
    assert float(weight.detach()) == 0.0
    assert float(optimizer.previous(weight)) == 1.0
    other = AveragingSGD([weight], lr=0.5)
    other.load_state_dict(optimizer.state_dict())
    assert float(other.previous(weight)) == 1.0


def test_a_parameter_without_a_released_gradient_is_not_left_unmixed_silently() -> None:
    optimizer = AveragingSGD([nn.Parameter(torch.zeros(2))], lr=0.5)
    with pytest.raises(InputError, match="no released gradient"):
        optimizer.step()
    with pytest.raises(ValueError, match="lr"):
        AveragingSGD([nn.Parameter(torch.zeros(2))], lr=0.0)
