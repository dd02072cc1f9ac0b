"""Compares the engine with plain autograd on the first batch, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sordino.errors import SordinoError
from sordino.gradients import verify
from sordino.gradients.checks.brute_force import verify_shards
from sordino.plan.core import Plan
from sordino.randomness import RandomSource
from sordino.ranks.store import Store
from sordino.records.fitting import explained
from sordino.records.gradients import record_gradients
from sordino.records.momentum import made_up_past
from sordino.records.reading import count_records, refuse_dependent_rows
from sordino.training.loop import Settings
from sordino.training.steps import plan_batches


def check_first_batch(
    model: nn.Module,
    loss: Callable[..., Tensor],
    dataset: Any,
    plan: Plan,
    source: RandomSource,
    settings: Settings,
    store: Store | None = None,
) -> None:
    """Compares the engine with a brute-force loop on the first batch; raises if they differ.

    The batch has the plan's views, and artificial past iterates if the plan needs them.
    """
    records, stated = count_records(dataset), plan.contribution
    first = next(plan_batches(plan, records=records, source=source, chunk=64))
    some = first.indices[:64] if len(first.indices) else torch.arange(min(records, 64))
    if len(some):
        views = stated.augmentation
        refuse_dependent_rows(dataset, some[:8])
        made = record_gradients(model, loss, dataset, plan.clipping, views=views, seed=settings.seed)
        rows = made.rows(some, first.step)
        if store is not None:
            verify_shards(model, loss, rows, plan.clipping, store)
            return
        iterates = None if stated.inner is None else made_up_past(model, stated.inner).with_present(stated.inner)
        try:
            verify(model, loss, rows, plan.clipping, iterates=iterates)
        except SordinoError:
            raise
        except Exception as error:
            better = explained(error, model, loss, made.rows(some[:2] if len(some) > 1 else some.repeat(2), first.step))
            raise better from error
