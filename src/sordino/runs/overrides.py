"""`--set section.key=value`: a recipe with changed keys."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from sordino.checks import brief
from sordino.errors import InputError, did_you_mean


def with_overrides(document: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of a recipe's document with `section.key=value` overrides.

    Args:
        document: The sections of the recipe.
        overrides: Values in TOML notation, or bare words; `section.key=` removes the key; `section.table.key=value`
            changes a key of a table in the section.

    Returns:
        The changed copy.

    Raises:
        InputError: an override is not of this form, or there is no such section or key.
    """
    changed = copy.deepcopy(dict(document))
    for override in overrides:
        _override(changed, override)
    return changed


def _override(document: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    section, dot, name = key.strip().partition(".")
    if not (equals and dot and section and name):
        raise InputError(
            f"--set {brief(override)}: write section.key=value, for example train.lr=0.5; section.key= removes the key "
            "from the recipe"
        )
    if "\n" in text or "\r" in text:
        raise InputError(f"--set {override!r}: a value must be on one line")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # a bare word is a string
    except (ValueError, RecursionError) as error:
        raise InputError(f"--set {brief(override)}: a number is too long, or nesting too deep") from error
    given, place = document.setdefault(section, {}), section
    *tables, name = name.split(".")
    for table in [None, *tables]:
        given, place = (given, place) if table is None else (given.get(table), f"{place}.{table}")
        if not isinstance(given, dict):
            raise InputError(f"--set {brief(override)}: there is no section [{place}] in the recipe")
    if text.strip():
        given[name] = value
    elif given.pop(name, None) is None:
        raise InputError(
            f"--set {brief(override)} removes the key from the recipe, but [{place}] has no {name!r}: "
            f"{did_you_mean(name, given)}; an empty text is written {key.strip()}=''"
        )
    elif not document[section]:
        del document[section]  # an empty section counts as absent
