"""The attack finds nothing in what is right, and each kind of fault by a general check."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import sordino.training.steps as steps
from small_recipes import small_recipe, small_toml
from sordino.audit.attack import CHECKS, attack
from sordino.audit.tap import Cut, watched
from sordino.cli import main
from sordino.errors import ClaimBroken, InputError
from sordino.runs.prepared import work_of
from sordino.runs.work import Work


@pytest.fixture(scope="module")
def work() -> Work:
    return work_of(small_recipe(privacy={"insecure_seed": None}), None, False)


def test_nothing_is_found_in_a_plan_that_is_carried_out_as_it_says(work: Work) -> None:
    result = attack(work, quick=True, only=[name for name in CHECKS if name not in ("one run", "resume")])
    assert result.holds, result.found
    assert {check.name for check in result.checks if check.tried} >= {"neighbours", "outputs", "noise", "sampling"}
    # a search that does not reach the bound would not see it exceeded
    assert "the largest change is 0.99" in result.checks[0].detail


def test_noise_of_nine_tenths_is_found(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = steps.release

    def weak(values: Any, **options: Any) -> Any:
        noise, summed = options["noise"], {name: value.clone() for name, value in values.items()}
        noisy = honest(values, **options)
        assert noise.noise_multiplier > 0
        return {
            name: (summed[name] * options["factor"] * 0.1 + 0.9 * value).to(value.dtype)
            for name, value in noisy.items()
        }

    monkeypatch.setattr("sordino.release.noise.release", weak)
    monkeypatch.setattr(steps, "release", weak)
    result = attack(work, quick=True, only=["noise"])
    assert any("scale" in text or "fit" in text for text in result.found)


def test_a_divisor_from_the_batch_is_found(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = steps.summed

    def averaged(gradient_sum: Any, batch: Any, source: Any) -> Any:
        total = honest(gradient_sum, batch, source)
        return replace(total, sums={n: 20 * v / max(1, len(batch)) for n, v in total.sums.items()})

    monkeypatch.setattr(steps, "summed", averaged)
    with pytest.raises(ClaimBroken, match="what the accountant assumes"):
        attack(work, quick=True, only=["neighbours"]).check()


def test_what_leaves_without_a_release_is_found(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that depend on the records though the releases are the same."""
    honest = steps.PrivateStep

    def leaking(step: int, gradients: Any) -> Any:
        return honest(step, {n: v + 1e-3 * sizes[-1] for n, v in gradients.items()})

    sizes: list[float] = []
    plain = steps.summed

    def noted(gradient_sum: Any, batch: Any, source: Any) -> Any:
        total = plain(gradient_sum, batch, source)
        sizes.append(float(next(iter(total.sums.values())).abs().sum()))
        return total

    monkeypatch.setattr(steps, "summed", noted)
    monkeypatch.setattr(steps, "PrivateStep", leaking)
    result = attack(work, quick=True, only=["outputs"])
    assert any("with the same releases" in text for text in result.found)


def test_a_watched_run_can_be_cut_like_a_kill(work: Work, tmp_path: Path) -> None:
    with pytest.raises(Cut), watched(stop_after=2) as seen:
        work.train(tmp_path / "run", resume=False)
    assert [call.step for call in seen.calls] == [0, 1]
    assert all(call.entry_first for call in seen.calls)


def test_watching_leaves_the_package_as_it_was(work: Work) -> None:
    before = steps.release
    with watched():
        assert steps.release is not before
    assert steps.release is before


def test_an_unknown_check_is_named(work: Work) -> None:
    with pytest.raises(InputError, match="neighbours"):
        attack(work, only=["neighbors"])


def test_the_command_prints_one_object_and_ends_with_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(small_toml())
    assert main(["attack", str(path), "--quick", "--only", "sampling", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["holds"] is True
    assert document["method"] == "dpsgd"
