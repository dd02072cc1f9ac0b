"""Private normalisation inside a run: paid for in its plan, recorded in its ledger, read back on resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sordino.data import Split
from sordino.errors import InputError, SordinoError
from sordino.features import low_frequencies, private
from sordino.features.moment import edge
from sordino.features.private import Normaliser, PrivateNormalisation, normalised
from sordino.plan import Plan
from sordino.plan.spent import from_ledger
from sordino.release.ledger import Ledger, read_ledger
from sordino.runs.recipe import Recipe
from sordino.runs.run import run_recipe
from sordino.runs.trained import load
from sordino.runs.verify import verify

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


def uneven() -> Split:
    """Records of length one, nearly all along the first of 20 coordinates."""
    rows = torch.randn(500, 20, generator=torch.Generator().manual_seed(1))
    rows[:, 0] = 9 + rows[:, 0]
    return Split(rows / rows.norm(dim=1, keepdim=True), torch.zeros(500, dtype=torch.long))


def whitened_by(noise: float, split: Split) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    settings = PrivateNormalisation("whiten", noise, 1.0)
    plan = some_plan(settings)
    normaliser = Normaliser(settings, plan, None)
    seen = normaliser.first(split, plan.source(), Ledger.open(None, plan.to_dict()))
    return seen.inputs, normaliser.statistics


def test_whitening_shortens_the_directions_that_the_noise_does_not_hide_and_no_others() -> None:
    rows = uneven().inputs
    seen, statistics = whitened_by(5.0, uneven())
    assert statistics["directions"].shape[1] <= 3  # the edge is that of large matrices
    assert float(statistics["directions"][0, -1].abs()) > 0.95
    moment = float((rows.T @ rows)[0, 0])
    assert float(statistics["factors"][-1]) == pytest.approx((edge(5.0, 20) / moment) ** 0.5, rel=0.05)
    assert torch.allclose(seen.norm(dim=1), torch.ones(500))
    assert float(seen[:, 0].square().mean()) < 0.6 < 0.8 < float(rows[:, 0].square().mean())
    others = seen[:, 1:] / seen[:, 1:].norm(dim=1, keepdim=True)
    assert float((others * rows[:, 1:] / rows[:, 1:].norm(dim=1, keepdim=True)).sum(1).min()) > 0.5


def test_whitening_changes_nothing_where_the_noise_hides_everything() -> None:
    seen, statistics = whitened_by(500.0, uneven())
    assert statistics["directions"].shape[1] <= 1  # the edge is that of large matrices
    if not statistics["directions"].shape[1]:
        torch.testing.assert_close(seen, uneven().inputs)


def test_whitening_releases_one_statistic_and_bad_records_do_not_reach_it(tmp_path: Path) -> None:
    settings, plan = PrivateNormalisation("whiten", 5.0, 1.0), some_plan(PrivateNormalisation("whiten", 5.0, 1.0))
    assert settings.statistic().count == 1
    bad = uneven()
    bad.inputs[3] = float("nan")
    bad.inputs[4] *= 1e30
    with Ledger.open(tmp_path / "ledger.jsonl", plan.to_dict()) as ledger:
        first = Normaliser(settings, plan, tmp_path).first(bad, plan.source(), ledger)
        assert [entry["purpose"] for entry in ledger.entries] == ["statistics"]
    again = Normaliser(settings, plan, tmp_path)
    restored = again.restored()(bad.inputs)
    assert torch.equal(restored[:3], first.inputs[:3])
    assert torch.isfinite(again.statistics["directions"]).all()
    assert torch.isfinite(again.statistics["factors"]).all()


def test_a_second_moment_that_would_take_too_long_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(private, "WIDEST", 19)
    with pytest.raises(InputError, match="20 coordinates"):
        whitened_by(5.0, uneven())
    features = {"private": "whiten", "private_noise": 10.0, "private_bound": 28.0}
    with pytest.raises(InputError, match="784 coordinates"):
        run_recipe(Recipe.from_dict(BASE | {"features": features}), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_a_recipe_with_private_whitening_runs_verifies_and_predicts(tmp_path: Path) -> None:
    features = {"private": "whiten", "private_noise": 10.0, "private_bound": 28.0}
    privacy = {"epsilon": 8.0, "delta": 1e-5, "relation": "add-remove"}
    out = tmp_path / "run"
    result = run_recipe(Recipe.from_dict(BASE | {"features": features, "privacy": privacy}), out, progress=False)
    header, entries = read_ledger(out / "ledger.jsonl")
    assert from_ledger(header, entries, 1e-5)["epsilon"] == pytest.approx(result["epsilon"], rel=1e-3)
    verdict = verify(out)
    assert verdict.genuine
    assert verdict.epsilon == pytest.approx(result["epsilon"], rel=1e-3)
    rows = torch.rand(4, 1, 28, 28)
    assert load(out).probabilities(rows).shape == (4, 10)


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
        ({"private": "whiten", "private_noise": 1.0}, "private_bound"),
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
