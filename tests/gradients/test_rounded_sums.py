"""Sums that are rounded to single precision where they are computed; contributions that are added up first."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sordino.gradients.layers.convolution import Convolved, Geometry
from sordino.gradients.sums import totals
from sordino.gradients.sums.contributions import Dense, Outer
from sordino.gradients.sums.narrow import narrow_sum
from sordino.gradients.sums.totals import Total


def bounds(records: int, blocks: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.linspace(0, records, blocks + 1).astype(np.int64)


@pytest.mark.parametrize("outputs", [7, 30, 100])
@pytest.mark.parametrize("positions", [1, 4, 40])
@pytest.mark.parametrize("blocks", [None, 1, 3])
def test_a_linear_map_of_several_positions(outputs: int, positions: int, blocks: int | None) -> None:
    given = torch.randn(9, positions, outputs), torch.randn(9, positions, 65)
    weight = torch.rand(9, dtype=torch.float64)
    weight[4] = 0
    one, other = Outer(*given), Outer(*given)
    one.runs = other.runs = None if blocks is None else bounds(9, blocks)
    total = torch.zeros(outputs, 65, dtype=torch.float64)
    one.add_to(total, weight)
    assert torch.equal(narrow_sum(other, weight, torch.empty(outputs, 65)), total.float())
    expected = torch.einsum("m,msp,msq->pq", weight, *(t.double() for t in given))
    assert torch.allclose(total, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_convolution_whose_activations_are_stored(blocks: int) -> None:
    x, g = torch.randn(5, 1, 16, 4, 4), torch.randn(5, 1, 48, 4, 4)
    form = Convolved(g, x, Geometry((48, 16, 3, 3), (1, 1), (1, 1), (1, 1), 1))
    form.runs = bounds(5, blocks)
    weight, total = torch.rand(5, dtype=torch.float64), torch.zeros(48, 16, 3, 3, dtype=torch.float64)
    form.add_to(total, weight)
    assert torch.equal(narrow_sum(form, weight, torch.empty(48, 16, 3, 3)), total.float())
    kernel = torch.zeros(48, 16, 3, 3, dtype=torch.float64, requires_grad=True)
    output = F.conv2d(x[:, 0].double(), kernel, padding=1)
    (expected,) = torch.autograd.grad((output * g[:, 0]).sum((1, 2, 3)) @ weight, kernel)
    assert torch.allclose(total, expected, rtol=0, atol=1e-4)


def test_lengths_are_computed_anew_after_a_record_is_dropped() -> None:
    form = Outer(torch.randn(3, 4, 30), torch.randn(3, 4, 40))
    form.left[1, 2, 3] = torch.inf
    assert torch.isfinite(form.norm2()).tolist() == [True, False, True]
    form.drop(torch.tensor([False, True, False]))
    assert form.lengths()[1] == 0
    assert torch.isfinite(form.norm2()).all()


class TestSeveralContributionsToOneParameter:
    """Small ones are added up record by record, so that the vector that is summed is the one that was measured."""

    @staticmethod
    def parts(records: int = 6) -> tuple[Dense, Dense, Tensor]:
        first, second = torch.randn(records, 5, 8), torch.randn(records, 5, 8)
        return Dense(first.clone(), owned=True), Dense(second), first + second

    @pytest.mark.parametrize("owned", [True, False])
    def test_norms_and_sums_are_those_of_the_sum(self, owned: bool) -> None:
        one, two, expected = self.parts()
        one.owned = owned
        kept, total = (one.gradient.clone(), two.gradient.clone()), Total([one, two])
        norm2, out = total.norm2(), torch.zeros(5, 8, dtype=torch.float64)
        assert torch.allclose(norm2, expected.double().square().sum((1, 2)), rtol=2.0**-17, atol=0)
        assert torch.equal(total.dense(0, 6), expected)
        total.add_to(out, weight := torch.rand(6, dtype=torch.float64))
        assert torch.allclose(out, torch.einsum("m,mpq->pq", weight, expected.double()))
        assert torch.equal(two.gradient, kept[1])
        assert torch.equal(one.gradient, kept[0]) is not owned

    def test_a_sum_that_cancels_has_the_norm_of_what_is_left(self) -> None:
        """Not of the parts: nothing else than what is left is added to the sum."""
        one, two, _ = self.parts()
        two.gradient = -one.gradient + 2.0**-14
        total, out = Total([one, two]), torch.zeros(5, 8, dtype=torch.float64)
        length = total.norm2().sqrt()
        total.add_to(out, torch.tensor([0, 0, 1, 0, 0, 0], dtype=torch.float64))
        assert float(out.norm()) <= float(length[2]) * (1 + 2.0**-16)
        assert float(length[2]) <= float(out.norm()) * (1 + 2.0**-16)

    def test_a_record_that_is_not_finite_is_dropped_alone(self) -> None:
        one, two, expected = self.parts()
        two.gradient[3, 1, 1] = torch.nan
        total, out = Total([one, two]), torch.zeros(5, 8, dtype=torch.float64)
        bad = ~torch.isfinite(total.norm2())
        assert bad.tolist() == [False, False, False, True, False, False]
        total.drop(bad)
        total.add_to(out, torch.ones(6, dtype=torch.float64))
        assert torch.allclose(out, expected[~bad].double().sum(0))

    def test_large_ones_are_not_kept_as_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(totals, "ADDED_BYTES", 6 * 5 * 8 * 4 - 1)
        one, two, expected = self.parts()
        total = Total([one, two])
        assert torch.allclose(total.norm2(), expected.double().square().sum((1, 2)), rtol=1e-4)
        assert total.parts == [one, two]
