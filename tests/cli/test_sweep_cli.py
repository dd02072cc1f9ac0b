"""`sordino sweep` as its users run it, on the embedded data."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from small_recipes import small_toml
from sordino.cli import main
from sordino.data import load

RECIPE = small_toml(
    privacy={"insecure_seed": None}, sampling={"expected_batch": 12000}, train={"steps": 2, "chunk": 4096}
)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


def test_a_sweep_makes_runs_json_heat_map_and_page_and_makes_nothing_twice(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sordino.data.load", cache(load))  # unpacked once, not for each of the runs
    out = tmp_path / "out"
    command = ["sweep", str(recipe), "--over", "train.lr=0.1,0.5", "--over", "clipping.clip_norm=0.1,1"]
    assert main([*command, "--out", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["runs"]) == 4
    assert all(0 < run["value"] < 1 and run["epsilon"] > 0 for run in document["runs"])
    assert (out / "heatmap.svg").read_text().count('class="heat"') == 4
    assert "What looking at this page costs" in (out / "sweep.html").read_text()
    made = {path: path.stat().st_mtime_ns for path in out.glob("runs/*/result.json")}
    assert len(made) == 4
    killed = next(iter(made)).parent  # as kill -9 would leave it: released, but without a result
    (killed / "result.json").unlink()
    assert main([*command, "--out", str(out)]) == 0
    changed = [path for path, when in made.items() if path.stat().st_mtime_ns != when]
    assert changed == [killed / "result.json"]
    printed = capsys.readouterr().out
    assert "the cost of looking" in printed
    assert "train.lr" in printed


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--over", "train.lr=0.1,x"], "must be of type float"),
        (["--over", "train.lr=0.1,0.2", "--epsilon", "3"], "needs --pay"),
        (["--over", "train.lr=0.1,0.2", "--pay"], "needs --epsilon"),
        (["--over", "train.lr=0.1,0.2", "--pay", "--epsilon", "3", "--jobs", "2"], "one after another"),
        (["--over", "train.lr=0.1,0.2", "--pay", "--epsilon", "3", "--mean-runs", "0.5"], "above 1"),
        (["--over", "train.lr=0.1,0.2", "--jobs", "0"], "at least 1"),
    ],
)
def test_wrong_flags_are_input_errors_and_nothing_is_written(
    recipe: Path, tmp_path: Path, flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", str(recipe), "--out", str(tmp_path / "out"), *flags]) == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["sweep", "--help"])
    assert "--pay --epsilon 3" in capsys.readouterr().out
