"""The model card: the registry's fields from the run's own files, gaps named as gaps, and none for a forged run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from forgeries import edit_json

from small_recipes import small_recipe
from sordino.cli import main
from sordino.runs.card import MISSING
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
    assert fields["privacy_unit"] == DECLARED["unit"]
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
    assert "[declaration]: tuning_cost, public_sources" in text.replace("\n", " ")
    assert main(["verify", str(run)]) == 0, "a card changes nothing that was verified"


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
