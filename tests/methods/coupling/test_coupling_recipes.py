"""Coupling recipes: the keys of [method], what is refused, and the report of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from small_recipes import small_toml
from sordino.errors import InputError, Refused
from sordino.methods.coupling import DPMD, AdaMix, Constant, LeastError, WarmUp, public_use
from sordino.methods.coupling.weights import rule_from_dict
from sordino.runs.build import clipping_of, plan_from, private_records
from sordino.runs.prepared import prepare
from sordino.runs.recipe import Recipe
from sordino.runs.run import run_recipe

RECIPE = small_toml(
    method={"name": "coupling"},
    sampling={"expected_batch": 50},
    train={"steps": 2, "lr": 0.1},
    public={"records": 300, "origin": "images that a shop published itself", "expected_batch": 64, "shared": "drop"},
)
KEPT = Path(__file__).parents[3] / "experiments" / "recipes"


def read(tmp_path: Path, *overrides: str) -> Recipe:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return Recipe.read(path, overrides)


def made(recipe: Recipe) -> Any:
    return plan_from(recipe, clipping_of(recipe), private_records(recipe))


@pytest.mark.parametrize(
    ("overrides", "rule"),
    [
        ([], LeastError()),
        (["method.alpha=0.3"], Constant(0.3)),
        (["method.alpha=1"], Constant(1)),
        (["method.rule=adamix"], AdaMix()),
        (["method.rule=dpmd", "method.period=50"], DPMD(50)),
        (["method.rule=mse", "method.every=5", "method.horizon=10"], LeastError(every=5, horizon=10)),
    ],
)
def test_the_weight_is_a_number_or_a_rule_with_its_options(tmp_path: Path, overrides: list[str], rule: Any) -> None:
    recipe = read(tmp_path, *overrides)
    assert public_use(recipe, None).rule == rule
    path = tmp_path / "again.toml"
    path.write_text(recipe.to_toml())
    assert Recipe.read(path) == recipe


def test_what_acts_before_the_noise_is_in_the_plan_and_the_rest_is_not(tmp_path: Path) -> None:
    recipe = read(
        tmp_path, "method.alpha=0.3", "method.centring=true", "method.adaptive_clipping=0.9", "method.projection=4",
        "method.warm_up=10", "method.warm_up_lr=0.1",
    )  # fmt: skip
    plan, use = made(recipe), public_use(recipe, None)
    assert plan.method.to_dict() == {"name": "coupling", "centring": True, "quantile": 0.9}
    assert (use.projection, use.warm_up, use.expected_batch) == (4, WarmUp(10, 0.1), 64)
    assert "alpha" not in json.dumps(plan.to_dict())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["method.alpa=0.3"], "unknown key in .method. of coupling: 'alpa': did you mean 'alpha'"),
        (["method.alpha=0.3", "method.rule=dpmd"], "unknown key in .method. with rule dpmd: 'alpha'"),
        (["method.rule=dmpd"], "did you mean 'dpmd'"),
        (["method.alpha=1.5"], "between 0"),
        (["method.rule=theorem-3.1"], "distance"),
        (["method.rule=mse", "method.horizon=0.5"], "at least 1"),
        (["method.warm_up=3"], "warm_up_lr"),
        (["method.adaptive_clipping=2"], "quantile"),
        (["method.projection=0"], "projection"),
        (["method.rule=adamix", "method.period=3"], "unknown key"),
    ],
)
def test_unknown_keys_and_values_are_errors(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        made(read(tmp_path, *overrides))


def test_coupling_needs_public_rows(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.partition("[public]")[0])
    with pytest.raises(InputError, match="needs public rows"):
        made(Recipe.read(path))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["features.private=centre", "features.private_noise=1.0", "features.private_bound=1.0"], "at no cost"),
        (["augmentation.views=2", "augmentation.flip=true"], "does not use views of a record"),
    ],
)
def test_what_is_not_sound_or_not_covered_is_refused(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(Refused, match=message):
        made(read(tmp_path, *overrides))


def test_the_least_error_of_centred_gradients_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="not centred"):
        run_recipe(read(tmp_path, "method.centring=true"), tmp_path / "out", progress=False)
    assert not (tmp_path / "out" / "ledger.jsonl").exists()


def test_a_run_states_its_public_rows_and_their_origin(tmp_path: Path) -> None:
    found = run_recipe(read(tmp_path, "method.alpha=0.3"), tmp_path / "out", progress=False)
    assert found["method"] == "coupling"
    assert found["records"] == 11_700
    assert found["public"]["origin"] == "images that a shop published itself"
    page = (tmp_path / "out" / "report.html").read_text("utf8")
    assert "300 rows are public" in page
    assert "images that a shop published itself" in page
    assert json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[-1])["alpha"] == 0.3


@pytest.mark.parametrize("name", ["coupling_mnist", "coupling_cifar10_probe", "coupling_imdb_probe"])
def test_the_recipes_that_come_with_the_library_make_plans(name: str) -> None:
    recipe = Recipe.read(KEPT / f"{name}.toml", ["privacy.noise_multiplier=1.0"])
    without_target = Recipe.from_dict(_without_epsilon(recipe))
    plan = made(without_target)
    assert plan.method.name == "coupling"
    assert plan.records == private_records(recipe)


def _without_epsilon(recipe: Recipe) -> dict[str, Any]:
    import tomllib

    document = tomllib.loads(recipe.to_toml())
    document["privacy"].pop("epsilon")
    return document


def test_alpha_moves_nothing_that_is_accounted(tmp_path: Path) -> None:
    plans = [prepare(read(tmp_path, f"method.alpha={alpha}"), progress=False).plan for alpha in (0.1, 0.9)]
    assert plans[0] == plans[1]


def test_a_rule_that_is_a_table_is_an_unknown_one() -> None:
    with pytest.raises(InputError, match="is unknown"):
        rule_from_dict({"rule": {"kind": "constant"}})
