"""Recipes with [batch_clipping]: what they need, what they refuse, and what a run leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from small_recipes import small_toml
from sordino import data
from sordino.errors import InputError, Refused
from sordino.records.companions import companion_model, predict
from sordino.runs.prepared import prepare
from sordino.runs.prepared import test_metrics as metrics_on
from sordino.runs.recipe import Recipe
from sordino.runs.run import run_recipe

RECIPE = small_toml(
    model={"name": "resnet", "form": "batch"},
    sampling={"expected_batch": 30},
    train={"steps": 2},
    public={"records": 20, "shared": "drop"},
    batch_clipping={"companions": 3, "draws": 2},
    instruments={"every": 2, "rows": 8},
)


def recipe(tmp_path: Path, *overrides: str, text: str = RECIPE) -> Recipe:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return Recipe.read(path, overrides)


def small(*_: Any, **__: Any) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 5, stride=4), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))


def test_a_run_keeps_what_predictions_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sordino.nets.build", small)
    chosen, out = recipe(tmp_path), tmp_path / "run"
    result = run_recipe(chosen, out)
    assert result["batch_clipping"] == {
        "companions": 3, "draws": 2, "seed": 0,
        "public_rows": "in model.safetensors, as `public`: predictions need them",
    }  # fmt: skip
    assert result["public"]["records"] == 20
    assert "majority over 2 draws" in (out / "report.html").read_text()
    weights, prepared = load_file(out / "model.safetensors"), prepare(chosen)
    assert prepared.public is not None
    assert torch.equal(weights["public"], prepared.public.inputs)
    again = companion_model(small(), prepared.public, 3)
    again.load_state_dict(weights)
    test = data.load("fashion-mnist-mini").test
    assert metrics_on(again, test, draws=2)["test_accuracy"] == result["test_accuracy"]
    some = data.Split(test.inputs[:100], test.targets[:100])
    right = float((predict(again, some.inputs, draws=2) == some.targets).double().mean())
    assert metrics_on(again, some, draws=2)["test_accuracy"] == pytest.approx(right)


def test_a_recipe_reads_back_what_it_writes(tmp_path: Path) -> None:
    chosen = recipe(tmp_path)
    assert recipe(tmp_path, text=chosen.to_toml()) == chosen


@pytest.mark.parametrize(
    ("overrides", "error", "match"),
    [
        (["batch_clipping.companions=21"], InputError, "between 1 and 20"),
        (["batch_clipping.companions=0"], InputError, "between 1 and 20"),
        (["batch_clipping.draws=0"], InputError, "at least 1"),
        (["method.name=modelmix", "method.lr=0.1"], Refused, "modelmix"),
        (["method.name=hidden-state"], Refused, "hidden-state"),
        (["method.name=dp-mac", "model.name=classifier", "model.form="], Refused, "dp-mac"),
        (["method.name=coupling"], Refused, "coupling"),
        (["features.private=centre", "features.private_noise=1", "features.private_bound=1"], Refused, "companions"),
        (["batch_clipping.companion=3"], InputError, "companions"),
        (["model.form=original"], InputError, "no BatchNorm"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_written(
    tmp_path: Path, overrides: list[str], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        run_recipe(recipe(tmp_path, *overrides), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_companions_need_public_rows_and_draws_need_companions(tmp_path: Path) -> None:
    without_public = RECIPE.replace('[public]\nrecords = 20\nshared = "drop"\n', "").replace("rows = 8", "split='test'")
    with pytest.raises(Refused, match="declares none"):
        run_recipe(recipe(tmp_path, text=without_public), tmp_path / "run")
    with pytest.raises(InputError, match="needs companions"):
        run_recipe(recipe(tmp_path, text=RECIPE.replace("companions = 3\n", "")), tmp_path / "run")


def test_batchnorm_without_companions_is_refused_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sordino.nets.build", small)
    plain = RECIPE[: RECIPE.index("[batch_clipping]")]
    with pytest.raises(Refused, match="BatchNorm in training mode"):
        run_recipe(recipe(tmp_path, text=plain), tmp_path / "run")
