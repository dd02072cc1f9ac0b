"""The model card: the registry's fields from the run's own files, gaps named as gaps, and none for a forged run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from forgeries import edit_json

import sordino
from small_recipes import small_recipe
from sordino.cli import main
from sordino.errors import InputError
from sordino.runs.card import MISSING, undeclared, write_card
from sordino.runs.declaration import DeclarationSection
from sordino.runs.recipe import Recipe
from sordino.runs.run import run_recipe

DECLARED = {"unit": 'one "stay": up to 5 per patient', "trust": "the hospital's own machine", "contact": "a@b.example"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("card") / "run"
    changes = {"declaration": DECLARED, "privacy": {"insecure_seed": None, "noise_multiplier": 3.0}}
    run_recipe(small_recipe(**changes), folder, progress=False)
    return folder


def test_a_declaration_stays_in_the_recipe_and_is_checked(run: Path) -> None:
    recipe = Recipe.read(run / "recipe.toml")
    assert recipe.declaration.unit == DECLARED["unit"]
    assert "declaration" not in small_recipe().to_toml()
    with pytest.raises(Exception, match="tuning"):
        small_recipe(declaration={"tunign": "none"})


def test_the_card_states_unit_epsilon_and_what_is_not_declared(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["card", str(run), "--json"]) == 0
    fields = json.loads(capsys.readouterr().out)
    registry = yaml.safe_load((run / "card.yaml").read_text("utf8"))
    assert registry == fields
    result = json.loads((run / "result.json").read_text("utf8"))
    assert fields["privacy_unit"] == f"one record of the dataset; declared: {DECLARED['unit']}"
    assert fields["parameters"]["epsilon"] == pytest.approx(result["epsilon"], rel=1e-9)
    assert fields["evidence"]["ledger_sha256"] == result["ledger"]["hash"]
    assert fields["adjacency"].startswith("add-remove: one record is added")
    assert fields["mechanisms"] == ["gradient: 3 × gaussian noise, multiplier 3"]
    assert fields["tuning_cost"] == MISSING
    success = list(fields["attack_success_at_most"].values())
    assert success == sorted(success)
    text = (run / "card.md").read_text("utf8")
    first = text.index("**ε = ")
    assert first < text.index(DECLARED["unit"]) < text.index("What undermines it") < text.index("The data")
    assert "[declaration]: tuning, public_sources, intended_use" in text.replace("\n", " ")
    assert set(undeclared(fields)) == {one.name for one in dataclasses.fields(DeclarationSection)} - {
        *DECLARED,
        "sector",
    }
    assert main(["verify", str(run)]) == 0, "a card changes nothing that was verified"


REGISTRY = {
    "basic": {"name", "data_curators", "description", "intended_use", "data_product_type", "data_product_region",
              "data_product_sector", "publication_date"},
    "dp_variant": {"variant_name", "data_domain", "unprotected_quantities"},
    "privacy_loss": {"privacy_unit", "privacy_unit_details", "number_of_privacy_units", "privacy_parameters",
                     "privacy_parameters_details"},
    "deployment_model": {"model_name", "model_name_details", "trust_assumptions", "actors", "release_type",
                         "release_type_details", "data_source_type", "data_source_type_details", "access_type",
                         "access_type_details"},
    "implementation": {"preprocessing_and_hyperparameter_tuning", "mechanisms", "composition", "post_processing",
                       "justification", "utility", "additional_information"},
    "administrative": {"evidence_sources", "status", "registry_authors", "tier"},
}  # fmt: skip
"""The keys of OpenDP's schema (opendp/deployments-registry-data, deployments-schema.yaml): it admits no other."""


def test_the_registrys_record_has_the_registrys_keys_and_types_and_guesses_nothing(run: Path) -> None:
    assert main(["card", str(run)]) == 0
    record = yaml.safe_load((run / "registry.yaml").read_text("utf8"))
    assert set(record) == {"url_slug", "deployment"}
    deployment = record["deployment"]
    assert set(deployment) == set(REGISTRY)
    for part, keys in REGISTRY.items():
        assert set(deployment[part]) <= keys, part
        texts = [v for k, v in deployment[part].items() if k not in ("data_curators", "registry_authors")]
        assert all(isinstance(v, str | int | float | dict) for v in texts), part
    basic, loss = deployment["basic"], deployment["privacy_loss"]
    assert {"name", "data_curators", "description", "intended_use", "data_product_type", "data_product_region",
            "publication_date"} <= set(basic)  # fmt: skip
    assert basic["data_curators"] == [{"data_curator_name": MISSING, "data_curator_type": MISSING}]
    result = json.loads((run / "result.json").read_text("utf8"))
    assert loss["privacy_parameters"]["epsilon"] >= result["epsilon"]
    assert loss["privacy_parameters"]["delta"] == result["delta"]
    assert loss["number_of_privacy_units"] == result["records"]
    assert loss["privacy_unit"] == f"one record of the dataset; declared: {DECLARED['unit']}"
    assert deployment["deployment_model"]["trust_assumptions"] == DECLARED["trust"]
    assert deployment["administrative"] == {"status": "Draft", "registry_authors": [DECLARED["contact"]], "tier": 3}
    with pytest.raises(Exception, match=r"declaration\.sector = 'Hospitals'.*Healthcare"):
        small_recipe(declaration={"sector": "Hospitals"})


def test_a_run_of_the_api_is_declared_too_and_the_card_knows_the_plans_unit(tmp_path: Path) -> None:
    inputs = torch.rand(60, 3, generator=torch.Generator().manual_seed(0))
    plan = sordino.dpsgd(
        noise_multiplier=2.0, delta=1e-4, records=20, expected_batch=5, steps=2, unit="user", rows_per_user=2
    )

    def train(out: Path | None, **given: str) -> None:
        sordino.train(
            torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy, (inputs, (inputs[:, 0] > 0.5).long()), plan,
            lr=0.1, settings=sordino.Settings(progress=False), users=torch.arange(60) // 3, out=out, declaration=given,
        )  # fmt: skip

    with pytest.raises(InputError, match="did you mean 'trust'"):
        train(tmp_path / "run", trusst="us")
    with pytest.raises(InputError, match="give out="):
        train(None, trust="us")
    assert not list(tmp_path.iterdir())
    train(tmp_path / "run", trust="the clinic's machine")
    fields = write_card(tmp_path / "run")
    assert fields["actors_and_trust"] == "the clinic's machine"
    unit = "one user of the dataset with all their rows, of which at most 2 take part in a step"
    assert fields["privacy_unit"] == unit
    assert "privacy_unit" not in undeclared(fields)
    page = (tmp_path / "run" / "report.html").read_text("utf8")
    assert "Declared: trust" in page
    assert f"{unit} (the recipe declares no unit)" in page


@pytest.mark.parametrize(
    ("options", "unit", "counted"),
    [
        ({"records": 60}, "one record of the dataset", "records, 60"),
        ({"records": 20, "unit": "user"}, "one user of the dataset with all their rows", "users, 20"),
        (
            {"records": 60, "unit": "user", "examples_per_user": 3},
            "one user of the dataset with all their rows, of which at most 3 take part in the training",
            "rows, 60",
        ),
    ],
)
def test_what_the_owner_declares_does_not_hide_what_the_plan_protects(
    tmp_path: Path, options: dict[str, Any], unit: str, counted: str
) -> None:
    """The owner's word "patient" stood where a plan that protects rows is read."""
    inputs = torch.rand(60, 3, generator=torch.Generator().manual_seed(0))
    plan = sordino.dpsgd(noise_multiplier=2.0, delta=1e-4, expected_batch=5, steps=2, **options)
    sordino.train(
        torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy, (inputs, (inputs[:, 0] > 0.5).long()), plan, lr=0.1,
        settings=sordino.Settings(progress=False), users=torch.arange(60) // 3 if "unit" in options else None,
        out=tmp_path / "run", declaration={"unit": "one patient"},
    )  # fmt: skip
    fields = write_card(tmp_path / "run")
    assert fields["privacy_unit"] == f"{unit}; declared: one patient"
    assert fields["unprotected_quantities"][0].startswith(f"the number of {counted}")
    assert f"{unit}; declared: one patient" in (tmp_path / "run" / "report.html").read_text("utf8")


def test_the_page_shows_the_declared_unit_before_epsilon_and_the_promise(run: Path) -> None:
    page = (run / "report.html").read_text("utf8")
    unit = page.index("up to 5 per patient")
    assert unit < page.index('class="big"') < page.index("accepts 1 % false accusations") < page.index('id="theory"')
    assert "Declared: trust" in page


def test_a_forged_run_gets_no_card(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import shutil

    folder = tmp_path / "forged"
    shutil.copytree(run, folder)
    (folder / "card.md").unlink(missing_ok=True)
    edit_json(folder / "result.json", epsilon=0.001)
    assert main(["card", str(folder)]) == 3
    assert "gets no card" in capsys.readouterr().err
    assert not (folder / "card.md").exists()
    assert main(["card", str(tmp_path)]) == 2
