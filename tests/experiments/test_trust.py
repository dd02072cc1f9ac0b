"""The page of what was tried agrees with the result files, and nothing in them was found, lost or not caught."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "experiments"))

import breaks  # type: ignore[import-not-found] # noqa: E402
import everything  # type: ignore[import-not-found] # noqa: E402
import trust  # type: ignore[import-not-found] # noqa: E402


def test_the_page_is_what_the_files_say() -> None:
    assert (ROOT / "docs" / "trust.md").read_text(encoding="utf8") == trust.page(trust.known_rows())


def test_every_recipe_was_attacked_and_nothing_was_found() -> None:
    rows = trust.known_rows()
    assert [row["recipe"] for row in rows] == list(trust.NAMES)
    assert not [row["found"] for row in rows if row["found"]]
    assert all(row["audit"] is None or row["audit"]["epsilon_lower"] <= row["audit"]["epsilon_claimed"] for row in rows)


def test_every_break_has_tests_that_exist() -> None:
    assert [number for number, *_ in breaks.BREAKS] == list(range(1, 11))
    for *_, tests in breaks.BREAKS:
        assert tests
        for file, _, name in (test.partition("::") for test in tests):
            assert f"def {name}(" in (ROOT / file).read_text(encoding="utf8"), name


def test_every_break_was_seen_on_the_code_of_that_day() -> None:
    points = trust.read("breaks.json")["points"]
    assert {point["break"] for point in points} == set(range(1, 11))
    assert [point["point"] for point in points if not point["shown"]] == []
    assert len(points) == (ROOT / "experiments" / "old_points.py").read_text(encoding="utf8").count("@point(")


def test_the_page_says_whether_its_files_come_from_one_commit() -> None:
    one = {"trust.json": {"a"}, "mutants.json": {"a"}}
    assert "".join(trust.commit_lines(one)) == "Everything below was made by the code of one commit, a."
    for other in ({**one, "faults.json": {"b"}}, {**one, "trust.json": {"a", "b"}}, {**one, "faults.json": set()}):
        lines = "\n".join(trust.commit_lines(other))
        assert "different commits" in lines
        assert all(f"`{name}`" in lines for name in other)
    assert set(trust.commits()) == {
        "trust.json",
        "mutants.json",
        "forgeries.json",
        "faults.json",
        "audit_strength.json",
    }


def test_everything_is_refused_for_code_that_no_commit_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert everything.main("0123456789+changes", None) == 1
    assert "commit them first" in capsys.readouterr().out


def test_everything_runs_each_command_of_the_page_once() -> None:
    names = [command[0] for lane in everything.lanes("data") for command in lane]
    assert sorted(names) == ["audit_strength.py", "faults.py", "forged.py", "mutants.py", "trust.py"]
    assert all((ROOT / "experiments" / name).exists() for name in names)


def test_every_forgery_was_named() -> None:
    rows = trust.read("forgeries.json")["forgeries"]
    assert sum(row["expected"] is not None for row in rows) >= 20
    assert [row["forgery"] for row in rows if not row["right"]] == []


def test_no_fault_was_uncaught_or_lost_anything() -> None:
    faults = trust.read("faults.json")
    assert set(faults["parts"]) >= {"recipes", "datasets", "commands", "runs", "disk"}
    assert [faults[key] for key in ("uncaught", "left_behind", "entries_lost", "steps_redrawn")] == [0, 0, 0, 0]


def test_the_audit_shows_seven_tenths_of_a_true_epsilon_and_calls_none_broken() -> None:
    found = trust.read("audit_strength.json")["table"]
    for row in found["white"]:
        assert row["seeds"] >= 3
        assert row["median"]["share"] >= 0.7, (row["rate"], row["runs"])
        assert max(row["shares"]["share"]) <= 1.0
    assert {row["rate"] for row in found["white"]} == {1.0, 0.25, 0.05}
    for runs in ("1", "4"):
        assert found["false"][runs]["audits"] >= 200
        assert found["false"][runs]["called_broken"] == 0
    assert max(row["epsilon_lower"] for row in found["black"] if row["epsilon_claimed"] < 10) >= 6.48
