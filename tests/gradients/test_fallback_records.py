"""Operations that no rule knows: a record that is not finite stays alone, also where shapes do not tell the rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradients.cases import Fn, matches, noise
from sordino.clipping import FlatClip
from sordino.errors import Refused
from sordino.gradients import Rows, clipped_sum

ROWS = 5  # as many as the data has columns


class Inner(nn.Module):
    """x @ w with a vector w: no rule of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(0.1, 0.5, ROWS))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


class Exponential(nn.Module):
    """A product that overflows for finite data, after a permutation that hides the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2, ROWS, 1))

    def forward(self, x: Tensor) -> Tensor:
        shuffled = x.reshape(ROWS, ROWS).T.reshape(1, ROWS, ROWS).expand(2, ROWS, ROWS)
        return torch.logaddexp(shuffled * 0, shuffled * self.w).sum((0, 1))


def absolute(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).abs()


def sums(model: nn.Module, x: Tensor) -> Tensor:
    return clipped_sum(model, absolute, Rows(x, torch.zeros(len(x))), FlatClip(1.0)).sums["w"]


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), -float("inf")])
def test_a_record_that_is_not_finite_takes_no_other_with_it(bad: float) -> None:
    x = torch.randn(ROWS, ROWS, generator=torch.Generator().manual_seed(0))
    x[3] = bad
    found = clipped_sum(Inner(), absolute, Rows(x, torch.zeros(ROWS)), FlatClip(1.0))
    without = sums(Inner(), torch.cat([x[:3], x[4:]]))
    assert found.dropped == 1
    assert torch.allclose(found.sums["w"], without)
    assert without.norm() > 1


def test_the_rows_are_found_where_the_batch_is_as_large_as_another_dimension() -> None:
    x = torch.randn(ROWS, ROWS, generator=torch.Generator().manual_seed(1))
    one_by_one = torch.stack([sums(Inner(), row[None]) for row in x]).sum(0)
    assert torch.allclose(sums(Inner(), x), one_by_one, atol=1e-6)


def test_what_can_not_be_told_apart_and_overflows_is_refused_not_dropped() -> None:
    x = torch.randn(ROWS, ROWS, generator=torch.Generator().manual_seed(2))
    whole = sums(Exponential(), x)
    assert torch.isfinite(whole).all()
    x[2] = 3e38
    try:
        found = clipped_sum(Exponential(), absolute, Rows(x, torch.zeros(ROWS)), FlatClip(1.0))
    except Refused:
        return
    x[2] = 0
    assert (found.sums["w"] - sums(Exponential(), x)).norm() <= 2.0 + 1e-4  # one record was replaced by another


def both(self: Any, x: Tensor) -> Tensor:
    a, b = torch.broadcast_tensors(x, self.w)
    return a * b


def one_is_unused(self: Any, x: Tensor) -> Tensor:
    return self.f(torch.broadcast_tensors(self.f(x), self.w)[0]) + torch.broadcast_tensors(self.w, x)[1]


def in_a_grid(self: Any, x: Tensor) -> Tensor:
    return torch.stack([(a * b).sum(1) for a, b in (torch.meshgrid(r, self.w[0], indexing="ij") for r in x)])


def without_gradient(self: Any, x: Tensor) -> Tensor:
    """An order of a polynomial, which is no number that can be moved a little."""
    return self.f(x) * torch.logical_or(x > 0, self.w) + torch.special.hermite_polynomial_h(x, self.w.abs() * 2)


@pytest.mark.parametrize("forward", [both, one_is_unused, in_a_grid, without_gradient])
def test_results_that_are_the_data_itself_or_do_not_depend_on_the_parameter(forward: Any) -> None:
    """Refused as "modified in place", or "element 0 of tensors does not require grad"."""
    for rows in (1, 2, 3, 4, 5):
        torch.manual_seed(rows)
        matches(Fn(forward, w=noise(1, 4), f=nn.Linear(4, 4)), noise(rows, 4), rows=rows)
