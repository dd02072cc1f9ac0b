"""The page that a privacy reviewer reads: one HTML file, self-contained, that fetches nothing.

`write(run_dir)` reads what a run left behind (recipe.toml, ledger.jsonl, metrics.jsonl, result.json; if there:
audit.json, histogram.json) and writes report.html into the same directory, whole or not at all. Everything that comes
from a file is escaped; the page carries a Content-Security-Policy that allows its own style sheet and nothing else.

Edge cases: a missing required file is an InputError that names it; a last line of metrics.jsonl that was torn by
a kill is left out; optional files that are not there are said to be missing, in words, on the page.
"""

from __future__ import annotations

from pathlib import Path

from sordino.files import write_atomically
from sordino.report.page import render
from sordino.report.reading import read_run

__all__ = ["read_run", "render", "write"]


def write(run_dir: Path | str) -> Path:
    """Writes `run_dir/report.html` and returns its path."""
    folder = Path(run_dir)
    path = folder / "report.html"
    write_atomically(path, render(read_run(folder)).encode("utf8"))
    return path
