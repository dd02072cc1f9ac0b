"""Paid sweeps: one ε for the whole, a secret number of runs, and nothing of the runs that were not selected."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import sordino
from small_recipes import small_toml
from sordino.accounting.selection import Repetition, selection_epsilon
from sordino.data import load
from sordino.errors import InputError, Refused
from sordino.randomness import RandomSource
from sordino.runs import selection as module
from sordino.runs.recipe import Recipe
from sordino.runs.selection import HIDDEN, Price, best_of, candidates, draw_runs, run_paid
from sordino.runs.sweep import Checked, Sweep, SweptKey
from sordino.runs.verify import failed, verify
from sordino.training.sealed import read_sealed

RECIPE = small_toml(  # full batches: their Rényi curve is a formula, so calibration is fast
    privacy={"epsilon": 1.0, "noise_multiplier": None, "insecure_seed": None},
    sampling={"expected_batch": 12000},
    train={"steps": 2, "chunk": 4096},
)
PRICE = Price(3.0, 1e-5, Repetition("geometric", 3.0))


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sordino.runs.sweep.prepare", lambda *_, **__: None)


def over(recipe: Path, *axes: str, **options: Any) -> Sweep:
    return Sweep(recipe, tuple(map(SweptKey.parse, axes)), **options)


@pytest.mark.usefixtures("no_data")
def test_noise_is_calibrated_so_that_the_whole_meets_the_price(recipe: Path) -> None:
    found = candidates(over(recipe, "train.lr=0.1,0.5", "clipping.clip_norm=1,2"), PRICE)
    releases = [one.plan.releases() for one in found]
    assert 2.99 <= selection_epsilon(releases, PRICE.repetition, PRICE.delta, "add-remove") <= 3.0
    for one in found:  # what is run is what was accounted for, whatever budget the recipe had
        assert one.recipe.privacy.epsilon is None
        assert one.recipe.privacy.noise_multiplier == one.plan.noise.noise_multiplier
        assert one.plan.guarantee().epsilon < 3.0


@pytest.mark.usefixtures("no_data")
def test_runs_of_different_kinds_are_paid_by_the_worst(recipe: Path) -> None:
    found = candidates(over(recipe, "train.steps=4,8"), PRICE)
    assert found[0].plan.noise.noise_multiplier < found[1].plan.noise.noise_multiplier
    releases = [one.plan.releases() for one in found]
    assert selection_epsilon(releases, PRICE.repetition, PRICE.delta, "add-remove") <= 3.0


@pytest.mark.usefixtures("no_data")
@pytest.mark.parametrize(
    ("axis", "overrides", "complaint"),
    [
        ("privacy.epsilon=1,2", (), "follows from --epsilon"),
        ("data.records=12000,11000", (), "same records"),
        ("train.lr=1,2", ("privacy.insecure_seed=3",), "independent, secret noise"),
        ("train.lr=1,2", ("run.noise_free=true",), "not private"),
        (
            "train.lr=1,2",
            ("sampling.name=truncated-poisson", "sampling.expected_batch=300", "sampling.cap=900"),
            "no Rényi bound",
        ),
        ("train.lr=1,2", ("privacy.relation=replace-one", "sampling.expected_batch=300"), "no Rényi bound"),
        ("sampling.name=poisson,without-replacement", (), "same relation"),
    ],
)
def test_what_the_theorem_does_not_cover_is_refused(
    recipe: Path, axis: str, overrides: tuple[str, ...], complaint: str
) -> None:
    with pytest.raises(Refused, match=complaint):
        candidates(over(recipe, axis, overrides=overrides), PRICE)


@pytest.mark.usefixtures("no_data")
def test_a_method_without_a_renyi_curve_is_refused(recipe: Path) -> None:
    recipe.write_text(RECIPE.replace("lr = 0.5\n", ""))
    overrides = ("method.name=modelmix", "method.tau_over_lr=0.5")
    with pytest.raises(Refused, match="modelmix does not give"):
        candidates(over(recipe, "method.lr=0.1,0.2", overrides=overrides), PRICE)


@pytest.mark.usefixtures("no_data")
def test_the_number_of_runs_and_their_settings_are_random(recipe: Path) -> None:
    found = candidates(over(recipe, "train.lr=0.1,0.5"), PRICE)
    drawn = [draw_runs(found, PRICE.repetition, RandomSource.seeded(seed)) for seed in range(60)]
    assert len({len(runs) for runs in drawn}) > 3
    assert {one.recipe.train.lr for runs in drawn for one in runs} == {0.1, 0.5}
    assert draw_runs(found, Repetition("poisson", 1.1), _zero()) == []


def _zero() -> RandomSource:
    """A source under which the Poisson law gives no run."""
    law = Repetition("poisson", 1.1)
    seeds = (RandomSource.seeded(seed) for seed in range(100))
    return next(source for source in seeds if law.draw(source.stream("sweep/runs", 0)) == 0)


class Runs:
    """Accuracies in the order of the runs; None fails."""

    def __init__(self, *values: float | None) -> None:
        self.values = list(values)

    def __call__(self, recipe: Recipe, folder: Path) -> Mapping[str, Any]:
        value = self.values.pop(0)
        folder.mkdir()
        (folder / "value").write_text(str(value))
        return {"error": "broken"} if value is None else {"test_accuracy": value, "test_loss": value}


@pytest.fixture
def drawn(recipe: Path, no_data: None) -> list[Checked]:
    return candidates(over(recipe, "train.lr=0.1"), PRICE) * 4


def test_the_best_is_kept_and_the_others_are_deleted(recipe: Path, drawn: list[Checked], tmp_path: Path) -> None:
    for metric, value in (("test_accuracy", "0.7"), ("test_loss", "0.2")):
        hidden = tmp_path / metric
        hidden.mkdir()
        best = best_of(drawn, over(recipe, "train.lr=0.1", metric=metric), hidden, Runs(0.3, 0.7, None, 0.2))
        assert best is not None
        assert [path.name for path in hidden.iterdir()] == [best.folder.name]
        assert (best.folder / "value").read_text() == value


def test_no_run_or_only_failed_ones_release_nothing(recipe: Path, drawn: list[Checked], tmp_path: Path) -> None:
    sweep = over(recipe, "train.lr=0.1")
    assert best_of([], sweep, tmp_path, Runs()) is None
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    assert best_of(drawn, sweep, hidden, Runs(None, float("nan"), None, None)) is None
    assert not list(hidden.iterdir())


def test_a_paid_sweep_leaves_one_run_whose_papers_state_the_whole_cost(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sordino.data.load", cache(load))  # unpacked once, not for each of the runs
    monkeypatch.setattr(module, "draw_runs", lambda found, law, source: [found[0], found[1]])
    out = tmp_path / "out"
    (out / HIDDEN / "0").mkdir(parents=True)  # left by a sweep that was killed: deleted unseen
    document = run_paid(over(recipe, "train.lr=0.01,0.5"), PRICE, out, progress=False)
    assert sorted(path.name for path in out.iterdir()) == ["run", "sweep.json"]
    assert document["epsilon"] <= 3.0
    result = json.loads((out / "run/result.json").read_text())
    assert result["epsilon"] == result["guarantee"]["epsilon"] == document["epsilon"]
    assert result["epsilon_of_a_single_run"] < result["epsilon"]
    texts = [assumption["text"] for assumption in result["guarantee"]["assumptions"]]
    assert "the number of runs is secret" in texts
    assert "epsilon" not in (out / "run/metrics.jsonl").read_text()
    page = (out / "run/report.html").read_text()
    assert "secret geometric number of runs" in page
    assert "neither the other runs nor how many there were" in page
    assert not {"runs", "table", "best", "complete", "seconds"} & set(document)  # nothing tells of the other runs
    left = [path for path in (out / "run").rglob("*") if path.is_file()]
    assert len({path.stat().st_mtime_ns for path in (*left, out / "run")}) == 1, "how many runs came after the best"
    assert not [path.name for path in left if HIDDEN.encode() in path.read_bytes()], "its place among the runs"
    assert "finished" not in result["environment"]
    _, about = read_sealed(out / "run" / "model.safetensors")
    assert about["epsilon"] == document["epsilon"], "the model states what the selection cost, wherever it is copied to"
    assert about["guarantee"] == document["sentence"]
    verdict = verify(out / "run")
    assert list(failed(verdict)) == []
    assert verdict.epsilon == pytest.approx(result["epsilon_of_a_single_run"], rel=1e-6)
    assert sordino.load(out / "run").guarantee == document["sentence"]
    edit = {**result, "epsilon": result["epsilon_of_a_single_run"] / 2}
    (out / "run" / "result.json").write_text(json.dumps(edit), encoding="utf8")
    assert {"epsilon", "claim", "model"} <= {check.name for check in failed(verify(out / "run"))}
    with pytest.raises(InputError, match="made once"):
        run_paid(over(recipe, "train.lr=0.01,0.5"), PRICE, out)


@pytest.mark.usefixtures("no_data")
def test_where_nothing_was_drawn_that_is_said_and_nothing_else(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "draw_runs", lambda found, law, source: [])
    price = Price(3.0, 1e-5, Repetition("poisson", 2.0))
    document = run_paid(over(recipe, "train.lr=0.1,0.5"), price, tmp_path / "out", progress=False)
    assert document["selected"] is None
    assert "nothing is released" in document["sentence"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["sweep.json"]


@pytest.mark.usefixtures("no_data")
def test_a_sweep_that_is_interrupted_leaves_nothing_to_look_at(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(recipe: Recipe, folder: Path, data_dir: Path | None) -> dict[str, Any]:
        folder.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "run_one", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_paid(over(recipe, "train.lr=0.1,0.5"), PRICE, tmp_path / "out", progress=False)
    assert not list((tmp_path / "out").iterdir())
