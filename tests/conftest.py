"""What all tests share: one thread per process (the suite runs on all cores), and small data."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

torch.set_num_threads(1)


@pytest.fixture
def records() -> tuple[Tensor, Tensor]:
    """Two hundred records of three classes that a linear layer can tell apart."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.arange(200) % 3
    inputs = nn.functional.one_hot(targets, 6) * 2.0 + torch.randn(200, 6, generator=generator)
    return inputs, targets


@pytest.fixture
def linear() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(6, 3)
