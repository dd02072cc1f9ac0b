"""Blocks, norms and parts: the same numbers however the work is cut."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gradients.cases import agree, noise, squared
from sordino.clipping import FlatClip
from sordino.gradients import Rows, brute_force, clipped_sum
from sordino.gradients.layers import convolution
from sordino.gradients.sums.memory import CACHE_BYTES, blocks, compact, cross, lengths, scaled, squares


@pytest.mark.parametrize("records", [0, 1, 7, 64])
@pytest.mark.parametrize("coordinates", [1, 100, 10**6])
def test_blocks_cover_every_record_once_within_the_size(records: int, coordinates: int) -> None:
    found = blocks(records, coordinates, 4, 4000)
    assert [i for lo, hi in found for i in range(lo, hi)] == list(range(records))
    assert all(hi - lo == 1 or (hi - lo) * coordinates * 4 <= 4000 for lo, hi in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("width", [0, 3, 8192, 20_001])
def test_squares_of_rows_of_any_length(dtype: torch.dtype, width: int) -> None:
    rows = torch.randn(4, width).to(dtype)
    assert torch.allclose(squares(rows).double(), rows.double().square().sum(1), rtol=2e-2 if width else 0)
    assert torch.equal(compact(rows.mT), rows.mT)


def test_norms_of_every_finite_row_are_finite_and_there_is_no_warning() -> None:
    rows = torch.tensor([[3e38, 3e38], [torch.nan, 0.0], [1.0, 2.0], [torch.inf, 0.0], [1e-45, 0.0]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, finite = lengths([squares(rows), torch.tensor([0, 1.0, 4.0, 0, 0], dtype=torch.float64)])
    assert float(found[0]) == pytest.approx(3e38 * 2**0.5)
    assert bool(found[1].isnan())
    assert float(found[2]) == pytest.approx(3.0)
    assert float(found[3]) == torch.inf
    assert float(found[4]) == float(rows[4, 0]), "the square of the smallest number is not lost"
    assert not finite


@pytest.mark.parametrize("record", [None, torch.tensor([0, 0, 1, 2, 2, 3, 4])])
def test_a_grouped_convolution_in_parts_equals_the_loop(
    monkeypatch: pytest.MonkeyPatch, record: torch.Tensor | None
) -> None:
    monkeypatch.setattr(convolution, "GROUP_BYTES", 3000)
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh(), nn.Flatten()).double()
    rows = Rows(noise(7, 4, 6, 6), noise(7), record)
    agree(clipped_sum(model, squared, rows, FlatClip(0.5), chunk=5), brute_force(model, squared, rows, FlatClip(0.5)))


def test_views_that_negate_and_zeros_without_memory_are_not_read_where_they_lie() -> None:
    negative, weight = torch._neg_view(torch.arange(6.0).reshape(3, 2)), torch.ones(3)
    assert squares(negative).tolist() == pytest.approx([1.0, 13.0, 41.0])
    assert scaled(negative, weight)[1].tolist() == [-6.0, -9.0]
    nothing = torch._efficientzerotensor((3, 2))
    assert squares(nothing).tolist() == pytest.approx([0.0] * 3)
    assert scaled(nothing, weight)[1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("record", [None, torch.tensor([0, 0, 1, 2, 2, 3, 4])])
def test_calls_after_one_another_give_the_same(record: torch.Tensor | None) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 5), nn.Linear(5, 2)).double()
    clipping = FlatClip(0.5)
    for _ in range(3):
        rows = Rows(noise(7, 2, 6, 6), noise(7), record)
        oracle = brute_force(model, squared, rows, clipping)
        agree(clipped_sum(model, squared, rows, clipping), oracle)
        agree(clipped_sum(model, squared, rows, clipping, chunk=3), oracle)


def test_a_product_in_double_precision_needs_one_small_buffer_for_all_blocks() -> None:
    """A copy for each block of rows took as much memory as the batch in double precision, in some processes."""
    made: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            here = [a.untyped_storage().data_ptr() for a in (out, *args) if isinstance(a, torch.Tensor)]
            if here[0] not in here[1:]:  # no view, and not in place
                made.append(out.untyped_storage().nbytes())
            return out

    left, right, total = torch.randn(2000, 3), torch.randn(2000, 1024), torch.zeros(3, 1024, dtype=torch.float64)
    with Sizes():  # type: ignore[no-untyped-call]
        cross(total, left, right)
    assert sum(made) <= CACHE_BYTES
    torch.testing.assert_close(total, left.double().mT @ right.double())
    cross(total.zero_(), left.double(), right.double())
    torch.testing.assert_close(total, left.double().mT @ right.double())
