"""A step of a library's network by hand: plain hooks of autograd deliver activations and gradients to the functions
that compute norms and sums in sordino's engine. The difference to sordino's own step is what it needs to be general:
every operation is seen, every row is followed, Python's state and the released values are checked and recorded.

It is a lower bound. Left out are parameters that belong to no layer of torch's (scales, temperatures, position
biases): their gradients are not computed, only their noise is drawn. A record's rows are taken to be consecutive in
dimension 0, which holds for these networks. Values and sums are those of the engine's functions; nothing is proven.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peers import CLIP_NORM, LEARNING_RATE, NOISE_MULTIPLIER, Step
from sordino.gradients.layers.convolution import Convolved, Geometry, weight_gradient
from sordino.gradients.sums.contributions import Contribution, Dense, Lookup, Outer, outer
from sordino.gradients.sums.memory import keep_freed_memory
from sordino.gradients.sums.narrow import narrow_sum
from sordino.gradients.sums.totals import merged
from sordino.native.collector import no_collection
from sordino.randomness import RandomSource
from sordino.release import Gaussian
from sordino.release.mechanisms import release_grid
from workloads import RowLoss

KINDS = nn.Linear, nn.LayerNorm, nn.GroupNorm, nn.Embedding, nn.Conv2d


class Hooks:
    """Collects what each record contributes to the parameters of layers of KINDS, in the passes of a model."""

    def __init__(self, model: nn.Module, records: int) -> None:
        self.records = records
        self.found: dict[int, list[Contribution]] = {}
        for module in model.modules():
            if isinstance(module, KINDS):
                module.register_forward_hook(self._forward)

    def _forward(self, module: nn.Module, given: tuple[Any, ...], out: Tensor) -> Tensor | None:
        x = given[0].detach()
        if len(x) % self.records:
            return None  # a table of positions
        out = out if out.requires_grad else out.requires_grad_()
        out.register_hook(lambda g: self._arrived(module, x, g))  # type: ignore[no-untyped-call]
        return out

    def _arrived(self, module: Any, x: Tensor, g: Tensor) -> None:
        for name, part in _contributions(module, x, g, self.records):
            if (parameter := getattr(module, name)) is not None:
                self.found.setdefault(id(parameter), []).append(part)

    def taken(self, losses: Tensor) -> dict[int, Contribution]:
        """What the backward pass of all losses delivers, by the parameters' ids."""
        torch.autograd.backward(losses, torch.ones_like(losses))
        forms = {key: merged(parts) for key, parts in self.found.items()}
        self.found.clear()
        return forms


def by_hooks(model: nn.Module, inputs: Tensor, targets: Tensor, loss: RowLoss) -> Step:
    """The step of a model of which most parameters belong to the layers of KINDS."""
    n, parameters = len(inputs), [p.requires_grad_(False) for p in model.parameters()]
    flat = torch.zeros(sum(p.numel() for p in parameters))
    pieces = torch.split_with_sizes(flat, [p.numel() for p in parameters])
    grid, source, steps = release_grid(Gaussian(NOISE_MULTIPLIER), CLIP_NORM, len(flat)), RandomSource.from_os(), 0
    hooks, blocks = Hooks(model, n), np.array([0, n], np.int64)
    keep_freed_memory()

    @no_collection()
    def step() -> Mapping[str, float]:
        nonlocal steps
        forms = hooks.taken(loss(model(inputs), targets))
        weight = (CLIP_NORM / torch.stack([form.norm2() for form in forms.values()]).sum(0).sqrt()).clamp(max=1)
        for parameter, piece in zip(parameters, pieces, strict=True):
            form = forms.pop(id(parameter), None)
            if isinstance(form, (Outer, Convolved)):
                form.runs = blocks
            piece.zero_() if form is None else piece.copy_(narrow_sum(form, weight, parameter).view(-1))
        source.stream("floor", steps).rounded_sum(flat, grid.scale, grid.spacing)
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.sub_(piece.view(parameter.shape), alpha=LEARNING_RATE / n)
        steps += 1
        return {}

    return step


def _contributions(module: Any, x: Tensor, g: Tensor, n: int) -> list[tuple[str, Contribution]]:
    """(name of the parameter, its gradients of the n records) for the gradient g of the layer's output."""
    if isinstance(module, nn.Embedding):
        return [("weight", Lookup(x.reshape(n, -1), g.reshape(n, -1, g.shape[-1]), module.num_embeddings))]
    if isinstance(module, nn.Conv2d):
        pads = module.padding if isinstance(module.padding, tuple) else (0, 0)
        geometry = Geometry(tuple(module.weight.shape), module.stride, pads, module.dilation, module.groups)
        rows, gradient = (t.reshape(n, -1, *t.shape[1:]) for t in (x, g))
        return [("weight", weight_gradient(gradient, rows, geometry)), ("bias", Dense(gradient.flatten(3).sum((1, 3))))]
    if isinstance(module, nn.Linear):
        rows, gradient = (t.reshape(n, -1, t.shape[-1]) for t in (x, g))
        return [("weight", outer(gradient, rows)), ("bias", Dense(gradient.sum(1)))]
    if isinstance(module, nn.GroupNorm):
        scaled, gradient = F.group_norm(x, module.num_groups, eps=module.eps).mul_(g).flatten(2), g.flatten(2)
        return [("weight", Dense(scaled.sum(2))), ("bias", Dense(gradient.sum(2)))]
    if "2d" in type(module).__name__:  # timm's, over the channels of an image
        x, g = x.movedim(1, -1), g.movedim(1, -1)
    scaled = F.layer_norm(x, module.normalized_shape, eps=module.eps).mul_(g)
    return [(name, Dense(t.reshape(n, -1, t.shape[-1]).sum(1))) for name, t in (("weight", scaled), ("bias", g))]
