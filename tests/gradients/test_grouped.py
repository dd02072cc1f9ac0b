"""Mixtures of experts: grouped products, the weights of one expert picked by a tensor, and experts nobody chooses."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradients.cases import agree, matches, noise, squared
from sordino.clipping import FlatClip
from sordino.gradients import Rows, brute_force, clipped_sum

EXPERTS, WIDTH = 4, 3


class Experts(nn.Module):
    """Every position goes to the expert that its own first number chooses; ``grouped`` is torch's grouped product."""

    def __init__(self, product: Any) -> None:
        super().__init__()
        self.body, self.product = nn.Linear(4, 5), product
        self.weight = nn.Parameter(noise(EXPERTS, 5, WIDTH))
        self.back = nn.Parameter(noise(EXPERTS, 5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.body(x).reshape(-1, 5)
        expert = (x.reshape(-1, 4)[:, 0] * 3).long().clamp(-1, 1) + 1  # the last one is never chosen
        order = torch.argsort(expert, stable=True)
        ends = torch.bincount(expert, minlength=EXPERTS).cumsum(0).to(torch.int32)
        out = torch.tanh(self.product(rows[order], self.weight, ends))
        out = self.product(out, self.back.transpose(1, 2), ends)
        return torch.zeros_like(out).index_copy(0, order, out).reshape(*x.shape[:-1], 5)


def loop(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    starts = [0, *ends.tolist()]
    return torch.cat([x[lo:hi] @ weight[e] for e, (lo, hi) in enumerate(itertools.pairwise(starts))])


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this version of torch has no grouped product (2.8)")
@pytest.mark.parametrize("positions", [(), (3,)], ids=["vectors", "sequences"])
def test_grouped_products_match_a_loop_over_the_experts(positions: tuple[int, ...]) -> None:
    def grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return F.grouped_mm(x, weight, offs=ends)

    for rows in (1, 2, 3, 4, 5):
        torch.manual_seed(rows)
        model, plain = Experts(grouped).double(), Experts(loop).double()
        plain.load_state_dict(model.state_dict())
        data = Rows(noise(rows, *positions, 4), noise(rows))
        agree(clipped_sum(model, squared, data, FlatClip(1.0)), brute_force(plain, squared, data, FlatClip(1.0)))


def test_the_weights_of_an_expert_picked_by_a_tensor() -> None:
    class Picked(Experts):
        def forward(self, x: Tensor) -> Tensor:
            rows = self.body(x).reshape(-1, 5)
            expert = (x.reshape(-1, 4)[:, 0] > 0).long()
            out = torch.zeros(len(rows), WIDTH, dtype=x.dtype)
            for chosen in torch.unique(expert):
                here = torch.where(expert == chosen)[0]
                out = out.index_add(0, here, F.linear(rows[here], self.weight[chosen].mT))
            return out.reshape(*x.shape[:-1], WIDTH)

    for rows in (1, 2, 3, 4, 5):
        torch.manual_seed(rows)
        model = Picked(None)
        model.back.requires_grad_(False)
        matches(model, noise(rows, 3, 4), rows=rows)
