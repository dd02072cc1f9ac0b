"""DP-PCA: sensitivity 1, the directions of the data, paid for in the plan."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sordino.errors import InputError
from sordino.features.moment import second_moment, triangle, unit_rows
from sordino.methods.dp_mac import plan
from sordino.methods.dp_mac.pca import PcaBudget, private_projection
from sordino.randomness import RandomSource
from sordino.release.ledger import Ledger


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    size=st.sampled_from([1e-44, 1e-30, 1e-22, 1e-3, 1.0, 1e3, 1e12, 1e30]),
    scale=st.one_of(st.none(), st.floats(1e-2, 1e2)),
)
def test_one_record_moves_the_released_vector_by_at_most_one(seed: int, size: float, scale: float | None) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(30, 7, generator=generator) * size
    with_it, without = (triangle(second_moment(r, scale)) for r in (rows, rows[:-1]))
    assert float((with_it - without).norm()) <= 1.0 + 1e-5


def test_records_that_are_not_finite_are_zero() -> None:
    rows = torch.tensor([[3.0, 4.0], [torch.nan, 1.0], [torch.inf, 0.0], [0.0, 0.0]])
    assert unit_rows(rows, None).tolist() == [[pytest.approx(0.6), pytest.approx(0.8)], [0, 0], [0, 0], [0, 0]]
    assert float(unit_rows(rows, 50.0)[0].norm()) == pytest.approx(0.1)


def test_it_finds_the_directions_of_the_data_and_pays_for_them() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5000, 12, generator=generator) * torch.tensor([3.0, 2.0] + [0.1] * 10)
    budget = PcaBudget(components=2, records=5000, noise_multiplier=4.0, whiten=1.0)
    made = plan(
        parts=1, noise_multiplier=1.0, delta=1e-5, records=5000, expected_batch=100, steps=10,
        statistics=[budget.statistic()],
    )  # fmt: skip
    with Ledger.open(None, made.to_dict()) as ledger:
        found = private_projection(rows, budget, source=RandomSource.seeded(0), ledger=ledger)
        (entry,) = ledger.entries
    assert entry["purpose"] == "dp-pca"
    assert entry["coordinates"] == 78
    projected = found(rows)
    assert projected.shape == (5000, 2)
    torch.testing.assert_close(projected.square().mean(0), torch.ones(2), rtol=0.1, atol=0.0)
    inside = torch.linalg.qr(found.matrix)[0]
    assert float(inside[:2].square().sum()) > 1.98  # the first two axes, up to a rotation
    alone = plan(parts=1, noise_multiplier=1.0, delta=1e-5, records=5000, expected_batch=100, steps=10)
    assert made.guarantee().epsilon > alone.guarantee().epsilon


def test_impossible_budgets_are_refused() -> None:
    with pytest.raises(InputError, match="components"):
        PcaBudget(0, 10, 1.0)
    with pytest.raises(InputError, match="noise_multiplier"):
        PcaBudget(1, 10, 0.0)
    with pytest.raises(InputError, match="whiten"):
        PcaBudget(1, 10, 1.0, whiten=2.0)
    with Ledger.open(None, {}) as ledger, pytest.raises(InputError, match="9 components"):
        private_projection(torch.ones(3, 2), PcaBudget(9, 3, 1.0), source=RandomSource.seeded(0), ledger=ledger)
