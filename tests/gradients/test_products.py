"""Sums keep all digits of products, whatever speed torch's user asked for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sordino.clipping import FlatClip
from sordino.gradients import Rows, clipped_sum
from sordino.gradients.sums.products import _setting, are_whole, whole_products

SETTING = _setting()


@pytest.fixture(params=["legacy", "new"])
def rounded(request: pytest.FixtureRequest) -> Iterator[str]:
    """torch may round factors to 8 bits: said in either of its two ways."""
    if request.param == "new" and SETTING is None:
        pytest.skip("torch has no such setting yet")
    if request.param == "new":
        SETTING.fp32_precision = "bf16"
    else:
        torch.set_float32_matmul_precision("medium")
    yield request.param
    if SETTING is not None:
        SETTING.fp32_precision = "ieee"
    torch.set_float32_matmul_precision("highest")


def test_a_sum_is_made_with_all_digits_and_the_setting_comes_back(rounded: str) -> None:
    seen = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append(are_whole())
        return cross_entropy(outputs.mean(1), targets, reduction="none")

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 3))
    assert not are_whole()
    found = clipped_sum(net, loss, Rows(torch.randn(5, 9, 6), torch.arange(5) % 3), FlatClip(0.1))
    assert seen
    assert all(seen)
    assert not are_whole()
    assert float(torch.cat([total.flatten().double() for total in found.sums.values()]).norm()) <= 0.5


def test_it_comes_back_after_an_error_too(rounded: str) -> None:
    def stopped() -> None:
        with whole_products():
            assert are_whole()
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        stopped()
    assert not are_whole()
