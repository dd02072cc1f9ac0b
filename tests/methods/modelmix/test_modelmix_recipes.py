"""The recipes of the paper's tables run, at a size that a test can do; the page says what the result file says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import experiment
from sordino.cli import main
from sordino.runs.recipe import Recipe

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "experiments" / "recipes").glob("modelmix_*.toml"))
SMALL = {
    "data.name": "fashion-mnist-mini", "features.name": "none", "model.name": "linear", "sampling.expected_batch": 40,
    "train.steps": 2, "train.chunk": 40,
}  # fmt: skip


def overrides(recipe: Recipe) -> list[str]:
    """Two steps on embedded images, with a linear layer where the net is another recipe's too, or needs features."""
    chosen = dict(SMALL)
    if recipe.run.name == "modelmix-table2-cifar10":
        del chosen["model.name"]
    return [word for key, value in chosen.items() for word in ("--set", f"{key}={value}")]


def small_recipe(path: Path, target: Path) -> Path:
    lines = path.read_text().splitlines()
    dropped = ("normalise", "groups", "epochs")
    target.write_text("\n".join(line for line in lines if not line.startswith(dropped)) + "\n")
    return target


@pytest.mark.usefixtures("few_test_rows")
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_runs_a_few_steps(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = Recipe.read(path)
    small = small_recipe(path, tmp_path / "recipe.toml")
    assert main(["train", str(small), "--out", str(tmp_path / "run"), "--json", *overrides(recipe)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["method"] == recipe.method.name
    assert result["epsilon"] <= recipe.privacy.epsilon  # type: ignore[operator]
    assert ("equal_variance_epsilon" in result) == (recipe.method.name == "modelmix")


def test_a_recipe_is_audited_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = small_recipe(RECIPES[1], tmp_path / "recipe.toml")
    sized = [*overrides(Recipe.read(RECIPES[1])), "--set", "method.tau_over_lr=0.5", "--set", "clipping.clip_norm=1"]
    options = ["--canaries", "500", "--seed", "0", "--json", *sized]
    assert main(["audit", str(path), *options]) == 0
    assert json.loads(capsys.readouterr().out)["noise_fits"]
    assert main(["audit", str(path), *options, "--width-scale", "0.5"]) == 3
    assert "NOT what the plan states" in capsys.readouterr().err


def test_the_page_and_the_plot_are_made_from_the_result_file() -> None:
    module = experiment("modelmix_page")
    document = json.loads(module.RESULTS.read_text())
    text = module.PAGE.read_text("utf8")
    assert module.filled(text, module.blocks(document)) == text, "run python experiments/modelmix_page.py"
    assert module.FIGURE.read_text("utf8") == module.figure(document)


def test_every_modelmix_epsilon_of_the_experiment_has_its_control_below_it() -> None:
    document = json.loads(experiment("modelmix_page").RESULTS.read_text())
    rows = {(row["arm"], row["target_epsilon"]): row for row in document["table"]}
    for (arm, target), row in rows.items():
        assert row["epsilon"] <= target
        assert row["seeds"] >= 3
        if arm.startswith("modelmix"):
            assert row["beside"]["equal_variance_epsilon"] < row["epsilon"]
        if arm == "same-variance":
            beside = rows["modelmix", target]["beside"]["equal_variance_epsilon"]
            assert row["epsilon"] == pytest.approx(beside, rel=1e-3)
