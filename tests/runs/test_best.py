"""The best recipes known: they are recipes, they say what the results say, and other names are refused with a list."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sordino.cli import main
from sordino.errors import InputError
from sordino.runs.best import best_names, best_recipe
from sordino.runs.sweep import plan_of

ROOT = Path(__file__).parents[2]


def test_the_recipes_are_what_the_comparisons_found() -> None:
    sys.path.append(str(ROOT / "experiments"))
    import best

    for dataset in best.CHOSEN:
        text, path = best.best(dataset), best.FOLDER / f"{dataset}.toml"
        assert (path.read_text(encoding="utf8") if path.exists() else None) == text, "run: python experiments/best.py"
    readme = (ROOT / "README.md").read_text(encoding="utf8")
    assert best.with_overview(readme) == readme, "run: python experiments/best.py"
    assert f"| {best_names()[0]} |" in readme


@pytest.mark.parametrize("dataset", best_names())
def test_a_recipe_has_the_epsilon_that_was_asked_for_and_the_settings_of_the_nearest_one(dataset: str) -> None:
    best = best_recipe(dataset, 1.1)
    recipe = best.recipe(["privacy.delta=1e-6"])
    assert (recipe.privacy.epsilon, recipe.privacy.delta) == (1.1, 1e-6)
    assert best.nearest == min(best.known, key=lambda one: abs(one.epsilon - 1.1))
    assert "not measured at ε = 1.1" in best.sentence()
    measured = best_recipe(dataset, best.known[0].epsilon)
    assert f"measured: {best.known[0]}" in measured.sentence()
    assert recipe.privacy.insecure_seed is None
    assert 1.0 < plan_of(recipe).guarantee().epsilon <= 1.1


def test_a_dataset_without_one_is_refused_with_the_list() -> None:
    with pytest.raises(InputError, match=", ".join(best_names())):
        best_recipe("imagenet", 1.0)
    with pytest.raises(InputError, match="positive"):
        best_recipe(best_names()[0], 0.0)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--dataset", "imagenet", "--epsilon", "1"], "no recipe is known"),
        (["--dataset", "adult"], "with --epsilon"),
        ([], "give RECIPE.toml, or --dataset"),
        (["recipe.toml", "--epsilon", "1"], "--set privacy.epsilon"),
        (["recipe.toml", "--dataset", "adult"], "--set data.name"),
    ],
)
def test_wrong_flags_are_input_errors_and_nothing_is_written(
    flags: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *flags, "--out", str(tmp_path / "out")]) == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_help_names_every_dataset_and_the_default_of_delta(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert all(name in text for name in best_names())
    assert "default: 1e-5" in text
