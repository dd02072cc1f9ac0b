"""ε of a composition of releases: an upper bound, on a grid chosen so that it is tight."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from dp_accounting import get_epsilon_gaussian

from sordino import checks
from sordino.accounting.events import DpEvent, Release, flatten
from sordino.accounting.grids import TOLERANCE, Releases, epsilon_on_grid, lower_on_grid
from sordino.accounting.group import GroupPair
from sordino.accounting.pairs import MAX_LOSS, GridTooLarge
from sordino.accounting.rdp import rdp_epsilon, supports
from sordino.errors import InputError, Refused

_MAX_COUNT = 10**12
# lower bound on losses, which are of the order q/σ: smaller ones vanish when added to 1, and ε would come out as 0
_LEAST_LOSS = 1e-11
_SMALL, _SLACK = 1e-5, 1e-13  # an ε below the first is raised by the second
_LEAST_NOISE = 0.1  # for random allocation with less noise, amplification by sampling is ignored


class LossTooLarge(InputError):
    """ε is too large to be computed. More noise makes it smaller."""


@dataclass(frozen=True)
class Account:
    """ε at δ, an upper bound. `accountant` is the one that gave it: "pld", "rdp", or "gaussian" (closed form)."""

    epsilon: float
    delta: float
    relation: str
    accountant: str
    epsilon_rdp: float | None  # the Rényi bound, for comparison; None if there is none
    epsilon_lower: float | None = None  # a certified lower bound; None if there is none


def account(event: DpEvent, delta: float, relation: str = "add-remove", accountant: str = "pld") -> Account:
    """ε of the event at δ, and the Rényi bound for comparison if there is one.

    Args:
        event: A dp_accounting event, for example that of a plan.
        delta: δ in (0, 1).
        relation: "add-remove" or "replace-one".
        accountant: "pld" or "rdp".

    Returns:
        The account. With "pld" its ε is the Rényi bound if that is smaller.

    Raises:
        InputError: a value is wrong, the event is not supported, or ε is too large to be computed.
        Refused: no theorem covers the event under this relation.
    """
    delta = checks.delta_value(delta)
    checks.choice("relation", relation, checks.RELATIONS)
    checks.choice("accountant", accountant, checks.ACCOUNTANTS)
    releases = checked_releases(flatten(event))
    value, name = composed_epsilon(releases, delta, relation, accountant)
    if name == "rdp":
        return Account(value, delta, relation, name, value)
    below = epsilon_from_below(releases, delta, relation, value)
    renyi = rdp_epsilon(releases, delta, relation) if supports(releases, relation) else None
    if renyi is not None and renyi < value:
        value, name = renyi, "rdp"
    return Account(value, delta, relation, name, renyi, below)


def epsilon(event: DpEvent, delta: float, relation: str = "add-remove", accountant: str = "pld") -> float:
    """ε of the event at δ, by one accountant. Arguments and exceptions are those of `account`."""
    delta = checks.delta_value(delta)
    checks.choice("relation", relation, checks.RELATIONS)
    checks.choice("accountant", accountant, checks.ACCOUNTANTS)
    return composed_epsilon(checked_releases(flatten(event)), delta, relation, accountant)[0]


def composed_epsilon(
    releases: Releases, delta: float, relation: str, accountant: str, *, tolerance: float = TOLERANCE
) -> tuple[float, str]:
    """(ε, its accountant) of checked releases.

    If the loss fits on no grid, ε is the Rényi bound or, if there is none, the bound that ignores sampling.
    """
    if accountant == "rdp":
        if not supports(releases, relation):
            raise Refused(f"there is no Rényi bound for {_describe(releases)} under {relation}; use accountant='pld'")
        return rdp_epsilon(releases, delta, relation), "rdp"
    try:
        return pld_epsilon(releases, delta, relation, tolerance)
    except GridTooLarge as error:
        if supports(releases, relation):
            return rdp_epsilon(releases, delta, relation), "rdp"
        value = _unsampled(releases, delta, relation)
        if value <= MAX_LOSS or (math.isfinite(value) and any(release.batches for release, _ in releases)):
            return value, "gaussian"
        if math.isfinite(value := _pure_epsilon(releases, relation)):
            return value, "pld"
        raise LossTooLarge(
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
    everything = [(_resolved(release), count) for release, count in rest]
    if gaussian is not None:  # its scale already contains the factor of the relation
        everything.append((Release("gaussian", _scaled(gaussian, relation)), 1))
    value = epsilon_on_grid(everything, delta, relation, tolerance)
    if value < _SMALL:  # δ(ε) is a difference of tails, each with the relative error of a double
        value += _SLACK
    return min(value, _pure_epsilon(everything, relation), _unsampled(releases, delta, relation)), "pld"


def _unsampled(releases: Releases, delta: float, relation: str) -> float:
    """ε of the Gaussian mechanism on all records. It dominates every sampled one; for huge noise this bound is smaller.

    By joint convexity the adversary may know the draws. Then a record moves a step's sum by at most one clip norm (an
    epoch of random allocation: the sum of one of its steps), and a user with k rows by at most k clip norms.
    """
    if any(release.mechanism != "gaussian" for release, _ in releases):
        return math.inf
    return _closed_form(sum(count * _shift(r, relation) ** 2 for r, count in releases) ** -0.5, delta)


def _shift(release: Release, relation: str) -> float:
    """By how much a record (or user) can move the released sum, in units of the noise."""
    one = 1.0 if relation == "add-remove" else 2.0
    return one * (2.0 if release.cap is not None else 1.0) * (release.group or 1) / release.noise_multiplier


def _resolved(release: Release) -> Release:
    """A dominating release whose losses, of the order of q/σ, are not lost in double precision when added to 1.

    Less noise dominates, and so does a larger rate (a sample of a sample is post-processing of the batch). Truncated
    batches are dominated by Poisson batches whose records count twice (`Release._truncated`: either case has at most
    rate q and shift 2). For random allocation the losses are of the order of √seen/(tσ), and fewer batches with as many
    seen scale M − 1, which is larger in the convex order.
    """
    if release.batches is not None and release.seen == 1:  # an epoch of which one batch was seen is a Poisson sample
        release = Release(release.mechanism, release.noise_multiplier, 1 / release.batches)
    noise = min(release.noise_multiplier, _LEAST_LOSS**-1)
    if release.batches is not None and release.seen is not None:
        noise = min(noise, (math.sqrt(release.seen) * _LEAST_LOSS) ** -1)
        batches = max(release.seen, min(release.batches, math.floor(math.sqrt(release.seen) / noise / _LEAST_LOSS)))
        if (noise, batches) == (release.noise_multiplier, release.batches):
            return release
        return replace(release, noise_multiplier=noise, batches=batches, sampling_rate=release.seen / batches)
    rate = max(release.sampling_rate, min(1.0, noise * _LEAST_LOSS))
    if (noise, rate) == (release.noise_multiplier, release.sampling_rate):
        return release
    if release.cap is not None:
        return Release(release.mechanism, noise / 2, rate)
    return replace(release, noise_multiplier=noise, sampling_rate=rate)


def _merge(releases: Releases, relation: str) -> tuple[float | None, list[tuple[Release, int]]]:
    """Merges unsampled Gaussians into one with 1/σ² = Σ 1/σᵢ², and counts equal other releases together."""
    shift = 1.0 if relation == "add-remove" else 2.0
    precision = 0.0
    rest: dict[Release, int] = {}
    for release, count in releases:
        if release.mechanism == "gaussian" and (release.whole or _little_noise(release)):
            precision += count * (shift / release.noise_multiplier) ** 2
        else:
            rest[release] = rest.get(release, 0) + count
    return (precision**-0.5 if precision else None), list(rest.items())


def _scaled(sigma: float, relation: str) -> float:
    """The noise multiplier whose pair under the relation has this standard deviation."""
    return sigma * (1 if relation == "add-remove" else 2)


def _little_noise(release: Release) -> bool:
    """Whether an epoch's losses fit on no grid; the Gaussian mechanism without sampling dominates it."""
    return release.batches is not None and release.noise_multiplier < _LEAST_NOISE


def _closed_form(sigma: float, delta: float) -> float:
    """The exact ε of the Gaussian mechanism (Balle, Wang 2018, Thm 8), plus the root finder's tolerance."""
    with np.errstate(divide="ignore"):  # its logarithm of 0 is meant
        value = float(get_epsilon_gaussian(sigma, delta))
    return value + 4e-12 * (1 + value) if value > 0 else 0.0


def _pure_epsilon(releases: Releases, relation: str) -> float:
    """Σ of the largest privacy losses: finite if all noise is Laplace, and the result for very small δ."""
    total = 0.0
    for release, count in releases:
        if release.mechanism != "laplace":
            return math.inf
        total += count * release.pair(relation).loss(2.0)
    return total * (1 + 1e-12)


def _total_variation(releases: Releases, relation: str) -> float:
    """Σ of the total variations of the releases: if it is at most δ, (0, δ)-DP holds."""
    total = 0.0
    for release, count in releases:
        if release.group is not None:
            total += count * GroupPair(release.noise_multiplier, release.sampling_rate, release.group).total_variation()
            continue
        size = _shift(release, relation)
        one = math.erf(size / 2 / math.sqrt(2)) if release.mechanism == "gaussian" else -math.expm1(-size / 2)
        total += count * release.sampling_rate * one
    return total


def epsilon_from_below(releases: Releases, delta: float, relation: str, upper: float) -> float | None:
    """A certified lower bound on ε if the worst case of the releases is attained and the bound is cheap; else None.

    Poisson sampling (or none) attains its pair: the record adds the clip norm along one direction, all others nothing.
    So does an epoch of random allocation. For truncated batches, subsets and shuffled partitions only upper bounds are
    known.
    """
    gaussian, rest = _merge(releases, relation)
    if not rest and not any(_little_noise(release) for release, _ in releases):
        return max(0.0, upper * (1 - 1e-11) - 1e-11)
    if not 0 < upper < math.inf:
        return 0.0
    if any(_little_noise(release) for release, _ in releases):
        return None
    parts = list(releases) if gaussian is None else [*rest, (Release("gaussian", _scaled(gaussian, relation)), 1)]
    return lower_on_grid(parts, delta, relation, upper)


def checked_releases(releases: Releases) -> Releases:
    """The releases, after checking that noise, rate and count of each are in the supported range."""
    for release, count in releases:
        checks.noise_multiplier_value(release.noise_multiplier)
        checks.probability("sampling_rate", release.sampling_rate, allow_one=True)
        if not 0 <= count <= _MAX_COUNT:
            raise InputError(f"the number of releases must lie between 0 and {_MAX_COUNT:.0e}, got {count:.13g}")
    return [(release, count) for release, count in releases if count > 0]


def _describe(releases: Releases) -> str:
    kinds = sorted({type(release.event()).__name__.removesuffix("DpEvent") for release, _ in releases})
    return " and ".join(kinds)
