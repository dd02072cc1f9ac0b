"""A sixth method, outside of the package: signed steps (signSGD on released gradients), at a step size of the plan.

Each coordinate moves by the plan's step size in the direction of the released gradient's sign. That is post-processing
of DP-SGD's releases, so accounting, ledger and audit are inherited; the update and the recipe's keys are its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from torch import Tensor, nn
from torch.optim import Optimizer

from sordino.checks import known_keys, positive
from sordino.errors import InputError
from sordino.plan import Assumption, Method, Plan, Request, make_plan
from sordino.training import PrivateStep
from sordino.training.updates import Update


class SignedUpdate(Update):
    """w ← w − lr · sign(released gradient)."""

    def combined(self, private: PrivateStep) -> PrivateStep:
        return PrivateStep(private.step, {name: value.sign() for name, value in private.gradients.items()})

    def move(self, private: PrivateStep, optimizer: Optimizer) -> None:
        super().move(private, optimizer)
        self.last = private.step

    def logged(self) -> dict[str, float]:
        return {"signed_steps": float(self.last + 1)}


@dataclass(frozen=True)
class SignedSteps(Method):
    """`lr`: the step size of every step."""

    lr: float
    name: ClassVar[str] = "signed-steps"
    holds_update: ClassVar[bool] = True

    @classmethod
    def plan(cls, *, lr: float, **options: Any) -> Plan:
        return make_plan(cls(positive("lr", lr)), **options)

    def assumptions(self, plan: Plan) -> tuple[Assumption, ...]:
        return (Assumption("only signs of released gradients are used", "that is post-processing"),)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "lr": self.lr}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        if set(values) != {"lr"}:
            raise InputError(f"the method {cls.name} has the option lr, got {', '.join(values)}")
        return cls(**values)

    def update(self, plan: Plan, model: nn.Module, loss: Callable[..., Tensor], public: Any = None) -> SignedUpdate:
        self._refuse_public(public)
        return SignedUpdate(plan, model, loss, lr=self.lr, rates=(self.lr,) * plan.steps)

    @classmethod
    def check_recipe(cls, recipe: Any) -> None:
        known_keys(recipe.method.options, ("lr",), f"[method] of {cls.name}")

    @classmethod
    def from_recipe(cls, request: Request) -> Plan:
        return cls.plan(lr=request.recipe.method.options.get("lr"), **request.arguments())

    def result_entries(self, metrics: Mapping[str, Any], noise_free: Mapping[str, Any] | None) -> dict[str, Any]:
        return {"signed_steps": metrics["signed_steps"]}

    @classmethod
    def add_flags(cls, account: Any, calibrate: Any) -> None:
        parser = account.add_parser(cls.name, help="see the package that brings this method")
        parser.set_defaults(run=lambda arguments: 0)
