"""The update of an audited run, as the plan prescribes it, and ways to break it behind the accountant's back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from sordino.errors import InputError
from sordino.methods.base import AddsUniformNoise, HoldsStepSizes
from sordino.methods.modelmix import ModelMix
from sordino.mixing import mixing_widths
from sordino.plan import Plan
from sordino.schedule import Schedule
from sordino.steps import PrivateStep, Widths
from sordino.updates import AveragingSGD, trainable

_NOT_ENFORCED = 1e-12
"""The least width of a run whose gap is not enforced: schedules are positive."""


@dataclass(frozen=True)
class AuditedUpdate:
    """Moves the model by a released gradient. `widths` is what the door is told, None without uniform noise."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    rates: tuple[float, ...]
    divisor: float
    widths: Widths | None

    def gaps(self, step: int) -> Mapping[str, Tensor]:
        """|w_{k−1} − w_{k−2}|/η_k in units of the summed gradient: public, since every iterate is."""
        if not isinstance(self.optimizer, AveragingSGD):
            return {name: torch.zeros_like(p) for name, p in trainable(self.model).items()}
        per_sum = self.divisor / self.rates[step]
        return {
            name: (p.detach().double() - self.optimizer.previous(p).double()).abs() * per_sum
            for name, p in trainable(self.model).items()
        }

    def apply(self, private: PrivateStep) -> None:
        private.assign(self.model)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rates[private.step]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def audited_update(plan: Plan, model: nn.Module, lr: float, width_scale: float = 1.0) -> tuple[Plan, AuditedUpdate]:
    """The plan that is run, and its update. With a `width_scale` below 1 the run's uniform noise is narrower."""
    parameters = list(trainable(model).values())
    if not isinstance(plan.method, HoldsStepSizes):
        if width_scale != 1.0:
            raise InputError(f"width_scale belongs to uniform noise, which {plan.method.name} does not add")
        sgd = torch.optim.SGD(parameters, lr=lr)
        return plan, AuditedUpdate(model, sgd, (lr,) * plan.steps, plan.divisor, None)
    rates = tuple(float(rate) for rate in plan.method.lr.over(plan.steps))
    if not isinstance(plan.method, AddsUniformNoise):
        return plan, AuditedUpdate(model, torch.optim.SGD(parameters, lr=rates[0]), rates, plan.divisor, None)
    optimizer = AveragingSGD(parameters, lr=rates[0])
    honest = mixing_widths(plan, model, optimizer)
    broken, widths = plan, honest
    if width_scale != 1.0:
        if not 0 <= width_scale < 1 or not isinstance(plan.method, ModelMix):
            raise InputError(f"width_scale = {width_scale}: give a number from 0 (the gap is not enforced) to 1")
        factor = width_scale or _NOT_ENFORCED
        method = replace(plan.method, tau_over_lr=_times(plan.method.tau_over_lr, factor))
        broken = replace(plan, method=method)
        narrow = mixing_widths(broken, model, optimizer)

        def widths(step: int) -> Mapping[str, Tensor]:
            if width_scale == 0:
                return narrow(step)
            # a width that rounding makes narrower than the broken plan's would be refused
            least = method.least_width(broken, step)
            return {name: (value * factor).clamp_min(least) for name, value in honest(step).items()}

    return broken, AuditedUpdate(model, optimizer, rates, plan.divisor, widths)


def _times(schedule: Schedule, factor: float) -> Schedule:
    if schedule.kind == "pieces":
        return replace(schedule, values=tuple((start, value * factor) for start, value in schedule.values))  # type: ignore[misc]
    return replace(schedule, values=tuple(value * factor for value in schedule.values))  # type: ignore[operator]
