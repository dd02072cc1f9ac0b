"""What a careful user writes without a library: vmap over grad of the whole model, clip, add noise."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from peers import CLIP_NORM, LEARNING_RATE, NOISE_MULTIPLIER, Step


def vmap_grad(model: nn.Module, inputs: Tensor, targets: Tensor) -> Step:
    """Every per-record gradient of the whole model at once."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    parameters = dict(model.named_parameters())

    def record_loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, values, (x.unsqueeze(0),)), y.unsqueeze(0))

    per_record = vmap(grad(record_loss), in_dims=(None, 0, 0), randomness="different")

    def step() -> Mapping[str, float]:
        gradients = per_record({n: p.detach() for n, p in parameters.items()}, inputs, targets)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
        weights = (CLIP_NORM / norms.clamp(min=1e-12)).clamp(max=1.0)
        for name, g in gradients.items():
            total = torch.tensordot(weights, g, dims=1)
            noise = torch.randn_like(total).mul_(NOISE_MULTIPLIER * CLIP_NORM)
            parameters[name].grad = total.add_(noise).div_(len(targets))
        optimizer.step()
        return {}

    return step
