"""Recommends Poisson sampling, random allocation or correlated noise for a budget, by the noise in the weights.

At equal ε, batch and number of steps the three options differ in two kinds of noise, which plain SGD accumulates in the
weights:

- the noise of the mechanism, `noise_in_weights`: the root mean square over the steps, per coordinate, in clip norms and
  for a step size of 1 on sums (for independent noise σ·√((T+1)/2));
- the sampling noise, `batch_noise`: the participants of a step are drawn (correlated/batches.py). Random allocation and
  groups in turn use every record once in an epoch and have less of it than Poisson sampling.

*The effect on accuracy.* Let ν be both together for a step size of 1/T on means (`noise_of_run`) and τ = lr·T the
training time. The remaining excess loss after time τ decreases as a/τ (a convex loss), and noise adds b·(ν·τ)².
The best time is τ = (a/2bν²)^{1/3}, and the loss at that time grows as ν^{2/3}: `expected_loss`, in points of accuracy,
with τ bounded by a largest stable step size. Both laws were confirmed on development tasks (linear classifiers on 4,200
rows of MNIST and Fashion-MNIST, training rows only, 22 budgets, step sizes tuned): the best time was 0.65·ν^{−2/3}
(clip norm 1) within a third, and differences between the options were 780·Δν^{2/3} points with an error of 0.6. The
constants are those of these tasks; the order of the options does not depend on them. Options within `ALIKE` points of
the best are called alike: accuracy will not show a difference. experiments/designs/ways.toml has the rule and the
held-out tasks on which it was tested.

*At equal time.* With a `Pace` each option makes the steps that fit the time. Those of Poisson sampling and allocation
are the same; correlated noise makes fewer if its further Gaussians take time, and its strategy is the best of those
that are worth their time.

The planner uses no data: it estimates what trains best and is not part of a guarantee.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sordino import checks
from sordino.accounting.calibration import calibrate, noise_guess
from sordino.accounting.events import compose_events
from sordino.accounting.schemes import releases_of
from sordino.errors import InputError
from sordino.methods.correlated.batches import DIMENSION, batch_noise
from sordino.methods.correlated.choose import LONGEST, MOST_NOISES, best_setting
from sordino.methods.correlated.strategies import Strategy
from sordino.methods.correlated.workloads import Workload, noise_in_weights
from sordino.plan.pace import Pace

SAMPLERS = ("poisson", "allocation")
ALIKE = 0.5
"""A difference in points of accuracy that a few seeds can't resolve."""
LOSS, TIME, LARGEST_STEP = 780.0, 0.65, 4.0
"""Constants of the model above, for clip norm 1: expected_loss = LOSS·ν^{2/3} at τ = TIME·ν^{−2/3} ≤ LARGEST_STEP·T."""
_SIZES = (4096, 1024, 256)
_NOISES = (MOST_NOISES, 16, 4, 2, 1)  # Gaussians per coordinate and step that are tried where they take time
_SAME = 1e-3  # relative difference of two samplers' noise that is ignored


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
        checks.positive("epsilon", self.epsilon)
        checks.delta_value(self.delta)
        if checks.count("batches", self.batches) > self.records:
            raise InputError(f"{self.batches} batches per epoch are more than the {self.records} records")
        if self.batches * self.epochs > LONGEST:
            raise InputError(
                f"{self.batches} batches in {self.epochs:g} epochs: the options are compared for {LONGEST} steps at "
                "most; take larger batches, fewer epochs or less time"
            )

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
    batch_noise: float
    noise_of_run: float
    lr: float
    expected_loss: float
    strategy: dict[str, Any] | None = None
    groups: int | None = None
    noises_per_step: int = 1
    seconds: float | None = None


def sampler_noise(sampler: str, budget: Budget) -> float:
    """The smallest noise multiplier of independent noise with this sampler, or up to a thousandth more."""
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
        rough=True,
    )
    return sigma


def compare_ways(
    budget: Budget, workload: Workload | None = None, dimension: float = DIMENSION, pace: Pace | None = None
) -> dict[str, Any]:
    """Compares the three options at one budget.

    Args:
        budget: records, batches, epochs and (ε, δ).
        workload: the update that will be used (default: plain SGD).
        dimension: d of correlated/batches.py: the number of directions in which the gradients lie.
        pace: the time of a step. The steps of the budget are those with one Gaussian; correlated noise makes as many
            as fit the same time.

    Returns:
        JSON-serialisable values: `recommended`, `alike` (the options that accuracy will not distinguish from the
        best), `why`, and `rows` (each option as a mapping, see `Way`).

    Raises:
        InputError: a value is wrong, or the target can't be met.
    """
    update = workload or Workload()
    checks.positive("dimension", dimension)
    ways = []
    for sampler in SAMPLERS:
        sigma = sampler_noise(sampler, budget)
        weights = sigma * noise_in_weights(Strategy("identity"), update, budget.steps)
        of_batches = batch_noise(
            sampler, update, steps=budget.steps, batch=budget.batch, groups=budget.batches, rate=1 / budget.batches,
            dimension=dimension,
        )  # fmt: skip
        ways.append(_way(sampler, budget, sigma, (weights, of_batches), pace))
    tried = [(MOST_NOISES, budget)] if pace is None else _affordable(budget, pace)
    correlated = [_correlated(fitting, update, dimension, most, pace) for most, fitting in tried]
    ways.append(min(correlated, key=lambda way: way.expected_loss))
    return _recommended(*ways) | {"rows": [asdict(way) for way in ways]}


def _affordable(budget: Budget, pace: Pace) -> list[tuple[int, Budget]]:
    """(the most Gaussians per coordinate and step, the budget with the steps that fit the time with so many)."""
    found: dict[int, int] = {}
    for most in _NOISES:
        steps = min(budget.steps, pace.fitting(budget.batch, most))
        if steps:
            found.setdefault(steps, most)
    return [(most, replace(budget, epochs=steps / budget.batches)) for steps, most in found.items()]


def _correlated(budget: Budget, update: Workload, dimension: float, most: int, pace: Pace | None) -> Way:
    found = best_setting(
        records=budget.records, batch=budget.batch, steps=budget.steps, epsilon=budget.epsilon, delta=budget.delta,
        workload=update, dimension=dimension, most=most,
    )  # fmt: skip
    how = {"strategy": found.strategy.to_dict(), "groups": found.pattern.groups}
    noises = len(found.strategy.noise(budget.steps))
    both = found.noise_in_weights, found.batch_noise
    return _way("correlated", budget, found.noise_multiplier, both, pace, noises_per_step=noises, **how)


def _way(way: str, budget: Budget, sigma: float, noises: tuple[float, float], pace: Pace | None, **further: Any) -> Way:
    of_run = math.hypot(*noises) / (budget.batch * budget.steps)
    lr, loss = step_size(of_run, budget.steps), expected_loss(of_run, budget.steps)
    if pace is not None:
        further["seconds"] = budget.steps * pace.step(budget.batch, further.get("noises_per_step", 1))
    return Way(way, budget.batch, budget.steps, sigma, sigma / budget.batch, *noises, of_run, lr, loss, **further)


def step_size(noise_of_run: float, steps: int) -> float:
    """A step size to start tuning at: the best one of plain SGD by the model of the module, for clip norm 1."""
    return float(min(TIME * noise_of_run ** (-2 / 3) / steps, LARGEST_STEP))


def expected_loss(noise_of_run: float, steps: int) -> float:
    """Points of accuracy that noise and the limited training time cost, by the model of the module."""
    missing = LOSS * TIME / 1.5
    time = step_size(noise_of_run, steps) * steps
    return missing / time + missing / (2 * TIME**3) * (noise_of_run * time) ** 2


def _recommended(poisson: Way, allocation: Way, correlated: Way) -> dict[str, Any]:
    """The simplest of the options that are alike with the best, those options, and the reason."""
    ways = (poisson, allocation, correlated)
    least = min(way.expected_loss for way in ways)
    alike = [way.way for way in ways if way.expected_loss <= least + ALIKE]
    more = {way.way: way.expected_loss - least for way in ways}
    same = poisson.noise_multiplier <= (1 + _SAME) * allocation.noise_multiplier and "poisson" in alike
    chosen = "poisson" if same else "allocation" if "allocation" in alike else "correlated"
    return {"recommended": chosen, "alike": alike, "why": _why(chosen, alike, more, correlated)}


def _why(chosen: str, alike: list[str], more: Mapping[str, float], correlated: Way) -> str:
    """The reason in words; `more`: the points of accuracy that each option is expected to lose against the best."""
    others = [name for name in alike if name != chosen]
    lost = ", ".join(f"{name} {value:.1f}" for name, value in more.items())
    tie = f"accuracy will not show a difference to {' or '.join(others)} (within {ALIKE:g} points); " if others else ""
    if chosen == "correlated":
        reason = (
            f"correlated noise ({(correlated.strategy or {})['name']}, {correlated.groups} groups) puts less noise "
            f"into the weights; each step adds {correlated.noises_per_step} Gaussians for each coordinate"
        )
    elif chosen == "allocation":
        reason = "random allocation uses every record once per epoch, and takes no more time than Poisson sampling"
    else:
        reason = "random allocation needs the same noise, and Poisson sampling can be resumed at any step"
    return f"{tie}{reason}; points of accuracy that each option is expected to lose against the best: {lost}"


def compare_batches(
    *,
    records: int,
    epochs: float | None = None,
    pace: Pace | None = None,
    epsilon: float,
    delta: float,
    batches: Sequence[int] | None = None,
    workload: Workload | None = None,
    dimension: float = DIMENSION,
) -> dict[str, Any]:
    """`compare_ways` at several batches, in equally many epochs or in equal time.

    Args:
        records: The public number of records.
        epochs: Expected passes over them; or give `pace`.
        pace: The time that the run may take, and what a step takes: each batch makes the steps that fit.
        epsilon: The target, under add-remove.
        delta: δ in (0, 1).
        batches: steps in an epoch (default: those of batches near 4096, 1024 and 256, as far as there are records).
        workload: the update that will be used (default: plain SGD).
        dimension: as in `compare_ways`.

    Returns:
        JSON-serialisable values: `batch`, the largest one that is expected to lose at most `ALIKE` points more than the
        best; its `recommended`, `alike` and `why`; `by_batch` (the same for each batch); `rows` of all batches; with a
        pace `time` (what was given) and the `seconds` of each row.

    Raises:
        InputError: a value is wrong.
    """
    checks.exactly_one(epochs=epochs, pace=pace)
    checks.count("records", records)
    if pace is None:
        chosen = default_batches(records, checks.positive("epochs", epochs)) if batches is None else list(batches)
        budgets = [Budget(records, count, float(epochs or 0), epsilon, delta) for count in sorted(set(chosen))]
    else:
        budgets = _timed(records, pace, batches, epsilon, delta)
    made = [compare_ways(budget, workload, dimension, pace) for budget in budgets]
    losses = [next(row["expected_loss"] for row in one["rows"] if row["way"] == one["recommended"]) for one in made]
    place = next(place for place, loss in enumerate(losses) if loss <= min(losses) + ALIKE)
    shown = ("recommended", "alike", "why")
    return {
        "batch": budgets[place].batch,
        **{key: made[place][key] for key in shown},
        "by_batch": [
            {"batch": budget.batch, "expected_loss": loss, **{key: one[key] for key in shown}}
            for budget, one, loss in zip(budgets, made, losses, strict=True)
        ],
        "relation": "add-remove",
        "rows": [row for one in made for row in one["rows"]],
        **({} if pace is None else {"time": pace.to_dict()}),
    }


def _timed(records: int, pace: Pace, batches: Sequence[int] | None, epsilon: float, delta: float) -> list[Budget]:
    """The budgets of the steps that fit; without chosen batches those of `_sizes` for which at least one does."""
    chosen = [math.ceil(records / size) for size in _sizes(records)] if batches is None else sorted(set(batches))
    fitting = {
        count: pace.steps(records / checks.count("batches", count))
        for count in chosen
        if batches is not None or pace.fitting(records / count) or count == chosen[-1]
    }
    if batches is None:  # with too many steps as well
        few = {count: steps for count, steps in fitting.items() if steps <= LONGEST}
        fitting = few or {chosen[0]: fitting[chosen[0]]}
    return [Budget(records, count, steps / count, epsilon, delta) for count, steps in fitting.items()]


def default_batches(records: int, epochs: float = 1.0) -> list[int]:
    """Steps in an epoch for batches near 4096, 1024 and 256, as far as there are records and not too many steps."""
    found = [math.ceil(records / size) for size in _sizes(records)]
    return [count for count in found if count * epochs <= LONGEST] or [max(1, min(found[0], int(LONGEST / epochs)))]


def _sizes(records: int) -> list[int]:
    """Batches to compare, from large to small."""
    return [size for size in _SIZES if size <= records / 2] or [max(1, records // 4)]
