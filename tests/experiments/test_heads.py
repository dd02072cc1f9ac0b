"""The searches on held-out training rows: settings are read, noise is that of a plan, and a trial learns."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "experiments"))

import feature_search  # noqa: E402
import heads  # noqa: E402
from sordino.plan import Plan  # noqa: E402

SETTING: dict[str, Any] = {**heads.DEFAULTS, "epsilon": 0.0, "batch": 200, "steps": 60, "clip": 0.1, "lr": 40.0}


def rows(count: int = 600) -> tuple[torch.Tensor, torch.Tensor]:
    """Three classes around three unit vectors, each row of length one."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(0, 3, (count,), generator=generator)
    found = torch.eye(8)[targets] + 0.3 * torch.randn(count, 8, generator=generator)
    return found / found.norm(dim=1, keepdim=True), targets


def right(weights: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    return float(((inputs @ weights[:-1] + weights[-1]).argmax(1) == targets).float().mean())


def test_a_grid_has_every_combination_and_unknown_settings_are_named() -> None:
    found = heads.grid("epsilon=1,3 lr=10,20,30")
    assert len(found) == 6
    assert {(s["epsilon"], s["lr"]) for s in found} == {(e, r) for e in (1.0, 3.0) for r in (10.0, 20.0, 30.0)}
    assert all(s["batch"] == heads.DEFAULTS["batch"] for s in found)
    with pytest.raises(SystemExit, match="'rate'"):
        heads.grid("rate=3")


def test_the_noise_is_that_of_the_plan_and_zero_without_privacy() -> None:
    plan = Plan.dpsgd(epsilon=2.0, delta=1e-5, records=5000, expected_batch=500, steps=20, clip_norm=1.0)
    assert heads.noise_of(2.0, 5000, 500, 20) == plan.noise.noise_multiplier
    assert heads.noise_of(0.0, 5000, 500, 20) == 0.0


def test_a_trial_learns_and_more_noise_makes_it_worse() -> None:
    inputs, targets = rows()
    weights, sigma = heads.trained(inputs, targets, 3, SETTING)
    assert sigma == 0.0
    assert right(weights, inputs, targets) > 0.9
    noisy, sigma = heads.trained(inputs, targets, 3, SETTING, sigma=300.0)
    assert sigma == 300.0
    assert right(noisy, inputs, targets) < 0.8


def test_few_rows_are_judged_under_the_noise_of_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, targets = rows()
    seen: dict[str, Any] = {}
    true = heads.trained

    def spy(*arguments: Any, **options: Any) -> Any:
        seen.update(options, batch=arguments[3]["batch"])
        return true(*arguments, **options)

    monkeypatch.setattr(feature_search, "trained", spy)
    setting = SETTING | {"epsilon": 3.0, "batch": 1000, "steps": 20}
    found = feature_search.judge(inputs, targets, 500, 5000, 3, setting)
    assert 0.3 < found <= 1.0
    assert seen["batch"] == 100
    assert seen["sigma"] / 100 == pytest.approx(heads.noise_of(3.0, 5000, 1000, 20) / 1000)  # of the mean gradient


def test_several_options_of_a_map_are_given_with_commas() -> None:
    assert feature_search.options("mirror=false,atoms=64,whiten=0.5") == {"mirror": False, "atoms": 64, "whiten": 0.5}
    assert feature_search.options("") == {}
