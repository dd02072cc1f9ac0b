"""ε of a composition of releases on a grid of losses that is chosen for it: an upper and a lower bound.

An epoch of random allocation takes longer the finer its grid is, and a composition of very many epochs has too many
cells on the grids that are fine enough for one. Then ε is bounded by moments of one epoch's losses, which take no
longer for 10¹² epochs than for one: from above by the Rényi bound, from below by mean and variance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from sordino.accounting.allocation import COARSEST, Epoch
from sordino.accounting.events import Release
from sordino.accounting.pairs import MAX_CELLS, GridTooLarge, Pmf
from sordino.accounting.pld import TAIL, Composition, shared_interval, tail_of

Releases = Sequence[tuple[Release, int]]
Parts = Sequence[tuple[Pmf, int]]

TOLERANCE = 2e-5  # relative increase of ε that the discretisation may cause
_FEW_CELLS = 1 << 19
_DOUBLINGS = 14  # of the interval, until a grid is affordable
_NEAR = 0.99  # if the lower bound exceeds this fraction of the upper bound, no finer grid is needed
_ROUGHLY = 0.9  # below this fraction of the upper bound, another way to a lower bound is tried
_SETTLED = 10  # in units of the tolerance: finer grids for random allocation are tried while they change ε by more
_FEW_EPOCHS = 100  # of random allocation: then every digit of the tails of one epoch matters
_COARSE = 0.01  # fraction of δ that a bound on rounding errors may use
_WORTH = 0.3  # a grid that adds more standard deviations of the loss to ε than this is worse than the Rényi bound


def epsilon_on_grid(
    releases: Releases, delta: float, relation: str, tolerance: float, *, lattice: bool = True
) -> float:
    """ε at δ, an upper bound.

    Args:
        releases: The releases.
        delta: δ in (0, 1).
        relation: "add-remove" or "replace-one".
        tolerance: The relative increase of ε that the discretisation may cause.
        lattice: Whether sums over batches may be computed on a lattice.

    Raises:
        GridTooLarge: no grid holds the losses.
    """
    tail = tail_of(delta, sum(count for _, count in releases))
    builders = [(release.discretiser(relation, lattice=lattice), count) for release, count in releases]

    def directions(interval: float) -> tuple[Parts, Parts]:
        built = [(build(interval, tail), count) for build, count in builders]
        return [(f, c) for (f, _), c in built], [(b, c) for (_, b), c in built]

    def composed(interval: float) -> Composition:
        return Composition(directions(interval)[0], interval)

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
            _, own = other.renyi(delta * (1 - 2 * TAIL))
            added = min(added, other.renyi_epsilon(delta), other.epsilon(delta, own))
        return max(value, added)

    def by_moments(interval: float) -> float:
        return max(Composition(parts, interval).renyi_epsilon(delta) for parts in directions(interval))

    interval, tilt = _choose_grid(composed, delta, tolerance, _coarsest(releases))
    if tilt == 0:
        return 0.0
    if not _epochs(releases):
        return _on_affordable_grid(lambda d, cells: evaluated(d, tilt, cells), interval, MAX_CELLS)[0]
    try:
        value, interval = _on_affordable_grid(
            lambda d, cells: evaluated(d, tilt, cells), interval, MAX_CELLS // 2, lambda d: _worth(composed(d), tilt)
        )
    except GridTooLarge:
        return _first(by_moments, interval)[0]
    coarse = max(sum(count * pmf.coarse for pmf, count in parts) for parts in directions(interval))
    value = _settled(lambda d: evaluated(d, tilt, _FEW_CELLS), value, interval, _SETTLED * tolerance)
    if coarse <= _COARSE * delta or not _few(releases):
        return value
    try:
        return min(value, epsilon_on_grid(releases, delta, relation, tolerance, lattice=False))
    except GridTooLarge:
        return value


def lower_on_grid(releases: Releases, delta: float, relation: str, upper: float) -> float | None:
    """A lower bound on ε at δ; None if a release does not attain its pair, or the bound would take too long.

    Args:
        releases: The releases.
        delta: δ in (0, 1).
        relation: "add-remove" or "replace-one".
        upper: A positive upper bound on ε.
    """
    best = _lower_on_grid(releases, delta, relation, upper)
    if best is None or best > (_ROUGHLY * upper if _few(releases) else 0.0) or not _epochs(releases):
        return best
    # on a lattice the bound on rounding errors, which is subtracted, may leave nothing of a tail
    return max(best, _lower_on_grid(releases, delta, relation, upper, lattice=False) or 0.0)


def _lower_on_grid(
    releases: Releases, delta: float, relation: str, upper: float, *, lattice: bool = True
) -> float | None:
    below = [(release.from_below(relation, lattice=lattice), count) for release, count in releases]
    builders = [(build, count) for build, count in below if build is not None]
    if len(builders) < len(releases):
        return None
    tail = tail_of(delta, sum(count for _, count in releases))
    above = [(release.discretiser(relation), count) for release, count in releases]
    epochs, most = _epochs(releases), MAX_CELLS // 2 if _epochs(releases) else MAX_CELLS

    def composed(interval: float) -> Composition:
        return Composition([(build(interval, tail)[0], count) for build, count in above], interval)

    def from_below(interval: float, cells: int = MAX_CELLS) -> Composition:
        return Composition([(build(interval, tail), count) for build, count in builders], interval, cells)

    try:
        interval, tilt = _choose_grid(composed, delta, TOLERANCE, _coarsest(releases))
        if tilt == 0:
            return 0.0
        known, _ = _first(composed, interval)
    except GridTooLarge:
        return None
    tilt, span = known.tilt_near(upper, tilt), known.span(tilt)

    def evaluated(interval: float, cells: int = _FEW_CELLS) -> float:
        if epochs and span / interval > cells:  # known before the epoch is computed from below
            raise GridTooLarge("cells for the composed loss")
        found = from_below(interval, cells)
        if found.cumulant(0.0) <= math.log(delta):  # of all mass no more is left
            return 0.0
        # tilted like the upper bound, the bulk of this one may be its largest losses, which are further out
        tilts = {tilt, found.tilt_near(upper, tilt)}
        return min(upper, max(found.epsilon_from_below(delta, theta) for theta in tilts))

    best: float | None = None
    try:
        best, interval = _on_affordable_grid(
            evaluated, interval, most, (lambda d: _worth(composed(d), tilt)) if epochs else None
        )
        for _ in range(2):  # if the distribution of the losses has an edge, the first grid is too coarse
            if best > _NEAR * upper or (best == 0 and epochs and lattice):
                break
            interval /= 4
            best = max(best, evaluated(interval))
    except GridTooLarge:
        if best is None and epochs:
            best = _by_moments_from_below(from_below, interval, delta)
    return best


def _by_moments_from_below(from_below: Callable[[float], Composition], interval: float, delta: float) -> float | None:
    try:
        return _first(from_below, interval)[0].moments_from_below(delta)
    except GridTooLarge:
        return None


def _epochs(releases: Releases) -> bool:
    """Whether there are epochs of random allocation."""
    return any(release.batches for release, _ in releases)


def _few(releases: Releases) -> bool:
    """Whether they are few epochs."""
    return sum(count for release, count in releases if release.batches) <= _FEW_EPOCHS


def _coarsest(releases: Releases) -> float:
    """The interval to begin with: single summands of random allocation have cells of many intervals."""
    strides = [Epoch(r.noise_multiplier, r.batches, 1).stride(1) for r, _ in releases if r.batches is not None]
    return min([0.5, *(COARSEST / stride for stride in strides)])


_Found = TypeVar("_Found")


def _first(function: Callable[[float], _Found], interval: float) -> tuple[_Found, float]:
    """(result, interval) on the first of coarser and coarser grids on which the function has one."""
    for _ in range(_DOUBLINGS):
        try:
            return function(interval), interval
        except GridTooLarge:
            interval *= 2
    raise GridTooLarge(f"no grid finer than {interval:.3g} fits")


def _on_affordable_grid(
    evaluated: Callable[[float, int], float],
    interval: float,
    most: int,
    worth: Callable[[float], bool] | None = None,
) -> tuple[float, float]:
    """(ε, interval) on the grid, or on a coarser one if it is too large.

    Args:
        evaluated: ε on a grid with at most so many cells.
        interval: The finest interval.
        most: The largest number of cells.
        worth: Whether a coarser grid is still good enough.
    """
    for attempt in range(_DOUBLINGS):
        # doubling the interval multiplies the error by four: up to two doublings are cheaper than a huge grid
        try:
            if attempt >= 2 and worth is not None and not worth(interval):
                break
            return evaluated(interval, _FEW_CELLS if attempt < 2 else most), interval
        except GridTooLarge:
            interval *= 2
    raise GridTooLarge(f"no grid finer than {interval:.3g} fits")


def _worth(composition: Composition, tilt: float) -> bool:
    """Whether the discretisation adds little to ε (see `_choose_grid`) in units of the standard deviation."""
    _, variance = composition.moments(tilt)
    return (tilt + 1) / 2 * composition.added_variance(tilt) <= _WORTH * math.sqrt(variance)


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
