"""Norms and sums of many small gradients in one call: those of each gradient by itself."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor, nn

from sordino.clipping import FlatClip
from sordino.gradients import Rows, clipped_sum
from sordino.gradients.rows import ClippedSum
from sordino.gradients.sums import small
from sordino.gradients.sums.contributions import Contribution, Dense
from sordino.gradients.sums.narrow import narrow_sum
from sordino.native.kernels import compiled

pytestmark = pytest.mark.skipif(compiled() is None, reason="installed without a C compiler")


def gradients() -> dict[str, Contribution]:
    g = torch.Generator().manual_seed(0)
    wide = torch.randn(6, 40, generator=g)
    return {
        "bias": Dense(torch.randn(6, 3, generator=g)),
        "scalar": Dense(torch.randn(6, generator=g)),
        "columns of a larger tensor": Dense(wide[:, 5:25]),
        "table": Dense(torch.randn(6, 50, 70, generator=g)),
        "measured": Dense(torch.randn(6, 4, generator=g), torch.ones(6, dtype=torch.float64)),
        "double": Dense(torch.randn(6, 4, generator=g).double()),
        "empty": Dense(torch.empty(6, 0)),
        "large": Dense(torch.randn(6, small.LARGEST // 6 + 1, generator=g)),
    }


def test_the_norms_are_the_sums_of_those_of_each() -> None:
    every = gradients()
    found = small.small(every, measured=False)
    assert list(found) == ["bias", "scalar", "columns of a larger tensor", "table"]
    wanted = torch.stack([every[name].norm2() for name in found]).sum(0)
    assert torch.allclose(small.norms_of_all(found, 6), wanted, rtol=1e-14)


@pytest.mark.parametrize("weight", [[0.5, 0.0, 1.0, 0.25, 0.0, 1.0], [0.0] * 6], ids=str)
def test_the_sums_have_the_bits_of_each(weight: list[float]) -> None:
    every, factor = gradients(), torch.tensor(weight, dtype=torch.float64)
    found = small.small(every)
    parameters: dict[str, Tensor] = {name: of.dense(0, 1)[0] for name, of in every.items()}
    sums = small.sums_of_all(found, factor, parameters)
    assert list(sums) == [*list(found)[:4], "measured"]
    for name, one in sums.items():
        assert torch.equal(one, narrow_sum(every[name], factor, parameters[name]))
        assert one.untyped_storage().nbytes() == 4 * one.numel(), "memory of its own"


def test_a_record_of_weight_zero_is_not_read_and_one_that_is_not_finite_shows() -> None:
    g = torch.ones(3, 4)
    g[1, 2], g[2, 0] = torch.nan, 2.0**100
    norms = small.norms_of_all(small.small({"g": Dense(g)}), 3)
    assert torch.isfinite(norms).tolist() == [True, False, True]
    assert float(norms[2]) == pytest.approx(2.0**200, rel=1e-6)
    sums = small.sums_of_all({"g": g}, torch.tensor([0.5, 0.0, 0.0]), {"g": torch.empty(2, 2)})
    assert sums["g"].tolist() == [[0.5, 0.5], [0.5, 0.5]]


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
    assert small.small(gradients()) == {}
    without = found()
    assert torch.allclose(without.norms, with_library.norms, rtol=1e-5)
    for name, value in with_library.sums.items():
        assert torch.allclose(without.sums[name], value, rtol=1e-4, atol=1e-7)
