"""The update of an audited run, the plan's own if it has one, else plain SGD; and its past iterates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sordino.errors import InputError
from sordino.gradients.survey import trainable
from sordino.plan.core import Plan
from sordino.records.momentum import PastIterates
from sordino.training.steps import PrivateStep, Widths
from sordino.training.updates import Update


@dataclass(frozen=True)
class AuditedUpdate:
    """Moves the model by a released gradient. `widths` is passed to `private_steps`; None without uniform noise."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    rates: tuple[float, ...]
    divisor: float
    widths: Widths | None

    def gaps(self, step: int) -> Mapping[str, Tensor]:
        """The public part of the width of the uniform noise, in units of the summed gradient; here there is none."""
        return {name: torch.zeros_like(p) for name, p in trainable(self.model).items()}

    def apply(self, private: PrivateStep) -> None:
        private.assign(self.model)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rates[private.step]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


@dataclass(frozen=True)
class PrescribedUpdate(AuditedUpdate):
    """The update of a method whose guarantee depends on it."""

    update: Update

    def apply(self, private: PrivateStep) -> None:
        self.update.move(private, self.optimizer)


class Trail:
    """The past iterates of the audited copy, as many as the plan's inner momentum needs."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self._model, self._inner = model, plan.contribution.inner
        self.past = PastIterates()

    def present(self) -> PastIterates:
        """The past iterates; `plan_gradients` calls this before each batch."""
        return self.past

    def keep(self) -> None:
        """Appends the current weights of the model; called before each update."""
        if self._inner is not None:
            self.past = self.past.followed_by(self._model, self._inner.length)


def audited_update(plan: Plan, model: nn.Module, lr: float, width_scale: float = 1.0) -> tuple[Plan, AuditedUpdate]:
    """The plan that is run, and its update. A `width_scale` below 1 makes the run's uniform noise narrower."""
    own = plan.method.audited_update(plan, model, width_scale)
    if own is not None:
        return own
    if width_scale != 1.0:
        raise InputError(f"width_scale requires uniform noise, which {plan.method.name} does not add")
    prescribed = plan.method.update(plan, model, _no_loss) if plan.method.holds_update else None
    if prescribed is not None:
        optimizer = prescribed.make_optimizer(list(trainable(model).values()), {})
        return plan, PrescribedUpdate(model, optimizer, (lr,) * plan.steps, plan.divisor, None, prescribed)
    sgd = torch.optim.SGD(list(trainable(model).values()), lr=lr)
    return plan, AuditedUpdate(model, sgd, (lr,) * plan.steps, plan.divisor, None)


def _no_loss(*_: Tensor) -> Tensor:
    raise InputError("an audited update moves the model by released steps and can't use a loss")
