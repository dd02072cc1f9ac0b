"""ε of a composition of releases: an upper bound, on a grid chosen so that it is tight."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from dp_accounting import get_epsilon_gaussian

from sordino import checks
from sordino.accounting.allocation import COARSEST, Epoch
from sordino.accounting.events import DpEvent, Release, flatten
from sordino.accounting.group import GroupPair
from sordino.accounting.pairs import MAX_CELLS, MAX_LOSS, GridTooLarge, Pmf
from sordino.accounting.pld import TAIL, Composition, shared_interval, tail_of
from sordino.accounting.rdp import rdp_epsilon, supports
from sordino.errors import InputError, Refused

Releases = Sequence[tuple[Release, int]]
Parts = Sequence[tuple[Pmf, int]]

TOLERANCE = 2e-5  # relative increase of ε that the discretisation may cause
_MAX_COUNT = 10**12
_FEW_CELLS = 1 << 19
# lower bound on losses, which are of the order q/σ: smaller ones vanish when added to 1, and ε would come out as 0
_LEAST_LOSS = 1e-11
_SMALL, _SLACK = 1e-5, 1e-13  # an ε below the first is raised by the second
_LEAST_NOISE = 0.1  # for random allocation with less noise, amplification by sampling is ignored
_NEAR = 0.99  # if the lower bound exceeds this fraction of the upper bound, no finer grid is needed
_SETTLED = 10  # in units of the tolerance: finer grids for random allocation are tried while they change ε by more


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
        if (value := _unsampled(releases, delta, relation)) <= MAX_LOSS:
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
    value = _on_grid(everything, delta, relation, tolerance)
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


def _on_grid(releases: Releases, delta: float, relation: str, tolerance: float) -> float:
    total = sum(count for _, count in releases)
    tail = tail_of(delta, total)
    builders = [(release.discretiser(relation), count) for release, count in releases]

    def directions(interval: float) -> tuple[Parts, Parts]:
        built = [(build(interval, tail), count) for build, count in builders]
        return [(f, c) for (f, _), c in built], [(b, c) for (_, b), c in built]

    def evaluated(interval: float, tilt: float, cells: int) -> float:
        forward, backward = directions(interval)
        value = Composition(forward, interval, cells).epsilon(delta, tilt)
        # under replace-one every pair is its own mirror image; and δ(0) is the same in both directions
        if relation == "replace-one" or value == 0:
            return value
        other = Composition(backward, interval, cells)
        added = other.epsilon(delta, tilt)
        # θ was chosen for removing the record, and may be far from the best one for adding it
        if added > value and other.infinity <= 2 * TAIL * delta:
            bound, own = other.renyi(delta * (1 - 2 * TAIL))
            added = min(added, bound + other.drift, other.epsilon(delta, own))
        return max(value, added)

    start = _coarsest(releases)
    interval, tilt = _choose_grid(lambda d: Composition(directions(d)[0], d), delta, tolerance, start)
    if tilt == 0:
        return 0.0
    value, interval = _on_affordable_grid(lambda d, cells: evaluated(d, tilt, cells), interval, _most_cells(releases))
    if not any(release.batches for release, _ in releases):
        return value
    return _settled(lambda d: evaluated(d, tilt, _FEW_CELLS), value, interval, _SETTLED * tolerance)


def _coarsest(releases: Releases) -> float:
    """The interval to begin with: single summands of random allocation have cells of many intervals."""
    strides = [Epoch(r.noise_multiplier, r.batches, 1).stride(1) for r, _ in releases if r.batches is not None]
    return min([0.5, *(COARSEST / stride for stride in strides)])


def _most_cells(releases: Releases) -> int:
    """The largest number of cells of a composed loss; half as many for random allocation."""
    return MAX_CELLS // 2 if any(release.batches for release, _ in releases) else MAX_CELLS


def _on_affordable_grid(evaluated: Callable[[float, int], float], interval: float, most: int) -> tuple[float, float]:
    """(ε, interval) on the grid, or on a coarser one if it is too large."""
    for attempt in range(14):
        # doubling the interval multiplies the error by four: up to two doublings are cheaper than a huge grid
        try:
            return evaluated(interval, _FEW_CELLS if attempt < 2 else most), interval
        except GridTooLarge:
            interval *= 2
    raise GridTooLarge(f"no grid finer than {interval:.3g} fits")


def _settled(evaluated: Callable[[float], float], value: float, interval: float, change: float) -> float:
    """The least ε over finer and finer grids, until it hardly changes: the error of sums over batches is known only
    roughly."""
    for _ in range(8):
        interval /= 2
        try:
            finer = min(value, evaluated(interval))
        except GridTooLarge:
            break
        if finer >= value * (1 - change):
            return finer
        value = finer
    return value


def _choose_grid(
    compose: Callable[[float], Composition], delta: float, tolerance: float, interval: float
) -> tuple[float, float]:
    """The coarsest grid whose discretisation error is within the tolerance, and its θ (0 if ε is 0).

    Connect-the-Dots adds some v to the variance of the loss and keeps E e^{−L} = 1, so to first order it adds
    θ(θ+1)/2 · v to the cumulant and (θ+1)/2 · v to ε. v is measured on a grid and scales with d² (with d, if the
    losses are smaller than d). `interval` is the first one tried.
    """
    good: float | None = None  # the last interval that fitted
    value = tilt = variance = 0.0
    change = 0.0  # relative change of the interval in the last round; after a small change ε and θ are kept
    for _ in range(60):
        try:
            composition = compose(interval)
        except GridTooLarge:
            if good is None:
                raise
            return min(good, 2 * interval), tilt
        good = interval
        if change < 0.2:
            value, tilt = composition.renyi(delta * (1 - 2 * TAIL))
            if value == 0:  # the Rényi bound of a dominating composition, so it is an upper bound
                if composition.infinity > 2 * TAIL * delta:
                    raise GridTooLarge("what was truncated exceeds δ")
                return interval, 0.0
            _, variance = composition.moments(tilt)
        allowed = tolerance * max(0.8 * value, 0.02 * math.sqrt(variance))
        excess = (tilt + 1) / 2 * composition.added_variance(tilt) * 2 / 3
        large = sum(len(part.losses) for part in composition.parts) > _FEW_CELLS / 2
        if excess <= allowed * (15 if large else 1.3):
            break
        change = max(math.sqrt(allowed / max(excess, 1e-300)), 0.05)
        interval = shared_interval(interval * min(change, 0.7))
        change = change if change < 0.7 else 0.0
    return interval, tilt


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
    parts = list(releases) if gaussian is None else [*rest, (Release("gaussian", _scaled(gaussian, relation)), 1)]
    lower = [(release.from_below(relation), count) for release, count in parts]
    builders = [(build, count) for build, count in lower if build is not None]
    if len(builders) < len(parts) or any(_little_noise(release) for release, _ in releases):
        return None
    tail = tail_of(delta, sum(count for _, count in parts))
    above = [(release.discretiser(relation), count) for release, count in parts]

    def compose(interval: float, cells: int = MAX_CELLS) -> Composition:
        return Composition([(build(interval, tail)[0], count) for build, count in above], interval, cells)

    try:
        interval, tilt = _choose_grid(compose, delta, TOLERANCE, _coarsest(parts))
        if tilt == 0:
            return 0.0
    except GridTooLarge:
        return None

    best: float | None = None

    def from_below(interval: float, cells: int = _FEW_CELLS) -> float:
        if any(release.batches for release, _ in parts):  # the epoch from above is known, and as large as from below
            compose(interval, cells).check_size(tilt)
        built = [(build(interval, tail), count) for build, count in builders]
        return min(upper, Composition(built, interval, cells).epsilon_from_below(delta, tilt))

    try:
        best, interval = _on_affordable_grid(from_below, interval, _most_cells(releases))
        for _ in range(2):  # if the distribution of the losses has an edge, the first grid is too coarse
            if best > _NEAR * upper:
                break
            interval /= 4
            best = max(best, from_below(interval))
    except GridTooLarge:
        pass
    return best


def checked_releases(releases: Releases) -> Releases:
    """The releases, after checking that noise, rate and count of each are in the supported range."""
    for release, count in releases:
        checks.noise_multiplier_value(release.noise_multiplier)
        checks.probability("sampling_rate", release.sampling_rate, allow_one=True)
        if not 0 <= count <= _MAX_COUNT:
            raise InputError(f"the number of releases must lie between 0 and {_MAX_COUNT:.0e}, got {count}")
    return [(release, count) for release, count in releases if count > 0]


def _describe(releases: Releases) -> str:
    kinds = sorted({type(release.event()).__name__.removesuffix("DpEvent") for release, _ in releases})
    return " and ".join(kinds)
