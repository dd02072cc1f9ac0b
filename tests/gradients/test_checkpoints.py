"""Gradient checkpointing, both kinds: the gradients of the same model without it, and torch's functions back after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as checkpointing
from torch import Tensor, nn

from gradients.cases import Fn, agree, noise, squared
from sordino.clipping import FlatClip
from sordino.errors import Refused
from sordino.gradients import Rows, brute_force, clipped_sum

Region = Callable[..., Tensor]


def body() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 4))


def once(run: Region) -> nn.Module:
    return Fn(lambda s, x: s.o(run(s.b, s.i(x))), i=nn.Linear(4, 4), b=body(), o=nn.Linear(4, 3))


def nested(run: Region) -> nn.Module:
    inner: Any = lambda s, h: run(s.b, torch.tanh(s.i(h)))  # noqa: E731
    return Fn(lambda s, x: s.o(run(lambda h: inner(s, h), s.i(x))), i=nn.Linear(4, 4), b=body(), o=nn.Linear(4, 3))


def twice(run: Region) -> nn.Module:
    return Fn(lambda s, x: s.o(run(s.b, run(s.b, s.i(x)))), i=nn.Linear(4, 4), b=body(), o=nn.Linear(4, 3))


def derived(run: Region) -> nn.Module:
    return Fn(
        lambda s, x: run(lambda h: F.linear(torch.tanh(s.i(h)), s.u @ s.v), s.i(x)),
        i=nn.Linear(4, 4),
        u=noise(3, 2),
        v=noise(2, 4),
    )


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("make", [once, nested, twice, derived])
def test_checkpoints_do_not_change_a_record_s_gradient(make: Callable[[Region], nn.Module], reentrant: bool) -> None:
    def region(function: Any, *args: Any) -> Any:
        return checkpointing.checkpoint(function, *args, use_reentrant=reentrant)

    before = dict(vars(checkpointing))
    for rows in (1, 2, 3, 4, 5):
        torch.manual_seed(rows)
        model, plain = make(region).double(), make(lambda function, *args: function(*args)).double()
        plain.load_state_dict(model.state_dict())
        data = Rows(noise(rows, 3, 4), noise(rows))
        agree(clipped_sum(model, squared, data, FlatClip(1.0)), brute_force(plain, squared, data, FlatClip(1.0)), 1e-12)
    assert vars(checkpointing) == before


def test_torch_s_functions_are_back_after_a_refusal() -> None:
    before = dict(vars(checkpointing))
    with pytest.raises(Refused):
        clipped_sum(once(lambda f, x: f(x)).double(), lambda o, t: o, Rows(noise(2, 4), noise(2)), FlatClip(1.0))
    assert vars(checkpointing) == before


def test_a_plain_step_after_a_sum_computes_its_checkpoints_again() -> None:
    calls = []
    layer = nn.Linear(4, 3).double()

    def counted(x: Tensor) -> Tensor:
        calls.append(1)
        return torch.tanh(layer(x))

    model = Fn(lambda s, x: checkpointing.checkpoint(counted, x, use_reentrant=False), layer=layer)
    clipped_sum(model, squared, Rows(noise(2, 4), noise(2)), FlatClip(1.0))
    assert len(calls) == 1
    model(noise(2, 4)).sum().backward()
    assert len(calls) == 3
