"""sordino attack: an adversary who tries to break a recipe's guarantee."""

from __future__ import annotations

import argparse
import sys
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING

from sordino.console import Commands, add_json, emit
from sordino.shown import down, up

if TYPE_CHECKING:
    from sordino.runs.recipe import Recipe


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "attack",
        help="try to break a recipe's guarantee in every known way; exit code 3 if one succeeds",
        description="Runs the recipe's whole pipeline on neighbouring datasets with artificial records (extreme, tiny, "
        "huge, NaN, cancelling, repeated), replays its releases on other records, and tests its noise, its "
        "ledger, its sampling, its resume and, with canaries, its ε. Nothing is written. Use public records: the "
        "output depends on them. Exit code 0: nothing found; 3: a counter-example.",
        epilog="example: sordino attack --quick",
    )
    parser.add_argument(
        "recipe", nargs="?", type=Path, metavar="RECIPE.toml", help="default: the built-in one of audit"
    )
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a key")
    parser.add_argument("--quick", action="store_true", help="fewer records and steps: seconds, not minutes")
    parser.add_argument(
        "--only", action="append", default=[], metavar="CHECK", help="one of the checks; may be repeated"
    )
    parser.add_argument("--first", action="store_true", help="stop at the first check that finds something")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of search and audit (default: 0)")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="where the datasets are (default: $SORDINO_DATA)")
    add_json(parser)
    parser.set_defaults(run=_attack)


def _attack(arguments: argparse.Namespace) -> int:
    from sordino.audit.attack import attack
    from sordino.runs.prepared import work_of

    recipe = _recipe(arguments)
    work = work_of(recipe, arguments.data_dir, None)
    result = attack(
        work, name=recipe.run.name, quick=arguments.quick, seed=arguments.seed, only=arguments.only,
        first=arguments.first, say=lambda text: print(text, file=sys.stderr, flush=True),
    )  # fmt: skip
    rows = {
        "verdict": "nothing found" if result.holds else f"BROKEN: {len(result.found)} found",
        "ε, claimed": f"{up(result.epsilon_claimed)} at δ = {up(result.delta)}, {result.relation}, {result.method}",
    }
    if result.audit is not None:
        audit = result.audit
        rows["ε, lower bound"] = f"{down(audit.epsilon_lower)} of {up(audit.epsilon_claimed)} in {audit.steps} steps"
    for check in result.checks:
        rows[check.name] = "; ".join(check.found) or f"nothing found: {check.detail}"
    emit(arguments, result.to_dict(), rows)
    result.check()
    return 0


def _recipe(arguments: argparse.Namespace) -> Recipe:
    from sordino.runs.recipe import Recipe

    if arguments.recipe is not None:
        return Recipe.read(arguments.recipe, arguments.set)
    with as_file(files("sordino") / "recipes" / "audit.toml") as path:
        return Recipe.read(path, arguments.set)
