"""A setting in which audits are quick: 7,850 weights, 64 made-up records, a few steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sordino.plan import Plan

RECORDS = 64


def small_model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(784, 10)


def small_data(records: int = RECORDS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(records, 784, generator=generator)
    return inputs, torch.randint(0, 10, (records,), generator=generator)


def small_plan(**changes: Any) -> Plan:
    """ε = 2 in eight full-batch steps, unless told otherwise."""
    chosen: dict[str, Any] = {
        "epsilon": 2.0, "delta": 1e-5, "records": RECORDS, "expected_batch": RECORDS, "steps": 8, **changes
    }  # fmt: skip
    if "noise_multiplier" in changes:
        del chosen["epsilon"]
    return Plan.dpsgd(**chosen)
