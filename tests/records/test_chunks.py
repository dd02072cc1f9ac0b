"""One record less leaves the other chunks as they are, and moves a sum by at most the clip norm and its margin."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import sordino
from sordino.methods.dp_mac.coefficients import Expansion, scaled_sums
from sordino.methods.dp_mac.taylor import Terms
from sordino.plan import ROUNDING_MARGIN
from sordino.plan.contribution import RecordMomentum
from sordino.records.chunks import stable_chunks
from sordino.records.momentum import RecordMomenta
from sordino.records.reading import row_reader
from sordino.sampling import LogicalBatch

RECORDS, STEPS = 4096, (8, 11)


def adversarial(k: int) -> Tensor:
    """In single precision: 2^k − 1/2, one record, and numbers that are lost beside the sum with it, not beside the one
    without."""
    x, up = torch.full((RECORDS,), -(2.0 ** (k - 1 - 23))), 2**k - 1
    x[:up], x[up], x[up + 1] = 1, 0.5, 1
    return x


def test_chunks_without_the_missing_record_stay_as_they_are() -> None:
    indices = torch.randperm(3000, generator=torch.Generator().manual_seed(0))[:900].sort().values
    whole = {tuple(c.tolist()) for c in stable_chunks(LogicalBatch(0, indices, 50))}
    for gone in (0, 17, 450, 899):
        kept = torch.cat([indices[:gone], indices[gone + 1 :]])
        rest = {tuple(c.tolist()) for c in stable_chunks(LogicalBatch(0, kept, 50))}
        assert len(whole - rest) <= 2
        assert len(rest - whole) <= 1
        assert sum(map(len, rest)) == 899
        assert max(map(len, rest)) <= 50


def mac(x: Tensor) -> Tensor:
    """DP-MAC's sums of records with these slopes, as one vector."""
    ones, none = torch.ones(len(x), 1), torch.zeros(len(x), 1)
    terms = [Terms(ones, none, x, x[:, None], x[:, None])]
    return scaled_sums(terms, Expansion(), {"layers.0.gradient": 1.0}).sums["layers.0.gradient"].double().flatten()


def momenta(x: Tensor) -> Tensor:
    data = x[:, None], torch.ones(len(x), 1)
    fetch = row_reader(data)
    sums = RecordMomenta(
        nn.Linear(1, 1, bias=False), lambda out, t: (out * t).sum(1), lambda indices, step: fetch(indices),
        sordino.clipping.FlatClip(1.0), RecordMomentum(0.5), len(x),
    )  # fmt: skip
    return sums(LogicalBatch(0, torch.arange(len(x)), len(x))).sums["weight"].flatten()


@pytest.mark.parametrize("k", STEPS)
@pytest.mark.parametrize("summed", [mac, momenta])
def test_one_record_moves_a_sum_by_no_more_than_the_margin_allows(summed: Callable[[Tensor], Tensor], k: int) -> None:
    x = adversarial(k)
    without = torch.cat([x[: 2**k], x[2**k + 1 :]])
    assert float((summed(x) - summed(without)).norm()) <= 1 + ROUNDING_MARGIN
