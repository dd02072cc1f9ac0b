"""The smallest noise multiplier whose ε is at most the target, to within 1e-3 of the target."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from sordino import checks
from sordino.accounting.account import LossTooLarge, checked_releases, composed_epsilon
from sordino.accounting.events import DpEvent, flatten
from sordino.accounting.grids import TOLERANCE, Releases
from sordino.errors import InputError
from sordino.shown import up

SMALLEST, LARGEST = 0.01, 1e7
_COARSE = 50 * TOLERANCE
_GAP = 2e-4  # largest distance of ε below the target, relative (absolute for targets above 1)
_NEAR = 5e-3  # the same for the search with coarse grids


def calibrate(
    make_event: Callable[[float], DpEvent],
    target_epsilon: float,
    delta: float,
    relation: str = "add-remove",
    accountant: str = "pld",
    *,
    guess: float = 1.0,
    rough: bool = False,
) -> tuple[float, float]:
    """The smallest noise multiplier with which a run meets a target ε.

    Args:
        make_event: Maps a noise multiplier to the event of a run; its ε must not increase with the noise. Releases
            with fixed noise (statistics) are part of the event.
        target_epsilon: The target.
        delta: δ in (0, 1).
        relation: "add-remove" or "replace-one".
        accountant: "pld" or "rdp".
        guess: The noise multiplier where the search starts; it affects the time only.
        rough: Compute ε on coarse grids only: several times faster, and as sure to meet the target, with up to a
            thousandth more noise than is needed. For comparisons.

    Returns:
        (noise_multiplier, ε) with target − 1e-3·min(1, target) ≤ ε ≤ target.

    Raises:
        InputError: a value is wrong, or no noise multiplier meets the target: the releases with fixed noise alone
            exceed it, or even the smallest noise multiplier meets it.
        Refused: no theorem covers the event under this relation.
    """
    target = checks.positive("target epsilon", target_epsilon)
    delta = checks.delta_value(delta)
    checks.choice("relation", relation, checks.RELATIONS)
    checks.choice("accountant", accountant, checks.ACCOUNTANTS)

    def releases(sigma: float) -> Releases:
        return checked_releases(flatten(make_event(sigma)))

    def evaluated(sigma: float, tolerance: float) -> float:
        try:
            return composed_epsilon(releases(sigma), delta, relation, accountant, tolerance=tolerance)[0]
        except LossTooLarge:
            if sigma >= LARGEST:
                raise
            return math.inf

    def coarse(sigma: float) -> float:
        return evaluated(sigma, _COARSE)

    def fine(sigma: float) -> float:
        return evaluated(sigma, TOLERANCE)

    guess = min(max(guess, 10 * SMALLEST), LARGEST / 10)
    if accountant == "rdp":  # it has no coarse version
        return _bracket(fine, fine, target, guess, gap=_GAP)[1]
    try:
        low, high = _bracket(coarse, fine, target, guess, gap=_GAP if rough else _NEAR)
        if rough:
            return high
    except _TooCoarse:
        low, high = _bracket(fine, fine, target, guess, gap=_NEAR)
    return _bracket(fine, fine, target, high[0], gap=_GAP, slope=_slope(low, high))[1]


class _TooCoarse(Exception):
    """The coarse ε stays above the target where the fine one does not."""


Point = tuple[float, float]


def _bracket(
    function: Callable[[float], float],
    exact: Callable[[float], float],
    target: float,
    start: float,
    *,
    gap: float,
    slope: float | None = None,
) -> tuple[Point, Point]:
    """Points (σ, ε) on both sides of the target, the right one at most `gap` below it: secants in log σ, log ε.

    As long as there are points on one side only, the next σ follows from `slope`, d log ε / d log σ, and twice as far
    every time; without a slope it is half or twice the last one, and so on.
    """
    allowed = gap * min(1.0, target)
    aim = target - allowed / 2
    low: Point | None = None
    high: Point | None = None
    sigma, factor, further = start, 2.0, 1.0
    for _ in range(200):
        value = function(sigma)
        if value <= target:
            high = (sigma, value)
            if target - value <= allowed:
                return low or (sigma * (1 - 1e-9), target), high
        else:
            low = (sigma, value)
        if low and high:
            if high[0] / low[0] - 1 < 1e-12:
                return low, high
            sigma = _secant(low, high, aim)
            continue
        if slope is not None and 0 < value < math.inf:
            moved, further = sigma * math.exp(further * math.log(aim / value) / slope), 2 * further
        else:
            moved, factor = sigma / factor if high else sigma * factor, factor**2
        sigma = _limited(moved, exact, target, (sigma, value))
    raise InputError(f"no noise multiplier was found for ε = {up(target)}; ε may not be monotone in the noise")


def _slope(low: Point, high: Point) -> float | None:
    """d log ε / d log σ between two points; None if it can't be computed."""
    (s0, e0), (s1, e1) = low, high
    if e1 <= 0 or math.isinf(e0) or s1 / s0 - 1 < 1e-6 or e0 <= e1:
        return None
    return math.log(e1 / e0) / math.log(s1 / s0)


def _secant(low: Point, high: Point, target: float) -> float:
    """Where the line through the two points, in logarithms, meets the target; kept away from the ends."""
    (s0, e0), (s1, e1) = low, high
    if e1 <= 0 or math.isinf(e0):
        return math.sqrt(s0 * s1)
    share = (math.log(e0) - math.log(target)) / max(math.log(e0) - math.log(e1), 1e-300)
    share = min(max(share, 0.02), 0.98)
    return math.exp(math.log(s0) + share * (math.log(s1) - math.log(s0)))


def _limited(sigma: float, exact: Callable[[float], float], target: float, last: Point) -> float:
    if sigma > LARGEST:
        if last[0] >= LARGEST:
            smallest = exact(LARGEST)
            if smallest <= target:
                raise _TooCoarse
            raise InputError(
                f"ε = {up(target)} can't be reached at this δ: even with a noise multiplier of {LARGEST:g}, ε is "
                f"{up(smallest, 6)}. The other releases of the plan (statistics) cost that much: give them more noise, "
                f"or raise ε"
            )
        return LARGEST
    if sigma < SMALLEST:
        if last[0] <= SMALLEST:
            raise InputError(
                f"ε = {up(target)} is met even with a noise multiplier of {SMALLEST:g} (ε = {up(last[1], 6)}): this "
                f"target asks for no privacy; give noise_multiplier instead if that is what you want"
            )
        return SMALLEST
    return sigma


def gaussian_guess(sampling_rate: float, steps: int, epsilon: float, delta: float) -> float:
    """An initial noise multiplier from the central limit (Dong, Roth, Su 2022, Cor. 4): μ = q·√(T·(e^{1/σ²} − 1))."""
    mu = epsilon / math.sqrt(2 * math.log(1 / delta) + 2 * epsilon)
    ratio = mu / (sampling_rate * math.sqrt(steps))
    return math.log1p(ratio**2) ** -0.5 if ratio > 1e-9 else 1 / ratio


def noise_guess(sampling: dict[str, Any], steps: int, records: int, epsilon: float, delta: float) -> float:
    """The noise multiplier where calibration starts; a poor guess costs time but not correctness."""
    if sampling["name"] == "partition":
        return gaussian_guess(1.0, math.ceil(steps / max(records // sampling["batch"], 1)), epsilon, delta) * 2
    if sampling["name"] == "allocation":
        return gaussian_guess(1 / sampling["batches"], steps, epsilon, delta)
    if sampling["name"] == "cyclic":
        return gaussian_guess(sampling["sampling_rate"], math.ceil(steps / sampling["batches"]), epsilon, delta)
    if sampling["name"] == "without-replacement":
        return gaussian_guess(sampling["batch"] / records, steps, epsilon, delta) * 2
    return gaussian_guess(sampling["sampling_rate"], steps, epsilon, delta)
