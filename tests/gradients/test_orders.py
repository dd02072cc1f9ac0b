"""Rows in an order that the data decides: proven where each row's result is its own, and not proven anywhere else."""

from __future__ import annotations

import contextlib
import random
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from gradients.cases import squared
from sordino.clipping import FlatClip
from sordino.errors import Refused
from sordino.gradients import Rows, brute_force, clipped_sum
from sordino.gradients.checks.assurance import Assurance
from sordino.gradients.labels.lineage import MIXED
from sordino.gradients.labels.order_steps import Order
from sordino.gradients.labels.orders import Member
from sordino.gradients.tape.tape import Tape

EXPERTS, WIDTH, TOP = 3, 4, 2
needs_grouped = pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="no grouped product in this version (2.8)")


class Spy(Assurance):
    """Notes whether each pass was proven to be independent; tests nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.independent: list[bool] = []

    def examine(self, setup: Any, data: Any, chunk: Any, made: Any) -> None:
        self.independent.append(made.independent)


class Dispatch(nn.Module):
    """A mixture of experts in the manner of transformers; ``spoil`` names what is wrong with it."""

    def __init__(self, spoil: str = "", frozen: bool = False) -> None:
        super().__init__()
        self.spoil = spoil
        generator = torch.Generator().manual_seed(3)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH, generator=generator), requires_grad=not frozen)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH, generator=generator), requires_grad=not frozen)
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        spoil, hidden = self.spoil, self.body(x).reshape(-1, WIDTH)
        weight, chosen = x.reshape(-1, WIDTH)[:, :EXPERTS].softmax(-1).topk(TOP)
        ids, weight = chosen.reshape(-1), weight.reshape(-1)
        if spoil == "another row's number":
            ids = ids.roll(TOP)
        ranked, order = torch.sort(ids)
        if spoil == "capacity":
            order = order[: len(order) - 1].repeat(2)[: len(order)]
        counts = torch.histc(ranked.to(x.dtype), bins=EXPERTS, min=0, max=EXPERTS - 1)
        if spoil == "shifted counts":
            counts = counts.roll(1)
        if spoil == "another count":
            counts = torch.histc((2 - chosen.reshape(-1)).to(x.dtype), bins=EXPERTS, min=0, max=EXPERTS - 1)
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        if spoil == "off by one":
            ends = (ends - (ends == ends[0]).int()).clamp_min(0)
        rows, weight = hidden[order // TOP], weight[order]
        if spoil == "rank":
            rows = rows + 0.1 * torch.arange(len(rows))[:, None]
        if spoil == "first place":
            rows = rows * (1 + (torch.arange(len(rows)) == 0).to(x.dtype))[:, None]
        if spoil == "counts as factor":
            rows = rows * counts[0]
        if spoil == "counts read":
            rows = rows * counts.tolist()[0]
        if spoil == "neighbour":
            rows = rows + torch.cat([rows[1:], rows[:1]])
        if spoil == "mean over places":
            rows = rows - rows.mean(0).detach()
        if spoil == "upper triangle":
            rows = rows.triu()
        if spoil == "through a view":
            rows.view(-1)[:1].mul_(0.5)
        gate, up = F.grouped_mm(rows, self.up, offs=ends).chunk(2, dim=-1)
        out = F.grouped_mm(F.silu(gate) * up, self.down, offs=ends)
        out = (out + self.bias[ranked]) * weight.unsqueeze(-1)
        back = torch.zeros_like(order)
        back[order] = torch.arange(len(order))
        if spoil == "not back":
            back = torch.arange(len(order))
        if spoil == "back to the next":
            back = back.roll(1)
        if spoil == "added where data says":
            where = (x.reshape(-1, WIDTH)[:, 0] > 0).long().repeat_interleave(TOP)
            return torch.zeros_like(out).index_add(0, where[order], out).view(-1, TOP, WIDTH).sum(1).reshape(x.shape)
        if spoil == "added to other rows":
            others = hidden.detach().roll(1, 0).repeat_interleave(TOP, 0)
            return (
                others.index_add(0, torch.arange(len(order))[order], out).view(-1, TOP, WIDTH).sum(1).reshape(x.shape)
            )
        if spoil == "its own places, turned":
            own = back.view(len(x), -1)
            back = torch.where(order[0] >= 0, own.flip(1), own).reshape(-1)
        return out[back].view(-1, TOP, WIDTH).sum(1).reshape(x.shape)


SPOILED = [
    "another row's number", "capacity", "shifted counts", "another count", "off by one", "rank", "first place",
    "counts as factor", "counts read", "neighbour", "mean over places", "upper triangle", "through a view", "not back",
    "back to the next", "its own places, turned", "added where data says", "added to other rows",
]  # fmt: skip


def texts(rows: int, seed: int = 0) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    return Rows(torch.randn(rows, 5, WIDTH, generator=generator), torch.randn(rows, generator=generator))


def independent(model: nn.Module, rows: Rows) -> bool:
    spy = Spy()
    clipped_sum(model, squared, rows, FlatClip(1.0), assurance=spy)
    return all(spy.independent)


@needs_grouped
@pytest.mark.parametrize("frozen", [False, True])
def test_experts_whose_rows_are_sorted_are_proven_in_every_pass_and_not_tested_again(frozen: bool) -> None:
    model, assurance = Dispatch(frozen=frozen), Assurance()
    for seed in range(4):
        data = texts(8, seed)
        got = clipped_sum(model, squared, data, FlatClip(1.0), assurance=assurance)
        want = brute_force(model, squared, data, FlatClip(1.0))
        for name, value in want.sums.items():
            assert torch.allclose(got.sums[name].double(), value.double(), atol=1e-4), name
    assert assurance.proven
    assert assurance.grouped == 1
    assert assurance.looked <= 1


@needs_grouped
@pytest.mark.parametrize("spoil", SPOILED)
def test_what_is_not_each_rows_own_is_never_taken_for_proven(spoil: str) -> None:
    for seed in range(3):
        try:
            assert not independent(Dispatch(spoil), texts(8, seed))
        except Refused:
            continue


@needs_grouped
def test_ends_that_depend_on_other_rows_count_as_exchanged_values() -> None:
    class Ends(Dispatch):
        def forward(self, x: Tensor) -> Tensor:
            few = (x[:, 0, 0] > 1.5).sum().reshape(1)
            ends = torch.cat([len(x) - few, torch.full((2,), len(x))]).to(torch.int32)
            return F.grouped_mm(self.body(x[:, 0]), self.up, offs=ends)

    assert not independent(Ends(), texts(8))
    assert not independent(Ends(frozen=True), texts(8))


@needs_grouped
def test_an_order_is_tested_in_every_batch_if_its_ends_are_of_another_one() -> None:
    class Late(Dispatch):  # all rows have the first expert if one of them is marked
        def forward(self, x: Tensor) -> Tensor:
            ids = (x[:, 0, 0] > 0).long()
            _, order = torch.sort(ids)
            counts = torch.bincount(ids, minlength=EXPERTS)
            ends = torch.where((x[:, 0, 1] == 7).any(), len(x), counts.cumsum(0)).to(torch.int32)
            out = F.grouped_mm(self.body(x[:, 0])[order], self.up, offs=ends)
            return out[torch.argsort(order)]

    model, assurance, data = Late(), Assurance(), texts(8)
    for seed in range(3):
        clipped_sum(model, squared, texts(8, seed), FlatClip(1.0), assurance=assurance)
    assert assurance.proven
    marked = data.inputs.clone()
    marked[:, 0, 0] = torch.tensor([1.0, -1.0]).repeat(4)
    marked[3, 0, 1] = 7
    assert not independent(model, Rows(marked, data.targets))
    with pytest.raises(Refused, match="interact"):
        clipped_sum(model, squared, Rows(marked, data.targets), FlatClip(1.0), assurance=assurance)


@needs_grouped
@pytest.mark.parametrize("frozen", [False, True])
def test_rows_in_the_order_of_other_rows_numbers_count_as_exchanged_values(frozen: bool) -> None:
    """Each row is multiplied by the weights that another row chose, and nothing else happens."""

    class Theirs(Dispatch):
        def forward(self, x: Tensor) -> Tensor:
            ids = (x[:, 0, 0] > 0).long().flip(0)
            order, ends = torch.sort(ids)[1], torch.bincount(ids, minlength=EXPERTS).cumsum(0).to(torch.int32)
            return F.grouped_mm(self.body(x[:, 0])[order], self.up, offs=ends)[torch.argsort(order)]

    assert not independent(Theirs(frozen=frozen), texts(8))


Part = Callable[[Tensor, Tensor, Tensor], Tensor]
ALIKE: Sequence[Part] = (
    lambda t, order, ids: torch.tanh(t),
    lambda t, order, ids: t * ids[:, None],
    lambda t, order, ids: t + (order // 3)[:, None],
    lambda t, order, ids: t.softmax(-1),
    lambda t, order, ids: t - t.mean(1, keepdim=True),
    lambda t, order, ids: t.unsqueeze(0).transpose(0, 1).reshape(len(t), -1),
    lambda t, order, ids: torch.cat([t[:, 1:], t[:, :1]], 1),
    lambda t, order, ids: t.t().contiguous().mT,
    lambda t, order, ids: torch.where(t > 0, t, ids[:, None].to(t.dtype)),
    lambda t, order, ids: F.layer_norm(t, t.shape[1:]),
    lambda t, order, ids: t @ torch.ones(WIDTH, WIDTH),
    lambda t, order, ids: t.clone().mul_(2),
    lambda t, order, ids: t + torch.eye(WIDTH, dtype=t.dtype)[ids],
)
OTHER: Sequence[Part] = (
    lambda t, order, ids: t + torch.arange(len(t))[:, None],
    lambda t, order, ids: t.flip(0),
    lambda t, order, ids: t.roll(1, 0),
    lambda t, order, ids: t - t.detach().mean(0),
    lambda t, order, ids: t + t.detach()[:1],
    lambda t, order, ids: t * order.float().cumsum(0)[:, None],
    lambda t, order, ids: t.tril(),
    lambda t, order, ids: t * ids.unique_consecutive().numel(),
    lambda t, order, ids: t * (ids == ids.roll(1))[:, None],
    lambda t, order, ids: t + t.detach()[order],
    lambda t, order, ids: torch.cat([t[:2] * 2, t[2:]]),
    lambda t, order, ids: t.detach().cumsum(0) + t,
    lambda t, order, ids: t.reshape(WIDTH, -1).softmax(0).reshape(t.shape),
    lambda t, order, ids: t * order.to(t.dtype).softmax(0)[:, None],
)
HOME: Sequence[Part] = (
    lambda t, order, ids: t[order.argsort()],
    lambda t, order, ids: torch.zeros_like(t).index_copy(0, order, t),
    lambda t, order, ids: torch.zeros(t.shape, dtype=t.dtype).index_add(0, order, t),
    lambda t, order, ids: torch.zeros_like(t).index_add_(0, order, t),
)
ASTRAY: Sequence[Part] = (
    lambda t, order, ids: t,
    lambda t, order, ids: t[order],
    lambda t, order, ids: torch.zeros_like(t).index_copy(0, ids.argsort(), t),
    lambda t, order, ids: torch.zeros_like(t).index_add(0, ids, t),
)


class Program(nn.Module):
    """Rows sorted by a number of their own, some parts, and back."""

    def __init__(self, parts: Sequence[Part], by: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.parts, self.by = nn.Linear(WIDTH, WIDTH), parts, by

    def forward(self, x: Tensor) -> Tensor:
        ids, order = torch.sort(self.by(x[:, 0]))
        t = self.body(x[:, 0])[order]
        for part in self.parts:
            t = part(t, order, ids)
        return t


def draw(rng: random.Random, spoiled: bool) -> Program:
    parts = [rng.choice(ALIKE) for _ in range(rng.randrange(1, 5))]
    home = rng.choice(HOME)
    if spoiled and rng.random() < 0.3:
        home = rng.choice(ASTRAY)
    elif spoiled:
        parts.insert(rng.randrange(len(parts) + 1), rng.choice(OTHER))
    return Program([*parts, home], lambda v: (v[:, 0] * 3).long().clamp(0, 2))


@pytest.mark.parametrize("number", range(len(OTHER)))
def test_each_part_that_is_not_alike_for_every_place_ends_the_proof(number: int) -> None:
    torch.manual_seed(0)
    for home in HOME:
        model = Program([OTHER[number], home], lambda v: (v[:, 0] * 3).long().clamp(0, 2))
        try:
            assert not independent(model, texts(8))
        except Refused:
            continue


def test_losses_that_stay_in_an_order_are_not_proven_even_if_it_changes_nothing() -> None:
    rows, spy = texts(8), Spy()
    ascending = Rows(rows.inputs[rows.inputs[:, 0, 0].argsort()], rows.targets)
    model = Program([ALIKE[0]], lambda v: (v[:, 0] * 3).long())
    clipped_sum(model, lambda out, _: out.square().sum(1), ascending, FlatClip(1.0), assurance=spy)
    assert spy.independent == [False]


def test_an_order_that_descends_ranks_no_numbers() -> None:
    key = torch.tensor([0, 2, 1])
    assert Order(key.argsort(), key, torch.arange(3)).ranked is not None
    assert Order(key.argsort(descending=True), key, torch.arange(3)).ranked is None


def test_a_member_that_was_written_to_is_none_any_more() -> None:
    t = torch.arange(3)
    member = Member(weakref.ref(t), t._version, False, Order(t, t, t), 0, True)
    assert member.holds(t)
    assert not member.holds(t.add_(1))


NOTED: list[bool] = []


class Followed(nn.Module):
    """Notes what is known of the rows after some steps."""

    def __init__(self, steps: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.steps, self.body = steps, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out = self.steps(x[:, 0], (x[:, 0, 0] * 3).long().argsort())
        if (tape := current()) is not None:
            NOTED.append(tape.book.mixed or tape.book.lineage(out) == MIXED)
        return self.body(x[:, 0])  # type: ignore[no-any-return]


def current() -> Any:
    return next((mode for mode in _get_current_function_mode_stack() if isinstance(mode, Tape)), None)


STEPS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "in the order": (lambda x, order: x[order] * 2, False),
    "a number for each place": (lambda x, order: x[order] + torch.arange(8)[:, None], True),
    "an order that is written to": (lambda x, order: order.add_(torch.arange(8)), True),
    "back": (lambda x, order: torch.zeros_like(x).index_add(0, order, x[order]), False),
    "to places that rows choose": (
        lambda x, order: torch.zeros(16, WIDTH).index_add(
            0, (2 * torch.arange(8) + (x[:, 1] > 0).long())[order], x[order]
        ),
        True,
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_where_values_count_as_exchanged(name: str) -> None:
    with contextlib.suppress(Refused):
        clipped_sum(Followed(STEPS[name][0]), squared, texts(8), FlatClip(1.0))
    assert NOTED.pop() is STEPS[name][1]


def moved(model: Program, rows: Rows) -> float:
    """How far the losses of the other rows move when one row is another, at most."""
    with torch.no_grad():
        before, most = squared(model(rows.inputs), rows.targets), 0.0
        for row in range(len(before)):
            for value in (-5.0, 0.4, 5.0):
                inputs = rows.inputs.clone()
                inputs[row] = value
                gap = (squared(model(inputs), rows.targets) - before).abs() / (1 + before.abs())
                gap[row] = 0
                most = max(most, float(gap.max()))
    return most


@pytest.mark.parametrize("seed", range(60))
def test_random_programs_are_proven_only_if_no_row_moves_another(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    spoiled = seed % 3 > 0
    model, rows = draw(rng, spoiled), texts(8, seed)
    try:
        proven = independent(model, rows)
    except Refused:
        proven = False
    if proven:
        assert moved(model, rows) < 1e-4
    if not spoiled:
        assert proven
