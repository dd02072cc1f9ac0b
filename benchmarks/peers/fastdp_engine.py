"""fastDP's step (clipping mode MixOpt, its default), if the distribution is installed.

fastDP is published as a repository and not on the package index; if it is not installed, the benchmark records it as
absent.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from fastDP import PrivacyEngine
from torch import Tensor, nn
from torch.nn import functional as F

from peers import CLIP_NORM, LEARNING_RATE, NOISE_MULTIPLIER, Step


def mixopt(model: nn.Module, inputs: Tensor, targets: Tensor) -> Step:
    """Flat clipping (Abadi) in the mode that chooses per layer between ghost norms and instantiation."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    engine = PrivacyEngine(
        model,
        batch_size=len(targets),
        sample_size=100 * len(targets),
        epochs=1,
        noise_multiplier=NOISE_MULTIPLIER,
        max_grad_norm=CLIP_NORM,
        clipping_mode="MixOpt",
        clipping_fn="Abadi",
        clipping_style="all-layer",
    )
    engine.attach(optimizer)

    def step() -> Mapping[str, float]:
        optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(model(inputs), targets))
        optimizer.step()
        return {}

    return step
