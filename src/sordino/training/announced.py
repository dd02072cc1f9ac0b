"""The line printed before a run starts: its privacy cost and its expected duration.

The duration is measured by rehearsed steps: the run's own sampling, gradient sums, noise and update, on a copy of the
model. Every sum is replaced by zeros before noise is added to it, so nothing about the records is released, and the
copy is discarded. How long the steps take depends on the records: it is printed for their owner and not stored.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from copy import deepcopy

import torch
from torch import nn

from sordino.gradients import ClippedSum
from sordino.gradients.state.left import Kept
from sordino.plan.core import Plan
from sordino.plan.guarantee import Guarantee
from sordino.records.gradients import GradientSum, Wrapper
from sordino.records.momentum import PastIterates, made_up_past
from sordino.records.reading import count_records
from sordino.release.ledger import Ledger
from sordino.sampling import LogicalBatch
from sordino.shown import up
from sordino.training.job import Job
from sordino.training.steps import PrivateStep, private_steps
from sordino.training.updates import Update

clock = time.perf_counter
FEW = 16
"""Records of the first rehearsed step; each further one has four times as many."""
ENOUGH = 0.2
"""Seconds after which no further step is rehearsed, if the run seems to be short."""
LONG = 2.0
"""The same if the run seems to be long: the time of few records, on a busy machine, is no time of many."""
_MIXED = 16  # steps from which the time of mixing earlier noise is measured


def header(plan: Plan, guarantee: Guarantee, seconds_per_step: float | None, *, evaluates: bool = False) -> str:
    """ε, σ, steps and the expected time; `evaluates`: the run also evaluates, which is not included."""
    said = (
        f"ε = {up(guarantee.epsilon)} at δ = {up(guarantee.delta)} ({guarantee.relation}), noise multiplier "
        f"{plan.noise.noise_multiplier:.4g} × clip norm {plan.clipping.clip_norm:g}, {plan.steps} steps of about "
        f"{plan.expected_batch:g} of {plan.records} {plan.unit}s"
    )
    if seconds_per_step is None:
        return said
    return f"{said}; {_duration(seconds_per_step * plan.steps)}{' and its evaluations' if evaluates else ''}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return "less than a minute"
    if seconds < 90:
        return "about a minute"
    return f"about {seconds / 60:.0f} minutes" if seconds < 5400 else f"about {seconds / 3600:.1f} hours"


def extrapolated(step: Callable[[int], int], expected: float, steps: int = 1) -> float:
    """The seconds of a step of `expected` records, from the time of smaller ones.

    Args:
        step: Makes a step of at most that many records, and returns their number.
        expected: The records of a step of the run.
        steps: The steps of the run. More is rehearsed, up to a hundredth of the run, if it seems to be long.

    Returns:
        The seconds.
    """
    begun, most, known = clock(), FEW, [timed(step, 0)]
    patience, found = ENOUGH, 0.0
    while len(known) == 1 or (known[-1][0] == most / 4 < expected and clock() - begun < patience):
        known.append(timed(step, most))
        most *= 4
        (fewer, less), (count, seconds) = known[-2:]
        slope = max(0.0, (seconds - less) / (count - fewer)) if count > fewer else 0.0
        found = seconds + slope * max(0.0, expected - count)
        interrupted = seconds < less  # more records took less time
        patience = LONG if interrupted else min(LONG, max(ENOUGH, found * steps / 100))
    return found


def timed(step: Callable[[int], int], most: int) -> tuple[int, float]:
    """(records, seconds) of the faster of two steps, after one step in which the engine checks new programs."""
    step(most)
    found = []
    for _ in range(2):
        before = clock()
        count = step(most)
        found.append((clock() - before, count))
    seconds, count = min(found)
    return count, seconds


def _later_noise(plan: Plan, step: Callable[[int], int], number: Callable[[], int]) -> float:
    """The additional seconds of an average step, compared with the first ones, if noise mixes that of earlier steps."""

    def terms(at: int) -> int:
        return len(plan.method.earlier_noise(plan, at, 0) or ())

    begun = clock()
    known: list[tuple[int, float]] = []
    while terms(plan.steps - 1) > terms(number()) and len(known) < _MIXED and clock() - begun < ENOUGH:
        before = clock()
        step(0)
        known.append((terms(number()), clock() - before))
    if len(known) < 4:
        return 0.0
    (few, short), (many, long) = min(known[:2], key=_seconds), min(known[-2:], key=_seconds)
    average = statistics.mean(terms(plan.steps * part // 8) for part in range(8))
    return max(0.0, long - short) / (many - few) * max(0.0, average - few)


def _seconds(timed: tuple[int, float]) -> float:
    return timed[1]


class Discarded(Wrapper):
    """Sums at most `most` records of a batch and returns zeros."""

    def __init__(self, gradient_sum: GradientSum) -> None:
        super().__init__(gradient_sum)
        self.most, self.summed, self.step = FEW, 0, 0

    def __call__(self, batch: LogicalBatch) -> ClippedSum:
        some = LogicalBatch(batch.step, batch.indices[: self.most], batch.chunk)
        self.summed, self.step = len(some), batch.step
        total = self._gradient_sum(some)
        for name, value in total.sums.items():
            total.sums[name] = torch.zeros_like(value, memory_format=torch.contiguous_format)
        return total


def evaluates(job: Job) -> bool:
    """Whether the run evaluates between its steps."""
    return job.evaluate is not None and 0 < job.settings.eval_every < job.plan.steps


def rehearsed_seconds(job: Job, remade: Callable[[nn.Module], Update]) -> float | None:
    """The expected seconds of a step, from rehearsed steps on a copy of the model.

    Args:
        job: The run.
        remade: Makes the update of a copy.

    Returns:
        The seconds; None if the model can't be copied or the time can't be measured.
    """
    try:
        copied = deepcopy(job.model)
    except Exception:  # the user's own modules may raise anything
        return None
    return seconds_per_step(Job(copied, job.dataset, job.plan, remade(copied), job.settings))


def seconds_per_step(job: Job) -> float | None:
    """The expected seconds of a step.

    Args:
        job: The run with a copy of its model, which is changed, and an update of that copy.

    Returns:
        The seconds; None if they can't be measured.
    """
    plan, made = job.plan, rehearsed_steps(job)
    if made is None:
        return None
    step, sums = made
    try:
        with torch.random.fork_rng(devices=[]):
            if plan.contribution.record_momentum is not None:
                return timed(step, count_records(job.dataset))[1]  # this sum can't be restricted to a part of a batch
            return extrapolated(step, plan.expected_batch, plan.steps) + _later_noise(plan, step, lambda: sums.step)
    except Kept:
        raise
    except Exception:  # some methods and datasets can't use a part of a batch; the run reports its own errors
        return None


def rehearsed_steps(job: Job) -> tuple[Callable[[int], int], Discarded] | None:
    """(a function that makes a step of at most so many records and returns their number, its gradient sum).

    None if the optimizer uses other parameters than those that it is given. The job's model is changed.
    """
    plan, loop = job.plan, job.loop()
    own = {id(parameter) for parameter in job.model.parameters()}
    if any(id(p) not in own for group in loop.optimizer.param_groups for p in group["params"]):
        return None
    inner, records = plan.contribution.inner, count_records(job.dataset)
    past = PastIterates() if inner is None else made_up_past(job.model, inner)
    sums = Discarded(job.update.gradient_sum(job.dataset, past=lambda: past, seed=job.settings.seed))

    def rehearsed() -> Iterator[PrivateStep]:
        while True:  # a run with too few steps is started again
            with Ledger.open(None, plan.to_dict()) as ledger:
                yield from private_steps(
                    plan, sums, records=records, source=plan.source(), ledger=ledger, chunk=job.settings.chunk,
                    widths=job.update.widths(loop.optimizer),
                )  # fmt: skip

    steps = rehearsed()

    def step(most: int) -> int:
        sums.most = most
        job.update.move(next(steps), loop.optimizer)
        return sums.summed

    return step, sums
