"""A rank that dies, fails or is stopped, at each stage of a run: the others end with one sentence, and nothing is lost.

Afterwards the run is resumed with 1, 2 or 3 ranks, sharded or not, and ends with the weights of a run that never died.
"""

from __future__ import annotations

import errno
import functools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # once, before the ranks are forked
from processes import in_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sordino import ranks
from sordino.errors import SordinoError
from sordino.plan import Plan
from sordino.ranks import sharded, sums
from sordino.ranks.layout import shard_blocks, whole_of
from sordino.release import shards
from sordino.release.ledger import Ledger
from sordino.training import Settings, fit
from sordino.training import sharded as sharded_training
from sordino.training.loop import Loop

STEPS, AT = 4, 2
"""The fault is at step 2: two steps have been released."""


def _data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(40, 6, generator=generator), torch.randint(3, (40,), generator=generator)


def _train(out: Path, shard: bool, resume: bool = False, evaluate: Any = None) -> str:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    plan = Plan.dpsgd(
        noise_multiplier=2.0, delta=1e-3, records=40, expected_batch=16, steps=STEPS, clip_norm=1.0, insecure_seed=4
    )
    settings = Settings(chunk=4, eval_every=1, checkpoint_every=1, progress=False)
    made = fit.train(
        shard_blocks(net) if shard else net, cross_entropy, _data(), plan, lr=0.3, settings=settings, out=out,
        resume=resume, evaluate=evaluate or (lambda net: {"sum": float(net(_data()[0]).sum())}),
    )  # fmt: skip
    return b"".join(whole_of(p).detach().numpy().tobytes() for p in made.model.parameters()).hex()


def _before(place: Any, name: str, act: Callable[[], None], when: Callable[..., bool] = lambda *_, **__: True) -> None:
    """Calls `act` when this function is called for the third time (`when` says which calls count)."""
    whole, calls = getattr(place, name), [0]

    def hooked(*arguments: Any, **more: Any) -> Any:
        if when(*arguments, **more):
            calls[0] += 1
            if calls[0] == AT + 1:
                act()
        return whole(*arguments, **more)

    setattr(place, name, hooked)


def _after_record(act: Callable[[], None]) -> None:
    """Calls `act` once the ledger entry of step 2 is on disk, before any rank has its values."""
    record = Ledger.record

    def hooked(ledger: Ledger, entry: Any) -> Any:
        done = record(ledger, entry)
        if entry.get("step") == AT:
            act()
        return done

    Ledger.record = hooked  # type: ignore[method-assign]


def _full_disk() -> None:
    """The ledger's disk is full at step 2."""
    record = Ledger.record

    def hooked(ledger: Ledger, entry: Any) -> Any:
        if entry.get("step") == AT:
            raise OSError(errno.ENOSPC, "No space left on device")
        return record(ledger, entry)

    Ledger.record = hooked  # type: ignore[method-assign]


def _place(stage: str, act: Callable[[], None], shard: bool) -> None:
    if stage == "ledger":
        _full_disk()
    elif stage == "sum":
        _before(sharded if shard else sums, "own_chunks", act)
    elif stage == "recorded":
        _after_record(act)
    elif stage == "noise":
        _before(shards, "_runs", act)
    elif stage == "update":
        _before(Loop, "_move", act)
    elif stage == "save":
        _before(sharded_training if shard else Loop, "write_sealed" if shard else "_save", act)
    elif stage == "check":
        check = fit.check_first_batch

        def dies(*arguments: Any) -> Any:
            act()
            return check(*arguments)

        fit.check_first_batch = dies
    elif stage == "end":
        publish = Loop._publish

        def ends(loop: Loop, average: Any) -> None:
            act()
            publish(loop, average)

        Loop._publish = ends  # type: ignore[method-assign]


def _act(how: str) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stopped":
        os.kill(os.getpid(), signal.SIGTERM)
    else:
        raise RuntimeError("a disk is full")


def _faulty(number: int, out: Path, shard: bool, who: int, stage: str, how: str) -> str:
    if number == who:
        _place(stage, lambda: _act(how), shard)
    calls = [0]

    def evaluate(net: nn.Module) -> dict[str, float]:
        calls[0] += 1
        if number == who and stage == "evaluate" and calls[0] == AT + 1:
            _act(how)
        return {"sum": float(net(_data()[0]).sum())}

    return _train(out, shard, evaluate=evaluate)


CHUNKS = [
    (0, "check"),
    (0, "sum"),
    (1, "sum"),
    (0, "recorded"),
    (0, "update"),
    (0, "evaluate"),
    (0, "save"),
    (0, "end"),
]
SHARDS = [
    (0, "check"), *((who, stage) for stage in ("sum", "noise", "update", "evaluate", "save", "end") for who in (0, 1)),
    (0, "recorded"),
]  # fmt: skip
FAULTS = [
    *((False, who, stage, "killed") for who, stage in CHUNKS),
    *((True, who, stage, "killed") for who, stage in SHARDS),
    (False, 1, "sum", "failed"), (False, 0, "save", "failed"),
    (True, 1, "sum", "failed"), (True, 1, "update", "failed"),
    (False, 0, "ledger", "failed"), (True, 0, "ledger", "failed"),
    (False, 0, "update", "stopped"), (True, 0, "update", "stopped"),
]  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    torch.set_num_threads(1)
    monkey = pytest.MonkeyPatch()
    monkey.setattr(Plan, "guarantee", functools.cache(Plan.guarantee))  # computed once, before the ranks are forked
    yield _train(tmp_path_factory.mktemp("alone") / "run", False)
    monkey.undo()


def _again(number: int, out: Path, shard: bool) -> str:
    return _train(out, shard, resume=True)


@pytest.mark.parametrize(("shard", "who", "stage", "how"), FAULTS)
def test_a_fault_ends_the_job_within_a_minute_and_loses_nothing(
    shard: bool, who: int, stage: str, how: str, alone: str, tmp_path: Path
) -> None:
    begun, out = time.monotonic(), tmp_path / "run"
    found = in_ranks(2, tmp_path, _faulty, out, shard, who, stage, how, seconds=60)
    assert time.monotonic() - begun < 60
    other = found[1 - who]
    assert isinstance(other, SordinoError), found
    assert len(str(other).splitlines()) == 1
    if how == "killed":
        assert found[who] is None
        assert isinstance(other, ranks.Lost)
        assert "--resume" in str(other)
    _check_ledger(out, stage, how)
    number = FAULTS.index((shard, who, stage, how))
    again = [(1, False), (2, True), (3, False), (2, False), (3, True), (1, True)][number % 6]
    assert set(in_ranks(again[0], tmp_path, _again, out, again[1])) == {alone}
    assert len((out / "ledger.jsonl").read_text().splitlines()) == 1 + STEPS


def _check_ledger(out: Path, stage: str, how: str) -> None:
    """Every value that a rank may have had is in the ledger, and nothing more than the entry that was just written."""
    if stage == "check":
        assert not (out / "ledger.jsonl").exists()
        out.mkdir(exist_ok=True)
        return
    released = {"sum": AT, "ledger": AT, "end": STEPS}.get(stage, AT + 1)
    assert len((out / "ledger.jsonl").read_text().splitlines()) == 1 + released
