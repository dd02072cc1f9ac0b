"""Sums in single precision are made slice by slice, and each gradient is released once it is summed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sordino.clipping import FlatClip
from sordino.gradients.engine import add_clipped
from sordino.gradients.layers.convolution import Convolved, Geometry
from sordino.gradients.sums.contributions import Dense, Outer
from sordino.gradients.sums.narrow import narrow_sum

RECORDS = 6
WEIGHT = torch.tensor([0.5, 0.0, 1.0, 0.25, 0.125, 0.75], dtype=torch.float64)


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def _convolved() -> Convolved:
    geometry = Geometry((300, 200, 3, 3), (1, 1), (1, 1), (1, 1), 1)
    return Convolved(_normal(RECORDS, 1, 300, 2, 2), _normal(RECORDS, 1, 200, 2, 2), geometry)


FORMS = {
    "dense": ((600, 1000), lambda: Dense(_normal(RECORDS, 600, 1000))),
    "few positions": ((700, 900), lambda: Outer(_normal(RECORDS, 3, 700), _normal(RECORDS, 3, 900))),
    "many positions": ((700, 900), lambda: Outer(_normal(RECORDS, 40, 700), _normal(RECORDS, 40, 900))),
    "convolution": ((300, 200, 3, 3), _convolved),
}


@pytest.mark.parametrize("runs", [None, [0, RECORDS]])
@pytest.mark.parametrize("name", FORMS)
def test_slices_have_the_sum_of_the_whole(name: str, runs: Any) -> None:
    shape, make = FORMS[name]
    of: Any = make()
    whole, cut = make(), of.sliced
    for one in (of, whole):
        one.runs = None if runs is None else np.array(runs)
    bounds = [(lo, hi) for lo, hi, _ in cut()]
    count = torch.Size(shape).numel()
    assert len(bounds) > 1
    assert [0, *(hi for _, hi in bounds)] == [*(lo for lo, _ in bounds), count]
    total = torch.zeros(shape, dtype=torch.float64)
    whole.add_to(total, WEIGHT)
    found = narrow_sum(of, WEIGHT, torch.empty(shape))
    if name == "dense":
        assert torch.equal(found, total.float())
    torch.testing.assert_close(found.double(), total, rtol=2.0**-20, atol=2.0**-20 * float(total.abs().max()))


def test_a_convolution_whose_patches_need_several_blocks_is_summed_as_a_whole() -> None:
    of = _convolved()
    of.runs = np.array([0, 3, RECORDS])
    assert of.sliced is None


def test_gradients_are_released_when_they_are_summed() -> None:
    gradients: Any = {"w": Dense(_normal(RECORDS, 4)), "b": Dense(_normal(RECORDS, 2))}
    parameters = {"w": torch.zeros(4), "b": torch.zeros(2)}
    sums: dict[str, torch.Tensor] = {}
    add_clipped(gradients, FlatClip(1.0), parameters, sums, RECORDS, torch.float32, narrow=True)
    assert not gradients
    assert set(sums) == {"w", "b"}
