"""Private normalisation inside a run: paid for in its plan, recorded in its ledger, read back on resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sordino.data import Split
from sordino.errors import InputError, SordinoError
from sordino.features import low_frequencies
from sordino.features.private import Normaliser, PrivateNormalisation, normalised
from sordino.plan import Plan
from sordino.plan.spent import from_ledger
from sordino.release.ledger import Ledger, read_ledger
from sordino.runs.recipe import Recipe
from sordino.runs.run import run_recipe

BASE: dict[str, Any] = {
    "data": {"name": "fashion-mnist-mini"},
    "model": {"name": "linear"},
    "privacy": {"epsilon": 8.0, "delta": 1e-5, "relation": "replace-one"},
    "sampling": {"name": "poisson", "expected_batch": 1000},
    "train": {"steps": 4, "lr": 0.5, "eval_every": 4},
    "features": {"private": "centre", "private_noise": 10.0, "private_bound": 28.0},
}


def some_plan(settings: PrivateNormalisation, insecure_seed: int | None = 3) -> Plan:
    return Plan.dpsgd(
        delta=1e-5, records=500, expected_batch=50, steps=5, noise_multiplier=2.0, relation="replace-one",
        statistics=[settings.statistic()], insecure_seed=insecure_seed,
    )  # fmt: skip


def some_split() -> Split:
    generator = torch.Generator().manual_seed(0)
    return Split(torch.randn(500, 4, 3, 3, generator=generator) * 2 + 1, torch.zeros(500, dtype=torch.long))


@pytest.mark.parametrize(
    "settings", [PrivateNormalisation("centre", 1.0, 20.0), PrivateNormalisation("channels", 1.0, 4.0, 12.0)]
)
def test_the_normalised_records_have_mean_zero_up_to_the_noise(settings: PrivateNormalisation) -> None:
    plan = some_plan(settings)
    ledger = Ledger.open(None, plan.to_dict())
    normaliser = Normaliser(settings, plan, None)
    seen = normaliser.first(some_split(), plan.source(), ledger)
    assert seen.inputs.mean((0, 2, 3)).abs().max() < 0.3
    assert len(ledger.entries) == settings.statistic().count
    assert {entry["purpose"] for entry in ledger.entries} == {"statistics"}
    assert torch.equal(normaliser.apply(some_split()).inputs, seen.inputs)
    again = normalised(some_split().inputs, normaliser.statistics)
    assert torch.equal(again, seen.inputs)


def test_a_resumed_run_reads_its_statistics_and_never_draws_them_again(tmp_path: Path) -> None:
    settings = PrivateNormalisation("centre", 5.0, 20.0)
    plan = some_plan(settings, insecure_seed=None)
    source = plan.source()
    with Ledger.open(tmp_path / "ledger.jsonl", plan.to_dict()) as ledger:
        first = Normaliser(settings, plan, tmp_path).first(some_split(), source, ledger)
    with Ledger.open(tmp_path / "ledger.jsonl", plan.to_dict()) as ledger:
        again = Normaliser(settings, plan, tmp_path).first(some_split(), plan.source(), ledger)
        assert torch.equal(first.inputs, again.inputs)
        (tmp_path / "statistics.safetensors").unlink()
        with pytest.raises(SordinoError, match="another release"):
            Normaliser(settings, plan, tmp_path).first(some_split(), plan.source(), ledger)


def test_a_dpsgd_recipe_with_private_centring(tmp_path: Path) -> None:
    result = run_recipe(Recipe.from_dict(BASE), tmp_path / "run", progress=False)
    header, entries = read_ledger(tmp_path / "run" / "ledger.jsonl")
    assert [entry["purpose"] for entry in entries].count("statistics") == 1
    assert from_ledger(header, entries, 1e-5)["epsilon"] == pytest.approx(result["epsilon"], rel=1e-3)
    assert (tmp_path / "run" / "statistics.safetensors").exists()
    without = run_recipe(Recipe.from_dict(BASE | {"features": {}}), tmp_path / "without", progress=False)
    assert result["noise_multiplier"] > without["noise_multiplier"]


@pytest.mark.parametrize(
    ("features", "complaint"),
    [
        ({"private": "center", "private_noise": 1.0, "private_bound": 1.0}, "did you mean 'centre'"),
        ({"private": "centre"}, "private_noise"),
        ({"private_noise": 1.0}, "ignored"),
        ({"private": "centre", "private_noise": 1.0, "private_bound": 1.0, "private_square_bound": 1.0}, "channels"),
        ({"private": "channels", "private_noise": 1.0, "private_bound": 1.0}, "is needed by"),
        ({"private": "centre", "private_noise": 0.0, "private_bound": 1.0}, "positive"),
    ],
)
def test_wrong_settings_are_found_before_anything_is_made(
    features: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=complaint):
        run_recipe(Recipe.from_dict(BASE | {"features": features}), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_low_frequencies_are_an_orthogonal_projection() -> None:
    maps = torch.randn(3, 2, 7, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(low_frequencies(maps, 7).norm(), maps.norm())
    some = low_frequencies(maps, 3)
    assert some.shape == (3, 2, 3, 3)
    assert torch.allclose(some, low_frequencies(maps, 7)[:, :, :3, :3])
    assert torch.allclose(low_frequencies(torch.ones_like(maps), 1), torch.full((3, 2, 1, 1), 7.0, dtype=torch.float64))
    with pytest.raises(InputError, match="frequencies"):
        low_frequencies(maps, 8)
