"""One private step after another: sample, gradients, clip, release.

`private_steps` is the only way from records to a gradient that an optimizer may see. It reads everything
the guarantee depends on from the plan, so what is accounted is what is run:

    batch  ~ plan.sampling                 (who takes part)
    sums   = gradient_sum(batch)           (every record's gradient bounded by plan.clipping, summed)
    noisy  = release(sums, plan.noise)     (the one door: noise, and the ledger's entry before the value)
    step   = noisy / plan.divisor          (a public constant, never the size of the batch)

A method that counts on uniform noise besides (ModelMix) is told its widths by the caller, who knows the iterates; a
step whose widths are missing, or narrower than the plan's, is refused before anything is released.

The iterator is lazy: the gradients of step t+1 are taken at the weights that the caller has made of step t.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from sordino.batchclipping import refuse_undeclared, with_companions
from sordino.clipping import Clipping
from sordino.data.types import Split
from sordino.errors import InputError, Refused
from sordino.gradients import ClippedSum, Rows, clipped_sum
from sordino.gradients.assurance import Assurance
from sordino.gradients.engine import Iterates
from sordino.gradients.memory import Pool
from sordino.gradients.runs import stable
from sordino.gradients.spectral import advance
from sordino.ledger import Ledger
from sordino.methods import DPSGD, Coupling
from sordino.methods.base import AddsUniformNoise, HidesIterates
from sordino.momentum import PastIterates, RecordMomenta
from sordino.plan import Plan
from sordino.randomness import RandomSource
from sordino.release import Entry, release
from sordino.sampling import LogicalBatch, TruncatedPoisson, batches
from sordino.views import Augmentation, with_views

GradientSum = Callable[[LogicalBatch], ClippedSum]
"""From a logical batch to the sum of its records' clipped gradients. An empty batch gives zeros."""

Widths = Callable[[int], Mapping[str, Tensor]]
"""From a step to the width of the uniform noise on each coordinate, in units of the summed gradient."""

LONGEST_SUM = 4096
"""Records in one pass, however large the chunk."""

DEFAULT_CHUNK = 512
"""Records whose activations are in memory at once, where the caller does not say."""


@dataclass(frozen=True)
class PrivateStep:
    """A released gradient: safe to use, to publish and to post-process in any way."""

    step: int
    gradients: dict[str, Tensor]

    def assign(self, model: nn.Module) -> None:
        """Puts the gradients where any torch optimizer looks for them (`parameter.grad`)."""
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.grad = self.gradients[name].to(parameter.dtype)


def private_steps(
    plan: Plan,
    gradient_sum: GradientSum,
    *,
    records: int,
    source: RandomSource,
    ledger: Ledger,
    chunk: int = DEFAULT_CHUNK,
    start: int = 0,
    widths: Widths | None = None,
) -> Iterator[PrivateStep]:
    """The plan's steps from `start` on. `records` is how many records are there to be sampled from.

    `widths` is asked once for each step, at the weights that its gradients are taken at.
    Edge cases: an empty batch still makes a noisy step; leaving the loop early leaves nothing behind
    but the ledger's entries; a second pass over steps that were already released is refused by the
    ledger (or, with an insecure seed, gives the same values again).
    """
    check_records(plan, records)
    _check_same_plan(plan, gradient_sum, source, ledger)
    _check_uniform(plan, widths)
    for batch in plan_batches(plan, records=records, source=source, chunk=chunk, start=start):
        uniform = None if widths is None else _wide_enough(plan, widths(batch.step), batch.step)
        sums = dict(summed(gradient_sum, batch, source).sums)  # a mapping of our own: who keeps the sums has them still
        noisy = release(
            sums,
            sensitivity=plan.sensitivity,
            norm=plan.clipping.norm,
            noise=plan.noise_at(batch.step),
            source=source,
            ledger=ledger,
            entry=Entry(purpose="gradient", step=batch.step, sampling=plan.sampling.to_dict(), relation=plan.relation),
            widths=uniform,
            factor=1.0 / plan.divisor,
            in_place=True,
        )
        yield PrivateStep(batch.step, noisy)


def summed(gradient_sum: GradientSum, batch: LogicalBatch, source: RandomSource) -> ClippedSum:
    """The sum over a batch, with torch's random numbers (dropout masks) drawn from the run's own source.

    So masks are as secret as batches. A mask belongs to a place in the batch: were its seed public, taking one record
    out would give all later ones other masks, and move the sum by more than a record's share. With secret masks the
    two runs are compared with each record keeping its own (docs/guarantees/clipping_bias.md).
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(source.stream("dropout", batch.step).bits64(1)[0]) >> 1)
        return gradient_sum(batch)


def _check_uniform(plan: Plan, widths: Widths | None) -> None:
    """Uniform noise where the guarantee counts on it, and only there."""
    if isinstance(plan.method, AddsUniformNoise) and widths is None:
        raise Refused(
            f"the guarantee of {plan.method.name} counts on uniform noise on every coordinate: give `widths` "
            "(sordino.mixing.mixing_widths takes them from the last two iterates)"
        )
    if widths is not None and not isinstance(plan.method, AddsUniformNoise):
        raise Refused(f"the method {plan.method.name} does not account for uniform noise: leave out `widths`")


def _wide_enough(plan: Plan, given: Mapping[str, Tensor], step: int) -> Mapping[str, Tensor]:
    """The widths of a step; Refused where the gap that the guarantee counts on is not there."""
    assert isinstance(plan.method, AddsUniformNoise)
    least = plan.method.least_width(plan, step)
    for name, value in given.items():
        if value.numel() and not float(value.min()) >= least:  # a NaN is not
            raise Refused(
                f"step {step}: the uniform noise on {name!r} has width {float(value.min()):g}, the guarantee of "
                f"{plan.method.name} counts on {least:g} at least: the gap between the iterates was not enforced"
            )
    return given


def _check_same_plan(plan: Plan, gradient_sum: GradientSum, source: RandomSource, ledger: Ledger) -> None:
    """What is summed and what is written down must belong to the plan that is accounted."""
    if isinstance(plan.method, HidesIterates):
        raise Refused(
            f"the guarantee of {plan.method.name} covers {plan.method.publishes} alone, and these steps would hand out "
            "every released gradient: use its own training, or a dpsgd plan"
        )
    refuse_undeclared(plan, getattr(gradient_sum, "model", None))
    clipping = getattr(gradient_sum, "clipping", plan.clipping)
    if clipping != plan.clipping:
        raise Refused(f"the gradients are clipped by {clipping}, the plan accounts for {plan.clipping}: use the plan's")
    planned = plan.method.augmentation if isinstance(plan.method, DPSGD) else None
    if isinstance(gradient_sum, RecordGradients) and gradient_sum.views != planned:
        raise Refused(
            f"the gradients are those of {gradient_sum.views or 'the records themselves'}, the plan states "
            f"{planned or 'the records themselves'}: use plan_gradients, or make the plan with augmentation="
        )
    inner = plan.method.inner if isinstance(plan.method, DPSGD) else None
    if isinstance(gradient_sum, RecordGradients) and (gradient_sum.iterates is None) != (inner is None):
        has, states = ("none", "some") if inner is not None else ("some", "none")
        raise Refused(
            f"the gradients are taken at {has} of the past iterates, the plan states {states}: use plan_gradients, or "
            "make the plan with inner="
        )
    if source.secure != (plan.insecure_seed is None):
        raise Refused("the plan and the random source disagree on whether the noise is secure: use plan.source()")
    if {**ledger.header, "kind": "plan"} != {**json.loads(json.dumps(plan.to_dict())), "kind": "plan"}:
        raise InputError("the ledger was opened for another plan: open it with this plan's to_dict()")


def plan_batches(
    plan: Plan, *, records: int, source: RandomSource, chunk: int = DEFAULT_CHUNK, start: int = 0
) -> Iterator[LogicalBatch]:
    """The logical batches of the plan, drawn by the sampler that the accountant was told of."""
    return batches(plan.sampling, records=records, steps=plan.steps, source=source, chunk=chunk, start=start)


def check_records(plan: Plan, records: int) -> None:
    """The plan's public number of records against the data's.

    Under add/remove the true number is itself private, and nothing that is released depends on it: rate
    and divisor are the plan's. A number that is far off is a mistake, though, and is said to be one.
    Under replace-one the number is public and must be exact, for the batches are cut from it; a cap on the batch is
    accounted for at most the plan's number.
    """
    exact = plan.relation == "replace-one"
    if records > plan.records and isinstance(plan.sampling, TruncatedPoisson):
        raise InputError(
            f"the dataset has {records} records, more than the plan's {plan.records}: how often the cap cuts in was "
            f"accounted for that many at most; make the plan with records={records} or more"
        )
    if records != plan.records and (exact or abs(records - plan.records) > 0.1 * plan.records):
        raise InputError(
            f"the plan is for {plan.records} records but the dataset has {records}: "
            f"make the plan with records={records}"
            + (" (under replace-one the number of records is public and must be exact)" if exact else "")
        )


def record_gradients(
    model: nn.Module,
    loss: Callable[..., Tensor],
    dataset: Any,
    clipping: Clipping,
    *,
    views: Augmentation | None = None,
    iterates: Callable[[], Iterates] | None = None,
    seed: int = 0,
) -> RecordGradients:
    """The clipped sum of each batch of `dataset`, chunk by chunk, at the model's weights of that moment.

    `dataset`: a pair of tensors (inputs, targets), anything with `.inputs` and `.targets`, or a map-style
    torch dataset of (inputs, target) pairs. Memory is bounded by the batch's chunk, in rows.
    `views`: each record is the mean over that many random views of it, drawn by the public `seed` and the step.
    `iterates`: asked before each batch for (weights, factor) pairs; a record's vector is the sum over them. The weights
    must be public (released before, or made of what was). Either way a record's vector is clipped once.
    """
    return RecordGradients(model, loss, row_reader(dataset), clipping, views, iterates, seed)


@dataclass(frozen=True, eq=False)
class RecordGradients:
    """A gradient sum that knows how it bounds each record, so that `private_steps` can refuse the wrong one."""

    model: nn.Module
    loss: Callable[..., Tensor]
    fetch: Callable[[Tensor], Rows]
    clipping: Clipping
    views: Augmentation | None = None
    iterates: Callable[[], Iterates] | None = None
    seed: int = 0
    pool: Pool = field(default_factory=Pool, repr=False)  # the memory of the last step's products, for the next one's
    assurance: Assurance = field(default_factory=Assurance, repr=False)  # what was checked of the model's programs

    def rows(self, indices: Tensor, step: int) -> Rows:
        """The rows of these records, all views of them, at this step; with companions where the model takes any."""
        rows = self.fetch(indices)
        rows = rows if self.views is None else with_views(rows, self.views, seed=self.seed, step=step)
        return with_companions(rows, self.model, seed=self.seed, step=step)

    def __call__(self, batch: LogicalBatch) -> ClippedSum:
        advance(self.model)
        total = empty_sum(self.model)
        iterates = None if self.iterates is None else self.iterates()
        most = LONGEST_SUM if self.views is None else max(1, min(LONGEST_SUM, batch.chunk) // self.views.views)
        for indices in stable_chunks(batch.indices, min(most, batch.chunk)):
            rows, keys = self.rows(indices, batch.step), indices if rising(indices) else None
            kept = {"pool": self.pool, "assurance": self.assurance, "keys": keys}
            part = clipped_sum(self.model, self.loss, rows, self.clipping, iterates=iterates, **kept)
            total = add_sums(total, part)
        return total


def stable_chunks(indices: Tensor, most: int) -> Sequence[Tensor]:
    """The records of a batch, at most so many at a time: with one record less, the other chunks stay as they are."""
    if not len(indices) or not rising(indices):  # a batch that somebody made by hand
        return torch.split(indices, most) if len(indices) else ()
    return torch.split(indices, np.diff(stable(indices.numpy(), most)).tolist())


def rising(indices: Tensor) -> bool:
    """Can they be the keys of records?"""
    return bool((np.diff(indices.numpy(), prepend=-1) > 0).all())


def plan_gradients(
    plan: Plan,
    model: nn.Module,
    loss: Callable[..., Tensor],
    dataset: Any,
    *,
    past: Callable[[], PastIterates] = PastIterates,
    seed: int = 0,
) -> RecordGradients | RecordMomenta:
    """The gradient sum that the plan states: its clipping, views, inner momentum or momentum of single records.

    `past`: the iterates before the present one, asked at each batch; who steps the weights keeps them.
    """
    method = plan.method if isinstance(plan.method, DPSGD) else DPSGD()
    if isinstance(method, Coupling) and (method.centring or method.quantile is not None):
        raise Refused(
            "the plan states gradients that are centred or scaled by what public rows say: give train these rows "
            "(public=), or use sordino.coupling.Companion.gradient_sum"
        )
    inner = method.inner
    iterates = None if inner is None else lambda: past().with_present(inner)
    made = record_gradients(
        model, loss, dataset, plan.clipping, views=method.augmentation, iterates=iterates, seed=seed
    )
    if method.record_momentum is None:
        return made
    return RecordMomenta(model, loss, made.rows, plan.clipping, method.record_momentum, count_records(dataset))


def empty_sum(model: nn.Module) -> ClippedSum:
    """The sum over no records: zeros in the shape of every trainable parameter."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return ClippedSum(
        sums={name: torch.zeros(p.shape, dtype=torch.float64, device=p.device) for name, p in trainable.items()},
        norms=torch.zeros(0),
        dropped=0,
        losses=torch.zeros(0),
    )


def add_sums(left: ClippedSum, right: ClippedSum) -> ClippedSum:
    """The sum over the records of both, in double precision (docs/guarantees/noise.md, section 6)."""
    if not len(left.norms):
        return right
    return ClippedSum(
        sums={name: value.double() + right.sums[name] for name, value in left.sums.items()},
        norms=torch.cat([left.norms, right.norms]),
        dropped=left.dropped + right.dropped,
        losses=torch.cat([left.losses, right.losses]),
    )


def row_reader(dataset: Any) -> Callable[[Tensor], Rows]:
    """From record indices to rows, without copying what can be indexed."""
    pair = tensors_of(dataset)
    if pair is not None:
        inputs, targets = pair
        return lambda indices: Rows(inputs=take(inputs, indices), targets=take(targets, indices))
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise InputError(
            f"a {type(dataset).__name__} can't be sampled record by record: give a pair (inputs, targets) "
            "or a map-style dataset with __len__ and __getitem__ (an iterable dataset can't be Poisson sampled)"
        )

    def fetch(indices: Tensor) -> Rows:
        collated: Sequence[Any] = default_collate([dataset[i] for i in indices.tolist()])
        if not isinstance(collated, Sequence) or len(collated) != 2:
            raise InputError("each item of the dataset must be a pair (inputs, target)")
        return Rows(inputs=collated[0], targets=collated[1])

    return fetch


def splits(dataset: Any, size: int = 1024) -> Iterator[Split]:
    """The whole dataset, some rows at a time."""
    fetch = row_reader(dataset)
    for indices in torch.split(torch.arange(count_records(dataset)), size):
        rows = fetch(indices)
        yield Split(rows.inputs, rows.targets)


def tensors_of(dataset: Any) -> tuple[Any, Any] | None:
    """(inputs, targets) where the dataset holds them as tensors (or trees of tensors), else None."""
    if hasattr(dataset, "inputs") and hasattr(dataset, "targets"):
        return dataset.inputs, dataset.targets
    if isinstance(dataset, torch.utils.data.TensorDataset) and len(dataset.tensors) == 2:
        return dataset.tensors[0], dataset.tensors[1]
    if isinstance(dataset, tuple | list) and len(dataset) == 2 and isinstance(dataset[1], Tensor):
        return dataset[0], dataset[1]
    return None


def take(values: Any, indices: Tensor) -> Any:
    """The rows `indices` of a tensor, or of every tensor in a mapping or sequence."""
    if isinstance(values, Tensor):
        return values[indices]
    if isinstance(values, Mapping):
        return {key: take(value, indices) for key, value in values.items()}
    return type(values)(take(value, indices) for value in values)


def count_records(dataset: Any) -> int:
    """How many records there are. A record is a row here; records of many rows come with their own reader."""
    pair = tensors_of(dataset)
    return len(pair[1]) if pair is not None else len(dataset)
