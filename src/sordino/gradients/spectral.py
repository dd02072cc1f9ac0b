"""Spectral normalisation: the power iteration uses no data, but the number of iterations must not depend on it either.

torch's spectral_norm iterates in every forward pass and stores the result in buffers. The number of passes in a step
depends on the records that were drawn (chunks; none for an empty batch), so the buffers would reveal something about
them without noise. Here the iteration runs once at the start of each step, on the weights alone, and is off in the
passes. A plain training step with one forward pass does the same.
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


def frozen(found: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
    """A context without power iterations: the passes read the vectors and write nothing."""
    return _frozen(found) if found else contextlib.nullcontext()


@contextlib.contextmanager
def _frozen(found: Sequence[Any]) -> Iterator[None]:
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
