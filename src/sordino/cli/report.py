"""sordino report: writes the report for a reviewer from the files of a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from sordino.console import Commands, add_json, emit


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "report",
        help="write the HTML report of a run",
        description="Writes DIR/report.html from the files of a run directory: one page, self-contained.",
    )
    parser.add_argument("directory", type=Path, metavar="DIR")
    add_json(parser)
    parser.set_defaults(run=_report)


def _report(arguments: argparse.Namespace) -> int:
    from sordino import report

    path = str(report.write(arguments.directory))
    emit(arguments, {"report": path}, {"report": path})
    return 0
