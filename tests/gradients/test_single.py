"""Rows of one position: scaled where they lie if they are the engine's alone, and never where anybody could tell."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradients.cases import Fn, agree, noise, squared
from sordino.clipping import Clipping, FlatClip, PerLayerClip
from sordino.errors import Refused
from sordino.gradients import Rows, brute_force, clipped_sum, passes
from sordino.gradients.sums import single
from sordino.gradients.sums.memory import scaled
from sordino.gradients.sums.single import Scaled, Shift, Single
from sordino.native.kernels import compiled


@pytest.fixture
def overwritten(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each set of rows that was scaled, whether in place."""
    seen: list[bool] = []

    def watched(rows: Tensor, weight: Tensor, in_place: bool = False) -> tuple[Tensor, Tensor]:
        seen.append(in_place)
        return scaled(rows, weight, in_place)

    monkeypatch.setattr(single, "scaled", watched)
    return seen


def sums(model: nn.Module, rows: Rows, clipping: Clipping, loss: Callable[..., Tensor] = squared, **more: Any) -> None:
    """As those of the loop, twice."""
    expected = brute_force(model, loss, rows, clipping)
    for _ in range(2):
        agree(clipped_sum(model, loss, rows, clipping, **more), expected)


@pytest.mark.skipif(compiled() is None, reason="installed without a C compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_result_takes_the_place_of_rows_that_nobody_else_holds(dtype: torch.dtype) -> None:
    weight = torch.rand(5, dtype=torch.float64)
    before = torch.randn(5, 3, dtype=dtype)
    mine = Scaled(before.clone(), shared=True, once=True)
    at = mine.rows.data_ptr()
    product, total = mine.by(weight)
    assert torch.equal(product, (before.double() * weight[:, None]).to(dtype))
    assert torch.allclose(total, weight @ before.double(), rtol=1e-6)
    assert product.data_ptr() == at
    assert mine.by(weight)[1] is total, "the bias gets what the weight got"
    with pytest.raises(RuntimeError, match="overwritten"):
        _ = mine.rows
    with pytest.raises(RuntimeError, match="overwritten"):
        mine.by(weight.clone())


@pytest.mark.parametrize("once", [True, False])
def test_rows_that_are_held_or_asked_for_again_stay_as_they_are(once: bool) -> None:
    rows, weight = torch.randn(5, 3), torch.rand(5, dtype=torch.float64)
    before, held = rows.clone(), rows if once else None
    shared = Scaled(rows, shared=True, once=once)
    del rows
    assert torch.equal(shared.by(weight)[0], (before.double() * weight[:, None]).float())
    assert torch.equal(shared.by(2 * weight)[0], (before.double() * (2 * weight)[:, None]).float())
    assert torch.equal(shared.rows, before)
    assert held is None or torch.equal(held, before)


def test_a_bad_record_is_taken_out_of_the_weight_and_of_the_bias() -> None:
    rows, inputs = torch.ones(3, 2), torch.ones(3, 4)
    rows[1] = torch.nan
    shared = Scaled(rows, shared=True)
    map_, shift = Single(shared, inputs, torch.ones(3)), Shift(shared, 3, torch.ones(3))
    for part in (map_, shift):
        part.drop(torch.tensor([False, True, False]))
    one, whole, bias = torch.ones(3, dtype=torch.float64), *(torch.zeros(2, n, dtype=torch.float64) for n in (4, 1))
    map_.add_to(whole, one)
    shift.add_to(bias[:, 0], one)
    assert torch.equal(whole, torch.full_like(whole, 2.0))
    assert torch.equal(bias, torch.full_like(bias, 2.0))


def test_layers_in_a_row_are_summed_in_place(overwritten: list[bool]) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 2)).double()
    sums(model, Rows(noise(7, 4), noise(7)), FlatClip(0.5))
    assert overwritten == [True] * 6


def test_branches_that_get_the_same_gradient_do_not_scale_it_twice(overwritten: list[bool]) -> None:
    model = Fn(lambda s, x: s.a(x) + s.b(x), a=nn.Linear(4, 3), b=nn.Linear(4, 3)).double()
    sums(model, Rows(noise(6, 4), noise(6)), FlatClip(0.5))
    assert overwritten == [False, True] * 2, "the first is released once it is summed; then nobody else has the rows"


def test_coefficients_that_come_back_as_a_gradient_stay_the_users() -> None:
    """The loss is the output itself, so the gradient that arrives is the coefficients seen as a column."""
    model = nn.Linear(4, 1).double()
    coefficient = torch.rand(6, dtype=torch.float64)
    before = coefficient.clone()
    rows = Rows(noise(6, 4), noise(6), coefficient=coefficient)
    sums(model, rows, FlatClip(0.1), lambda out, targets: out.squeeze(1))
    assert torch.equal(coefficient, before)


def test_a_gradient_that_a_function_always_gives_is_refused_and_stays_as_it_is() -> None:
    """It does not follow the weights of the losses, so it is no record's."""
    kept = noise(6, 3)
    before = kept.clone()

    class Constant(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.sum(1)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return kept

    model = nn.Linear(4, 3).double()
    loss: Callable[..., Tensor] = lambda out, targets: Constant.apply(out)  # type: ignore[no-any-return,no-untyped-call] # noqa: E731
    rows = Rows(noise(6, 4), noise(6))
    for seed in range(8):  # the codes of the measurement are random
        torch.manual_seed(seed)
        with pytest.raises(Refused):
            clipped_sum(model, loss, rows, FlatClip(0.1))
    assert torch.equal(kept, before)


def test_a_gradient_that_the_users_hook_keeps_stays_as_it_was() -> None:
    seen: list[Tensor] = []
    copies: list[Tensor] = []
    logger: Any = logging.getLogger("gradients")  # what a model keeps elsewhere is refused
    logger.see = lambda g: (seen.append(g), copies.append(g.clone()))[0]  # type: ignore[func-returns-value]

    def forward(self: Any, x: Tensor) -> Tensor:
        hidden: Tensor = self.first(x)
        hidden.register_hook(logger.see)
        out: Tensor = self.second(torch.tanh(hidden))
        return out

    model = Fn(forward, first=nn.Linear(4, 3), second=nn.Linear(3, 2)).double()
    clipped_sum(model, squared, Rows(noise(6, 4), noise(6)), FlatClip(0.01))
    assert len(seen) == 1
    assert torch.equal(seen[0], copies[0])


def test_a_weight_and_a_bias_of_different_layers_are_clipped_with_their_own_factors() -> None:
    model = Fn(
        lambda s, x: F.linear(x, s.a.weight, s.b.bias), a=nn.Linear(4, 3, bias=False), b=nn.Linear(1, 3)
    ).double()
    model.b.weight.requires_grad_(False)
    sums(model, Rows(noise(6, 4), noise(6)), PerLayerClip(0.3, split=(1.0, 5.0)))


def test_a_centre_for_the_weight_alone_is_taken_from_rows_that_are_still_there() -> None:
    model = nn.Linear(4, 3).double()
    rows = Rows(noise(6, 4), noise(6))
    both = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    both["weight"] += 0.1
    one = {"weight": both["weight"]}
    found, expected = (clipped_sum(model, squared, rows, FlatClip(0.5), centre=c) for c in (one, both))
    for name, value in expected.sums.items():
        torch.testing.assert_close(found.sums[name], value)


def test_rules_run_without_gradient_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    setup = passes.Setup(model, lambda out, y: out.squeeze(1) * y, dict(model.named_parameters()), ())
    run = passes.Pass(setup, (torch.randn(5, 4), torch.randn(5)), 5, {})
    modes: list[bool] = []
    run.backward(torch.ones(5), lambda use, gradient: modes.append(torch.is_grad_enabled() or gradient.requires_grad))
    run.close()
    assert modes == [False, False]
