"""The recurrence of an LSTM; its backward pass returns the gradient of the gates at every step.

In single precision a C loop computes everything after the product of each step in one pass: for a few thousand numbers
the call overhead of torch's operations exceeds their run time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sordino.native.kernels import Kernels, compiled, readable


class LSTM(torch.autograd.Function):
    """gates = xp_t + h W_hhᵀ; i, f, o = σ, g = tanh; c = f·c + i·g; h = o·tanh(c)."""

    @staticmethod
    def forward(ctx: Any, xp: Tensor, h0: Tensor, c0: Tensor, w_hh: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        steps, batch, hidden = xp.shape[0], xp.shape[1], w_hh.shape[1]
        gates, out = torch.empty_like(xp, memory_format=torch.contiguous_format), xp.new_empty(steps, batch, hidden)
        cells, squashed = xp.new_empty(steps + 1, batch, hidden), torch.empty_like(out)
        cells[0] = c0
        h, w, kernels = h0, w_hh.t(), _kernels(gates, cells, w_hh)
        for t in range(steps):
            gate = torch.addmm(xp[t], h, w, out=gates[t])
            if kernels is not None:
                h = out[t]
                places = [x.data_ptr() for x in (gate, cells[t], cells[t + 1], squashed[t], h)]
                kernels.lstm_step(*places, batch, hidden)
                continue
            gate[:, : 2 * hidden].sigmoid_()
            gate[:, 2 * hidden : 3 * hidden].tanh_()
            gate[:, 3 * hidden :].sigmoid_()
            i, f, g, o = gate.view(batch, 4, hidden).unbind(1)
            c = torch.mul(f, cells[t], out=cells[t + 1]).addcmul_(i, g)
            h = torch.mul(o, torch.tanh(c, out=squashed[t]), out=out[t])
        ctx.save_for_backward(gates, cells, squashed, w_hh)
        return out, out[-1].clone(), cells[-1].clone()

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_h: Tensor, d_c: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        gates, cells, squashed, w_hh = ctx.saved_tensors
        steps, batch, hidden = squashed.shape
        delta, dh = torch.empty_like(gates), d_h + d_out[-1]
        dc = d_c.clone(memory_format=torch.contiguous_format)
        kernels = _kernels(gates, cells, dc, dh, w_hh, d_out)
        for t in range(steps - 1, -1, -1):
            here = delta[t]
            if kernels is not None:
                dh = dh.to(dc.dtype).contiguous()  # autocast reduces the precision of products
                places = [x.data_ptr() for x in (gates[t], cells[t], squashed[t], dh, dc, here)]
                kernels.lstm_back(*places, batch, hidden)
            else:
                dc = _back(gates[t], cells[t], squashed[t], dh, dc, here)
            dh = torch.addmm(d_out[t - 1], here, w_hh) if t else here @ w_hh
        return delta, dh, dc, None


def _kernels(*tensors: Tensor) -> Kernels | None:
    """The compiled loops, if all tensors are in single precision and in memory that the loops can read."""
    known = all(t.dtype == torch.float32 and readable(t) for t in tensors) and tensors[0].numel()
    return compiled() if known else None


def _back(gates: Tensor, before: Tensor, squashed: Tensor, dh: Tensor, dc: Tensor, delta: Tensor) -> Tensor:
    """One step: writes the gradient of the gates, from dh and dc, into ``delta``; returns the gradient of the previous
    cells."""
    i, f, g, o = gates.view(dc.shape[0], 4, -1).unbind(1)
    di, df, dg, do = delta.view(dc.shape[0], 4, -1).unbind(1)
    total = dc + dh * (o - o * squashed * squashed)
    di.copy_(total * g * (i - i * i))
    df.copy_(total * before * (f - f * f))
    dg.copy_(total * (i - i * g * g))
    do.copy_(dh * squashed * (o - o * o))
    return total * f
