"""A rank that is stopped is given up after a set time; one whose step takes longer than that is waited for."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # once, before the ranks are forked
from processes import _rank, in_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sordino.errors import InputError
from sordino.plan import Plan
from sordino.ranks import sharded, sums
from sordino.ranks.layout import shard_blocks
from sordino.ranks.pulse import DEFAULT, VARIABLE, rank_timeout
from sordino.training import Settings, fit

STEPS, AT = 3, 1


def _train(out: Path, shard: bool) -> int:
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(1)
    data: tuple[Tensor, Tensor] = torch.randn(40, 6, generator=generator), torch.arange(40) % 3
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    plan = Plan.dpsgd(
        noise_multiplier=2.0, delta=1e-3, records=40, expected_batch=16, steps=STEPS, clip_norm=1.0, insecure_seed=4
    )
    settings = Settings(chunk=4, progress=False)
    made = fit.train(
        shard_blocks(net) if shard else net, cross_entropy, data, plan, lr=0.3, settings=settings, out=out
    )  # fmt: skip
    return int(made.metrics[-1]["step"])


def _at(number: int, out: Path, shard: bool, who: int, seconds: float) -> int:
    """Rank `who` is stopped in step 1, or takes so many seconds for it."""
    place: Any = sharded if shard else sums
    whole = place.own_chunks

    def own(inner: Any, rank: Any, batch: Any, *more: Any) -> Any:
        if rank.number == who and batch.step == AT:
            if seconds:
                time.sleep(seconds)
            else:
                os.kill(os.getpid(), signal.SIGSTOP)
        return whole(inner, rank, batch, *more)

    place.own_chunks = own
    return _train(out, shard)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "2")


@pytest.mark.parametrize(("shard", "who"), [(False, 1), (True, 0)])
def test_the_others_give_up_a_stopped_rank_with_one_sentence(
    shard: bool, who: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    context = multiprocessing.get_context("fork")
    place, queue, size = tmp_path / "group", context.Queue(), 2
    arguments = tmp_path / "run", shard, who, 0.0
    made = [context.Process(target=_rank, args=(k, size, place, _at, arguments, queue)) for k in range(size)]
    for process in made:
        process.start()
    try:
        made[1 - who].join(60)
        assert made[1 - who].exitcode == 1
        assert made[who].is_alive()
    finally:
        for process in made:
            process.kill()
            process.join()
    said = capfd.readouterr().err
    assert said.count(f"rank {who} of 2 has not answered for 2 seconds") == 1
    assert len([line for line in said.splitlines() if line.startswith("sordino:")]) == 1
    assert len((tmp_path / "run" / "ledger.jsonl").read_text().splitlines()) == 1 + AT


def test_a_slow_rank_is_waited_for(tmp_path: Path) -> None:
    assert in_ranks(2, tmp_path, _at, tmp_path / "run", False, 1, 5.0) == [STEPS, STEPS]


@pytest.mark.parametrize("wrong", ["soon", "0", "-1", "nan"])
def test_a_time_that_is_no_positive_number_is_refused(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, wrong)
    with pytest.raises(InputError, match=VARIABLE):
        rank_timeout()
    monkeypatch.delenv(VARIABLE)
    assert rank_timeout() == DEFAULT
