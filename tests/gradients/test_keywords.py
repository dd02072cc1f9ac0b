"""The same operation with its arguments by name, in any of torch's spellings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradients.cases import Fn, matches, noise
from sordino import Plan, train

CALLS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "matmul": lambda s, x: torch.matmul(input=x, other=s.w),
    "matmul, of the tensor": lambda s, x: x.matmul(other=s.w),
    "mm": lambda s, x: torch.mm(input=x, mat2=s.w),
    "mm, of the tensor": lambda s, x: x.mm(mat2=s.w),
    "linear": lambda s, x: F.linear(input=x, weight=s.w.mT, bias=s.b),
    "addmm": lambda s, x: torch.addmm(input=s.b, mat1=x, mat2=s.w),
    "addmm, scaled": lambda s, x: torch.addmm(input=s.b, mat1=x, mat2=s.w, beta=0.5, alpha=2),
    "addmm, scaled, in place": lambda s, x: torch.addmm(s.b, x, s.w, beta=0.5, alpha=2),
    "addmm, of the tensor": lambda s, x: s.b.addmm(x, mat2=s.w, beta=0.5),
    "add": lambda s, x: torch.add(input=x @ s.w, other=s.b, alpha=2),
    "mul": lambda s, x: torch.mul(input=s.b, other=x @ s.w),
    "where": lambda s, x: torch.where(condition=x @ s.w > 0, input=s.b, other=x @ s.w),
    "broadcast_to": lambda s, x: x @ s.w + torch.broadcast_to(input=s.b, size=(len(x), 3)),
    "stack": lambda s, x: torch.stack(tensors=[x @ s.w, (x @ s.w) * s.b], dim=1),
    "layer_norm": lambda s, x: F.layer_norm(input=x @ s.w, normalized_shape=(3,), weight=s.b),
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_by_name(name: str) -> None:
    for rows in (1, 2, 3, 4, 5):
        torch.manual_seed(rows)
        unused = {"b": noise(3)} if name not in ("matmul", "matmul, of the tensor", "mm", "mm, of the tensor") else {}
        matches(Fn(CALLS[name], w=noise(4, 3), **unused), noise(rows, 4), rows=rows)


class Words(nn.Module):
    """A vocabulary in clusters, some of which no record of a batch may choose."""

    def __init__(self, div_value: float) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.head = nn.AdaptiveLogSoftmaxWithLoss(8, 12, [3, 7], div_value=div_value)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(x), words).output
        return found[:, None]


@pytest.mark.filterwarnings("ignore:.*zero-element.*")
@pytest.mark.parametrize("div_value", [2.0, 4.0], ids=["narrow clusters", "a cluster without features"])
@pytest.mark.parametrize("words", [(0, 12), (0, 3), (3, 7)], ids=["any", "the head's", "one cluster's"])
def test_an_adaptive_softmax_whose_clusters_may_be_empty(words: tuple[int, int], div_value: float) -> None:
    for rows in (1, 2, 3, 4, 8):
        torch.manual_seed(rows)
        matches(Words(div_value), (noise(rows, 4), torch.randint(*words, (rows,))), rows=rows)


@pytest.mark.parametrize("div_value", [2.0, 4.0], ids=["narrow clusters", "a cluster without features"])
def test_an_adaptive_softmax_is_trained(div_value: float) -> None:
    """The check that starts a training took the largest entry of a weight that has none."""
    x, words = torch.randn(24, 4), torch.arange(24) % 12
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-3, records=24, expected_batch=12, steps=1, insecure_seed=1)
    train(Words(div_value), lambda out, y: (out[:, 0] - y) ** 2, ((x, words), torch.ones(24)), plan, lr=0.1)
