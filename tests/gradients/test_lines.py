"""Single lines that carry the guarantee: each was taken out, and no other test failed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradients.cases import Fn, noise, squared
from sordino.clipping import FlatClip
from sordino.errors import Refused
from sordino.gradients import Rows, clipped_sum

ROWS = 6


def refused(forward: Any, **parts: Any) -> None:
    torch.manual_seed(0)
    model = Fn(forward, a=nn.Linear(4, 5), b=nn.Linear(5, 3), **parts).double()
    with pytest.raises(Refused, match="reaches positions of other records"):
        clipped_sum(model, squared, Rows(noise(ROWS, 4), noise(ROWS)), FlatClip(1.0))


class Mixing(torch.autograd.Function):
    """Its result required a gradient already where it was made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] + 3 * gradients[0].mean(0)


def test_a_backward_pass_that_mixes_records_behind_a_forward_pass_with_gradients() -> None:
    refused(lambda m, x: m.b(Mixing.apply(torch.tanh(m.a(x)))))


def zeros_behind_the_rows(m: Any, x: Tensor) -> Tensor:
    wide = torch.zeros(len(x) + 1, 4, dtype=x.dtype)
    wide[:-1] = x
    return m.a(wide)  # type: ignore[no-any-return]


def ones_behind_the_rows(m: Any, x: Tensor) -> Tensor:
    return torch.cat([x[:, :1], torch.ones(1, 1, dtype=x.dtype)]) * m.w  # type: ignore[no-any-return]


@pytest.mark.parametrize("made", [zeros_behind_the_rows, ones_behind_the_rows])
def test_a_place_of_no_row_that_all_rows_use(made: Any) -> None:
    """Its gradient is the sum over all records: none of them owns it, and it must not be lost."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = made(m, x)
        return m.b(torch.tanh(y[:-1] + y[-1:]))  # type: ignore[no-any-return]

    refused(forward, w=noise(5))
