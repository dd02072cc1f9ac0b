"""Autograd functions that pass an arriving gradient to the tape; wrappers of the user's own hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

with torch.inference_mode(False):
    _ZERO = torch.zeros((), device="cpu")
    TOKEN = _ZERO.clone().requires_grad_()  # gives a result a node in the graph; nothing is added to its .grad


class Tap(torch.autograd.Function):
    """Identity on a fresh output that needs no gradient of its own; passes the arriving gradient to ``hook``."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, token: Tensor, hook: Callable[[Tensor], None]) -> Tensor:
        ctx.hook = hook
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        ctx.hook(gradient)
        return None, _ZERO, None


class Stand(torch.autograd.Function):
    """A slot's value expanded to ``shape`` without memory; passes the gradient of the expanded tensor to ``hook``."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, token: Tensor, shape: Sequence[int], hook: Callable[[Tensor], None]) -> Tensor:
        ctx.hook = hook
        return value.expand(shape).detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None, None]:
        ctx.hook(gradient)
        return None, _ZERO, None, None


def once(hook: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Tensor | None]:
    """The user's hook. A hook that only inspects the gradient sees that of the first backward pass, which is the true
    one."""
    looks: list[bool] = []

    def called(gradient: Tensor) -> Tensor | None:
        if looks == [True]:
            return None
        found = hook(gradient)
        looks[:] = [found is None]
        return found

    return called
