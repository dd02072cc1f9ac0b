"""Models that call autograd themselves: refused by name where a share can't be seen, and nothing is left in .grad."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradients.cases import Fn, matches, noise, squared
from sordino.clipping import FlatClip
from sordino.errors import Refused
from sordino.gradients import Rows, clipped_sum


def energy(self: Any, x: Tensor) -> Tensor:
    found: Tensor = self.o(torch.tanh(self.l(x)))
    return found


def forces(self: Any, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(energy(self, x).sum(), x, create_graph=True)[0]


def stepped(self: Any, x: Tensor) -> Tensor:
    out = energy(self, x)
    torch.autograd.backward(out.sum(), retain_graph=True)
    return out


def implicit(self: Any, x: Tensor) -> Tensor:
    """A fixed point whose hook solves for the gradient through a graph of the forward pass."""
    with torch.no_grad():
        z = x
        for _ in range(20):
            z = torch.tanh(0.2 * self.w(z) + x)
    z = torch.tanh(0.2 * self.w(z) + x)
    start = z.detach().requires_grad_()
    again = torch.tanh(0.2 * self.w(start) + x)

    def solve(gradient: Tensor) -> Tensor:
        found = gradient
        for _ in range(20):
            found = torch.autograd.grad(again, start, found, retain_graph=True)[0] + gradient
        return found

    z.register_hook(solve)  # type: ignore[no-untyped-call]
    out: Tensor = self.o(z)
    return out


class Reversible(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, inner: nn.Module) -> Tensor:
        ctx.inner = inner
        ctx.save_for_backward(x)
        with torch.no_grad():
            return x + inner(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(x + ctx.inner(x), gradient)
        return x.grad, None


def two() -> dict[str, Any]:
    return {"l": nn.Linear(4, 3), "o": nn.Linear(3, 1)}


def refused(model: nn.Module, reason: str, rows: int) -> None:
    model = model.double()
    first, *others = model.parameters()
    before = torch.ones_like(first)
    first.grad = before
    with pytest.raises(Refused, match=reason):
        clipped_sum(model, squared, Rows(noise(rows, 4), noise(rows)), FlatClip(1.0))
    assert first.grad is before
    assert torch.equal(before, torch.ones_like(first))
    assert all(p.grad is None for p in others)


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_derivatives_that_the_forward_pass_takes(rows: int) -> None:
    reason = r"linear\(o.bias, o.weight\): the forward pass itself calls autograd.*torch\.vmap\(torch\.func\.grad"
    refused(Fn(forces, **two()), reason, rows)
    refused(Fn(stepped, **two()), reason, rows)


def test_the_remedy_for_them_gives_the_loop_s_gradients() -> None:
    for rows in (1, 2, 3, 4):
        torch.manual_seed(rows)
        remedy = Fn(lambda s, x: torch.vmap(torch.func.grad(lambda r: energy(s, r).sum()))(x), **two())
        data = Rows(noise(rows, 4), noise(rows))
        plain = Fn(forces, **two())
        plain.load_state_dict(remedy.state_dict())
        assert torch.allclose(plain.double()(data.inputs), remedy.double()(data.inputs))
        matches(
            Fn(lambda s, x: torch.cat([energy(s, x), s.inner(x)], 1), inner=remedy, **two()), data.inputs, rows=rows
        )


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_implicit_layers_and_reversible_functions(rows: int) -> None:
    model = Fn(implicit, w=nn.Linear(4, 4), o=nn.Linear(4, 1))
    refused(model, r"linear\(w.bias, w.weight\): a hook or a custom autograd.Function calls autograd", rows)
    model = Fn(lambda s, x: s.o(Reversible.apply(s.i(x), s.f)), i=nn.Linear(4, 4), f=nn.Linear(4, 4), o=nn.Linear(4, 1))
    refused(model, r"f.weight, f.bias: the model calls \.backward\(\).*they were removed", rows)


def test_derivatives_of_data_alone_and_of_scales_are_right() -> None:
    def slope(self: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        cube = torch.autograd.grad((x**3).sum(), x)[0]
        return torch.autograd.grad(torch.tanh(x * self.p).sum(), x, create_graph=True)[0] + self.l(cube)

    for rows in (1, 2, 3, 4):
        torch.manual_seed(rows)
        matches(Fn(slope, p=noise(4), l=nn.Linear(4, 4)), noise(rows, 4), rows=rows)
