"""The sum of a batch, computed by all ranks, bit for bit that of one process.

Formal contract. The leader's `Divided(g)(batch)` returns what g(batch) returns: chunk k of the batch is summed by rank
k mod size at the leader's weights, with the dropout masks of (batch, k). Each chunk's sum is on a grid so coarse that
additions in double precision are exact (`records.gradients.grid_spacing`), so neither the number of ranks nor the order
in which their sums arrive changes a bit. Norms and losses, which are for diagnostics, are returned in the order of the
chunks.

The arithmetic of a rank depends on its machine: equal bits require the same processor features, library versions and
threads per process on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sordino.errors import SordinoError
from sordino.gradients import ClippedSum
from sordino.randomness.masks import masks_of
from sordino.ranks.group import Lost, Rank
from sordino.ranks.run import Failure
from sordino.records.ahead import one_ahead
from sordino.records.gradients import Divisible, RecordGradients, Wrapper, add_sums, empty_sum
from sordino.records.momentum import PastIterates
from sordino.sampling import LogicalBatch


@dataclass(frozen=True, eq=False)
class Work:
    """The leader's request: the sum of a batch, with these past iterates."""

    batch: LogicalBatch
    seed: int
    past: PastIterates
    whole: bool  # also send frozen parameters: once, with the first batch
    after: LogicalBatch | None = None  # the next batch, if its records are read in advance


@dataclass(frozen=True)
class Share:
    """What a rank reports besides its sum: (number of the chunk, norms, losses), or why it failed.

    narrow: True if the sum is in single precision; it is then the sum of a single chunk.
    """

    chunks: tuple[tuple[int, Tensor, Tensor], ...]
    dropped: int
    error: Failure | None = None
    narrow: bool = False


class Divided(Wrapper):
    """A gradient sum at the leader whose chunks are divided over all ranks."""

    def __init__(self, inner: Divisible, model: nn.Module, rank: Rank, past: Callable[[], PastIterates]) -> None:
        super().__init__(inner)
        self.inner, self.model, self.rank, self.past = inner, model, rank, past
        self._asked = False
        self._after: LogicalBatch | None = None

    def __call__(self, batch: LogicalBatch) -> ClippedSum:
        work = Work(batch, torch.initial_seed(), self.past(), not self._asked, self._after)
        self._asked, self._after = True, None
        self.rank.tell(work)
        return shared_sum(self.inner, self.model, self.rank, work)

    def expect(self, batch: LogicalBatch) -> None:
        """Announces the next batch, if its records are read in advance."""
        self._after = batch if reads_ahead(self.inner) else None


def reads_ahead(inner: Divisible) -> bool:
    """Whether records are read by threads, in advance."""
    return isinstance(inner, RecordGradients) and inner.reader(0) is not None


def shared_sum(inner: Divisible, model: nn.Module, rank: Rank, work: Work) -> ClippedSum:
    """This rank's part of a batch, and at the leader the whole sum; all ranks must call this together."""
    rank.copy_from_leader(_state(model, work.whole))
    total, share = own_chunks(inner, rank, work.batch, work.seed, work.after)
    total = empty_sum(model) if total is None else total
    shares = rank.collect(share)
    failed = next((one.error for one in shares if one.error is not None), None)
    if rank.tell(failed is not None):
        if (known := failed or share.error) is not None:
            raise known.error
        raise SordinoError("another rank could not sum its records: the leader reports why")
    added = rank.add_up([value.double() for value in total.sums.values()])
    if any(one.narrow for one in shares):  # the other ranks added zeros: this is the precision of one process
        added = [value.float() for value in added]
    if not rank.leads:
        return total
    chunks = sorted((chunk for one in shares for chunk in one.chunks), key=lambda chunk: chunk[0])
    kinds = total.norms.dtype
    return ClippedSum(
        sums=dict(zip(total.sums, added, strict=True)),
        norms=torch.cat([norms.to(total.norms.device) for _, norms, _ in chunks] or [torch.zeros(0, dtype=kinds)]),
        dropped=sum(one.dropped for one in shares),
        losses=torch.cat([losses.to(total.losses.device) for _, _, losses in chunks] or [torch.zeros(0, dtype=kinds)]),
        dtype=total.dtype,
    )


def own_chunks(
    inner: Divisible, rank: Rank, batch: LogicalBatch, seed: int, after: LogicalBatch | None = None
) -> tuple[ClippedSum | None, Share]:
    """The sum of this rank's chunks, if it has any; errors are reported to the leader, which ends the run.

    Before the last chunk is summed, the reading of this rank's first chunk of the batch `after` begins.
    """
    total: ClippedSum | None = None
    chunks, dropped = [], 0
    try:
        inner.prepare()
        mine = inner.parts(batch, seed)[rank.number :: rank.size]
        start = inner.reader(batch.step) if isinstance(inner, RecordGradients) else None
        for number, part in enumerate(one_ahead(mine, start)):
            if number + 1 == len(mine):
                _start(inner, rank, after)
            made = part()
            chunks.append((rank.number + number * rank.size, made.norms.cpu(), made.losses.cpu()))
            dropped += made.dropped
            total = made if total is None else add_sums(total, made)
    except Lost:
        raise
    except Exception as error:  # any error must be reported, or the other ranks would wait forever
        return None, Share((), 0, Failure.of(error, rank))
    narrow = total is not None and any(value.dtype == torch.float32 for value in total.sums.values())
    return total, Share(tuple(chunks), dropped, narrow=narrow)


def _start(inner: Divisible, rank: Rank, after: LogicalBatch | None) -> None:
    """Starts to read this rank's first chunk of the next batch."""
    if after is None or not isinstance(inner, RecordGradients) or (start := inner.reader(after.step)) is None:
        return
    for indices in inner.pieces(after)[rank.number : rank.number + 1]:
        start(indices)


def follow(inner: Divisible, model: nn.Module, rank: Rank, past: SentPast) -> Any:
    """Sums chunks for the leader until it sends something other than work; returns that message."""
    while isinstance(message := rank.tell(), Work):
        past.held = message.past
        with masks_of(message.seed):
            shared_sum(inner, model, rank, message)
    return message


class SentPast:
    """The past iterates that the leader sent last."""

    def __init__(self) -> None:
        self.held = PastIterates()

    def __call__(self) -> PastIterates:
        return self.held


def _state(model: nn.Module, whole: bool) -> list[Tensor]:
    """The tensors that training may change, or all of them, in the same order at every rank."""
    return [*(p for p in model.parameters() if whole or p.requires_grad), *model.buffers()]
