"""Operations that no rule knows: a record that is not finite stays alone, also where shapes do not tell the rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

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
