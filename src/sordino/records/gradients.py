"""Gradient sums: functions from a batch to the sum of its records' bounded vectors.

A gradient sum *states* how it bounds a record (`clipping`) and what the record's vector consists of (`contribution`),
so that `private_steps` can refuse one that differs from the plan. A wrapper of a gradient sum passes both on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from sordino.clipping import Clipping
from sordino.gradients import ClippedSum, Rows, clipped_sum
from sordino.gradients.checks.assurance import Assurance
from sordino.gradients.engine import Iterates, narrowest
from sordino.gradients.rows import placed
from sordino.gradients.shards import Shards
from sordino.gradients.spectral import advance
from sordino.gradients.survey import trainable
from sordino.plan.contribution import Augmentation, Contribution, InnerMomentum
from sordino.plan.core import Plan
from sordino.randomness.masks import masks_of
from sordino.records.ahead import Part, ReadingAhead, one_ahead
from sordino.records.chunks import LONGEST_SUM, rising, stable_chunks
from sordino.records.companions import companions_of, with_companions
from sordino.records.momentum import PastIterates, RecordMomenta
from sordino.records.precision import refuse_half
from sordino.records.reading import Collated, RowReader, count_records, row_reader
from sordino.records.users import Protects, UserRows, protects
from sordino.records.views import with_views
from sordino.sampling import LogicalBatch


@runtime_checkable
class GradientSum(Protocol):
    """Maps a batch to the sum of its records' bounded vectors. An empty batch gives zeros."""

    @property
    def clipping(self) -> Clipping:
        """The clipping that bounds a record's vector."""

    @property
    def contribution(self) -> Contribution:
        """What a record's vector consists of."""

    def __call__(self, batch: LogicalBatch) -> ClippedSum: ...


@dataclass(frozen=True, eq=False)
class Stated:
    """A user's function as a gradient sum; its author states clipping, contribution and unit.

    The statement can't be checked; `sordino.audit.check_neighbouring` searches for counter-examples.
    """

    function: Callable[[LogicalBatch], ClippedSum]
    clipping: Clipping
    contribution: Contribution = field(default_factory=Contribution)
    protects: Protects = ("record", None)

    def __call__(self, batch: LogicalBatch) -> ClippedSum:
        return self.function(batch)


def stated_unit(gradient_sum: GradientSum) -> Protects:
    """What one record of a gradient sum is: ("record", None) unless the sum states another unit."""
    found: Protects = getattr(gradient_sum, "protects", ("record", None))
    return found


class Wrapper:
    """A gradient sum made from another one, whose clipping, contribution and unit it passes on."""

    def __init__(self, gradient_sum: GradientSum) -> None:
        self._gradient_sum = gradient_sum

    @property
    def clipping(self) -> Clipping:
        return self._gradient_sum.clipping

    @property
    def contribution(self) -> Contribution:
        return self._gradient_sum.contribution

    @property
    def protects(self) -> Protects:
        return stated_unit(self._gradient_sum)


class Counted(Wrapper):
    """Counts dropped records."""

    def __init__(self, gradient_sum: GradientSum) -> None:
        super().__init__(gradient_sum)
        self.dropped = 0

    def __call__(self, batch: LogicalBatch) -> ClippedSum:
        total = self._gradient_sum(batch)
        self.dropped += total.dropped
        return total

    def expect(self, batch: LogicalBatch) -> None:
        """Passes the next batch to a gradient sum that reads its rows in advance."""
        expect = getattr(self._gradient_sum, "expect", None)
        if expect is not None:
            expect(batch)


def record_gradients(
    model: nn.Module,
    loss: Callable[..., Tensor],
    dataset: Any,
    clipping: Clipping,
    *,
    views: Augmentation | None = None,
    inner: InnerMomentum | None = None,
    past: Callable[[], PastIterates] = PastIterates,
    seed: int = 0,
) -> RecordGradients:
    """The clipped sum of each batch of `dataset`, chunk by chunk, at the model's current weights.

    Memory is bounded by the batch's chunk, in rows. A record's vector is clipped once, whatever it consists of.

    Args:
        model: The model that is trained.
        loss: `loss(outputs, targets)` gives one value per row.
        dataset: A pair of tensors (inputs, targets), anything with `.inputs` and `.targets`, or a map-style torch
            dataset of (inputs, target) pairs.
        clipping: How a record's vector is bounded: the plan's clipping.
        views: The record's vector is the mean over several random views, drawn by the public `seed` and the step.
        inner: The record's vector is the sum over the current and past iterates.
        past: Called for the past iterates before each batch; they must depend on released values only.
        seed: The public seed of the views.

    Returns:
        The gradient sum for `private_steps`.
    """
    refuse_half(trainable(model).values())
    most = dataset.rows_per_user if isinstance(dataset, UserRows) else None
    fetch = row_reader(dataset)
    if isinstance(dataset, Collated) and dataset.workers:
        fetch = ReadingAhead(fetch)
    return RecordGradients(
        model, loss, fetch, clipping, views, inner, past, seed, most or 1, protects=protects(dataset)
    )


@dataclass(frozen=True, eq=False)
class RecordGradients:
    """A gradient sum that states how it bounds each record, so that `private_steps` can refuse the wrong one."""

    model: nn.Module
    loss: Callable[..., Tensor]
    fetch: RowReader
    clipping: Clipping
    views: Augmentation | None = None
    inner: InnerMomentum | None = None
    past: Callable[[], PastIterates] = PastIterates
    seed: int = 0
    rows_per_record: int = 1  # public bound on the rows of a record; chunks have that many times fewer records
    assurance: Assurance = field(default_factory=Assurance, repr=False)  # what was checked about the model's programs
    shards: Shards | None = field(default=None, repr=False)  # for a model whose parameters are divided over processes
    most: int = LONGEST_SUM  # largest number of records in a chunk
    protects: Protects = ("record", None)  # the unit of privacy: a record, or a user with all rows or one of them

    @property
    def contribution(self) -> Contribution:
        return Contribution(inner=self.inner, augmentation=self.views, companions=companions_of(self.model))

    def rows(self, indices: Tensor, step: int) -> Rows:
        """The rows of these records and of all their views at this step, with companions if the model uses them."""
        rows = placed(self.fetch(indices, step), self.model)
        rows = rows if self.views is None else with_views(rows, self.views, seed=self.seed, step=step)
        return with_companions(rows, self.model, seed=self.seed, step=step)

    def parts(self, batch: LogicalBatch, seed: int) -> list[Callable[[], ClippedSum]]:
        """One function for each chunk of the batch. They may run in any order and in any process: the results add up to
        the same sum in every order (`on_grid`). Chunks and dropout masks follow from the batch and `seed`."""
        iterates = None if self.inner is None else self.past().with_present(self.inner)
        return in_parts(
            self.pieces(batch), lambda indices: self._part(batch, indices, iterates), self.clipping, len(batch), seed
        )

    def pieces(self, batch: LogicalBatch) -> Sequence[Tensor]:
        """The records of each chunk."""
        rows = self.rows_per_record * (1 if self.views is None else self.views.views)
        most = LONGEST_SUM if rows == 1 else max(1, min(LONGEST_SUM, batch.chunk) // rows)
        return stable_chunks(batch, min(most, self.most))

    def _part(self, batch: LogicalBatch, indices: Tensor, iterates: Iterates | None) -> ClippedSum:
        rows, keys = self.rows(indices, batch.step), indices if rising(indices) else None
        return clipped_sum(
            self.model, self.loss, rows, self.clipping, iterates=iterates, assurance=self.assurance,
            keys=keys, shards=self.shards, narrow=len(indices) == len(batch),
        )  # fmt: skip

    def __call__(self, batch: LogicalBatch) -> ClippedSum:
        self.prepare()
        return total_of(self.model, self.parts(batch, torch.initial_seed()), self.reader(batch.step))

    def reader(self, step: int) -> Callable[[Tensor], None] | None:
        """A function that starts to read records of this step in advance; None if reading takes no time."""
        ahead = self.fetch
        return (lambda indices: ahead.start(indices, step)) if isinstance(ahead, ReadingAhead) else None

    def expect(self, batch: LogicalBatch) -> None:
        """Starts to read the first chunk of the next batch."""
        start = self.reader(batch.step)
        if start is not None and (pieces := self.pieces(batch)):
            start(pieces[0])

    def prepare(self) -> None:
        """Prepares the model once before the chunks of a batch."""
        advance(self.model)

    def over(self, shards: Shards, most: int) -> RecordGradients:
        """The same sum for a model whose parameters are divided over processes, with at most `most` records a chunk."""
        return replace(self, shards=shards, most=min(most, self.most))


@runtime_checkable
class Divisible(GradientSum, Protocol):
    """A gradient sum whose chunks can be summed by several processes, with the same bits as by one."""

    def prepare(self) -> None:
        """Called once before the parts of a batch, by every process."""

    def parts(self, batch: LogicalBatch, seed: int) -> list[Callable[[], ClippedSum]]:
        """One function for each chunk; their sums are exact in double precision, so the order does not matter."""


@runtime_checkable
class Shardable(Divisible, Protocol):
    """A gradient sum of a model whose parameters can be divided over processes."""

    def pieces(self, batch: LogicalBatch) -> Sequence[Tensor]:
        """The records of each chunk."""

    def rows(self, indices: Tensor, step: int) -> Rows:
        """The rows of these records at this step."""

    def over(self, shards: Shards, most: int) -> Shardable:
        """The sum that reads parameters from `shards`, adds to it, and has at most `most` records in a chunk."""


def in_parts(
    pieces: Sequence[Tensor], sum_of: Callable[[Tensor], ClippedSum], clipping: Clipping, records: int, seed: int
) -> list[Callable[[], ClippedSum]]:
    """One function for each chunk of a batch. They may run in any order and in any process: the results add up to the
    same sum in every order (`on_grid`). The dropout masks of a chunk follow from its number and `seed`.

    Args:
        pieces: The records of each chunk.
        sum_of: The function that sums over the records of a chunk.
        clipping: The clipping that bounds a record.
        records: The number of records in the batch.
        seed: The seed of the masks.
    """
    if len(pieces) == 1:
        return [Part(pieces[0], partial(sum_of, pieces[0]))]
    spacing = grid_spacing(clipping.clip_norm, records)

    def make(number: int) -> ClippedSum:
        with masks_of((seed + 0x9E3779B97F4A7C15 * number) % (1 << 63)):
            return on_grid(sum_of(pieces[number]), spacing)

    return [Part(indices, partial(make, number)) for number, indices in enumerate(pieces)]


def total_of(
    model: nn.Module, parts: Sequence[Callable[[], ClippedSum]], start: Callable[[Tensor], None] | None = None
) -> ClippedSum:
    """The sum of all parts. `start` begins to read the records of the next part."""
    total: ClippedSum | None = None
    for part in one_ahead(parts, start):
        total = part() if total is None else add_sums(total, part())
    return empty_sum(model) if total is None else total


def grid_spacing(clip_norm: float, records: int) -> float:
    """The grid of chunk sums: coarse enough that sums over up to 2^16 records (or `records`, if more) are exact.

    It is the same for all batches of at most 2^16 records, so that removing one record changes the rounding of its own
    chunk only (docs/guarantees/noise.md, section 6, theorem 3).
    """
    most = max(records, 1 << 16)
    return math.ldexp(1.0, math.ceil(math.log2(clip_norm)) + (most - 1).bit_length() - 51)


def on_grid(part: ClippedSum, spacing: float) -> ClippedSum:
    """The sums rounded to multiples of `spacing`, a power of two, so that adding them in double precision is exact."""
    magic = 1.5 * spacing * 2.0**52  # adding and subtracting it rounds to multiples of the spacing
    sums = {name: value.double().add(magic).sub_(magic) for name, value in part.sums.items()}
    return replace(part, sums=sums)


def plan_gradients(
    plan: Plan,
    model: nn.Module,
    loss: Callable[..., Tensor],
    dataset: Any,
    *,
    past: Callable[[], PastIterates] = PastIterates,
    seed: int = 0,
    public: Any = None,
) -> GradientSum:
    """The gradient sum that the plan states: its method, its clipping, its contribution.

    Args:
        plan: The plan.
        model: The model; its current weights are used at each batch.
        loss: `loss(outputs, targets)` gives one value per row.
        dataset: As for `record_gradients`.
        past: Returns the iterates before the current one, at each batch; the training loop keeps them.
        seed: The seed of views and other public randomness.
        public: Public rows and their use, for a method that combines them.
    """
    own = plan.method.gradient_sum(plan, model, loss, dataset, past=past, seed=seed, public=public)
    if own is not None:
        return own
    stated = plan.contribution
    made = record_gradients(
        model, loss, dataset, plan.clipping, views=stated.augmentation, inner=stated.inner, past=past, seed=seed
    )
    if stated.record_momentum is None:
        return made
    return RecordMomenta(
        model, loss, made.rows, plan.clipping, stated.record_momentum, count_records(dataset), made.contribution,
        protects=made.protects,
    )  # fmt: skip


def empty_sum(model: nn.Module) -> ClippedSum:
    """The sum over no records: zeros in the shapes of the trainable parameters."""
    return ClippedSum(
        sums={name: torch.zeros(p.shape, dtype=torch.float64, device=p.device) for name, p in trainable(model).items()},
        norms=torch.zeros(0),
        dropped=0,
        losses=torch.zeros(0),
        dtype=narrowest(trainable(model).values()),
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
        dtype=left.dtype if left.dtype == right.dtype else None,
    )
