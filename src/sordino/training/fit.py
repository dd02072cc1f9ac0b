"""Trains any torch model with private steps and any torch optimizer: evaluation, checkpoints, resume.

Formal guarantee: everything that this module writes or returns, except the `not_private` field of the result, is a
function of values released through `sordino.release` (and of public data). So `plan.guarantee()` holds for all of it
jointly, against an adversary who sees every iterate.

A run may be killed at any moment and resumed:
- with an `insecure_seed`, the steps since the last checkpoint are repeated bit for bit, and the ledger recognises them;
  the run ends with the same weights as one that was never killed;
- with secure noise, no step in the ledger is ever drawn again: steps whose update was lost are skipped. The number of
  releases, and ε, remain those of the plan, and no key is stored on disk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from sordino import checks, ranks
from sordino.errors import InputError, Refused
from sordino.files import make_folder
from sordino.plan.core import Plan
from sordino.plan.explained import Explained, missing_step
from sordino.plan.guarantee import Guarantee
from sordino.randomness import RandomSource
from sordino.ranks.layout import is_sharded, refuse_wrapped
from sordino.ranks.run import heard
from sordino.ranks.sharded import copy_buffers, sharded
from sordino.ranks.store import Store
from sordino.records.companions import companions_of, refuse_shared_companions, refuse_undeclared
from sordino.records.fitting import check_fits, fitted, rows_not_finite
from sordino.records.gradients import Counted, Divisible, GradientSum
from sordino.records.mapped import mapped
from sordino.records.reading import check_items, collated, count_records, splits
from sordino.release.ledger import Ledger
from sordino.release.mechanisms import release_grid
from sordino.sampling import Partition, cycle
from sordino.training.agreement import agree, reporting
from sordino.training.announced import evaluates, header, rehearsed_seconds
from sordino.training.asked import check_asked, chosen_update
from sordino.training.callbacks import check_evaluation, checked, stopped, told_of_failure
from sordino.training.first_batch import check_first_batch
from sordino.training.histogram import check_declared, release_histogram
from sordino.training.job import Job, Result, fingerprint_of
from sordino.training.loop import Evaluate, Reader, Settings
from sordino.training.progress import say, tell_not_finite
from sordino.training.sharded import followed_steps, led_steps
from sordino.training.steps import (
    PrivateStep,
    check_records,
    plan_batches,
    private_steps,
    summed,
    unit_dataset,
)
from sordino.training.stopping import Stopping
from sordino.training.updates import Running, Update
from sordino.training.witness import bind

Loss = Callable[..., Tensor]
First = Callable[[Any, RandomSource, Ledger], Any]
"""Releases the plan's statistics of a dataset, with the same ledger, and returns the dataset to train on."""


def train(
    model: nn.Module,
    loss: Loss,
    dataset: Any,
    plan: Plan,
    *,
    optimizer: Callable[..., Optimizer] | None = None,
    lr: float | None = None,
    settings: Settings | None = None,
    evaluate: Evaluate | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    first: First | None = None,
    watch: Reader | None = None,
    public: Any = None,
    collate: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    callbacks: Sequence[Any] = (),
    users: Any = None,
) -> Result:
    """Trains `model` in place under `plan` and returns it with its guarantee.

    `sordino.train` (runs.api) documents the arguments; it also writes the model, the result and the report into `out`.
    Here `out` gets ledger.jsonl, metrics.jsonl and checkpoints only, and `dataset` may also be Rows, whose `record`
    says which rows form one record.
    """
    rank = ranks.current()
    with ranks.watched(rank), ranks.leading(rank), ranks.noticing_closed(rank):
        with reporting(rank):
            check_asked(model, loss, dataset, plan, optimizer=optimizer, lr=lr, settings=settings, callbacks=callbacks)
            dataset = mapped(dataset)
            if collate is not None or num_workers:
                dataset = collated(dataset, collate, checks.whole("num_workers", num_workers))
            dataset = whole = fitted(model, loss, dataset)
            dataset = unit_dataset(plan, dataset, users)
            if first is not None and plan.unit == "user":
                raise Refused("statistics of single rows are not bounded for a user who has several: leave out `first`")
            job, guarantee = _job(
                model, loss, dataset, plan, optimizer=optimizer, lr=lr, settings=settings, evaluate=evaluate, out=out,
                resume=resume, watch=watch, public=public, callbacks=callbacks, whole=whole,
            )  # fmt: skip
            wrong = rows_not_finite(whole)

        def remade(copied: nn.Module) -> Update:
            return chosen_update(plan, copied, loss, optimizer, lr, job.settings, public)

        job, source = _ready(job, loss, guarantee, whole, remade)
        if rank is None or rank.leads:
            tell_not_finite(wrong)
        result = fit(job, source, guarantee, resume=resume, first=first)
        return replace(result, not_private={**result.not_private, "rows_not_finite": wrong}) if wrong else result


def _job(
    model: nn.Module,
    loss: Loss,
    dataset: Any,
    plan: Plan,
    *,
    optimizer: Callable[..., Optimizer] | None,
    lr: float | None,
    settings: Settings | None,
    evaluate: Evaluate | None,
    out: Path | str | None,
    resume: bool,
    watch: Reader | None,
    public: Any,
    callbacks: Sequence[Any],
    whole: Any,
) -> tuple[Job, Guarantee]:
    """The checked arguments of `train`, and the plan's guarantee; nothing has been written or sent yet."""
    settings = settings or Settings()
    folder = Path(out) if out is not None else None
    checks.refuse_empty_delta(plan.delta, plan.records)
    check_declared(plan)
    check_records(plan, count_records(dataset))
    refuse_undeclared(plan, replace(plan.contribution, companions=companions_of(model)))
    refuse_shared_companions(model, splits(dataset))
    if resume and folder is None:
        raise InputError("resume needs the directory of the run: give out=")
    checks.function("evaluate", evaluate, "of the model that returns a dict of numbers")
    update = chosen_update(plan, model, loss, optimizer, lr, settings, public)
    watching = checked(callbacks, plan, settings.eval_every)
    guarantee = plan.guarantee()  # raises before anything is read if there is none
    settings = _checkpoints(plan, settings)
    update.check(dataset)
    if not is_sharded(refuse_wrapped(model)):
        check_fits(model, loss, whole)
    fingerprint = fingerprint_of(plan, settings, update, public)
    job = Job(
        model, dataset, plan, update, settings, evaluate, folder, fingerprint, watch=watch, callbacks=watching
    )  # fmt: skip
    return job, guarantee


def _ready(
    job: Job, loss: Loss, guarantee: Guarantee, whole: Any, remade: Callable[[nn.Module], Update]
) -> tuple[Job, RandomSource]:
    """The job after the ranks have agreed on it and the first batch was checked; all ranks call this together.

    whole: the rows of the dataset, not grouped by user. remade: the update for a copy of the model.
    """
    model, plan, rank, source, store = job.model, job.plan, ranks.current(), job.plan.source(), None
    same = f"{job.fingerprint} {job.settings.chunk}"
    checkpoints = None if job.folder is None else job.folder / "checkpoint"
    seen = agree(rank, same, model, job.dataset, checkpoints, job.settings.progress)
    if is_sharded(model):
        check_fits(model, loss, whole)  # fully_shard gathers: no rank may be missing
        store = Store(model, ranks.of_group())
        job.update.divide(store)
    job = replace(job, store=store, seen=seen)
    job.loop().rehearse()  # finds an optimizer that fails on its settings before anything is written
    _check_grid(plan, model)
    check_evaluation(job)
    seconds = None
    if rank is None or rank.leads:
        check_items(whole)
        check_first_batch(model, loss, job.dataset, plan, source, job.settings, store)
        if store is None and job.settings.progress is not False:
            seconds = rehearsed_seconds(job, remade)
    return replace(job, said=header(plan, guarantee, seconds, evaluates=evaluates(job))), source


def fit(job: Job, source: RandomSource, guarantee: Guarantee, *, resume: bool, first: First | None = None) -> Result:
    """The training loop: ledger, checkpoint, private steps, result. `train` checks the arguments.

    In a process group all ranks call it: rank 0 makes the run, the others sum chunks of its batches and receive its
    weights and metrics at the end.
    """
    rank = ranks.current()
    if job.store is not None and first is None:
        return _fit_sharded(job, job.store, source, guarantee, resume=resume)
    if rank is None:
        return _fit(job, source, guarantee, None, resume=resume, first=first)
    if first is not None:
        raise Refused(
            "private statistics of the data are released by one process, and their result would have to be sent to the "
            "others: run without torchrun, or with public statistics"
        )
    if not rank.leads:
        return _followed(job, rank, guarantee)
    with ranks.leading(rank):
        result = _fit(job, source, guarantee, rank, resume=resume, first=None)
    rank.tell(ranks.Ended(None, result.metrics, result.seconds, result.skipped_steps))
    rank.copy_from_leader([*job.model.parameters(), *job.model.buffers()])
    return result


def _fit_sharded(job: Job, store: Store, source: RandomSource, guarantee: Guarantee, *, resume: bool) -> Result:
    """The run of a sharded model: all ranks make it together, and each has its shards at the end."""
    rank = store.rank
    heard(rank, ranks.Begin())  # the leader has checked the first batch, or ends the run here
    copy_buffers(job.model, rank)
    if rank.leads:
        with ranks.leading(rank):
            result = _fit(job, source, guarantee, rank, resume=resume, first=None)
        rank.tell(ranks.Ended(None, result.metrics, result.seconds, result.skipped_steps))
        store.close()
        return result
    loop = job.loop()
    state = loop.restore()
    made = job.update.gradient_sum(job.dataset, past=lambda: loop.past, seed=job.settings.seed)
    inner = sharded(made, job.plan, store)
    job.update.begin(state.scalars, None)
    state = replace(state, step=heard(rank))
    loop.run(followed_steps(job.plan, inner, store, source, loop), state, None)
    told = ranks.end(rank.tell())
    store.close()
    return Result(job.model, guarantee, told.metrics, told.seconds, told.skipped_steps, {})


def _followed(job: Job, rank: ranks.Rank, guarantee: Guarantee) -> Result:
    """A follower's run: sums chunks of the leader's batches until the leader is done."""
    past = ranks.SentPast()
    gradient_sum = _divisible(job.update.gradient_sum(job.dataset, past=past, seed=job.settings.seed), job.plan)
    with Stopping():  # a signal to all ranks ends the leader after its step; the leader then ends the others
        told = ranks.end(ranks.follow(gradient_sum, job.model, rank, past))
    rank.copy_from_leader([*job.model.parameters(), *job.model.buffers()])
    return Result(job.model, guarantee, told.metrics, told.seconds, told.skipped_steps, {})


def _check_grid(plan: Plan, model: nn.Module) -> None:
    """Refuses noise that has no grid for so many coordinates, before a ledger exists; the release would refuse it
    later."""
    coordinates = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    for step in {0, plan.steps - 1} if coordinates else ():
        release_grid(plan.noise_at(step), plan.sensitivity, coordinates)


def _divisible(gradient_sum: GradientSum, plan: Plan) -> Divisible:
    """The gradient sum if its chunks can be summed by several processes; else Refused."""
    if not isinstance(gradient_sum, Divisible):
        raise Refused(
            f"this plan of the method {plan.method.name} sums its records in one process "
            f"({type(gradient_sum).__name__}): run it without torchrun"
        )
    return gradient_sum


def _fit(
    job: Job, source: RandomSource, guarantee: Guarantee, rank: ranks.Rank | None, *, resume: bool, first: First | None
) -> Result:
    plan, folder, settings, loop = job.plan, job.folder, job.settings, job.loop()
    if folder is not None:
        make_folder(folder)
    with Ledger.open(folder / "ledger.jsonl" if folder else None, plan.to_dict()) as ledger:
        done = ledger.last_step("gradient") + 1
        if done and not resume:
            raise InputError(f"{folder} already contains a run: resume it, or give another directory")
        if done:
            _refuse_unresumable(plan, source)
            _require_contiguous(plan, ledger)
        ledger.guard(Explained(plan, ledger.entries))
        loop.ledger = ledger
        if loop.checkpoints is not None and settings.saves:
            bind(loop.checkpoints, ledger, job.dataset, progress=settings.progress, known=job.seen)
        state = loop.restore()
        dataset = first(job.dataset, source, ledger) if first is not None else job.dataset
        records = count_records(dataset)
        start = state.step if not source.secure else _next_start(plan, max(state.step, done))
        gradient_sum = job.update.gradient_sum(dataset, past=lambda: loop.past, seed=settings.seed)
        inner = None if job.store is None else sharded(gradient_sum, plan, job.store)
        if inner is not None:
            gradient_sum = inner
        elif rank is not None:
            gradient_sum = ranks.Divided(_divisible(gradient_sum, plan), job.model, rank, lambda: loop.past)
        counted = Counted(gradient_sum)
        job.update.begin(state.scalars, Running(source, ledger, records, settings.chunk))
        steps = private_steps(
            plan, counted, records=records, source=source, ledger=ledger, chunk=settings.chunk, start=start,
            widths=job.update.widths(loop.optimizer),
        )  # fmt: skip
        if job.store is not None and inner is not None:
            heard(job.store.rank, start)
            drawn = plan_batches(plan, records=records, source=source, chunk=settings.chunk, start=start)
            steps = led_steps(plan, inner, job.store, drawn, source, ledger, loop, counted)
        skipped = int(state.scalars.get("skipped_steps", 0)) + start - state.step
        say(job.said or header(plan, guarantee, None), settings.progress)
        state = replace(state, step=start, scalars={**state.scalars, "skipped_steps": skipped})
        with told_of_failure(job.callbacks):
            for callback in job.callbacks:
                callback.begin(plan, guarantee)
            ran = loop.run(steps, state, plan)
        histogram = release_histogram(
            plan, counted, records=records, source=source, ledger=ledger, chunk=settings.chunk
        )
    if ran.stopped_at is not None:
        guarantee = stopped(guarantee, plan, ran.stopped_at, settings.eval_every)
    apart = {"instruments": list(ran.readings)} if ran.readings else {}
    not_private = {**apart, "dropped_records": counted.dropped}
    return Result(
        job.model, guarantee, ran.metrics, ran.seconds, ran.skipped_steps, not_private, histogram, ran.stopped_at
    )  # fmt: skip


def train_without_noise(
    model: nn.Module,
    loss: Loss,
    dataset: Any,
    plan: Plan,
    *,
    optimizer: Callable[..., Optimizer] | None = None,
    lr: float | None = None,
    settings: Settings | None = None,
    evaluate: Evaluate | None = None,
    public: Any = None,
) -> Result:
    """The same run with the same sampling and clipping but no noise, for comparison. It has NO guarantee.

    For public data only: its results, including its accuracy, are not private. `sordino.train` documents the arguments.
    """
    settings = settings or Settings()
    update = chosen_update(plan, model, loss, optimizer, lr, settings, public)
    update.check(dataset)
    return fit_without_noise(Job(model, dataset, plan, update, settings, evaluate, label="without noise"))


def fit_without_noise(job: Job) -> Result:
    """`fit` without noise, ledger and checkpoints: NO guarantee."""
    plan, loop, source = job.plan, job.loop(), RandomSource.seeded(job.settings.seed)
    gradient_sum = job.update.gradient_sum(job.dataset, past=lambda: loop.past, seed=job.settings.seed)

    def steps() -> Iterator[PrivateStep]:
        drawn = plan_batches(plan, records=count_records(job.dataset), source=source, chunk=job.settings.chunk)
        for batch in drawn:
            sums = summed(gradient_sum, batch, source).sums
            yield PrivateStep(batch.step, {name: value / plan.divisor for name, value in sums.items()})

    job.update.begin({}, None)
    ran = loop.run(steps(), loop.restore(), None)
    return Result(job.model, None, ran.metrics, ran.seconds, ran.skipped_steps, {})


def _next_start(plan: Plan, done: int) -> int:
    """The step at which a run with a new key continues: the next epoch if it ended within one of random allocation."""
    batches = cycle(plan.sampling)
    return min(-(-done // batches) * batches, plan.steps)


def _refuse_unresumable(plan: Plan, source: RandomSource) -> None:
    """Refuses to resume a run whose key, or whose records' momenta, are not stored on disk but would be needed."""
    if source.secure and isinstance(plan.sampling, Partition):
        raise Refused(
            "a run with partition sampling and secure noise can't be resumed: its shuffle was lost with its key, and "
            "under another key a record could take part twice in an epoch; start again, or use poisson sampling"
        )
    if plan.contribution.record_momentum is not None:
        raise Refused(
            "a run with the momentum of single records can't be resumed: the momenta are private, so no checkpoint "
            "contains them; start again in another directory, or use inner_length and inner_decay"
        )


def _require_contiguous(plan: Plan, ledger: Ledger) -> None:
    """InputError if steps are missing in the ledger, or out of order."""
    steps = [entry["step"] for entry in ledger.entries if entry["purpose"] == "gradient"]
    if (missing := missing_step(plan, steps)) is not None:
        raise InputError(
            f"{ledger.path}: step {missing} is missing or out of order: the ledger was edited or damaged; restore "
            "it from a copy, or start again in another directory"
        )


def _checkpoints(plan: Plan, settings: Settings) -> Settings:
    """No checkpoints for a run that can't be resumed from them."""
    if plan.contribution.record_momentum is None:
        return settings
    return replace(settings, checkpoint_every=0, checkpoint_minutes=math.inf)
