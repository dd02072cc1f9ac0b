"""docs/engine_lines.md is what its file says; every example was seen on the old engine; the named tests exist."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "experiments"))

import old_engine  # type: ignore[import-not-found] # noqa: E402

DOCUMENT = json.loads(old_engine.TARGET.read_text(encoding="utf8"))


def test_the_page_is_what_the_file_says() -> None:
    assert old_engine.PAGE.read_text(encoding="utf8") == old_engine.page(), "python experiments/old_engine.py --page"


def test_every_example_was_tried_and_is_shown_on_the_old_engine_and_not_on_today_s() -> None:
    assert [row["point"] for row in DOCUMENT["points"]] == list(old_engine.points())
    assert len(DOCUMENT["points"]) > 70
    assert [row["point"] for row in DOCUMENT["points"] if old_engine.status(row) != "shown, mended"] == []


def test_a_fault_that_is_not_shown_or_not_mended_is_said() -> None:
    right, wrong = {"wrong": False, "seen": "s"}, {"wrong": True, "seen": "s"}
    assert old_engine.status({"old": right, "today": right}) == "not shown on the old code"
    assert old_engine.status({"old": wrong, "today": wrong}) == "STILL WRONG"
    name = next(iter(old_engine.points()))
    text = "\n".join(old_engine.lines([{"point": name, "old": right, "today": wrong}]))
    assert "**not shown**" in text
    assert "**still wrong**" in text


def test_every_test_that_is_named_exists() -> None:
    for name, one in old_engine.points().items():
        assert one.tests, name
        for test in one.tests:
            file, _, function = test.partition("::")
            assert f"def {function.partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf8"), test
