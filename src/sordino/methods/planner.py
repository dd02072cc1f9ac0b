"""Recommends Poisson sampling, random allocation or correlated noise for a budget, by the noise in the weights.

At equal ε, batch and number of steps the three differ only in their noise. Plain SGD adds up what is released, so the
noise in the weights after step t is a prefix sum of the noise of the steps. `noise_in_weights` is its root mean square
over the steps, per coordinate, in clip norms and for a step size of 1 on sums (σ·√((T+1)/2) for independent noise). The
option with the smallest value is recommended. Between batch sizes it is not as simple: `noise_per_step` (σ/B) and
`noise_of_run` (the noise in the weights for a step size of 1/T on means) fall with the batch, and so does the number of
steps of an epoch. No data are used: this is an estimate of what trains best, and not part of a guarantee.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sordino import checks
from sordino.accounting.calibration import calibrate, noise_guess
from sordino.accounting.events import compose_events
from sordino.accounting.schemes import releases_of
from sordino.errors import InputError
from sordino.methods.correlated.choose import best_setting
from sordino.methods.correlated.strategies import Strategy
from sordino.methods.correlated.workloads import Workload, noise_in_weights

SAMPLERS = ("poisson", "allocation")
_LEAST_GAIN = 0.01
"""Correlated noise takes more time per step, so it has to gain at least this much; allocation a tenth of it."""


@dataclass(frozen=True)
class Budget:
    """The setting of a comparison: `batches` steps in each of `epochs` epochs, at (ε, δ) under add-remove."""

    records: int
    batches: int
    epochs: float
    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        checks.count("records", self.records)
        checks.positive("epochs", self.epochs)
        if checks.count("batches", self.batches) > self.records:
            raise InputError(f"{self.batches} batches per epoch are more than the {self.records} records")

    @property
    def steps(self) -> int:
        """The number of steps of all epochs, rounded up."""
        return max(1, math.ceil(self.epochs * self.batches - 1e-9))

    @property
    def batch(self) -> float:
        """The expected batch."""
        return self.records / self.batches


@dataclass(frozen=True)
class Way:
    """One option with the smallest noise that meets the budget, and the noise in the model, in clip norms."""

    way: str
    batch: float
    steps: int
    noise_multiplier: float
    noise_per_step: float
    noise_in_weights: float
    noise_of_run: float
    strategy: dict[str, Any] | None = None
    groups: int | None = None
    noises_per_step: int = 1


def sampler_noise(sampler: str, budget: Budget) -> float:
    """The smallest noise multiplier of independent noise with this sampler."""
    name = "poisson" if budget.batches == 1 else sampler
    sampling: dict[str, Any] = {"name": name} | (
        {"sampling_rate": 1 / budget.batches} if name == "poisson" else {"batches": budget.batches}
    )
    guess = noise_guess(sampling, budget.steps, budget.records, budget.epsilon, budget.delta)
    sigma, _ = calibrate(
        lambda s: compose_events(releases_of(sampling, "gaussian", s, budget.records, budget.steps)),
        budget.epsilon,
        budget.delta,
        guess=guess,
    )
    return sigma


def compare_ways(budget: Budget, workload: Workload | None = None) -> dict[str, Any]:
    """The three options at one budget.

    Args:
        budget: Records, batches, epochs and (ε, δ).
        workload: The update that will be used (default: plain SGD).

    Returns:
        JSON-serialisable: `recommended`, `why`, `rows` (Way as mappings).
    """
    update = workload or Workload()
    ways = []
    for sampler in SAMPLERS:
        sigma = sampler_noise(sampler, budget)
        ways.append(_way(sampler, budget, sigma, sigma * noise_in_weights(Strategy("identity"), update, budget.steps)))
    found = best_setting(
        records=budget.records, batch=budget.batch, steps=budget.steps, epsilon=budget.epsilon, delta=budget.delta,
        workload=update,
    )  # fmt: skip
    how = {"strategy": found.strategy.to_dict(), "groups": found.pattern.groups}
    noises = len(found.strategy.noise(budget.steps))
    sigma, weights = found.noise_multiplier, found.noise_in_weights
    ways.append(_way("correlated", budget, sigma, weights, noises_per_step=noises, **how))
    return _recommended(*ways) | {"rows": [asdict(way) for way in ways]}


def _way(way: str, budget: Budget, sigma: float, weights: float, **further: Any) -> Way:
    of_run = weights / (budget.batch * budget.steps)
    return Way(way, budget.batch, budget.steps, sigma, sigma / budget.batch, weights, of_run, **further)


def _recommended(poisson: Way, allocation: Way, correlated: Way) -> dict[str, str]:
    """The option with the least noise in the weights, and why; near ties go to the simpler option."""
    saved = poisson.noise_multiplier / allocation.noise_multiplier - 1
    plain = allocation if saved > _LEAST_GAIN / 10 else poisson
    gain = plain.noise_in_weights / correlated.noise_in_weights - 1
    if gain > _LEAST_GAIN:
        return {
            "recommended": correlated.way,
            "why": f"independent noise with {plain.way} sampling puts {100 * gain:.0f} % more noise into the weights "
            f"than correlated noise ({(correlated.strategy or {})['name']}, {correlated.groups} groups), which later "
            f"steps partly cancel; each step adds {correlated.noises_per_step} Gaussians for each coordinate",
        }
    against = f"correlated noise would leave {-100 * gain:.1f} % more in the weights"
    if gain >= 0:
        against = "correlated noise would not reduce the noise in the weights enough to justify its time"
    if plain is poisson:
        return {
            "recommended": plain.way,
            "why": "random allocation needs the same noise, Poisson sampling can be resumed at any step, and "
            + against,
        }
    return {
        "recommended": plain.way,
        "why": f"at equal ε, batch and steps Poisson sampling needs {100 * saved:.1f} % more noise than random "
        f"allocation, which uses every record once per epoch, and {against}",
    }


def compare_batches(
    *,
    records: int,
    epochs: float,
    epsilon: float,
    delta: float,
    batches: Sequence[int] | None = None,
    workload: Workload | None = None,
) -> dict[str, Any]:
    """`compare_ways` at several batches.

    Args:
        records: The public number of records.
        epochs: Expected passes over them.
        epsilon: The target, under add-remove.
        delta: δ in (0, 1).
        batches: Steps in an epoch (default: for batches near 4096, 1024 and 256, as far as there are records).
        workload: The update that will be used (default: plain SGD).

    Returns:
        JSON-serialisable: `recommended` and `why` for the largest batch, which has the least noise of the run;
        `by_batch`; `rows`.

    Raises:
        InputError: a value is wrong.
    """
    chosen = default_batches(checks.count("records", records)) if batches is None else list(batches)
    budgets = [Budget(records, count, epochs, epsilon, delta) for count in sorted(chosen)]
    made = [compare_ways(budget, workload) for budget in budgets]
    return {
        "recommended": made[0]["recommended"],
        "why": made[0]["why"],
        "by_batch": [
            {"batch": budget.batch, "recommended": one["recommended"], "why": one["why"]}
            for budget, one in zip(budgets, made, strict=True)
        ],
        "relation": "add-remove",
        "rows": [row for one in made for row in one["rows"]],
    }


def default_batches(records: int) -> list[int]:
    """Steps in an epoch for batches near 4096, 1024 and 256, as far as there are records."""
    sizes = [size for size in (4096, 1024, 256) if size <= records / 2] or [max(1, records // 4)]
    return [math.ceil(records / size) for size in sizes]
