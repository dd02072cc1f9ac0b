"""sordino data: which datasets are known, where they come from, and whether the files are complete."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from sordino.console import Commands, add_json, emit

if TYPE_CHECKING:
    from sordino.data import Entry, Finding
    from sordino.training.progress import ProgressBar


def add(commands: Commands) -> None:
    parser = commands.add_parser("data", help="list, fetch and verify datasets", description=__doc__)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, help_text, function in (
        ("list", "the known datasets, and which are present", _list),
        ("fetch", "download a dataset from its canonical address, checked by SHA-256; resumes", _fetch),
        ("verify", "check the files of a dataset", _verify),
    ):
        action = actions.add_parser(name, help=help_text, description=help_text[0].upper() + help_text[1:] + ".")
        if name != "list":
            action.add_argument("name", metavar="NAME")
        action.add_argument("--data-dir", type=Path, metavar="DIR", help="default: $SORDINO_DATA, else ./data")
        add_json(action)
        action.set_defaults(run=function)


def _list(arguments: argparse.Namespace) -> int:
    from sordino.data import catalogue

    rows, table = [], {}
    for entry in catalogue():
        whole = _is_here(entry, arguments.data_dir)
        rows.append(
            {
                "name": entry.name,
                "title": entry.title,
                "records": entry.records[0],
                "test_records": entry.records[1],
                "classes": entry.classes,
                "licence": entry.licence,
                "here": whole,
            }
        )
        table[entry.name] = f"{'here' if whole else 'not here':9} {entry.records[0]:>7,} records  {entry.title}"
    emit(arguments, {"datasets": rows}, table)
    return 0


def _is_here(entry: Entry, data_dir: Path | None) -> bool:
    """Whether every file of one layout is present (`verify` checks their content)."""
    from sordino.data import data_directory
    from sordino.data.files import find_content
    from sordino.data.glove import TABLE, TEXTS

    root = data_directory(data_dir)
    if entry.vectors and not any((root / name).is_file() for name in (*TEXTS, TABLE)):
        return False
    return entry.embedded or any(all(find_content(root, c.path) for c in layout) for layout in entry.layouts)


def _fetch(arguments: argparse.Namespace) -> int:
    from sordino.data import fetch
    from sordino.training.progress import ProgressBar

    bars: dict[str, ProgressBar] = {}
    with ExitStack() as stack:

        def show(name: str, received: int, total: int | None) -> None:
            if name not in bars:
                bars[name] = stack.enter_context(ProgressBar(total or 0, label=name))
            bars[name].advance(received)

        findings = fetch(arguments.name, arguments.data_dir, show)
    return _emit_findings(arguments, findings)


def _verify(arguments: argparse.Namespace) -> int:
    from sordino.data import verify

    return _emit_findings(arguments, verify(arguments.name, arguments.data_dir))


def _emit_findings(arguments: argparse.Namespace, findings: Sequence[Finding]) -> int:
    """One line per file; exit code 2 if one is missing or wrong."""
    whole = all(finding.status == "ok" for finding in findings)
    rows = [{"path": str(f.path), "status": f.status, "detail": f.detail} for f in findings]
    document = {"name": arguments.name, "whole": whole, "files": rows}
    emit(arguments, document, {row["path"]: f"{row['status']}: {row['detail']}" for row in rows})
    return 0 if whole else 2
