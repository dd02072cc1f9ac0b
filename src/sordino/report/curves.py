"""Several lines in one plot, as a self-contained SVG file for light and dark backgrounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle

from markupsafe import Markup

from sordino.report.plots import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, PlotAxis, Series, _frame, _label

_LINE = 17  # height of a line of the legend
_COLOURS = ("#0d6b60", "#3b5bab", "#a3271b", "#7a5b12", "#6b4a8a")
_STYLE = """
.plot { background: #fff; font: 12px system-ui, "Segoe UI", "Noto Sans", "DejaVu Sans", sans-serif; }
text { fill: #5b616e; } .right { text-anchor: end; } .middle { text-anchor: middle; }
.grid { stroke: #e2dfd8; } .axis { stroke: #c9c5bb; } .curve { fill: none; stroke-width: 2; stroke-linejoin: round; }
@media (prefers-color-scheme: dark) {
  .plot { background: #1a1d21; } text { fill: #a0a5ae; } .grid { stroke: #2b2f35; }
}
"""


def curves_svg(
    x: Sequence[float],
    curves: Mapping[str, Sequence[float]],
    series: Series,
    *,
    highest: float | None = None,
    from_zero: bool = True,
) -> str:
    """`curves_plot` as a file, with its style sheet."""
    inner = curves_plot(x, curves, series, highest=highest, from_zero=from_zero)
    named = inner.replace("<svg ", Markup('<svg xmlns="http://www.w3.org/2000/svg" '), 1)
    return (
        str(named.replace(Markup("<title>"), Markup("<style>") + Markup(_STYLE) + Markup("</style><title>"), 1)) + "\n"
    )


def curves_plot(
    x: Sequence[float],
    curves: Mapping[str, Sequence[float]],
    series: Series,
    *,
    highest: float | None = None,
    from_zero: bool = True,
) -> Markup:
    """The curves over x, with a legend; parts above `highest` are cut off."""
    finite = [v for values in curves.values() for v in values if math.isfinite(v) and v <= (highest or math.inf)]
    horizontal = PlotAxis.around([0.0, *x], LEFT, WIDTH - RIGHT)
    lowest = [0.0] if from_zero else []
    vertical = PlotAxis.around([*finite, *lowest], HEIGHT - BOTTOM, TOP, zero=from_zero)
    shapes = [
        _label(horizontal(t), HEIGHT - BOTTOM + 20, horizontal.label(t), "tick middle") for t in horizontal.ticks()
    ]
    shapes += [
        _curve(x, values, horizontal, vertical, colour) for values, colour in zip(curves.values(), cycle(_COLOURS))
    ]
    shapes += _legend(list(curves), _free_corner(x, curves, horizontal, vertical))
    return _frame(vertical, series, Markup("").join(shapes))


def _legend(names: Sequence[str], corner: tuple[float, float]) -> list[Markup]:
    shapes = []
    for k, (name, colour) in enumerate(zip(names, cycle(_COLOURS))):
        at = corner[1] + _LINE * k
        line = Markup('<line x1="{:.0f}" x2="{:.0f}" y1="{:.0f}" y2="{:.0f}" stroke="{}" stroke-width="2"/>')
        shapes.append(line.format(corner[0], corner[0] + 20, at - 4, at - 4, colour))
        shapes.append(_label(corner[0] + 26, at, name, "note"))
    return shapes


def _free_corner(
    x: Sequence[float], curves: Mapping[str, Sequence[float]], horizontal: PlotAxis, vertical: PlotAxis
) -> tuple[float, float]:
    """The position of the legend's first line, in the corner of the plot where it hides the fewest points."""
    width, height = 26 + 7 * max(map(len, curves)), _LINE * len(curves)
    left, right = LEFT + 10, WIDTH - RIGHT - width
    top, bottom = TOP + 10, HEIGHT - BOTTOM - height
    points = [(horizontal(a), vertical(b)) for values in curves.values() for a, b in zip(x, values, strict=True)]

    def hidden(corner: tuple[float, float]) -> int:
        return sum(
            corner[0] - 10 < a < corner[0] + width and corner[1] - _LINE < b < corner[1] + height for a, b in points
        )

    return min(((left, top), (right, top), (right, bottom), (left, bottom)), key=hidden)


def _curve(x: Sequence[float], y: Sequence[float], horizontal: PlotAxis, vertical: PlotAxis, colour: str) -> Markup:
    """The part of the curve within the plot, cut at its edge."""
    points: list[str] = []
    for i, (a, b) in enumerate(zip(x, y, strict=True)):
        if math.isfinite(b) and b <= vertical.high:
            points.append(f"{horizontal(a):.1f} {vertical(b):.1f}")
            continue
        if points and math.isfinite(b):
            share = (vertical.high - y[i - 1]) / (b - y[i - 1])
            points.append(f"{horizontal(x[i - 1] + share * (a - x[i - 1])):.1f} {vertical(vertical.high):.1f}")
        break
    if not points:
        return Markup("")
    return Markup('<path class="curve" stroke="{}" d="M{}"/>').format(colour, " L".join(points))
