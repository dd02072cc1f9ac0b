"""Linear maps by the compiled loop, where it is faster than torch's product: on processors whose widest instructions
torch's library does not use."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

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
    if not _pays(x, matrix, bias, stored):
        return None
    if torch.is_grad_enabled() and x.requires_grad:
        return _Mapped.apply(x, matrix, bias, stored)  # type: ignore[no-any-return, no-untyped-call]
    return _product(x, matrix, bias, stored)


def _pays(x: Tensor, matrix: Tensor, bias: Tensor | None, stored: bool) -> bool:
    given = [t for t in (x, matrix, bias) if t is not None]
    if x.numel() * matrix.shape[0 if stored else 1] < LEAST or x.shape[-1] != matrix.shape[1 if stored else 0]:
        return False
    if _modes(x) or not all(type(t) is Tensor and t.dtype == torch.float32 and readable(t) for t in given):
        return False
    flat = bias is None or (bias.shape == matrix.shape[0 if stored else 1 :][:1] and bias.is_contiguous())
    return flat and matrix.stride(1) == 1 and _loop() is not None


class _Same(torch.autograd.Function):
    """The forward pass by the loop, the backward pass by torch's products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor, bias: Tensor | None, stored: bool) -> Tensor:
        ctx.save_for_backward(x, matrix)
        ctx.stored = stored
        return _product(x, matrix, bias, stored)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (x, matrix), needed = ctx.saved_tensors, ctx.needs_input_grad
        g, a = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
        along = gradient @ (matrix if ctx.stored else matrix.T) if needed[0] else None
        weight = (g.T @ a if ctx.stored else a.T @ g) if needed[1] else None
        return along, weight, g.sum(0) if needed[2] else None, None


class SameProducts(TorchFunctionMode):
    """A plain pass with the engine's linear maps in its forward pass.

    Where they differ in their last bits, an activation may lie on the other side of a kink (ReLU), and the gradients
    that are compared would differ. Autograd and torch's products compute the gradients.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = _operands(func, args, kwargs)
        if found is not None and torch.is_grad_enabled() and _trained(*found[:3]):
            x, matrix, bias = found[:3]
            if _pays(x.detach(), matrix.detach(), None if bias is None else bias.detach(), found[3]):
                return _Same.apply(*found)  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)


def _trained(x: Any, matrix: Any, bias: Any) -> bool:
    """Is it a linear map with a trained matrix, for which the engine has a rule?"""
    if not (isinstance(x, Tensor) and isinstance(matrix, Tensor) and (bias is None or isinstance(bias, Tensor))):
        return False
    return x.ndim > 1 and matrix.ndim == 2 and matrix.requires_grad


_PRODUCTS = frozenset((torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__))


def _operands(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any, bool] | None:
    """(x, matrix, bias, stored) of a linear map as `linear.py` has rules for it."""
    if func is F.linear:
        x, matrix, bias = bound(("input", "weight", "bias"), args, kwargs)
        return x, matrix, bias, True
    if func in _PRODUCTS and kwargs.get("out") is None:
        return args[0], args[1] if len(args) > 1 else kwargs.get("other", kwargs.get("mat2")), None, False
    if func in (torch.addmm, Tensor.addmm) and not {"out", "beta", "alpha"} & set(kwargs):
        bias, x, matrix = bound(("input", "mat1", "mat2"), args, kwargs)
        return x, matrix, bias, False
    return None


def bound(names: tuple[str, ...], args: Any, kwargs: Any) -> list[Any]:
    """Arguments by position or by name; None for those that are not given."""
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(names)]


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
