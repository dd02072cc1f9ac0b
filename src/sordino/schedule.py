"""A number for each step, fixed before training: step sizes, factors on the noise, mixing thresholds.

A guarantee may depend on a schedule, so it is a plain value that can be part of the plan:

| kind      | values                     | at step t of T                                          |
|-----------|----------------------------|---------------------------------------------------------|
| pieces    | (from, value) pairs        | the value of the last piece with from ≤ t/T (first: 0)  |
| linear    | first, last                | linear from the first step to the last                  |
| geometric | first, last                | linear in the logarithm                                 |
| cosine    | first, last                | half a period of a cosine                               |
| listed    | one value for each step    | that value; T must be their number                      |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sordino import checks
from sordino.errors import InputError

KINDS = ("pieces", "linear", "geometric", "cosine", "listed")


MOST_STEPS = 10**8


@dataclass(frozen=True)
class Schedule:
    """Values by step; all are positive and finite. Also made by `constant` and `pieces`.

    Args:
        kind: pieces, linear, geometric, cosine or listed.
        values: (from, value) pairs for pieces; the first and the last value; or one value for each step.

    Raises:
        InputError: an unknown kind, or values that do not fit it.

    Example:
        >>> Schedule("linear", (1.0, 2.0)).over(3).tolist()
        [1.0, 1.5, 2.0]
    """

    kind: str
    values: tuple[float, ...] | tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        checks.choice("schedule", self.kind, KINDS)
        if self.kind == "pieces":
            starts = [checks.real("the start of a piece", start) for start, _ in self._pairs()]
            if not starts or starts[0] != 0 or starts != sorted(set(starts)) or starts[-1] >= 1:
                raise InputError(f"the pieces of a schedule must start at 0 and increase, below 1; got {starts}")
            numbers: Sequence[Any] = [value for _, value in self._pairs()]
        else:
            numbers = self.values
            if self.kind != "listed" and len(numbers) != 2:
                raise InputError(f"a {self.kind} schedule needs two values, first and last; got {self.values!r}")
        for value in numbers:
            checks.positive("a value of a schedule", value)

    def _pairs(self) -> list[tuple[float, float]]:
        try:
            return [(start, value) for start, value in self.values]  # type: ignore[misc]
        except (TypeError, ValueError):
            raise InputError(f"a schedule of pieces must be (from, value) pairs, got {self.values!r}") from None

    def over(self, steps: int) -> npt.NDArray[np.float64]:
        """The value at each of `steps` steps."""
        steps = checks.count("steps", steps)
        if steps > MOST_STEPS:
            raise InputError(f"a schedule has one value per step; {steps} steps are more than {MOST_STEPS:,}")
        if self.kind == "listed":
            if len(self.values) != steps:
                raise InputError(f"the schedule lists {len(self.values)} values, the plan has {steps} steps")
            return np.array(self.values, dtype=np.float64)
        if self.kind == "pieces":
            starts, numbers = (np.array(column, dtype=np.float64) for column in zip(*self._pairs(), strict=True))
            place = np.searchsorted(starts, np.arange(steps) / steps, side="right") - 1
            return np.asarray(numbers[place], dtype=np.float64)
        first, last = (float(value) for value in self.values)  # type: ignore[arg-type]
        share = np.linspace(0.0, 1.0, steps)
        shapes = {
            "linear": first + (last - first) * share,
            "geometric": first * (last / first) ** share,
            "cosine": last + (first - last) * (1 + np.cos(np.pi * share)) / 2,
        }
        return np.asarray(shapes[self.kind], dtype=np.float64)

    @property
    def is_constant(self) -> bool:
        return len(set(self.values if self.kind != "pieces" else [value for _, value in self._pairs()])) == 1

    def to_dict(self) -> dict[str, Any]:
        values = [list(v) if isinstance(v, tuple) else v for v in self.values]
        return {"kind": self.kind, "values": values}

    @classmethod
    def from_dict(cls, values: Any) -> Schedule:
        """The inverse of to_dict; a plain number is a constant schedule (as in a recipe)."""
        if isinstance(values, Mapping):
            if set(values) != {"kind", "values"}:
                raise InputError(f"a schedule must be a number or {{kind, values}}, got {dict(values)!r}")
            kind, listed = values["kind"], values["values"]
            if not isinstance(listed, Sequence) or isinstance(listed, str):
                raise InputError(f"the values of a schedule must be a list, got {listed!r}")
            return cls(kind, tuple(tuple(v) if isinstance(v, Sequence) else v for v in listed))
        return constant(checks.positive("a schedule's value", values))


def constant(value: float) -> Schedule:
    return Schedule("pieces", ((0.0, value),))


def pieces(*pairs: tuple[float, float]) -> Schedule:
    """pieces((0, 0.05), (0.5, 0.025)): the first half at 0.05, the second at 0.025."""
    return Schedule("pieces", tuple(pairs))
