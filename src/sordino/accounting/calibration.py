"""The smallest noise multiplier whose ε is at most the target, to within 1e-3 of the target."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from sordino import checks
from sordino.accounting.account import TOLERANCE, LossTooLarge, Releases, checked_releases, composed_epsilon
from sordino.accounting.events import DpEvent, flatten
from sordino.errors import InputError
from sordino.shown import up

SMALLEST, LARGEST = 0.01, 1e7
_COARSE = 50 * TOLERANCE
_GAP = 2e-4  # largest distance of ε below the target, relative (absolute for targets above 1)


def calibrate(
    make_event: Callable[[float], DpEvent],
    target_epsilon: float,
    delta: float,
    relation: str = "add-remove",
    accountant: str = "pld",
    *,
    guess: float = 1.0,
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
        low, high = _bracket(coarse, fine, target, guess, gap=0.02)
    except _TooCoarse:
        low, high = _bracket(fine, fine, target, guess, gap=0.02)
    low, high = _bracket(fine, fine, target, math.sqrt(low[0] * high[0]), gap=_GAP, known=(low, high))
    return high


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
    known: tuple[Point, Point] | None = None,
) -> tuple[Point, Point]:
    """Points (σ, ε) on both sides of the target, the right one at most `gap` below it: secants in log σ, log ε."""
    allowed = gap * min(1.0, target)
    low: Point | None = None
    high: Point | None = None
    sigma = start
    step = 1.02 if known else 2.0
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
            sigma = _secant(low, high, target - allowed / 2)
        elif high:
            sigma, step = _limited(high[0] / step, exact, target, high), step**2
        else:
            assert low is not None
            sigma, step = _limited(low[0] * step, exact, target, low), step**2
    raise InputError(f"no noise multiplier was found for ε = {up(target)}; ε may not be monotone in the noise")


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
