"""The recurrence of an LSTM; its backward pass returns the gradient of the gates at every step.

In single precision a C loop computes all steps: for a few thousand numbers the call overhead of torch's operations
exceeds their run time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sordino.native.kernels import Kernels, compiled, readable
from sordino.native.threads import share, workers

SHARED = 1 << 24  # multiplications from which on the records are divided between threads


class LSTM(torch.autograd.Function):
    """gates = xp_t + h W_hhᵀ; i, f, o = σ, g = tanh; c = f·c + i·g; h = o·tanh(c), from the first step to the last, or
    (`reverse`) from the last to the first."""

    @staticmethod
    def forward(
        ctx: Any, xp: Tensor, h0: Tensor, c0: Tensor, w_hh: Tensor, reverse: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        steps, batch, hidden = xp.shape[0], xp.shape[1], w_hh.shape[1]
        gates, out = torch.empty_like(xp, memory_format=torch.contiguous_format), xp.new_empty(steps, batch, hidden)
        # the cells after time t are at place t + 1 and c0 at 0; in reverse they are at t, and c0 at the end
        cells, squashed = xp.new_empty(steps + 1, batch, hidden), torch.empty_like(out)
        xp = xp if xp.stride(2) == 1 else xp.contiguous()
        given, weight = (xp, h0.contiguous(), c0.contiguous()), w_hh.t().contiguous()
        if (kernels := _kernels(*given, weight, gates)) is not None:
            _all_steps(kernels, False, (*given, weight), (gates, cells, squashed, out), reverse)
        else:
            _forward(*given, weight, (gates, cells, squashed, out), reverse)
        ctx.save_for_backward(gates, cells, squashed, w_hh)
        ctx.reverse, last = reverse, 0 if reverse else -1
        return out, out[last].clone(), cells[last].clone()

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_h: Tensor, d_c: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        gates, cells, squashed, w_hh = ctx.saved_tensors
        delta, weight, upper = torch.empty_like(gates), w_hh.contiguous(), d_out.to(gates.dtype)
        upper = upper if upper.stride(2) == 1 else upper.contiguous()
        # they are overwritten; autocast reduces the precision of products
        dh, dc = (d.to(gates.dtype).clone(memory_format=torch.contiguous_format) for d in (d_h, d_c))
        saved = gates, cells, squashed, upper, weight
        if (kernels := _kernels(*saved, dh, dc)) is not None:
            _all_steps(kernels, True, saved, (dh, dc, delta), ctx.reverse)
        else:
            dh, dc = _backward(*saved, dh, dc, delta, ctx.reverse)
        return delta, dh, dc, None, None


def before(out: Tensor, h0: Tensor, reverse: bool) -> Tensor:
    """The hidden state that each step received."""
    return torch.cat((out[1:], h0[None])) if reverse else torch.cat((h0[None], out[:-1]))


def _kernels(*tensors: Tensor) -> Kernels | None:
    """The compiled loops, if all tensors are in single precision and in memory that the loops can read."""
    known = all(t.dtype == torch.float32 and readable(t) for t in tensors) and tensors[0].numel()
    return compiled() if known else None


def _all_steps(
    kernels: Kernels, backwards: bool, tensors: tuple[Tensor, ...], results: tuple[Tensor, ...], reverse: bool
) -> None:
    strided = tensors[3] if backwards else tensors[0]  # the gradient of the output, or the gates' inputs
    steps, batch, hidden = strided.shape[0], strided.shape[1], tensors[2].shape[-1]
    sizes = steps, batch, hidden, int(reverse), *strided.stride()[:2]
    places, to = [t.data_ptr() for t in tensors], [t.data_ptr() for t in results]
    pieces = workers(batch // 8) if 4 * steps * batch * hidden * hidden > SHARED else 1
    ends = [8 * (batch * k // (8 * pieces)) for k in range(pieces)] + [batch]

    def work(piece: int) -> None:
        kernels.lstm(backwards, places, (*sizes, ends[piece], ends[piece + 1]), to)

    make: Callable[[], Callable[[int], None]] = lambda: work  # noqa: E731
    share(make, pieces)


def _order(steps: int, reverse: bool) -> list[tuple[int, int, int]]:
    """(time, place of the cells before it, place of those after it) of every step."""
    return [(t, t + 1, t) for t in range(steps - 1, -1, -1)] if reverse else [(t, t, t + 1) for t in range(steps)]


def _forward(
    xp: Tensor, h: Tensor, c0: Tensor, weight: Tensor, results: tuple[Tensor, Tensor, Tensor, Tensor], reverse: bool
) -> None:
    (gates, cells, squashed, out), (steps, batch, _), hidden = results, xp.shape, h.shape[1]
    cells[steps if reverse else 0] = c0
    for t, earlier, later in _order(steps, reverse):
        gate = torch.addmm(xp[t], h, weight, out=gates[t])
        gate[:, : 2 * hidden].sigmoid_()
        gate[:, 2 * hidden : 3 * hidden].tanh_()
        gate[:, 3 * hidden :].sigmoid_()
        i, f, g, o = gate.view(batch, 4, hidden).unbind(1)
        c = torch.mul(f, cells[earlier], out=cells[later]).addcmul_(i, g)
        h = torch.mul(o, torch.tanh(c, out=squashed[t]), out=out[t])


def _backward(
    gates: Tensor,
    cells: Tensor,
    squashed: Tensor,
    upper: Tensor,
    weight: Tensor,
    dh: Tensor,
    dc: Tensor,
    delta: Tensor,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    for t, earlier, _ in reversed(_order(len(gates), reverse)):
        dh = dh + upper[t]
        dc = _back(gates[t], cells[earlier], squashed[t], dh, dc, delta[t])
        dh = (delta[t] @ weight).to(dc.dtype)
    return dh, dc


def _back(gates: Tensor, before: Tensor, squashed: Tensor, dh: Tensor, dc: Tensor, delta: Tensor) -> Tensor:
    """One step: writes the gradient of the gates, from dh and dc, into ``delta``; returns the gradient of the previous
    cells."""
    i, f, g, o = gates.view(len(dc), 4, dc.shape[1]).unbind(1)
    di, df, dg, do = delta.view(len(dc), 4, dc.shape[1]).unbind(1)
    total = dc + dh * (o - o * squashed * squashed)
    di.copy_(total * g * (i - i * i))
    df.copy_(total * before * (f - f * f))
    dg.copy_(total * (i - i * g * g))
    do.copy_(dh * squashed * (o - o * o))
    return total * f
