"""Non-private training: the floor that every other engine is divided by."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from peers import LEARNING_RATE, Step
from workloads import RowLoss


def plain(model: nn.Module, inputs: Tensor, targets: Tensor, loss: RowLoss) -> Step:
    """Forward, backward, SGD: no clipping, no noise."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
    entropy = isinstance(loss, nn.CrossEntropyLoss)  # in one call, as people write it
    mean = nn.CrossEntropyLoss() if entropy else lambda outputs, targets: loss(outputs, targets).mean()

    def step() -> Mapping[str, float]:
        optimizer.zero_grad()
        torch.autograd.backward(mean(model(inputs), targets))
        optimizer.step()
        return {}

    return step


def kept(model: nn.Module, inputs: Tensor, targets: Tensor, loss: RowLoss) -> Step:
    """The same after what sordino does before its first sum (`gradients.memory.keep_freed_memory`): what of our time is
    the allocator's. Anybody who trains on glibc can have it."""
    np.empty((32 << 20) - (64 << 10), np.uint8)
    return plain(model, inputs, targets, loss)
