"""The random part of ModelMix's update, as widths for the door (methods/modelmix.py says why that is the same).

The rest of the update, the descent from the mean of the last two iterates, is `updates.AveragingSGD`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sordino.errors import InputError
from sordino.methods.base import AddsUniformNoise, HoldsStepSizes
from sordino.plan import Plan
from sordino.steps import Widths
from sordino.updates import AveragingSGD, trainable


def mixing_widths(plan: Plan, model: nn.Module, optimizer: AveragingSGD) -> Widths:
    """max(|w_{k−1} − w_{k−2}|/η_k · divisor, the plan's least width) on every trainable coordinate, at each step.

    In double precision: a width that was rounded down would be refused.
    """
    method = plan.method
    if not (isinstance(method, AddsUniformNoise) and isinstance(method, HoldsStepSizes)):
        raise InputError(f"the method {method.name} does not mix iterates")
    rates = method.lr.over(plan.steps)

    @torch.no_grad()
    def widths(step: int) -> dict[str, Tensor]:
        least, per_sum = method.least_width(plan, step), plan.divisor / float(rates[step])
        return {
            name: (parameter.double() - optimizer.previous(parameter).double()).abs().mul_(per_sum).clamp_min_(least)
            for name, parameter in trainable(model).items()
        }

    return widths
