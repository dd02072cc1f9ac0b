"""The recurrence of a GRU, plain and with standardised projections, as one autograd function.

The backward pass returns the gradients of the input projection and of the hidden projection at every step, from which
the per-record weight gradients are computed. Each step works on (batch, hidden) tensors that stay in the cache.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function


def standardised_gru(
    x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """A GRU whose projections are standardised over their coordinates before the gates; x is (n, length, features).

    With s(v) = (v − mean v)/√(var v + eps), a = s(W_ih x_t + b_ih) and b = s(W_hh h + b_hh), each of 3·hidden
    coordinates: r, z = σ(a + b), n = tanh(a_n + r·b_n), h' = n + z·(h − n), and h starts at zero.
    Returns the hidden states (n, length, hidden) and the last of them. Under the engine's tape it is one operation.
    """
    if has_torch_function((x, w_ih)):
        return handle_torch_function(standardised_gru, (x, w_ih), x, w_ih, w_hh, b_ih, b_hh, eps)
    hidden = w_hh.shape[1]
    projected = F.layer_norm(F.linear(x, w_ih, b_ih), (3 * hidden,), eps=eps)
    h, states = x.new_zeros(len(x), hidden), []
    for a in projected.unbind(1):
        b = F.layer_norm(F.linear(h, w_hh, b_hh), (3 * hidden,), eps=eps)
        (ar, az, an), (br, bz, bn) = a.chunk(3, -1), b.chunk(3, -1)
        z = torch.sigmoid(az + bz)
        n = torch.tanh(an + torch.sigmoid(ar + br) * bn)
        h = torch.lerp(n, h, z)
        states.append(h)
    return torch.stack(states, 1), h


class GRU(torch.autograd.Function):
    """r, z = σ(x + h), n = tanh(x_n + r·h_n), h' = n + z·(h − n), where the h parts are W_hh h + b_hh, standardised
    over their coordinates if ``eps`` is given.

    xp (steps, batch, 3·hidden) is the input projection that the gates receive. ``carrier`` is zero; its gradient is
    that of W_hh h + b_hh.
    """

    @staticmethod
    def forward(
        ctx: Any, xp: Tensor, carrier: Tensor, h0: Tensor, w_hh: Tensor, b_hh: Tensor | None, eps: float | None
    ) -> tuple[Tensor, Tensor]:
        steps, batch, hidden = xp.shape[0], xp.shape[1], w_hh.shape[1]
        gates, out = torch.empty_like(xp, memory_format=torch.contiguous_format), xp.new_empty(steps, batch, hidden)
        # the gates' input from h: the n part alone, or all of it if standardisation needs it again
        inner = xp.new_empty(steps, batch, hidden if eps is None else 3 * hidden)
        scale = xp.new_empty(steps, batch, 1)
        h, w = h0, w_hh.t()
        for t in range(steps):
            hp = h @ w if b_hh is None else torch.addmm(b_hh, h, w)
            if eps is not None:
                hp, _, scale[t] = torch.native_layer_norm(hp, (3 * hidden,), None, None, eps)
            inner[t] = hp[:, -inner.shape[2] :]
            gate = gates[t]
            torch.add(xp[t, :, : 2 * hidden], hp[:, : 2 * hidden], out=gate[:, : 2 * hidden]).sigmoid_()
            r, z, n = gate.view(batch, 3, hidden).unbind(1)
            torch.addcmul(xp[t, :, 2 * hidden :], r, hp[:, 2 * hidden :], out=n).tanh_()
            h = torch.lerp(n, h, z, out=out[t])
        ctx.save_for_backward(gates, inner, scale, out, h0, w_hh)
        ctx.standardised = eps is not None
        return out, out[-1].clone()

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_h: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        gates, inner, scale, out, h0, w_hh = ctx.saved_tensors
        steps, batch, hidden = out.shape
        dx, dhp = torch.empty_like(gates), torch.empty_like(gates)
        dh = d_h + d_out[-1]
        for t in range(steps - 1, -1, -1):
            r, z, n = gates[t].view(batch, 3, hidden).unbind(1)
            previous = out[t - 1] if t else h0
            dr, dz, dn = dx[t].view(batch, 3, hidden).unbind(1)
            dhn = dhp[t, :, 2 * hidden :]
            keep = dh * z
            torch.sub(dh, keep, out=dn)
            dn.addcmul_(dn * n, n, value=-1)  # through tanh
            torch.mul(torch.addcmul(keep, keep, z, value=-1), previous - n, out=dz)  # dh·z(1 − z)·(h − n)
            torch.mul(dn, r, out=dhn)
            torch.mul(torch.addcmul(dhn, dhn, r, value=-1), inner[t, :, -hidden:], out=dr)  # dn·r(1 − r)·b_n
            dhp[t, :, : 2 * hidden] = dx[t, :, : 2 * hidden]
            if ctx.standardised:
                _unstandardise(dhp[t], inner[t], scale[t])
            dh = torch.addmm(keep, dhp[t], w_hh)
            if t:
                dh += d_out[t - 1]
        return dx, dhp, dh, None, None, None


def _unstandardise(gradient: Tensor, standardised: Tensor, scale: Tensor) -> None:
    """From the gradient with respect to s(v) to that with respect to v, in place: scale·(g − mean g − s·mean(g·s))."""
    along = (gradient * standardised).mean(1, keepdim=True)
    gradient.sub_(gradient.mean(1, keepdim=True)).addcmul_(standardised, along, value=-1).mul_(scale)
