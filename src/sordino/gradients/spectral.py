"""Spectral normalisation: the power iteration reads and writes no data, but it must not count the passes.

torch's spectral_norm iterates in every forward pass and keeps the result in buffers. How many passes a step takes
depends on the records that were drawn (chunks; none for an empty batch), so the buffers would tell something of them
without noise. Here the iteration runs once at the start of each step, on the weights alone, and is off in the passes.
A step of plain training with one forward pass does the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm

KIND: type[nn.Module] = parametrizations._SpectralNorm


def hooks(module: nn.Module) -> list[SpectralNorm]:
    """The older form, torch.nn.utils.spectral_norm: a hook before the module's forward."""
    return [h for h in module._forward_pre_hooks.values() if isinstance(h, SpectralNorm)]


def power_iterations(model: nn.Module) -> list[Any]:
    """Every object of the model that holds ``n_power_iterations``."""
    found: list[Any] = []
    for module in model.modules():
        found += [module] if isinstance(module, KIND) else hooks(module)
    return found


@contextlib.contextmanager
def frozen(found: Sequence[Any]) -> Iterator[None]:
    """No power iteration meanwhile: the passes read the vectors and write nothing."""
    before = [(owner, owner.n_power_iterations) for owner in found if hasattr(owner, "n_power_iterations")]
    for owner, _ in before:
        owner.n_power_iterations = 0
    try:
        yield
    finally:
        for owner, count in before:
            owner.n_power_iterations = count


@torch.no_grad()
def advance(model: nn.Module) -> None:
    """The power iterations of one step, from the weights alone, for the modules in training mode."""
    for module in model.modules():
        if isinstance(module, ParametrizationList) and any(isinstance(m, KIND) and m.training for m in module):
            module()
        for hook in hooks(module) if module.training else []:
            hook.compute_weight(module, do_power_iteration=True)
