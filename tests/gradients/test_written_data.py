"""A parameter that is added in place to data of the same shape, as it is to the scores of MPNet's attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradients.cases import Fn, matches, noise


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
