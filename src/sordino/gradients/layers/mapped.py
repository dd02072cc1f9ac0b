"""Linear maps by the compiled loop, where it is faster than torch's product: on processors whose widest instructions
torch's library does not use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sordino.native.kernels import Kernels, compiled, readable
from sordino.native.threads import share, workers

LEAST = 1 << 22  # multiplications from which on it pays
SHARED = 1 << 24  # multiplications from which on the rows are divided between threads


class _Mapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor, bias: Tensor | None, stored: bool) -> Tensor:
        ctx.save_for_backward(matrix)
        ctx.stored = stored
        return _product(x, matrix, bias, stored)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (matrix,) = ctx.saved_tensors
        return _product(gradient, matrix, None, not ctx.stored), None, None, None


def mapped(x: Tensor, matrix: Tensor, bias: Tensor | None, stored: bool = True) -> Tensor | None:
    """x (…, p) · Mᵀ + bias for a matrix (q, p), or x · M for one of (p, q) if not ``stored`` in this way.

    matrix and bias have no gradient. None if the compiled loop is absent, does not support the memory or the mode that
    is active, or would not be faster.
    """
    given = [t for t in (x, matrix, bias) if t is not None]
    if x.numel() * matrix.shape[0 if stored else 1] < LEAST or x.shape[-1] != matrix.shape[1 if stored else 0]:
        return None
    if _modes(x) or not all(type(t) is Tensor and t.dtype == torch.float32 and readable(t) for t in given):
        return None
    if matrix.stride(1) != 1 or (bias is not None and not bias.is_contiguous()) or _loop() is None:
        return None
    if torch.is_grad_enabled() and x.requires_grad:
        return _Mapped.apply(x, matrix, bias, stored)  # type: ignore[no-any-return, no-untyped-call]
    return _product(x, matrix, bias, stored)


def _modes(x: Tensor) -> bool:
    """Autocast, torch.func's transforms and forward differentiation: they need torch's own operations."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(x)
    return wrapped or torch.is_autocast_enabled("cpu") or forward_ad._current_level >= 0


def _loop() -> Kernels | None:
    kernels = compiled()
    return kernels if kernels is not None and kernels.maps_pay else None


def _product(x: Tensor, matrix: Tensor, bias: Tensor | None, stored: bool) -> Tensor:
    p, q = matrix.shape[1 if stored else 0], matrix.shape[0 if stored else 1]
    flat, out = x.reshape(-1, p), x.new_empty((*x.shape[:-1], q))
    if flat.stride(1) != 1 or not readable(flat):
        flat = flat.contiguous()
    kernels, n, line = compiled(), flat.shape[0], flat.stride(0)
    assert kernels is not None
    at, to, least = flat.data_ptr(), out.data_ptr(), 0 if bias is None else bias.data_ptr()
    pieces = workers(n // 64) if n * p * q > SHARED else 1

    def work(piece: int) -> None:
        lo, hi = n * piece // pieces, n * (piece + 1) // pieces
        sizes = hi - lo, p, q, line, matrix.stride(0), stored
        kernels.maps(at + 4 * lo * line, matrix.data_ptr(), least, sizes, to + 4 * lo * q)

    share(lambda: work, pieces)
    return out
