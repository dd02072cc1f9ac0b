"""Tests for interaction see an effect on any row: an extreme record does not hide it, nor do rows that are rare.

Earlier, differences were compared with the largest loss of the batch, and a batch was tested only if a value that it
reads was new: a record moved the sum by 2.7 to 8.6 clip norms.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sordino.clipping import FlatClip
from sordino.errors import Refused
from sordino.gradients import Rows, clipped_sum
from sordino.gradients.checks.assurance import Assurance
from sordino.gradients.labels.answers import Answers
from sordino.gradients.labels.lineage import ROWS

TURNS, MARK = 7.25, 5.0
Forward = Callable[["Net", Tensor, Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self._forward = nn.Linear(8, 16), nn.Linear(16, 3), forward

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self._forward(self, torch.tanh(self.a(x)), x))
        return out


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum(1)


def run(forward: Forward, change: Callable[[Tensor, Tensor], None]) -> None:
    """Four batches of 24 records, and one whose first record is changed."""
    model, assurance, source = Net(forward), Assurance(), torch.Generator().manual_seed(3)
    for batch in range(5):
        torch.manual_seed(batch)
        x, y = torch.randn(24, 8, generator=source), torch.randn(24, 3, generator=source)
        if batch == 4:
            change(x, y)
        clipped_sum(model, loss, Rows(x, y), FlatClip(1.0), assurance=assurance)


def turned(s: Net, h: Tensor, x: Tensor) -> Tensor:
    return h * (1 - 2 * float((x[:, 1] == TURNS).any()))


def chosen(s: Net, h: Tensor, x: Tensor) -> Tensor:
    return torch.stack([h, -h])[(x[:, 1] == TURNS).any().long()]


def stopped(s: Net, h: Tensor, x: Tensor) -> Tensor:
    return h.detach() if bool((x[:, 1] == TURNS).any()) else h


@pytest.mark.parametrize("forward", [turned, chosen, stopped])
@pytest.mark.parametrize("far", [1e2, 1e3, 1e5, 1e9])
def test_a_record_with_a_large_loss_does_not_hide_what_it_does_to_others(forward: Forward, far: float) -> None:
    def change(x: Tensor, y: Tensor) -> None:
        x[0, 1], y[0] = TURNS, far

    with pytest.raises(Refused):
        run(forward, change)


@pytest.mark.parametrize("forward", [turned, chosen, stopped])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_record_that_is_not_finite_does_not_hide_it_either(forward: Forward, value: float) -> None:
    def change(x: Tensor, y: Tensor) -> None:
        x[0, 1], x[0, 2] = TURNS, value

    with pytest.raises(Refused):
        run(forward, change)


def test_an_answer_that_was_tested_before_is_tested_again_where_one_record_decides_it() -> None:
    def forward(s: Net, h: Tensor, x: Tensor) -> Tensor:
        return torch.where(x[:, :1] == MARK, -h, h) if bool((x[:, 1] > 0.5 * TURNS).any()) else h

    model, assurance = Net(forward), Assurance()
    for batch in range(6):
        torch.manual_seed(batch)
        x, y = torch.randn(24, 8), torch.randn(24, 3)
        if batch % 2:
            x[0, 1] = TURNS
        if batch < 5:
            clipped_sum(model, loss, Rows(x, y), FlatClip(1.0), assurance=assurance)
    x[8:16, 0] = MARK
    with pytest.raises(Refused):
        clipped_sum(model, loss, Rows(x, y), FlatClip(1.0), assurance=assurance)


@pytest.mark.parametrize(("name", "holds", "steady"), [
    ("any", [], True), ("any", [2], False), ("any", [2, 4], True), ("any", [4, 5], False),
    ("all", [0, 1, 2, 3, 4, 5], True), ("all", [0, 1, 2, 3, 4], True), ("all", [0, 1, 2, 4, 5], False),
    ("all", [0, 1, 4, 5], True),
])  # fmt: skip
def test_no_single_record_decides_an_answer_that_two_agree_on(name: str, holds: list[int], steady: bool) -> None:
    """Rows 0 to 4 are records; row 5 is padding, a copy of the last one, which is no second record."""
    answers, x = Answers(), torch.zeros(6, 3, dtype=torch.bool)
    x[holds] = True
    out = getattr(x, name)()
    answers.real = 5
    answers.note(name, (x,), lambda t: ROWS, [out], 6)
    if name == "all" and holds == [0, 1, 2, 3, 4]:
        steady = False  # only padding fails, which belongs to the last record
    assert answers.steady([out]) is steady


def test_an_answer_that_no_record_decides_is_not_tested_in_every_batch() -> None:
    def forward(s: Net, h: Tensor, x: Tensor) -> Tensor:
        return h + 0 if bool((x.abs() < 1e9).all()) and bool((x[:, 0] > 0).any()) else h - 0

    model, assurance = Net(forward), Assurance()
    for batch in range(8):
        torch.manual_seed(batch)
        data = Rows(torch.randn(24, 8), torch.randn(24, 3))
        clipped_sum(model, loss, data, FlatClip(1.0), assurance=assurance)
    assert assurance.looked <= 1
