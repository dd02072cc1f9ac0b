"""sordino verify: checks that a run directory is genuine, for a reviewer."""

from __future__ import annotations

import argparse
from pathlib import Path

from sordino.console import Commands, add_json, emit


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "verify",
        help="check that a run directory is genuine and recompute its epsilon",
        description="Recomputes epsilon from the ledger and its header, and compares ledger, plan, recipe, model, "
        "result, metrics and report page with each other. Exit codes: 0 genuine, 3 not (each disagreement is "
        "named), 2 not a run directory.",
        epilog="If everything in a directory was rewritten consistently, only a signature shows it: the owner trains "
        "with --sign KEY and publishes the public key. Example: sordino verify runs/demo --public-key owner.pub",
    )
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument(
        "--public-key", type=Path, metavar="FILE", help="the run must be signed by this Ed25519 key (PEM or OpenSSH)"
    )
    add_json(parser)
    parser.set_defaults(run=_verify)


def _verify(arguments: argparse.Namespace) -> int:
    from rich.markup import escape

    from sordino.runs.verify import verify
    from sordino.shown import up

    verdict = verify(arguments.directory, arguments.public_key)
    rows = {"verdict": "genuine" if verdict.genuine else "NOT GENUINE"}
    if verdict.epsilon is not None and verdict.delta is not None:
        rows["ε from the ledger"] = f"{up(verdict.epsilon, 6)} at δ = {up(verdict.delta)}, {verdict.relation}"
    if verdict.secure is False:
        rows["insecure seed"] = "there is no guarantee against anyone who knows the seed"
    if verdict.adopted:
        rows["adopted"] = f"{verdict.adopted} times: the owner states that no other copy was continued"
    if verdict.not_covered:
        rows["not covered"] = f"{', '.join(verdict.not_covered)}: no hash of the run covers them"
    rows |= {f"{'✓' if check.ok else '✕'} {check.name}": check.why for check in verdict.checks}
    emit(arguments, verdict.to_dict(), {name: escape(text) for name, text in rows.items()})
    return 0 if verdict.genuine else 3
