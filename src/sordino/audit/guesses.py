"""The number of coins that an auditor guesses, chosen before the run, and the tests of the right guesses.

Two tests of a claim use the same scores, each with its own number of guesses (docs/guarantees/audit.md):

* `Guesses`: f-DP in one run, valid for every mechanism that has the claim's trade-off curve.
* `OrderedGuesses`: order statistics, valid if the plan's own mechanism makes canaries independent. Much stronger; it
  may reject a claim at level 10⁻⁴ only, so that a mechanism exactly at its claim is not rejected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from sordino.audit.bounds import Curve, combined, p_value_curve, rejects
from sordino.audit.ordered import p_value_ordered
from sordino.audit.scores import SIMULATED, StepScorer

MOST_SHARE = 0.2
"""The largest share of the canaries that may be guessed. Canaries with medium scores are guessed almost by chance."""

LEAST_GUESSES = 350
"""The least number of guesses if there are enough canaries. With fewer a verdict depends on a handful of coins: a
mechanism exactly at its claim is rejected once in 600 runs with 156 guesses of 7,800, once in 280,000 with 390."""

MOST_GUESSES = 12_000
"""The largest number of guesses: the bound is a recursion over the right guesses, and more guesses weaken it."""

ALARM = 1e-4
"""The level at which order statistics may reject a claim: one false alarm in ten thousand audits."""

Family = Callable[[float], Curve]
"""The claim's curve with the noise multiplied by 2ˣ: a stronger claim for larger x."""

G = TypeVar("G", bound="Guesses")


@dataclass(frozen=True)
class Guesses:
    """The numbers of canaries that are guessed to be in (the highest scores) and to be out (the lowest)."""

    inside: int
    outside: int

    @property
    def total(self) -> int:
        return self.inside + self.outside

    def places(self, canaries: int) -> float:
        """The m of the bound: half of the canaries if all guesses are the same (docs/guarantees/audit.md)."""
        return canaries if self.inside and self.outside else canaries / 2

    def rejects(self, curve: Curve, correct: Sequence[int], canaries: int, level: float) -> bool:
        """Whether these numbers of right guesses, one for each independent run, are too large for the curve."""
        if len(correct) == 1:
            return rejects(curve, correct[0], self.total, self.places(canaries), level)
        values = {v: p_value_curve(curve, v, self.total, self.places(canaries)) for v in set(correct)}
        return combined([values[v] for v in correct]) < level

    def correct(self, scores: Tensor, coins: Tensor) -> int:
        order = torch.argsort(scores)
        top, bottom = order[len(order) - self.inside :], order[: self.outside]
        return int(coins[top].sum()) + int((~coins[bottom]).sum())


@dataclass(frozen=True)
class OrderedGuesses(Guesses):
    """Guesses about independent canaries, possibly of several runs together."""

    def rejects(self, curve: Curve, correct: Sequence[int], canaries: int, level: float) -> bool:
        """Whether these numbers of right guesses are too large for the curve and independent canaries."""
        (right,) = correct
        return p_value_ordered(curve, right, self.total, canaries, one_sided=not self.outside) < level


@dataclass(frozen=True)
class Chosen:
    """The guesses of both tests: `any` in each run, `ordered` in all runs together; None: canaries are dependent."""

    any: Guesses
    ordered: OrderedGuesses | None

    def levels(self, confidence: float) -> tuple[float, float]:
        """(of `any`, of `ordered`): together 1 − confidence, so both may be used in one verdict."""
        level = 1.0 - confidence
        apart = min(ALARM, level / 2) if self.ordered is not None else 0.0
        return level - apart, apart


def choose_guesses(
    scorer: StepScorer, values: Tensor, steps: int, canaries: int, family: Family, confidence: float, runs: int = 1
) -> Chosen:
    """The numbers of guesses per run with the largest expected bounds, from a simulation that uses public constants
    only.

    They are fixed before the run and independent of it, so the tests stay valid without a correction. The expected
    bound is computed for the claim's own curves, one standard deviation below the expected number of right guesses.
    """
    simulated = scorer.simulate(values, steps, min(max(SIMULATED[0], runs * canaries), SIMULATED[1]))
    few = Guesses(max(1, canaries // 20), max(1, canaries // 20))
    together = runs * canaries
    surest = OrderedGuesses(max(1, together // 20), max(1, together // 20)) if scorer.independent else None
    level, apart = Chosen(few, surest).levels(confidence)
    few = _best(simulated, _numbers(canaries, runs), canaries, family, level, runs) or few
    if surest is not None:
        surest = _best(simulated, _ordered_numbers(together), together, family, apart, 1) or surest
    return Chosen(few, surest)


def _best(
    simulated: tuple[Tensor, Tensor], numbers: Iterable[G], canaries: int, family: Family, level: float, runs: int
) -> G | None:
    """The guesses with the largest expected bound; None if no bound is positive."""
    coins, scores = simulated
    best, found = math.inf, None
    for guesses in numbers:
        part = len(scores) / canaries
        share = Guesses(round(guesses.inside * part), round(guesses.outside * part))
        accuracy = min(share.correct(scores, coins) / share.total, 1.0 - 1.0 / share.total)
        spread = math.sqrt(guesses.total * accuracy * (1.0 - accuracy) / runs)
        right = [max(0, math.floor(guesses.total * accuracy - spread))] * runs
        promised = least_noise(lambda curve: guesses.rejects(curve, right, canaries, level), family, 5)  # noqa: B023
        if promised < best:
            best, found = promised, guesses
    return found


def _numbers(canaries: int, runs: int) -> Iterator[Guesses]:
    """Numbers of guesses, each √2 times the previous one: all `in`, or half of them `out`."""
    least = min(max(10, LEAST_GUESSES // runs), max(10, canaries // 10))
    total = float(least)
    while total <= max(least, min(MOST_SHARE * canaries, MOST_GUESSES)):
        yield Guesses(round(total), 0)
        yield Guesses(round(total / 2), round(total / 2))
        total *= math.sqrt(2)


def _ordered_numbers(canaries: int) -> Iterator[OrderedGuesses]:
    """From a hundredth of the canaries to almost half of them."""
    total = max(5.0, canaries / 100)
    while total <= 0.45 * canaries:
        yield OrderedGuesses(round(total), 0)
        yield OrderedGuesses(round(total / 2), round(total / 2))
        total *= math.sqrt(2)


def least_noise(rejected: Callable[[Curve], bool], family: Family, halvings: int) -> float:
    """The least x for which the claim with 2ˣ times the noise is rejected, by bisection; inf if none is.

    Between an eighth of the plan's noise and four times as much. `rejected` must be monotone along the family.
    """
    low, high = (-3.0, 0.0) if rejected(family(0.0)) else (0.0, 2.0)
    if high > 0.0 and not rejected(family(high)):
        return math.inf
    for _ in range(halvings):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if rejected(family(middle)) else (middle, high)
    return high
