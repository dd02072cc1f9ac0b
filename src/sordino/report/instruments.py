"""Plots of the effect of clipping during the run, from the metrics: readings of public rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from sordino.report import numbers
from sordino.report.curves import curves_plot
from sordino.report.plots import Series

QUANTILES = {"norm_quantile_0.25": "25 % quantile of ‖g‖", "norm_quantile_0.75": "75 % quantile of ‖g‖"}


@dataclass(frozen=True)
class Figure:
    """Several curves over the steps, and the numbers behind them."""

    heading: str
    svg: Markup
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def instrument_figures(metrics: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """Sampling noise and norms, clipped share and cosine, noise over a window; empty if nothing was read."""
    readings = [row for row in metrics if _number(row.get("sampling_noise")) and _number(row.get("step"))]
    if not readings:
        return []
    norms: dict[str, list[Any]] = {
        "sampling noise τ": [math.sqrt(max(0.0, row["sampling_noise"])) for row in readings],
        **{name: [row.get(key) for row in readings] for key, name in QUANTILES.items()},
        "‖mean gradient‖": [row.get("gradient_norm") for row in readings],
    }
    effect = {
        "share of rows that are clipped": [row.get("clipped_share") for row in readings],
        "cosine of clipped and true gradient": [row.get("clip_cosine") for row in readings],
    }
    windows = sorted({key for row in readings for key in row if str(key).startswith("noise_window_")}, key=_length)
    over = {f"K₀ = {_length(key)}": [row.get(key) for row in readings] for key in windows}
    figures = [
        _figure("Sampling noise and gradient norms before clipping", readings, norms),
        _figure("What clipping does to the gradient", readings, effect),
        _figure("Sampling noise averaged over K₀ iterations", readings, over),
    ]
    return [figure for figure in figures if figure is not None]


def _figure(heading: str, readings: Sequence[Mapping[str, Any]], curves: Mapping[str, Sequence[Any]]) -> Figure | None:
    """The steps at which every curve has a value; None if there are none."""
    whole = [i for i in range(len(readings)) if curves and all(_number(values[i]) for values in curves.values())]
    if not whole:
        return None
    steps = [float(readings[i]["step"]) for i in whole]
    shown = {name: [float(values[i]) for i in whole] for name, values in curves.items()}
    ends = "; ".join(f"{name} from {values[0]:.3g} to {values[-1]:.3g}" for name, values in shown.items())
    lowest = min(min(values) for values in shown.values())
    svg = curves_plot(steps, shown, Series(heading, f"{ends}.", "step", "instruments"), from_zero=lowest >= 0)
    rows = tuple(
        (numbers.plain(step), *(numbers.plain(values[i], 4) for values in shown.values()))
        for i, step in enumerate(steps)
    )
    return Figure(heading, svg, ("step", *shown), rows)


def _length(key: str) -> int:
    tail = str(key).rpartition("_")[2]
    return int(tail) if tail.isdigit() else 0


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
