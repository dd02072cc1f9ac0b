"""torch.func inside a model: functions of one row, mapped over the rows, with derivatives taken within."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp

from gradients.cases import Fn, matches, noise, squared
from sordino.clipping import FlatClip
from sordino.errors import Refused
from sordino.gradients import Rows, clipped_sum
from sordino.gradients.checks.assurance import Assurance


def layer() -> dict[str, Any]:
    return {"l": nn.Linear(4, 3)}


def product(self: Any, x: Tensor) -> Tensor:
    weight = self.u @ self.v  # computed outside, used inside; and computed inside
    return torch.vmap(grad(lambda r: torch.tanh(F.linear(r, weight, self.b) + F.linear(r, self.u @ self.v)).sum()))(x)


def between(self: Any, x: Tensor) -> Tensor:
    found: Tensor = self.o(torch.vmap(lambda r: torch.tanh(self.l(r)))(self.i(x)))
    return found


def tangent(self: Any, x: Tensor) -> Tensor:
    return torch.vmap(lambda r: jvp(lambda q: torch.tanh(self.l(q)), (r,), (torch.ones_like(r),))[1])(x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "vmap": lambda: Fn(lambda s, x: torch.vmap(lambda r: torch.tanh(s.l(r)))(x), **layer()),
    "vmap in pieces": lambda: Fn(lambda s, x: torch.vmap(lambda r: torch.tanh(s.l(r)), chunk_size=2)(x), **layer()),
    "between layers": lambda: Fn(between, i=nn.Linear(4, 4), o=nn.Linear(3, 2), **layer()),
    "jacrev": lambda: Fn(lambda s, x: torch.vmap(jacrev(lambda r: torch.tanh(s.l(r))))(x), **layer()),
    "jacfwd": lambda: Fn(lambda s, x: torch.vmap(jacfwd(lambda r: torch.tanh(s.l(r))))(x), **layer()),
    "grad": lambda: Fn(lambda s, x: torch.vmap(grad(lambda r: torch.tanh(s.l(r)).sum()))(x), **layer()),
    "hessian": lambda: Fn(lambda s, x: torch.vmap(hessian(lambda r: torch.tanh(s.l(r)).sum()))(x), **layer()),
    "jvp": lambda: Fn(tangent, **layer()),
    "derived": lambda: Fn(product, u=noise(3, 2), v=noise(2, 4), b=noise(3)),
    "functional_call": lambda: Fn(
        lambda s, x: torch.vmap(lambda r: functional_call(s.l, dict(s.l.named_parameters()), (r,)))(x), **layer()
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_functions_of_one_row_mapped_over_the_rows(name: str) -> None:
    for rows in (1, 2, 3, 4, 5):
        torch.manual_seed(rows)
        matches(MODELS[name](), noise(rows, 4), rows=rows)


def test_sequences_tables_and_kernels_inside() -> None:
    for rows in (1, 2, 3, 4, 5):
        torch.manual_seed(rows)
        matches(Fn(lambda s, x: torch.vmap(torch.vmap(s.l))(x), **layer()), noise(rows, 3, 4), rows=rows)
        kernel = Fn(lambda s, x: torch.vmap(lambda r: s.c(s.n(r)))(x), n=nn.LayerNorm(4), c=nn.Conv1d(3, 2, 2))
        matches(kernel, noise(rows, 3, 4), rows=rows)
        table = Fn(lambda s, x: torch.vmap(lambda r: s.e(r).sum(0))(x), e=nn.Embedding(6, 3))
        matches(table, torch.randint(0, 6, (rows, 4)), rows=rows)


@pytest.mark.parametrize("transform", [grad, lambda f: lambda x: jvp(f, (x,), (torch.ones_like(x),))[1]])
def test_a_derivative_over_all_rows_at_once_is_refused_with_the_remedy(transform: Any) -> None:
    model = Fn(lambda s, x: transform(lambda h: torch.tanh(s.l(h)).sum())(x), **layer()).double()
    with pytest.raises(Refused, match=r"linear\(l.bias, l.weight\): torch.func.*torch\.vmap\(torch\.func\.grad"):
        clipped_sum(model, lambda o, t: squared(o.reshape(-1, 1)[:5], t), Rows(noise(5, 4), noise(5)), FlatClip(1.0))


def test_a_parameter_that_is_given_to_a_transform_does_not_hide_that_records_meet() -> None:
    """The result of torch.vmap(…)(w, x) was taken for a tensor computed from parameters alone: one record turned all
    others' gradients around."""

    def heads(self: Any, x: Tensor) -> Tensor:
        one = torch.vmap(lambda w, rows: rows @ w, in_dims=(0, None))(self.w, x)  # (heads, rows)
        near = (torch.relu(one.nan_to_num() - 5) * torch.relu(8 - one.nan_to_num())).amax()
        return self.l(x) * (1 - 2 * torch.tanh(5 * near))  # type: ignore[no-any-return]

    torch.manual_seed(1)
    model, data, assurance = Fn(heads, w=torch.full((3, 4), 0.1), l=nn.Linear(4, 3)).double(), noise(9, 4), Assurance()
    for _ in range(3):
        clipped_sum(model, squared, Rows(data, noise(9)), FlatClip(1.0), assurance=assurance)
    data[-1] = 6.5 / 0.4
    with pytest.raises(Refused, match="a record's loss is not the same when the others of its batch change"):
        clipped_sum(model, squared, Rows(data, noise(9)), FlatClip(1.0), assurance=assurance)


def test_a_linearised_model_is_trained_row_by_row_and_refused_by_name_otherwise() -> None:
    """Its weights' changes are given to jvp: torch's own error was all that a user saw."""
    base = nn.Linear(4, 3).double().requires_grad_(False)

    def moved(self: Any, x: Tensor) -> Tensor:
        at = {"weight": base.weight, "bias": base.bias}
        return jvp(lambda p: torch.tanh(functional_call(base, p, (x,))), (at,), ({"weight": self.w, "bias": self.b},))[
            1
        ]

    for rows in (1, 2, 5):
        matches(
            Fn(lambda s, x: torch.vmap(lambda r: moved(s, r))(x), w=noise(3, 4), b=noise(3)), noise(rows, 4), rows=rows
        )
    whole = Fn(moved, w=noise(3, 4), b=noise(3)).double()
    with pytest.raises(Refused, match=r"torch.func.*torch\.vmap"):
        clipped_sum(whole, squared, Rows(noise(5, 4), noise(5)), FlatClip(1.0))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


def test_what_a_custom_function_makes_of_data_is_data() -> None:
    for rows in (1, 2, 3, 4, 5):
        torch.manual_seed(rows)
        model = Fn(lambda s, x: s.o(Doubled.apply(s.l(x))), o=nn.Linear(3, 2), **layer())
        matches(model, noise(rows, 4), rows=rows)
        matches(Fn(lambda s, x: s.p * Doubled.apply(s.l(x)), p=noise(3), **layer()), noise(rows, 4), rows=rows)
