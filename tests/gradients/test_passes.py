"""What a pass says of its program: whether rows are independent, whether their number matters, what was opened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradients.cases import ROWS, Fn, noise
from sordino.gradients.passes import Pass, Setup
from sordino.gradients.state.pass_memory import PassMemory
from sordino.gradients.survey import survey

Forward = Callable[[Any, Tensor], Tensor]


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    """Unlike that of the other tests it asks for no size."""
    return (outputs.sum(1) - targets).square()


def passed(forward: Forward, inputs: Tensor | None = None, memory: PassMemory | None = None) -> Pass:
    torch.manual_seed(0)
    model = Fn(forward, a=nn.Linear(4, 6), b=nn.Linear(6, 3)).double()
    found = survey(model)
    data = noise(ROWS, 4) if inputs is None else inputs, noise(ROWS)
    setup = Setup(model, squared, found.parameters, found.state, memory=memory or PassMemory())
    run = Pass(setup, data, ROWS, {})
    run.close()
    return run


def plain(s: Any, x: Tensor) -> Tensor:
    return s.b(torch.tanh(s.a(x)))  # type: ignore[no-any-return]


def test_a_plain_model_is_proven_independent_of_other_rows_and_of_their_number() -> None:
    run = passed(plain)
    assert run.proven
    assert run.independent
    assert run.numbers is None
    assert not any((run.sized, run.opened, run.stops))


def test_losses_in_another_order_than_the_rows_are_not_taken_for_proven() -> None:
    """Loss i would be that of another row. Without this comparison of labels no other test failed."""
    torch.manual_seed(0)
    model = Fn(lambda s, x: plain(s, x).flip(0), a=nn.Linear(4, 6), b=nn.Linear(6, 3)).double()
    found = survey(model)
    setup = Setup(model, lambda outputs, _: outputs.sum(1).square(), found.parameters, found.state)
    run = Pass(setup, (noise(ROWS, 4), noise(ROWS)), ROWS, {})
    run.close()
    assert not run.proven
    assert not run.independent


def _quiet(of: Callable[[Any, Tensor], Any]) -> Forward:
    """A model that computes something without gradients, and does not use it."""

    def forward(s: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            of(s, x)
        return plain(s, x)

    return forward


def test_no_grad_stops_gradients_only_where_something_has_one() -> None:
    assert not passed(_quiet(lambda s, x: x.sin())).stops
    assert passed(_quiet(lambda s, x: s.a(x))).stops
    assert passed(_quiet(lambda s, x: s.a.weight * 2)).stops
    assert passed(lambda s, x: plain(s, x.detach())).stops


def test_no_grad_counts_as_a_stop_where_a_value_was_read() -> None:
    assert passed(_quiet(lambda s, x: x.max().item())).stops


def test_a_number_that_is_in_no_row_is_in_no_part_of_the_batch_either() -> None:
    run = passed(lambda s, x: plain(s, x) * (2 if 100.0 in x else 1))
    assert run.alike
    assert run.reads
    assert not run.independent
    assert not passed(lambda s, x: plain(s, x) * (2 if float(x[1, 1]) in x else 1)).alike
    assert not passed(lambda s, x: plain(s, x) * (2 if 100.0 in x.sum(0) else 1)).alike


def test_an_error_that_the_model_catches_may_tell_it_a_size_or_a_value() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        try:
            torch.ones(ROWS + 1, dtype=x.dtype).add(x[:, 0])
        except RuntimeError:
            return plain(s, x)
        return 2 * plain(s, x)

    run = passed(forward)
    assert run.sized
    assert not run.independent


@pytest.mark.parametrize("how", ["numpy", "untyped_storage", "data_ptr"])
@pytest.mark.parametrize("of", ["data", "a parameter"])
def test_a_model_that_gets_at_the_memory_of_a_tensor_has_opened_it(how: str, of: str) -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        getattr(x.detach() if of == "data" else s.a.bias.detach(), how)()
        return plain(s, x)

    assert passed(forward).opened


class Averaging(torch.autograd.Function):
    """The identity, whose backward pass gives every row the mean of all gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.mean(0, keepdim=True).expand_as(gradient)


@pytest.mark.parametrize("after", [torch.tanh, lambda h: h + h, lambda h: h.clone()])
def test_what_is_computed_from_the_result_of_a_custom_function_is_not_proven(after: Any) -> None:
    run = passed(lambda s, x: s.b(after(Averaging.apply(s.a(x)))))
    assert not run.proven
    assert not run.independent


def test_tensors_without_versions_are_not_taken_for_proven() -> None:
    """A write to one can't be noticed."""
    with torch.inference_mode():
        inputs = noise(ROWS, 4)
    assert not passed(lambda s, x: plain(s, x.clone()), inputs).independent


def test_a_constant_that_was_written_to_since_an_earlier_pass_may_hold_values_of_it() -> None:
    held, memory = torch.ones(3, dtype=torch.float64), PassMemory()

    def forward(s: Any, x: Tensor) -> Tensor:
        return plain(s, x) * held

    passed(forward, memory=memory)
    assert passed(forward, memory=memory).independent
    held.mul_(2)
    run = passed(forward, memory=memory)
    assert run.numbers is not None
    assert not run.independent
