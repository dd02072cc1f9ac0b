"""The update of an audited ModelMix run, and ways to reduce its uniform noise without changing the claim."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor, nn

from sordino.audit.updates import AuditedUpdate
from sordino.errors import InputError
from sordino.gradients.survey import trainable
from sordino.methods.modelmix.widths import mixing_widths
from sordino.plan.core import Plan
from sordino.training.updates import AveragingSGD

if TYPE_CHECKING:
    from sordino.methods.modelmix.method import ModelMix

_NOT_ENFORCED = 1e-12
"""The smallest width of a run whose gap is not enforced: schedules must be positive."""


class MixedUpdate(AuditedUpdate):
    """`AveragingSGD`; its gaps are the differences of the last two iterates."""

    def gaps(self, step: int) -> Mapping[str, Tensor]:
        """|w_{k−1} − w_{k−2}|/η_k in units of the summed gradient: public, since every iterate is."""
        assert isinstance(self.optimizer, AveragingSGD)
        per_sum = self.divisor / self.rates[step]
        return {
            name: (p.detach().double() - self.optimizer.previous(p).double()).abs() * per_sum
            for name, p in trainable(self.model).items()
        }


def mixed_update(plan: Plan, model: nn.Module, width_scale: float) -> tuple[Plan, AuditedUpdate]:
    """The plan that is run, and its update. With `width_scale` below 1 the run's uniform noise is narrower."""
    method: ModelMix = plan.method  # type: ignore[assignment]
    rates = tuple(float(rate) for rate in method.lr.over(plan.steps))
    optimizer = AveragingSGD(list(trainable(model).values()), lr=rates[0])
    honest = mixing_widths(plan, model, optimizer)
    if width_scale == 1.0:
        return plan, MixedUpdate(model, optimizer, rates, plan.divisor, honest)
    if not 0 <= width_scale < 1:
        raise InputError(f"width_scale must lie between 0 (the gap is not enforced) and 1, got {width_scale}")
    factor = width_scale or _NOT_ENFORCED
    broken = replace(plan, method=method.narrowed(factor))
    narrow = mixing_widths(broken, model, optimizer)

    def widths(step: int) -> Mapping[str, Tensor]:
        if width_scale == 0:
            return narrow(step)
        # a width that is rounded below that of the changed plan would be refused
        least = broken.method.least_width(broken, step)
        return {name: (value * factor).clamp_min(least) for name, value in honest(step).items()}

    return broken, MixedUpdate(model, optimizer, rates, plan.divisor, widths)
