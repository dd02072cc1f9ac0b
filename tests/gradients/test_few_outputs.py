"""A linear map to few outputs and the norms of its input, read from memory once: the same numbers as two passes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from sordino.clipping import FlatClip
from sordino.gradients import Rows, brute_force, clipped_sum
from sordino.gradients.layers import linear
from sordino.gradients.sums.memory import squares
from sordino.native.kernels import compiled

needs_compiler = pytest.mark.skipif(compiled() is None, reason="installed without a C compiler")


@needs_compiler
@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, 13),
    columns=st.integers(1, 40) | st.sampled_from([1023, 1024, 1025, 2049, 5000]),
    outputs=st.integers(1, 16),
    bias=st.booleans(),
    double=st.booleans(),
    wide=st.booleans(),
)
def test_it_equals_the_product_and_the_squares(
    rows: int, columns: int, outputs: int, bias: bool, double: bool, wide: bool
) -> None:
    dtype, generator = torch.float64 if double else torch.float32, torch.Generator().manual_seed(rows)
    whole = torch.randn(rows, columns + 3, dtype=dtype, generator=generator)
    x = whole[:, 1 : columns + 1] if wide else whole[:, :columns].contiguous()
    w = torch.randn(outputs, columns, dtype=dtype, generator=generator)
    b = torch.randn(outputs, dtype=dtype, generator=generator) if bias else None
    output, norm2 = x.new_full((rows, outputs), torch.nan), torch.full((rows,), torch.nan, dtype=torch.float64)
    assert linear._by_loop(x, w, b, output, norm2)
    exact = F.linear(x.double(), w.double(), None if b is None else b.double())
    error = 1e-13 if double else 1e-5
    torch.testing.assert_close(output.double(), exact, rtol=error, atol=error * columns**0.5)
    assert torch.equal(norm2, squares(x)), "norms are those that every other rule takes"


@needs_compiler
def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    x, w = torch.randn(9, 2000), torch.randn(3, 2000)
    x[4, 7] = torch.inf
    output, norm2 = torch.empty(9, 3), torch.empty(9, dtype=torch.float64)
    assert linear._by_loop(x, w, None, output, norm2)
    assert output.isfinite().all(1).tolist() == [i != 4 for i in range(9)]
    assert norm2.isfinite().tolist() == [i != 4 for i in range(9)]


@pytest.mark.parametrize("change", ["columns", "transposed", "dtype", "many"])
def test_memory_of_another_form_is_left_to_torch(change: str) -> None:
    x, w = torch.randn(8, 6), torch.randn(3, 6)
    if change == "columns":
        w = torch.randn(3, 5)
    elif change == "transposed":
        x = torch.randn(6, 8).mT
    elif change == "dtype":
        w = w.double()
    else:
        w = torch.randn(17, 6)
    assert not linear._by_loop(x, w, None, torch.empty(8, len(w)), torch.empty(8))


def test_a_large_logistic_regression_matches_the_loop() -> None:
    torch.manual_seed(0)
    model, x, y = torch.nn.Linear(3000, 1), torch.randn(1500, 3000), torch.randint(2, (1500,)).float()

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(outputs[:, 0], targets, reduction="none")

    few = Rows(x[:20], y[:20])
    clipping = FlatClip(float(brute_force(model, loss, few, FlatClip(1.0)).norms.median()))
    ours, wanted = clipped_sum(model, loss, Rows(x, y), clipping), brute_force(model, loss, few, clipping)
    torch.testing.assert_close(ours.norms[:20], wanted.norms, rtol=1e-5, atol=0)
    double = brute_force(model.double(), loss, Rows(x.double(), y.double()), clipping)
    for name, total in double.sums.items():
        torch.testing.assert_close(ours.sums[name].double(), total, rtol=1e-4, atol=1e-3)
