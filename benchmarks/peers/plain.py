"""Non-private training, by whose time every other engine's is divided."""

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
    entropy = isinstance(loss, nn.CrossEntropyLoss)  # then the mean is computed in one call, as is usual
    mean = nn.CrossEntropyLoss() if entropy else lambda outputs, targets: loss(outputs, targets).mean()

    def step() -> Mapping[str, float]:
        optimizer.zero_grad()
        torch.autograd.backward(mean(model(inputs), targets))
        optimizer.step()
        return {}

    return step


def kept(model: nn.Module, inputs: Tensor, targets: Tensor, loss: RowLoss) -> Step:
    """The same after `gradients.memory.keep_freed_memory`, which sordino calls before its first sum: shows how much of
    the difference is due to the memory allocator. Any training on glibc can use this setting."""
    np.empty((32 << 20) - (64 << 10), np.uint8)
    return plain(model, inputs, targets, loss)
