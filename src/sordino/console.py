"""Shared by all commands: the parser's help format, common flags, and output as a table or as one JSON object."""

from __future__ import annotations

import argparse
import json
import math
import textwrap
from collections.abc import Mapping
from typing import Any

Commands = Any  # argparse's subparsers action, whose type is private


class HelpFormatter(argparse.HelpFormatter):
    """Breaks lines only between words, so that an example is not cut inside a flag."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = textwrap.wrap(" ".join(text.split()), width - len(indent), break_on_hyphens=False)
        return "\n".join(indent + line for line in lines)


class Parser(argparse.ArgumentParser):
    """A parser that formats its help, and that of its commands, with `HelpFormatter`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": HelpFormatter, **options})


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def add_code(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow-code",
        action="store_true",
        help="run the module:function names in the recipe's [data] and [model]; without this flag no code is run",
    )


def emit(arguments: argparse.Namespace, document: Mapping[str, Any], rows: Mapping[str, str]) -> None:
    """Prints the document as JSON if --json was given, else the rows as a table."""
    if arguments.json:
        print(json.dumps(finite(document), ensure_ascii=False))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    for name, text in rows.items():
        table.add_row(f"[bold]{name}", text)
    Console(width=None if Console().is_terminal else 110).print(table)


def finite(value: Any) -> Any:
    """The value with infinities and NaN replaced by None: JSON has neither."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return value
