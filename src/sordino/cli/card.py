"""sordino card: the model card of a run, for people and for registries."""

from __future__ import annotations

import argparse
from pathlib import Path

from sordino.console import Commands, add_json, emit


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "card",
        help="write the model card of a run, in Markdown and YAML",
        description="Writes DIR/card.md (with what NIST SP 800-226 asks an evaluator to check), DIR/card.yaml (all "
        "fields) and DIR/registry.yaml (a record for OpenDP's registry of deployments, in its schema). The directory "
        "is verified first; one that is not genuine gets no card (exit code 3).",
        epilog="What only you can say (unit, trust, tuning, public_sources, collection, contact, …) goes into the "
        "recipe's [declaration]. Example: sordino card runs/demo",
    )
    parser.add_argument("directory", type=Path, metavar="DIR")
    add_json(parser)
    parser.set_defaults(run=_card)


def _card(arguments: argparse.Namespace) -> int:
    from sordino.runs.card import MARKDOWN, REGISTRY, YAML, undeclared, write_card

    fields = write_card(arguments.directory)
    names = {"card": MARKDOWN, "fields": YAML, "registry": REGISTRY}
    rows = {what: str(arguments.directory / name) for what, name in names.items()}
    if missing := undeclared(fields):
        rows["not declared"] = ", ".join(missing)
    emit(arguments, fields, rows)
    return 0
