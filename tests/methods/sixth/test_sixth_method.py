"""A method of another package: found by its entry point, trained from a recipe, accounted, audited and reported.

Nothing in `sordino` knows it: the entry point stands in the metadata of a distribution that only this test installs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import sordino
from small_recipes import small_toml
from sordino import registry, report
from sordino.cli import main
from sordino.errors import InputError, Refused
from sordino.plan import Plan, from_ledger
from sordino.release import Gaussian
from sordino.runs.recipe import Recipe
from sordino.runs.run import audit_recipe, run_recipe
from sordino.runs.sweep import Sweep, SweptKey, check, cost_of

RECIPE = small_toml(
    run={"name": "sixth"},
    method={"name": "signed-steps", "lr": 0.01},
    privacy={"epsilon": 4.0, "noise_multiplier": None},
    sampling={"expected_batch": 400},
    train={"steps": 12, "eval_every": 6, "chunk": 400, "lr": None},
)


def install(folder: Path, name: str, value: str, package: str = "signed") -> Path:
    """A distribution of so many files as it needs for its entry point."""
    metadata = folder / f"{package}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[sordino.methods]\n{name} = {value}\n")
    return folder


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    site = install(tmp_path / "site", "signed-steps", "signed_steps:SignedSteps")
    (site / "signed_steps.py").write_text((Path(__file__).parent / "signed_steps.py").read_text("utf8"), "utf8")
    monkeypatch.syspath_prepend(str(site))
    yield
    sys.modules.pop("signed_steps", None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "recipe.toml"
    made.write_text(RECIPE)
    return made


def test_without_the_package_nobody_knows_the_method(path: Path) -> None:
    with pytest.raises(InputError, match="'signed-steps' is unknown"):
        Recipe.read(path)
    with pytest.raises(AttributeError, match="signed_steps"):
        Plan.signed_steps  # noqa: B018


@pytest.mark.usefixtures("installed")
class TestSixth:
    def test_it_is_found_and_makes_plans_like_the_others(self) -> None:
        assert "signed-steps" in registry.names()
        plan = Plan.signed_steps(lr=0.1, noise_multiplier=2.0, delta=1e-5, records=200, expected_batch=20, steps=5)
        assert plan.method.name == "signed-steps"
        assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
        same = sordino.dpsgd(noise_multiplier=2.0, delta=1e-5, records=200, expected_batch=20, steps=5)
        assert plan.guarantee().epsilon == same.guarantee().epsilon

    def test_a_recipe_is_trained_accounted_and_reported(self, path: Path, tmp_path: Path) -> None:
        out = tmp_path / "run"
        assert main(["train", str(path), "--out", str(out), "--json"]) == 0
        result = json.loads((out / "result.json").read_text("utf8"))
        assert result["method"] == "signed-steps"
        assert 3.9 < result["epsilon"] <= 4.0
        assert result["signed_steps"] == 12
        assert result["test_accuracy"] > 0.5
        lines = [json.loads(line) for line in (out / "ledger.jsonl").read_text("utf8").splitlines()]
        assert from_ledger(lines[0], lines[1:], 1e-5)["epsilon"] == pytest.approx(result["epsilon"], rel=1e-3)
        page = report.write(out).read_text("utf8")
        assert "The ledger agrees with the plan" in page
        assert "only signs of released gradients are used" in page
        assert main(["verify", str(out)]) == 0
        assert run_recipe(Recipe.read(path), out, resume=True) == result

    def test_its_update_is_the_one_that_is_run(self, records: object, linear: nn.Module) -> None:
        plan = Plan.signed_steps(
            lr=0.25, noise_multiplier=1.0, delta=1e-5, records=200, expected_batch=20, steps=1, insecure_seed=1
        )
        before = linear.weight.detach().clone()
        sordino.train(linear, cross_entropy, records, plan)
        moved = (linear.weight.detach() - before).abs()
        assert torch.allclose(moved, torch.tensor(0.25))
        with pytest.raises(Refused, match="the plan contains it"):
            sordino.train(linear, cross_entropy, records, plan, lr=0.5)

    def test_an_audit_stays_below_the_claim_and_finds_noise_that_is_too_small(self, path: Path) -> None:
        recipe = Recipe.read(path, ["train.steps=4", "sampling.expected_batch=6000"])
        options = {"canaries": 2000, "seed": 3}
        fair = audit_recipe(recipe, **options)
        assert fair.holds
        assert 0 < fair.epsilon_lower <= fair.epsilon_claimed
        assert not audit_recipe(recipe, **options, noise_scale=0.3).holds

    def test_a_sweep_over_it_is_checked_and_its_cost_is_that_of_the_composition(self, path: Path) -> None:
        sweep = Sweep(path, (SweptKey.parse("method.lr=0.01,0.02"),))
        checked = check(sweep)
        assert [one.plan.method.to_dict()["lr"] for one in checked] == [0.01, 0.02]
        assert cost_of(checked).epsilon > checked[0].plan.guarantee().epsilon

    def test_the_command_line_has_its_flags(self) -> None:
        assert main(["account", "signed-steps"]) == 0

    def test_what_the_method_refuses_is_refused(self, path: Path) -> None:
        for override, said in [
            ("method.rate=2", "unknown key in \\[method\\] of signed-steps"),
            ("train.lr=0.5", "the plan contains it"),
            ("train.optimizer=adam", "the plan contains it"),
        ]:
            with pytest.raises(InputError, match=said):
                run_recipe(Recipe.read(path, [override]), path.parent / "never")
            assert not (path.parent / "never").exists()


def test_a_package_can_t_take_the_name_of_another_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an installed package could change what the plans of a built-in method mean."""
    monkeypatch.syspath_prepend(str(install(tmp_path, "dpsgd", "elsewhere:Weaker", package="weaker")))
    with pytest.raises(InputError, match="provided more than once"):
        sordino.Plan.from_dict(
            {"method": {"name": "dpsgd"}, "noise": Gaussian(1.0).to_dict()}
            | dict.fromkeys(("records", "sampling", "clipping", "steps", "delta", "divisor", "relation"))
            | {"accountant": "pld", "insecure_seed": None, "statistics": []}
        )
    with pytest.raises(InputError, match="provided more than once"):
        registry.method_class("dpsgd")


def test_an_entry_point_that_is_no_method_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(install(tmp_path, "odd", "json:JSONDecoder", package="odd")))
    with pytest.raises(InputError, match=r"derived from sordino\.plan\.Method"):
        registry.method_class("odd")
