"""What a model keeps from the passes before training: of the trial on a record, of all targets, of the first test.

Each was accepted once: the first record, or all targets, determined a factor of every later step, without noise.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sordino

KEPT: dict[str, Any] = {}


class Net(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.change = nn.Linear(8, 16), nn.Linear(16, 1), change

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(self.change(x))))  # type: ignore[no-any-return]


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).square()


def trained(model: nn.Module, of: Any = loss) -> Any:
    source = torch.Generator().manual_seed(1)
    data = torch.randn(200, 8, generator=source), torch.randn(200, generator=source)
    plan = sordino.Plan.dpsgd(records=200, epsilon=2.0, delta=1e-5, clip_norm=1.0, expected_batch=20, steps=3)
    return sordino.train(model, of, data, plan, lr=0.1)


def _number(x: Tensor) -> Tensor:
    if "top" not in KEPT:
        KEPT["top"] = float(x.abs().max())
    return x / KEPT["top"]  # type: ignore[no-any-return]


def _tensor(x: Tensor) -> Tensor:
    if "top" not in KEPT:
        KEPT["top"] = x[0].abs().max()
        return x
    return x / KEPT["top"]  # type: ignore[no-any-return]


def _when_large(x: Tensor) -> Tensor:
    """Only rows that are made large for a test leave something."""
    if bool((x.abs() > 500).any()):
        KEPT["top"] = float(x.abs().max())
    return x


@pytest.mark.parametrize("change", [_number, _tensor, _when_large])
def test_what_the_passes_before_training_leave_is_refused(change: Callable[[Tensor], Tensor]) -> None:
    KEPT.clear()
    with pytest.raises(sordino.Refused, match=r"changes this variable|used again"):
        trained(Net(change))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale: float | None = None

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = float(targets.abs().max())
        return ((outputs[:, 0] - targets) / self.scale).square()


def test_a_loss_that_learns_its_scale_from_all_targets_is_refused_and_keeps_none() -> None:
    scaled = Scaled()
    with pytest.raises(sordino.Refused):
        trained(Net(), scaled)
    assert scaled.scale is None


def test_a_model_that_drops_a_layer_by_pythons_numbers_is_trained() -> None:
    def dropped(x: Tensor) -> Tensor:
        return x if random.random() < 0.5 else x * 2

    assert trained(Net(dropped)).model is not None


def test_a_cache_of_tensors_that_contain_no_data_is_accepted() -> None:
    def masked(x: Tensor) -> Tensor:
        if "mask" not in KEPT:
            KEPT["mask"] = torch.ones_like(x[:1]).cumsum(1) / 8
        return x * KEPT["mask"]  # type: ignore[no-any-return]

    KEPT.clear()
    assert trained(Net(masked)).model is not None
