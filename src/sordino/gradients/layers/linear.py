"""Linear maps: F.linear, x @ W, addmm. For g (…, d_out) and a (…, d_in): ∂W = Σ_s g_s ⊗ a_s, ∂b = Σ_s g_s."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sordino.gradients.layers import contraction
from sordino.gradients.layers.mapped import bound, mapped
from sordino.gradients.sums.contributions import Contribution, Dense, outer
from sordino.gradients.sums.memory import CACHE_BYTES, blocks, reads_memory, squares, too_long
from sordino.gradients.sums.single import Scaled, Shift, Single
from sordino.gradients.tape.layout import Frame, full
from sordino.gradients.tape.slots import Emit, Slot, Use, hold
from sordino.gradients.tape.tape import Tape
from sordino.native.kernels import compiled, readable

_FEW = 16  # outputs up to which the compiled loop is faster than a matrix product


def bias_gradient(gradient: Tensor) -> Dense:
    """(records, S, d) → Σ_s."""
    return Dense(gradient[:, 0] if gradient.shape[1] == 1 else gradient.sum(1))


def emitter(
    x: Tensor, weight: Slot | None, bias: Slot | None, *, swapped: bool = False, x_squares: Tensor | None = None
) -> Emit:
    """swapped: the weight is (d_in, d_out), as in x @ W. x_squares: the squared norms of the rows of x,
    if they are known."""

    def single(g: Tensor, a: Tensor, a_squares: Tensor | None, once: bool) -> list[tuple[Slot, Contribution]]:
        """One position per record: (m, d_out) and (m, d_in)."""
        assert weight is not None
        g_squares, a_squares = squares(g), squares(a) if a_squares is None else a_squares
        rows = Scaled(g, shared=bias is not None, once=once)
        norm2, huge = g_squares * a_squares, too_long(a_squares)  # ‖g ⊗ a‖ = ‖g‖·‖a‖
        found: list[tuple[Slot, Contribution]] = [(weight, Single(rows, a, norm2, huge=huge))]
        return found if bias is None else [*found, (bias, Shift(rows, len(g), g_squares))]

    def emit(gradient: Tensor, frame: Frame) -> list[tuple[Slot, Contribution]]:
        if weight is not None and not swapped and gradient.ndim == 2 and frame.rowwise:
            return single(full(gradient), full(x), x_squares, frame.once)
        g = frame.fold(gradient, 1, gradient=True)  # (m, S, d_out)
        out: list[tuple[Slot, Contribution]] = []
        if weight is not None and g.shape[1] == 1 and not swapped:
            return single(g[:, 0], frame.fold(x, 1)[:, 0], None, frame.once)
        if weight is not None:
            a = frame.fold(x, 1)  # (m, S, d_in)
            out.append((weight, outer(a, g) if swapped else outer(g, a)))
        if bias is not None:
            out.append((bias, bias_gradient(g)))
        return out

    return emit


def _use(
    tape: Tape,
    func: Any,
    x: Tensor,
    output: Tensor,
    emit: Emit,
    w: Slot | None,
    b: Slot | None = None,
    only: bool = True,
) -> Tensor:
    """only: the bias contains no data."""
    present = tuple([s for s in (w, b) if s is not None])
    if not output.numel():  # a cluster of words or an expert that no record selected: no gradient
        return tape.mark(output)  # type: ignore[no-any-return]
    use = Use(func, present, output.shape, tuple(range(output.ndim - 1)), emit, hold(x))
    return tape.tap(output, use, tape.leading(x, 1) if only and w is not None else None)


def linear(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    x, weight, bias = bound(("input", "weight", "bias"), args, kwargs)
    if tape.slot(x) is not None or x.ndim < 2 or weight.ndim != 2:
        return NotImplemented
    w, b = tape.slot(weight) if weight.numel() else None, tape.slot(bias)
    x = x.detach() if w is None else x
    x_squares = None
    if w is not None and x.ndim == 2 and reads_memory(x, weight.shape[0]) and not _needs_more(x):
        output, x_squares = _with_squares(x, tape.value(weight), tape.value(bias))
    else:
        given = args[0] if args else x
        found = mapped(given, tape.value(weight), tape.value(bias))
        output = F.linear(given, tape.value(weight), tape.value(bias)) if found is None else found
    return _use(tape, func, x, output, emitter(x, w, b, x_squares=x_squares), w, b, bias is None or b is not None)


def _needs_more(x: Tensor) -> bool:
    """Does it have a gradient of its own, or autocast's precision?"""
    return x.requires_grad or torch.is_autocast_enabled(x.device.type)


def _with_squares(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """x Wᵀ + b and the squared norms of x's rows, in blocks that stay in the cache in between."""
    output = x.new_empty(x.shape[0], weight.shape[0])
    norm2 = x.new_empty(x.shape[0], dtype=torch.float64)
    if _by_loop(x, weight, bias, output, norm2):
        return output, norm2
    for lo, hi in blocks(x.shape[0], x.shape[1], x.element_size(), 2 * CACHE_BYTES):
        output[lo:hi] = F.linear(x[lo:hi], weight, bias)
        norm2[lo:hi] = squares(x[lo:hi])
    return output, norm2


def _by_loop(x: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor, norm2: Tensor) -> bool:
    """The same by the compiled loop, which reads x once; False if it is absent or does not support the memory
    layout."""
    kernels = compiled() if x.dtype in (torch.float32, torch.float64) and x.stride(1) == 1 else None
    given = [t for t in (weight, bias) if t is not None]
    if kernels is None or not all(readable(t) and t.is_contiguous() and t.dtype == x.dtype for t in given):
        return False
    if not readable(x) or weight.shape[1] != x.shape[1] or weight.shape[0] > _FEW:
        return False
    weights = weight.data_ptr(), weight.shape[0], None if bias is None else bias.data_ptr()
    at = x.data_ptr(), *x.shape, x.stride(0)
    kernels.few_outputs[x.itemsize](*at, *weights, output.data_ptr(), norm2.data_ptr())
    return True


def matmul(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    x, weight = args[0], args[1] if len(args) > 1 else kwargs.get("other", kwargs.get("mat2"))
    w = tape.slot(weight)
    if kwargs.get("out") is not None:
        return NotImplemented
    if tape.slot(x) is not None or w is None or x.ndim < 2 or weight.ndim != 2:
        return contraction.matmul(tape, func, x, weight)
    output = mapped(x, w.value, None, False)
    output = torch.matmul(x, w.value) if output is None else output
    return _use(tape, func, x, output, emitter(x, w, None, swapped=True), w)


def addmm(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    """bias + x @ W, as in the Conv1D of GPT-2."""
    bias, x, weight, out = bound(("input", "mat1", "mat2", "out"), args, kwargs)
    if out is not None or kwargs.get("beta", 1) != 1 or kwargs.get("alpha", 1) != 1:
        return NotImplemented
    if tape.slot(x) is not None or weight.ndim != 2 or bias.ndim != 1 or bias.shape[0] != weight.shape[1]:
        return NotImplemented
    w, b = tape.slot(weight), tape.slot(bias)
    output = mapped(x, tape.value(weight), tape.value(bias), False)
    output = torch.addmm(tape.value(bias), x, tape.value(weight)) if output is None else output
    return _use(tape, func, x, output, emitter(x, w, b, swapped=True), w, b, b is not None)
