"""sordino budget: what all runs on a dataset may spend together, and have spent."""

from __future__ import annotations

import argparse
from pathlib import Path

from sordino.checks import RELATIONS
from sordino.console import Commands, add_json, emit, finite


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "budget",
        help="a joint budget for all runs on a dataset",
        description="Stores, in one SQLite file, what all runs on a dataset have spent together, as composed by the "
        "accountant. A run with --budget FILE that would exceed the limit does not start.",
        epilog="Runs without --budget are not counted. The file is for the data's owner only (mode 0600): "
        "docs/threat-model.md says what it reveals.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    limit = actions.add_parser(
        "set",
        help="set the limit of a recipe's dataset",
        description="Sets (ε, δ) for all runs on the records of RECIPE together; creates FILE if needed.",
        epilog="example:\n  sordino budget set life.db recipe.toml --epsilon 3 --delta 1e-5",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    limit.add_argument("file", type=Path, metavar="FILE")
    limit.add_argument("recipe", type=Path, metavar="RECIPE.toml", help="any recipe on the dataset")
    limit.add_argument("--epsilon", type=float, required=True, metavar="ε")
    limit.add_argument("--delta", type=float, required=True, metavar="δ")
    limit.add_argument("--relation", choices=RELATIONS, default="add-remove", help="default: add-remove")
    limit.add_argument("--replace", action="store_true", help="change the limit of a dataset that has one")
    limit.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a key")
    limit.add_argument("--data-dir", type=Path, metavar="DIR", help="where the datasets are (default: $SORDINO_DATA)")
    add_json(limit)
    limit.set_defaults(run=_set)
    for name, text, function in (
        ("show", "what was spent, and by which runs", _show),
        ("settle", "count each killed run by what its ledger contains", _settle),
    ):
        action = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        action.add_argument("file", type=Path, metavar="FILE")
        add_json(action)
        action.set_defaults(run=function)


def _set(arguments: argparse.Namespace) -> int:
    from sordino.runs.budget import Budget
    from sordino.runs.recipe import Recipe

    recipe = Recipe.read(arguments.recipe, arguments.set)
    budget = Budget(arguments.file, create=True)
    digest = budget.digest(recipe, arguments.data_dir)
    budget.set(
        digest, recipe.data.name, arguments.epsilon, arguments.delta, arguments.relation, replace=arguments.replace
    )
    return _show(arguments)


def _show(arguments: argparse.Namespace) -> int:
    from sordino.runs.budget import Budget, shown

    document = finite({"datasets": [one.to_dict() for one in Budget(arguments.file).accounts()]})
    emit(arguments, document, shown(document))
    return 0


def _settle(arguments: argparse.Namespace) -> int:
    from sordino.runs.budget import Budget

    settled, left = Budget(arguments.file).settle_dead()
    rows = {"settled": ", ".join(settled) or "none", "left in full": ", ".join(left) or "none"}
    emit(arguments, {"settled": settled, "left": left}, rows)
    return 0
