"""The README's Python examples run as they are printed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


def test_the_examples_run_and_print_epsilon_with_its_assumptions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf8"), re.S)
    assert len(blocks) == 2
    namespace: dict[str, object] = {}
    for block in blocks:
        assert len([line for line in block.splitlines() if line.strip()]) <= 15, "fifteen lines were promised"
        exec(compile(block, "README.md", "exec"), namespace)
    printed = capsys.readouterr().out
    (shown,) = re.findall(r"<!-- prints -->\n```text\n(.*?)```", README.read_text(encoding="utf8"), re.S)
    assert printed.split() == shown.split(), "the first screen shows what the code prints"
    assert "ε = 3" in printed or "ε = 2.99" in printed
    assert "It assumes" in printed
    assert len((tmp_path / "ledger.jsonl").read_text().splitlines()) == 1 + 196


def test_the_speeds_are_those_of_the_benchmark_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(README.parent / "benchmarks"))
    from peers import tables

    results = json.loads((README.parent / "benchmarks/results/engine.json").read_text())
    printed = README.read_text(encoding="utf8"), (README.parent / "docs/benchmarks.md").read_text(encoding="utf8")
    assert f"{tables.SHORT_BEGIN}\n{tables.summary(results)}\n{tables.SHORT_END}" in printed[0]
    assert f"{tables.BEGIN}\n{tables.tables(results)}\n{tables.END}" in printed[1]


def test_every_link_of_the_documentation_leads_somewhere() -> None:
    pages = [README, *README.parent.glob("docs/**/*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
