"""Tensors that several parameters were computed into: products, sums of biases, normalised kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from gradients.cases import Fn, matches, noise

SIZES = (1, 2, 3, 4, 5)  # 3 and 4 are lengths of other dimensions too


def twice_bias(self: Any, x: Tensor) -> Tensor:
    bias = self.b + self.c
    return F.linear(torch.tanh(F.linear(x, self.w, bias)), self.w, bias)


def twice_weight(self: Any, x: Tensor) -> Tensor:
    weight = self.u @ self.v
    return F.linear(torch.tanh(F.linear(x, weight)), weight)


def apart(self: Any, x: Tensor) -> Tensor:
    first, second = torch.broadcast_tensors(self.u, self.v)  # type: ignore[no-untyped-call]
    return F.linear(x, first) + F.linear(x, second) ** 2


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a product as weight": lambda: Fn(lambda s, x: F.linear(x, s.u @ s.v), u=noise(3, 2), v=noise(2, 4)),
    "a product as weight, used twice": lambda: Fn(twice_weight, u=noise(4, 2), v=noise(2, 4)),
    "a sum as bias": lambda: Fn(lambda s, x: F.linear(x, s.w, s.b + s.c), w=noise(3, 4), b=noise(3), c=noise(3)),
    "a sum as bias, used twice": lambda: Fn(twice_bias, w=noise(4, 4), b=noise(4), c=noise(4)),
    "several results, each of one parameter": lambda: Fn(apart, u=noise(1, 4), v=noise(6, 4)),
    "a shape taken of another": lambda: Fn(lambda s, x: F.linear(x, s.u.view_as(s.v)), u=noise(12), v=noise(3, 4)),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(4, 3)),
    "weight_norm, as a hook": lambda: nn.utils.weight_norm(nn.Linear(4, 3)),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
@pytest.mark.parametrize("positions", [(), (3,), (2, 3)], ids=["vectors", "sequences", "grids"])
@pytest.mark.parametrize("name", MODELS)
def test_each_parameter_gets_its_own_share_of_a_tensor_made_of_several(name: str, positions: tuple[int, ...]) -> None:
    for rows in SIZES:
        torch.manual_seed(rows)
        matches(MODELS[name](), noise(rows, *positions, 4), rows=rows)
