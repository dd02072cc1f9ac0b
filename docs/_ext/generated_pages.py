"""Pages of the reference that are generated from the code when the site is built.

A page contains `<!-- generated: NAME -->`; before Sphinx parses it, the comment is replaced with the Markdown that the
function NAME of `PAGES` returns. Nothing is written into the source tree.
"""

from __future__ import annotations

import argparse
import inspect
import re
import textwrap
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from docutils import nodes

MARK = re.compile(r"<!-- generated: (\w+) -->")
WIDTH = 84  # characters of a literal block that fit on the page


def recipe_keys() -> str:
    """A table for each section of a recipe: key, type, default, and the comment next to the field."""
    from sordino.runs.recipe import OPEN_SECTIONS, Recipe

    parts = []
    for name, section in typing.get_type_hints(Recipe).items():
        keys = [one for one in fields(section) if one.name != "options"]
        said = (inspect.getdoc(section) or "").strip()
        intro = [] if said.startswith(f"{section.__name__}(") else [_prose(said)]
        if name in OPEN_SECTIONS:
            intro.append(f"Further keys of `[{name}]` are options of the part that it names: see below.")
        parts += [f"## `[{name}]`", *intro, _key_table(section, keys)]
    return "\n\n".join(part for part in parts if part)


def method_keys() -> str:
    """For each method: its first sentence, and the keys of [method] with their meaning."""
    from sordino import registry

    parts = []
    for name in registry.names():
        method, words = registry.method_class(name), registry.words(name)
        parts += [f"## `{name}`", _prose(inspect.getdoc(method) or "")]
        if words is None:  # a method of another package
            parts.append(_key_table(method, [one for one in fields(method) if one.init]))
            continue
        rows = [(key, f"{text}{_one_of(words.choices.get(key, ()))}") for key, text in words.keys.items()]
        parts.append(_table(("key of `[method]`", "meaning"), rows))
        for section, own in (("model", words.models), ("features", words.features)):
            names = [(one, _codes(keys)) for one, keys in own.items()]
            parts.append(_table((f"`[{section}]` name, for this method only", "options"), names))
        if words.optimizers:
            parts.append(f"Optimizers of `[train]`: {_codes(words.optimizers)}.")
    return "\n\n".join(part for part in parts if part)


def recipe_parts() -> str:
    """The datasets, features, networks, clippings and optimizers that a recipe can name, with their options."""
    from sordino import nets
    from sordino.clipping import _BY_NAME
    from sordino.data.sources import SOURCES
    from sordino.features.words import OPTIONS
    from sordino.runs.words import OPTIMIZERS

    parts = ["## Your own data: `[data] name`"]
    for name, source in SOURCES.items():
        parts += [f"### `{name}`", _prose(inspect.getdoc(source) or ""), _key_table(source, list(fields(source)))]
    features = {name: dict(known) for name, known in OPTIONS.items()}
    described = "What each computes: [data, features, networks](../data.md)."
    parts += ["## Features: `[features] name`", described, _options(features)]
    networks = {
        name: {
            one.name: one.default
            for one in inspect.signature(nets._function(name)).parameters.values()
            if one.kind is one.KEYWORD_ONLY and one.name != "vectors"
        }
        for name in nets.names()
    }
    parts += ["## Networks: `[model] name`", _options(networks)]
    clippings = {
        name: {one.name: one.default for one in fields(kind) if one.name != "clip_norm"}
        for name, kind in _BY_NAME.items()
    }
    described = "What each does: [API](api.md#clipping)."
    parts += ["## Clippings: `[clipping] name`", described, _options(clippings)]
    rows = [(name, _codes(keys)) for name, keys in OPTIMIZERS.items()]
    parts += ["## Optimizers: `[train] optimizer`", "The options are torch's.", _table(("name", "options"), rows)]
    return "\n\n".join(part for part in parts if part)


def commands() -> str:
    """Every command and subcommand: description, usage, arguments."""
    from sordino import cli

    return "\n\n".join(part for parser in _parsers(cli._parser()) for part in _command(parser))


PAGES: Mapping[str, Callable[[], str]] = {
    "recipe_keys": recipe_keys,
    "method_keys": method_keys,
    "recipe_parts": recipe_parts,
    "commands": commands,
}


def _key_table(owner: type, keys: list[Field[Any]]) -> str:
    if not keys:
        return ""
    comments = _comments(owner)
    rows = [f"| `{key.name}` | `{_type(key)}` | {_default(key)} | {comments.get(key.name, '')} |" for key in keys]
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows])


def _table(head: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    if not rows:
        return ""
    body = [f"| `{name}` | {text if text.startswith('`') else _cell(text)} |" for name, text in rows]
    return "\n".join([f"| {head[0]} | {head[1]} |", "|---|---|", *body])


def _options(known: Mapping[str, Mapping[str, Any]]) -> str:
    """A table of names with their options and defaults."""

    def shown(options: Mapping[str, Any]) -> str:
        given = {key: "" if value in (None, MISSING) else f" = `{value!r}`" for key, value in options.items()}
        return ", ".join(f"`{key}`{value}" for key, value in given.items())

    return _table(("name", "options and defaults"), [(name, shown(options) or "–") for name, options in known.items()])


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _one_of(names: Iterable[str]) -> str:
    return f" ({', '.join(names)})" if names else ""


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
    yield _literal(textwrap.fill(usage, WIDTH, subsequent_indent="    ", break_on_hyphens=False))
    rows = [row for action in parser._actions for row in _arguments(parser, action)]
    if rows:
        yield "\n".join(["| argument | what |", "|---|---|", *rows])
    if parser.epilog:
        whole = issubclass(parser.formatter_class, argparse.RawDescriptionHelpFormatter)
        yield _literal(parser.epilog if whole else textwrap.fill(parser.epilog, WIDTH, break_on_hyphens=False))


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


def _literal(text: str) -> str:
    return f"```text\n{text.strip()}\n```"


def _cell(text: str) -> str:
    return _prose(text).replace("|", "\\|").replace("\n", " ")


def _prose(text: str) -> str:
    """Plain text as Markdown: HTML, emphasis and references are escaped outside of code."""
    pieces = re.split(r"(`[^`\n]*`)", text.strip())
    return "".join(piece if piece.startswith("`") else re.sub(r"([<>*_\[\]])", r"\\\1", piece) for piece in pieces)


def _fill(app: Any, name: str, source: list[str]) -> None:
    source[0] = MARK.sub(lambda found: PAGES[found.group(1)](), source[0])


def _dashes(app: Any, doctree: nodes.document) -> None:
    """Sphinx writes "name -- meaning" in lists of arguments and leaves the dash to smartquotes, which are off."""
    for text in list(doctree.findall(nodes.Text)):
        if text == " -- ":
            text.parent.replace(text, nodes.Text(" – "))


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", _fill)
    app.connect("doctree-read", _dashes)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
