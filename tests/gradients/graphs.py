# mypy: ignore-errors
"""Random graphs of single operations on (rows, N, N), whose rows wander over the dimensions: products, selections by
data, sorts, writes through views, and now and then something that mixes rows (MIXING). What is accepted equals a loop.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sordino.clipping import FlatClip
from sordino.errors import Refused
from sordino.gradients import Rows, brute_force, clipped_sum
from sordino.gradients.checks.assurance import Assurance

N = 4
SIZES = (N, 3, N, 6, N)
MIXING = 0.06
FAILURES = (RuntimeError, IndexError, ValueError, TypeError)


class Graph(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        chance, source = random.Random(seed), torch.Generator().manual_seed(seed)
        self.w = nn.ParameterList([torch.randn(N, N, generator=source) / 2 for _ in range(3)])
        self.v = nn.ParameterList([torch.randn(N, generator=source) / 2 for _ in range(3)])
        self.names = chance.choices(list(STEPS), k=chance.randint(3, 9))
        self.seeds = [chance.random() for _ in self.names]

    def forward(self, x: Tensor) -> Tensor:
        pool = [(torch.tanh(x @ self.w[0]), 0)]
        for name, seed in zip(self.names, self.seeds, strict=True):
            at = Step(self, random.Random(seed), pool)
            found = STEPS[name](at)
            pool.append(found if isinstance(found, tuple) else (found, at.row))
        h, row = pool[-1]
        return h.movedim(row, 0).flatten(1) @ torch.linspace(-1, 2, N * N, dtype=h.dtype)


class Step:
    """One operation: h is its tensor, row the dimension of the rows, d mostly another one."""

    def __init__(self, model: Graph, chance: random.Random, pool: list[tuple[Tensor, int]]) -> None:
        self.model, self.chance, self.pool = model, chance, pool
        self.h, self.row = chance.choice(pool[-3:])
        self.d = chance.randrange(3)
        if self.d == self.row and not self.mixes:
            self.d = (self.d + 1 + chance.randrange(2)) % 3

    @property
    def mixes(self) -> bool:
        return self.chance.random() < MIXING

    @property
    def w(self) -> Tensor:
        return self.chance.choice(list(self.model.w))

    @property
    def v(self) -> Tensor:
        return self.chance.choice(list(self.model.v))

    @property
    def wide(self) -> Tensor:
        """A parameter along dimension d."""
        return self.v.view([N if k == self.d else 1 for k in range(3)])

    @property
    def other(self) -> Tensor:
        b, row = self.chance.choice(self.pool)
        return b if b.shape == self.h.shape and self.mixes else b.movedim(row, self.row)

    @property
    def first(self) -> Tensor:
        """The rows in dimension 0; `back` undoes it."""
        return self.h.movedim(self.row, 0)

    def back(self, t: Tensor) -> Tensor:
        return t.movedim(0, self.row)

    def any_of(self, *ways: Callable[[], Tensor]) -> Tensor:
        return self.chance.choice(ways)()

    def at(self, index: object) -> tuple[object, ...]:
        """An index along dimension d."""
        return tuple(index if k == self.d else slice(None) for k in range(3))


STEPS: dict[str, Callable[[Step], Tensor | tuple[Tensor, int]]] = {}


def step(function: Callable[[Step], Tensor | tuple[Tensor, int]]) -> object:
    STEPS[function.__name__] = function
    return function


@step
def alone(s: Step) -> Tensor:
    h = s.h
    return s.any_of(
        lambda: h.tanh(), lambda: h.sin(), lambda: h.relu(), lambda: h.square(), lambda: h.clone().mul_(1.1)
    )


@step
def scaled(s: Step) -> Tensor:
    return s.any_of(lambda: s.h * s.wide, lambda: s.h.clone().add_(s.wide))


@step
def mapped(s: Step) -> Tensor:
    letters = "abc"
    to = f"abc,{letters[s.d]}z->{letters.replace(letters[s.d], 'z')}"
    return s.any_of(
        lambda: torch.tensordot(s.h, s.w, dims=([s.d], [0])).movedim(-1, s.d),
        lambda: F.linear(s.h.movedim(s.d, -1), s.w, s.v).movedim(-1, s.d),
        lambda: (s.w @ s.h.movedim(s.d, -2)).movedim(-2, s.d),
        lambda: torch.einsum(to, s.h, s.w),
    )


@step
def merged(s: Step) -> Tensor:
    return s.back(torch.tanh(F.linear(s.first.flatten(0, 1), s.w)).unflatten(0, (-1, N)))


@step
def permuted(s: Step) -> tuple[Tensor, int]:
    order = list(range(3))
    s.chance.shuffle(order)
    return s.h.permute(order), order.index(s.row)


@step
def transposed(s: Step) -> tuple[Tensor, int]:
    a, b = s.chance.sample(range(3), 2)
    return s.h.transpose(a, b), {a: b, b: a}.get(s.row, s.row)


@step
def along(s: Step) -> Tensor:
    h, d = s.h, s.d
    return s.any_of(
        lambda: h.flip(d),
        lambda: h.roll(1, d),
        lambda: h.cumsum(d),
        lambda: h.softmax(d),
        lambda: h - h.mean(d, keepdim=True),
        lambda: h / (1 + h.norm(dim=d, keepdim=True)),
        lambda: h.sort(d).values,
        lambda: h * h.amax(d, keepdim=True),
        lambda: F.pad(h.movedim(d, -1), (1, -1)).movedim(-1, d),
        lambda: torch.cat([h, h.narrow(d, 0, 1)], d).unfold(d, 2, 1).mean(-1),
        lambda: torch.fft.fft(h, dim=d).real * s.v[0],
    )


@step
def reordered(s: Step) -> Tensor:
    rows = len(s.first)
    known = torch.randperm(rows, generator=torch.Generator().manual_seed(rows))
    order = s.any_of(lambda: known, lambda: s.first.detach().sum((1, 2)).argsort())
    z = torch.tanh(s.first[order] * s.v[1])
    back = order if s.mixes else order.argsort()
    return s.back(s.any_of(lambda: z[back], lambda: z.index_select(0, back)))


@step
def selected(s: Step) -> Tensor:
    places = s.other.detach().argsort(s.d)
    return s.any_of(
        lambda: s.h.gather(s.d, places),
        lambda: torch.take_along_dim(s.h, places, s.d),
        lambda: torch.zeros_like(s.h).scatter(s.d, places, s.h * 1.3),
    )


@step
def combined(s: Step) -> Tensor:
    a, b = s.h, s.other
    return s.any_of(
        lambda: a + b,
        lambda: a * b,
        lambda: torch.maximum(a, b),
        lambda: torch.where(b.detach() > 0, a, b * 0.5),
        lambda: a.masked_fill(b.detach() > 0.5, 0.2),
        lambda: a + b.detach(),
        lambda: torch.cat([a, b], s.d).narrow(s.d, 1, a.shape[s.d]),
        lambda: torch.stack([a, b], s.d).select(s.d, 1),
        lambda: torch.mul(a.detach(), b.detach(), out=torch.empty_like(a)) + a,
    )


@step
def multiplied(s: Step) -> Tensor:
    a, b = s.first, s.other.movedim(s.row, 0)
    return s.back(
        s.any_of(
            lambda: a @ b,
            lambda: torch.bmm(a, b.mT),
            lambda: torch.einsum("bij,bkj->bik", a, b),
            lambda: F.scaled_dot_product_attention(a, b, a),
            lambda: F.conv1d(F.pad(a, (1, 0)), torch.stack([s.w, s.w], 2)),
        )
    )


@step
def written(s: Step) -> Tensor:
    c, b, k = s.h.clone(), s.other, s.chance.randrange(3)
    s.any_of(
        lambda: c.select(s.d, k).copy_(b.select(s.d, 0)),
        lambda: c.narrow(s.d, 0, 1 + k).mul_(s.v[0]),
        lambda: c.transpose(0, 2).add_(b.transpose(0, 2)),
        lambda: c.__setitem__(s.at(slice(0, k + 1)), b[s.at(slice(0, k + 1))] * 2),
        lambda: c.__setitem__(s.at(k), s.v[2]),
        lambda: c.movedim(s.d, 0)[k].mul_(b.movedim(s.d, 0)[k]),
        lambda: c.__setitem__(c.detach() > 0, 0.3),
    )
    return c


@step
def written_into_constants(s: Step) -> Tensor:
    c = s.any_of(
        lambda: torch.zeros_like(s.h), lambda: s.h.new_zeros(s.h.shape), lambda: torch.empty_like(s.h).fill_(0.1)
    )
    for k in range(s.h.shape[s.d]):
        if s.chance.random() < 0.8:
            c[s.at(k)] = s.h[s.at(k)] * (1 + 0.1 * k)
    return c


@step
def seen_through_a_view(s: Step) -> Tensor:
    c, b = s.h.clone(), s.other
    view = s.any_of(
        lambda: c.transpose(0, 1), lambda: c.view(-1), lambda: c[...], lambda: c.narrow(s.d, 0, 1), c.detach
    )
    s.any_of(lambda: c.mul_(b), lambda: c.copy_(b), lambda: view.mul_(0.5), lambda: view.add_(s.v[1]))
    return c + (0 * s.h if s.chance.random() < 0.5 else c.transpose(0, 1).transpose(0, 1))


@step
def loops(s: Step) -> Tensor:
    w, state, found = s.w, 0, []
    if s.chance.random() < 0.5:
        return s.back(torch.stack([torch.tanh(row @ w) for row in s.first]))
    for t in s.h.unbind(s.d):
        state = torch.tanh(t + 0.3 * state)
        found.append(state)
    return torch.stack(found, s.d)


@step
def chosen_rows(s: Step) -> Tensor:
    y, z = s.first, torch.zeros_like(s.first)
    some = y.detach()[:, 0, 0] > 0
    z[some], z[~some] = torch.tanh(y[some] @ s.w), y[~some] * s.v[0]
    return s.back(z)


@step
def looked_up(s: Step) -> Tensor:
    ids = (s.h.detach().abs() * 3).long().clamp(max=N - 1)
    return s.any_of(lambda: s.h + s.v[ids], lambda: s.h * s.w[ids, ids.flip(s.d)])


@step
def stretched(s: Step) -> Tensor:
    y, p = s.first, s.v
    twice = torch.tanh(y.repeat_interleave(2, 0) * p)
    return s.back(
        s.any_of(
            lambda: p.expand(len(y), N, N) * y,
            lambda: p[None, :, None].repeat(len(y), 1, N) + y,
            lambda: torch.cat([p.expand(len(y), 1, N), y], 1)[:, :N],
            lambda: twice[::2],
            lambda: twice.unflatten(0, (-1, 2)).sum(1),
        )
    )


@step
def normed(s: Step) -> Tensor:
    y = s.first
    return s.back(
        s.any_of(
            lambda: F.layer_norm(y, (N,), s.v),
            lambda: F.group_norm(y, 2, s.v),
            lambda: F.layer_norm(y, (N, N)),
            lambda: F.rms_norm(y, (N,), s.v),
        )
    )


@step
def mixed(s: Step) -> Tensor:
    h, row = s.h, s.row
    if s.chance.random() > 0.25:
        return h * 0.9
    return s.any_of(
        lambda: h - h.mean(row, keepdim=True),
        lambda: h * h.detach().amax(),
        lambda: h + h.flip(row),
        lambda: h * (1.0 if float(h.detach().max()) < 0.9 else 0.5),
        lambda: h * (h.shape[row] % 3 + 1),
    )


def loss(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square()


def outcome(seed: int) -> tuple[str, float, list[str]]:
    """(accepted, refused, or failed in torch itself; the largest distance from a loop; the names of the steps)."""
    model, source, assurance, gap = Graph(seed).double(), torch.Generator().manual_seed(seed), Assurance(), 0.0
    try:
        for rows in (N, 3, 1):
            x = torch.randn(rows, N, N, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            torch.autograd.grad(model(x).sum(), list(model.parameters()), allow_unused=True)
    except FAILURES:
        return "failed", 0.0, model.names
    for k, rows in enumerate(SIZES):
        x = torch.randn(rows, N, N, dtype=torch.float64, generator=source)
        x[0] *= 8 if k >= 2 else 1
        given = Rows(x, torch.randn(rows, dtype=torch.float64, generator=source))
        torch.manual_seed(seed + k)
        try:
            found = clipped_sum(model, loss, given, FlatClip(1.0), assurance=assurance)
        except Refused:
            return "refused", gap, model.names
        expected = brute_force(model, loss, given, FlatClip(1.0))
        gap = max(gap, float((found.losses - expected.losses).abs().max() / expected.losses.abs().max()))
        gap = max(gap, *(float((found.sums[name] - t).abs().max()) for name, t in expected.sums.items()))
    return "accepted", gap, model.names
