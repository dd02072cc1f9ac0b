"""Reads a run directory into one value. Files are not trusted beyond being JSON or TOML."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from sordino.errors import InputError, SordinoError
from sordino.plan.attack import success_rate
from sordino.plan.core import Plan
from sordino.plan.spent import from_ledger
from sordino.release.ledger import read_chain
from sordino.release.ledger_lines import Head

REQUIRED = ("recipe.toml", "ledger.jsonl", "metrics.jsonl", "result.json")


@dataclass(frozen=True)
class Run:
    """The files of a run. `recomputed` is ε from the ledger, or the reason why it can't be computed."""

    name: str
    recipe: str
    header: Mapping[str, Any]
    entries: tuple[Mapping[str, Any], ...]
    metrics: tuple[Mapping[str, Any], ...]
    result: Mapping[str, Any]
    recomputed: float | str
    audit: Mapping[str, Any] | None
    histogram: Mapping[str, Any] | None
    pictures: Mapping[str, Any] | None = None
    attack: float | None = None  # upper bound on the success of any attack at plan.attack.FALSE_ALARMS
    head: Head | None = None  # the head of the ledger
    adopted: int = 0
    membership: Mapping[str, Any] | None = None

    @property
    def epsilon(self) -> Any:
        """The larger of the ε in result.json and the ε of the ledger."""
        stated = self.result.get("epsilon")
        numbers = [v for v in (stated, self.recomputed) if isinstance(v, int | float) and not isinstance(v, bool)]
        return max(numbers) if numbers else stated

    @property
    def declaration(self) -> Mapping[str, Any]:
        """[declaration] of the recipe."""
        section = recipe_section(self.recipe, "declaration")
        return {key: value for key, value in section.items() if isinstance(value, str)}


def read_run(folder: Path) -> Run:
    """Reads the files of a run.

    Args:
        folder: The directory of a finished run.

    Returns:
        The content of its files, and ε recomputed from the ledger.

    Raises:
        InputError: a file is missing or can't be read; the message names it.
    """
    if not folder.is_dir():
        raise InputError(f"{folder} is not a directory: give the directory of a run")
    for name in REQUIRED:
        if not (folder / name).is_file():
            raise InputError(
                f"{folder / name} is missing: a report needs {', '.join(REQUIRED)}, which `sordino train` writes "
                "when a run is complete (continue an interrupted one with --resume)"
            )
    recipe = _text(folder / "recipe.toml")
    result = _object(folder / "result.json")
    chain = read_chain(folder / "ledger.jsonl")
    header, entries = chain.header, chain.entries
    return Run(
        name=_run_name(folder, recipe),
        recipe=recipe,
        header=header,
        entries=tuple(entries),
        metrics=_metrics(folder / "metrics.jsonl"),
        result=result,
        recomputed=_recompute(header, tuple(entries), result),
        audit=_optional(folder / "audit.json"),
        histogram=_optional(folder / "histogram.json"),
        pictures=_optional(folder / "pictures.json"),
        attack=_attack(header),
        head=chain.head,
        adopted=max(0, len(chain.places) - 1),
        membership=_optional(folder / "membership.json"),
    )


@lru_cache(maxsize=32)  # the same plan is read for every page of a run, and by `sordino verify`
def _success_rate(plan: str) -> float:
    return success_rate(Plan.from_dict(json.loads(plan)))


def _attack(header: Mapping[str, Any]) -> float | None:
    """The upper bound on an attack under the plan in the ledger; None if it can't be computed."""
    try:
        return _success_rate(json.dumps({key: value for key, value in header.items() if key != "kind"}))
    except (SordinoError, KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None


def _recompute(
    header: Mapping[str, Any], entries: tuple[Mapping[str, Any], ...], result: Mapping[str, Any]
) -> float | str:
    """ε from the ledger's entries at the δ of the ledger's plan (or the result's, if the ledger has none)."""
    delta = header.get("delta", result.get("delta"))
    if not isinstance(delta, int | float):
        return "neither the ledger nor result.json gives a delta"
    try:
        found: Any = from_ledger(header, entries, float(delta))
        return float(found["epsilon"] if isinstance(found, Mapping) else found.epsilon)
    except (SordinoError, KeyError, TypeError, ValueError) as error:
        return str(error) or type(error).__name__


def _run_name(folder: Path, recipe: str) -> str:
    return str(recipe_section(recipe, "run").get("name", "")) or folder.resolve().name


def recipe_section(recipe: str, name: str) -> Mapping[str, Any]:
    """A section of the recipe; empty if it is missing, or the file is not TOML."""
    try:
        found = tomllib.loads(recipe).get(name, {})
    except (tomllib.TOMLDecodeError, RecursionError):
        return {}
    return found if isinstance(found, Mapping) else {}


def _metrics(path: Path) -> tuple[Mapping[str, Any], ...]:
    """The rows; an incomplete last line (killed process) is left out, any other damaged line is an error."""
    lines = _text(path).splitlines()
    rows: list[Mapping[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise InputError(f"{path}, line {number}: not a JSON object ({error.msg})") from error
        if not isinstance(row, dict):
            raise InputError(f"{path}, line {number}: not a JSON object but {line[:40]!r}")
        rows.append(row)
    return tuple(rows)


def _optional(path: Path) -> Mapping[str, Any] | None:
    return _object(path) if path.is_file() else None


def _object(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise InputError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} must contain a JSON object, not {type(value).__name__}")
    return value


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} can't be read: {error}") from error
