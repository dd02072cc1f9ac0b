"""What bit the users of other libraries at the sampler, by repository and issue number."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from sordino.errors import InputError, Refused
from sordino.randomness import RandomSource
from sordino.release import Entry, Gaussian, release
from sordino.release.ledger import Ledger
from sordino.sampling import (
    LogicalBatch,
    Partition,
    Poisson,
    TruncatedPoisson,
    WithoutReplacement,
    batches,
    sampling_from_dict,
)

SOURCE = RandomSource.seeded(0)


def clipped_sum(batch: LogicalBatch, data: torch.Tensor) -> torch.Tensor:
    """A stand-in for the engine: the sum over the batch, chunk by chunk."""
    total = torch.zeros(data.shape[1], dtype=data.dtype)
    for chunk in batch.chunks():
        total += data[chunk].sum(0)
    return total


@pytest.mark.parametrize("count", [93, 186, 391, 415])
def test_opacus_571_819_no_rate_or_size_is_derived_from_the_length_of_a_loader(count: int) -> None:
    """There, q = 1/len(loader) and the divisor int(n·q) moved with the data set: one record more or less showed."""
    assert int(1 / (1 / count)) != count  # the rounding that changed ε
    rate = 128 / 50_000
    for records in (49_999, 50_000, 50_001):  # neighbours under add/remove
        loop = batches(Poisson(rate), records=records, steps=1, source=SOURCE, chunk=512)
        assert next(loop).indices.numel() > 0
        assert Poisson(rate).to_dict() == {"name": "poisson", "sampling_rate": rate}
    assert json.loads(json.dumps(Poisson(rate).to_dict()))["sampling_rate"] == rate  # exact, not via 1/len
    assert len(list(batches(Poisson(1 / count), records=1_000, steps=count, source=SOURCE, chunk=9))) == count


def test_opacus_571_the_sampler_of_a_smaller_dataset_has_the_same_public_constants() -> None:
    """The inclusion of a record does not change when another one leaves: the rate stays as it was given."""
    sampling = Poisson(0.5)
    sizes = {n: [len(b) for b in batches(sampling, records=n, steps=400, source=SOURCE, chunk=4)] for n in (2, 3)}
    assert sum(sizes[2]) / 400 == pytest.approx(1.0, abs=0.15)
    assert sum(sizes[3]) / 400 == pytest.approx(1.5, abs=0.2)


def test_opacus_813_600_a_sampler_is_never_replaced_by_another() -> None:
    """There, a WeightedRandomSampler was dropped without a word and q computed from what was left."""
    data = TensorDataset(torch.zeros(100, 2))
    weighted = WeightedRandomSampler([1.0] * 100, num_samples=16)
    for foreign in (weighted, DataLoader(data, batch_size=8, sampler=weighted), "weighted", None):
        with pytest.raises(Refused, match="not silently replaced"):
            batches(foreign, records=100, steps=1, source=SOURCE, chunk=8)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="unknown sampling 'weighted'"):
        sampling_from_dict({"name": "weighted", "num_samples": 16})


def test_opacus_80_shuffled_batches_are_not_called_poisson() -> None:
    """There, shuffled batches of fixed size were accounted for as Poisson samples."""
    names = [Poisson(0.1).name, TruncatedPoisson(0.1, 9).name, Partition(5).name, WithoutReplacement(5).name]
    assert names == ["poisson", "truncated-poisson", "partition", "without-replacement"]
    for fixed in (Partition(5), WithoutReplacement(5)):
        assert "sampling_rate" not in fixed.to_dict()  # nothing that a Poisson accountant could take up
        assert not hasattr(fixed, "sampling_rate")
    sizes = {len(b) for b in batches(Poisson(0.1), records=50, steps=50, source=SOURCE, chunk=50)}
    assert len(sizes) > 3  # a true Poisson sample varies in size


def test_opacus_320_420_a_poisson_batch_larger_than_memory_brings_its_own_chunks() -> None:
    """There, Poisson batches and gradient accumulation excluded each other, or divided by the wrong size."""
    data = torch.randn(300, 4, dtype=torch.float64)
    whole = list(batches(Poisson(0.5), records=300, steps=5, source=SOURCE, chunk=300))
    for chunk in (1, 16, 64):
        for big, small in zip(
            whole, batches(Poisson(0.5), records=300, steps=5, source=SOURCE, chunk=chunk), strict=True
        ):
            assert max(len(c) for c in small.chunks()) <= chunk
            assert sum(len(c) for c in small.chunks()) == len(big)
            torch.testing.assert_close(clipped_sum(small, data), clipped_sum(big, data))


def test_opacus_early_break_leaves_no_stale_flag_that_mixes_batches() -> None:
    """There, a `break` between two physical batches left a skip flag in a queue, and the next step swallowed it."""
    data = torch.randn(200, 3, dtype=torch.float64)
    expected = [clipped_sum(b, data) for b in batches(Poisson(0.4), records=200, steps=6, source=SOURCE, chunk=8)]
    for batch in batches(Poisson(0.4), records=200, steps=6, source=SOURCE, chunk=8):
        next(batch.chunks())
        break
    resumed = [clipped_sum(b, data) for b in batches(Poisson(0.4), records=200, steps=6, source=SOURCE, chunk=8)]
    assert all(torch.equal(a, b) for a, b in zip(expected, resumed, strict=True))


def test_opacus_161_522_an_empty_batch_is_a_step_like_any_other() -> None:
    """There, an empty Poisson batch crashed the loader or the splitter, or was skipped and not accounted for."""
    data = torch.ones(20, 3)
    ledger = Ledger.open(None, {"records": 20})
    released: list[dict[str, Any]] = []
    empty = 0
    for batch in batches(Poisson(0.01), records=20, steps=40, source=SOURCE, chunk=4):
        empty += len(batch) == 0
        value = {"w": clipped_sum(batch, data)}
        entry = Entry("gradient", batch.step, Poisson(0.01).to_dict(), "add-remove")
        released.append(
            release(value, sensitivity=1.0, norm="l2", noise=Gaussian(1.0), source=SOURCE, ledger=ledger, entry=entry)
        )
    assert empty > 20
    assert len(ledger.entries) == len(released) == 40
    assert all(noisy["w"].abs().min() > 0 for noisy in released)
