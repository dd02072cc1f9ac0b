"""Losses that share a large term (a likelihood's constant, a penalty on the weights) hide no interaction.

Differences of losses were compared with the losses themselves: with 10⁴ added to each, outputs that change their sign
with the number of rows were accepted, and a record moved the sum by 19 clip norms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Fn
from torch import Tensor, nn

import sordino
from sordino.clipping import FlatClip
from sordino.gradients import Rows, brute_force, clipped_sum
from sordino.gradients.checks.assurance import Assurance
from sordino.gradients.checks.losses import apart, hidden, scale_of

TERMS = 0.0, 1e2, 1e4, 1e6, 1e8
SIZES = 12, 9, 24, 20, 40


def network(gate: Callable[[Tensor], bool]) -> nn.Module:
    torch.manual_seed(0)
    act = lambda s, x: s.b(torch.tanh(s.a(x)) * (-1.0 if gate(x) else 1.0))  # noqa: E731
    return Fn(act, a=nn.Linear(8, 16), b=nn.Linear(16, 3))


def batches(model: nn.Module, term: float, special: bool = False) -> list[Any]:
    found, assurance = [], Assurance()
    for count in SIZES:
        x = torch.randn(count, 8, generator=torch.Generator().manual_seed(count))
        x[0, 0] = 0.75 if special and count == 20 else x[0, 0]
        torch.manual_seed(count)
        rows = Rows(x, torch.arange(count) % 3)
        loss = lambda o, t: F.cross_entropy(o, t, reduction="none") + term  # noqa: E731
        found.append((rows, loss, clipped_sum(model, loss, rows, FlatClip(0.5), assurance=assurance)))
    return found


@pytest.mark.parametrize("term", TERMS)
def test_the_number_of_rows(term: float) -> None:
    with pytest.raises(sordino.Refused):
        batches(network(lambda x: len(x) == 20), term)


@pytest.mark.parametrize("term", TERMS)
def test_a_value_that_is_read(term: float) -> None:
    with pytest.raises(sordino.Refused):
        batches(network(lambda x: bool((x[:, 0] == 0.75).any())), term, special=True)


@pytest.mark.parametrize("term", TERMS)
def test_a_model_that_reads_and_does_not_mix_is_accepted(term: float) -> None:
    model = network(lambda x: x.max().item() is None)
    for rows, loss, found in batches(model, term):
        expected = brute_force(model, loss, rows, FlatClip(0.5))
        assert all(torch.allclose(found.sums[k].double(), v.double(), atol=1e-4) for k, v in expected.sums.items())


def test_differences_are_compared_with_what_losses_tell_of_their_rows() -> None:
    losses = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    moved = losses + torch.tensor([0, 0, 0, 1e-2])
    plain = apart(moved, losses, scale_of(losses))
    assert plain == pytest.approx(1e-2 / 4)
    assert apart(moved + 1e4, losses + 1e4, scale_of(losses + 1e4)) > plain / 20
    far = torch.tensor([1.0, 2.0, 3.0, 1e6], dtype=torch.float64)  # the rounding of a large loss of its own
    assert apart(far * (1 + 1e-7), far, scale_of(far)) < 2e-7
    assert hidden(torch.full((5,), 7.0))
    assert not hidden(torch.full((5,), 7.0, dtype=torch.float64))
    assert not hidden(torch.tensor([7.0, 7.1, 7.2]))
