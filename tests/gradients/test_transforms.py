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
