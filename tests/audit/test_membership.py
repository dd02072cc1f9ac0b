"""Membership inference stays below what the guarantee allows, and sees a model that has no noise to speak of."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from small_recipes import small_recipe, small_toml
from sordino.audit.bounds import GaussianCurve
from sordino.audit.membership import Membership, allowed, membership
from sordino.cli import main
from sordino.errors import InputError
from sordino.report.membership import shown_membership
from sordino.runs.prepared import work_of
from sordino.runs.work import Work


def work(noise_multiplier: float) -> Work:
    """Full batches of a linear model on 12,000 records; of its 4,000 test rows the first are told apart."""
    return work_of(
        small_recipe(
            privacy={"noise_multiplier": noise_multiplier, "insecure_seed": None},
            sampling={"expected_batch": 12000},
            train={"lr": 5.0},
        )
    )


def test_what_is_allowed_is_the_inverse_of_the_trade_off_curve() -> None:
    (most,) = allowed(GaussianCurve(1.0), (0.1,))
    assert GaussianCurve(1.0).least_false(most) == pytest.approx(0.1)


def test_without_much_noise_members_are_told_apart_and_the_guarantee_says_that_they_may_be() -> None:
    found = membership(work(0.05), rows=40, shadows=12, targets=2)
    assert found.true[found.false.index(0.5)] > 0.55  # 0.80 to 0.90 in six runs, of which each has other noise
    assert all(a <= b + 1e-9 for a, b in zip(found.true, found.allowed, strict=True))


def test_what_it_cannot_attack_is_refused_by_a_sentence() -> None:
    with pytest.raises(InputError, match="shadows"):
        membership(work(1.0), shadows=2)
    statistics = small_recipe(privacy={"norm_histogram": 20.0})
    with pytest.raises(InputError, match="without statistics"):
        membership(work_of(statistics), rows=40, shadows=8)


def test_the_command_writes_what_the_runs_report_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, run = tmp_path / "recipe.toml", tmp_path / "run"
    recipe.write_text(small_toml())
    assert main(["train", str(recipe), "--out", str(run)]) == 0
    assert "Membership inference was not tried" in (run / "report.html").read_text()
    assert main(["audit", "--membership", "--models", "9", "--out", str(run), "--json"]) == 0
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "of 1000 public test rows" in page
    assert "LiRA recognises" in page
    assert main(["verify", str(run)]) == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    "change", [{"true": [0.5]}, {"true": ["<b>", 1.0]}, {"models": "<b>"}, {"allowed": [2.0, 1.0]}]
)
def test_a_damaged_file_is_not_drawn(change: dict[str, object]) -> None:
    whole = Membership((0.01, 1.0), (0.02, 1.0), (0.4, 1.0), 40, 9).to_dict()
    made = shown_membership(whole)
    assert made is not None
    assert ElementTree.fromstring(str(made.svg)).tag == "svg"
    assert shown_membership(json.loads(json.dumps({**whole, **change}))) is None


def test_what_the_guarantee_allows_is_rounded_up_in_the_report() -> None:
    """The page once showed 4.04 % where 4.0441 % are allowed."""
    document = {"false": [0.001, 0.01], "true": [0.0, 0.01], "allowed": [0.008069, 0.040441], "records": 9, "models": 9}
    shown = shown_membership(document)
    assert shown is not None
    assert "any attack 4.045 %" in shown.sentence
