"""The step of W2's MLP written down by hand, for this network and nothing else: how far down an engine could get.

Forward and backward pass, norms, weights and sums as straight-line code, without autograd, checks or a ledger, and
with torch's ordinary generator for noise. How much slower an engine is that takes any model, is the price of that and
of noise that is true.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peers import CLIP_NORM, LEARNING_RATE, NOISE_MULTIPLIER, Step
from sordino.gradients.memory import keep_freed_memory, scaled, squares


def mlp(model: nn.Module, inputs: Tensor, targets: Tensor) -> Step:
    """A Linear, a ReLU and a Linear under cross-entropy, clipped to CLIP_NORM."""
    first, second, out, last = (p.detach() for p in model.parameters())
    at = torch.arange(len(targets))
    keep_freed_memory()

    def step() -> Mapping[str, float]:
        hidden = torch.relu(F.linear(inputs, first, second))
        top = torch.softmax(F.linear(hidden, out, last), 1)
        top[at, targets] -= 1
        below = torch.ops.aten.threshold_backward(top @ out, hidden, 0)
        norm2 = squares(below) * (squares(inputs) + 1) + squares(top) * (squares(hidden) + 1)
        weight = (CLIP_NORM / norm2.sqrt()).clamp(max=1)
        (low, low_sum), (high, high_sum) = scaled(below, weight), scaled(top, weight)
        sums = low.mT @ inputs, low_sum, high.mT @ hidden, high_sum
        for parameter, total in zip((first, second, out, last), sums, strict=True):
            total.add_(torch.randn_like(total), alpha=NOISE_MULTIPLIER * CLIP_NORM)
            parameter.sub_(total, alpha=LEARNING_RATE / len(targets))
        return {}

    return step
