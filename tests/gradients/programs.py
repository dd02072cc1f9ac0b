# mypy: ignore-errors
"""Random programs in which records do not interact, by construction: blocks (B, S, d) → (B, S, d) that merge rows with
other dimensions, reorder them, cut windows, loop over them, join them with parameters. S = d = N on purpose, and one of
the batch sizes is N too: no length tells where the rows are."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sordino.clipping import FlatClip
from sordino.errors import Refused
from sordino.gradients import Rows, brute_force, clipped_sum, passes
from sordino.gradients.checks.assurance import Assurance
from sordino.gradients.rows import Chunk

N = 3
Step = Callable[[Any, Tensor], Tensor]
BLOCKS: dict[str, tuple[Step, Callable[[], dict[str, Any]]]] = {}


def block(**parts: Callable[[], Any]) -> Callable[[Step], Step]:
    """parts: what makes the block's own modules and parameters."""

    def add(step: Step) -> Step:
        BLOCKS[step.__name__] = step, lambda: {name: make() for name, make in parts.items()}
        return step

    return add


def linear() -> nn.Module:
    return nn.Linear(N, N)


def weight(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape) / 2


def order_of(rows: int) -> Tensor:
    return torch.randperm(rows, generator=torch.Generator().manual_seed(rows))


def score(h: Tensor) -> Tensor:
    """(B, S) something to choose by, without ties (a LayerNorm's outputs add up to zero)."""
    return (h.detach() * torch.linspace(0.3, 1.7, N, dtype=h.dtype)).sum(2) - 0.07


@block(f=linear)
def merged(m: Any, h: Tensor) -> Tensor:
    return torch.tanh(m.f(h.reshape(-1, N))).view_as(h)


@block(f=linear)
def time_first(m: Any, h: Tensor) -> Tensor:
    return torch.tanh(m.f(h.transpose(0, 1))).transpose(0, 1)


@block(f=linear, g=linear)
def merged_time_first(m: Any, h: Tensor) -> Tensor:
    flat = m.f(h.transpose(0, 1).reshape(-1, N)) + h.transpose(0, 1).flatten(0, 1)
    return m.g(torch.tanh(flat)).unflatten(0, (N, -1)).movedim(0, 1)


@block(f=linear)
def other_dimension(m: Any, h: Tensor) -> Tensor:
    return torch.tanh(m.f(h.mT)).mT


@block(w=weight(N, N, 1), v=weight(N, 1))
def rows_last(m: Any, h: Tensor) -> Tensor:
    return torch.tanh((h.permute(1, 2, 0) * m.w + m.v).permute(2, 0, 1))


@block(w=weight(N), v=weight(N, 1), u=weight(1, N, 1))
def scales(m: Any, h: Tensor) -> Tensor:
    return torch.addcmul(h * m.w, h, m.v) + m.u


@block(f=linear, w=weight(N))
def permuted_rows(m: Any, h: Tensor) -> Tensor:
    order = order_of(len(h))
    return (torch.tanh(m.f(h[order])) * m.w)[torch.argsort(order)]


@block(f=linear, n=lambda: nn.GroupNorm(1, N))
def flipped_rows(m: Any, h: Tensor) -> Tensor:
    return m.n(m.f(h.flip(0))).flip([0])  # type: ignore[no-any-return]


@block(f=linear)
def sorted_rows(m: Any, h: Tensor) -> Tensor:
    order = score(h).sum(1).argsort()
    return torch.tanh(m.f(h[order])).index_select(0, order.argsort())


@block(f=linear)
def sorted_within(m: Any, h: Tensor) -> Tensor:
    order = score(h).argsort(1)
    picked = torch.take_along_dim(h, order.unsqueeze(-1), 1)
    return torch.tanh(m.f(picked)).gather(1, order.argsort(1).unsqueeze(-1).expand_as(h))


@block(f=lambda: nn.Linear(2, N))
def windows(m: Any, h: Tensor) -> Tensor:
    return torch.tanh(m.f(F.pad(h, (0, 0, 1, 0)).unfold(1, 2, 1).mean(2)))


@block(f=linear)
def shifted_in_time(m: Any, h: Tensor) -> Tensor:
    return torch.tanh(m.f(F.pad(h, (0, 0, 1, -1)))) + h.roll(1, 1)


@block(f=linear)
def shifted_with_merged_rows(m: Any, h: Tensor) -> Tensor:
    wide = F.pad(h, (0, 0, 0, 1)).flatten(0, 1)  # a place of zeros behind each record, and a shift by one
    return torch.tanh(m.f(F.pad(wide, (0, 0, 1, -1)).unflatten(0, (len(h), N + 1))[:, 1:]))


@block(f=linear, w=weight(N))
def stretched(m: Any, h: Tensor) -> Tensor:
    twice = torch.tanh(m.f(h.repeat_interleave(2, 0)) * m.w)
    return twice.unflatten(0, (len(h), 2)).mean(1)


@block(f=linear)
def tiled(m: Any, h: Tensor) -> Tensor:
    twice = torch.tanh(m.f(h.repeat(2, 1, 1)))
    first, second = twice.chunk(2)
    return first - second / 3


@block(f=linear, cls=weight(1, 1, N), w=weight(1, 1, N))
def class_token(m: Any, h: Tensor) -> Tensor:
    long = torch.cat([m.cls.expand(len(h), -1, -1), h, m.w.repeat(len(h), 1, 1)], 1)
    return torch.tanh(m.f(long.cumsum(1)))[:, 1:-1]


@block(w=weight(1, N, N), f=linear)
def stretched_slot(m: Any, h: Tensor) -> Tensor:
    return m.f((m.w.expand(len(h), N, N) * h).sum(1, keepdim=True)) + h  # type: ignore[no-any-return]


@block(f=linear, table=weight(5, N))
def looked_up(m: Any, h: Tensor) -> Tensor:
    ids = (score(h) > 0).long() + 2 * (score(h.flip(2)) > 0.5).long()
    return m.f(h) + m.table[ids] + F.embedding(torch.arange(N), m.table)  # type: ignore[no-any-return]


@block(f=linear)
def loop_over_rows(m: Any, h: Tensor) -> Tensor:
    return torch.stack([torch.tanh(m.f(row)) for row in h])


@block(f=linear)
def loop_over_rows_in_place(m: Any, h: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    for i in range(len(h)):
        out[i] = torch.tanh(m.f(h[i]))
    return out


@block(cell=lambda: nn.GRUCell(N, N))
def loop_over_time(m: Any, h: Tensor) -> Tensor:
    state, out = torch.zeros_like(h[:, 0]), []
    for part in h.unbind(1):
        state = m.cell(part, state)
        out.append(state)
    return torch.stack(out, 1)


@block(net=lambda: nn.GRU(N, N, batch_first=True), f=linear)
def recurrent(m: Any, h: Tensor) -> Tensor:
    return m.net(h, torch.tanh(m.f(h[:, 0]))[None])[0]  # type: ignore[no-any-return]


@block(net=lambda: nn.LSTM(N, N))
def recurrent_over_merged(m: Any, h: Tensor) -> Tensor:
    steps = h.reshape(-1, N).expand(2, -1, -1)
    return m.net(steps)[1][0].squeeze(0).view_as(h)  # type: ignore[no-any-return]


@block(net=lambda: nn.RNN(N, N))
def recurrent_other_dimension(m: Any, h: Tensor) -> Tensor:
    return m.net(h.permute(2, 0, 1))[0].permute(1, 2, 0)  # type: ignore[no-any-return]


@block(net=lambda: nn.GRU(N, N, batch_first=True))
def packed(m: Any, h: Tensor) -> Tensor:
    lengths = 1 + (score(h) > 0).sum(1).clamp_max(N - 1)
    text = nn.utils.rnn.pack_padded_sequence(h, lengths, batch_first=True, enforce_sorted=False)
    return nn.utils.rnn.pad_packed_sequence(m.net(text)[0], batch_first=True, total_length=N)[0]


@block(q=linear, k=linear, v=linear)
def attention(m: Any, h: Tensor) -> Tensor:
    q, k, v = (f(h).unflatten(2, (N, 1)).transpose(1, 2) for f in (m.q, m.k, m.v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@block(q=linear, bias=weight(N, N))
def attention_with_merged_heads(m: Any, h: Tensor) -> Tensor:
    heads = m.q(h).unflatten(2, (N, 1)).transpose(1, 2).flatten(0, 1)  # (B · heads, S, 1)
    weights = torch.softmax(torch.bmm(heads, heads.mT) + m.bias, -1)
    return torch.bmm(weights, heads).unflatten(0, (-1, N)).transpose(1, 2).flatten(2)


@block(net=lambda: nn.Conv1d(N, N, 3, padding=1), n=lambda: nn.LayerNorm(N))
def convolved(m: Any, h: Tensor) -> Tensor:
    return m.n(torch.tanh(m.net(h)))  # type: ignore[no-any-return]


@block(net=lambda: nn.Conv2d(1, 1, 3, padding=1))
def convolved_image(m: Any, h: Tensor) -> Tensor:
    return torch.tanh(m.net(h[:, None]))[:, 0]


@block(w=weight(N, N, N))
def contracted(m: Any, h: Tensor) -> Tensor:
    return torch.tanh(torch.einsum("bsd,sde->bse", h, m.w))


@block(w=weight(N, N))
def products_of_data(m: Any, h: Tensor) -> Tensor:
    return torch.tanh(torch.einsum("bsd,btd,te->bse", h, h @ m.w, m.w))


@block(f=linear)
def reduced(m: Any, h: Tensor) -> Tensor:
    return m.f(h - h.mean(1, keepdim=True)) + h.amax(-1, keepdim=True) + h.logsumexp((1, 2))[:, None, None]  # type: ignore[no-any-return]


@block(f=linear)
def masked(m: Any, h: Tensor) -> Tensor:
    mask = score(h) > 0
    out = torch.zeros_like(h)
    out[mask] = torch.tanh(m.f(h[mask]))
    return out + h


@block(f=linear)
def scattered(m: Any, h: Tensor) -> Tensor:
    mask = score(h).flatten() > 0
    places = mask.nonzero().flatten()
    return h + torch.zeros_like(h).flatten(0, 1).index_add(0, places, m.f(h.flatten(0, 1)[places])).view_as(h)


@block(f=linear)
def cut_and_joined(m: Any, h: Tensor) -> Tensor:
    k = max(1, len(h) // 2)
    return torch.tanh(torch.cat([m.f(h[:k]), m.f(h[k:])]))


@block(f=linear, w=weight(N))
def interleaved(m: Any, h: Tensor) -> Tensor:
    both = torch.stack([m.f(h), h * m.w], 1).flatten(0, 1)  # rows of both kinds in turns
    return torch.tanh(both[::2]) - both[1::2]


@block(f=linear)
def spectrum(m: Any, h: Tensor) -> Tensor:
    return m.f(torch.fft.rfft(h, dim=1, norm="ortho").abs().sum(1, keepdim=True)) + h  # type: ignore[no-any-return]


@block(f=linear)
def mapped(m: Any, h: Tensor) -> Tensor:
    return torch.vmap(lambda row: torch.tanh(m.f(row)))(h)


@block(f=linear)
def unlisted(m: Any, h: Tensor) -> Tensor:
    return torch.hstack([m.f(h), h])[:, ::2][:, :N] + h if N % 2 == 0 else torch.dstack([m.f(h), h])[..., :N]


@block(w=weight(N, N), n=lambda: nn.GroupNorm(1, N))
def normed(m: Any, h: Tensor) -> Tensor:
    return m.n(F.linear(h, m.w)) + F.normalize(h, dim=-1)  # type: ignore[no-any-return]


class Part(nn.Module):
    def __init__(self, parts: dict[str, Any]) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)


class Program(nn.Module):
    """Blocks one after the other, some with a residual, some used twice."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        chance = random.Random(seed)
        torch.manual_seed(seed)
        self.names = chance.choices(list(BLOCKS), k=chance.randint(1, 4))
        self.parts = nn.ModuleList(Part(BLOCKS[name][1]()) for name in self.names)
        self.residual = [chance.random() < 0.4 for _ in self.names]
        self.again = chance.random() < 0.2

    def forward(self, h: Tensor) -> Tensor:
        for name, part, residual in zip(self.names, self.parts, self.residual, strict=True):
            out = BLOCKS[name][0](part, h)
            h = out + h if residual else out
        return h + BLOCKS[self.names[0]][0](self.parts[0], h) if self.again else h


def loss(out: Tensor, target: Tensor) -> Tensor:
    flat = out.flatten(1)
    return (flat @ torch.linspace(-1, 2, flat.shape[1], dtype=flat.dtype) - target).square()


@dataclass
class Outcome:
    """kind: proven, measured, refused, or a tie (rounding decides a sort or a mask, and the losses themselves differ).
    unused: a first batch of which no record uses any parameter is refused.
    gap: the largest difference from a plain loop, relative to the largest entry."""

    seed: int
    kind: str
    gap: float
    names: list[str]
    message: str = ""


class Filling(Assurance):
    """All checks of a training, and chunks that are filled up to N rows, as if the model had asked for their number."""

    def room(self, chunk: Chunk) -> int:
        together = 1 if chunk.slots is None or bool((chunk.slots < 0).any()) else chunk.slots.shape[1]
        return max(chunk.rows, N // together * together)


def compared(seed: int, rows: int, several: bool, checks: Assurance | None = None) -> Outcome:
    """One program at one number of rows against brute force, in float64. checks: those of a training, if any."""
    model = Program(seed).double()
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, N, N, generator=source, dtype=torch.float64)
    target = torch.randn(rows, generator=source, dtype=torch.float64)
    record = torch.arange(rows) % max(1, rows - 1) if several else None
    data = Rows(x, target, record)
    with mock.patch.object(passes, "measured", wraps=passes.measured) as measured:
        try:
            engine = clipped_sum(model, loss, data, FlatClip(1.0), assurance=checks)
        except Refused as refusal:
            unused = not any(t.any() for t in brute_force(model, loss, data, FlatClip(1.0)).sums.values())
            return Outcome(seed, "unused" if unused else "refused", 0.0, model.names, str(refusal))
    oracle = brute_force(model, loss, data, FlatClip(1.0))
    if not torch.allclose(engine.losses, oracle.losses, rtol=1e-9, atol=1e-9):
        return Outcome(seed, "tie", 0.0, model.names)
    largest = max(float(t.abs().max()) for t in oracle.sums.values())
    off = max(float((engine.sums[k] - t).abs().max()) for k, t in oracle.sums.items()) / max(largest, 1e-12)
    norms = float((engine.norms - oracle.norms).abs().max() / oracle.norms.max().clamp_min(1e-12))
    return Outcome(seed, "measured" if measured.called else "proven", max(off, norms), model.names)


def outcome(seed: int) -> list[Outcome]:
    """The program at the length of all other dimensions; one in six at another number of rows as well, and one in six
    with a row less, filled up to that length, and all checks of a training."""
    sizes = (N, 4 + seed % 5 // 3) if seed % 6 == 0 else (N,)
    found = [compared(seed, rows, several=(seed + rows) % 4 == 0) for rows in sizes]
    return [*found, compared(seed, N - 1, False, Filling())] if seed % 6 == 1 else found


from gradients import more_programs  # noqa: E402, F401 (adds its blocks)
