"""Rows that become single numbers in a loop over the rows: tensors without dimensions, which have a row as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradients.cases import Fn, matches, noise

Forward = Callable[[Any, Tensor, Tensor], Tensor]


def numbers(one: Callable[[Any, Tensor, Tensor], Tensor]) -> Forward:
    """One number for each row."""
    return lambda self, x, ids: torch.stack([one(self, self.f(r), i) for r, i in zip(x, ids, strict=True)])[:, None]


def masked(self: Any, h: Tensor, i: Tensor) -> Tensor:
    total = h.sum().clone()
    total[i > 5] = 0.5
    return total + h[0, 0]


FORWARDS: dict[str, Forward] = {
    "determinant": numbers(lambda self, h, i: torch.linalg.det(h)),
    "one of many numbers": numbers(lambda self, h, i: h[0][i]),
    "constant at an index": numbers(lambda self, h, i: torch.arange(4.0, dtype=h.dtype)[i] * h.sum()),
    "parameter at an index": numbers(lambda self, h, i: self.w[i] * h.sum()),
    "parameter without dimensions": numbers(lambda self, h, i: self.u * h.sum()),
    "gather": numbers(lambda self, h, i: h.sum().gather(0, 0 * i)),
    "where": numbers(lambda self, h, i: torch.where(i > 1, h.sum(), self.u)),
    "mask": numbers(masked),
    "sum of parts": numbers(lambda self, h, i: torch.stack([r.prod().permute(()) for r in h]).sum().reshape(())),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_rows_that_are_single_numbers(name: str) -> None:
    for rows in (1, 2, 3, 5):
        torch.manual_seed(rows)
        model = Fn(FORWARDS[name], f=nn.Linear(3, 3), w=noise(4), u=noise())
        matches(model, (noise(rows, 3, 3), torch.randint(1, 3, (rows,))), rows=rows)
