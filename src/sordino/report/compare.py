"""The page of a comparison, made from compare.json: accuracy against ε with error bars, and paired differences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from sordino.files import write_atomically
from sordino.report.plots import PlotAxis
from sordino.report.templates import rendered
from sordino.shown import up

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 360, 56, 20, 16, 44
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22")
DARK = ("#6cb4ee", "#ff7a78", "#5fd068", "#c3a0ea", "#ffab5c", "#4fdcea", "#d19a8c", "#f7a8dc", "#b5b5b5", "#dcdc5a")


def _painted(colours: Sequence[str]) -> str:
    """The rules that give the methods their colours, in order."""
    return "".join(
        f".c{i}{{stroke:{c};fill:none}}.f{i}{{fill:{c}}}.key.k{i}{{color:{c};font-weight:600}}"
        for i, c in enumerate(colours)
    )


STYLE = (
    _painted(COLOURS)
    + ".ceiling{stroke-dasharray:5 4;stroke-width:1.4}.mean{stroke-width:2}.bar-of{stroke-width:1.3}"
    + "figure.comparison{max-width:none}.comparison figcaption{font-weight:400;margin:.4rem 0 .8rem}"
    + f"@media (prefers-color-scheme: dark){{{_painted(DARK)}}}"
    + "@media (max-width: 40rem){.comparison .plot text{font-size:20px}}"
)


def write_page(path: Path, document: Mapping[str, Any]) -> Path:
    """Writes the page of a comparison.

    Args:
        path: The HTML file.
        document: The content of compare.json.
    """
    write_atomically(path, render(document).encode())
    return path


def render(document: Mapping[str, Any]) -> str:
    """The page as a string of HTML."""
    names = [one["name"] for one in document["methods"]]
    return rendered(
        "compare.html",
        style=STYLE,
        found=document,
        plot=plot(document),
        legend=[(name, f"k{i % len(COLOURS)}") for i, name in enumerate(names)],
        rows=[_row(document, name) for name in names],
        pairs=[_pairs(document, name) for name in names if any(d["method"] == name for d in document["differences"])],
        failed=[run for run in document["runs"] if "error" in run],
    )


def accuracy(row: Mapping[str, Any] | None, seeds: int = 0) -> str:
    """Mean ± standard deviation in per cent; the number of seeds if it is one or below `seeds`; failed runs, if any."""
    if row is None:
        return "–"
    if row["mean"] is None:
        return "failed"
    spread = "" if row["spread"] is None else f" ± {100 * row['spread']:.2f}"
    few = "" if row["seeds"] >= max(seeds, 2) else " (1 seed)" if row["seeds"] == 1 else f" ({row['seeds']})"
    return f"{100 * row['mean']:.2f}{spread}{few}" + (f", {row['failed']} failed" if row["failed"] else "")


def difference(row: Mapping[str, Any] | None) -> str:
    """Mean of the paired differences in points, with the half width of its interval."""
    if row is None:
        return "–"
    spread = " (1 seed)" if row["interval"] is None else f" ± {100 * row['interval']:.2f}"
    return f"{100 * row['mean']:+.2f}{spread}"


def at(rows: Sequence[Mapping[str, Any]], name: str, epsilon: float | None) -> Mapping[str, Any] | None:
    """The row of a method at an ε, or None."""
    return next((row for row in rows if (row["method"], row["epsilon"]) == (name, epsilon)), None)


def _row(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    own = [row for row in document["table"] if row["method"] == name]
    plain = at(own, name, None)
    planned = len(document.get("seeds", ()))
    cells = [accuracy(plain if plain is not None else at(own, name, e), planned) for e in document["epsilons"]]
    seconds = [row["core_seconds"] for row in own if row["core_seconds"] is not None]
    return {"name": name, "cells": cells, "seconds": f"{sum(seconds) / len(seconds):.0f}" if seconds else "–"}


def _pairs(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {"name": name, "cells": [difference(at(document["differences"], name, e)) for e in document["epsilons"]]}


def plot(document: Mapping[str, Any]) -> Markup:
    """Means over log ε with error bars; methods without privacy are dashed levels."""
    table = [row for row in document["table"] if row["mean"] is not None]
    if not table:
        return Markup("<p>No run has finished yet.</p>")
    ends = [row["mean"] + sign * (row["spread"] or 0.0) for row in table for sign in (-1, 1)]
    y = PlotAxis.around(ends, HEIGHT - BOTTOM, TOP, share=True)
    places = _places(document["epsilons"])
    shapes = [
        Markup('<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(LEFT, WIDTH - RIGHT, y(t), y(t))
        + _text(LEFT - 8, y(t) + 4.5, y.label(t, percent=True), "tick right")
        for t in y.ticks()
    ]
    shapes += [_text(x, HEIGHT - BOTTOM + 20, f"{up(epsilon)}", "tick middle") for epsilon, x in places.items()]
    for number, method in enumerate(document["methods"]):
        own = [row for row in table if row["method"] == method["name"]]
        shapes.append(_line(own, number % len(COLOURS), places, y))
    caption = _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, "ε (log scale); test accuracy in per cent", "tick middle")
    said = "; ".join(
        f"{row['method']}{'' if row['epsilon'] is None else ' at ε = ' + up(row['epsilon'])}: {accuracy(row)}"
        for row in table
    )
    return Markup('<svg class="plot" viewBox="0 0 {} {}" role="img" aria-label="{}">{}{}</svg>').format(
        WIDTH, HEIGHT, f"Test accuracy against ε. {said}", Markup("").join(shapes), caption
    )


def _places(epsilons: Sequence[float]) -> dict[float, float]:
    """The position of each ε on a log scale."""
    logs = [math.log(epsilon) for epsilon in epsilons]
    low, high = min(logs), max(logs)
    inner, span = WIDTH - RIGHT - LEFT - 60, high - low
    return {
        epsilon: LEFT + 30 + inner * ((value - low) / span if span else 0.5)
        for epsilon, value in zip(epsilons, logs, strict=True)
    }


def _line(rows: Sequence[Mapping[str, Any]], number: int, places: Mapping[float, float], y: PlotAxis) -> Markup:
    level = [row for row in rows if row["epsilon"] is None]
    if level:
        at_level = y(level[0]["mean"])
        return Markup('<line class="c{} ceiling" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(
            number, LEFT, WIDTH - RIGHT, at_level, at_level
        )
    shift = 2.5 * (number % 3 - 1)  # so that bars of several methods at one ε do not overlap
    points = sorted((places[row["epsilon"]] + shift, y(row["mean"]), row) for row in rows)
    path = "M" + " L".join(f"{px:.1f} {py:.1f}" for px, py, _ in points) if points else ""
    shapes = [Markup('<path class="c{} mean" d="{}"/>').format(number, path)] if len(points) > 1 else []
    for px, py, row in points:
        shapes.append(Markup('<circle class="f{}" cx="{:.1f}" cy="{:.1f}" r="3.4"/>').format(number, px, py))
        if row["spread"]:
            low, high = (y(row["mean"] + sign * row["spread"]) for sign in (-1, 1))
            bar = f"M{px:.1f} {low:.1f} V{high:.1f}" + "".join(
                f" M{px - 4:.1f} {end:.1f} H{px + 4:.1f}" for end in (low, high)
            )
            shapes.append(Markup('<path class="c{} bar-of" d="{}"/>').format(number, bar))
    return Markup("").join(shapes)


def _text(x: float, y: float, text: str, kind: str) -> Markup:
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}">{}</text>').format(kind, x, y, escape(text))
