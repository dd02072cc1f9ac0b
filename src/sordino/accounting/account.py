"""ε of a composition of releases: the grid is chosen so that the answer is tight, and it never lies below the truth."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dp_accounting import get_epsilon_gaussian

from sordino.accounting import checks
from sordino.accounting.events import DpEvent, Release, flatten
from sordino.accounting.pairs import GridTooLarge, Pmf
from sordino.accounting.pld import Composition, Repeated
from sordino.accounting.rdp import rdp_epsilon, supports
from sordino.errors import InputError, Refused

Releases = Sequence[tuple[Release, int]]

TOLERANCE = 2e-5  # relative excess of ε that the discretisation may cost
_TAIL = 1e-6  # fraction of δ that truncated tails may cost
_MAX_COUNT = 10**12


@dataclass(frozen=True)
class Account:
    """ε at δ. `accountant` is the one that gave `epsilon`: "pld", "rdp", or "gaussian" (closed form)."""

    epsilon: float
    delta: float
    relation: str
    accountant: str
    epsilon_rdp: float | None
    epsilon_lower: float | None = None


def account(event: DpEvent, delta: float, relation: str = "add-remove", accountant: str = "pld") -> Account:
    """ε of the event at δ, with the Rényi bound beside it where there is one."""
    delta = checks.delta_value(delta)
    checks.choice("relation", relation, checks.RELATIONS)
    checks.choice("accountant", accountant, checks.ACCOUNTANTS)
    releases = checked_releases(flatten(event))
    value, name = composed_epsilon(releases, delta, relation, accountant)
    if name == "rdp":
        return Account(value, delta, relation, name, value)
    beside = rdp_epsilon(releases, delta, relation) if supports(releases, relation) else None
    if beside is not None and beside < value:
        value, name = beside, "rdp"
    return Account(value, delta, relation, name, beside)


def epsilon(event: DpEvent, delta: float, relation: str = "add-remove", accountant: str = "pld") -> float:
    """ε of the event at δ."""
    delta = checks.delta_value(delta)
    checks.choice("relation", relation, checks.RELATIONS)
    checks.choice("accountant", accountant, checks.ACCOUNTANTS)
    return composed_epsilon(checked_releases(flatten(event)), delta, relation, accountant)[0]


def composed_epsilon(
    releases: Releases, delta: float, relation: str, accountant: str, *, tolerance: float = TOLERANCE
) -> tuple[float, str]:
    """(ε, the accountant that gave it) of checked releases. A loss beyond the PLD's grid is left to RDP."""
    if accountant == "rdp":
        if not supports(releases, relation):
            raise Refused(f"there is no Rényi bound for {_describe(releases)} under {relation}; use accountant='pld'")
        return rdp_epsilon(releases, delta, relation), "rdp"
    try:
        return pld_epsilon(releases, delta, relation, tolerance)
    except GridTooLarge as error:
        if supports(releases, relation):
            return rdp_epsilon(releases, delta, relation), "rdp"
        raise InputError(
            f"the privacy loss of {_describe(releases)} is too large for the PLD accountant ({error}), and there is no "
            f"Rényi bound for it: use more noise or fewer steps"
        ) from None


def pld_epsilon(releases: Releases, delta: float, relation: str, tolerance: float = TOLERANCE) -> tuple[float, str]:
    """(ε, accountant) by privacy loss distributions, or the closed form when only unsampled Gaussians are released."""
    gaussian, rest = _merge(releases, relation)
    if gaussian is None and not rest:
        return 0.0, "pld"
    if not rest:
        assert gaussian is not None
        return _closed_form(gaussian, delta), "gaussian"
    if _total_variation(releases, relation) <= delta:
        return 0.0, "pld"
    everything = list(rest)
    if gaussian is not None:  # relation is already in the scale
        everything.append((Release("gaussian", gaussian * (1 if relation == "add-remove" else 2)), 1))
    return _on_grid(everything, delta, relation, tolerance), "pld"


def _merge(releases: Releases, relation: str) -> tuple[float | None, list[tuple[Release, int]]]:
    """Unsampled Gaussians are one Gaussian with 1/σ² = Σ 1/σᵢ²; equal other releases are counted together."""
    shift = 1.0 if relation == "add-remove" else 2.0
    precision = 0.0
    rest: dict[Release, int] = {}
    for release, count in releases:
        if release.mechanism == "gaussian" and release.sampling_rate == 1 and release.cap is None:
            precision += count * (shift / release.noise_multiplier) ** 2
        else:
            rest[release] = rest.get(release, 0) + count
    return (precision**-0.5 if precision else None), list(rest.items())


def _closed_form(sigma: float, delta: float) -> float:
    """Balle, Wang 2018, Thm 8: the Gaussian mechanism exactly; the root finder's tolerance is added."""
    value = float(get_epsilon_gaussian(sigma, delta))
    return value + 4e-12 * (1 + value) if value > 0 else 0.0


def _total_variation(releases: Releases, relation: str) -> float:
    """Σ of the total variations of the releases: at or below δ, (0, δ)-DP holds."""
    total = 0.0
    shift = 1.0 if relation == "add-remove" else 2.0
    for release, count in releases:
        size = shift * (2.0 if release.cap is not None else 1.0) / release.noise_multiplier
        one = math.erf(size / 2 / math.sqrt(2)) if release.mechanism == "gaussian" else -math.expm1(-size / 2)
        total += count * release.sampling_rate * one
    return total


def _on_grid(releases: Releases, delta: float, relation: str, tolerance: float) -> float:
    total = sum(count for _, count in releases)
    tail = max(delta * _TAIL / total, 1e-300)
    builders = [(release.discretiser(relation), count) for release, count in releases]

    def directions(interval: float) -> tuple[Composition, Composition]:
        built = [(build(interval, tail), count) for build, count in builders]
        return _composition([(f, c) for (f, _), c in built], interval), _composition(
            [(b, c) for (_, b), c in built], interval
        )

    interval = _interval(directions, delta, tolerance, total)
    for _ in range(12):
        try:
            return max(side.epsilon(delta, side.chernoff(delta)[1]) for side in directions(interval))
        except GridTooLarge:
            interval *= 2
    raise GridTooLarge(f"no grid finer than {interval:.3g} fits")


def _composition(parts: Sequence[tuple[Pmf, int]], interval: float) -> Composition:
    return Composition([Repeated(pmf, count, interval) for pmf, count in parts], interval)


def _interval(
    directions: Callable[[float], tuple[Composition, Composition]], delta: float, tolerance: float, total: int
) -> float:
    """The coarsest grid whose discretisation error is within the tolerance.

    Connect-the-Dots adds at most d²/4, on average d²/6, to the variance of one loss and keeps E e^{−L} = 1, so to first
    order it adds θ(θ+1)/2 · d²/6 to each cumulant, and (θ+1)·T·d²/12 to ε.
    """
    interval = 0.5
    for _ in range(40):
        forward, _ = directions(interval)
        value, tilt = forward.chernoff(delta)
        _, variance = forward.moments(tilt)
        reference = max(0.8 * value, 0.02 * math.sqrt(variance))
        needed = math.sqrt(12 * tolerance * reference / (total * (tilt + 1)))
        if interval <= needed * 1.05:
            return interval
        interval = max(needed, interval / 20)
    return interval


def checked_releases(releases: Releases) -> Releases:
    """The releases, each with noise, rate and count in the range that can be accounted for."""
    for release, count in releases:
        checks.noise_multiplier_value(release.noise_multiplier)
        checks.probability("sampling_rate", release.sampling_rate, allow_one=True)
        if not 0 <= count <= _MAX_COUNT:
            raise InputError(f"the number of releases must lie between 0 and {_MAX_COUNT:.0e}, got {count}")
    return [(release, count) for release, count in releases if count > 0]


def _describe(releases: Releases) -> str:
    kinds = sorted({type(release.event()).__name__.removesuffix("DpEvent") for release, _ in releases})
    return " and ".join(kinds)
