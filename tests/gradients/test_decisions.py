"""Random numbers that decide which way a program goes: its way is the one that is tested.

Tests replace random numbers by equal ones, which may never lead where a value is read: a branch that one of several
random choices takes turned around the outputs of all rows if a certain record was there, and was accepted.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from cases import Fn
from torch import Tensor, nn

import sordino
from sordino.clipping import FlatClip
from sordino.gradients import Rows, clipped_sum
from sordino.gradients.checks.assurance import Assurance
from sordino.gradients.checks.neutral import Neutral, recorded

DECISIONS: dict[str, Callable[[], bool]] = {
    "one of five": lambda: int(torch.randint(5, ())) == 3,
    "a permutation": lambda: int(torch.randperm(4)[0]) == 2,
    "a class": lambda: int(torch.multinomial(torch.tensor([0.3, 0.3, 0.4]), 1)) == 1,
    "a range": lambda: 0.1 < float(torch.rand(())) < 0.4,
    "a distribution": lambda: float(torch.distributions.Beta(0.4, 0.4).sample()) < 0.1,  # type: ignore[no-untyped-call]
}


def network(decided: Callable[[], bool], seen: Callable[[Tensor], bool]) -> nn.Module:
    def forward(s: nn.Module, x: Tensor) -> Tensor:
        h = torch.tanh(s.a(x))
        around = decided() and seen(x)
        return s.b(-h if around else h)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    return Fn(forward, a=nn.Linear(8, 16), b=nn.Linear(16, 3))


def batches(model: nn.Module) -> list[Tensor]:
    found, assurance = [], Assurance()
    for step in range(24):
        x = torch.randn(24, 8, generator=torch.Generator().manual_seed(step))
        if step > 3:
            x[0, 0] = 0.75
        torch.manual_seed(step)
        rows = Rows(x, torch.arange(24) % 3)
        found.append(clipped_sum(model, F.cross_entropy, rows, FlatClip(0.5), assurance=assurance).norms)
    return found


@pytest.mark.parametrize("name", DECISIONS)
def test_the_way_that_a_pass_went_is_tested(name: str) -> None:
    with pytest.raises(sordino.Refused):
        batches(network(DECISIONS[name], lambda x: bool((x[:, 0] == 0.75).any())))


@pytest.mark.parametrize("name", DECISIONS)
def test_a_way_on_which_records_do_not_meet_is_accepted(name: str) -> None:
    def forward(s: nn.Module, x: Tensor) -> Tensor:
        x.max().item()
        h = F.dropout(torch.tanh(s.a(x)), 0.2) + 0.1 * torch.randn(len(x), 1)
        return s.b(-h if DECISIONS[name]() else h)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    batches(Fn(forward, a=nn.Linear(8, 16), b=nn.Linear(16, 3)))


def test_draws_with_rows_are_not_repeated() -> None:
    state = torch.get_rng_state()

    def run(whole: bool) -> None:
        rows = 8 if whole else 4
        torch.rand(())
        torch.rand(rows)
        torch.randint(9, (3,))
        torch.rand(100)

    found = recorded(run, state)
    assert [one is None for one in found] == [False, True, False, True]
    torch.set_rng_state(state)
    expected = torch.rand(()), torch.rand(8), torch.randint(9, (3,))
    with Neutral(0.5, found):
        assert torch.equal(torch.rand(()), expected[0])
        assert torch.equal(torch.rand(4), torch.full((4,), 0.5))
        assert torch.equal(torch.randint(9, (3,)), expected[2])
    assert recorded(run, None) == []
