"""Training with correlated noise: the ledger explains it, resumed runs begin a new round, other noise is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import sordino
from sordino.errors import InputError, Refused
from sordino.plan import Plan
from sordino.plan.spent import from_ledger
from sordino.release import read_ledger

DATA = torch.randn(60, 4, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 2
LOSS = torch.nn.CrossEntropyLoss(reduction="none")


def plan_of(**changes: Any) -> Plan:
    options = {"records": 60, "expected_batch": 12, "steps": 10, "noise_multiplier": 1.5, "delta": 1e-3} | changes
    return sordino.correlated(**options)


def trained(plan: Plan, out: Path | None = None, **options: Any) -> sordino.Result:
    torch.manual_seed(0)
    settings = sordino.Settings(progress=False, checkpoint_every=1)
    return sordino.train(torch.nn.Linear(4, 2), LOSS, DATA, plan, lr=0.1, out=out, settings=settings, **options)


def weights(result: sordino.Result) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in result.model.parameters()])


class Stop(Exception):
    """Raised by a callback, as a kill would be."""


def killed(plan: Plan, out: Path, after: int) -> None:
    def stop(row: Any) -> bool:
        if row["step"] >= after:
            raise Stop
        return False

    settings = sordino.Settings(progress=False, checkpoint_every=1, eval_every=1)
    with pytest.raises(Stop):
        sordino.train(
            torch.nn.Linear(4, 2), LOSS, DATA, plan, lr=0.1, out=out, settings=settings, callbacks=[stop],
            evaluate=lambda model: {"x": 0.0},
        )  # fmt: skip


SETTINGS: list[dict[str, Any]] = [
    {"strategy": "lambda", "value": 0.8},
    {"strategy": "inverse-root", "bands": 4},
    {"groups": 2, "strategy": "banded-lambda", "value": 0.5, "bands": 2},
    {"groups": 2, "strategy": "banded-root", "bands": 2},
]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: str(s["strategy"]))
def test_the_ledger_of_a_run_gives_the_plans_epsilon(setting: dict[str, Any], tmp_path: Path) -> None:
    plan = plan_of(**setting)
    result = trained(plan, tmp_path)
    header, entries = read_ledger(tmp_path / "ledger.jsonl")
    found = from_ledger(header, entries, plan.delta)
    assert result.guarantee is not None
    assert found["epsilon"] == pytest.approx(result.guarantee.epsilon, rel=1e-6)
    edited = [dict(entry) for entry in entries]
    edited[5]["earlier"] = {**edited[5]["earlier"], "noises": 0}
    with pytest.raises(InputError, match="mixture"):
        from_ledger(header, edited, plan.delta)


def test_the_noise_of_a_run_is_that_of_the_strategy() -> None:
    """Without records' gradients the weights are the noise: with λ near 1 all but the last is taken back."""
    zero = (torch.zeros(60, 400), torch.arange(60) % 2)

    def spread(value: float | None) -> float:
        setting = {"strategy": "identity"} if value is None else {"strategy": "lambda", "value": value}
        plan = plan_of(insecure_seed=1, steps=40, **setting)
        model = torch.nn.Linear(400, 2, bias=False)
        torch.nn.init.zeros_(model.weight)
        sordino.train(model, LOSS, zero, plan, lr=1.0, settings=sordino.Settings(progress=False))
        return float(model.weight.detach().std()) * plan.divisor

    assert spread(None) == pytest.approx(1.5 * 40**0.5, rel=0.1)
    assert spread(0.99) == pytest.approx(1.5 * (1 + 39 * 0.01**2) ** 0.5, rel=0.1)


def test_a_seeded_run_that_was_killed_ends_with_the_same_weights(tmp_path: Path) -> None:
    plan = plan_of(strategy="inverse-root", bands=4, insecure_seed=3)
    whole = trained(plan, tmp_path / "whole")
    torch.manual_seed(0)
    killed(plan, tmp_path / "cut", 4)
    settings = sordino.Settings(progress=False, checkpoint_every=1, eval_every=1)
    model = torch.nn.Linear(4, 2)
    again = sordino.train(
        model, LOSS, DATA, plan, lr=0.1, out=tmp_path / "cut", settings=settings, resume=True,
        evaluate=lambda model: {"x": 0.0},
    )  # fmt: skip
    assert torch.equal(weights(again), weights(whole))


@pytest.mark.parametrize("setting", SETTINGS[1:3], ids=lambda s: str(s["strategy"]))
def test_a_secret_run_that_was_killed_begins_a_new_round_with_fresh_noise(
    setting: dict[str, Any], tmp_path: Path
) -> None:
    plan = plan_of(steps=20, **setting)
    groups = plan.sampling.batches  # type: ignore[union-attr]
    killed(plan, tmp_path, groups + 1)
    resumed = trained_again(plan, tmp_path)
    header, entries = read_ledger(tmp_path / "ledger.jsonl")
    steps = [entry["step"] for entry in entries]
    assert steps == [*range(groups + 1), *range(2 * groups, 20)]
    first = entries[groups + 1]
    assert first["earlier"]["noises"] == 0, "no noise of the lost key"
    assert first["source"] != entries[0]["source"]
    assert from_ledger(header, entries, plan.delta)["epsilon"] <= plan.guarantee().epsilon * (1 + 1e-9)
    assert groups - 1 <= resumed.skipped_steps <= groups


@pytest.mark.parametrize("setting", SETTINGS[1:3], ids=lambda s: str(s["strategy"]))
def test_a_secret_run_that_was_killed_in_its_last_round_a_part_of_one_comes_to_its_end(
    setting: dict[str, Any], tmp_path: Path
) -> None:
    plan = plan_of(steps=13, **setting)
    groups = plan.sampling.batches  # type: ignore[union-attr]
    begun = 13 // groups * groups + 1
    killed(plan, tmp_path, begun)
    resumed = trained_again(plan, tmp_path)
    header, entries = read_ledger(tmp_path / "ledger.jsonl")
    assert [entry["step"] for entry in entries] == list(range(begun))
    assert resumed.skipped_steps == 13 - begun
    assert from_ledger(header, entries, plan.delta)["epsilon"] <= plan.guarantee().epsilon * (1 + 1e-9)


def trained_again(plan: Plan, out: Path) -> sordino.Result:
    settings = sordino.Settings(progress=False, checkpoint_every=1, eval_every=1)
    return sordino.train(
        torch.nn.Linear(4, 2), LOSS, DATA, plan, lr=0.1, out=out, settings=settings, resume=True,
        evaluate=lambda model: {"x": 0.0},
    )  # fmt: skip


def test_beginning_anew_never_moves_more_than_the_plan_pays_for() -> None:
    """C of a resumed run is C with entries set to 0: block by block, whatever group a record has in each."""
    from sordino.methods.correlated.sensitivity import repeated_norm, sensitivity
    from sordino.methods.correlated.strategies import Strategy

    for strategy in (Strategy("lambda", 0.9), Strategy("inverse-root", bands=6)):
        for steps, separation in ((12, 3), (13, 4), (20, 5)):
            bound = sensitivity(strategy, steps=steps, separation=separation)
            for cut in range(separation, steps, separation):
                parts = [repeated_norm(strategy.matrix(size), separation) for size in (cut, steps - cut)]
                assert (parts[0] ** 2 + parts[1] ** 2) ** 0.5 <= bound


def test_other_sampling_and_laplace_noise_are_refused() -> None:
    plan = plan_of(strategy="lambda", value=0.5)
    with pytest.raises(Refused, match="fixed order"):
        replace(
            plan,
            sampling=sordino.dpsgd(records=60, expected_batch=12, steps=1, noise_multiplier=1, delta=1e-3).sampling,
        )
    with pytest.raises(Refused, match="Gaussian noise only"):
        plan_of(strategy="lambda", value=0.5, clipping=sordino.L1Clip(1.0))


def test_a_plan_is_json_and_users_are_protected() -> None:
    plan = plan_of(strategy="lambda", value=0.5, unit="user", records=12, expected_batch=4)
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    result = sordino.train(
        torch.nn.Linear(4, 2), LOSS, DATA, plan, lr=0.1, users=[i % 12 for i in range(60)],
        settings=sordino.Settings(progress=False),
    )  # fmt: skip
    assert result.guarantee is not None
    assert result.guarantee.unit == "user"
