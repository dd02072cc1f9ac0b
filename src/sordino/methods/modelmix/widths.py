"""ModelMix's update: descent from the mean of the last two iterates, and the uniform noise equivalent to mixing.

methods/modelmix/method.py shows that this has the same distribution as mixing the two iterates at random.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sordino.errors import InputError
from sordino.gradients.survey import trainable
from sordino.plan.core import Plan
from sordino.schedule import Schedule
from sordino.training.steps import Widths
from sordino.training.updates import AveragingSGD, Update

if TYPE_CHECKING:
    from sordino.methods.modelmix.method import ModelMix


class MixingUpdate(Update):
    """`AveragingSGD` with the plan's step sizes."""

    def __init__(self, plan: Plan, model: nn.Module, loss: Callable[..., Tensor], lr: Schedule) -> None:
        rates = tuple(float(rate) for rate in lr.over(plan.steps))
        super().__init__(plan, model, loss, AveragingSGD, rates[0], rates)

    def widths(self, optimizer: Optimizer) -> Widths | None:
        return mixing_widths(self.plan, self.model, optimizer)


def mixing_widths(plan: Plan, model: nn.Module, optimizer: Optimizer) -> Widths:
    """The widths of the uniform noise: max(|w_{k−1} − w_{k−2}|/η_k · divisor, the plan's least width) per coordinate.

    They are in double precision: a width that was rounded down would be refused.

    Args:
        plan: A ModelMix plan.
        model: The model, whose weights are w_{k−1}.
        optimizer: An `AveragingSGD`, which stores w_{k−2}.

    Returns:
        A function from a step to the widths of every trainable parameter.

    Raises:
        InputError: the plan's method does not mix iterates, or the optimizer does not store the last one.
    """
    method: ModelMix = plan.method  # type: ignore[assignment]
    if not method.adds_uniform_noise or not isinstance(optimizer, AveragingSGD):
        raise InputError(f"the method {plan.method.name} does not mix iterates, or the optimizer is not AveragingSGD")
    rates = method.lr.over(plan.steps)

    @torch.no_grad()
    def widths(step: int) -> dict[str, Tensor]:
        least, per_sum = method.least_width(plan, step), plan.divisor / float(rates[step])
        return {
            name: (parameter.double() - optimizer.previous(parameter).double()).abs().mul_(per_sum).clamp_min_(least)
            for name, parameter in trainable(model).items()
        }

    return widths
