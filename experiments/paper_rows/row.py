"""One row of experiments/PAPERS.md, and the reading of result files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True)
class Row:
    """One item of a paper. `left` says how our result differs from the published one, or why there is none."""

    item: str
    built: str = ""
    tested: str = ""
    measured: str = ""
    published: str = ""
    ours: Callable[[], str] | str = ""
    left: str = ""

    def cells(self) -> list[str]:
        ours = self.ours if isinstance(self.ours, str) else self.ours()
        found = [
            self.item,
            _code(self.built),
            _code(self.tested),
            _code(self.measured),
            self.published,
            ours,
            self.left,
        ]
        return [cell or "–" for cell in found]

    def paths(self) -> list[str]:
        return [word for cell in (self.built, self.tested, self.measured) for word in cell.split()]


def _code(paths: str) -> str:
    return " ".join(f"`{path}`" for path in paths.split())


def read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf8"))


def percent(values: Sequence[float]) -> str:
    return " / ".join(f"{100 * value:.1f}" for value in values)


def kept(name: str) -> str:
    """The name of the result file if it exists."""
    return f"experiments/results/{name}" if (RESULTS / name).exists() else ""


def hours(start: str) -> str:
    """The time of an item at its full size, from step_costs.json."""
    (row,) = (r for r in read("step_costs.json")["items"] if r["item"].startswith(start))
    return f"{row['core_hours']:.2g} core-hours a run (step_costs.json)"
