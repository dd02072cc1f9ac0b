"""Chooses the strategy of a plan by its error formula: the noise in the weights at equal ε.

For a pattern the noise in the weights is σ·s(C)·‖A·C⁻¹‖_F/√T with a σ that depends on the pattern alone, so C is chosen
by s(C)·‖A·C⁻¹‖_F. Between patterns σ is calibrated, and the sampling noise is included (batches.py): it is
larger if parts of groups are drawn. Nothing here is part of a guarantee.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from sordino.errors import InputError, Refused
from sordino.methods.correlated.batches import DIMENSION, batch_noise
from sordino.methods.correlated.mechanism import Pattern, calibrated, moves, pattern_of
from sordino.methods.correlated.strategies import Strategy
from sordino.methods.correlated.workloads import Workload, noise_in_weights

MOST_NOISES = 64
"""Largest number of Gaussians per coordinate and step of a strategy that is chosen here; a named one may have more."""
LONGEST = 10**6
"""Largest number of steps for which a strategy is chosen, in about 20 seconds; a named one may have more."""
_BANDS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_LAMBDAS = 1 - np.geomspace(0.5, 2e-3, 14)


@dataclass(frozen=True)
class Found:
    """A setting with the noise that meets the budget, and the noise in the weights, in clip norms."""

    pattern: Pattern
    strategy: Strategy
    noise_multiplier: float
    noise_in_weights: float
    batch_noise: float

    @property
    def total_noise(self) -> float:
        """The noise of the mechanism and of sampling together, in the weights."""
        return math.hypot(self.noise_in_weights, self.batch_noise)


@functools.lru_cache(128)
def best_strategy(pattern: Pattern, workload: Workload, steps: int, most: int = MOST_NOISES) -> Strategy:
    """The strategy with the least noise in the weights for this pattern, of those with at most `most` Gaussians per
    coordinate and step; InputError for more than `LONGEST` steps."""
    if steps > LONGEST:
        raise InputError(
            f"steps = {steps}: a strategy for correlated noise is chosen for {LONGEST} steps at most: take larger "
            "batches, or name the strategy"
        )
    found = [s for s in _candidates(pattern, workload, steps, most) if len(s.noise(steps)) <= most]
    return min(found, key=lambda s: _error(s, pattern, workload, steps))


def best_setting(
    *,
    records: int,
    batch: float,
    steps: int,
    epsilon: float,
    delta: float,
    workload: Workload,
    strategy: Strategy | None = None,
    relation: str = "add-remove",
    dimension: float = DIMENSION,
    most: int = MOST_NOISES,
) -> Found:
    """The number of groups and the strategy with the least noise in the weights at this ε, sampling noise included.

    A strategy that is not named has at most `most` Gaussians per coordinate and step.

    Raises:
        InputError: no strategy is named, and there are more than `LONGEST` steps.
        Refused: the named strategy is possible with no number of groups.
    """
    found = []
    for pattern in patterns(records, batch):
        try:
            chosen = strategy or best_strategy(pattern, workload, steps, most)
            if relation == "replace-one" and pattern.rate < 1:
                continue
            sigma = calibrated(chosen, pattern, steps, epsilon, delta, relation)
        except Refused:  # a named strategy that does not fit this pattern
            continue
        of_batches = batch_noise(
            "cyclic", workload, steps=steps, batch=records * pattern.rate / pattern.groups, groups=pattern.groups,
            rate=pattern.rate, dimension=dimension,
        )  # fmt: skip
        found.append(Found(pattern, chosen, sigma, sigma * noise_in_weights(chosen, workload, steps), of_batches))
    if not found:
        raise Refused(f"no number of groups here is possible with {strategy}: use fewer bands, or another strategy")
    return min(found, key=lambda one: one.total_noise)


def patterns(records: int, batch: float) -> list[Pattern]:
    """Whole groups in a fixed order, and 2, 4, 8, … groups of which parts are sampled."""
    whole = pattern_of(records, batch, None)
    return [whole] + [pattern_of(records, batch, 1 << n) for n in range(1, 7) if 1 << n < whole.groups]


def _error(strategy: Strategy, pattern: Pattern, workload: Workload, steps: int) -> float:
    return moves(strategy, pattern, steps) * noise_in_weights(strategy, workload, steps)


def _candidates(pattern: Pattern, workload: Workload, steps: int, most: int) -> Iterator[Strategy]:
    yield Strategy("identity")
    if pattern.rate == 1:
        yield _best_lambda((Strategy("lambda", float(x)) for x in _LAMBDAS), pattern, workload, steps)
        yield from (Strategy("inverse-root", bands=p) for p in _BANDS if p <= min(steps, most))
        return
    for bands in _BANDS:
        if bands > min(pattern.groups, steps):
            return
        made = [Strategy("banded-lambda", float(x), bands) for x in _LAMBDAS]
        few = [s for s in [Strategy("banded-root", bands=bands), *made] if len(s.noise(steps)) <= most]
        if few:
            yield min(few, key=lambda s: _error(s, pattern, workload, steps))


def _best_lambda(made: Iterable[Strategy], pattern: Pattern, workload: Workload, steps: int) -> Strategy:
    """The best of some values of λ, refined between its neighbours."""
    tried = sorted((_error(s, pattern, workload, steps), s.value or 0.0) for s in made)
    values = sorted(value for _, value in tried)
    place = values.index(tried[0][1])
    low, high = values[max(place - 1, 0)], values[min(place + 1, len(values) - 1)]
    finer = [Strategy("lambda", float(x)) for x in np.linspace(low, high, 17)]
    return min(finer, key=lambda s: _error(s, pattern, workload, steps))
