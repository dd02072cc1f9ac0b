"""Python's collector of cyclic garbage does not run while a sum is computed, and runs as before afterwards."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sordino.clipping import FlatClip
from sordino.errors import Refused
from sordino.gradients import Rows, clipped_sum
from sordino.native.collector import no_collection


@pytest.fixture(autouse=True)
def _collector_as_before() -> Iterator[None]:
    before = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if before else gc.disable)()


class Watching(nn.Linear):
    """Keeps what `look` returns in every pass."""

    def __init__(self, look: Any) -> None:
        super().__init__(3, 2)
        self.look = look
        _SEEN.clear()

    def forward(self, x: Tensor) -> Tensor:
        _SEEN.append(self.look())
        return super().forward(x)


_SEEN: list[Any] = []


def total(model: nn.Module, rows: int = 8, **more: Any) -> None:
    clipped_sum(
        model,
        lambda out, y: (out - y).square().sum(1),
        Rows(torch.randn(rows, 3), torch.randn(rows, 2)),
        FlatClip(1.0),
        **more,
    )


def test_it_does_not_run_in_a_pass_and_runs_afterwards() -> None:
    total(Watching(gc.isenabled))
    assert _SEEN
    assert not any(_SEEN)
    assert gc.isenabled()


def test_it_runs_after_a_pass_that_is_refused() -> None:
    with pytest.raises(Refused):
        total(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    assert gc.isenabled()


def test_who_has_turned_it_off_finds_it_off() -> None:
    gc.disable()
    with no_collection():
        assert not gc.isenabled()
    assert not gc.isenabled()


class Cycle:
    def __init__(self) -> None:
        self.own, self.filled = self, [[k] for k in range(2 * gc.get_threshold()[0])]


def test_cycles_of_a_model_do_not_pile_up_over_many_chunks() -> None:
    alive: list[weakref.ref[Cycle]] = []
    most = 0

    def look() -> None:
        nonlocal most
        alive.append(weakref.ref(Cycle()))
        most = max(most, sum(one() is not None for one in alive))

    total(Watching(look), 40, chunk=2)
    assert len(alive) == 20
    assert most <= 2
