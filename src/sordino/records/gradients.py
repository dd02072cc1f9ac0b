"""Gradient sums: from a logical batch to the sum of its records' bounded vectors.

A gradient sum *states* how it bounds a record (`clipping`) and what the record's vector is made of (`contribution`), so
that `private_steps` can refuse one that is not the plan's. Whoever wraps a gradient sum passes both on.
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
from sordino.gradients.assurance import Assurance
from sordino.gradients.engine import Iterates, narrowest
from sordino.gradients.memory import Pool
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
from sordino.records.users import UserRows
from sordino.records.views import with_views
from sordino.sampling import LogicalBatch


@runtime_checkable
class GradientSum(Protocol):
    """From a logical batch to the sum of its records' bounded vectors. An empty batch gives zeros."""

    @property
    def clipping(self) -> Clipping:
        """What bounds a record's vector."""

    @property
    def contribution(self) -> Contribution:
        """What a record's vector is made of."""

    def __call__(self, batch: LogicalBatch) -> ClippedSum: ...


@dataclass(frozen=True, eq=False)
class Stated:
    """A function of one's own as a gradient sum: who writes it states its clipping and contribution.

    Nothing can check the statement; `sordino.audit.check_neighbouring` looks for counter-examples.
    """

    function: Callable[[LogicalBatch], ClippedSum]
    clipping: Clipping
    contribution: Contribution = field(default_factory=Contribution)

    def __call__(self, batch: LogicalBatch) -> ClippedSum:
        return self.function(batch)


class Counted:
    """A gradient sum that counts dropped records on the way."""

    def __init__(self, gradient_sum: GradientSum) -> None:
        self._gradient_sum = gradient_sum
        self.dropped = 0

    @property
    def clipping(self) -> Clipping:
        return self._gradient_sum.clipping

    @property
    def contribution(self) -> Contribution:
        return self._gradient_sum.contribution

    def __call__(self, batch: LogicalBatch) -> ClippedSum:
        total = self._gradient_sum(batch)
        self.dropped += total.dropped
        return total

    def expect(self, batch: LogicalBatch) -> None:
        """Tells the gradient sum of the batch that comes next, where it reads ahead."""
        if isinstance(self._gradient_sum, RecordGradients):
            self._gradient_sum.expect(batch)


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
    """The clipped sum of each batch of `dataset`, chunk by chunk, at the model's weights of that moment.

    Memory is bounded by the batch's chunk, in rows. A record's vector is clipped once, whatever it is made of.

    Args:
        model: The model that is trained.
        loss: `loss(outputs, targets)` gives one value per row.
        dataset: A pair of tensors (inputs, targets), anything with `.inputs` and `.targets`, or a map-style torch
            dataset of (inputs, target) pairs.
        clipping: How a record's vector is bounded: the plan's.
        views: Each record is the mean over that many random views of it, drawn by the public `seed` and the step.
        inner: A record's vector is the sum over the present and past iterates.
        past: Asked for the past iterates before each batch; they must be public (released before, or made of what was).
        seed: The public seed of views.

    Returns:
        The gradient sum for `private_steps`.
    """
    refuse_half(trainable(model).values())
    most = dataset.rows_per_user if isinstance(dataset, UserRows) else None
    fetch = row_reader(dataset)
    if isinstance(dataset, Collated) and dataset.workers:
        fetch = ReadingAhead(fetch)
    return RecordGradients(model, loss, fetch, clipping, views, inner, past, seed, most or 1)


@dataclass(frozen=True, eq=False)
class RecordGradients:
    """A gradient sum that knows how it bounds each record, so that `private_steps` can refuse the wrong one."""

    model: nn.Module
    loss: Callable[..., Tensor]
    fetch: RowReader
    clipping: Clipping
    views: Augmentation | None = None
    inner: InnerMomentum | None = None
    past: Callable[[], PastIterates] = PastIterates
    seed: int = 0
    rows_per_record: int = 1  # the public bound on it, by which the chunks of a batch are divided
    pool: Pool = field(default_factory=Pool, repr=False)  # the memory of the last step's products, for the next one's
    assurance: Assurance = field(default_factory=Assurance, repr=False)  # what was checked of the model's programs
    shards: Shards | None = field(default=None, repr=False)  # of a model whose parameters are divided over processes
    most: int = LONGEST_SUM  # records in one chunk, however large the batch's

    @property
    def contribution(self) -> Contribution:
        return Contribution(inner=self.inner, augmentation=self.views, companions=companions_of(self.model))

    def rows(self, indices: Tensor, step: int) -> Rows:
        """The rows of these records, all views of them, at this step; with companions where the model takes any."""
        rows = placed(self.fetch(indices, step), self.model)
        rows = rows if self.views is None else with_views(rows, self.views, seed=self.seed, step=step)
        return with_companions(rows, self.model, seed=self.seed, step=step)

    def parts(self, batch: LogicalBatch, seed: int) -> list[Callable[[], ClippedSum]]:
        """One function for each chunk of the batch, to be called in any order and anywhere: their results add up to the
        sum, whatever the order (`on_grid`). Chunks and their masks (dropout) follow from the batch and `seed`."""
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
            self.model, self.loss, rows, self.clipping, iterates=iterates, pool=self.pool, assurance=self.assurance,
            keys=keys, shards=self.shards, narrow=len(indices) == len(batch),
        )  # fmt: skip

    def __call__(self, batch: LogicalBatch) -> ClippedSum:
        self.prepare()
        return total_of(self.model, self.parts(batch, torch.initial_seed()), self.reader(batch.step))

    def reader(self, step: int) -> Callable[[Tensor], None] | None:
        """Begins to read records of this step that will be asked for next; None where reading takes no time."""
        ahead = self.fetch
        return (lambda indices: ahead.start(indices, step)) if isinstance(ahead, ReadingAhead) else None

    def expect(self, batch: LogicalBatch) -> None:
        """Begins to read the first chunk of the batch that comes next."""
        start = self.reader(batch.step)
        if start is not None and (pieces := self.pieces(batch)):
            start(pieces[0])

    def prepare(self) -> None:
        """What happens to the model once before the chunks of a batch."""
        advance(self.model)


@runtime_checkable
class Divisible(GradientSum, Protocol):
    """A gradient sum whose chunks can be summed anywhere: by several processes, with the bits of one."""

    def prepare(self) -> None:
        """Called once before the parts of a batch, by every process."""

    def parts(self, batch: LogicalBatch, seed: int) -> list[Callable[[], ClippedSum]]:
        """One function for each chunk; their sums are exact in double precision, and so have no order."""


def in_parts(
    pieces: Sequence[Tensor], sum_of: Callable[[Tensor], ClippedSum], clipping: Clipping, records: int, seed: int
) -> list[Callable[[], ClippedSum]]:
    """One function for each chunk of a batch, to be called in any order and anywhere: their results add up to the sum,
    whatever the order (`on_grid`). The masks of a chunk (dropout) follow from its number and `seed`.

    Args:
        pieces: The records of each chunk.
        sum_of: The sum over such records.
        clipping: What bounds a record.
        records: How many there are in the batch.
        seed: Of the masks.
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
    """The sum of all parts. `start` begins to read the records of a part that comes next."""
    total: ClippedSum | None = None
    for part in one_ahead(parts, start):
        total = part() if total is None else add_sums(total, part())
    return empty_sum(model) if total is None else total


def grid_spacing(clip_norm: float, records: int) -> float:
    """The grid of chunk sums: so coarse that sums over up to 2^16 records (or `records`, if more) are exact.

    It is the same for all batches of at most 2^16 records, so that one record less changes the rounding of no chunk but
    its own (docs/guarantees/noise.md, section 6, theorem 3).
    """
    most = max(records, 1 << 16)
    return math.ldexp(1.0, math.ceil(math.log2(clip_norm)) + (most - 1).bit_length() - 51)


def on_grid(part: ClippedSum, spacing: float) -> ClippedSum:
    """The sums rounded to multiples of `spacing`, a power of two: then additions of double precision are exact."""
    magic = 1.5 * spacing * 2.0**52  # adding it leaves no digits below the spacing
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
    """The gradient sum that the plan states: its method's, its clipping, its contribution.

    Args:
        plan: what is accounted.
        model: its weights of the moment are read at each batch.
        loss: `loss(outputs, targets)` gives one value per row.
        dataset: as for `record_gradients`.
        past: the iterates before the present one, asked at each batch; who steps the weights keeps them.
        seed: of views and other public randomness.
        public: public rows and their use, for a method that combines them.
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
        model, loss, made.rows, plan.clipping, stated.record_momentum, count_records(dataset), made.contribution
    )


def empty_sum(model: nn.Module) -> ClippedSum:
    """The sum over no records: zeros in the shape of every trainable parameter."""
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
