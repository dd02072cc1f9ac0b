"""sordino account, sordino calibrate: the ε of a mechanism, and the noise for a target ε."""

from __future__ import annotations

from sordino.console import Commands
from sordino.registry import default, flag_modules, other_methods, without_flags


def add(commands: Commands) -> None:
    more = f"steps of {' and '.join(without_flags())} cost the same as those of {default()}: use that"
    account = commands.add_parser(
        "account",
        help="the ε of a mechanism",
        description="The ε of a mechanism: an upper bound, and its theorem.",
        epilog=more,
    )
    calibrate = commands.add_parser(
        "calibrate",
        help="the noise for a target ε",
        description="The smallest noise that keeps ε within a target.",
        epilog=more,
    )
    methods = {"title": "methods", "metavar": "METHOD", "required": True}
    parsers = account.add_subparsers(**methods), calibrate.add_subparsers(**methods)
    for flags in flag_modules():  # each method adds its own
        flags.add(*parsers)
    for method in other_methods():
        method.add_flags(*parsers)
