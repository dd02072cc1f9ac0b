"""A step of DeBERTa-v2 by hand, with plain hooks of autograd: a lower bound on time and memory of an engine that
computes every gradient once.

Until all norms are known, such a step holds what each record's gradient of each layer is computed from: the gradient
itself, or the layer's inputs and output gradients, whichever is smaller. Nothing is proven, checked or recorded. Linear
maps of the table of relative positions, which is the same for all records, and its norm are left out: their gradients
per record would need more time and memory. The noise is sordino's, exact, on every coordinate; sums are in single
precision, in memory that is used again in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peers import CLIP_NORM, LEARNING_RATE, NOISE_MULTIPLIER, Step
from sordino.gradients.sums.memory import keep_freed_memory, squares
from sordino.randomness import RandomSource
from sordino.release import Gaussian
from sordino.release.mechanisms import release_grid
from workloads import RowLoss

Part = tuple[Tensor, Callable[[Tensor], object]]  # squared norms, and a function that adds the weighted sum


def by_hooks(model: nn.Module, inputs: Tensor, targets: Tensor, loss: RowLoss) -> Step:
    """The step of a model whose parameters belong to nn.Linear, nn.LayerNorm and nn.Embedding."""
    n, parameters = len(inputs), [p.requires_grad_(False) for p in model.parameters()]
    flat = torch.zeros(sum(p.numel() for p in parameters))
    pieces = torch.split_with_sizes(flat, [p.numel() for p in parameters])
    totals = {id(p): part.view(p.shape) for p, part in zip(parameters, pieces, strict=True)}
    grid, source, taken = release_grid(Gaussian(NOISE_MULTIPLIER), CLIP_NORM, len(flat)), RandomSource.from_os(), 0
    parts: list[Part] = []

    def add(parameter: Tensor | None, gradient: Tensor) -> None:
        """gradient (n, *shape) of each record."""
        if parameter is not None:
            total, rows = totals[id(parameter)].view(-1), gradient.reshape(n, -1)
            parts.append((squares(rows), lambda weight: total.addmv_(rows.mT, weight)))

    def hook(module: nn.Module, given: tuple[Any, ...], out: Tensor) -> Tensor | None:
        x = given[0].detach()
        if len(x) != n:
            return None  # relative positions
        out = out if out.requires_grad else out.requires_grad_()
        out.register_hook(lambda g: arrived(module, x, g))  # type: ignore[no-untyped-call]
        return out

    def arrived(module: Any, x: Tensor, g: Tensor) -> None:
        x, g = x.view(n, -1, x.shape[-1]) if x.is_floating_point() else x, g.reshape(n, -1, g.shape[-1])
        if isinstance(module, nn.Embedding):
            total = totals[id(module.weight)]

            def scatter(weight: Tensor, rows: Tensor = g) -> None:
                total.index_add_(0, x.flatten(), (rows * weight[:, None, None]).flatten(0, 1))

            parts.append((squares(g.reshape(n, -1)), scatter))  # words that a text has twice would need a sort
            return
        if isinstance(module, nn.Linear):
            add(module.weight, torch.bmm(g.mT, x) if x.shape[1] > 1 else g.mT * x)
        else:
            add(module.weight, (g * F.layer_norm(x, module.normalized_shape, eps=module.eps)).sum(1))
        add(module.bias, g.sum(1))

    kinds = nn.Linear, nn.LayerNorm, nn.Embedding
    for module in model.modules():
        if isinstance(module, kinds):
            module.register_forward_hook(hook)
    keep_freed_memory()

    def step() -> Mapping[str, float]:
        nonlocal taken
        losses = loss(model(inputs), targets)
        torch.autograd.backward(losses, torch.ones_like(losses))
        norm2 = torch.stack([one[0] for one in parts]).sum(0)
        weight = (CLIP_NORM / norm2.sqrt()).clamp(max=1).float()
        flat.zero_()
        while parts:
            parts.pop()[1](weight)
        source.stream("floor", taken).rounded_sum(flat, grid.scale, grid.spacing)
        for parameter in parameters:
            parameter.sub_(totals[id(parameter)], alpha=LEARNING_RATE / n)
        taken += 1
        return {}

    return step
