"""Comparisons: one ε, δ and relation for all, resumable, every figure from compare.json."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from small_recipes import small_toml
from sordino.cli import main
from sordino.data import load
from sordino.errors import InputError, Refused
from sordino.report.compare import accuracy, render
from sordino.runs import compare, compare_job
from sordino.runs.compare import differences, run_suite, table
from sordino.runs.compare_suite import Job, Suite
from sordino.runs.recipe import Recipe

RECIPE = small_toml(privacy={"insecure_seed": None, "noise_multiplier": None, "epsilon": 3.0}, train={"chunk": 4096})
SUITE = """
title = "Two step sizes"
epsilons = [1, 3]
delta = 1e-5
seeds = [0]
insecure_seeds = true

[[methods]]
name = "slow"
recipe = "recipe.toml"
assumes = "nothing"

[[methods]]
name = "fast"
recipe = "recipe.toml"
set = ["train.lr=0.8"]
at = { "1" = ["train.lr=0.6"] }

[[methods]]
name = "open"
recipe = "recipe.toml"
kind = "plain"
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    path = tmp_path / "suite.toml"
    path.write_text(SUITE)
    return path


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs are carried out in this process, and named."""
    made: list[str] = []
    monkeypatch.setattr("sordino.data.load", cache(load))  # unpacked once, not for each of the runs

    def carried_out(out: Path, job: Job, recipe: Recipe, data_dir: Path | None) -> dict[str, Any]:
        folder, path, outcome = compare._places(out, job)
        folder.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(recipe.to_toml())
        made.append(job.folder)
        compare_job.main([job.method.kind, str(folder)])
        return dict(json.loads(outcome.read_text()))

    monkeypatch.setattr(compare, "_made", carried_out)
    return made


def test_a_comparison_has_one_epsilon_delta_and_relation_and_goes_on_where_it_stopped(
    suite: Path, tmp_path: Path, here: list[str]
) -> None:
    out, seen = tmp_path / "out", []
    document = run_suite(Suite.read(suite), out, command="sordino compare suite.toml", show=seen.append)
    assert len(here) == document["planned"] == 2 * 2 + 1
    assert document["complete"]
    assert len(seen) == document["planned"] + 1
    for run in document["runs"]:
        if run["target_epsilon"] is not None:
            assert 0.99 * run["target_epsilon"] < run["epsilon"] <= run["target_epsilon"]
        assert (run["delta"], run["relation"]) == (1e-5, "add-remove")
        assert run["commit"]
    rates = {key: m["train"]["lr"] for key, m in document["methods"][1]["settings"].items()}
    assert rates == {"1": 0.6, "3": 0.8}
    assert document["commit"]
    assert document["environment"]["torch"]
    first = (out / "compare.json").read_bytes()
    killed = compare._places(out, Suite.read(suite).jobs()[0])[2]
    killed.unlink()  # as a kill leaves it
    again = run_suite(Suite.read(suite), out, command="sordino compare suite.toml")
    assert here[5:] == [here[0]]
    assert [row["mean"] for row in again["table"]] == [row["mean"] for row in json.loads(first)["table"]]
    assert (out / "compare.html").read_text() == render(json.loads((out / "compare.json").read_text()))


def test_the_command_makes_a_page_from_the_json_alone(
    suite: Path, tmp_path: Path, here: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["compare", str(suite), "--epsilon", "3", "--seeds", "0", "--only", "slow", "open", "--out", str(out)]
    assert main([*command, "--json"]) == 0
    printed = capsys.readouterr()
    assert "1 of 2: slow ε = 3 seed 0:" in printed.err
    document = json.loads(printed.out)
    assert document["command"].endswith("suite.toml --epsilon 3 --seeds 0 --only slow open")
    assert [row["method"] for row in document["table"]] == ["slow", "open"]
    page = tmp_path / "page.html"
    assert main(["compare", str(out / "compare.json"), "--out", str(page)]) == 0
    assert page.read_text() == (out / "compare.html").read_text()
    assert "there is no privacy guarantee" in page.read_text()
    assert main(["compare", str(suite), "--only", "quick"]) == 2
    assert "'quick'" in capsys.readouterr().err


def test_what_is_there_is_collected_and_nothing_is_run(suite: Path, tmp_path: Path, here: list[str]) -> None:
    out = tmp_path / "out"
    whole, part = Suite.read(suite), Suite.read(suite)
    part = replace(part, epsilons=(3.0,), methods=(part.methods[0], part.methods[2]))
    with pytest.raises(InputError, match="nothing to collect"):
        run_suite(whole, out, command="sordino compare suite.toml", collect=True)
    run_suite(part, out, command="sordino compare suite.toml --epsilon 3 --only slow open")
    assert len(here) == 2
    document = run_suite(whole, out, command="sordino compare suite.toml", collect=True)
    assert len(here) == 2
    assert (len(document["runs"]), document["planned"], document["complete"]) == (2, 5, False)
    assert [(row["method"], row["epsilon"]) for row in document["table"]] == [("slow", 3.0), ("open", None)]
    assert json.loads((out / "compare.json").read_text())["planned"] == 5


def test_runs_of_an_earlier_result_are_taken_from_it_if_nothing_differs(
    suite: Path, tmp_path: Path, here: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = Suite.read(suite)
    before = run_suite(replace(whole, methods=whole.methods[:2]), tmp_path / "one", command="sordino compare")
    before["runs"][0]["commit"] = "abc"
    path = tmp_path / "earlier.json"
    path.write_text(json.dumps(before))
    suite.write_text(SUITE.replace('"train.lr=0.8"', '"train.lr=0.9"'))
    assert main(["compare", str(suite), "--earlier", str(path), "--out", str(tmp_path / "two")]) == 0
    assert len(here) == 4 + 2
    assert {name.split("-")[0] for name in here[4:]} == {"fast", "open"}  # another step size, and what was not there
    again = json.loads((tmp_path / "two" / "compare.json").read_text())
    assert again["complete"]
    same = [run for run in before["runs"] if (run["method"], run["target_epsilon"]) != ("fast", 3.0)]
    assert [run for run in again["runs"] if run in same] == same  # each with its own commit
    for key, value in (("torch", "1.0"), ("insecure_seeds", False)):
        other = before | {"environment": {"torch": value}} if key == "torch" else before | {key: value}
        with pytest.raises(InputError, match=key):
            run_suite(whole, tmp_path / "three", command="sordino compare", earlier=other)


def test_a_run_is_a_process_of_its_own_and_one_that_dies_is_told(
    suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Suite.read(suite).jobs()[0]
    found = compare._made(tmp_path / "out", job, job.recipe(), None)
    assert 0 < found["test_accuracy"] < 1
    monkeypatch.setattr(compare.sys, "executable", "/bin/false")
    assert "without an outcome" in compare._made(tmp_path / "out", job, job.recipe(), None)["error"]


STARTER = """
import subprocess, sys, time
job = [sys.executable, "-m", "sordino.runs.compare_job", "private", sys.argv[1]]
print(subprocess.Popen(job).pid, flush=True)
time.sleep(600)
"""


def test_a_run_ends_with_a_comparison_that_is_killed(tmp_path: Path) -> None:
    """It would hold the lock of its directory, and the comparison started again would find the run in use."""
    folder = tmp_path / "run"
    steps = {"train": {"steps": 100_000, "chunk": 4096}, "sampling": {"expected_batch": 4000}}
    (tmp_path / "run.toml").write_text(small_toml(**steps))
    starter = subprocess.Popen([sys.executable, "-c", STARTER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    child = int(starter.stdout.readline())
    _until(lambda: (folder / "ledger.jsonl").exists())
    starter.kill()
    starter.wait()
    _until(lambda: not _runs(child))
    assert not (tmp_path / "run.outcome.json").exists()


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.05)


def change(old: str, new: str) -> Callable[[str], str]:
    return lambda text: text.replace(old, new)


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        (change('assumes = "nothing"', 'assume = "nothing"'), "assumes"),
        (change("train.lr=0.8", "privacy.epsilon=9"), "is set by the suite"),
        (change("train.lr=0.8", "privacy.noise_multiplier=1"), "is set by the suite"),
        (change("train.lr=0.8", "train.learning=9"), "learning"),
        (change("train.lr=0.8", "features.name=scatter"), "scattering"),
        (change('"1" =', '"2" ='), "not one of the suite's epsilons"),
        (change('kind = "plain"', 'kind = "plane"'), "plain"),
        (change("seeds = [0]", "seeds = [0, 0]"), "different whole numbers"),
        (change("seeds = [0]", 'baseline = "fats"'), "fast"),
        (change('name = "fast"', 'name = "slow"'), "two methods"),
        (change("epsilons = [1, 3]", "epsilons = [1, -3]"), "positive"),
        (change("delta = 1e-5", "delta = 2"), "delta"),
        (change('recipe = "recipe.toml"', 'recipe = "none.toml"'), "no recipe"),
        (change('recipe = "recipe.toml"', 'best = "imagenet"'), "known names are"),
        (lambda text: "[[", "TOML"),
    ],
)
def test_what_is_wrong_with_a_suite_is_found_before_anything_is_written(
    suite: Path, tmp_path: Path, changed: Callable[[str], str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    suite.write_text(changed(SUITE))
    assert main(["compare", str(suite), "--out", str(tmp_path / "out")]) == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_directory_of_another_suite_is_refused(suite: Path, tmp_path: Path) -> None:
    job = Suite.read(suite).jobs()[0]
    path = compare._places(tmp_path / "out", job)[1]
    path.parent.mkdir(parents=True)
    path.write_text(RECIPE)
    with pytest.raises(InputError, match="another recipe"):
        run_suite(Suite.read(suite), tmp_path / "out", command="")


def test_means_spreads_and_paired_differences_are_those_of_the_runs(suite: Path) -> None:
    runs = [
        {
            "method": name,
            "target_epsilon": 1.0,
            "seed": seed,
            "test_accuracy": value,
            "core_seconds": 2.0,
            "epsilon": 1.0,
        }
        for name, values in {"slow": (0.5, 0.7), "fast": (0.6, 0.9)}.items()
        for seed, value in enumerate(values)
    ]
    runs.append({"method": "fast", "target_epsilon": 3.0, "seed": 0, "error": "no"})
    found = table(Suite.read(suite), runs)
    assert [(r["method"], r["mean"], r["failed"]) for r in found][:2] == [("slow", 0.6, 0), ("fast", 0.75, 0)]
    assert found[2]["mean"] is None
    assert accuracy(found[0], 2) == "60.00 ± 14.14"
    assert accuracy(found[0], 3) == "60.00 ± 14.14 (2)"  # a seed is missing, and the cell shows it
    (pair,) = differences(replace(Suite.read(suite), seeds=(0, 1)), runs)
    assert pair["mean"] == pytest.approx(0.15)
    assert pair["spread"] == pytest.approx(0.05 * 2**0.5)
    assert pair["interval"] == pytest.approx(12.706 * 0.05, rel=1e-3)  # Student's, one degree of freedom


def test_the_page_names_a_failed_run_without_privacy(suite: Path) -> None:
    """Its ε is none, which no page writes as a number."""
    whole = Suite.read(suite)
    recipes = {job: job.recipe() for job in whole.jobs()}
    outcomes = {job: {"error": "RuntimeError"} for job in recipes if job.method.kind == "plain"}
    about = {"command": "", "commit": "", "environment": {"torch": ""}}
    page = render(compare.result_of(whole, recipes, outcomes, about))
    assert "<li>open, without privacy, seed 0: RuntimeError</li>" in page


@pytest.mark.parametrize(
    "damage",
    [
        {"table": "x"}, {"table": [{"method": "slow"}]}, {"epsilons": "a"}, {"epsilons": [-1]}, {"environment": 3},
        {"differences": [{}]}, {"methods": [{}]}, {"runs": 1},
    ],
)  # fmt: skip
def test_a_damaged_result_makes_no_page_and_no_traceback(
    suite: Path, tmp_path: Path, damage: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = Suite.read(suite)
    recipes = {job: job.recipe() for job in whole.jobs()}
    outcomes = {job: {"test_accuracy": 0.5, "epsilon": job.epsilon, "core_seconds": 1.0} for job in recipes}
    about = {"command": "", "commit": "", "environment": {"torch": ""}}
    document = compare.result_of(whole, recipes, outcomes, about)
    path, page = tmp_path / "compare.json", tmp_path / "page.html"
    path.write_text(json.dumps(document))
    assert main(["compare", str(path), "--out", str(page)]) == 0
    page.unlink()
    path.write_text(json.dumps(document | damage))
    assert main(["compare", str(path), "--out", str(page)]) == 2
    assert "is damaged" in capsys.readouterr().err
    assert not page.exists()


def test_data_of_one_s_own_is_compared_only_where_it_is_declared_public(suite: Path, tmp_path: Path) -> None:
    """All runs are seen, one without privacy among them, and no ε covers them together."""
    columns = {"a": {"kind": "number", "low": 0, "high": 1}}
    own = {"name": "csv", "records": 100, "path": "v.csv", "target": "y", "classes": 2, "columns": columns}
    privacy = {"insecure_seed": None, "noise_multiplier": None, "epsilon": 3.0, "delta": 1e-5}
    (tmp_path / "recipe.toml").write_text(small_toml(data=own, privacy=privacy))
    with pytest.raises(Refused, match="public_data"):
        compare.checked(Suite.read(suite))
    suite.write_text('public_data = "synthetic rows"\n' + SUITE)
    assert len(compare.checked(Suite.read(suite))) == 5
