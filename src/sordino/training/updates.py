"""Updates the weights by released gradients. All of this is post-processing: it has no privacy cost.

Any torch optimizer can be used. This module adds what torch does not have: an average of the iterates that can be saved
and resumed as plain tensors, and descent from the mean of the last two iterates (`AveragingSGD`). `Update` is what a
run does with its released steps; a method whose guarantee depends on that provides its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sordino import checks
from sordino.errors import InputError, Refused
from sordino.gradients.survey import trainable
from sordino.plan.core import Plan
from sordino.randomness import RandomSource
from sordino.records.gradients import GradientSum, plan_gradients
from sordino.records.momentum import PastIterates
from sordino.release.ledger import Ledger
from sordino.training.steps import PrivateStep, Widths


@dataclass(frozen=True)
class Averaging:
    """The average of the iterates that is published in place of the last one.

    Args:
        kind: "none": the last iterate. "ema": Σ_t (1−decay)·decay^(T−t) w_t, divided by the sum of its weights. "tail":
            the plain mean of the last iterates.
        decay: For "ema", in [0, 1).
        tail: For "tail": the fraction of the steps that is averaged, in (0, 1].

    Raises:
        InputError: a value is out of its range.
    """

    kind: Literal["none", "ema", "tail"] = "none"
    decay: float = 0.99
    tail: float = 0.5

    def __post_init__(self) -> None:
        if self.kind not in ("none", "ema", "tail"):
            raise InputError(f"averaging kind {self.kind!r} is unknown: use none, ema or tail")
        checks.within("average decay", self.decay, 0, 1, open_high=True)
        checks.within("average tail", self.tail, 0, 1, open_low=True)

    def weight(self, step: int, steps: int, total: float) -> tuple[float, float]:
        """How an iterate is added to the running sum.

        Args:
            step: The iterate's step, from 0.
            steps: The number of steps of the run.
            total: The sum of the weights so far.

        Returns:
            (factor on the running sum, new total weight) when the iterate of `step` is added with weight 1.
        """
        if self.kind == "ema":
            return self.decay, self.decay * total + 1
        starts = self.kind == "tail" and step >= steps - max(1, round(self.tail * steps))
        return 1.0, total + 1 if starts else total


@dataclass(frozen=True)
class Average:
    """A weighted sum of iterates and the sum of the weights."""

    sums: Mapping[str, Tensor]
    total: float = 0.0

    @classmethod
    def empty(cls, model: nn.Module) -> Average:
        return cls({name: torch.zeros_like(p, requires_grad=False) for name, p in trainable(model).items()})

    def include(self, model: nn.Module, averaging: Averaging, step: int, steps: int) -> Average:
        """The average including the model's current weights (the sums are updated in place)."""
        factor, total = averaging.weight(step, steps, self.total)
        if total > self.total * factor:
            for name, parameter in trainable(model).items():
                self.sums[name].mul_(factor).add_(parameter.detach())
        return Average(self.sums, total)

    def values(self) -> dict[str, Tensor] | None:
        """The mean of the iterates so far; None if there is none."""
        return {name: value / self.total for name, value in self.sums.items()} if self.total else None


class DividedModel(Protocol):
    """The parameters of a model that are divided over processes, for updates that make passes of their own."""

    def gradient(self, value: Callable[[], Tensor]) -> tuple[dict[str, Tensor], float]:
        """The gradient of a scalar function of the weights, with the parameters' layout, and the function's value.

        All processes must call this together, with the same function of public values. InputError if not finite.
        """


@dataclass(frozen=True, eq=False)
class Running:
    """The parts of a run in progress, for updates that make releases themselves."""

    source: RandomSource
    ledger: Ledger
    records: int
    chunk: int


class Update:
    """What a run does with its released steps: the optimizer, its step sizes, and their state.

    The default updates the model with the optimizer that the caller chose. A method that does something else with
    released values overrides parts of it; everything here uses released values and public rows only.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        loss: Callable[..., Tensor],
        optimizer: Callable[..., Optimizer] = torch.optim.SGD,
        lr: float = 0.1,
        rates: Sequence[float] | None = None,
    ) -> None:
        """`rates`: the step size of every step, if the plan contains them."""
        self.plan, self.model, self.loss = plan, model, loss
        self.optimizer, self.lr, self.rates = optimizer, lr, None if rates is None else tuple(rates)

    def make_optimizer(self, trained: Sequence[nn.Parameter], options: Mapping[str, Any]) -> Optimizer:
        """The torch optimizer whose state is saved with the run."""
        return self.optimizer(trained, lr=self.lr, **options)

    def gradient_sum(self, dataset: Any, *, past: Callable[[], PastIterates], seed: int) -> GradientSum:
        """The function that sums over each batch."""
        return plan_gradients(self.plan, self.model, self.loss, dataset, past=past, seed=seed)

    def divide(self, shards: DividedModel) -> None:
        """Called once, before anything else, if the model's parameters are divided over processes."""
        if type(self) is not Update:
            raise Refused(
                f"the method {self.plan.method.name} has an update of its own, which is not supported for a sharded "
                "model: train one that is not sharded"
            )

    def widths(self, optimizer: Optimizer) -> Widths | None:
        """The uniform noise of each step; None if the method adds none."""
        return None

    def check(self, dataset: Any) -> None:
        """Refuses a dataset that this update can't be used with."""

    def begin(self, scalars: Mapping[str, Any], running: Running | None) -> None:
        """Called once, before the first step, with the values from the checkpoint. `running`: None without noise."""

    def combined(self, private: PrivateStep) -> PrivateStep:
        """The released step as the optimizer sees it."""
        return private

    def move(self, private: PrivateStep, optimizer: Optimizer) -> None:
        """Updates the model by a step."""
        self.combined(private).assign(self.model)
        if self.rates is not None:
            for group in optimizer.param_groups:
                group["lr"] = self.rates[private.step]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def logged(self) -> dict[str, float]:
        """Released values for the metrics."""
        return {}

    def kept(self) -> dict[str, Any]:
        """Released values for the checkpoint, JSON-serialisable; `begin` receives them."""
        return dict(self.logged())


class AveragingSGD(Optimizer):
    """w_k = (w_{k−1} + w_{k−2})/2 − lr·g, where g is the released gradient at w_{k−1}, and w_{−1} = w_0.

    It is the expectation of random mixing of two iterates, and serves as its control in experiments.
    """

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        if not lr > 0:
            raise ValueError(f"lr = {lr} must be positive")
        super().__init__(params, {"lr": lr})

    def previous(self, parameter: Tensor) -> Tensor:
        """w_{k−2} while the parameter is w_{k−1}."""
        earlier = self.state[parameter].get("previous") if parameter in self.state else None
        return parameter.detach() if earlier is None else earlier

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    raise InputError("a trainable parameter has no released gradient: a step needs all of them")
                now, earlier = parameter.detach().clone(), self.previous(parameter)
                parameter.add_(earlier).mul_(0.5).sub_(parameter.grad, alpha=group["lr"])
                self.state[parameter]["previous"] = now
