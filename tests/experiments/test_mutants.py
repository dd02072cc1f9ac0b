"""Mutants of our own code: each still applies to the source, and a quick one is caught as the long table says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import sordino

ROOT = Path(__file__).parents[2]
SOURCE = Path(sordino.__file__).parent
TABLE = ROOT / "experiments" / "results" / "mutants.json"
MUTANTS = tomllib.loads((ROOT / "experiments" / "mutants.toml").read_text(encoding="utf8"))["mutant"]


def test_there_are_at_least_twenty_with_names_of_their_own() -> None:
    assert len({mutant["name"] for mutant in MUTANTS}) == len(MUTANTS) >= 20


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant["name"])
def test_its_text_is_in_the_source_exactly_once(mutant: dict[str, list[dict[str, str]]]) -> None:
    for edit in mutant["edits"]:
        assert (SOURCE / edit["file"]).read_text(encoding="utf8").count(edit["old"]) == 1, edit["file"]


def test_a_record_that_is_always_drawn_is_caught_and_the_unchanged_code_is_not(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "experiments" / "mutants.py"), "one record is always drawn"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(SOURCE.parent),
        "OMP_NUM_THREADS": "1",
        "MUTANTS_RESULTS": str(tmp_path),
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 mutants caught" in done.stdout
    assert "nothing found" in done.stdout


@pytest.mark.skipif(not TABLE.exists(), reason="experiments/mutants.py has not been run")
def test_the_table_has_every_mutant_on_one_commit_and_each_was_caught() -> None:
    document = json.loads(TABLE.read_text(encoding="utf8"))
    rows = document["mutants"]
    assert {row["mutant"] for row in rows} - {"none"} == {mutant["name"] for mutant in MUTANTS}, "in one run, every one"
    assert {row["recipe"] for row in rows if row["mutant"] == "none"} == {mutant["recipe"] for mutant in MUTANTS}
    assert "+changes" not in document["commit"]
    assert all(row["caught"] == (row["mutant"] != "none") for row in rows)
