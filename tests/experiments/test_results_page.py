"""experiments/RESULTS.md says what the result files say, and every result file says where it comes from."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "experiments"))

import results_page  # noqa: E402

FILES = sorted(results_page.RESULTS.glob("*.json"))


def test_the_page_is_what_the_result_files_say() -> None:
    assert results_page.PAGE.read_text(encoding="utf8") == results_page.page(), (
        "run: python experiments/results_page.py"
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_result_file_names_its_command_commit_and_torch_or_says_that_no_command_wrote_it(path: Path) -> None:
    document = json.loads(path.read_text(encoding="utf8"))
    if document.get("command") is None:
        assert "NOT written by" in document["note"]
        return
    assert document["command"].startswith(("python experiments/", "sordino "))
    script = ROOT / document["command"].split()[1]
    assert document["command"].startswith("sordino ") or script.exists()
    assert document["commit"]
    assert results_page.torch_version(document)


@cache
def history() -> list[str]:
    """The commits that HEAD has behind it; none without git, in an unpacked archive or in a shallow clone."""
    words = (["rev-parse", "--is-shallow-repository"], ["rev-list", "HEAD"])
    try:
        shallow, commits = (
            subprocess.run(["git", *one], cwd=ROOT, capture_output=True, text=True, check=True).stdout for one in words
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [] if shallow.strip() == "true" else commits.split()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_commit_that_a_result_file_names_is_in_the_history_or_the_file_says_that_it_is_not(path: Path) -> None:
    if not history():
        pytest.skip("no full history here")
    text = path.read_text(encoding="utf8")
    named = set(re.findall(r'"commit": "([0-9a-f]{7,40})(?:\+changes)?"', text))
    gone = {one for one in named if not any(whole.startswith(one) for whole in history())}
    note = json.loads(text).get("note") or ""
    assert not gone or ("in no history" in note and all(one in note for one in gone))


def test_a_changed_figure_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for path in FILES:
        text = path.read_text(encoding="utf8")
        (tmp_path / path.name).write_text(
            text.replace("0.8967666666666667", "0.9067666666666667") if "scattering_linear" in path.name else text
        )
    monkeypatch.setattr(results_page, "RESULTS", tmp_path)
    assert results_page.PAGE.read_text(encoding="utf8") != results_page.page()


def test_trainings_before_the_engine_are_marked_and_accounting_is_not() -> None:
    old = {"environment": {"finished": "2026-11-16T07:00:00Z"}}
    assert results_page.older("mac", old)
    assert not results_page.older("modelmix_fig3", old)
    assert not results_page.older("mac", {"written": results_page.ENGINE})
    assert not results_page.older("mac", {"commit": "1234567"})  # no day: not called old, and the page says so


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_commit_that_does_not_have_the_source_is_said_on_the_page(path: Path) -> None:
    text = path.read_text(encoding="utf8")
    said = "**Source that differed from its commit**" in results_page.section(path)
    assert said == ("+changes" in text)


def test_runs_from_changed_source_are_counted_one_by_one() -> None:
    runs = [{"commit": "a"}, {"commit": "b+changes"}, {"commit": "b+changes"}]
    assert "2 of 3 runs (b+changes)" in str(results_page.unclean({"commit": "c", "runs": runs}))
    assert "This file (c+changes)" in str(results_page.unclean({"commit": "c+changes"}))
    assert results_page.unclean({"commit": "c", "runs": runs[:1]}) is None
