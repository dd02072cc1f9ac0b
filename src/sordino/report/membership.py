"""Membership inference compared with the guarantee's bound: membership.json as a figure and a sentence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from sordino.report import numbers

AT = 0.01
"""The false positive rate of the sentence: the closest entry of the file is used."""


@dataclass(frozen=True)
class Curves:
    """The checked numbers of membership.json: false and true positive rates."""

    false: tuple[float, ...]
    true: tuple[float, ...]
    allowed: tuple[float, ...]
    records: int
    models: int


@dataclass(frozen=True)
class Shown:
    """A figure, its sentence, and its numbers."""

    svg: Markup
    sentence: str
    rows: tuple[tuple[str, str, str], ...]


def shown_membership(document: Mapping[str, Any] | None) -> Shown | None:
    """The figure of membership.json; None if there is none, or its numbers are inconsistent."""
    found = None if document is None else _curves(document)
    if found is None:
        return None
    place = min(range(len(found.false)), key=lambda k: abs(found.false[k] - AT))
    rates = [numbers.percent(curve[place]) for curve in (found.false, found.true)]
    rates.append(numbers.most(found.allowed[place]))
    sentence = (
        f"At {rates[0]} false alarms LiRA recognises {rates[1]} of the members; the guarantee allows any attack "
        f"{rates[2]}. {found.models} models were trained with this recipe, each on half of {found.records} public "
        "test rows; the private records and the model of this run were not used."
    )
    rows = tuple(
        (numbers.percent(a), numbers.percent(b), numbers.most(c))
        for a, b, c in zip(found.false, found.true, found.allowed, strict=True)
    )
    return Shown(_figure(found), sentence, rows[::4])


def _curves(document: Mapping[str, Any]) -> Curves | None:
    lists = [document.get(name) for name in ("false", "true", "allowed")]
    counts = [document.get(name) for name in ("records", "models")]
    if not all(isinstance(one, list) and len(one) > 1 and all(map(_rate, one)) for one in lists):
        return None
    if len({len(one) for one in lists if one is not None}) != 1:
        return None
    if not all(isinstance(one, int) and not isinstance(one, bool) and 0 < one < 10**9 for one in counts):
        return None
    false, true, allowed = (tuple(float(x) for x in one or ()) for one in lists)
    return Curves(false, true, allowed, int(counts[0] or 0), int(counts[1] or 0))


def _rate(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0.0 <= value <= 1.0


def _figure(found: Curves) -> Markup:
    """An SVG of both curves, on logarithmic axes from 0.001 to 1; colours are the page's."""
    size, left, top = 240, 46, 14

    def place(false: float, true: float) -> str:
        x, y = (min(max(math.log10(max(value, 1e-3)) / 3 + 1, 0.0), 1.0) for value in (false, true))
        return f"{left + size * x:.1f},{top + size * (1 - y):.1f}"

    def line(true: tuple[float, ...], style: str) -> str:
        points = " ".join(place(a, b) for a, b in zip(found.false, true, strict=True))
        return f'<polyline fill="none" stroke="currentColor" {style} points="{points}"/>'

    ticks = "".join(
        f'<text x="{left + size * k / 3:.0f}" y="{top + size + 16}" text-anchor="middle">{label}</text>'
        f'<text x="{left - 6}" y="{top + size * (1 - k / 3) + 4:.0f}" text-anchor="end">{label}</text>'
        for k, label in enumerate(("0.001", "0.01", "0.1", "1"))
    )
    title = (
        f"True over false alarms: the most that the guarantee allows (solid), LiRA with {found.models} models (dashed)"
    )
    return Markup(
        f'<svg class="square" viewBox="0 0 {left + size + 20} {top + size + 26}" font-size="11" '
        f'fill="currentColor" role="img"><title>{title}</title>'
        f'<rect x="{left}" y="{top}" width="{size}" height="{size}" fill="none" stroke="currentColor" opacity="0.3"/>'
        + line(found.allowed, 'stroke-width="2"') + line(found.true, 'stroke-dasharray="6 4"')
        + line(found.false, 'stroke-dasharray="1 4"') + ticks + "</svg>"
    )  # fmt: skip
