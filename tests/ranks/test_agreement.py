"""Ranks that were given different things are refused before anything is written; what differs is named."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.fsdp  # once, before the ranks are forked
from processes import in_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sordino.errors import InputError, SordinoError
from sordino.plan import Plan
from sordino.ranks.layout import shard_blocks
from sordino.ranks.run import Stopped
from sordino.records.digest import keyed_digest
from sordino.training import Settings, agreement, fit
from sordino.training.steps import unit_dataset

ROWS = 40


def _data(order: Tensor | None = None) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(1)), torch.arange(ROWS) % 3
    return (x, y) if order is None else (x[order], y[order])


def _train(
    out: Path, data: Any = None, chunk: int = 4, hidden: int = 5, users: Any = None, shard: bool = False, **changes: Any
) -> str:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 3))
    given: dict[str, Any] = {"noise_multiplier": 2.0, "records": ROWS, "expected_batch": 16, "insecure_seed": 4}
    plan = Plan.dpsgd(delta=1e-2, steps=2, clip_norm=1.0, **(given | changes))
    settings = Settings(chunk=chunk, progress=False)
    fit.train(
        shard_blocks(net) if shard else net, cross_entropy, data or _data(), plan, lr=0.3, settings=settings, out=out,
        users=users,
    )  # fmt: skip
    return "trained"


def _users(shift: int) -> dict[str, Any]:
    """Twenty users with two or three rows each; with a shift, one row belongs to the user before."""
    users = np.repeat(np.arange(20), 2)
    users[2] -= shift
    return {"users": users, "unit": "user", "records": 20, "expected_batch": 8, "rows_per_user": 3}


def _other_code() -> dict[str, Any]:
    agreement._code = lambda: "another version"  # type: ignore[assignment]
    return {}


Change = Callable[[], dict[str, Any]]
ATTEMPTS: list[tuple[str, Change, Change]] = [
    ("another plan", dict, lambda: {"noise_multiplier": 2.1}),
    ("other settings", dict, lambda: {"chunk": 5}),
    ("another model", dict, lambda: {"hidden": 6}),
    ("other records", dict, lambda: {"data": _data(torch.arange(ROWS).flip(0))}),
    ("other records", lambda: {"shard": True}, lambda: {"shard": True, "data": _data(torch.arange(ROWS).roll(1))}),
    ("other records", lambda: _users(0), lambda: _users(1)),
    ("other records", dict, lambda: {"data": tuple(t[1:] for t in _data())}),
    ("another number", lambda: {"shard": True}, lambda: {"shard": True, "data": tuple(t[:0] for t in _data())}),
    ("another version", dict, _other_code),
]


def _attempts(number: int, folder: Path) -> list[str]:
    said, code = [_train(folder / "same"), _train(folder / "sharded", shard=True)], agreement._code
    for k, (_, leader, follower) in enumerate(ATTEMPTS):
        try:
            said.append(_train(folder / str(k), **(follower() if number else leader())))
        except Stopped:
            said.append("stopped")
        except SordinoError as error:
            said.append(f"{type(error).__name__}: {error}")
        agreement._code = code
    return [*said, _train(folder / "again")]


def test_ranks_that_differ_are_refused_by_what_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plan, "guarantee", functools.cache(Plan.guarantee))
    led, followed = in_ranks(2, tmp_path, _attempts, tmp_path)
    assert led[:2] == followed[:2] == ["trained"] * 2
    for k, (what, _, _) in enumerate(ATTEMPTS):
        assert what in led[2 + k], led
        assert led[2 + k].startswith(InputError.__name__)
        assert followed[2 + k] == "stopped" or followed[2 + k].startswith(InputError.__name__), followed
        assert not (tmp_path / str(k)).exists()
    assert led[-1] == followed[-1] == "trained"  # a refusal leaves the ranks in step


@pytest.mark.parametrize("shift", [0, 1])
def test_the_digest_of_users_includes_whose_rows_they_are(shift: int) -> None:
    found = []
    for given in (_users(0), _users(shift)):
        users = given.pop("users")
        plan = Plan.dpsgd(delta=1e-2, steps=2, clip_norm=1.0, noise_multiplier=2.0, **given)
        found.append(keyed_digest(unit_dataset(plan, _data(), users), bytes(32)))
    assert (found[0] == found[1]) == (shift == 0)
