"""Training: private steps into any torch optimizer, with evaluation, checkpoints and resume.

Formal guarantee: everything this module writes or returns, but for the `not_private` field of the result,
is a function of values released through `sordino.release` (and of public data), so `plan.guarantee()` holds
for all of it together, for an adversary who sees every iterate.

Killed at any moment and resumed:
- with an `insecure_seed`, the steps since the last checkpoint are made again, bit for bit, and the ledger
  recognises them; the run ends with the same weights as one that was never killed;
- with secure noise, no step that the ledger holds is ever drawn again: those whose update was lost are
  skipped. The number of releases, and ε, stay those of the plan, and no key has to lie on disk.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from sordino.batchclipping import refuse_undeclared
from sordino.coupling import Companion, PublicUse
from sordino.errors import InputError, Refused
from sordino.gradients import ClippedSum, verify
from sordino.histogram import NormHistogram, release_histogram
from sordino.instruments import Watch
from sordino.ledger import Ledger
from sordino.loop import Loop, Update
from sordino.methods import DPSGD, Coupling
from sordino.methods.base import AddsUniformNoise, HasItsOwnTraining, HoldsStepSizes
from sordino.mixing import mixing_widths
from sordino.momentum import made_up_past
from sordino.plan import Guarantee, Plan
from sordino.randomness import RandomSource
from sordino.sampling import LogicalBatch, Partition
from sordino.steps import (
    DEFAULT_CHUNK,
    GradientSum,
    PrivateStep,
    Widths,
    check_records,
    count_records,
    plan_batches,
    plan_gradients,
    private_steps,
    record_gradients,
    splits,
    summed,
)
from sordino.updates import Averaging, AveragingSGD

Loss = Callable[..., Tensor]
Evaluate = Callable[[nn.Module], Mapping[str, float]]


@dataclass(frozen=True)
class Settings:
    """How to train, as far as the guarantee does not depend on it (all of it is post-processing)."""

    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    averaging: Averaging = field(default_factory=Averaging)
    chunk: int = DEFAULT_CHUNK  # records in memory at once
    eval_every: int = 0  # steps; 0: at the end only
    checkpoint_every: int = 100  # steps; 0: never
    checkpoint_minutes: float = 5.0  # whichever comes first
    seed: int = 0  # of views and other public randomness; never of noise, sampling or dropout
    progress: bool | None = None  # None: when standard error is a terminal

    def __post_init__(self) -> None:
        for name in ("chunk", "eval_every", "checkpoint_every"):
            value, least = getattr(self, name), 1 if name == "chunk" else 0
            if not isinstance(value, int) or value < least:
                raise InputError(f"{name} = {value!r} must be a whole number, at least {least}")
        if not self.checkpoint_minutes > 0:
            raise InputError(f"checkpoint_minutes = {self.checkpoint_minutes!r} must be positive")


@dataclass(frozen=True)
class Result:
    """A trained model and what may be said of it. `not_private` is for your eyes only: no guarantee covers it."""

    model: nn.Module
    guarantee: Guarantee | None
    metrics: tuple[Mapping[str, float], ...]
    seconds: float
    skipped_steps: int
    not_private: Mapping[str, Any]
    histogram: NormHistogram | None = None


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
    first: Callable[[Any, RandomSource, Ledger], Any] | None = None,
    watch: Watch | None = None,
    public: PublicUse | None = None,
) -> Result:
    """Trains `model` in place under `plan` and returns it with its guarantee.

    `optimizer` (default: SGD) and `lr` are free under DP-SGD. A plan whose guarantee depends on the update (ModelMix)
    holds the step sizes itself and brings the update: then both must be left out.
    `loss(outputs, targets)` gives one value per row. `dataset`: a pair of tensors, or a map-style dataset of
    (inputs, target). `evaluate(model)` must look at public or held-out data only: what it returns is logged.
    `out`: a directory for ledger.jsonl, metrics.jsonl and checkpoints; without it the ledger is in memory.
    `first` makes the plan's statistics from the dataset and gives back the one to train on (private normalisation).
    `watch` reads the weights as they go (sordino.instruments) and changes nothing: the run ends with the same bits.
    `public`: the rows that a coupling plan declares public, and their use (sordino.coupling); ε does not depend on it.
    """
    settings = settings or Settings()
    folder = Path(out) if out is not None else None
    check_records(plan, count_records(dataset))
    refuse_undeclared(plan, model, splits(dataset))
    if resume and folder is None:
        raise InputError("resume needs the directory of the run: give out=")
    update = _update(plan, optimizer, lr, settings)
    guarantee = plan.guarantee()
    settings = _checkpoints(plan, settings)
    companion = _companion(plan, model, loss, dataset, public)
    fingerprint = _fingerprint(plan, settings, update, public)
    loop = Loop(model, update, settings, plan, evaluate, folder, fingerprint, watch=watch, companion=companion)
    source = plan.source()
    _check_first_batch(model, loss, dataset, plan, source, settings.seed)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with Ledger.open(folder / "ledger.jsonl" if folder else None, plan.to_dict()) as ledger:
        done = ledger.last_step("gradient") + 1
        if done and not resume:
            raise InputError(f"{folder} holds a run already: resume it, or give another directory")
        if done:
            _refuse_unresumable(plan, source)
        dataset = first(dataset, source, ledger) if first is not None else dataset
        state = loop.restore()
        start = state.step if not source.secure else max(state.step, done)
        counted = _Counter(_gradient_sum(plan, model, loss, dataset, loop, companion))
        steps = private_steps(
            plan,
            counted,
            records=count_records(dataset),
            source=source,
            ledger=ledger,
            chunk=settings.chunk,
            start=start,
            widths=_widths(plan, model, loop.optimizer),
        )
        if companion is not None:
            companion.begin(state.scalars)
            steps = companion.around(steps)
        skipped = int(state.scalars.get("skipped_steps", 0)) + start - state.step
        ran = loop.run(steps, replace(state, step=start, scalars={**state.scalars, "skipped_steps": skipped}), plan)
        histogram = release_histogram(
            plan, counted, records=count_records(dataset), source=source, ledger=ledger, chunk=settings.chunk
        )
    apart = {"instruments": list(ran.readings)} if ran.readings else {}
    not_private = {**apart, "dropped_records": counted.dropped}
    return Result(model, guarantee, ran.metrics, ran.seconds, ran.skipped_steps, not_private, histogram)


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
    public: PublicUse | None = None,
) -> Result:
    """The same run with the same sampling and clipping, and no noise: a yardstick, with NO guarantee.

    For public data only: whatever comes out of it, its accuracy included, is not private.
    """
    settings = settings or Settings()
    update = _update(plan, optimizer, lr, settings)
    companion = _companion(plan, model, loss, dataset, public)
    loop = Loop(model, update, settings, plan, evaluate, None, "", "without noise", companion=companion)
    source = RandomSource.seeded(settings.seed)
    gradient_sum = _gradient_sum(plan, model, loss, dataset, loop, companion)

    def steps() -> Iterator[PrivateStep]:
        for batch in plan_batches(plan, records=count_records(dataset), source=source, chunk=settings.chunk):
            sums = summed(gradient_sum, batch, source).sums
            yield PrivateStep(batch.step, {name: value / plan.divisor for name, value in sums.items()})

    if companion is not None:
        companion.begin({})
    made = companion.around(steps()) if companion is not None else steps()
    ran = loop.run(made, loop.restore(), None)
    return Result(model, None, ran.metrics, ran.seconds, ran.skipped_steps, {})


def _update(plan: Plan, optimizer: Callable[..., Optimizer] | None, lr: float | None, settings: Settings) -> Update:
    """What the caller chose, where that is free; what the plan prescribes, where its guarantee depends on it."""
    method = plan.method
    if isinstance(method, HasItsOwnTraining):
        raise Refused(
            f"the guarantee of {method.name} is that of its own training: use {method.trained_by}, or a recipe"
        )
    if not isinstance(method, HoldsStepSizes):
        if lr is None:
            raise InputError("give lr, the step size")
        return Update(optimizer or torch.optim.SGD, lr)
    given = {
        "an optimizer": optimizer is not None,
        "lr": lr is not None,
        "a scheduler": settings.scheduler is not None,
        **dict.fromkeys(settings.optimizer_options, True),
    }
    if any(given.values()):
        raise Refused(
            f"the guarantee of {method.name} depends on the update, so the plan holds it: leave out "
            f"{', '.join(name for name, is_given in given.items() if is_given)}; step sizes are a schedule of the "
            "plan, and momentum, Adam and weight decay are not covered by its proof"
        )
    rates = tuple(float(rate) for rate in method.lr.over(plan.steps))
    return Update(AveragingSGD if isinstance(method, AddsUniformNoise) else torch.optim.SGD, rates[0], rates)


def _widths(plan: Plan, model: nn.Module, optimizer: Optimizer) -> Widths | None:
    mixes = isinstance(plan.method, AddsUniformNoise) and isinstance(optimizer, AveragingSGD)
    return mixing_widths(plan, model, optimizer) if mixes else None  # type: ignore[arg-type]


class _Counter:
    """A gradient sum that counts dropped records on the way."""

    def __init__(self, gradient_sum: GradientSum) -> None:
        self._gradient_sum = gradient_sum
        self.dropped = 0

    def __call__(self, batch: LogicalBatch) -> ClippedSum:
        total = self._gradient_sum(batch)
        self.dropped += total.dropped
        return total


def _method(plan: Plan) -> DPSGD:
    """What the plan states of a record's vector; plain where the method is another than DP-SGD."""
    return plan.method if isinstance(plan.method, DPSGD) else DPSGD()


def _companion(plan: Plan, model: nn.Module, loss: Loss, dataset: Any, public: PublicUse | None) -> Companion | None:
    """What uses the public rows; Refused where plan and rows do not belong together, or a private row is public."""
    if public is not None:
        companion = Companion(public, plan, model, loss)
        companion.check_private(dataset)
        return companion
    if isinstance(plan.method, Coupling):
        raise Refused("a coupling plan is trained beside its public rows: give public=PublicUse(rows, rule=…)")
    return None


def _gradient_sum(
    plan: Plan, model: nn.Module, loss: Loss, dataset: Any, loop: Loop, companion: Companion | None
) -> GradientSum:
    if companion is not None:
        return companion.gradient_sum(dataset)
    return plan_gradients(plan, model, loss, dataset, past=lambda: loop.past, seed=loop.settings.seed)


def _refuse_unresumable(plan: Plan, source: RandomSource) -> None:
    """Refuses to go on with a run that would need what is on no disk: its key, or the momenta of its records."""
    if source.secure and isinstance(plan.sampling, Partition):
        raise Refused(
            "a run with partition sampling and secure noise can't be resumed: its shuffle died with its key, and "
            "under another a record could take part twice in an epoch; start anew, or use poisson sampling"
        )
    if _method(plan).record_momentum is not None:
        raise Refused(
            "a run with the momentum of single records can't be resumed: the momenta are private, so no checkpoint "
            "holds them; start anew in another directory, or use inner_length and inner_decay"
        )


def _checkpoints(plan: Plan, settings: Settings) -> Settings:
    """No checkpoints of a run that could not go on from them."""
    if _method(plan).record_momentum is None:
        return settings
    return replace(settings, checkpoint_every=0, checkpoint_minutes=math.inf)


def _check_first_batch(model: nn.Module, loss: Loss, dataset: Any, plan: Plan, source: RandomSource, seed: int) -> None:
    """The engine against a brute-force loop on the first batch, with the plan's views, and with iterates made up where
    the plan needs past ones; nothing is written if they differ."""
    records, method = count_records(dataset), _method(plan)
    first = next(plan_batches(plan, records=records, source=source, chunk=64))
    some = first.indices[:64] if len(first.indices) else torch.arange(min(records, 64))
    if len(some):
        views = method.augmentation
        rows = record_gradients(model, loss, dataset, plan.clipping, views=views, seed=seed).rows(some, first.step)
        iterates = None if method.inner is None else made_up_past(model, method.inner).with_present(method.inner)
        verify(model, loss, rows, plan.clipping, iterates=iterates)


def _fingerprint(plan: Plan, settings: Settings, update: Update, public: PublicUse | None) -> str:
    """Identifies the run that a checkpoint belongs to (chunk, progress and checkpoint times may differ)."""
    document = {
        "plan": plan.to_dict(),
        "lr": update.lr,
        "update": getattr(update.optimizer, "__qualname__", type(update.optimizer).__qualname__),
        "optimizer": {name: repr(value) for name, value in settings.optimizer_options.items()},
        "averaging": repr(settings.averaging),
        "seed": settings.seed,
        **({} if public is None else {"public": public.to_dict()}),
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
