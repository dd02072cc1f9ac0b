"""Autocast: a transformer passes its own check, and its sums are those of a plain loop to the precision of bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradients.cases import squared
from sordino.clipping import FlatClip
from sordino.gradients import Rows, brute_force, clipped_sum, verify


class Autocast(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out: Tensor = self.body(x)
        return out


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)
    body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Linear(8, 16), body, nn.Flatten(), nn.Linear(16 * 6, 3))


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return squared(outputs if outputs.dtype == torch.float64 else outputs.float(), targets)


def test_a_transformer_under_autocast() -> None:
    for rows in (1, 2, 4, 6):
        torch.manual_seed(rows)
        data = Rows(torch.randn(rows, 6, 8), torch.randn(rows))
        model = Autocast(encoder())
        verify(model, loss, data, FlatClip(1.0))
        with torch.autocast("cpu", torch.bfloat16):
            verify(model.body, loss, data, FlatClip(1.0))
        ours, plain = clipped_sum(model, loss, data, FlatClip(1.0)), brute_force(model, loss, data, FlatClip(1.0))
        assert torch.allclose(ours.norms, plain.norms, rtol=2e-2)
        for name, want in plain.sums.items():
            assert float((ours.sums[name] - want).norm()) <= 0.05 * float(want.norm()) + 1e-3, name


def test_in_double_precision_autocast_changes_nothing() -> None:
    torch.manual_seed(0)
    model, data = Autocast(encoder()).double(), Rows(torch.randn(4, 6, 8).double(), torch.randn(4).double())
    ours, plain = clipped_sum(model, squared, data, FlatClip(1.0)), brute_force(model, squared, data, FlatClip(1.0))
    assert all(torch.allclose(ours.sums[k], v, rtol=1e-9, atol=1e-12) for k, v in plain.sums.items())
