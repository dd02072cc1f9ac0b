"""A parameter that is added in place to data of the same shape, as it is to the scores of MPNet's attention; data that
is written into zeros."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradients.cases import Fn, matches, noise, squared
from sordino.clipping import FlatClip
from sordino.errors import Refused
from sordino.gradients import Rows, clipped_sum


def repeated(self: Any, x: Tensor) -> Tensor:
    """The bias is made for every row before it meets them."""
    return (self.b[None] * 2).expand(len(x), -1, -1).contiguous()


def assigned(self: Any, x: Tensor) -> Tensor:
    h = self.l(x)
    h += repeated(self, x)
    return torch.tanh(h)


def called(self: Any, x: Tensor) -> Tensor:
    """The result of add_ is not looked at."""
    h = self.l(x)
    h.add_(repeated(self, x))
    return torch.tanh(h)


def into_a_view(self: Any, x: Tensor) -> Tensor:
    h = self.l(x)
    h[:, 1:].mul_(repeated(self, x)[:, 1:])
    return torch.tanh(h)


@pytest.mark.parametrize("forward", [assigned, called, into_a_view])
def test_a_parameter_that_is_written_into_data(forward: Any) -> None:
    for rows in (1, 2, 3, 4, 5):
        torch.manual_seed(rows)
        matches(Fn(forward, l=nn.Linear(4, 4), b=noise(3, 4)), noise(rows, 3, 4), rows=rows)


@pytest.mark.parametrize("make", [torch.zeros_like, lambda h: torch.empty(h.shape, dtype=h.dtype)])
def test_rows_that_are_unsorted_by_an_assignment(make: Any) -> None:
    """out[order] = sorted_, after a sort by lengths: it was refused, while index_copy was not."""

    def unsorted(self: Any, x: Tensor) -> Tensor:
        order = x[:, 0, 0].argsort()
        out = make(x)
        out[order] = torch.tanh(self.l(x[order]))
        return out + x

    for rows in (1, 2, 3, 4, 5):
        torch.manual_seed(rows)
        matches(Fn(unsorted, l=nn.Linear(4, 4)), noise(rows, 3, 4), rows=rows)


def from_the_end(self: Any, x: Tensor) -> Tensor:
    out, order = torch.zeros_like(x), x[:, 0, 0].argsort()
    out[order - len(x)] = torch.tanh(self.l(x[order]))
    return out


def one_for_all(self: Any, x: Tensor) -> Tensor:
    out = torch.tanh(self.l(x)).clone()
    out[x[:, 0, 0].argsort()] = torch.ones(1, 3, 4, dtype=x.dtype)
    return out + self.l(x)


@pytest.mark.parametrize("forward", [from_the_end, one_for_all])
def test_other_assignments_to_places_that_data_selects_are_measured(forward: Any) -> None:
    for rows in (1, 2, 3, 4):
        torch.manual_seed(rows)
        matches(Fn(forward, l=nn.Linear(4, 4)), noise(rows, 3, 4), rows=rows)


def test_zeros_that_were_filled_with_data_are_not_blank_any_more() -> None:
    """The second write must not make the engine forget whose values the first one wrote, also without a gradient."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            z = torch.zeros_like(x[:, :2])
            z[:, 0] = x.flip(0)[:, 0] * (x.flip(0)[:, 1] == 7)
            z[:, 1] = x[:, 1]
            return self.body(x) * z  # type: ignore[no-any-return]

    data = Rows(noise(6, 4), noise(6))
    with pytest.raises(Refused, match="combines values of one record"):
        clipped_sum(Twice().double(), squared, data, FlatClip(1.0))
