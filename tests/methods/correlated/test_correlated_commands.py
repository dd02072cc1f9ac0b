"""Correlated noise from the command line and from recipes; a finished run is verified."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from small_recipes import small_recipe, small_toml
from sordino.cli import main
from sordino.errors import InputError, Refused
from sordino.methods.correlated.method import Correlated
from sordino.runs.build import clipping_of, plan_from


def test_account_and_calibrate_agree(capsys: pytest.CaptureFixture[str]) -> None:
    shared = ["--records", "600", "--batch", "60", "--epochs", "2", "--delta", "1e-4", "--json"]
    assert main(["calibrate", "correlated", "--epsilon", "4", "--groups", "10", *shared]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["epsilon"] <= 4.0
    strategy = found["strategy"]
    options = ["--strategy", strategy["name"]]
    options += ["--lambda", str(strategy["lambda"])] if "lambda" in strategy else []
    options += ["--bands", str(strategy["bands"])] if "bands" in strategy else []
    assert main(["account", "correlated", "--noise-multiplier", str(found["noise_multiplier"]), *options, *shared]) == 0
    assert json.loads(capsys.readouterr().out)["epsilon"] == pytest.approx(found["epsilon"])
    assert main(["account", "correlated", "--noise-multiplier", "1", "--lambda", "0.5", *shared]) == 2


def test_a_recipe_trains_and_its_directory_is_genuine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = small_toml(
        method={"name": "correlated", "strategy": "lambda", "lambda": 0.8},
        privacy={"noise_multiplier": 1.0, "insecure_seed": None},
        train={"steps": 4, "momentum": 0.5},
    )
    (tmp_path / "recipe.toml").write_text(recipe)
    assert main(["train", str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "run"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["method"] == "correlated"
    assert main(["verify", str(tmp_path / "run"), "--json"]) == 0
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["epsilon"] == pytest.approx(result["epsilon"], rel=1e-6)
    ledger = tmp_path / "run" / "ledger.jsonl"
    ledger.write_text(ledger.read_text().replace('"noises": 1', '"noises": 0', 1))
    assert main(["verify", str(tmp_path / "run"), "--json"]) != 0


def plan_of(**sections: dict[str, object]):  # type: ignore[no-untyped-def]
    recipe = small_recipe(**sections)
    return plan_from(recipe, clipping_of(recipe), 1000)


def test_the_workload_is_that_of_the_recipes_optimizer() -> None:
    plan = plan_of(method={"name": "correlated"}, train={"momentum": 0.9, "weight_decay": 0.1, "lr": 0.5})
    assert isinstance(plan.method, Correlated)
    assert (plan.method.workload.momentum, plan.method.workload.decay) == (0.9, 0.05)


def test_unknown_keys_and_other_samplers_are_errors() -> None:
    with pytest.raises(InputError, match="strateg"):
        plan_of(method={"name": "correlated", "strategie": "lambda"})
    with pytest.raises(Refused, match="cyclic"):
        plan_of(method={"name": "correlated"}, sampling={"name": "allocation"})
    owned = {"name": "npz", "path": "rows.npz", "user": "owner"}
    with pytest.raises(Refused, match="examples_per_user"):
        plan_of(method={"name": "correlated"}, privacy={"unit": "user", "examples_per_user": 2}, data=owned)
