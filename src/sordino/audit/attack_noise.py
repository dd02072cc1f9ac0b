"""The attack's checks of noise and ledger, on the recorded releases of runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sordino.audit.noise_check import LEVEL, distribution, enough, noise_tests, worst
from sordino.audit.pipeline import short, trace
from sordino.audit.tap import Call
from sordino.release.mechanisms import Gaussian

if TYPE_CHECKING:
    from sordino.runs.work import Work

_FINE_BITS = 34  # no grid of a release is finer than its noise by more than this power of two


def noise(work: Work, quick: bool, seed: int, audits: list[Any]) -> tuple[int, list[str], str]:
    """Tests the noise of two runs with secret keys.

    The first has two steps, the second as many as are needed to detect noise × 0.9 (`quick`: at most 40), as far as the
    plan has them.
    """
    steps = 2
    calls = list(trace(short(work, steps, seed=None)).calls)
    wanted = enough(0.9)
    per_step = max(1, len(calls[-1].values))
    more = min(
        work.plan.steps, max(3, math.ceil(wanted / per_step) if not quick else min(40, math.ceil(wanted / per_step)))
    )
    calls += trace(short(work, more, seed=None)).calls
    found, count = tests(calls)
    note = "" if count >= wanted else f"; too few to detect noise × 0.9, which needs {wanted}"
    name, p = worst(found)
    return (
        count,
        wrong(found, "of two runs"),
        f"{count} values of {len(calls)} releases, worst {name} p = {p:.2g}{note}",
    )


def tests(calls: Sequence[Call]) -> tuple[dict[str, float], int]:
    """(p-values, number of tested values) of the noise of these releases, of all runs together."""
    generator = torch.Generator().manual_seed(0)
    places, values = [], []
    own: dict[tuple[str, int], Tensor] = {}  # the new noise that each step of the present run added
    for call in calls:
        residue = call.observed - call.values
        if call.earlier is not None:  # earlier noise that a step adds again is known to anyone who knows that noise
            for step, coefficient in call.earlier.items():
                residue = residue - coefficient * own[call.purpose, step]
            own[call.purpose, call.step] = residue
        gaussian = isinstance(call.noise, Gaussian)
        if gaussian and not call.fine:  # rounding to the grid is smoothed by uniform noise of the same width
            residue = residue + grid(call) * (torch.rand(residue.shape, generator=generator, dtype=torch.float64) - 0.5)
        widths = torch.zeros_like(residue) if call.widths is None else call.widths
        places.append(distribution(residue / call.scale, widths / call.scale, not gaussian))
        values.append(call.values)
    return noise_tests(places, values), sum(len(place) for place in places)


def wrong(found: Mapping[str, float], where: str) -> list[str]:
    name, p = worst(found)
    return [f"the noise {where} is not what the plan states: the test of {name} has p = {p:.2g}"] if p < LEVEL else []


def grid(call: Call) -> float:
    """The public grid of a Gaussian release according to its documentation: a power of two, σ·2⁻⁷ < g ≤ σ·2⁻⁶."""
    return 2.0 ** (math.frexp(call.scale)[1] - 1 - 6)


def ledger(work: Work, quick: bool, seed: int, audits: list[Any]) -> tuple[int, list[str], str]:
    """Tests that entries are written before noise is drawn, values lie on a grid, and the noise is the plan's."""
    plan = short(work, 3, seed=seed + 3)
    calls = trace(plan).calls
    found: list[str] = []
    for call in calls:
        where = f"{call.purpose!r}, step {call.step}"
        if not call.entry_first:
            found.append(f"{where}: noise was drawn before the ledger contained the entry")
        if call.purpose == plan.plan.method.purpose:
            stated = plan.plan.noise_at(call.step)
            if call.noise.name != stated.name or call.noise.noise_multiplier < stated.noise_multiplier * (1 - 1e-12):
                found.append(f"{where}: {call.noise}, but the plan states {stated}")
        if off_grid(call) > 0.0:
            found.append(
                f"{where}: {off_grid(call):.1%} of the values lie on no public grid: low digits reveal the sum"
            )
    return len(calls), found[:4], f"{len(calls)} releases"


def off_grid(call: Call) -> float:
    """The share of released values that are not multiples of a public power of two below the noise."""
    gaussian = isinstance(call.noise, Gaussian)
    spacing = grid(call) if gaussian and not call.fine else 2.0 ** (math.frexp(call.scale)[1] - _FINE_BITS)
    places: Tensor = call.observed / spacing
    exact = max(torch.finfo(value.dtype).eps for value in call.returned.values())
    error = (places - places.round()).abs()
    tolerance = 1e-6 + places.abs() * exact * 4
    return float((error > tolerance)[tolerance < 0.25].double().mean()) if bool((tolerance < 0.25).any()) else 0.0
