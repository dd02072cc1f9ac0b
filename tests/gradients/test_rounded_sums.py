"""Sums that are rounded to single precision where they are computed: the same sums, rounded once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sordino.gradients.layers.convolution import Convolved, Geometry
from sordino.gradients.sums.contributions import Outer
from sordino.gradients.sums.narrow import narrow_sum


def bounds(records: int, blocks: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.linspace(0, records, blocks + 1).astype(np.int64)


@pytest.mark.parametrize("outputs", [7, 30, 100])
@pytest.mark.parametrize("positions", [1, 4, 40])
@pytest.mark.parametrize("blocks", [None, 1, 3])
def test_a_linear_map_of_several_positions(outputs: int, positions: int, blocks: int | None) -> None:
    given = torch.randn(9, positions, outputs), torch.randn(9, positions, 65)
    weight = torch.rand(9, dtype=torch.float64)
    weight[4] = 0
    one, other = Outer(*given), Outer(*given)
    one.runs = other.runs = None if blocks is None else bounds(9, blocks)
    total = torch.zeros(outputs, 65, dtype=torch.float64)
    one.add_to(total, weight)
    assert torch.equal(narrow_sum(other, weight, torch.empty(outputs, 65)), total.float())
    expected = torch.einsum("m,msp,msq->pq", weight, *(t.double() for t in given))
    assert torch.allclose(total, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_convolution_whose_activations_are_stored(blocks: int) -> None:
    x, g = torch.randn(5, 1, 16, 4, 4), torch.randn(5, 1, 48, 4, 4)
    form = Convolved(g, x, Geometry((48, 16, 3, 3), (1, 1), (1, 1), (1, 1), 1))
    form.runs = bounds(5, blocks)
    weight, total = torch.rand(5, dtype=torch.float64), torch.zeros(48, 16, 3, 3, dtype=torch.float64)
    form.add_to(total, weight)
    assert torch.equal(narrow_sum(form, weight, torch.empty(48, 16, 3, 3)), total.float())
    kernel = torch.zeros(48, 16, 3, 3, dtype=torch.float64, requires_grad=True)
    output = F.conv2d(x[:, 0].double(), kernel, padding=1)
    (expected,) = torch.autograd.grad((output * g[:, 0]).sum((1, 2, 3)) @ weight, kernel)
    assert torch.allclose(total, expected, rtol=0, atol=1e-4)


def test_lengths_are_computed_anew_after_a_record_is_dropped() -> None:
    form = Outer(torch.randn(3, 4, 30), torch.randn(3, 4, 40))
    form.left[1, 2, 3] = torch.inf
    assert torch.isfinite(form.norm2()).tolist() == [True, False, True]
    form.drop(torch.tensor([False, True, False]))
    assert form.lengths()[1] == 0
    assert torch.isfinite(form.norm2()).all()
