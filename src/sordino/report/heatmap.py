"""Heat maps as SVG, inline in a page or as a file: a cell for each pair of settings, darker for better values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from sordino.report.plots import _label

CELL_WIDTH, CELL_HEIGHT, TOP, RIGHT, BOTTOM, LEAST_WIDTH = 84, 40, 8, 8, 46, 600.0
_CHARACTER = 7.5  # upper bound on the width of a digit

STYLE = """
.heatmap .heat { fill: currentColor; } .heatmap .none { fill: none; stroke: var(--rule-strong); stroke-dasharray: 3 3; }
.heatmap .best { fill: none; stroke: var(--ink); stroke-width: 2; }
.heatmap .value { fill: var(--ink); text-anchor: middle; } .heatmap .value.on { fill: var(--card); }
.heatmap .key { font-style: italic; }
figure.wide { max-width: none; } .heatmap { max-width: 46rem; }
"""
_ALONE = """
.heatmap { background: #fff; color: #0d6b60; font: 13px system-ui, "Segoe UI", "Noto Sans", "DejaVu Sans", sans-serif;
  --rule-strong: #c9c5bb; --ink: #1c1e22; --card: #fff; }
.heatmap text { fill: #5b616e; } .heatmap .right { text-anchor: end; } .heatmap .middle { text-anchor: middle; }
@media (prefers-color-scheme: dark) {
  .heatmap { background: #1a1d21; color: #62c9b8; --rule-strong: #434851; --ink: #e7e5df; --card: #1a1d21; }
  .heatmap text { fill: #a0a5ae; }
}
"""


@dataclass(frozen=True)
class Grid:
    """values[i][j] is the value at rows[i] and columns[j]; None if it is missing. A grid over one key has one row."""

    title: str
    row_key: str
    column_key: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    percent: bool
    larger_is_better: bool = True


def heat_map(grid: Grid, scale: tuple[float, float] | None = None) -> Markup:
    """The grid as inline SVG. `scale`: the values of the lightest and darkest colour, if several maps share them."""
    known = [value for row in grid.values for value in row if value is not None]
    low, high = scale or (min(known, default=0.0), max(known, default=1.0))
    best = (max if grid.larger_is_better else min)(known, default=None)
    left = max(20.0, _CHARACTER * max(map(len, grid.rows)) + 18, 16.0 if not grid.row_key else 60.0)
    cell = max(CELL_WIDTH, _CHARACTER * max(map(len, grid.columns)) + 12)
    width, height = left + cell * len(grid.columns) + RIGHT, TOP + CELL_HEIGHT * len(grid.rows) + BOTTOM
    width = max(width, LEAST_WIDTH)  # so that a small map is not enlarged to the width of the page
    if grid.row_key:
        height += 18
    offset = TOP + (18 if grid.row_key else 0)
    shapes = [_label(4, TOP + 8, grid.row_key, "key")] if grid.row_key else []
    for i, (name, row) in enumerate(zip(grid.rows, grid.values, strict=True)):
        y = offset + CELL_HEIGHT * i
        shapes.append(_label(left - 8, y + CELL_HEIGHT / 2 + 5, name, "tick right"))
        for j, value in enumerate(row):
            share = None if value is None else 0.5 if high <= low else (value - low) / (high - low)
            dark = None if share is None else share if grid.larger_is_better else 1 - share
            shapes.append(_cell(left + cell * j, y, cell, dark, _text(value, grid.percent), value == best))
    bottom = offset + CELL_HEIGHT * len(grid.rows)
    shapes += [_label(left + cell * (j + 0.5), bottom + 19, name, "tick middle") for j, name in enumerate(grid.columns)]
    shapes.append(_label(left + cell * len(grid.columns) / 2, bottom + 39, grid.column_key, "key middle"))
    return Markup(
        '<svg class="plot heatmap" viewBox="0 0 {:.0f} {:.0f}" role="img" aria-label="{}"><title>{}</title>{}</svg>'
    ).format(width, height, _summary(grid), grid.title, Markup("").join(shapes))


def heat_map_file(grid: Grid) -> str:
    """The same as a self-contained file, for light and dark backgrounds."""
    inline = str(heat_map(grid)).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return inline.replace("<title>", f"<style>{_ALONE}{STYLE}</style><title>", 1) + "\n"


def _cell(x: float, y: float, width: float, dark: float | None, text: str, best: bool) -> Markup:
    place = Markup('x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{}" rx="3"').format(
        x + 1.5, y + 1.5, width - 3, CELL_HEIGHT - 3
    )
    middle = (x + width / 2, y + CELL_HEIGHT / 2 + 5)
    if dark is None:
        return Markup('<rect class="none" {}/>').format(place) + _label(*middle, text, "value")
    # the lightest cell must remain visible, and text readable on all of them
    opacity = 0.08 + 0.87 * min(max(dark, 0.0), 1.0)
    shapes = Markup('<rect class="heat" {} fill-opacity="{:.2f}"/>').format(place, opacity)
    if best:
        shapes += Markup('<rect class="best" {}/>').format(place)
    return shapes + _label(*middle, text, "value on" if opacity > 0.55 else "value")


def _text(value: float | None, percent: bool) -> str:
    return "–" if value is None else f"{100 * value:.2f} %" if percent else f"{value:.4g}"


def _summary(grid: Grid) -> str:
    parts: Sequence[str] = [
        f"{grid.row_key} {row}, {grid.column_key} {column}: {_text(value, grid.percent)}"
        for row, line in zip(grid.rows, grid.values, strict=True)
        for column, value in zip(grid.columns, line, strict=True)
    ]
    return f"{grid.title}. " + "; ".join(part.strip() for part in parts)
