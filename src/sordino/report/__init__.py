"""The report for a privacy reviewer: one self-contained HTML file that fetches nothing.

`write(run_dir)` reads the files of a run (recipe.toml, ledger.jsonl, metrics.jsonl, result.json; audit.json,
membership.json, histogram.json and pictures.json if they exist) and atomically writes report.html into the same
directory. Everything that comes from a file is escaped; the page's Content-Security-Policy allows only its own style
sheet.

Edge cases: a missing required file is an InputError that names it; an incomplete last line of metrics.jsonl (killed
process) is left out; the page says so if there is no audit, no membership inference or no histogram.
"""

from __future__ import annotations

from pathlib import Path

from sordino.files import write_atomically
from sordino.report.page import render
from sordino.report.reading import read_run

__all__ = ["read_run", "render", "write"]


def write(run_dir: Path | str) -> Path:
    """Writes the report of a run into its directory.

    Args:
        run_dir: The directory of a finished run.

    Returns:
        The path of report.html.

    Raises:
        InputError: a file of the run is missing or can't be read.
    """
    folder = Path(run_dir)
    path = folder / "report.html"
    write_atomically(path, render(read_run(folder)).encode("utf8"))
    return path
