"""The engine benchmark runs from end to end, resumes, survives a peer's crash, and its tables say what it saw."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/engine.py, imported: each engine that it measures is a process of its own all the same."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("engine")


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    import peers.tables

    return peers.tables


def measurement(engine: str, turn: int, seconds: float, extra: int) -> dict[str, Any]:
    turns = [[cycle, seconds * slow, seconds * slow] for cycle, slow in enumerate((1.0, 3.0, 1.0))]
    numbers = {"seconds": seconds, "cpu_seconds": seconds, "extra_bytes": extra, "phases": {}, "turns": turns}
    return {"workload": "W2", "engine": engine, "round": turn, "status": "ok", **numbers}


@pytest.fixture
def results() -> dict[str, Any]:
    """The second round was twice as slow for everybody: ratios are taken within a round."""
    crash = {"workload": "W2", "engine": "vmap", "round": 0, "status": "error", "error": "RuntimeError: no rule"}
    return {
        "environment": {"cpu": "a CPU", "cores": 2, "versions": {"torch": "2"}, "python": "3", "date": "today"},
        "settings": {
            "workloads": ["W2"],
            "engines": ["plain", "sordino", "opacus-ghost", "vmap", "fastdp"],
            "rounds": 2,
            "turn": 0.1,
            "threads": 1,
            "records": {"W2": 1000},
        },
        "absent": {"fastdp": "not installed"},
        "checks": {},
        "measurements": [
            measurement("plain", 0, 0.010, 10_000_000),
            measurement("sordino", 0, 0.012, 15_000_000),
            measurement("opacus-ghost", 0, 0.030, 20_000_000),
            crash,
            measurement("plain", 1, 0.020, 10_000_000),
            measurement("sordino", 1, 0.026, 15_000_000),
        ],
    }


def test_ratios_are_taken_within_a_round(tables: Any, results: dict[str, Any]) -> None:
    assert tables.ratios(results, "W2", "sordino", "seconds") == pytest.approx([1.2, 1.3])
    assert tables.ratios(results, "W2", "opacus-ghost", "seconds") == pytest.approx([3.0])


def test_a_ratio_of_times_is_taken_between_turns_side_by_side(tables: Any, results: dict[str, Any]) -> None:
    """The machine was three times slower in the second cycle, the only one in which the peer had a turn."""
    peer = next(m for m in results["measurements"] if m["engine"] == "opacus-ghost")
    peer["turns"] = [[1, 0.090, 0.090]]
    assert tables.ratios(results, "W2", "opacus-ghost", "seconds") == pytest.approx([3.0])


def test_tables_show_median_spread_crash_and_absence(tables: Any, results: dict[str, Any]) -> None:
    text = tables.tables(results)
    assert "| sordino | 1.25 (1.20–1.30) |" in text
    assert "| sordino | 1.50 (1.50–1.50) |" in text
    assert "| Opacus ghost | 3.00 |" in text
    assert "| torch.func vmap(grad), by hand | error |" in text
    assert "| fastDP MixOpt | absent |" in text
    assert "RuntimeError: no rule" in text


def test_tables_fill_a_document_between_its_markers(tables: Any, results: dict[str, Any], tmp_path: Path) -> None:
    document = tmp_path / "benchmarks.md"
    document.write_text(f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n")
    tables.fill(document, results)
    text = document.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| sordino | 1.25 (1.20–1.30) |" in text


def test_a_summary_has_medians_alone_of_the_engines_that_ran(
    tables: Any, results: dict[str, Any], tmp_path: Path
) -> None:
    document = tmp_path / "README.md"
    document.write_text(f"before\n{tables.SHORT_BEGIN}\nold\n{tables.SHORT_END}\nafter\n")
    tables.fill(document, results)
    text = document.read_text()
    assert "| MLP 784-300-10, batch 1000 | 1.25 | 3.00 | – |" in text
    assert "fastDP" not in text
    assert "old" not in text
    (tmp_path / "other.md").write_text("nothing to fill")
    with pytest.raises(SystemExit, match="to fill"):
        tables.fill(tmp_path / "other.md", results)


def test_a_small_run_is_checked_written_resumed_and_guarded(engine: Any, tmp_path: Path) -> None:
    out = tmp_path / "engine.json"
    small = ["--workloads", "W2", "--engines", "plain", "sordino", "--records", "8", "--rounds", "1", "--budget", "0"]
    engine.main([*small, "--out", str(out)])
    results = json.loads(out.read_text())
    assert results["checks"]["W2"]["sums_error"] <= 1e-8
    assert [m["engine"] for m in results["measurements"]] == ["plain", "sordino"]
    assert all(m["status"] == "ok" and m["seconds"] > 0 and m["extra_bytes"] > 0 for m in results["measurements"])
    assert set(results["measurements"][1]["phases"]) == {"gradients", "release", "update"}
    cycles = [[turn[0] for turn in m["turns"]] for m in results["measurements"]]
    assert set(cycles[1]) <= set(cycles[0]), "each turn has one of plain's beside it"

    engine.main([*small, "--out", str(out)])
    assert json.loads(out.read_text())["measurements"] == results["measurements"], "a second run measures nothing anew"

    with pytest.raises(SystemExit, match=r"threads.*--fresh"):
        engine.main([*small, "--threads", "2", "--out", str(out)])


def test_a_crash_is_recorded_and_not_fatal(engine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An impossible time limit stands for a peer that dies: it ends up in the JSON and in the table."""
    out = tmp_path / "engine.json"
    options = ["--workloads", "W1", "--engines", "plain", "--records", "8", "--rounds", "1", "--timeout", "0.01"]
    engine.main([*options, "--out", str(out)])
    (only,) = json.loads(out.read_text())["measurements"]
    assert only["status"] == "timeout"
    assert "timeout" in capsys.readouterr().out


def test_workloads_are_measured_one_at_a_time_into_one_file(
    engine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Peers are left out: they know cross-entropy and plain torch modules, and are measured on the six alone."""
    out = tmp_path / "heldout.json"
    small = ["--engines", "plain", "vmap", "--records", "6", "--rounds", "1", "--budget", "0", "--out", str(out)]
    engine.main(["--only", "mlp10", *small])
    first = json.loads(out.read_text())
    engine.main(["--only", "logistic", *small])
    both = json.loads(out.read_text())
    assert both["settings"]["workloads"] == ["mlp10", "logistic"]
    assert both["measurements"][:1] == first["measurements"], "what was there stays"
    assert [(m["workload"], m["engine"]) for m in both["measurements"]] == [("mlp10", "plain"), ("logistic", "plain")]
    assert len(both["commands"]) == 2
    assert all(m["commit"] == first["environment"]["commit"] for m in both["measurements"])

    capsys.readouterr()
    engine.main(["--only", "mlp10", "--fresh", *small])
    anew = json.loads(out.read_text())
    assert [m for m in anew["measurements"] if m["workload"] == "logistic"] == both["measurements"][1:]
    assert [m for m in anew["measurements"] if m["workload"] == "mlp10"] != both["measurements"][:1]
    assert "| MLP 784-300-10, batch 6 |" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="other records of mlp10"):
        engine.main(["--only", "mlp10", *small[:3], "--records", "7", *small[5:]])


def test_a_held_out_workload_that_is_wrong_is_not_timed(tables: Any, results: dict[str, Any]) -> None:
    results["settings"] |= {"workloads": ["vit"], "records": {"vit": 32}}
    results["checks"] = {"vit": {"error": "AssertionError: off the plain loop"}}
    results["measurements"] = []
    text = tables.tables(results)
    assert "sordino on vit: not timed, for its check failed: AssertionError: off the plain loop" in text


def test_the_first_steps_extra_time_is_a_share_of_a_run(tables: Any, results: dict[str, Any]) -> None:
    ours = [m for m in results["measurements"] if m["engine"] == "sordino"]
    ours[0]["first_seconds"], ours[1]["first_seconds"] = 0.012 * 3, 0.026 * 5
    assert tables.first_share(results, "W2", "sordino") == pytest.approx(3 / 200)
    assert tables.first_share(results, "W2", "plain") is None


def test_a_step_is_measured_part_by_part_and_the_file_gives_the_table(
    engine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts, out, page = importlib.import_module("step_parts"), tmp_path / "parts.json", tmp_path / "page.md"
    parts.main(["--only", "mlp10", "--seconds", "0.01", "--out", str(out)])
    (found,) = json.loads(out.read_text())["measurements"]
    assert [row["steps"] for row in found["rows"]] == [4] * 9
    assert all(row["wall_seconds"] > 0 for row in found["rows"])
    page.write_text("<!-- parts:begin -->old<!-- parts:end -->")
    parts.main(["--table", str(out), "--into", str(page)])
    assert "old" not in page.read_text()
    assert page.read_text().count("\n| ") == 10
    assert "MLP 784-300-10, batch 10" in capsys.readouterr().out
