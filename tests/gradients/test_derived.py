"""Tensors that several parameters were computed into: products, sums of biases, normalised kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from gradients.cases import Fn, matches, noise, squared
from sordino.clipping import FlatClip
from sordino.errors import Refused
from sordino.gradients import Rows, clipped_sum

SIZES = (1, 2, 3, 4, 5)  # 3 and 4 are lengths of other dimensions too


def twice_bias(self: Any, x: Tensor) -> Tensor:
    bias = self.b + self.c
    return F.linear(torch.tanh(F.linear(x, self.w, bias)), self.w, bias)


def twice_weight(self: Any, x: Tensor) -> Tensor:
    weight = self.u @ self.v
    return F.linear(torch.tanh(F.linear(x, weight)), weight)


def apart(self: Any, x: Tensor) -> Tensor:
    first, second = torch.broadcast_tensors(self.u, self.v)  # type: ignore[no-untyped-call]
    return F.linear(x, first) + F.linear(x, second) ** 2


class Hadamard(torch.autograd.Function):
    """As peft's LoHa has it: a product of two products, of parameters alone."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        ctx.save_for_backward(a, b, c, d)
        return (a @ b) * (c @ d)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, ...]:
        a, b, c, d = ctx.saved_tensors
        first, second = g * (c @ d), g * (a @ b)
        return first @ b.mT, a.mT @ first, second @ d.mT, c.mT @ second


def four() -> dict[str, Tensor]:
    return {"a": noise(3, 2), "b": noise(2, 4), "c": noise(3, 2), "d": noise(2, 4)}


def written(self: Any, x: Tensor) -> Tensor:
    """A skew-symmetric matrix, filled in place, and its Cayley transform as a series (OFT)."""
    matrix = torch.zeros(4, 4, dtype=x.dtype)
    row, column = torch.triu_indices(4, 4, 1)
    matrix[row, column] = self.u
    matrix = matrix - matrix.mT
    turned = torch.eye(4, dtype=x.dtype)
    turned.add_(matrix, alpha=2.0).add_(matrix @ matrix)
    return F.linear(x, turned)


def through_a_view(self: Any, x: Tensor) -> Tensor:
    matrix = torch.zeros(3, 4, dtype=x.dtype)
    matrix[0] = self.u
    matrix[1].add_(self.v)
    return F.linear(x, matrix)


def fourier(self: Any, x: Tensor) -> Tensor:
    spectrum = torch.zeros(3, 4, dtype=x.dtype)
    spectrum[torch.tensor([0, 1, 2]), torch.tensor([3, 1, 0])] = self.u
    return F.linear(x, torch.fft.ifft2(spectrum).real)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a product as weight": lambda: Fn(lambda s, x: F.linear(x, s.u @ s.v), u=noise(3, 2), v=noise(2, 4)),
    "a product as weight, used twice": lambda: Fn(twice_weight, u=noise(4, 2), v=noise(2, 4)),
    "a sum as bias": lambda: Fn(lambda s, x: F.linear(x, s.w, s.b + s.c), w=noise(3, 4), b=noise(3), c=noise(3)),
    "a sum as bias, used twice": lambda: Fn(twice_bias, w=noise(4, 4), b=noise(4), c=noise(4)),
    "several results, each of one parameter": lambda: Fn(apart, u=noise(1, 4), v=noise(6, 4)),
    "a shape taken of another": lambda: Fn(lambda s, x: F.linear(x, s.u.view_as(s.v)), u=noise(12), v=noise(3, 4)),
    "a custom function": lambda: Fn(lambda s, x: F.linear(x, Hadamard.apply(s.a, s.b, s.c, s.d)), **four()),
    "written in place": lambda: Fn(written, u=noise(6)),
    "written through a view": lambda: Fn(through_a_view, u=noise(4), v=noise(4)),
    "a spectrum": lambda: Fn(fourier, u=noise(3)),
    "parts that overlap": lambda: Fn(lambda s, x: F.linear(x, s.w[:3]) + F.linear(x, s.w[1:]), w=noise(4, 4)),
    "parts that touch": lambda: Fn(lambda s, x: F.linear(x, s.w[:2]) + F.linear(x, s.w[2:]), w=noise(4, 4)),
    "the type of data": lambda: Fn(
        lambda s, x: F.linear(x, (s.u @ s.v).to(x) @ torch.eye(4).to(x)), u=noise(3, 2), v=noise(2, 4)
    ),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(4, 3)),
    "weight_norm, as a hook": lambda: nn.utils.weight_norm(nn.Linear(4, 3)),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
@pytest.mark.parametrize("positions", [(), (3,), (2, 3)], ids=["vectors", "sequences", "grids"])
@pytest.mark.parametrize("name", MODELS)
def test_each_parameter_gets_its_own_share_of_a_tensor_made_of_several(name: str, positions: tuple[int, ...]) -> None:
    for rows in SIZES:
        torch.manual_seed(rows)
        matches(MODELS[name](), noise(rows, *positions, 4), rows=rows)


def test_a_tensor_that_is_written_to_after_its_use_is_refused() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        weight = self.p * 2
        first = F.linear(x, weight)
        weight.mul_(3)
        return first + F.linear(x, weight)

    with pytest.raises(Refused, match=r"linear\(p\): its input was modified in place after the call"):
        matches(Fn(forward, p=noise(3, 4)), noise(5, 4))


def test_a_custom_function_at_past_weights_is_refused_and_not_run_at_the_present_ones() -> None:
    model = Fn(lambda s, x: F.linear(x, Hadamard.apply(s.a, s.b, s.c, s.d)), **four())
    past = [({"a": noise(3, 2)}, 1.0), ({}, 0.5)]
    with pytest.raises(Refused, match="an operation that sordino can't intercept"):
        clipped_sum(model, squared, Rows(noise(5, 4), noise(5)), FlatClip(1.0), iterates=past)


def test_a_hook_on_a_parameter_is_refused() -> None:
    model = nn.Linear(4, 3)
    model.weight.register_hook(lambda g: 2 * g)
    with pytest.raises(Refused, match=r"^weight: a hook on this parameter"):
        matches(model, noise(5, 4))
