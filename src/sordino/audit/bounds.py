"""From a number of right guesses to a lower bound on ε: the statistics of an audit in one run.

The experiment. m canaries, each in or out by its own fair coin; one run of the mechanism; an auditor who sees
everything that was released guesses the coins of r canaries, r fixed before the run, and is right v times.

Two tests of "the mechanism is private", both valid for every mechanism and every auditor:

* `p_value`: (ε, δ)-DP. Steinke, Nasr and Jagielski, "Privacy auditing with one (1) training run", 2023,
  Thm 5.2.
* `p_value_curve`: f-DP. After Mahloujifar, Melis and Chaudhuri, "Auditing f-differential privacy in one run",
  2024. The whole trade-off curve of the claim is tested, which is stronger. The inequality and the
  recursion are proved in docs/guarantees/audit.md; the proof allows abstentions.

Edge cases: no guess or no right guess gives the p-value 1 and the lower bound 0.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from scipy import optimize, special, stats

from sordino.errors import InputError

_VACUOUS = 500.0  # a larger ε claims nothing that can be tested, and its exponential nears the largest double

EPSILON_LIMIT = 60.0
"""No audit can show more: that would need e^60 canaries."""


def one_run_epsilon(correct: int, guesses: int, canaries: int, delta: float, confidence: float = 0.95) -> float:
    """A lower bound on ε: the largest ε such that (ε', δ)-DP is rejected for every ε' < ε.

    If the mechanism is (ε*, δ)-DP, the bound exceeds ε* with probability at most 1 − confidence.

    Args:
        correct: The number of right guesses.
        guesses: The number of guesses, fixed before the run.
        canaries: The number of canaries.
        delta: δ in [0, 1).
        confidence: The confidence of the bound, in [0.5, 1).

    Returns:
        The bound; 0 if no ε is rejected.

    Raises:
        InputError: a value is wrong.
    """
    check_counts(correct, guesses, canaries)
    if not 0.0 <= delta < 1.0:
        raise InputError(f"delta = {delta}: give a value in [0, 1)")
    level = 1.0 - check_confidence(confidence)

    def rejected(epsilon: float) -> bool:
        return p_value(correct, guesses, canaries, epsilon, delta) < level

    return _first_crossing(rejected, EPSILON_LIMIT, monotone=2.0 * canaries * delta <= 1.0)


def p_value(correct: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """Bound on the probability of at least `correct` right guesses under (ε, δ)-DP.

    P[B ≥ v] + 2mδ · max_i P[v−i ≤ B < v]/i with B ~ Bin(r, e^ε/(1+e^ε))   (Thm 5.2).
    Non-decreasing in ε while 2mδ ≤ 1, since d/dq P[B ≥ k] = r·P[Bin(r−1, q) = k−1].
    """
    if correct == 0:
        return 1.0
    accuracy = float(special.expit(epsilon))
    tail = float(stats.binom.sf(correct - 1, guesses, accuracy))
    if delta == 0.0:
        return tail
    below = np.cumsum(stats.binom.pmf(np.arange(correct - 1, -1, -1), guesses, accuracy))
    excess = float(np.max(below / np.arange(1, correct + 1)))
    return min(1.0, tail + 2.0 * canaries * delta * excess)


class Curve(Protocol):
    """A claim as a trade-off function (f-DP)."""

    def least_false(self, true: float) -> float:
        """Least probability, without the record, of an event that has probability `true` with it.

        The inverse of y = 1 − f(x) for the trade-off function f. Convex, non-decreasing, 0 at 0.
        """
        ...

    def __hash__(self) -> int:
        """A frozen value, so that results computed from it can be cached."""
        ...


@dataclass(frozen=True)
class GaussianCurve:
    """μ-GDP: neighbouring datasets are at least as hard to distinguish as N(0, 1) and N(μ, 1)."""

    mu: float

    def least_false(self, true: float) -> float:
        return float(special.ndtr(special.ndtri(true) - self.mu))


@dataclass(frozen=True)
class ProfileCurve:
    """(ε_k, δ_k)-DP for all k: finitely many points of a privacy profile. More points make a stronger claim.

    By Wasserman and Zhou 2010: P(B) ≤ δ + e^ε Q(B), applied to B and to its complement, in both directions.
    """

    epsilons: tuple[float, ...]
    deltas: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.epsilons) != len(self.deltas) or not self.epsilons:
            raise InputError("a profile needs as many deltas as epsilons, and at least one")

    @cached_property
    def _envelope(self) -> tuple[list[float], list[tuple[float, float]]]:
        """(breakpoints, lines) of the largest of x ≥ 0, x ≥ e^−ε(y−δ) and x ≥ 1−δ−e^ε(1−y)."""
        lines = [(0.0, 0.0)]
        for epsilon, delta in zip(self.epsilons, self.deltas, strict=True):
            if epsilon > _VACUOUS:  # leaving out a point weakens the claim, and the test stays valid
                continue
            grow = math.exp(epsilon)
            lines += [(1.0 / grow, -delta / grow), (grow, 1.0 - delta - grow)]
        return upper_envelope(lines)

    def least_false(self, true: float) -> float:
        breaks, lines = self._envelope
        slope, offset = lines[bisect_right(breaks, true)]
        return slope * true + offset


def upper_envelope(lines: Sequence[tuple[float, float]]) -> tuple[list[float], list[tuple[float, float]]]:
    """The lines (slope, offset) that are largest somewhere, by slope, and the points where one meets the next."""
    kept: list[tuple[float, float]] = []
    breaks: list[float] = []
    for slope, offset in sorted(lines):  # of equal slopes the later has the larger offset
        while kept:
            meet = (kept[-1][1] - offset) / (slope - kept[-1][0]) if slope > kept[-1][0] else -math.inf
            if meet > (breaks[-1] if breaks else -math.inf):
                breaks.append(meet)
                break
            kept.pop()
            del breaks[-1:]
        kept.append((slope, offset))
    return breaks, kept


def p_value_curve(curve: Curve, correct: int, guesses: int, canaries: float) -> float:
    """Bound on the probability of at least `correct` right guesses under the curve's f-DP (bisection)."""
    check_counts(correct, guesses, canaries)
    low, high = -40.0, 0.0  # log of the probability
    if not rejects(curve, correct, guesses, canaries, level=1.0 - 1e-12):
        return 1.0
    if rejects(curve, correct, guesses, canaries, level=math.exp(low)):
        return math.exp(low)
    for _ in range(30):
        middle = 0.5 * (low + high)
        if rejects(curve, correct, guesses, canaries, level=math.exp(middle)):
            high = middle
        else:
            low = middle
    return math.exp(high)


def combined(p_values: Sequence[float]) -> float:
    """Fisher's p-value of independent tests of one claim: −2·Σ log p is at most a χ² variable with 2K degrees."""
    return float(stats.chi2.sf(-2.0 * sum(map(math.log, p_values)), 2 * len(p_values)))


def rejects(curve: Curve, correct: int, guesses: int, canaries: float, level: float) -> bool:
    """Whether P[N ≥ correct] ≥ level is impossible for every mechanism that satisfies the curve.

    With t_j = P[N ≥ j], f-DP and averaging over the canaries give for every j < r (docs/guarantees/audit.md)

        (r−j)·t_j ≥ Σ_{i>j} t_i + m·g( ((j+1)·t_{j+1} + Σ_{i>j+1} t_i)/m ),     g = curve.least_false.

    The right-hand side grows with every t_i, so the least sequence with t_v = level is found greedily, from
    v down to 0; if it exceeds 1, no distribution of N exists. If all guesses are the same, m is half of the canaries
    (`Guesses.places`).
    """
    if correct == 0:
        return False
    current, above = level, 0.0  # t_{j+1} and Σ_{i>j+1} t_i
    for j in range(correct - 1, -1, -1):
        true = ((j + 1) * current + above) / canaries
        if true >= 1.0:
            return True
        above += current
        current = max(current, (above + canaries * curve.least_false(true)) / (guesses - j))
        if current > 1.0:
            return True
    return False


def one_run_mu(correct: int, guesses: int, canaries: int, confidence: float = 0.95) -> float:
    """A lower bound on μ: the largest μ such that μ'-GDP is rejected for every μ' < μ.

    Args:
        correct: The number of right guesses.
        guesses: The number of guesses, fixed before the run.
        canaries: The number of canaries.
        confidence: The confidence of the bound, in [0.5, 1).

    Returns:
        The bound, at most 16; 0 if no μ is rejected.

    Raises:
        InputError: a value is wrong.
    """
    check_counts(correct, guesses, canaries)
    level = 1.0 - check_confidence(confidence)

    def rejected(mu: float) -> bool:
        return rejects(GaussianCurve(mu), correct, guesses, canaries, level)

    return _first_crossing(rejected, limit=16.0, monotone=True)


def one_run_epsilon_gaussian(
    correct: int, guesses: int, canaries: int, delta: float, confidence: float = 0.95
) -> float:
    """The ε at δ of `one_run_mu`: a lower bound for a mechanism whose trade-off curve is that of a Gaussian.

    Args:
        correct: The number of right guesses.
        guesses: The number of guesses, fixed before the run.
        canaries: The number of canaries.
        delta: δ in (0, 1).
        confidence: The confidence of the bound, in [0.5, 1).

    Returns:
        The bound; 0 if no μ is rejected.

    Raises:
        InputError: a value is wrong.
    """
    return gaussian_epsilon(one_run_mu(correct, guesses, canaries, confidence), delta)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The ε of μ-GDP at δ (Dong, Roth and Su 2022, Cor. 2.13; Balle and Wang 2018)."""
    if mu <= 0.0:
        return 0.0

    def gap(epsilon: float) -> float:
        return gaussian_delta(mu, epsilon) - delta

    if gap(0.0) <= 0.0:
        return 0.0
    high = 1.0
    while gap(high) > 0.0:
        high *= 2.0
    return float(optimize.brentq(gap, 0.0, high, xtol=1e-12))


def gaussian_delta(mu: float, epsilon: float) -> float:
    """δ_μ(ε) = Φ(−ε/μ+μ/2) − e^ε·Φ(−ε/μ−μ/2)."""
    first = float(special.log_ndtr(-epsilon / mu + mu / 2.0))
    second = epsilon + float(special.log_ndtr(-epsilon / mu - mu / 2.0))
    return math.exp(first) * -math.expm1(second - first)


def most_correct(curve: Curve, guesses: int, canaries: int) -> float:
    """Largest expected number of right guesses that the curve allows: N/m = 1 − f((r−N)/m)."""

    def gap(right: float) -> float:
        return canaries * curve.least_false(right / canaries) - (guesses - right)

    if gap(guesses) <= 0.0:
        return float(guesses)
    return float(optimize.brentq(gap, 0.0, guesses, xtol=1e-9))


def check_counts(correct: int, guesses: int, canaries: float) -> None:
    if not 0 <= correct <= guesses <= canaries or canaries < 1:
        raise InputError(
            f"correct = {correct}, guesses = {guesses}, canaries = {canaries}: they must satisfy "
            "0 ≤ correct ≤ guesses ≤ canaries, with at least one canary"
        )


def check_confidence(confidence: float) -> float:
    if not 0.5 <= confidence < 1.0:
        raise InputError(f"confidence = {confidence}: give a value in [0.5, 1), for example 0.95")
    return confidence


def _first_crossing(rejected: Callable[[float], bool], limit: float, *, monotone: bool) -> float:
    """The infimum of the values that are not rejected; without `monotone`, searched on a fine grid from 0 upwards."""
    if not rejected(0.0):
        return 0.0
    grid: Sequence[float] = [limit] if monotone else np.linspace(0.0, limit, 1201)[1:].tolist()
    low = 0.0
    for value in grid:
        if not rejected(value):
            break
        low = value
    else:
        return limit
    high = value
    for _ in range(45):
        middle = 0.5 * (low + high)
        if rejected(middle):
            low = middle
        else:
            high = middle
    return low
