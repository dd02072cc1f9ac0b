"""Weights of experts: norms, sums and single gradients equal those of a loop over rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sordino.gradients import routed
from sordino.gradients.routed import Routed

Case = tuple[Tensor, Tensor, Tensor, Tensor, tuple[int, int]]


def case(rows: int, records: int, experts: int, seed: int = 0, d: tuple[int, int] = (3, 4)) -> Case:
    generator = torch.Generator().manual_seed(seed)
    x, g = (torch.randn(rows, k, dtype=torch.float64, generator=generator) for k in d)
    owner = torch.randint(-1, records, (rows,), generator=generator)
    expert = torch.randint(experts, (rows,), generator=generator)
    return x, g, owner, expert, (records, experts)


def looped(x: Tensor, g: Tensor, owner: Tensor, expert: Tensor, sizes: tuple[int, int]) -> Tensor:
    out = x.new_zeros(*sizes, x.shape[1], g.shape[1])
    for t in range(len(x)):
        if owner[t] >= 0:
            out[owner[t], expert[t]] += torch.outer(x[t], g[t])
    return out


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(0, 40),
    records=st.integers(1, 9),
    experts=st.integers(1, 5),
    seed=st.integers(0, 9),
    few=st.booleans(),
)
def test_it_equals_a_loop_over_rows(rows: int, records: int, experts: int, seed: int, few: bool) -> None:
    made = case(rows, records, experts, seed)
    wanted = looped(*made)
    weight = torch.linspace(0, 1, records, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        if few:
            patch.setattr(routed, "CACHE_BYTES", 3 * 12 * 8)  # three pairs at a time
        for swapped in (False, True):
            found = Routed(*made, swapped=swapped)
            expected = wanted.mT if swapped else wanted
            torch.testing.assert_close(found.norm2(), expected.flatten(1).square().sum(1), rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(found.weighted(weight), torch.einsum("i,i...->...", weight, expected))
            torch.testing.assert_close(found.dense(0, records), expected)
            half = records // 2
            torch.testing.assert_close(found.dense(half, records), expected[half:])


def test_a_bad_record_is_dropped_and_spoils_no_other() -> None:
    x, g, owner, expert, sizes = case(50, 5, 3)
    clean = looped(x, g, owner, expert, sizes)
    x[(owner == 2).nonzero()[0]] = torch.nan
    found = Routed(x, g, owner, expert, sizes)
    bad = ~found.norm2().isfinite()
    assert bad.tolist() == [False, False, True, False, False]
    found.drop(bad)
    clean[2] = 0
    torch.testing.assert_close(found.weighted(torch.ones(5)), clean.sum(0))
    torch.testing.assert_close(found.norm2(), clean.flatten(1).square().sum(1), rtol=1e-10, atol=1e-12)


def test_it_is_the_gradient_of_a_grouped_product() -> None:
    """Experts as transformers computes them: rows sorted by expert, one product for each."""
    x, _, owner, expert, sizes = case(30, 4, 3)
    order = torch.argsort(expert, stable=True)
    x, owner, expert = x[order], owner[order].clamp_min(0), expert[order]
    w = torch.randn(3, 3, 4, dtype=torch.float64, requires_grad=True)
    cut = torch.bincount(expert, minlength=3).tolist()
    output = torch.cat([part @ w[e] for e, part in enumerate(torch.split(x, cut))])
    g = torch.randn_like(output)
    found = Routed(x, g, owner, expert, sizes)
    for i in range(4):
        (wanted,) = torch.autograd.grad(output, w, g * (owner == i)[:, None], retain_graph=True)
        torch.testing.assert_close(found.dense(i, i + 1)[0], wanted)
    (total,) = torch.autograd.grad(output, w, g)
    torch.testing.assert_close(found.weighted(torch.ones(4)), total)


def test_lists_of_different_lengths_are_refused() -> None:
    x, g, owner, expert, sizes = case(10, 2, 2)
    with pytest.raises(ValueError, match="differ in number"):
        Routed(x, g[:9], owner, expert, sizes)
