"""What a plan and its ledger say about a run: step by step values, recorded steps, and the statistics before them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sordino import checks
from sordino.errors import InputError, Refused
from sordino.methods.hidden_state.gaussian_mixture import gaussian_epsilon
from sordino.plan.core import Plan, Statistic
from sordino.schedule import Schedule

if TYPE_CHECKING:
    from sordino.accounting.events import Release


@lru_cache(maxsize=16)
def step_values(schedule: Schedule, steps: int) -> npt.NDArray[np.float64]:
    """The schedule's value at each step, read-only."""
    values = schedule.over(steps)
    values.setflags(write=False)
    return values


def statistic_releases(statistics: Sequence[Statistic]) -> list[tuple[Release, int]]:
    """The releases of the statistics; Refused unless they are Gaussian and on all records."""
    for statistic in statistics:
        if statistic.mechanism != "gaussian" or statistic.sampling_rate != 1:
            raise Refused(
                f"the statistic {statistic.purpose!r} must be Gaussian and on all records: only then does it add to "
                "the guarantee of the last iterate in squares"
            )
    return [statistic.release() for statistic in statistics]


def statistics_epsilon(plan: Plan, delta: float, entries: Sequence[Mapping[str, Any]] | None = None) -> float:
    """ε of the statistics without any step: those of the plan, or those in the ledger's entries."""
    multipliers = (
        [s.noise_multiplier for s in plan.statistics for _ in range(s.count)]
        if entries is None
        else [checks.noise_multiplier_value(entry.get("noise_multiplier")) for entry in entries]
    )
    square = sum((2 / multiplier) ** 2 for multiplier in multipliers)
    return gaussian_epsilon(math.sqrt(square) * (1 + 1e-12), delta) if square else 0.0


def recorded_steps(plan: Plan, entries: Sequence[Mapping[str, Any]], iterate: str) -> int:
    """The number of steps that the entries record; InputError for an entry that the plan does not explain.

    Args:
        plan: The plan.
        entries: The ledger's entries.
        iterate: The purpose under which steps are recorded.
    """
    declared = {s.purpose: s for s in plan.statistics}
    steps = []
    for entry in entries:
        purpose, step = entry.get("purpose"), entry.get("step")
        if purpose in declared:
            expected: Mapping[str, Any] = {"noise_multiplier": declared[str(purpose)].noise_multiplier}
        elif purpose == iterate and isinstance(step, int) and 0 <= step < plan.steps:
            steps.append(step)
            expected = {
                "noise_multiplier": plan.noise_at(step).noise_multiplier,
                "sensitivity": plan.sensitivity,
                "sampling": plan.sampling.to_dict(),
                "fine": True,
            }
        else:
            raise InputError(f"the plan of this ledger has no release {purpose!r}, step {step}")
        wrong = [key for key, value in expected.items() if entry.get(key) != value]
        if wrong:
            raise InputError(f"release {purpose!r}, step {step}: {', '.join(wrong)} differ from the plan's")
    if sorted(steps) != list(range(len(steps))):
        raise InputError("a step of the run is missing in the ledger: its ε can't be computed")
    return len(steps)
