"""A step without the compiled library: everything is computed by torch and NumPy."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor, nn

from sordino.clipping import FlatClip
from sordino.gradients import Rows, clipped_sum
from sordino.gradients.rows import ClippedSum
from sordino.gradients.sums import record_products
from sordino.native.kernels import compiled


class Every(nn.Module):
    """A network with one layer of each kind that has a compiled loop."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.steps = nn.Embedding(9, 8), nn.LSTM(8, 8, batch_first=True, bidirectional=True)
        self.across, self.apart = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3, groups=4)
        self.norm, self.out = nn.LayerNorm(16), nn.Linear(16, 3)

    def forward(self, ids: Tensor) -> Tensor:
        found = self.norm(self.steps(self.words(ids))[0])
        image = self.apart(self.across(found[:, None]))
        logits: Tensor = self.out(found).mean(1) + image.mean((1, 2, 3))[:, None]
        return logits


@pytest.mark.skipif(compiled() is None, reason="installed without a C compiler")
def test_without_the_library_the_sums_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, ids = Every(), torch.randint(0, 9, (7, 12))
    rows = Rows(ids, torch.zeros(7, dtype=torch.long))

    def found() -> ClippedSum:
        cross_entropy = nn.CrossEntropyLoss()
        return clipped_sum(model, cross_entropy, rows, FlatClip(0.01), keys=torch.arange(7), narrow=True)

    with_library = found()
    for name, module in list(sys.modules.items()):
        if name.startswith("sordino.") and hasattr(module, "compiled"):
            monkeypatch.setattr(module, "compiled", lambda: None)
    assert record_products.product_norms(torch.ones(1, 2, 3), torch.ones(1, 2, 3)) is None
    without = found()
    assert torch.allclose(without.norms, with_library.norms, rtol=1e-5)
    for name, value in with_library.sums.items():
        assert torch.allclose(without.sums[name], value, rtol=1e-4, atol=1e-7)
