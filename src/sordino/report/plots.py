"""Line and bar plots as inline SVG. Colours come from the page's style sheet, so they suit light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 480, 270
LEFT, RIGHT, TOP, BOTTOM = 52, 18, 16, 42


@dataclass(frozen=True)
class PlotAxis:
    """A linear scale from values to pixels, with round ticks."""

    low: float
    high: float
    start: float
    end: float
    step: float

    @classmethod
    def around(
        cls, values: Sequence[float], start: float, end: float, *, zero: bool = False, share: bool = False
    ) -> PlotAxis:
        """`zero`: the axis begins at 0. `share`: values are shares of one, so the axis is limited to [0, 1]."""
        low, high = min(values), max(values)
        low = min(low, 0.0) if zero else low
        within = share and low >= 0 and high <= 1
        if high - low < 1e-12 * max(1.0, abs(high)):
            low, high = (0.0, high) if high > 0 and zero else (low - 0.5, high + 0.5)
        if within:
            low, high = max(low, 0.0), min(high, 1.0)
        step = _round_step((high - low) / 4)
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
        return cls(low, min(high, 1.0) if within else high, start, end, step)

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Ticks from the low end up to the high end."""
        return [self.low + i * self.step for i in range(math.floor((self.high - self.low) / self.step + 1e-9) + 1)]

    def label(self, value: float, percent: bool = False) -> str:
        scale = 100.0 if percent else 1.0
        # as many decimals as the tick step needs: 2.5 must not be printed as 2
        decimals = next(d for d in range(16) if math.isclose(round(self.step * scale, d), self.step * scale))
        text = f"{value * scale:,.{decimals}f}".replace(",", " ")
        return "0" if float(text.replace(" ", "")) == 0 else text


@dataclass(frozen=True)
class Series:
    """One quantity over the steps. `reference` draws a dashed level with its own label."""

    title: str
    summary: str
    unit: str
    kind: str
    percent: bool = False
    reference: tuple[float, str] | None = None


def line_plot(steps: Sequence[float], values: Sequence[float], series: Series) -> Markup:
    """A line with a dot and a label at its end; the summary is the text for screen readers."""
    level = [series.reference[0]] if series.reference else []
    x = PlotAxis.around([0.0, *steps], LEFT, WIDTH - RIGHT)
    y = PlotAxis.around([*values, *level], HEIGHT - BOTTOM, TOP, zero=not series.percent, share=series.percent)
    points = [(x(s), y(v)) for s, v in zip(steps, values, strict=True)]
    path = "M" + " L".join(f"{px:.1f} {py:.1f}" for px, py in points)
    shapes = [_label(x(t), HEIGHT - BOTTOM + 20, x.label(t), "tick middle") for t in x.ticks()]
    if y.low == 0:  # an area that does not start at zero would mislead
        area = f"{path} L{points[-1][0]:.1f} {HEIGHT - BOTTOM} L{points[0][0]:.1f} {HEIGHT - BOTTOM} Z"
        shapes.append(Markup('<path class="area" d="{}"/>').format(area))
    shapes.append(Markup('<path class="line" d="{}"/>').format(path))
    if len(points) <= 40:
        shapes += [Markup('<circle class="dot" cx="{:.1f}" cy="{:.1f}" r="2.4"/>').format(*p) for p in points]
    shapes.append(Markup('<circle class="end" cx="{:.1f}" cy="{:.1f}" r="4.5"/>').format(*points[-1]))
    if series.reference:
        at, name = series.reference
        shapes.append(
            Markup('<line class="level" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(
                LEFT, WIDTH - RIGHT, y(at), y(at)
            )
        )
        below = y(at) < TOP + 16
        shapes.append(_label(LEFT + 8, y(at) + (15 if below else -6), name, "note"))
    return _frame(y, series, Markup("").join(shapes))


def bar_plot(labels: Sequence[str], values: Sequence[float], series: Series) -> Markup:
    """Bars of equal width, `labels[i]` at the left edge of bar i; noisy values below zero point downwards."""
    x = PlotAxis(0.0, float(len(values)), LEFT, WIDTH - RIGHT, 1.0)
    y = PlotAxis.around([*values, 0.0], HEIGHT - BOTTOM, TOP, zero=True, share=series.percent)
    bars = [
        Markup('<rect class="bar" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>').format(
            x(i) + 1.5, min(y(value), y(0.0)), x(1) - x(0) - 3, abs(y(value) - y(0.0))
        )
        for i, value in enumerate(values)
    ]
    ticks = [_label(x(i), HEIGHT - BOTTOM + 20, label, "tick middle") for i, label in enumerate(labels)]
    return _frame(y, series, Markup("").join([*ticks, *bars]))


def _frame(y: PlotAxis, series: Series, shapes: Markup) -> Markup:
    """Grid, axis and caption around shapes in pixel coordinates."""
    grid = Markup("").join(
        Markup('<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(LEFT, WIDTH - RIGHT, y(t), y(t))
        + _label(LEFT - 8, y(t) + 4.5, y.label(t, series.percent), "tick right")
        for t in y.ticks()
    )
    axis = Markup('<line class="axis" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(
        LEFT, WIDTH - RIGHT, HEIGHT - BOTTOM, HEIGHT - BOTTOM
    )
    caption = _label((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, series.unit, "tick middle")
    return Markup(
        '<svg class="plot {}" viewBox="0 0 {} {}" role="img" aria-label="{}">'
        "<title>{}</title><desc>{}</desc>{}{}{}{}</svg>"
    ).format(
        series.kind, WIDTH, HEIGHT, f"{series.title}. {series.summary}", series.title, series.summary,
        grid, axis, shapes, caption,
    )  # fmt: skip


def _label(x: float, y: float, text: str, kind: str) -> Markup:
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}">{}</text>').format(kind, x, y, escape(text))


def _round_step(rough: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that is at least `rough`."""
    base = 10.0 ** math.floor(math.log10(rough))
    return next(f * base for f in (1.0, 2.0, 2.5, 5.0, 10.0) if f * base >= rough * (1 - 1e-9))
