"""A short trial of a private training on rows that need no protection, with the plan's clipping and size of noise.

The noise is drawn from a plain seeded generator: nothing that a trial touches is private, and no ledger is written.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sordino.diagnostics.instruments.reading import all_rows
from sordino.gradients import clipped_sum
from sordino.gradients.engine import row_loss
from sordino.gradients.rows import call
from sordino.plan import Plan
from sordino.records.companions import with_companions
from sordino.records.reading import count_records, row_reader
from sordino.training.updates import Average, Averaging


@dataclass(frozen=True)
class Trial:
    """Mean loss on the rows before and after; `after` is that of the weights that a run would publish."""

    lr: float
    steps: int
    noisy: bool
    before: float
    after: float  # infinite if it is not a number
    model: nn.Module

    @property
    def fell(self) -> float:
        return self.before - self.after


def trial(
    model: nn.Module,
    loss: Callable[..., Tensor],
    rows: Any,
    plan: Plan,
    optimizer: Callable[..., torch.optim.Optimizer],
    *,
    lr: float,
    steps: int,
    noisy: bool,
    averaging: Averaging | None = None,
    pool: Any = None,
    seed: int = 0,
) -> Trial:
    """`steps` steps on a copy of the model; the loss is that on `rows`.

    A step uses as many rows of `pool` (default: `rows`) as a batch of the plan has, but at most the number of `rows`.
    """
    pool = rows if pool is None else pool
    averaging = averaging or Averaging()
    own, count = copy.deepcopy(model), count_records(pool)
    trained = {name: p for name, p in own.named_parameters() if p.requires_grad}
    stepper = optimizer(list(trained.values()), lr=lr)
    average = Average.empty(own) if averaging.kind != "none" else None
    take, fetch = min(count_records(rows), count, max(1, round(plan.expected_batch))), row_reader(pool)
    scale = (
        plan.noise.noise_multiplier * plan.sensitivity / plan.divisor * (1 if plan.noise.name == "gaussian" else 2**0.5)
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        before = mean_loss(own, loss, rows)
        for step in range(steps):
            chosen = torch.randperm(count, generator=generator)[:take]
            batch = with_companions(fetch(chosen), own, seed=seed, step=step)
            sums = clipped_sum(own, loss, batch, plan.clipping).sums
            for name, parameter in trained.items():
                noise = torch.randn(parameter.shape, generator=generator) * scale if noisy else 0.0
                parameter.grad = (sums[name] / take + noise).to(parameter.dtype)
            stepper.step()
            average = average.include(own, averaging, step, steps) if average is not None else None
    published = average.values() if average is not None else None
    if published:
        own.load_state_dict({**own.state_dict(), **published})
    return Trial(lr, steps, noisy, before, mean_loss(own, loss, rows), own)


def mean_loss(model: nn.Module, loss: Callable[..., Tensor], rows: Any) -> float:
    """The mean loss over the rows in evaluation mode; infinite if it is not a number."""
    everyone, was = with_companions(all_rows(rows), model, seed=0, step=0), model.training
    model.eval()
    with torch.no_grad():
        value = float(row_loss(loss)(call(model, everyone.inputs), everyone.targets).double().mean())
    model.train(was)
    return value if math.isfinite(value) else math.inf
