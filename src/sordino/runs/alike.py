"""Compares values of a run's files: equal, with numbers equal up to their last digits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sordino.runs.closing import EQUAL


def number(value: Any) -> float | None:
    """The value as a float if it is a finite number, else None."""
    usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if usable else None


def near(one: float, other: float) -> bool:
    """Whether two numbers are equal up to the accountant's tolerance."""
    return math.isclose(one, other, rel_tol=EQUAL)


def without_none(value: Any) -> Any:
    """The value without None, which TOML does not have."""
    if isinstance(value, Mapping):
        return {key: without_none(entry) for key, entry in value.items() if entry is not None}
    return [without_none(entry) for entry in value if entry is not None] if isinstance(value, list | tuple) else value


def alike(one: Any, other: Any) -> bool:
    """Whether two values are equal, with numbers compared up to their last digits, entry by entry."""
    a, b = number(one), number(other)
    if a is not None and b is not None:
        return near(a, b)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return set(one) == set(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)
