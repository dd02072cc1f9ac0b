"""Recipes with views and momenta: their keys, what refuses them, and a report that says what a record's vector was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from small_recipes import DOCUMENT, small_recipe
from sordino.errors import InputError, Refused
from sordino.methods.dpsgd.method import record_vector
from sordino.plan.contribution import Augmentation, Contribution, InnerMomentum, RecordMomentum
from sordino.runs.build import settings_of
from sordino.runs.prepared import prepare
from sordino.runs.recipe import Recipe
from sordino.runs.run import run_recipe

VIEWS = {"views": 2, "crop": 2, "flip": True}


def test_the_keys_become_the_plan_s_parts() -> None:
    made = small_recipe(method={"inner_length": 2, "inner_decay": 0.08, "outer_kept": 0.9}, augmentation=VIEWS)
    assert Contribution(**record_vector(made)) == Contribution(InnerMomentum(2, 0.08), Augmentation(**VIEWS))
    assert settings_of(made, torch.optim.SGD, 3, None).optimizer_options == {"momentum": 0.9}
    assert record_vector(small_recipe(method={"record_momentum_kept": 0.9}))["record_momentum"] == RecordMomentum(0.9)
    assert Contribution(**record_vector(small_recipe())) == Contribution()


def test_a_recipe_survives_a_round_trip(tmp_path: Path) -> None:
    made = small_recipe(method={"inner_length": 2, "inner_decay": 0.08}, augmentation=VIEWS)
    (tmp_path / "recipe.toml").write_text(made.to_toml())
    assert Recipe.read(tmp_path / "recipe.toml") == made
    assert "augmentation" not in small_recipe().to_toml()


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"augmentation": {"view": 4}}, "did you mean 'views'"),
        ({"augmentation": {"views": 2.5, "flip": True}}, "must be of type int"),
        ({"augmentation": {"views": 4}}, "all equal"),
        ({"method": {"inner_lenght": 2}}, "did you mean 'inner_length'"),
        ({"method": {"inner_length": 2}}, "must be given together"),
        ({"method": {"inner_length": 2, "inner_decay": 2.0}}, "inner_decay"),
        ({"method": {"outer_kept": 1.0}}, "outer_kept"),
        ({"method": {"outer_kept": 0.9}, "train": {"momentum": 0.9}}, "give it once"),
        ({"method": {"outer_kept": 0.9}, "train": {"optimizer": "adam"}}, "no other optimizer"),
        ({"method": {"record_momentum_kept": 0.9}}, "full batches"),
        ({"augmentation": VIEWS, "features": {"name": "scattering"}}, "features of scattering"),
        ({"augmentation": {"views": 2, "word_dropout": 0.1}}, "word ids"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_before_anything_is_written(sections: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        run_recipe(small_recipe(**sections), tmp_path / "run")
    assert not (tmp_path / "run").exists()


OTHERS: dict[str, dict[str, Any]] = {
    "modelmix": {"method": {"name": "modelmix", "lr": 0.5}, "train": {"steps": 3}},
    "hidden-state": {"method": {"name": "hidden-state", "regularisation": 1e-6}, "train": {"steps": 3}},
    "dp-mac": {"method": {"name": "dp-mac"}, "model": {"name": "classifier"}},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_methods_refuse_views_and_momenta(name: str) -> None:
    document = DOCUMENT | OTHERS[name]
    with pytest.raises(Refused, match="does not use views"):
        Recipe.from_dict(document | {"augmentation": VIEWS})
    for key in ("inner_length", "outer_kept", "record_momentum_kept"):
        with pytest.raises(InputError, match=key):
            Recipe.from_dict(document | {"method": document["method"] | {key: 1}})


def test_a_run_with_both_says_what_a_record_s_vector_was(tmp_path: Path) -> None:
    made = small_recipe(method={"inner_length": 2, "inner_decay": 0.3, "outer_kept": 0.5}, augmentation=VIEWS)
    result = run_recipe(made, tmp_path / "run", progress=False)
    header = json.loads((tmp_path / "run" / "ledger.jsonl").read_text().splitlines()[0])
    assert "inner" in json.dumps(header)
    page = (tmp_path / "run" / "report.html").read_text()
    for said in ("at the last 2 iterates", "2 views (crop 2, flip)", "clipped once"):
        assert said in result["guarantee"]["sentence"]
        assert said in page
    plain = prepare(small_recipe()).plan
    assert result["epsilon"] == plain.guarantee().epsilon
