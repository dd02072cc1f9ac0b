"""The time of a step, divided into what depends on the batch and what does not: for plans that are limited by time.

Measured on a copy of the model by the run's own steps, with every sum replaced by zeros (training/announced.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sordino.gradients.state.left import Kept
from sordino.methods.correlated.method import plan as correlated
from sordino.plan.core import Plan
from sordino.records.reading import count_records
from sordino.sampling import Poisson
from sordino.training.announced import FEW, clock, rehearsed_steps, timed
from sordino.training.asked import chosen_update
from sordino.training.job import Job
from sordino.training.loop import Settings
from sordino.training.steps import plan_batches

_TERMS = 9
"""Gaussians per coordinate in the last of the steps that show what a further one takes."""
_DRAWS = 3


@dataclass(frozen=True)
class Speed:
    """A step of B records takes seconds_per_step + B/records_per_second, and further Gaussians of correlated noise
    `seconds_per_noise` each. A record that takes no measurable time has None."""

    seconds_per_step: float
    records_per_second: float | None
    seconds_per_noise: float

    def to_dict(self) -> dict[str, Any]:
        """The speed as JSON-serialisable values."""
        return asdict(self)

    def __str__(self) -> str:
        records = "" if self.records_per_second is None else f" and 1 s for {self.records_per_second:.3g} records"
        return f"{self.seconds_per_step:.3g} s{records}; {self.seconds_per_noise:.3g} s for each further Gaussian"

    def options(self) -> str:
        """The speed as options of `sordino plan --minutes`."""
        given = {name: value for name, value in asdict(self).items() if value}
        return " ".join(f"--{name.replace('_', '-')} {value:.3g}" for name, value in given.items())


def speed_of(
    model: nn.Module,
    loss: Callable[..., Tensor],
    rows: Any,
    plan: Plan,
    *,
    lr: float,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    settings: Settings | None = None,
) -> Speed | None:
    """The time of a step of DP-SGD with the plan's clipping; no statistics of the rows are kept.

    Args:
        model: The network; it is not changed.
        loss: A loss of outputs and targets, one number per row.
        rows: Rows to compute gradients of; as many as are used at most count as a batch.
        plan: The plan. Its batches are drawn from its number of records.
        lr: The step size.
        optimizer: Makes the optimizer.
        settings: Chunk and options of the optimizer.

    Returns:
        The speed; None if it can't be measured, or if a record is not a row.
    """
    if plan.unit != "record" or plan.contribution.record_momentum is not None or not plan.method.rehearsed:
        return None
    settings, count = settings or Settings(), count_records(rows)
    whole = replace(plan, records=count, sampling=Poisson(1.0), public=None, statistics=())

    def steps_of(made: Plan) -> Callable[[int], int]:
        copied = deepcopy(model)
        job = Job(copied, rows, made, chosen_update(made, copied, loss, optimizer, lr, settings, None), settings)
        found = rehearsed_steps(job)
        if found is None:
            raise RuntimeError("the optimizer uses other parameters than the model's")
        return found[0]

    try:
        with torch.random.fork_rng(devices=[]):
            step = steps_of(whole)
            few, short = min((timed(step, FEW) for _ in range(_DRAWS)), key=_seconds)
            many, long = min((timed(step, count) for _ in range(_DRAWS)), key=_seconds)
            noise = _further_noise(steps_of(_mixing(plan, count)))
    except Kept:
        raise
    except Exception:  # the user's own modules may raise anything; the doctor's other parts report it
        return None
    per_record = max(0.0, long - short) / (many - few) if many > few else 0.0
    fixed = max(0.0, short - few * per_record) + _drawing(plan)
    return Speed(fixed, 1 / per_record if per_record else None, noise)


def _seconds(measured: tuple[int, float]) -> float:
    return measured[1]


def _mixing(plan: Plan, count: int) -> Plan:
    """A plan whose last step adds the noise of all its steps."""
    made = correlated(
        delta=plan.delta, records=count, expected_batch=count, steps=_TERMS, noise_multiplier=1.0,
        strategy="inverse-root", bands=_TERMS, clipping=plan.clipping,
    )  # fmt: skip
    return replace(made, contribution=plan.contribution)


def _further_noise(step: Callable[[int], int]) -> float:
    """Seconds of a further Gaussian: the last step of a round has `_TERMS` of them, the first one."""
    step(0)
    for _ in range(_TERMS - 1):
        step(0)
    rounds = []
    for _ in range(_DRAWS):
        seconds = []
        for _ in range(_TERMS):
            before = clock()
            step(0)
            seconds.append(clock() - before)
        rounds.append((seconds[-1] - seconds[0]) / (_TERMS - 1))
    return max(0.0, statistics.median(rounds))


def _drawing(plan: Plan) -> float:
    """Seconds of drawing a batch from the plan's records."""
    drawn = plan_batches(plan, records=plan.records, source=plan.source())
    found = []
    for _ in range(min(_DRAWS, plan.steps)):
        before = clock()
        next(drawn)
        found.append(clock() - before)
    return min(found)
