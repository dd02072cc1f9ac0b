"""From released gradients to weights. All of it is post-processing: it costs no privacy.

Any torch optimizer serves as it is. What torch does not have lies here: an average of the iterates that can be
saved and resumed as plain tensors, and the descent from the mean of the last two iterates (`AveragingSGD`) that
ModelMix amounts to once its randomness has been added at the door.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sordino.errors import InputError


@dataclass(frozen=True)
class Averaging:
    """Which average of the iterates is published in the place of the last one.

    "none": the last iterate. "ema": Σ_t (1−decay)·decay^(T−t) w_t, divided by its weights' sum.
    "tail": the plain mean of the iterates of the last `tail` part of the steps.
    """

    kind: Literal["none", "ema", "tail"] = "none"
    decay: float = 0.99
    tail: float = 0.5

    def __post_init__(self) -> None:
        if self.kind not in ("none", "ema", "tail"):
            raise InputError(f"averaging kind {self.kind!r} is unknown: use none, ema or tail")
        if not 0 <= self.decay < 1:
            raise InputError(f"average decay {self.decay} must lie in [0, 1)")
        if not 0 < self.tail <= 1:
            raise InputError(f"average tail {self.tail} must lie in (0, 1]")

    def weight(self, step: int, steps: int, total: float) -> tuple[float, float]:
        """(factor on the running sum, new total weight) when the iterate of `step` comes in with weight 1."""
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
        """The average with the model's present weights in it (the sums are updated in place)."""
        factor, total = averaging.weight(step, steps, self.total)
        if total > self.total * factor:
            for name, parameter in trainable(model).items():
                self.sums[name].mul_(factor).add_(parameter.detach())
        return Average(self.sums, total)

    def values(self) -> dict[str, Tensor] | None:
        """The mean of the iterates so far; None while there is none."""
        return {name: value / self.total for name, value in self.sums.items()} if self.total else None


class AveragingSGD(Optimizer):
    """w_k = (w_{k−1} + w_{k−2})/2 − lr·g, where g is the released gradient at w_{k−1}, and w_{−1} = w_0.

    By itself (under DP-SGD) it is the control that ModelMix is compared with: its expectation, given the gradient.
    """

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        if not lr > 0:
            raise ValueError(f"lr = {lr} must be positive")
        super().__init__(params, {"lr": lr})

    def previous(self, parameter: Tensor) -> Tensor:
        """w_{k−2} while the parameter holds w_{k−1}."""
        earlier = self.state[parameter].get("previous") if parameter in self.state else None
        return parameter.detach() if earlier is None else earlier

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    raise InputError("a trainable parameter has no released gradient: every one takes part in a step")
                now, earlier = parameter.detach().clone(), self.previous(parameter)
                parameter.add_(earlier).mul_(0.5).sub_(parameter.grad, alpha=group["lr"])
                self.state[parameter]["previous"] = now


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training moves, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
