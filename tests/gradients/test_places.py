"""The number of rows, and the place of a row, must not matter to any row: not even to one that is rare.

Six batches have no marked record. Then comes one with eight marked records, and only for these the model uses the
number of rows or their places. Each line was accepted once: a record moved the sum by 1.1 to 3.5 clip norms. Nothing
that rows exchange could be seen, and no group of the earlier batches showed an effect.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import wrap_torch_function

from gradients.cases import Fn
from sordino.clipping import FlatClip
from sordino.errors import Refused
from sordino.gradients import Rows, brute_force, clipped_sum
from sordino.gradients.checks.assurance import Assurance

Effect = Callable[[Tensor, Tensor], Tensor]
MARK = 5.0


def signs(n: int) -> Tensor:
    return 1.0 - 2 * (torch.arange(n) % 2)


def _filled(n: int) -> Tensor:
    one = torch.ones(n, 1)
    one[::2] = -1
    return one


def _some_turned(h: Tensor, into: Tensor) -> Tensor:
    into[::2] = -into[::2]
    return h * into


def _stopped(h: Tensor, flows: bool) -> Tensor:
    with torch.set_grad_enabled(flows):
        return h * 2


def blanked(h: Tensor) -> Tensor:
    out = h.clone()
    out[8:12] = 0.0
    return out


BY_PLACE: dict[str, Effect] = {
    "numbers that have one hash, −1 and −2": lambda x, h: h * (-2.0 if len(x) % 2 else -1.0),
    "numbers that have one hash, 1 and 2⁶¹": lambda x, h: h * (2.0**61 if len(x) % 2 else 1.0),
    "numbers that have one hash, as an index": lambda x, h: h[:, (-1 if len(x) % 2 else -2)][:, None].expand(-1, 16),
    "the sign of zero": lambda x, h: h * torch.copysign(torch.ones_like(h), 0.0 if len(x) % 2 else -0.0),
    "a number of numpy's": lambda x, h: h.mul(np.float32(1 - 2 * (len(x) % 2))),
    "a complex number": lambda x, h: (h * (1j if len(x) % 2 else 1 + 0j)).real,
    "rows that are set by their places": lambda x, h: blanked(h),
    "a number by keyword": lambda x, h: torch.add(h, h, alpha=-3.0 * (len(x) % 2)),
    "a generator of its own, in place": lambda x, h: (
        h * h.clone().bernoulli_(0.5, generator=torch.Generator().manual_seed(len(x)))
    ),
    "numbers of rows": lambda x, h: h * (1 - 2 * (len(x) % 2)),
    "the operand by the number of rows": lambda x, h: -h if len(x) % 2 else h,
    "a number in a tensor": lambda x, h: h * torch.ones(len(x)).sum().remainder(2),
    "the same by a view": lambda x, h: h * torch.tensor([1.0, -1.0]).expand(len(x), 2).reshape(2, -1)[1, 0],
    "the tensor by the number of rows": lambda x, h: (h.tanh(), h.neg())[len(x) % 2],
    "arange": lambda x, h: h * signs(len(x))[:, None],
    "a list": lambda x, h: h * torch.tensor([1.0 - 2 * (i % 2) for i in range(len(x))])[:, None],
    "an array": lambda x, h: h * torch.from_numpy(1.0 - 2 * (np.arange(len(x)) % 2)).float()[:, None],
    "repeated": lambda x, h: h * torch.tensor([1.0, -1.0]).repeat(len(x))[: len(x), None],
    "zeros that are filled": lambda x, h: h * _filled(len(x)),
    "a condition": lambda x, h: torch.where((signs(len(x)) > 0)[:, None], h, -h),
    "a product": lambda x, h: torch.einsum("bi,b->bi", h, signs(len(x))),
    "matrices": lambda x, h: torch.bmm(h[:, None], torch.eye(16) * signs(len(x))[:, None, None])[:, 0],
    "a table": lambda x, h: h * F.embedding(torch.arange(len(x)) % 2, torch.tensor([[1.0], [-1.0]])),
    "a permutation's numbers": lambda x, h: h * (1 - 2 * (torch.randperm(len(x)) % 2))[:, None],
    "a known generator": lambda x, h: h * torch.rand(1, generator=torch.Generator().manual_seed(len(x))),
    "a constant in the place of another": lambda x, h: h * torch.tensor(1.0) * torch.tensor(1.0 - 2 * (len(x) % 2)),
    "where gradients stop": lambda x, h: _stopped(h, len(x) % 2 > 0),
    "another position of every row": lambda x, h: (
        h * h.view(-1, 4, 4)[torch.arange(len(x)), torch.arange(len(x)) % 4, :1]
    ),
    "the first rows": lambda x, h: torch.cat([-h[:9], h[9:]]),
    "a loop": lambda x, h: torch.stack([r if i % 2 else -r for i, r in enumerate(h)]),
    "every other row, in place": lambda x, h: _some_turned(h.sign(), h.clone()),
    "without a question: ones of the same shape": lambda x, h: _some_turned(h, torch.ones_like(h)),
    "without a question: a triangle": lambda x, h: h.tril(),
    "without a question: a triangle of ones": lambda x, h: h * torch.ones_like(h).triu(-8),
}


@wrap_torch_function(lambda x: (x,))
def relu(x: Tensor) -> Tensor:
    """A user's function of that name."""
    return x - x.mean(0)


library = torch.library.Library("sordino_test", "DEF")  # type: ignore[no-untyped-call]
library.define("relu(Tensor x) -> Tensor")  # type: ignore[no-untyped-call]
library.impl("relu", lambda x: x - x.mean(0), "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
WEIGHTS = [torch.randn(64, 16, generator=torch.Generator().manual_seed(k)) for k in range(2)] + [torch.zeros(64)] * 2

BY_NAME: dict[str, Effect] = {
    "an operator of that name": lambda x, h: torch.ops.sordino_test.relu(h),
    "a function of that name": lambda x, h: relu(h),
    "torch.embedding, which takes the table first": lambda x, h: torch.embedding(h, torch.arange(len(x)).roll(1)),
    "aten's batch_norm": lambda x, h: torch.ops.aten.batch_norm(h, None, None, None, None, True, 0.1, 1e-5, False),
    "torch.lstm with a keyword": lambda x, h: torch.lstm(
        h[None], (torch.zeros(1, 1, 16), torch.zeros(1, 1, 16)), WEIGHTS, True, 1, 0.0, False, False, batch_first=True
    )[0][0],
}


class Gated(nn.Module):
    """The effect is limited to marked rows."""

    def __init__(self, effect: Effect) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.effect = nn.Linear(8, 16), nn.Linear(16, 3), effect

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        out: Tensor = self.b(torch.where(x[:, :1] == MARK, self.effect(x, h), h))
        return out


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum(1)


def run(effect: Effect, last: Tensor) -> Tensor:
    """The sum over the last batch, after seven without a marked record. Records 300 to 307 are marked."""
    source = torch.Generator().manual_seed(5)
    x, y = torch.randn(308, 8, generator=source), torch.randn(308, 3, generator=source)
    x[300:, 0] = MARK
    model, assurance = Gated(effect), Assurance()
    usual = [torch.arange(24 * k, 24 * k + 24) for k in range(6)]
    for step, batch in enumerate((*usual, torch.arange(150, 173), last)):
        torch.manual_seed(1000 + step)
        sums = clipped_sum(model, loss, Rows(x[batch], y[batch]), FlatClip(1.0), assurance=assurance).sums
    return torch.cat([t.flatten() for t in sums.values()])


LAST = torch.cat([torch.arange(200, 208), torch.arange(300, 308), torch.arange(210, 218)])


@pytest.mark.parametrize("name", [*BY_PLACE, *BY_NAME])
def test_what_only_rare_rows_show_is_refused_in_the_batch_where_it_matters(name: str) -> None:
    with pytest.raises(Refused):
        run({**BY_PLACE, **BY_NAME}[name], LAST)


def test_trained_numbers_that_differ_from_place_to_place_are_refused_where_they_matter() -> None:
    class Places(Gated):
        def __init__(self) -> None:
            super().__init__(lambda x, h: h if len(x) % 3 else h * self.signs.repeat(len(x) // 3)[:, None])
            self.signs = nn.Parameter(torch.tensor([1.0, -1.0, 2.0]))

    source = torch.Generator().manual_seed(5)
    x, y = torch.randn(208, 8, generator=source), torch.randn(208, 3, generator=source)
    x[200:, 0] = MARK
    model, assurance = Places(), Assurance()
    for k in range(6):
        clipped_sum(
            model, loss, Rows(x[24 * k : 24 * k + 24], y[24 * k : 24 * k + 24]), FlatClip(1.0), assurance=assurance
        )
    with pytest.raises(Refused):
        clipped_sum(model, loss, Rows(x[184:], y[184:]), FlatClip(1.0), assurance=assurance)


def test_a_model_that_has_no_loss_for_every_row_of_a_small_group_is_refused() -> None:
    x, y = torch.randn(24, 8), torch.randn(24, 3)
    model = Gated(lambda x, h: h * torch.tensor([1.0, -1.0]).repeat(len(x) // 2)[:, None])
    with pytest.raises(Refused, match="one value per row"):
        clipped_sum(model, loss, Rows(x, y), FlatClip(1.0), assurance=Assurance())


ALIKE: dict[str, Effect] = {
    "sizes that only give a shape": lambda x, h: h.view(len(x), 4, 4).transpose(1, 2).reshape(len(x), 16),
    "zeros, ones": lambda x, h: h + torch.zeros(len(x), 16) * torch.ones(len(x), 1),
    "the same numbers for every row": lambda x, h: h * torch.arange(16.0).expand(len(x), 16),
    "repeated rows of one": lambda x, h: h * torch.arange(16.0)[None].repeat(len(x), 1),
    "rows by their own numbers": lambda x, h: h * x[torch.arange(len(x))[:, None], torch.arange(1)[None]],
    "random numbers of every row": lambda x, h: h * torch.rand(len(x), 1) * (torch.rand(x.shape[0]) > 0.5)[:, None],
    "random numbers like timm's": lambda x, h: (
        h * x.new_empty(x.shape[0], 1).bernoulli_(0.5) + x.new_full((len(x), 1), 2)
    ),
    "a random lookup": lambda x, h: h * torch.linspace(0, 1, 50)[torch.randint(0, 50, (len(x),))][:, None],
}


@pytest.mark.parametrize("name", ALIKE)
def test_a_model_that_asks_and_computes_the_same_for_every_number_is_not_tested_in_every_batch(name: str) -> None:
    model, assurance = Gated(ALIKE[name]), Assurance()
    for step in range(8):
        torch.manual_seed(step)
        data = Rows(torch.randn(12, 8), torch.randn(12, 3))
        data.inputs[::2, 0] = MARK
        clipped_sum(model, loss, data, FlatClip(1.0), assurance=assurance)
    assert assurance.looked <= 1


@pytest.mark.parametrize("name", ALIKE)
def test_such_a_model_is_not_tested_for_each_new_number_of_rows(name: str) -> None:
    model, assurance = Gated(ALIKE[name]), Assurance()
    for rows in (12, 9, 14, 11, 20):
        torch.manual_seed(rows)
        data = Rows(torch.randn(rows, 8), torch.randn(rows, 3))
        data.inputs[::2, 0] = MARK
        got = clipped_sum(model, loss, data, FlatClip(1.0), assurance=assurance)
        assert torch.isfinite(got.norms).all()
    assert assurance.looked <= 1


def test_places_that_no_row_feels_are_accepted_and_right() -> None:
    model = Fn(lambda s, x: s.a(x) * signs(len(x)).abs()[:, None] + 0 * signs(len(x))[:, None], a=nn.Linear(8, 3))
    data = Rows(torch.randn(12, 8), torch.randn(12, 3))
    got = clipped_sum(model, loss, data, FlatClip(1.0), assurance=Assurance()).sums
    want = brute_force(model, loss, data, FlatClip(1.0)).sums
    assert all(torch.allclose(got[name].double(), want[name].double(), atol=1e-5) for name in want)


class Before:
    """What a batch leaves for the next one."""

    rows = 24


KEPT = {"rows": 24}


def _by_class(x: Tensor, h: Tensor) -> Tensor:
    sign, Before.rows = 1 - 2 * (Before.rows % 2), len(x)
    return h * sign


def _by_variable(x: Tensor, h: Tensor) -> Tensor:
    sign, KEPT["rows"] = 1 - 2 * (KEPT["rows"] % 2), x.shape[0]
    return h * sign


@pytest.mark.parametrize("effect", [_by_class, _by_variable])
def test_the_number_of_rows_is_not_left_for_the_next_batch(effect: Effect) -> None:
    """Removing a record from one batch moved the sum of the next one, in which it is not, by 3.2 clip norms."""
    with pytest.raises(Refused, match="interact"):
        run(effect, LAST)


def test_what_a_thread_reads_is_not_left_for_the_next_batch() -> None:
    """The pass itself reads nothing and asks for nothing: that a thread ran is enough."""
    kept: dict[str, float] = {}

    class Threaded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            worker = threading.Thread(target=lambda: kept.update(top=x.detach().numpy().max()))
            worker.start()
            worker.join()
            return self.a(x)  # type: ignore[no-any-return]

    rows = Rows(torch.randn(24, 8), torch.randn(24, 3))
    with pytest.raises(Refused, match="outside"):
        clipped_sum(Threaded(), lambda o, t: (o - t).square().sum(1), rows, FlatClip(1.0), assurance=Assurance())


def test_rows_that_are_their_own_targets_are_not_tested_in_every_batch() -> None:
    """As for a language model: the first rows of inputs and targets are two views of one tensor."""

    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x.view(x.shape[0], 8))  # type: ignore[no-any-return]

    model, assurance = Asks(), Assurance()
    for _ in range(6):
        x = torch.randn(24, 8)
        clipped_sum(model, lambda o, t: (o - t).square().sum(1), Rows(x, x), FlatClip(1.0), assurance=assurance)
    assert assurance.looked <= 1
