"""The step by hand of libraries' networks: what its hooks collect are the gradients of each record."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sordino.gradients import Rows
from sordino.gradients.engine import per_record_gradients

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


class LayerNorm2d(nn.LayerNorm):
    """As timm's: over the channels of an image."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.words(ids))).mean(1)
        return out


def picture() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), LayerNorm2d(6), nn.Conv2d(6, 6, 3, groups=6, bias=False), nn.GroupNorm(2, 6),
        nn.Tanh(), nn.Conv2d(6, 4, 1, stride=2), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("make", "inputs"),
    [(picture, torch.randn(5, 2, 6, 6, dtype=torch.float64)), (Text, torch.tensor([[0, 1, 1], [2, 2, 2], [3, 0, 4]]))],
)
def test_they_are_those_of_the_engine(make: Any, inputs: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    hooks = importlib.import_module("peers.hooks")
    torch.manual_seed(0)
    model = make().double()
    targets = torch.arange(len(inputs)) % 3
    loss = lambda out, y: nn.functional.cross_entropy(out, y, reduction="none")  # noqa: E731
    wanted, _ = per_record_gradients(model, loss, Rows(inputs, targets))
    by_hand = hooks.Hooks(model.requires_grad_(False), len(inputs))
    forms = by_hand.taken(loss(model(inputs), targets))
    for name, parameter in model.named_parameters():
        form = forms.pop(id(parameter))
        assert torch.allclose(form.dense(0, len(inputs)).reshape(wanted[name].shape), wanted[name], atol=1e-12), name
        assert torch.allclose(form.norm2().double(), wanted[name].square().flatten(1).sum(1), rtol=1e-9, atol=1e-14)
    assert not forms
    assert not by_hand.found
