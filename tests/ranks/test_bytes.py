"""What a step sends over the wire is what docs/howto/many_ranks.md says, by the kernel's own count."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp  # once, before the ranks are forked
from processes import in_ranks
from torch.nn.functional import cross_entropy

from sordino import ranks
from sordino.clipping import FlatClip
from sordino.ranks.layout import shard_blocks
from sordino.ranks.sharded import Batch, sum_batch
from sordino.ranks.store import Store
from sordino.ranks.sums import Work, shared_sum
from sordino.records.gradients import record_gradients
from sordino.records.momentum import PastIterates
from sordino.sampling import LogicalBatch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import sharded as benchmark
import sharded_table
import wire

SIZE = benchmark.Size(width=32, blocks=6, batch=12, chunk=4)
TIMES = 4


def _sent(number: int, shard: bool) -> tuple[list[int], int]:
    """Bytes that this rank sends for each of some batches, and the number of their chunks. The checks of a new program
    were made before; those that the run's own randomness chooses may fall into one of the batches."""
    torch.manual_seed(0)
    net = benchmark.Transformer(SIZE.width, SIZE.blocks)
    rank, x = ranks.of_group(), benchmark._data(SIZE.batch)
    batch = LogicalBatch(0, torch.arange(SIZE.batch), SIZE.chunk)
    inner: Any = record_gradients(shard_blocks(net) if shard else net, cross_entropy, x, FlatClip(1.0))
    store = Store(net, rank) if shard else None
    inner = inner if store is None else inner.over(store, SIZE.chunk)

    def step() -> None:
        if store is not None:
            sum_batch(inner, store, Batch(batch, 7), PastIterates())
        else:
            shared_sum(inner, net, rank, Work(batch, 7, PastIterates(), False))

    step()
    sent = []
    for _ in range(TIMES):
        dist.barrier()
        before = wire.sent()
        step()
        dist.barrier()
        sent.append(wire.sent() - before)
    return sent, len(inner.pieces(batch))


def _least(found: list[tuple[list[int], int]]) -> int:
    """The bytes of all ranks for the batch in which they sent the least: one without a check."""
    return min(sum(of_ranks) for of_ranks in zip(*(sent for sent, _ in found), strict=True))


@pytest.mark.parametrize("size", [2, 3])
def test_the_bytes_of_a_sharded_step_are_those_of_the_page(size: int, tmp_path: Path) -> None:
    found = in_ranks(size, tmp_path, _sent, True)
    sent, chunks = _least(found), found[0][1]
    assert sent == pytest.approx(benchmark.formula("private sharded", SIZE, chunks, size), rel=0.03)


def test_the_bytes_of_ranks_that_share_chunks_are_those_of_the_page(tmp_path: Path) -> None:
    sent = _least(in_ranks(2, tmp_path, _sent, False))
    ring, most = (times * benchmark._count(SIZE) for times in (4 + 12, 4 + 16))  # gloo adds along a ring, or sends more
    assert 0.97 * ring < sent < 1.03 * most


def test_the_page_has_the_tables_of_the_result_files() -> None:
    page = sharded_table.PAGE.read_text("utf8")
    assert sharded_table.written(page) == page


def test_the_page_says_what_the_digest_of_all_records_costs() -> None:
    rows = json.loads((sharded_table.RESULTS / "digest.json").read_text("utf8"))["rows"]
    page = " ".join(sharded_table.PAGE.read_text("utf8").split())
    assert rows["8 bytes"]["records"] == 10**8
    assert f"10⁸ memory-mapped records of 8 bytes take {rows['8 bytes']['seconds']:.0f} seconds" in page
    assert f"{rows['128 bytes']['nanoseconds_a_record']:.0f} ns for each record of 128 bytes" in page
