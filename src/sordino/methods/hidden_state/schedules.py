"""Noise schedules for a run that is seen only at its end.

A record that is used long before the end is hidden by the noise of all later steps as well; one that is used last has
only the noise of that step. With constant noise the last few steps determine the cost of the whole run. So they get
more noise: rise/√r if r steps are left. Then the cost hardly depends on the step in which a record is used last, and
the weights have hardly more noise. Before that the noise may decrease linearly: early noise is damped where the loss is
curved.
"""

from __future__ import annotations

import math

from sordino import checks
from sordino.schedule import Schedule

_LINE = 24  # pieces of the linear part


def closing(steps: int, first: float = 2.0, rise: float = 12.0) -> Schedule:
    """Factors max(line from `first` to 1, rise/√r) with r the number of steps left, in pieces."""
    steps = checks.count("steps", steps)
    first, rise = checks.positive("first", first), checks.positive("rise", rise)
    left = [steps - round(i * steps / _LINE) for i in range(_LINE) if steps >= _LINE]
    near = 1.0
    while near < min(steps, rise**2):
        left.append(math.ceil(near))
        near *= math.sqrt(2.0)
    ends = sorted({steps, *(r for r in left if 1 <= r <= steps)}, reverse=True)
    pieces = []
    for r, following in zip(ends, [*ends[1:], 0], strict=True):
        middle = math.sqrt(r * (following + 1))
        line = 1 + (first - 1) * middle / steps
        start = 0.0 if r == steps else (steps - r - 0.5) / steps  # half a step early, so that rounding can't move it
        pieces.append((start, max(line, rise / math.sqrt(middle))))
    return Schedule("pieces", tuple(pieces))
