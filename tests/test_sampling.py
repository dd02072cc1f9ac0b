"""The samplers: their laws, their independence from history, their edges."""

from __future__ import annotations

import itertools
import math
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from sordino import sampling as module
from sordino.errors import InputError
from sordino.randomness import RandomSource, Stream
from sordino.sampling import (
    Allocation,
    Cyclic,
    LogicalBatch,
    Partition,
    Poisson,
    Sampling,
    TruncatedPoisson,
    WithoutReplacement,
    batches,
    sampling_from_dict,
)

LEVEL = 1e-4
EVERY: list[Sampling] = [Poisson(0.3), TruncatedPoisson(0.3, 14), Partition(13), WithoutReplacement(13)]
every = pytest.mark.parametrize("sampling", EVERY, ids=lambda s: s.name)


def draw(sampling: Sampling, **changes: Any) -> list[LogicalBatch]:
    options = {"records": 50, "steps": 20, "source": RandomSource.seeded(0), "chunk": 8, **changes}
    return list(batches(sampling, **options))


def members(sampling: Sampling, records: int, steps: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """(steps, records): who takes part when."""
    table = np.zeros((steps, records), dtype=bool)
    for batch in draw(sampling, records=records, steps=steps, source=RandomSource.seeded(seed), chunk=records):
        table[batch.step, batch.indices.numpy()] = True
    return table


# Every sampler


@every
def test_indices_are_sorted_distinct_and_in_range(sampling: Sampling) -> None:
    drawn = draw(sampling)
    assert [batch.step for batch in drawn] == list(range(20))
    for batch in drawn:
        assert batch.indices.dtype == torch.int64
        assert torch.equal(batch.indices, batch.indices.unique(sorted=True))
        assert len(batch) == 0 or (batch.indices[0] >= 0 and batch.indices[-1] < 50)


@every
@given(start=st.integers(0, 20))
@settings(deadline=None, max_examples=20)
def test_starting_anywhere_gives_the_same_batches(sampling: Sampling, start: int) -> None:
    for batch, other in zip(draw(sampling)[start:], draw(sampling, start=start), strict=True):
        assert batch.step == other.step
        assert torch.equal(batch.indices, other.indices)


@every
def test_leaving_the_loop_early_and_interleaving_loops_mixes_nothing(sampling: Sampling) -> None:
    whole = draw(sampling)
    source = RandomSource.seeded(0)
    abandoned = batches(sampling, records=50, steps=20, source=source, chunk=8)
    for _ in range(3):
        next(next(abandoned).chunks(), None)  # a batch left in the middle of its chunks
    again = batches(sampling, records=50, steps=20, source=source, chunk=8)
    for batch, other in zip(again, whole, strict=True):
        assert torch.equal(batch.indices, other.indices)
        next(abandoned, None)


@every
def test_the_chunk_changes_nothing_in_the_batches(sampling: Sampling) -> None:
    for chunk in (1, 7, 1_000):
        for batch, other in zip(draw(sampling, chunk=chunk), draw(sampling), strict=True):
            assert torch.equal(batch.indices, other.indices)


@every
def test_other_sources_draw_other_batches(sampling: Sampling) -> None:
    one, two = draw(sampling), draw(sampling, source=RandomSource.seeded(1))
    assert any(not torch.equal(a.indices, b.indices) for a, b in zip(one, two, strict=True))


@every
def test_the_description_is_read_back(sampling: Sampling) -> None:
    assert sampling.to_dict()["name"] == sampling.name
    assert sampling_from_dict(sampling.to_dict()) == sampling


@every
def test_no_steps_no_batches(sampling: Sampling) -> None:
    assert draw(sampling, steps=0) == []
    assert draw(sampling, start=20) == []


@given(st.integers(0, 40), st.integers(1, 50))
@settings(deadline=None, max_examples=60)
def test_chunks_are_the_batch_in_order_and_never_larger_than_asked(size: int, chunk: int) -> None:
    indices = torch.arange(size) * 3
    chunks = list(LogicalBatch(0, indices, chunk).chunks())
    assert torch.equal(torch.cat(chunks), indices)
    assert all(c.numel() <= chunk for c in chunks)
    assert len(chunks) == max(1, math.ceil(size / chunk))  # an empty batch has one, empty, chunk
    assert all(c.dtype == torch.int64 for c in chunks)


# Poisson


@pytest.mark.parametrize("rate", [0.02, 0.3, 0.9])
def test_poisson_includes_every_record_with_its_rate(rate: float) -> None:
    table = members(Poisson(rate), records=60, steps=3_000)
    counts = table.sum(0)
    z = (counts - 3_000 * rate) / math.sqrt(3_000 * rate * (1 - rate))
    assert stats.chi2.sf((z**2).sum(), 60) > LEVEL


def test_poisson_pairs_of_records_and_consecutive_steps_are_independent() -> None:
    rate, steps = 0.3, 6_000
    table = members(Poisson(rate), records=12, steps=steps)
    pairs = [int((table[:, i] & table[:, j]).sum()) for i, j in itertools.combinations(range(12), 2)]
    assert min(stats.binomtest(k, steps, rate * rate).pvalue for k in pairs) > LEVEL / 10
    consecutive = int((table[:-1] & table[1:]).sum())
    assert stats.binomtest(consecutive, (steps - 1) * 12, rate * rate).pvalue > LEVEL


def test_poisson_batch_sizes_are_binomial() -> None:
    records, rate, steps = 40, 0.2, 6_000
    sizes = members(Poisson(rate), records=records, steps=steps).sum(1)
    edges = list(range(3, 14))
    observed = np.bincount(np.searchsorted(edges, sizes, side="right"), minlength=len(edges) + 1)
    cumulative = np.array([0.0, *stats.binom.cdf(np.array(edges) - 1, records, rate), 1.0])
    assert stats.chisquare(observed, np.diff(cumulative) * steps).pvalue > LEVEL


def test_poisson_with_rate_one_takes_everybody() -> None:
    assert all(len(batch) == 50 for batch in draw(Poisson(1.0)))


def test_poisson_empty_batches_are_yielded() -> None:
    drawn = draw(Poisson(0.01), records=10, steps=200)
    assert [batch.step for batch in drawn] == list(range(200))
    empty = [batch for batch in drawn if len(batch) == 0]
    assert len(empty) > 150  # 0.99¹⁰ = 0.90 of them
    assert empty[0].indices.shape == (0,)
    assert empty[0].indices.dtype == torch.int64


def test_poisson_across_the_internal_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK", 7)
    table = members(Poisson(0.25), records=30, steps=2_000)
    z = (table.sum(0) - 500) / math.sqrt(2_000 * 0.25 * 0.75)
    assert stats.chi2.sf((z**2).sum(), 30) > LEVEL
    assert abs(np.corrcoef(table[:, 0], table[:, 7])[0, 1]) < 0.1  # same place in two blocks


def test_poisson_on_ten_million_records_is_fast_and_small() -> None:
    source = RandomSource.seeded(0)
    loop = batches(Poisson(1e-5), records=10**7, steps=2, source=source, chunk=64)
    first = next(loop)
    tracemalloc.start()
    begin = time.process_time()
    second = next(loop)
    seconds = time.process_time() - begin
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 40 < len(first) < 180
    assert 40 < len(second) < 180
    assert seconds < 1.0
    assert peak < 20 * 2**20  # a few bytes for each record of one block, not for each record


# Truncated Poisson


def test_truncated_poisson_never_exceeds_its_cap_and_equals_poisson_below_it() -> None:
    plain, capped = draw(Poisson(0.3), steps=300), draw(TruncatedPoisson(0.3, 15), steps=300)
    over = 0
    for batch, other in zip(plain, capped, strict=True):
        if len(batch) <= 15:
            assert torch.equal(batch.indices, other.indices)
        else:
            over += 1
            assert len(other) == 15
            assert np.isin(other.indices.numpy(), batch.indices.numpy()).all()
    assert 50 < over < 250


def test_truncated_poisson_drops_uniformly() -> None:
    counts = members(TruncatedPoisson(1.0, 3), records=5, steps=5_000)
    subsets = dict.fromkeys(itertools.combinations(range(5), 3), 0)
    for row in counts:
        subsets[tuple(np.flatnonzero(row).tolist())] += 1
    assert stats.chisquare(list(subsets.values())).pvalue > LEVEL


# Partition


@given(st.integers(1, 60), st.integers(1, 60))
@settings(deadline=None, max_examples=60)
def test_a_partition_visits_each_record_at_most_once_an_epoch_and_repeats(records: int, batch: int) -> None:
    if batch > records:
        with pytest.raises(InputError, match="can't be drawn"):
            draw(Partition(batch), records=records)
        return
    count = records // batch
    drawn = draw(Partition(batch), records=records, steps=3 * count)
    epoch = torch.cat([b.indices for b in drawn[:count]])
    assert epoch.unique().numel() == epoch.numel() == count * batch  # the remainder is dropped
    for step, b in enumerate(drawn):
        assert len(b) == batch
        assert torch.equal(b.indices, drawn[step % count].indices)


def test_a_partition_is_a_uniform_shuffle() -> None:
    first = [draw(Partition(2), records=5, steps=1, source=RandomSource.seeded(s))[0].indices for s in range(3_000)]
    subsets = dict.fromkeys(itertools.combinations(range(5), 2), 0)
    for indices in first:
        subsets[tuple(indices.tolist())] += 1
    assert stats.chisquare(list(subsets.values())).pvalue > LEVEL


# Without replacement


@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_without_replacement_draws_a_uniform_subset_of_exact_size_every_step(size: int) -> None:
    table = members(WithoutReplacement(size), records=5, steps=4_000)
    assert (table.sum(1) == size).all()
    subsets = dict.fromkeys(itertools.combinations(range(5), size), 0)
    for row in table:
        subsets[tuple(np.flatnonzero(row).tolist())] += 1
    if len(subsets) > 1:
        assert stats.chisquare(list(subsets.values())).pvalue > LEVEL


def test_without_replacement_is_independent_between_steps() -> None:
    table = members(WithoutReplacement(3), records=10, steps=8_000)
    consecutive = int((table[:-1] & table[1:]).sum())
    assert consecutive == pytest.approx(7_999 * 0.9, rel=0.05)  # 10 · 0.3²


# Refusals


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.0000001, math.nan, math.inf, True, "0.1"])
def test_a_rate_outside_the_half_open_unit_interval_is_refused(rate: Any) -> None:
    for make in (Poisson, lambda r: TruncatedPoisson(r, 3)):
        with pytest.raises(InputError, match="sampling_rate must lie in"):
            make(rate)


@pytest.mark.parametrize("count", [0, -1, 2.0, True, math.nan])
def test_sizes_and_caps_are_positive_integers(count: Any) -> None:
    for make in (Partition, WithoutReplacement, lambda c: TruncatedPoisson(0.1, c)):
        with pytest.raises(InputError, match="must be an integer of at least 1"):
            make(count)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"records": 0}, "records must be"),
        ({"chunk": 0}, "chunk must be"),
        ({"steps": -1}, "0 ≤ start ≤ steps"),
        ({"start": 21}, "0 ≤ start ≤ steps"),
        ({"start": -1}, "0 ≤ start ≤ steps"),
    ],
)
def test_wrong_arguments_are_refused_at_the_call(changes: dict[str, int], message: str) -> None:
    options: dict[str, Any] = {"records": 50, "steps": 20, "chunk": 8, **changes}
    with pytest.raises(InputError, match=message):
        batches(Poisson(0.1), source=RandomSource.seeded(0), **options)  # not even one next()


def test_a_batch_larger_than_the_records_is_refused_at_the_call() -> None:
    for sampling in (Partition(51), WithoutReplacement(51)):
        with pytest.raises(InputError, match="a batch of 51 can't be drawn from 50 records"):
            batches(sampling, records=50, steps=1, source=RandomSource.seeded(0), chunk=1)


@pytest.mark.parametrize(
    "description",
    [{"name": "shuffle"}, {}, {"name": "poisson"}, {"name": "poisson", "sampling_rate": 0.1, "cap": 3}],
)
def test_an_unknown_description_is_refused(description: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="sampling"):
        sampling_from_dict(description)


def test_allocation_draws_the_same_batches_whatever_is_held_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn() -> list[list[int]]:
        made = batches(Allocation(37), records=5_000, steps=74, source=RandomSource.seeded(1), chunk=10, start=5)
        return [batch.indices.tolist() for batch in made]

    whole = drawn()
    monkeypatch.setattr(module, "WINDOW", 700)  # five batches at a time
    assert drawn() == whole


def test_allocation_of_many_records_draws_its_labels_in_equal_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 10⁸ records and a rate of 10⁻⁵ a step draws fewer than 100,000 labels; here for a hundredth of the records."""
    counted: list[int] = []

    def below(self: Stream, bound: int, n: int) -> Any:
        counted.append(n)
        return np.arange(n, dtype=np.int64) % bound

    assert 10**8 / (module.WINDOW * 10**5 // 10**8) < 100_000
    monkeypatch.setattr(Stream, "below", below)
    monkeypatch.setattr(module, "WINDOW", 20_000)
    monkeypatch.setattr(module, "_BLOCK", 1_000)
    drawn = batches(Allocation(10**3), records=10**6, steps=10**3, source=RandomSource.seeded(0), chunk=64)
    assert sum(counted) == 10**6  # the first window, before the first step
    for step in range(60):  # three windows
        counted.clear()
        assert len(next(drawn)) == 10**3
        assert sum(counted) == 10**6 // 20, step


@pytest.mark.parametrize("sampling", [Poisson(1e-5), TruncatedPoisson(1e-5, 900), Allocation(10**5), Cyclic(10**5)])
def test_a_hundred_million_records_are_sampled_in_milliseconds_and_little_memory(sampling: Sampling) -> None:
    tracemalloc.start()
    drawn = batches(sampling, records=10**8, steps=10**5, source=RandomSource.seeded(0), chunk=64, start=1_000)
    seconds = []
    for _ in range(60):  # two windows of allocation: the second begins at step 1048
        begin = time.process_time()
        assert 700 < len(next(drawn)) < 1_300
        seconds.append(time.process_time() - begin)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 * 10**6
    assert max(seconds) < 0.05
