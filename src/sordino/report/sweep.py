"""The page of a sweep, made from sweep.json: the heat map, every result, and the privacy cost of looking at them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from sordino.errors import Refused
from sordino.files import write_atomically
from sordino.report import numbers
from sordino.report.heatmap import STYLE, Grid, heat_map, heat_map_file
from sordino.report.templates import rendered


def write_page(out: Path, document: Mapping[str, Any]) -> Path:
    """Writes out/sweep.html, and out/heatmap.svg if one map shows the whole grid (one or two keys).

    Refused for a sweep that was paid for: its guarantee covers the selected run only.
    """
    if document["paid"]:
        raise Refused(
            "the guarantee of a paid sweep covers the selected run only: a heat map would show the results of all the "
            "others and void it. For a heat map, sweep without --pay, on public data or at the cost that is stated then"
        )
    found = grids(document)
    if len(document["over"]) <= 2:
        write_atomically(out / "heatmap.svg", heat_map_file(found[0]).encode())
    path = out / "sweep.html"
    write_atomically(path, render(document, found).encode())
    return path


def grids(document: Mapping[str, Any]) -> list[Grid]:
    """The last two keys span a map; there is one map for each combination of the others."""
    over, metric = document["over"], str(document["metric"])
    keys = list(over)
    *outer, rows, columns = keys if len(keys) > 1 else [None, *keys]
    means = {json.dumps(row["settings"], sort_keys=True): row["mean"] for row in document["table"]}
    found = []
    for fixed in product(*([(key, value) for value in over[key]] for key in outer)):

        def mean(i: Any, j: Any, fixed: Sequence[tuple[str, Any]] = fixed) -> float | None:
            settings = dict(fixed) | ({} if rows is None else {rows: i}) | {columns: j}
            value: float | None = means.get(json.dumps(settings, sort_keys=True))
            return value

        row_values = [None] if rows is None else over[rows]
        found.append(
            Grid(
                title=", ".join([metric.replace("_", " "), *(f"{key} = {name(value)}" for key, value in fixed)]),
                row_key=rows or "",
                column_key=columns,
                rows=tuple("" if rows is None else name(value) for value in row_values),
                columns=tuple(name(value) for value in over[columns]),
                values=tuple(tuple(mean(i, j) for j in over[columns]) for i in row_values),
                percent=metric == "test_accuracy",
                larger_is_better=bool(document["larger_is_better"]),
            )
        )
    return found


def name(value: Any) -> str:
    """A value of the recipe as a label."""
    return f"{value:g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)


def render(document: Mapping[str, Any], found: Sequence[Grid]) -> str:
    """The page as a string of HTML."""
    known = [value for grid in found for row in grid.values for value in row if value is not None]
    scale = (min(known), max(known)) if known else None
    show = numbers.percent if document["metric"] == "test_accuracy" else numbers.plain
    return rendered(
        "sweep.html",
        style=STYLE,
        filters={"label": name},
        sweep=document,
        metric=str(document["metric"]).replace("_", " "),
        maps=[(grid.title, heat_map(grid, scale)) for grid in found],
        show=show,
    )
