"""`[method] name = "hidden-state"` from a recipe to a run directory with its report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sordino.cli import main
from sordino.errors import InputError, Refused, SordinoError
from sordino.plan.spent import from_ledger
from sordino.release.ledger import read_ledger
from sordino.runs.prepared import prepare
from sordino.runs.recipe import Recipe
from sordino.runs.run import run_recipe

BASE: dict[str, Any] = {
    "run": {"name": "hidden"},
    "data": {"name": "fashion-mnist-mini"},
    "model": {"name": "linear"},
    "privacy": {"epsilon": 8.0, "delta": 1e-5, "insecure_seed": 1},
    "sampling": {"name": "partition", "expected_batch": 500},
    "train": {"epochs": 8},
    "method": {"name": "hidden-state", "cap": 0.2, "regularisation": 1e-4, "unit": True, "bias": 0.3},
    "features": {"private": "centre", "private_noise": 30.0, "private_bound": 28.0},
}


def changed(section: str, **values: Any) -> Recipe:
    return Recipe.from_dict(BASE | {section: BASE.get(section, {}) | values})


def test_a_whole_run(tmp_path: Path) -> None:
    recipe, out = Recipe.from_dict(BASE), tmp_path / "run"
    result = run_recipe(recipe, out, progress=False)
    assert result["test_accuracy"] > 0.6
    assert result["method"] == "hidden-state"
    assert 7.9 < result["epsilon"] <= 8.0
    assert result["certificate"]["strong_convexity"]["value"] == 1e-4
    assert result["epsilon_if_every_iterate_were_seen"] >= result["epsilon"]
    assert {path.name for path in out.iterdir()} == {
        "recipe.toml", "ledger.jsonl", "metrics.jsonl", "model.safetensors", "result.json", "report.html",
        "not_private.json", "statistics.safetensors",
    }  # fmt: skip
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 1
    page = (out / "report.html").read_text(encoding="utf8")
    for shown in ("last iterate only", "-strongly convex", "-smooth", "slope: the gradient is", "2e(1−e)"):
        assert shown in page, shown
    header, entries = read_ledger(out / "ledger.jsonl")
    assert from_ledger(header, entries, 1e-5)["epsilon"] == pytest.approx(result["epsilon"], rel=1e-6)
    assert run_recipe(recipe, out, resume=True, progress=False) == result


def test_the_command_line_audits_the_last_iterate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(Recipe.from_dict(BASE | {"train": {"steps": 24}}).to_toml())
    assert main(["audit", str(path), "--canaries", "200", "--seed", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bound"] == "f-DP, one run, last iterate only"
    assert found["holds"]


def test_a_killed_run_with_secure_noise_is_not_resumed(tmp_path: Path) -> None:
    plain, out = Recipe.from_dict(BASE | {"privacy": {"epsilon": 8.0, "delta": 1e-5}}), tmp_path / "run"
    run_recipe(plain, out, progress=False)
    (out / "result.json").unlink()  # as if it had been killed before its end
    with pytest.raises(SordinoError, match="another directory"):
        run_recipe(plain, out, resume=True, progress=False)


@pytest.mark.parametrize(
    ("section", "values", "complaint"),
    [
        ("model", {"name": "mlp"}, "linear"),
        ("train", {"momentum": 0.9}, "momentum"),
        ("train", {"optimizer": "adam"}, "Adam"),
        ("train", {"average": "ema"}, "average"),
        ("train", {"eval_every": 10}, "before the end"),
        ("clipping", {"clip_norm": 0.1}, "convex function"),
        ("privacy", {"relation": "add-remove"}, "replace-one"),
        ("run", {"noise_free": True}, "noise_free"),
        ("method", {"regularisation": 0.0}, "regularisation"),
        ("method", {"lr": 100.0}, "2/M"),
        ("sampling", {"name": "poisson"}, "no theorem"),
    ],
)
def test_what_the_proof_does_not_cover_is_refused(section: str, values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(Refused, match=complaint):
        prepare(changed(section, **values))


def test_clipped_softmax_is_refused_with_the_cap_that_does_the_same() -> None:
    with pytest.raises(Refused, match="convex function"):
        prepare(Recipe.from_dict(BASE | {"method": {"name": "hidden-state", "clip": 0.75, "regularisation": 1e-3}}))


def test_unknown_and_missing_keys() -> None:
    with pytest.raises(InputError, match="did you mean 'cap'"):
        prepare(changed("method", capp=0.1))
    with pytest.raises(InputError, match="'hinge' is unknown"):
        prepare(changed("method", loss="hinge"))
    with pytest.raises(InputError, match="regularisation"):
        prepare(Recipe.from_dict(BASE | {"method": {"name": "hidden-state"}}))
