"""Sums in single precision are made slice by slice, and each gradient is released once it is summed."""

from __future__ import annotations

from typing import Any

import torch

from sordino.clipping import FlatClip
from sordino.gradients.engine import add_clipped
from sordino.gradients.sums.contributions import Dense
from sordino.gradients.sums.narrow import narrow_sum

RECORDS = 6
WEIGHT = torch.tensor([0.5, 0.0, 1.0, 0.25, 0.125, 0.75], dtype=torch.float64)


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def test_slices_have_the_sum_of_the_whole() -> None:
    of = Dense(_normal(RECORDS, 600, 1000))
    bounds = [(lo, hi) for lo, hi, _ in of.sliced()]
    assert len(bounds) > 1
    assert [0, *(hi for _, hi in bounds)] == [*(lo for lo, _ in bounds), 600_000]
    total = torch.zeros(600, 1000, dtype=torch.float64)
    of.add_to(total, WEIGHT)
    assert torch.equal(narrow_sum(of, WEIGHT, torch.empty(600, 1000)), total.float())


def test_gradients_are_released_when_they_are_summed() -> None:
    gradients: Any = {"w": Dense(_normal(RECORDS, 4)), "b": Dense(_normal(RECORDS, 2))}
    parameters = {"w": torch.zeros(4), "b": torch.zeros(2)}
    sums: dict[str, torch.Tensor] = {}
    add_clipped(gradients, FlatClip(1.0), parameters, sums, RECORDS, torch.float32, narrow=True)
    assert not gradients
    assert set(sums) == {"w", "b"}
