"""From released gradients to weights. All of it is post-processing: it costs no privacy.

Any torch optimizer serves as it is. What torch does not have is an average of the iterates that can be
saved and resumed as plain tensors; it lies here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

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


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training moves, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
