"""Normalisation of images whose rows were put in another order and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradients.cases import Fn, matches, noise

NORMS: dict[str, Callable[[], nn.Module]] = {
    "group": lambda: nn.GroupNorm(2, 4),
    "instance": lambda: nn.InstanceNorm2d(4, affine=True),
    "frozen batch": lambda: nn.BatchNorm2d(4).eval(),
}


def by_brightness(self: Any, x: Tensor) -> Tensor:
    order = torch.argsort(x[:, 0, 0, 0])
    found: Tensor = self.norm(self.conv(x)[order])
    return found[torch.argsort(order)]


def backwards(self: Any, x: Tensor) -> Tensor:
    order = torch.arange(len(x)).flip(0)
    found: Tensor = self.norm(self.conv(x).index_select(0, order))
    return found.index_select(0, order)


@pytest.mark.parametrize("forward", [by_brightness, backwards])
@pytest.mark.parametrize("norm", NORMS)
def test_scales_and_shifts_follow_the_order_of_the_images(norm: str, forward: Callable[[Any, Tensor], Tensor]) -> None:
    for rows in (1, 2, 3, 4, 5):
        torch.manual_seed(rows)
        matches(Fn(forward, conv=nn.Conv2d(4, 4, 1), norm=NORMS[norm]()), noise(rows, 4, 3, 3), rows=rows)
