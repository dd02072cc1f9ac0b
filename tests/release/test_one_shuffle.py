"""A partition is made under one key: another can't go on with it, and neither can a fork."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

import sordino
from sordino.errors import Refused, SordinoError
from sordino.plan.core import Plan
from sordino.randomness import RandomSource
from sordino.release import Entry, Gaussian, release
from sordino.release.ledger import Ledger, read_ledger

DATA = (torch.randn(40, 3, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2)


def plan_of(**options: object) -> Plan:
    given = {"noise_multiplier": 2.0, "delta": 1e-5, "records": 40, "expected_batch": 10, "epochs": 1}
    return Plan.dpsgd(**{**given, **options})


def some_steps(plan: Plan, path: Path, source: RandomSource, start: int, count: int) -> None:
    sums = sordino.record_gradients(nn.Linear(3, 2), nn.functional.cross_entropy, DATA, plan.clipping)
    with Ledger.open(path, plan.to_dict()) as ledger:
        steps = sordino.private_steps(plan, sums, records=40, source=source, ledger=ledger, start=start)
        for _ in range(count):
            next(steps)


def test_a_partition_is_not_continued_under_another_key(tmp_path: Path) -> None:
    plan, path = plan_of(sampling="partition"), tmp_path / "ledger.jsonl"
    some_steps(plan, path, plan.source(), 0, 2)
    with pytest.raises(Refused, match="shuffled under another key"):
        some_steps(plan, path, plan.source(), 2, 1)
    assert len(read_ledger(path)[1]) == 2


def test_it_is_continued_with_the_source_that_made_it(tmp_path: Path) -> None:
    plan, path = plan_of(sampling="partition"), tmp_path / "ledger.jsonl"
    source = plan.source()
    some_steps(plan, path, source, 0, 2)
    some_steps(plan, path, source, 2, 2)
    assert [entry["source"] for entry in read_ledger(path)[1]] == [source.fingerprint] * 4


def test_the_door_itself_refuses_a_step_of_another_shuffle(tmp_path: Path) -> None:
    plan, path = plan_of(sampling="partition"), tmp_path / "ledger.jsonl"
    sums = sordino.record_gradients(nn.Linear(3, 2), nn.functional.cross_entropy, DATA, plan.clipping)
    with Ledger.open(path, plan.to_dict()) as ledger:
        next(sordino.private_steps(plan, sums, records=40, source=plan.source(), ledger=ledger))
        with pytest.raises(Refused, match="another key"):
            release(
                {"w": torch.zeros(2)}, sensitivity=plan.sensitivity, norm="l2", noise=plan.noise,
                source=plan.source(), ledger=ledger,
                entry=Entry("gradient", 1, plan.sampling.to_dict(), plan.relation),
            )  # fmt: skip


def test_poisson_steps_go_on_under_a_fresh_key(tmp_path: Path) -> None:
    plan, path = plan_of(epochs=None, steps=4), tmp_path / "ledger.jsonl"
    some_steps(plan, path, plan.source(), 0, 2)
    some_steps(plan, path, plan.source(), 2, 2)
    assert len({entry["source"] for entry in read_ledger(path)[1]}) == 2


def test_the_fingerprint_names_the_key_and_is_not_a_part_of_it() -> None:
    key = bytes(range(32))
    source = RandomSource(key, secure=True)
    assert source.fingerprint == RandomSource(key, secure=True).fingerprint
    assert source.fingerprint != RandomSource(key[::-1], secure=True).fingerprint
    assert source.fingerprint not in key.hex()


def test_a_fork_does_not_release_under_its_parent_s_lock(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "ledger.jsonl", {"steps": 1}) as ledger:
        parent = os.getpid()
        ledger._process = parent + 1  # as if this process were the fork
        with pytest.raises(SordinoError, match="fork"):
            release(
                {"w": torch.zeros(2)}, sensitivity=1.0, norm="l2", noise=Gaussian(1.0), source=RandomSource.from_os(),
                ledger=ledger, entry=Entry("gradient", 0, {"name": "all"}, "add-remove"),
            )  # fmt: skip
        assert ledger.entries == ()
