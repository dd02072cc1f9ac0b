"""No result states an ε below its ledger's: a release that the plan does not declare is refused before it leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sordino
from sordino.errors import Refused
from sordino.features.normalise import ChannelBudget, private_statistics
from sordino.plan import Statistic, from_ledger
from sordino.plan.core import Plan
from sordino.plan.explained import Explained
from sordino.release.ledger import read_ledger
from sordino.training.histogram import norm_histogram
from sordino.training.loop import Settings

DATA = (torch.randn(60, 5, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 2)
SETTINGS = Settings(progress=False)


def plan_with(**options: Any) -> Plan:
    given = {"noise_multiplier": 20.0, "delta": 1e-5, "records": 60, "expected_batch": 60, "steps": 3}
    return Plan.dpsgd(**{**given, **options})


def train(plan: Plan, out: Path, **options: Any) -> sordino.Result:
    loss = nn.functional.cross_entropy
    return sordino.train(nn.Linear(5, 2), loss, DATA, plan, lr=0.1, out=out, settings=SETTINGS, **options)


def spent(out: Path) -> float:
    return float(from_ledger(*read_ledger(out / "ledger.jsonl"), 1e-5)["epsilon"])


def test_a_histogram_that_was_declared_at_a_lower_rate_is_refused_before_anything_is_released(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"declared at 0\.0001"):
        train(plan_with(statistics=[norm_histogram(0.5, 1e-4)]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_statistic_that_the_plan_does_not_declare_does_not_leave(tmp_path: Path) -> None:
    seen: list[Any] = []

    def first(dataset: Any, source: Any, ledger: Any) -> Any:
        seen.append(private_statistics(dataset[0], ChannelBudget(60, 1.0, 1.0, 0.1), source=source, ledger=ledger))
        return dataset

    with pytest.raises(Refused, match=r"'statistics'.*declares no such statistic"):
        train(plan_with(), tmp_path / "run", first=first)
    assert seen == []
    assert spent(tmp_path / "run") == 0


def test_what_is_declared_leaves_and_the_result_states_the_ledger_s_epsilon(tmp_path: Path) -> None:
    def first(dataset: Any, source: Any, ledger: Any) -> Any:
        private_statistics(dataset[0], ChannelBudget(60, 1.0, 1.0, 9.0), source=source, ledger=ledger)
        return dataset

    statistics = [Statistic("statistics", 9.0, count=2), norm_histogram(7.0, 1.0)]
    result = train(plan_with(statistics=statistics), tmp_path / "run", first=first)
    assert result.guarantee is not None
    assert result.guarantee.epsilon == pytest.approx(spent(tmp_path / "run"), rel=1e-6)


def entry(plan: Plan, **changed: Any) -> dict[str, Any]:
    given = {
        "purpose": "gradient",
        "step": 0,
        "mechanism": "gaussian",
        "noise_multiplier": plan.noise.noise_multiplier,
        "sampling": plan.sampling.to_dict(),
        "relation": plan.relation,
    }
    return {**given, **changed}


@pytest.mark.parametrize(
    "changed",
    [
        {"step": 3},
        {"step": -1},
        {"step": None},
        {"noise_multiplier": 19.9},
        {"noise_multiplier": None},
        {"mechanism": "laplace"},
        {"sampling": {"name": "poisson", "sampling_rate": 0.2}},
        {"relation": "replace-one"},
        {"purpose": "iterate"},
        {"purpose": "s", "noise_multiplier": 4.9, "sampling": {"name": "all"}},
        {"purpose": "s", "noise_multiplier": 5.0, "sampling": {"name": "all"}, "mechanism": "laplace"},
        {"purpose": "s", "noise_multiplier": 5.0, "sampling": {"name": "partition", "batch": 3}},
        {"purpose": "s", "noise_multiplier": 5.0, "sampling": {"name": "poisson", "sampling_rate": 0.6}},
    ],
)
def test_every_way_to_release_more_than_the_plan_is_refused(changed: dict[str, Any]) -> None:
    plan = plan_with(expected_batch=6, statistics=[Statistic("s", 5.0, sampling_rate=0.5)])
    with pytest.raises(Refused, match="does not declare"):
        Explained(plan, [entry(plan, **changed)])


def test_each_declaration_pays_for_as_many_releases_as_it_counts() -> None:
    plan = plan_with(statistics=[Statistic("s", 5.0, count=2), Statistic("s", 9.0)])
    paid = {"purpose": "s", "sampling": {"name": "all"}}
    made = [entry(plan, **paid, noise_multiplier=sigma) for sigma in (9.0, 5.0, 6.0)]
    explained = Explained(plan, [entry(plan, step=step) for step in range(3)] + made)
    for again in (entry(plan, step=1), entry(plan, **paid, noise_multiplier=50.0)):
        with pytest.raises(Refused, match="does not declare"):
            explained(again)
