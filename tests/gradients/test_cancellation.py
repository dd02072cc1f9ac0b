"""Norms from inner products cancel: a record's huge parts may add up to little, and its share must stay bounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sordino.clipping import Clipping, FlatClip, L1Clip, NormalisedClip
from sordino.gradients import Rows, clipped_sum

CLIPPINGS: list[Clipping] = [FlatClip(1.0), NormalisedClip(1.0), L1Clip(1.0)]
GAPS = [0.0, 1e-5, 3e-5, 1e-3]


def signed(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.flatten(1) @ torch.linspace(0.1, 1.0, outputs[0].numel())) * targets


def share(model: nn.Module, rows: Rows, clipping: Clipping, **options: Any) -> float:
    found = clipped_sum(model, signed, rows, clipping, **options)
    return length(found.sums, clipping)


def length(sums: dict[str, Tensor], clipping: Clipping) -> float:
    return float(torch.cat([v.double().flatten() for v in sums.values()]).norm(1 if clipping.norm == "l1" else 2))


@pytest.mark.parametrize("clipping", CLIPPINGS, ids=lambda c: c.name)
@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("size", [1e3, 1e7])
class TestOneRecord:
    """Two rows of one record, or two positions of a row, whose gradients are opposite but for `gap`."""

    def opposite(self, size: float, gap: float, width: int = 40) -> Tensor:
        torch.manual_seed(0)
        x = size * torch.randn(1, width)
        return torch.cat([x, -(1 + gap) * x + gap * size * 0.1 * torch.randn(1, width)])

    def test_rows_of_a_record(self, size: float, gap: float, clipping: Clipping) -> None:
        torch.manual_seed(0)
        rows = Rows(self.opposite(size, gap), torch.ones(2), torch.zeros(2, dtype=torch.int64))
        assert share(nn.Linear(40, 30, bias=False), rows, clipping) <= 1.0 + 1e-3

    def test_positions_of_a_row(self, size: float, gap: float, clipping: Clipping) -> None:
        rows = Rows(self.opposite(size, gap)[None], torch.ones(1))
        assert share(nn.Linear(40, 30, bias=False), rows, clipping) <= 1.0 + 1e-3

    def test_past_iterates(self, size: float, gap: float, clipping: Clipping) -> None:
        """A quadratic loss whose gradient turns round from one iterate to the next."""
        x = self.opposite(size, gap)[:1]
        model = nn.Linear(40, 30, bias=False)

        def quadratic(outputs: Tensor, targets: Tensor) -> Tensor:
            return outputs.square().sum(1) * targets

        with torch.no_grad():
            model.weight.copy_(torch.randn(30, 40) / size)
        past = {"weight": -(1 + gap) * model.weight.detach()}
        found = clipped_sum(model, quadratic, Rows(x, torch.ones(1)), clipping, iterates=[(past, 1.0), ({}, 1.0)])
        assert length(found.sums, clipping) <= 1.0 + 1e-3

    def test_a_convolution_with_many_weights(self, size: float, gap: float, clipping: Clipping) -> None:
        x = self.opposite(size, gap, 64).reshape(2, 16, 2, 2)
        rows = Rows(x, torch.ones(2), torch.zeros(2, dtype=torch.int64))
        torch.manual_seed(0)
        assert share(nn.Conv2d(16, 64, 2, bias=False), rows, clipping) <= 1.0 + 1e-3
