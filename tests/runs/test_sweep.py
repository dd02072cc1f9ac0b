"""Sweeps: the grid, what is wrong is found before anything runs, what is done is not done again, the cost is stated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from small_recipes import small_toml
from sordino.errors import InputError, Refused
from sordino.methods.dpsgd.accountant import account_dpsgd
from sordino.report.heatmap import Grid, heat_map, heat_map_file
from sordino.report.sweep import grids, write_page
from sordino.runs import sweep as module
from sordino.runs.recipe import Recipe
from sordino.runs.sweep import Point, Sweep, SweptKey, check, cost_of, run_sweep

RECIPE = small_toml(
    run={"name": "small", "seed": 5},
    privacy={"noise_multiplier": 2.0, "insecure_seed": None},
    sampling={"expected_batch": 300},
    train={"steps": 4},
)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


class Runs:
    """In place of real runs: the accuracy follows from the settings, and calls are counted."""

    def __init__(self, fails: float | None = None) -> None:
        self.done: list[tuple[float, float]] = []
        self.fails = fails

    def __call__(self, recipe: Recipe, folder: Path, data_dir: Path | None = None) -> dict[str, Any]:
        lr, norm = recipe.train.lr or 0.0, recipe.clipping.clip_norm
        self.done.append((lr, norm))
        if lr == self.fails:
            return {"error": "SordinoError: it broke"}
        folder.mkdir(parents=True)
        return {"test_accuracy": lr / (1 + norm), "test_loss": norm, "epsilon": 1.0, "delta": 1e-5, "seconds": 0.1}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    fake = Runs()
    monkeypatch.setattr(module, "run_one", fake)
    monkeypatch.setattr(module, "prepare", lambda *_, **__: None)
    return fake


def grid(recipe: Path, *over: str, **options: Any) -> Sweep:
    return Sweep(recipe, tuple(SweptKey.parse(text) for text in over), **options)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("train.lr=0.1,0.5", ("0.1", "0.5")),
        ("model.hidden=[3, 4],[5]", ("[3, 4]", "[5]")),
        ("train.optimizer=sgd, adamw", ("sgd", "adamw")),
        ('model.name="a,b",c', ('"a,b"', "c")),
        ("method.lr={name='constant', value=1},0.2", ("{name='constant', value=1}", "0.2")),
    ],
)
def test_values_are_parted_at_commas_that_are_not_inside_a_value(text: str, values: tuple[str, ...]) -> None:
    assert SweptKey.parse(text).values == values


@pytest.mark.parametrize("text", ["train.lr", "lr=1,2", "train.lr=", "train.lr=1,,2", "train.lr=1,1", ".lr=1"])
def test_a_malformed_axis_is_an_error_that_shows_how(text: str) -> None:
    with pytest.raises(InputError, match="--over"):
        SweptKey.parse(text)


@pytest.mark.parametrize(
    ("over", "options", "complaint"),
    [
        ((), {}, "at least one"),
        (("train.lr=1", "train.lr=2"), {}, "repeats train.lr"),
        (("run.seed=1,2",), {"seeds": 2}, "either --seeds"),
        (("train.lr=1",), {"seeds": 0}, "at least 1"),
        (("train.lr=1",), {"metric": "accuracy"}, "did you mean 'test_accuracy'"),
    ],
)
def test_a_sweep_that_means_nothing_is_an_error(
    recipe: Path, over: tuple[str, ...], options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(InputError, match=complaint):
        grid(recipe, *over, **options)


def test_the_grid_is_every_combination_times_the_seeds(recipe: Path) -> None:
    sweep = grid(recipe, "train.lr=0.1,0.5", "clipping.clip_norm=1,2,3", seeds=2)
    points = sweep.points()
    assert len(points) == len(set(points)) == len({point.name for point in points}) == 12
    last = sweep.recipe_of(points[-1])
    assert (last.train.lr, last.clipping.clip_norm, last.run.seed) == (0.5, 3.0, 6)
    assert points[0].name == "lr=0.1,clip_norm=1,seed=0"


def test_seeds_move_the_insecure_seed_too_for_the_same_noise_twice_would_be_no_second_run(recipe: Path) -> None:
    sweep = grid(recipe, "train.lr=0.1", seeds=3, overrides=("privacy.insecure_seed=10",))
    assert [sweep.recipe_of(p).privacy.insecure_seed for p in sweep.points()] == [10, 11, 12]


def test_directories_never_coincide() -> None:
    """The same last part of a key, a value with a slash, a long list: a hash tells them apart."""
    settings = [
        (("a.name", "x"), ("b.name", "y")),
        (("a.name", "y"), ("b.name", "x")),
        (("a.k", "u/v"),),
        (("a.k", "u v"),),
        (("a.k", "1" * 200),),
        (("a.k", "1" * 201),),
    ]
    names = [Point(one).name for one in settings]
    assert len(set(names)) == len(names)
    assert all("/" not in name and len(name) < 120 for name in names)


@pytest.mark.parametrize(
    ("over", "complaint"),
    [
        ("train.lrr=1,2", "'lr'"),
        ("trian.lr=1,2", "'train'"),
        ("clipping.clip_norm=1,-1", "clip_norm=-1"),
        ("clipping.clip_norm=1,big", "clip_norm=big"),
        ("train.optimizer=sgd,adamv", "did you mean 'adam"),
        ("privacy.delta=1e-5,2", "delta=2"),
        ("model.name=linear,linaer", "name=linaer"),
    ],
)
def test_a_wrong_key_or_value_is_found_before_anything_runs(
    recipe: Path, tmp_path: Path, over: str, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "run_one", None)
    with pytest.raises(InputError, match=complaint):
        run_sweep(grid(recipe, over), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_results_means_and_the_best_are_written_down(recipe: Path, tmp_path: Path, runs: Runs) -> None:
    document = run_sweep(grid(recipe, "train.lr=0.1,0.5", "clipping.clip_norm=1,4", seeds=2), tmp_path / "out")
    assert len(runs.done) == 8
    assert document["complete"]
    assert document["best"]["settings"] == {"train.lr": 0.5, "clipping.clip_norm": 1}
    assert document["best"]["mean"] == pytest.approx(0.25)
    assert document["best"]["deviation"] == 0
    assert json.loads((tmp_path / "out/sweep.json").read_text()) == document
    by_loss = run_sweep(grid(recipe, "train.lr=0.1", "clipping.clip_norm=1,4", metric="test_loss"), tmp_path / "loss")
    assert by_loss["best"]["settings"]["clipping.clip_norm"] == 1  # smaller is better


def test_a_failed_run_is_recorded_and_the_others_go_on(recipe: Path, tmp_path: Path, runs: Runs) -> None:
    runs.fails = 0.1
    document = run_sweep(grid(recipe, "train.lr=0.1,0.5,0.7"), tmp_path / "out")
    assert [row["status"] for row in document["runs"]] == ["failed", "finished", "finished"]
    assert "it broke" in document["runs"][0]["error"]
    assert document["cost"]["runs"] == 3  # what it released before it failed is paid for in full
    assert "failed: SordinoError: it broke" in (tmp_path / "out/sweep.html").read_text()


def test_runs_of_another_grid_in_the_same_directory_are_not_forgotten(recipe: Path, tmp_path: Path, runs: Runs) -> None:
    run_sweep(grid(recipe, "train.lr=0.1,0.5"), tmp_path / "out")
    with pytest.raises(InputError, match="belong to the cost"):
        run_sweep(grid(recipe, "train.lr=0.5,0.9"), tmp_path / "out")
    kept = tmp_path / "out/runs/lr=0.1,seed=0/recipe.toml"
    kept.write_text(grid(recipe, "train.lr=0.1").recipe_of(Point((("train.steps", "9"),))).to_toml())
    with pytest.raises(InputError, match="another recipe"):
        run_sweep(grid(recipe, "train.lr=0.1,0.5"), tmp_path / "out")
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "file").touch()
    with pytest.raises(InputError, match="contains no sweep"):
        run_sweep(grid(recipe, "train.lr=0.5,0.9"), tmp_path / "else")


def test_the_cost_is_the_composition_of_all_runs(recipe: Path, runs: Runs) -> None:
    checked = check(grid(recipe, "train.lr=0.1,0.5,0.9"))
    expected = account_dpsgd(sampling_rate=300 / 12000, noise_multiplier=2.0, steps=12, delta=1e-5)
    assert cost_of(checked).epsilon == pytest.approx(expected["epsilon"], rel=1e-4)
    assert "pld" in cost_of(checked).rule


def test_a_method_that_releases_do_not_describe_is_added_up(recipe: Path, runs: Runs) -> None:
    modelmix = ("method.name=modelmix", "method.tau_over_lr=0.5", "train.optimizer=sgd")
    text = RECIPE.replace("lr = 0.5\n", "")
    recipe.write_text(text)
    checked = check(grid(recipe, "method.lr=0.1,0.2", overrides=modelmix))
    single = [one.plan.guarantee().epsilon for one in checked]
    assert cost_of(checked).epsilon == pytest.approx(sum(single))
    assert cost_of(checked).delta == pytest.approx(2e-5)


def test_the_cost_is_said_in_words_and_insecure_sweeps_are_labelled(recipe: Path, tmp_path: Path, runs: Runs) -> None:
    secure = run_sweep(grid(recipe, "train.lr=0.1,0.5"), tmp_path / "a")
    assert "chosen by looking at them" in secure["cost"]["sentence"]
    assert "insecure" not in secure["cost"]["sentence"]
    overrides = ("privacy.insecure_seed=1",)
    labelled = run_sweep(grid(recipe, "train.lr=0.1,0.5", overrides=overrides), tmp_path / "b")
    assert not labelled["secure"]
    assert "none of this holds" in labelled["cost"]["sentence"]
    assert "insecure seeds" in (tmp_path / "b/sweep.html").read_text()


def test_where_the_private_rows_change_the_sentence_says_whom_it_is_about(
    recipe: Path, tmp_path: Path, runs: Runs
) -> None:
    document = run_sweep(grid(recipe, "data.records=12000,11000"), tmp_path / "out")
    assert "private in every run" in document["cost"]["sentence"]


def test_two_keys_make_one_map_three_make_one_for_each_value_of_the_first(
    recipe: Path, tmp_path: Path, runs: Runs
) -> None:
    two = run_sweep(grid(recipe, "train.lr=0.1,0.5", "clipping.clip_norm=1,3"), tmp_path / "two")
    (found,) = grids(two)
    assert (found.row_key, found.column_key) == ("train.lr", "clipping.clip_norm")
    assert found.values[1] == (pytest.approx(0.25), pytest.approx(0.125))
    three = run_sweep(
        grid(recipe, "train.chunk=64,128", "train.lr=0.1,0.5", "clipping.clip_norm=1,3"), tmp_path / "three"
    )
    assert [g.title for g in grids(three)] == ["test accuracy, train.chunk = 64", "test accuracy, train.chunk = 128"]
    assert (tmp_path / "two/heatmap.svg").exists()
    assert not (tmp_path / "three/heatmap.svg").exists()
    assert (tmp_path / "three/sweep.html").read_text().count("<svg") == 2


def test_a_heat_map_shows_every_value_frames_the_best_and_marks_what_is_missing() -> None:
    one = Grid("t <b>", "", "k", ("",), ("a", "<i>", "c"), ((0.1, 0.9, None),), percent=True)
    svg = str(heat_map(one))
    assert svg.count('class="heat"') == 2
    assert svg.count('class="best"') == svg.count('class="none"') == 1
    assert "90.00 %" in svg
    assert "<b>" not in svg  # names are escaped
    assert "&lt;i&gt;" in svg
    assert heat_map_file(one).startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    constant = Grid("t", "r", "k", ("1",), ("a", "b"), ((2.0, 2.0),), percent=False)
    assert 'fill-opacity="0.52"' in str(heat_map(constant))
    smaller = Grid("t", "r", "k", ("1",), ("a", "b"), ((1.0, 2.0),), percent=False, larger_is_better=False)
    assert str(heat_map(smaller)).index("0.95") < str(heat_map(smaller)).index("0.08")


def test_the_page_of_a_paid_sweep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="void it"):
        write_page(tmp_path, {"paid": True})
