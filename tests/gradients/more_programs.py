# mypy: ignore-errors
"""Further blocks of random programs: writes in place, scatters, experts, windows, complex numbers, checkpoints,
functions with a backward pass of their own. As in programs.py: (B, S, d) → (B, S, d), S = d = N, and records do not
interact."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from gradients.programs import N, block, linear, order_of, score, weight


@block(f=linear, w=weight(N))
def in_place(m: Any, h: Tensor) -> Tensor:
    y = m.f(h)
    y += h
    y.mul_(m.w)
    return F.relu(y.sub_(0.3), inplace=True) + h


@block(f=linear)
def written_rows_reversed(m: Any, h: Tensor) -> Tensor:
    out = h.new_empty(h.shape)
    out[order_of(len(h))] = m.f(h)
    return torch.tanh(out[order_of(len(h))])


@block(f=linear)
def written_columns(m: Any, h: Tensor) -> Tensor:
    out = h.new_zeros(h.shape).transpose(0, 1)
    for t in range(N):
        out[t] = torch.tanh(m.f(h[:, t]))
    return out.transpose(0, 1)


@block(f=linear)
def written_through_a_view(m: Any, h: Tensor) -> Tensor:
    out = h.new_zeros(len(h) * N, N)
    out.view(len(h), N, N)[:, 1:] = m.f(h[:, 1:])
    return torch.tanh(out.view_as(h)) + h


@block(f=linear)
def put_back(m: Any, h: Tensor) -> Tensor:
    rows, places = torch.nonzero(score(h) > 0, as_tuple=True)
    return h.index_put((rows, places), torch.tanh(m.f(h[rows, places])), accumulate=True)


@block(f=linear)
def scattered_along_time(m: Any, h: Tensor) -> Tensor:
    place = score(h).argsort(1)[..., None].expand_as(h)
    return torch.zeros_like(h).scatter_add(1, place, torch.tanh(m.f(h))) + h.scatter(1, place, m.f(h))


@block(f=linear)
def scattered_rows(m: Any, h: Tensor) -> Tensor:
    index = order_of(len(h))[:, None, None].expand_as(h)
    return torch.tanh(torch.zeros_like(h).scatter(0, index, m.f(h)).gather(0, index))


@block(f=linear, w=weight(N))
def masked_fills(m: Any, h: Tensor) -> Tensor:
    mask = score(h)[..., None] > 0
    return torch.where(mask, m.f(h), m.w).masked_fill(~mask & (h > 0), 0.5) + h


@block(r=linear, e=lambda: nn.ModuleList(linear() for _ in range(3)))
def experts(m: Any, h: Tensor) -> Tensor:
    """As many experts as rows, and as positions; some get nothing."""
    flat = h.reshape(-1, N)
    share, which = m.r(flat).softmax(-1).topk(2, -1)
    out = torch.zeros_like(flat)
    for k, expert in enumerate(m.e):
        rows, place = torch.where(which == k)
        out.index_add_(0, rows, expert(flat[rows]) * share[rows, place, None])
    return out.view_as(h)


@block(r=linear, w=weight(N, N, N))
def experts_as_one_tensor(m: Any, h: Tensor) -> Tensor:
    share = m.r(h).softmax(-1)
    return torch.tanh(torch.einsum("bse,bsd,edf->bsf", share, h, m.w))


@block(r=linear, w=weight(N, N, N))
def chosen_experts(m: Any, h: Tensor) -> Tensor:
    which = score(h).argmax(1) % N
    return torch.tanh(torch.bmm(m.r(h), m.w[which]))


@block(f=lambda: nn.MultiheadAttention(N, 1, batch_first=True))
def multihead(m: Any, h: Tensor) -> Tensor:
    return m.f(h, h, h, need_weights=False)[0]


@block(f=lambda: nn.MultiheadAttention(N, N))
def multihead_rows_second(m: Any, h: Tensor) -> Tensor:
    x = h.transpose(0, 1)
    return m.f(x, x.flip(0), x, key_padding_mask=torch.zeros(len(h), N, dtype=torch.bool))[0].transpose(0, 1)


@block(f=lambda: nn.TransformerEncoderLayer(N, 1, N, 0.0, batch_first=True))
def encoder(m: Any, h: Tensor) -> Tensor:
    """Over the axis of features in turn, with rows merged with the other one: axial attention."""
    return m.f(h.mT.reshape(-1, 1, N).expand(-1, N, -1)).mean(1).reshape(len(h), N, N).mT


@block(q=linear, k=linear)
def attention_of_windows(m: Any, h: Tensor) -> Tensor:
    wide = (h[:, :, None] * torch.linspace(0.5, 2.0, N, dtype=h.dtype)[:, None]).flatten(1, 2)  # N windows of N
    win = wide.unflatten(1, (N, N)).flatten(0, 1)
    mixed = F.scaled_dot_product_attention(m.q(win), m.k(win), win, attn_mask=torch.eye(N, dtype=h.dtype))
    return mixed.unflatten(0, (len(h), N)).mean(2)


@block(f=linear)
def shifted_windows(m: Any, h: Tensor) -> Tensor:
    both = h.roll(1, 1).view(len(h), N, 1, N).permute(0, 2, 1, 3).reshape(-1, N, N)
    return torch.tanh(m.f(both)).view(len(h), 1, N, N).permute(0, 2, 1, 3).reshape(h.shape).roll(-1, 1)


@block(f=linear)
def unfolded(m: Any, h: Tensor) -> Tensor:
    windows = F.pad(h, (0, 0, 2, 0)).unfold(1, N, 1)  # (B, N, d, N)
    return torch.tanh(m.f(windows)).sum(3)


@block(f=lambda: nn.Conv2d(1, N, 2), g=lambda: nn.ConvTranspose2d(N, 1, 2))
def down_and_up(m: Any, h: Tensor) -> Tensor:
    return m.g(torch.tanh(m.f(h[:, None])))[:, 0]


@block(f=lambda: nn.Conv1d(N, N, 3, padding=1, groups=N), g=lambda: nn.Conv1d(1, 1, 3, padding=1))
def grouped(m: Any, h: Tensor) -> Tensor:
    """Depthwise, and with rows and channels merged."""
    return torch.tanh(m.f(h)) + m.g(h.reshape(-1, 1, N)).view_as(h)


@block(n=lambda: nn.LayerNorm(N), f=lambda: nn.GroupNorm(1, 1), i=lambda: nn.InstanceNorm1d(N, affine=True))
def norms_of_merged_rows(m: Any, h: Tensor) -> Tensor:
    return m.n(h.reshape(-1, N)).view_as(h) + m.f(h.reshape(-1, 1, N)).view_as(h) + m.i(h)


@block(f=linear, g=linear)
def complex_numbers(m: Any, h: Tensor) -> Tensor:
    z = torch.complex(m.f(h), m.g(h)) * torch.exp(1j * h)
    z = torch.fft.ifft(torch.fft.fft(z, dim=1) * torch.polar(torch.ones_like(h), h), dim=1)
    return torch.view_as_real(z).sum(-1) - z.abs()


@block(w=weight(N, N, 2))
def complex_weight(m: Any, h: Tensor) -> Tensor:
    return (torch.complex(h, h.flip(2)) @ torch.view_as_complex(m.w)).real


@block(f=linear, g=linear)
def checkpointed(m: Any, h: Tensor) -> Tensor:
    inner = checkpoint(lambda x: torch.tanh(m.f(x.transpose(0, 1))), h, use_reentrant=False)
    return checkpoint(lambda x: m.g(x.transpose(0, 1)), inner, use_reentrant=True)


@block(f=lambda: nn.LSTM(N, N, batch_first=True, bidirectional=True), g=lambda: nn.Linear(2 * N, N))
def both_ways(m: Any, h: Tensor) -> Tensor:
    return m.g(m.f(h)[0])


@block(f=lambda: nn.LSTM(N, N, num_layers=2))
def sorted_and_packed(m: Any, h: Tensor) -> Tensor:
    lengths, order = (1 + (score(h) > 0).sum(1).clamp_max(N - 1)).sort(descending=True)
    text = nn.utils.rnn.pack_padded_sequence(h[order].transpose(0, 1), lengths)
    out = nn.utils.rnn.pad_packed_sequence(m.f(text)[0], total_length=N)[0]
    return out.transpose(0, 1)[order.argsort()]


@block(f=lambda: parametrizations.weight_norm(linear()), g=lambda: parametrizations.orthogonal(linear()))
def parametrised(m: Any, h: Tensor) -> Tensor:
    return torch.tanh(m.f(h.flatten(0, 1))).view_as(h) + m.g(h.transpose(0, 1)).transpose(0, 1)


@block(w=weight(N, N), b=weight(N))
def tied(m: Any, h: Tensor) -> Tensor:
    return F.linear(torch.tanh(F.linear(h, m.w, m.b)), m.w.t(), m.b[: N - 1].sum() + m.b)


@block(u=weight(N, 1), v=weight(1, N), d=weight(N))
def low_rank(m: Any, h: Tensor) -> Tensor:
    return h @ (m.u @ m.v + torch.diag(m.d)) + (h @ m.u) * m.v


@block(table=weight(6, N))
def bags(m: Any, h: Tensor) -> Tensor:
    ids = (score(h).abs() * 7).long() % 6
    whole = F.embedding_bag(ids, m.table, mode="sum", per_sample_weights=torch.sigmoid(score(h)))
    ends = torch.arange(0, len(h) * N, N)
    return h + whole[:, None] * F.embedding_bag(ids.flatten(), m.table, ends, mode="mean")[:, None]


@block(f=lambda: nn.Bilinear(N, N, N))
def bilinear(m: Any, h: Tensor) -> Tensor:
    return torch.tanh(m.f(h.flatten(0, 1), h.flip(1).flatten(0, 1))).view_as(h)


@block(f=linear)
def pairs(m: Any, h: Tensor) -> Tensor:
    apart = torch.cdist(m.f(h), h) + (h[:, :, None] - h[:, None]).square().sum(-1)
    return torch.softmax(-apart, 2) @ h


@block(f=linear)
def running(m: Any, h: Tensor) -> Tensor:
    return torch.tanh(m.f(h.cumsum(1))) + h.cummax(1).values - h.flip(1).logcumsumexp(1)


@block(f=linear, g=linear)
def control_flow(m: Any, h: Tensor) -> Tensor:
    return torch.cat([m.f(row) if float(row.sum()) > 0 else torch.tanh(m.g(row)) for row in h.split(1)])


class Doubled(torch.autograd.Function):
    """x², with a backward pass of its own and rows that are kept for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * gradients[0]


@block(f=linear)
def own_backward(m: Any, h: Tensor) -> Tensor:
    return Doubled.apply(torch.tanh(m.f(h.transpose(0, 1)))).transpose(0, 1) + h


@block(f=linear)
def hooked(m: Any, h: Tensor) -> Tensor:
    y = torch.tanh(m.f(h))
    if y.requires_grad:
        y.register_hook(lambda g: 0.5 * g)
    return y + h


@block(f=linear)
def gradients_inside(m: Any, h: Tensor) -> Tensor:
    return h + torch.vmap(torch.func.grad(lambda row: torch.tanh(m.f(row)).square().sum()))(h)


@block(f=linear)
def mapped_over_rows_second(m: Any, h: Tensor) -> Tensor:
    return torch.vmap(lambda row: torch.tanh(m.f(row)), in_dims=1, out_dims=1)(h.transpose(0, 1)).transpose(0, 1)
