"""One batch of a sharded model: every rank sums its chunks, sends the sums to the shards, and adds its shard's noise.

Formal contract. All ranks call these functions together. Sums, ledger and released gradients are jointly those of one
process that divides its batches into the same chunks: chunk sums are on a grid on which additions are exact
(`records.gradients.grid_spacing`), and the noise of a coordinate depends on its place only (`release.shards`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from sordino.errors import Refused, SordinoError
from sordino.gradients.chunk_sizes import most_records
from sordino.gradients.engine import narrowest
from sordino.gradients.survey import survey, trainable
from sordino.plan.core import Plan
from sordino.plan.method import Method
from sordino.randomness import RandomSource
from sordino.randomness.masks import masks_of
from sordino.ranks.group import Rank
from sordino.ranks.run import heard
from sordino.ranks.store import Store
from sordino.ranks.sums import Share, own_chunks
from sordino.records.gradients import GradientSum, RecordGradients, grid_spacing
from sordino.records.momentum import PastIterates
from sordino.release import Entry, Ledger, Shard, release_shard
from sordino.sampling import LogicalBatch


@dataclass(frozen=True, eq=False)
class Batch:
    """The leader's message: a batch, and the seed of its masks."""

    batch: LogicalBatch
    seed: int


@dataclass(frozen=True)
class Done:
    """The leader's message: there are no more batches."""


def sharded(gradient_sum: GradientSum, plan: Plan, store: Store) -> RecordGradients:
    """The gradient sum that reads parameters from the store and adds its sums to it.

    Raises:
        Refused: the plan's sum, or the model, can't be divided over ranks.
    """
    if type(gradient_sum) is not RecordGradients:
        raise Refused(
            f"this plan of the method {plan.method.name} sums its records in one process "
            f"({type(gradient_sum).__name__}): train a model that is not sharded, without torchrun"
        )
    if plan.method.adds_uniform_noise or plan.statistics:
        what = "uniform noise" if plan.method.adds_uniform_noise else "private statistics"
        raise Refused(f"{what} of a sharded model is not supported: train a model that is not sharded")
    if type(plan.method).earlier_noise is not Method.earlier_noise:
        raise Refused(
            f"the method {plan.method.name} adds noise of earlier steps again, which is not supported for a sharded "
            "model: train one that is not sharded"
        )
    if survey(store.model).powers:
        raise Refused("spectral_norm of a sharded model is not supported: its power iteration needs whole parameters")
    rows = gradient_sum.rows(torch.arange(1), 0)
    most = most_records(store.model, survey(store.model), rows)
    return replace(gradient_sum, shards=store, most=gradient_sum.most if most is None else min(most, gradient_sum.most))


def sum_batch(
    inner: RecordGradients, store: Store, batch: LogicalBatch, seed: int, past: PastIterates
) -> tuple[Mapping[str, Tensor], int]:
    """This rank's rows of the sum, by parameter; and at the leader the number of dropped records."""
    rank = store.rank
    spacing = grid_spacing(inner.clipping.clip_norm, len(batch)) if len(inner.pieces(batch)) > 1 else None
    store.begin(past, spacing)
    with masks_of(seed):
        share = own_chunks(inner, rank, batch, seed)[1]
    store.flush()
    shares = rank.collect(share)
    agreed(rank, next((one.error for one in shares if one.error is not None), None))
    return store.sums, sum(one.dropped for one in shares)


def release_batch(
    store: Store, sums: Mapping[str, Tensor], plan: Plan, source: RandomSource, ledger: Ledger | None, step: int
) -> dict[str, Tensor]:
    """The released gradient divided by the plan's divisor, as shards with the parameters' layout."""
    rank = store.rank
    begins = {name: one.begin + one.rows(rank.number, rank.size)[0] * one.row for name, one in store.trained.items()}
    noisy = release_shard(
        sums,
        Shard(begins, store.layout.coordinates, lambda error: _all_agree(rank, error), lambda make: _told(rank, make)),
        sensitivity=plan.sensitivity,
        noise=plan.noise_at(step),
        source=source,
        ledger=ledger,
        entry=Entry("gradient", step, plan.sampled(step), plan.relation),
        factor=1.0 / plan.divisor,
        dtype=narrowest(trainable(store.model).values()),
    )
    return {name: one.like(noisy[name].to(one.parameter.dtype)) for name, one in store.trained.items()}


def agreed(rank: Rank, error: Exception | None) -> None:
    """Raises the leader's error at the leader; the other ranks learn that the run has ended."""
    if rank.leads and error is not None:
        raise error
    heard(rank)


def _all_agree(rank: Rank, error: SordinoError | None) -> None:
    found = rank.collect(error)
    agreed(rank, next((one for one in found if one is not None), None))


def _told(rank: Rank, make: Callable[[], tuple[bytes, bytes]]) -> tuple[bytes, bytes]:
    keys: tuple[bytes, bytes] = heard(rank, make() if rank.leads else None)
    return keys


def copy_buffers(model: nn.Module, rank: Rank) -> None:
    """Copies the leader's buffers to every rank."""
    if buffers := list(model.buffers()):
        rank.copy_from_leader(buffers)


__all__ = ["Batch", "Done", "Share", "agreed", "copy_buffers", "release_batch", "sharded", "sum_batch"]
