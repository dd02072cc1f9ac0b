"""What all tests share: one thread per process (the suite runs on all cores), small data, markers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

torch.set_num_threads(1)

HERE = Path(__file__).parent
MARKED = {"models": "models", "report/test_report_browser.py": "browser", "benchmarks": "slow", "records": "slow"}
"""Markers of whole folders and files. A test or a module may mark itself as well."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        place = item.path.relative_to(HERE).as_posix()
        for start, marker in MARKED.items():
            if place.startswith(start):
                item.add_marker(marker)


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
