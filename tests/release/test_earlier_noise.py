"""Noise of earlier steps in a release: the very same Gaussians, from their address; refused where they are gone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sordino.errors import InputError, Refused
from sordino.randomness import RandomSource
from sordino.release import Entry, Gaussian, Laplace, Ledger, release

PLAN = {"method": "some"}


def released(ledger: Ledger, source: RandomSource, step: int, earlier: dict[int, float] | None, **options: object):  # type: ignore[no-untyped-def]
    settings = {"sensitivity": 1.0, "norm": "l2", "noise": Gaussian(1.0)} | options
    return release(
        {"w": torch.zeros(400, dtype=torch.float64)}, source=source, ledger=ledger,
        entry=Entry("gradient", step, {"name": "all"}, "add-remove"), earlier=earlier, **settings,
    )["w"]  # fmt: skip


@pytest.mark.parametrize("source", [RandomSource.seeded(3), RandomSource.from_os()], ids=["seeded", "secure"])
def test_a_step_takes_back_what_an_earlier_one_added(source: RandomSource) -> None:
    with Ledger.open(None, PLAN) as ledger:
        first = released(ledger, source, 0, {})
        second = released(ledger, source, 1, {0: -1.0})
        third = released(ledger, source, 2, {1: -1.0, 0: -1.0})
        # z_0 + (z_1 − z_0) + (z_2 − z_1 − z_0) = z_2 − z_0, up to three roundings
        assert float((first + second).std()) == pytest.approx(1.0, abs=0.15)
        assert float((first + second + third).var()) == pytest.approx(2.0, abs=0.5)
        assert ledger.entries[2]["earlier"]["noises"] == 2


def test_noise_of_another_ledger_or_of_before_a_restart_is_gone(tmp_path: Path) -> None:
    source = RandomSource.from_os()
    with Ledger.open(tmp_path / "ledger.jsonl", PLAN) as ledger:
        released(ledger, source, 0, {})
    with Ledger.open(tmp_path / "ledger.jsonl", PLAN) as ledger, pytest.raises(Refused, match="can't be regenerated"):
        released(ledger, source, 1, {0: -0.5})
    with Ledger.open(None, PLAN) as ledger:
        released(ledger, source, 0, {})
        with pytest.raises(Refused, match="can't be regenerated"):
            released(ledger, RandomSource.from_os(), 1, {0: -0.5})


def test_a_seeded_run_makes_its_noise_again_after_a_restart(tmp_path: Path) -> None:
    source = RandomSource.seeded(9)
    with Ledger.open(tmp_path / "one.jsonl", PLAN) as ledger:
        released(ledger, source, 0, {})
        whole = released(ledger, source, 1, {0: -0.5})
    with Ledger.open(tmp_path / "one.jsonl", PLAN) as ledger:
        assert torch.equal(released(ledger, source, 1, {0: -0.5}), whole)


@pytest.mark.parametrize(
    "changes", [{"noise": Gaussian(2.0)}, {"sensitivity": 0.5}, {"noise": Laplace(1.0), "norm": "l1"}, {"fine": True}]
)
def test_other_noise_than_the_earlier_steps_had_is_refused(changes: dict[str, object]) -> None:
    source = RandomSource.seeded(1)
    with Ledger.open(None, PLAN) as ledger:
        released(ledger, source, 0, {})
        with pytest.raises(Refused):
            released(ledger, source, 1, {0: -0.5}, **changes)
        assert len(ledger.entries) == 1


def test_only_steps_before_it_and_steps_that_kept_their_noise_count() -> None:
    source = RandomSource.seeded(1)
    with Ledger.open(None, PLAN) as ledger:
        released(ledger, source, 0, None)
        with pytest.raises(Refused, match="can't be regenerated"):
            released(ledger, source, 1, {0: -0.5})
        for wrong in ({1: 0.5}, {5: 0.5}, {0: float("nan")}):
            with pytest.raises(InputError):
                released(ledger, source, 1, wrong)
