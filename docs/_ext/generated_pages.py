"""Pages of the reference that are made from the code when the site is built.

A page contains `<!-- generated: NAME -->`; before Sphinx parses it, the comment is replaced with the Markdown that the
function NAME of `PAGES` returns. Nothing is written into the source tree.
"""

from __future__ import annotations

import argparse
import inspect
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

MARK = re.compile(r"<!-- generated: (\w+) -->")


def recipe_keys() -> str:
    """A table for each section of a recipe: key, type, default, and the comment beside the field."""
    from sordino.runs.recipe import OPEN_SECTIONS, Recipe

    parts = []
    for name, section in typing.get_type_hints(Recipe).items():
        keys = [one for one in fields(section) if one.name != "options"]
        said = (inspect.getdoc(section) or "").strip()
        intro = [] if said.startswith(f"{section.__name__}(") else [_prose(said)]
        if name in OPEN_SECTIONS:
            intro.append(f"Further keys of `[{name}]` go to the part that the section names, which checks them.")
        parts += [f"## `[{name}]`", *intro, _key_table(section, keys)]
    return "\n\n".join(part for part in parts if part)


def method_keys() -> str:
    """For each method: its first sentence and the fields that its guarantee depends on."""
    from sordino import registry

    parts = []
    for name in registry.names():
        method = registry.method_class(name)
        keys = [one for one in fields(method) if one.init] if is_dataclass(method) else []
        parts += [f"## `{name}`", _prose(inspect.getdoc(method) or ""), _key_table(method, keys)]
    return "\n\n".join(part for part in parts if part)


def commands() -> str:
    """Every command and subcommand: what it does, how it is called, its arguments."""
    from sordino import cli

    return "\n\n".join(part for parser in _parsers(cli._parser()) for part in _command(parser))


PAGES: Mapping[str, Callable[[], str]] = {
    "recipe_keys": recipe_keys,
    "method_keys": method_keys,
    "commands": commands,
}


def _key_table(owner: type, keys: list[Field[Any]]) -> str:
    if not keys:
        return ""
    comments = _comments(owner)
    rows = [f"| `{key.name}` | `{_type(key)}` | {_default(key)} | {comments.get(key.name, '')} |" for key in keys]
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows])


def _comments(owner: type) -> dict[str, str]:
    """The comments at the ends of the lines that declare the fields, of base classes too."""
    found = {}
    for parent in reversed(owner.__mro__):
        if is_dataclass(parent):
            found |= dict(re.findall(r"^    (\w+): [^#\n]*#\s*(.+)$", inspect.getsource(parent), re.M))
    return {name: _cell(comment) for name, comment in found.items()}


def _type(key: Field[Any]) -> str:
    written = key.type if isinstance(key.type, str) else getattr(key.type, "__name__", str(key.type))
    return written.replace("|", "or").replace(" or None", "")


def _default(key: Field[Any]) -> str:
    if key.default is not MISSING:
        return "–" if key.default is None else f"`{_cell(repr(key.default))}`"
    if key.default_factory is not MISSING:
        return f"`{_cell(repr(key.default_factory()))}`"
    return "required"


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in dict.fromkeys(action.choices.values()):
                yield from _parsers(child)


def _command(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield f"{'##' if parser.prog.count(' ') < 2 else '###'} `{parser.prog}`"
    yield _prose(parser.description or "")
    usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
    yield f"```text\n{usage}\n```"
    rows = [row for action in parser._actions for row in _arguments(parser, action)]
    if rows:
        yield "\n".join(["| argument | what |", "|---|---|", *rows])
    if parser.epilog:
        yield _prose(parser.epilog)


def _arguments(parser: argparse.ArgumentParser, action: argparse.Action) -> Iterator[str]:
    if isinstance(action, argparse._HelpAction):
        return
    if isinstance(action, argparse._SubParsersAction):
        for choice in action._choices_actions:
            yield f"| `{choice.dest}` | {_cell(choice.help or '')} |"
        return
    shown = action.metavar or (
        "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper().replace("_", "-")
    )
    value = "" if action.nargs == 0 else " ".join(shown) if isinstance(shown, tuple) else str(shown)
    name = ", ".join(action.option_strings)
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    yield f"| `{_cell(' '.join(part for part in (name, value) if part))}` | {_cell(text)} |"


def _cell(text: str) -> str:
    return _prose(text).replace("|", "\\|").replace("\n", " ")


def _prose(text: str) -> str:
    """Plain text as Markdown: what would be taken for HTML, emphasis or a reference is escaped outside of code."""
    pieces = re.split(r"(`[^`\n]*`)", text.strip())
    return "".join(piece if piece.startswith("`") else re.sub(r"([<>*_\[\]])", r"\\\1", piece) for piece in pieces)


def _fill(app: Any, name: str, source: list[str]) -> None:
    source[0] = MARK.sub(lambda found: PAGES[found.group(1)](), source[0])


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", _fill)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
