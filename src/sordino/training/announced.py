"""The line printed before a run starts: its privacy cost and its expected duration.

The duration is measured on records of the first batch. It is printed on the user's terminal and not written anywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sordino.gradients import Rows, clipped_sum
from sordino.gradients.assurance import Assurance
from sordino.plan.core import Plan
from sordino.plan.guarantee import Guarantee
from sordino.shown import up

_FEW = 16  # records in the shorter of two passes


def header(plan: Plan, guarantee: Guarantee, seconds_per_step: float | None) -> str:
    """ε, σ, steps and the expected time."""
    said = (
        f"ε = {up(guarantee.epsilon)} at δ = {up(guarantee.delta)} ({guarantee.relation}), noise multiplier "
        f"{plan.noise.noise_multiplier:.4g} × clip norm {plan.clipping.clip_norm:g}, {plan.steps} steps of about "
        f"{plan.expected_batch:g} of {plan.records} {plan.unit}s"
    )
    return said if seconds_per_step is None else f"{said}; {_duration(seconds_per_step * plan.steps)}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return "less than a minute"
    if seconds < 90:
        return "about a minute"
    return f"about {seconds / 60:.0f} minutes" if seconds < 5400 else f"about {seconds / 3600:.1f} hours"


def seconds_per_step(
    model: nn.Module, loss: Callable[..., Tensor], fetch: Callable[[Tensor], Rows], indices: Tensor, plan: Plan
) -> float | None:
    """The time of one step, from two passes over some records; None if there are too few.

    The clipped sums are discarded: nothing is released.
    """
    if len(indices) <= _FEW:
        return None
    assurance = Assurance()

    def timed(some: Tensor) -> float:
        rows: Any = fetch(some)
        before = time.perf_counter()
        clipped_sum(model, loss, rows, plan.clipping, assurance=assurance)
        return time.perf_counter() - before

    with torch.random.fork_rng(devices=[]):
        timed(indices[:_FEW])  # warm-up: the first pass checks the program, later ones do not
        short, long = timed(indices[:_FEW]), timed(indices)
    slope = max(0.0, (long - short) / (len(indices) - _FEW))
    return long + slope * max(0.0, plan.expected_batch - len(indices))
