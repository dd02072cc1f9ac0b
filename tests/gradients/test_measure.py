"""Rows that the program hides are measured: the same layouts as known ones, and refusals where records interact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import Fn, agree, matches, noise, squared
from torch import Tensor, nn

from sordino.clipping import FlatClip
from sordino.errors import Refused
from sordino.gradients import Rows, brute_force, clipped_sum
from sordino.gradients.engine import row_loss
from sordino.gradients.labels.lineage import Axis, spread
from sordino.gradients.measure import measured
from sordino.gradients.passes import Pass, Setup
from sordino.gradients.survey import survey
from sordino.gradients.tape.layout import Positions


def traced(act: Any, *like: Tensor) -> Any:
    """The same, in a way that no tape sees into."""
    return torch.jit.trace(act, like, check_trace=False)


HIDDEN = traced(lambda t: t * 2, torch.zeros(2, 2))


def run_of(model: nn.Module, inputs: Any, rows: int) -> Pass:
    found = survey(model)
    setup = Setup(model, row_loss(squared), found.parameters, found.state)
    dtype = next(model.parameters()).dtype
    return Pass(setup, (inputs, torch.randn(rows, dtype=dtype)), rows, {})


def hidden_linear(s: Any, x: Tensor) -> Tensor:
    return s.b(HIDDEN(s.a(x)))


def two_layers(features: int = 4) -> dict[str, nn.Module]:
    return {"a": nn.Linear(features, 5), "b": nn.Linear(5, 3)}


@pytest.mark.parametrize(
    ("forward", "shape"),
    [
        (lambda s, x: s.b(torch.tanh(s.a(x))), (6, 4)),
        (lambda s, x: s.b(torch.tanh(s.a(x))), (6, 6, 4)),
        (lambda s, x: s.b(torch.tanh(s.a(x.flatten(0, 1)))).unflatten(0, (6, 6)), (6, 6, 4)),
        (lambda s, x: s.b(torch.tanh(s.a(x.transpose(0, 1)))).transpose(0, 1), (6, 6, 4)),
        (lambda s, x: s.b(torch.tanh(s.a(x.flip(0)))).flip(0), (6, 4)),
    ],
)
def test_measured_layouts_equal_those_that_the_program_tells(forward: Any, shape: tuple[int, ...]) -> None:
    run = run_of(Fn(forward, **two_layers()).double(), noise(*shape), 6)
    assert run.proven
    known = {use.index: use.layout for use in run.tape.uses}
    shapes = {use.index: (use.shape, use.lead) for use in run.tape.uses}
    count = 0
    with torch.no_grad():
        for use, _, layout in measured(run, torch.ones(6, dtype=torch.float64)):
            want, (size, lead) = known[use.index], shapes[use.index]
            if isinstance(want, Axis):
                rows = spread(want, size, 6)
                want = Positions(rows[tuple(slice(None) if d in lead else 0 for d in range(len(size)))].flatten())
            assert isinstance(layout, Positions)
            assert isinstance(want, Positions)
            assert torch.equal(layout.row, want.row)
            count += 1
    assert count == len(known) > 0


@pytest.mark.parametrize("rows", [2, 5, 300])
def test_a_traced_function_hides_rows_and_sums_are_right_all_the_same(rows: int) -> None:
    model = Fn(hidden_linear, **two_layers()).double()
    assert not run_of(model, noise(rows, 4), rows).proven
    matches(model, noise(rows, 4), rows=rows)


@pytest.mark.parametrize("size", [5, 3])
def test_traced_functions_that_permute_and_merge_rows_are_measured(size: int) -> None:
    turn = traced(lambda t: t.flip(0).flatten(0, 1), torch.zeros(2, 3, 5))
    model = Fn(lambda s, x: s.b(torch.tanh(turn(s.a(x)))).unflatten(0, x.shape[:2]).flip(0), **two_layers()).double()
    assert not run_of(model, noise(5, size, 4), 5).proven
    matches(model, noise(5, size, 4))


def test_a_traced_function_of_the_inputs_leaves_their_rows_to_be_measured() -> None:
    matches(Fn(lambda s, x: s.b(torch.tanh(s.a(HIDDEN(x)))), **two_layers()), noise(5, 4))


def test_in_single_precision_three_hundred_rows_are_told_apart() -> None:
    torch.manual_seed(0)
    model = Fn(hidden_linear, **two_layers())
    rows = Rows(torch.randn(300, 4), torch.randn(300))
    assert not run_of(model, rows.inputs, 300).proven
    agree(clipped_sum(model, squared, rows, FlatClip(1.0)), brute_force(model, squared, rows, FlatClip(1.0)), 1e-5)


def test_positions_without_a_gradient_belong_to_nobody() -> None:
    def masked(s: Any, x: Tensor) -> Tensor:
        h = HIDDEN(torch.tanh(s.a(x)))
        return s.b(h * (torch.arange(6) % 2 == 0)[:, None])

    def half(s: Any, x: Tensor) -> Tensor:
        h = HIDDEN(torch.tanh(s.a(x)))
        return s.b(h[:, ::2])

    matches(Fn(masked, **two_layers()), noise(5, 6, 4))
    matches(Fn(half, **two_layers()), noise(5, 6, 4))


def test_a_row_whose_loss_is_constant_contributes_nothing() -> None:
    model = Fn(lambda s, x: s.b(HIDDEN(torch.tanh(s.a(x)))) * (x[:, :1] > 0), **two_layers()).double()
    inputs = noise(5, 4)
    inputs[:, 0] = torch.tensor([1.0, -1, 1, 1, -1])
    found = clipped_sum(model, squared, Rows(inputs, torch.randn(5, dtype=torch.float64)), FlatClip(1.0))
    assert (found.norms < 1e-100).tolist() == [False, True, False, False, True]


@pytest.mark.parametrize(
    "act", [lambda h: h - h.mean(0), lambda h: h + h.flip(0), lambda h: h.cumsum(0), lambda h: h @ h.T @ h]
)
def test_hidden_interactions_are_refused(act: Any) -> None:
    like = torch.randn(5, 5, dtype=torch.float64)
    hidden = traced(act, like)
    model = Fn(lambda s, x: s.b(hidden(s.a(x))), **two_layers()).double()
    with pytest.raises(Refused, match="interact"):
        clipped_sum(model, squared, Rows(noise(5, 4), torch.randn(5, dtype=torch.float64)), FlatClip(1.0))


@pytest.mark.parametrize("size", [1e-3, 1e-9, 1e-13, 1e-16])
def test_a_small_gradient_that_several_rows_share_is_not_taken_for_rounding(size: float) -> None:
    """The gradients of one map are all as small as rounding is beside the others', and mixed."""
    hidden = traced(lambda h: (h - h.mean(0)) * size, torch.randn(5, 5, dtype=torch.float64))
    model = Fn(lambda s, x: s.b(torch.tanh(s.c(x)) + hidden(s.a(x))), c=nn.Linear(4, 5), **two_layers()).double()
    with pytest.raises(Refused, match="interact"):
        clipped_sum(model, squared, Rows(noise(5, 4), torch.randn(5, dtype=torch.float64)), FlatClip(1.0))


def test_a_function_whose_backward_pass_is_not_linear_does_not_pass_for_rounding() -> None:
    class Rough(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: Tensor) -> Tensor:
            return h.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return (g - g.mean(0)) * (1 + g.norm().sin())

    model = Fn(lambda s, x: s.b(Rough.apply(s.a(x))), **two_layers()).double()  # type: ignore[no-untyped-call]
    with pytest.raises(Refused, match="interact"):
        clipped_sum(model, squared, Rows(noise(5, 4), torch.randn(5, dtype=torch.float64)), FlatClip(1.0))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_is_dropped_alone_and_the_others_stay(bad: float) -> None:
    model = Fn(hidden_linear, **two_layers()).double()
    inputs, targets = noise(7, 4), torch.randn(7, dtype=torch.float64)
    inputs[2] = bad
    inputs[5, 1] = bad
    found = clipped_sum(model, squared, Rows(inputs, targets), FlatClip(1.0))
    kept = torch.tensor([0, 1, 3, 4, 6])
    clean = clipped_sum(model, squared, Rows(inputs[kept], targets[kept]), FlatClip(1.0))
    assert found.dropped == 2
    for name, want in clean.sums.items():
        assert torch.allclose(found.sums[name], want, rtol=1e-12)
    assert torch.allclose(found.norms[kept], clean.norms, rtol=1e-12)


def test_a_record_of_several_rows_with_a_missing_value_is_dropped_as_a_whole() -> None:
    model = Fn(hidden_linear, **two_layers()).double()
    inputs, targets = noise(6, 4), torch.randn(6, dtype=torch.float64)
    inputs[3] = torch.nan
    found = clipped_sum(model, squared, Rows(inputs, targets, torch.tensor([0, 0, 1, 1, 2, 2])), FlatClip(1.0))
    kept = torch.tensor([0, 1, 4, 5])
    clean = clipped_sum(model, squared, Rows(inputs[kept], targets[kept], torch.tensor([0, 0, 1, 1])), FlatClip(1.0))
    assert found.dropped == 1
    for name, want in clean.sums.items():
        assert torch.allclose(found.sums[name], want, rtol=1e-12)


def test_rows_of_very_different_size_are_all_attributed() -> None:
    model = Fn(hidden_linear, **two_layers()).double()
    inputs = noise(5, 4) * torch.tensor([1e-3, 1.0, 1e2, 1e-1, 10.0], dtype=torch.float64)[:, None]
    matches(model, inputs)
