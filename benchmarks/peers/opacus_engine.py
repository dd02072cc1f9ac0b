"""Opacus' step in its two modes, with the classes that its PrivacyEngine uses.

Layers that Opacus does not support are replaced by its own ModuleValidator.fix (nn.LSTM becomes DPLSTM), as its
documentation requires. Its noise comes from torch's ordinary generator (secure_mode is off by default).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from opacus.grad_sample import GradSampleModule
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer
from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from opacus.validators import ModuleValidator
from torch import Tensor, nn

from peers import CLIP_NORM, LEARNING_RATE, NOISE_MULTIPLIER, Step

warnings.filterwarnings("ignore", module="opacus|torch.nn.modules.module")


def _fixed(model: nn.Module) -> nn.Module:
    if ModuleValidator.is_valid(model):
        return model
    fixed: nn.Module = ModuleValidator.fix(model)
    return fixed.train()


def hooks(model: nn.Module, inputs: Tensor, targets: Tensor) -> Step:
    """grad_sample_mode="hooks": every per-record gradient is instantiated."""
    wrapped = GradSampleModule(_fixed(model), loss_reduction="mean")
    optimizer = DPOptimizer(
        torch.optim.SGD(wrapped.parameters(), lr=LEARNING_RATE),
        noise_multiplier=NOISE_MULTIPLIER,
        max_grad_norm=CLIP_NORM,
        expected_batch_size=len(targets),
    )
    loss = nn.CrossEntropyLoss()

    def step() -> Mapping[str, float]:
        optimizer.zero_grad()
        loss(wrapped(inputs), targets).backward()
        optimizer.step()
        return {}

    return step


def ghost(model: nn.Module, inputs: Tensor, targets: Tensor) -> Step:
    """grad_sample_mode="ghost": norms first, then a second backward of the reweighted loss."""
    wrapped = GradSampleModuleFastGradientClipping(
        _fixed(model), loss_reduction="mean", max_grad_norm=CLIP_NORM, use_ghost_clipping=True
    )
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(wrapped.parameters(), lr=LEARNING_RATE),
        noise_multiplier=NOISE_MULTIPLIER,
        max_grad_norm=CLIP_NORM,
        expected_batch_size=len(targets),
    )
    loss = DPLossFastGradientClipping(wrapped, optimizer, nn.CrossEntropyLoss(), "mean")

    def step() -> Mapping[str, float]:
        optimizer.zero_grad()
        loss(wrapped(inputs), targets).backward()
        optimizer.step()
        return {}

    return step
