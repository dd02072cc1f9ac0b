"""How much of a released gradient is signal: the descent inequality of Xiao et al. 2023, (17) and (22).

A step along the released gradient Ḡ + Δ of size η changes the loss by at most

    −η⟨∇F, Ḡ⟩ + (βη²/2)·E‖Ḡ_batch + Δ‖²,   E‖Ḡ_batch + Δ‖² = ‖Ḡ‖² + sampling² + noise²,

whose minimum over η is −‖∇F‖²/(2β) · alignment², where

    alignment = cos(∇F, Ḡ) · ‖Ḡ‖ / √(‖Ḡ‖² + sampling² + noise²)

is (nearly) the cosine between a released gradient and the true one. It combines both sides of the choice of a clipping
threshold c: a smaller c has less noise per unit of gradient, a larger one a better direction. The best c is the one
with the largest alignment, for every smoothness β; the step size has to be adapted to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from sordino.clipping import Clipping
from sordino.diagnostics.instruments.reading import Reading, measure_each
from sordino.plan import Plan


@dataclass(frozen=True)
class Signal:
    """The lengths of a released gradient's parts: the mean of the clipped gradients, the batch's scatter, the noise."""

    clip_norm: float
    gradient: float  # ‖Ḡ‖
    sampling: float  # √(E‖clip(g)‖²·(1 − q)/B), the scatter of a Poisson batch over its expected size
    noise: float  # √E‖Δ‖²
    cosine: float  # between Ḡ and ∇F; 0 if one of them is zero

    @property
    def alignment(self) -> float:
        whole = math.hypot(self.gradient, self.sampling, self.noise)
        return self.cosine * self.gradient / whole if whole > 0 else 0.0

    def over(self, steps: int) -> float:
        """Signal-to-noise ratio of a whole run: gradients add up linearly in the steps, noise as their square root."""
        return self.gradient / self.noise * math.sqrt(steps) if self.noise > 0 else math.inf


def noise_length(plan: Plan, parameters: int) -> float:
    """√E‖Δ‖² of a released mean gradient: noise_multiplier × sensitivity × √d / divisor (Laplace: times √2)."""
    scale = 1.0 if plan.noise.name == "gaussian" else math.sqrt(2)
    return scale * plan.noise.noise_multiplier * plan.sensitivity * math.sqrt(parameters) / plan.divisor


def signal_of(reading: Reading, plan: Plan, parameters: int) -> Signal:
    """The plan's released gradient at the weights of the reading."""
    scatter = reading.clipped_square * max(0.0, 1 - plan.sampling_rate) / plan.expected_batch
    return Signal(
        clip_norm=reading.clip_norm,
        gradient=reading.clipped_gradient_norm,
        sampling=math.sqrt(scatter),
        noise=noise_length(plan, parameters),
        cosine=reading.cosine or 0.0,
    )


def clip_curve(
    model: nn.Module,
    loss: Callable[..., Tensor],
    rows: Any,
    plan: Plan,
    clip_norms: Sequence[float],
    **whose: Any,
) -> list[Signal]:
    """The signal with the plan's clipping at other thresholds, with the noise scaled accordingly."""
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    clippings: list[Clipping] = [replace(plan.clipping, clip_norm=clip_norm) for clip_norm in clip_norms]
    readings = measure_each(model, loss, rows, clippings, **whose)
    return [
        signal_of(reading, replace(plan, clipping=clipping), parameters)
        for reading, clipping in zip(readings, clippings, strict=True)
    ]
