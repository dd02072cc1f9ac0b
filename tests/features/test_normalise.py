"""Normalisation: free within a record, paid for across records."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sordino.errors import InputError
from sordino.features import ChannelBudget, group_normalise, private_statistics, standardise
from sordino.features.normalise import _clip
from sordino.plan import ROUNDING_MARGIN
from sordino.randomness import RandomSource
from sordino.release.ledger import Ledger


@settings(deadline=None, max_examples=20)
@given(
    n=st.integers(1, 4),
    groups=st.integers(1, 4),
    size=st.integers(1, 3),
    scale=st.floats(0.1, 100),
    seed=st.integers(0, 99),
)
def test_each_group_of_a_record_has_mean_zero_and_variance_one(
    n: int, groups: int, size: int, scale: float, seed: int
) -> None:
    maps = scale * torch.randn(n, groups * size, 4, 5, generator=torch.Generator().manual_seed(seed)) + 7
    out = group_normalise(maps, groups).view(n, groups, -1)
    assert torch.allclose(out.mean(2), torch.zeros(n, groups), atol=1e-4)
    assert torch.allclose(out.var(2, unbiased=False), torch.ones(n, groups), atol=2e-2)


def test_groups_that_do_not_divide_the_channels_are_an_error() -> None:
    with pytest.raises(InputError, match="27 groups do not divide the 80 channels"):
        group_normalise(torch.zeros(1, 80, 7, 7))


def test_standardise_is_per_channel() -> None:
    maps = torch.tensor([[[1.0, 3.0], [10.0, 30.0]]])
    out = standardise(maps, torch.tensor([2.0, 20.0]), torch.tensor([1.0, 10.0]))
    assert out.tolist() == [[[-1.0, 1.0], [-1.0, 1.0]]]
    with pytest.raises(InputError, match="not positive"):
        standardise(maps, torch.zeros(2), torch.tensor([1.0, 0.0]))
    with pytest.raises(InputError, match="shape \\(2,\\)"):
        standardise(maps, torch.zeros(3), torch.ones(3))


def statistics(maps: Tensor, budget: ChannelBudget) -> tuple[Tensor, Tensor, Ledger]:
    ledger = Ledger.open(None, {"kind": "plan"})
    found = private_statistics(maps, budget, source=RandomSource.seeded(1), ledger=ledger)
    return found.mean, found.std, ledger


def test_with_hardly_any_noise_the_statistics_are_the_true_ones() -> None:
    maps = (
        torch.randn(500, 3, 4, 4, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1)
        + 1
    )
    mean, std, _ = statistics(maps, ChannelBudget(500, 1e3, 1e3, noise_multiplier=1e-6))
    assert torch.allclose(mean, maps.mean((0, 2, 3)), atol=1e-3)
    assert torch.allclose(std, maps.std((0, 2, 3), unbiased=False), atol=1e-2)


@pytest.mark.parametrize("relation", ["add-remove", "replace-one"])
def test_the_ledger_holds_two_releases_with_the_public_bounds(relation: str) -> None:
    budget = ChannelBudget(10, 0.5, 2.0, noise_multiplier=6.0, relation=relation)
    _, _, ledger = statistics(torch.randn(10, 3, 2, 2), budget)
    lines = [entry for entry in ledger.entries if entry["kind"] == "release"]
    assert [line["sensitivity"] for line in lines] == [0.5 * (1 + ROUNDING_MARGIN), 2.0 * (1 + ROUNDING_MARGIN)]
    assert [(line["purpose"], line["step"], line["noise_multiplier"]) for line in lines] == [
        ("statistics", 0, 6.0),
        ("statistics", 1, 6.0),
    ]
    assert all(line["sampling"]["sampling_rate"] == 1.0 and line["relation"] == relation for line in lines)


def test_one_record_moves_the_sums_by_no_more_than_the_bound() -> None:
    # same seed, same noise: the difference is the record's clipped contribution, up to a step of the grid (σ/64)
    budget = ChannelBudget(1, 0.5, 2.0, noise_multiplier=1e-3)
    ordinary, outlier = torch.ones(4, 3, 2, 2), torch.full((1, 3, 2, 2), 1e6)
    without, _, _ = statistics(ordinary, budget)
    with_it, _, _ = statistics(torch.cat([ordinary, outlier]), budget)
    assert (with_it - without).norm() <= 0.5 + 1e-4
    assert (with_it - without).norm() > 0.49


def test_a_record_that_is_not_finite_contributes_nothing() -> None:
    budget = ChannelBudget(4, 5.0, 5.0)
    good = torch.randn(4, 3, 2, 2)
    bad = torch.full((1, 3, 2, 2), math.nan)
    assert torch.equal(statistics(good, budget)[0], statistics(torch.cat([good, bad]), budget)[0])


def test_the_standard_deviation_is_positive_even_when_noise_makes_the_variance_negative() -> None:
    _, std, _ = statistics(torch.zeros(2, 50, 2, 2), ChannelBudget(2, 1.0, 1.0, floor=1e-2))
    assert std.min() >= math.sqrt(1e-2) * 0.999


@pytest.mark.parametrize(
    "change",
    [{"mean_bound": 0.0}, {"square_bound": math.inf}, {"noise_multiplier": -1.0}, {"records": 0}, {"relation": "x"}],
)
def test_a_budget_that_means_nothing_is_refused(change: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(change))):
        ChannelBudget(**{"records": 1, "mean_bound": 1.0, "square_bound": 1.0, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bound", [2.2e-45, 1e-30, 1.0, 1e30])
@pytest.mark.parametrize("size", [1e-200, 1e-40, 1e-20, 1.0, 1e20, 3e38, 1e300])
def test_no_record_is_longer_than_its_bound_for_any_float(dtype: torch.dtype, bound: float, size: float) -> None:
    """In single precision, bounds below 1e-38 were exceeded by a half."""
    rows = torch.full((1, 5), size, dtype=torch.float64).to(dtype)
    (row,) = (_clip(rows, bound) / bound).tolist()
    assert sum(x * x for x in row) <= 1 + ROUNDING_MARGIN
