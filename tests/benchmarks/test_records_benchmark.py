"""The benchmark of views and iterates: its page says what its file says, and its steps are those of a plan."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import records  # noqa: E402

RESULTS: dict[str, Any] = {
    "environment": {"cpu": "a processor", "versions": {"torch": "2"}, "date": "2026-01-01", "commit": "abc"},
    "settings": {"rounds": 1, "repeats": 2},
    "workloads": {
        "W3": {
            "title": "MNIST CNN",
            "records": 512,
            "cpu_ms": dict.fromkeys(records.SETTINGS, 100.0),
            "ratio": dict.fromkeys(records.SETTINGS, 2.5),
            "quartiles": {key: [2.4, 2.6] for key in records.SETTINGS},
            "extra_mb": dict.fromkeys(records.SETTINGS, 70.4),
        }
    },
}


def test_the_table_names_every_setting_with_its_goal() -> None:
    lines = records.table(RESULTS).splitlines()
    assert "| K₀ = 2 | 2.50 (2.40–2.60), 70 MB | 3.3 |" in lines
    assert "| 4 views | 2.50 (2.40–2.60), 70 MB | 4.4 |" in lines
    assert "| plain DP-SGD | 100 ms, 70 MB | 1.0 |" in lines


def test_filling_in_replaces_what_stands_between_the_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{records.BEGIN}\nold\n{records.END}\nafter\n")
    for _ in range(2):
        records.fill(page, RESULTS)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert text.count("K₀ = 1") == 1


def test_the_page_says_what_the_file_says() -> None:
    results = json.loads(records.RESULTS.read_text())
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf8")
    assert records.table(results) in page


@pytest.mark.parametrize("setting", ["plain", "iterates 3", "views 2"])
def test_a_step_can_be_taken(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(records.TITLES, "W3", ("MNIST CNN", 4))
    step, early = records.stepper("W3", setting)
    assert early == (3 if setting == "iterates 3" else 1)
    for _ in range(early + 1):
        step()
