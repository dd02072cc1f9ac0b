"""Deliberate faults to test audits with: a record's contribution is bounded not once but several times.

Each replaces `plan_gradients` and violates the plan's guarantee. Nothing in the library uses them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sordino.gradients import ClippedSum, Rows, clipped_sum
from sordino.plan import Plan
from sordino.records.gradients import GradientSum, Stated, add_sums, empty_sum, record_gradients
from sordino.records.momentum import PastIterates
from sordino.sampling import LogicalBatch


def views_clipped_apart(
    plan: Plan, model: nn.Module, loss: Any, dataset: Any, *, past: Callable[[], PastIterates] = PastIterates
) -> GradientSum:
    """Σ over views of clip(gradient of the view): K times the bound."""
    plain = record_gradients(model, loss, dataset, plan.clipping, views=plan.contribution.augmentation)

    def gradient_sum(batch: LogicalBatch) -> ClippedSum:
        rows = plain.rows(batch.indices, batch.step)
        apart = Rows(rows.inputs, rows.targets)
        return clipped_sum(model, loss, apart, plan.clipping)

    return Stated(gradient_sum, plan.clipping, plan.contribution)


def iterates_clipped_apart(
    plan: Plan, model: nn.Module, loss: Any, dataset: Any, *, past: Callable[[], PastIterates] = PastIterates
) -> GradientSum:
    """Σ over iterates of factor · clip(gradient there): Σ decay^age times the bound."""
    plain = record_gradients(model, loss, dataset, plan.clipping)
    inner = plan.contribution.inner
    assert inner is not None

    def scaled(part: ClippedSum, factor: float) -> ClippedSum:
        return replace(part, sums={name: value * factor for name, value in part.sums.items()})

    def gradient_sum(batch: LogicalBatch) -> ClippedSum:
        total = empty_sum(model)
        for weights, factor in past().with_present(inner):
            rows = plain.rows(batch.indices, batch.step)
            part = clipped_sum(model, loss, rows, plan.clipping, iterates=[(weights, 1.0)])
            total = add_sums(total, scaled(part, factor))
        return total

    return Stated(gradient_sum, plan.clipping, plan.contribution)


def views_by_place(
    plan: Plan, model: nn.Module, loss: Any, dataset: Any, *, past: Callable[[], PastIterates] = PastIterates
) -> GradientSum:
    """Clipped once, but a record's views depend on its position in the batch: removing a record redraws all later
    ones."""

    def gradient_sum(batch: LogicalBatch) -> ClippedSum:
        inputs, targets = (t[batch.indices] for t in dataset)
        generator = torch.Generator().manual_seed(batch.step)
        assert plan.contribution.augmentation is not None
        n, k = len(inputs), plan.contribution.augmentation.views
        views: Tensor = inputs.repeat_interleave(k, 0)
        flipped = torch.rand(n * k, generator=generator) < 0.5
        views = torch.where(flipped[:, None, None, None], views.flip(3), views)
        owner = torch.arange(n).repeat_interleave(k)
        rows = Rows(views, targets.repeat_interleave(k), owner, n, torch.full((n * k,), 1 / k))
        return clipped_sum(model, loss, rows, plan.clipping)

    return Stated(gradient_sum, plan.clipping, plan.contribution)
