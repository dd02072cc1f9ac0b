"""fix: the explicit replacement of layers that let records interact."""

from __future__ import annotations

import copy

import torch
from torch import nn

from sordino.errors import Refused


def fix(model: nn.Module) -> nn.Module:
    """A copy of the model with GroupNorm for BatchNorm and InstanceNorm without running statistics.

    Scales and shifts are kept. The number of groups is the largest divisor of the channels up to 16 that leaves
    at least two channels per group.

    Args:
        model: The model to copy; it is not changed.

    Returns:
        The copy.

    Raises:
        Refused: a lazy layer does not know its size yet.

    Example:
        >>> fixed = fix(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
        >>> type(fixed[1]).__name__, fixed[1].num_groups
        ('GroupNorm', 4)
    """
    model = copy.deepcopy(model)
    if isinstance(model, nn.modules.batchnorm._NormBase):
        return _replacement(model, "the model")
    for name, module in list(model.named_modules()):
        for child_name, child in list(module.named_children()):
            if isinstance(child, nn.modules.batchnorm._NormBase):
                setattr(module, child_name, _replacement(child, f"{name}.{child_name}".lstrip(".")))
    return model


def _replacement(module: nn.modules.batchnorm._NormBase, name: str) -> nn.Module:
    if isinstance(module, nn.modules.lazy.LazyModuleMixin):
        raise Refused(f"{name}: run the model once so that its lazy layers know their sizes, then fix it")
    if isinstance(module, nn.modules.instancenorm._InstanceNorm):
        if module.track_running_stats:
            module.track_running_stats = False
            for buffer in ("running_mean", "running_var", "num_batches_tracked"):
                setattr(module, buffer, None)
        return module
    channels = module.num_features
    groups = max(g for g in range(1, min(16, max(1, channels // 2)) + 1) if channels % g == 0)
    new = nn.GroupNorm(groups, channels, eps=module.eps, affine=module.affine)
    new.train(module.training)
    if module.affine:
        with torch.no_grad():
            new = new.to(module.weight)
            new.weight.copy_(module.weight)
            new.bias.copy_(module.bias)
        new.weight.requires_grad_(module.weight.requires_grad)
        new.bias.requires_grad_(module.bias.requires_grad)
    return new
