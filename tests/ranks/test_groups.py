"""The process group is the user's: its backend and timeout, and a model in one of torch's own wrappers."""

from __future__ import annotations

import functools
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp  # once, before the ranks are forked
from processes import in_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DataParallel, DistributedDataParallel

from sordino.errors import Refused
from sordino.plan import Plan
from sordino.ranks import Lost
from sordino.training import Settings
from sordino.training.fit import train

ROWS = 40


def _net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def _data() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(1)), torch.arange(ROWS) % 3


def _train(model: nn.Module | None = None, evaluate: Any = None, out: Path | None = None) -> list[float]:
    plan = Plan.dpsgd(
        noise_multiplier=2.0, delta=1e-2, records=ROWS, expected_batch=16, steps=2, clip_norm=1.0, insecure_seed=4
    )
    settings = Settings(chunk=4, progress=False, eval_every=1 if evaluate else 0)
    found = train(model or _net(), cross_entropy, _data(), plan, lr=0.3, settings=settings, evaluate=evaluate, out=out)
    return torch.cat([p.detach().reshape(-1) for p in found.model.parameters()]).tolist()


def _in_group_of(number: int, place: Path, backend: str, seconds: float, pause: float) -> list[float]:
    dist.destroy_process_group()
    dist.init_process_group(
        backend, f"file://{place}", rank=number, world_size=2, timeout=timedelta(seconds=seconds)
    )  # fmt: skip

    def evaluate(_: nn.Module) -> dict[str, float]:
        time.sleep(pause)
        return {"seen": 1.0}

    return _train(evaluate=evaluate)


@pytest.mark.parametrize(
    ("backend", "seconds", "pause"), [("cuda:gloo", 60, 0), ("gloo", 1, 1.5)], ids=["no CPU tensors", "short timeout"]
)
def test_messages_do_not_depend_on_the_backend_or_timeout_of_the_group(
    backend: str, seconds: float, pause: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Plan, "guarantee", functools.cache(Plan.guarantee))
    alone = _train()
    assert in_ranks(2, tmp_path, _in_group_of, tmp_path / "users", backend, seconds, pause) == [alone, alone]


def _wrapped(number: int, folder: Path) -> str:
    try:
        _train(nn.Sequential(nn.Flatten(), DistributedDataParallel(_net())), out=folder / "run")
    except Refused as error:
        return str(error)
    return "trained"


def test_a_model_that_adds_up_gradients_itself_is_refused_by_its_name(tmp_path: Path) -> None:
    for said in in_ranks(2, tmp_path, _wrapped, tmp_path):
        assert said.startswith("1 is a DistributedDataParallel")
        assert "(.module)" in said
    assert not (tmp_path / "run").exists()
    with pytest.raises(Refused, match="the model is a DataParallel"):
        _train(DataParallel(_net()))


def _only(number: int, trains: int) -> str:
    if number != trains:
        return "ended"
    try:
        _train()
    except Lost as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize("trains", [0, 1])
def test_a_rank_that_ended_before_the_first_message_is_noticed_at_once(trains: int, tmp_path: Path) -> None:
    said = in_ranks(2, tmp_path, _only, trains, seconds=60)
    assert said[1 - trains] == "ended"
    assert "has lost another rank" in said[trains]
