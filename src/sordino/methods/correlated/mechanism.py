"""The mechanism of correlated noise as releases that compose: participation, and sensitivity to one record.

The mechanism is Y = CX + Z with Z of standard deviation σ_z (in clip norms) on every coordinate; the release
X + C⁻¹Z = C⁻¹Y is a function of it (docs/guarantees/correlated.md).

- *A record takes part every b steps* (sampling rate 1): one Gaussian mechanism of sensitivity s, so its noise
  multiplier is σ_z/s, for any number of steps.
- *Cyclic Poisson sampling* at rate q with C of at most b bands: a participation moves b rows that no other
  participation moves, so the run is ⌈T/b⌉ Poisson-subsampled Gaussian mechanisms with noise multiplier σ_z/‖c‖
  (Choquette-Choo et al. 2023, arXiv 2306.08153, Thm 4).
- If C⁻¹ is truncated, C is the banded matrix plus a matrix of absolute column sums at most ρ. Z is the sum of two
  independent parts, of variances (1 − 2⁻²⁰)·σ_z² and 2⁻²⁰·σ_z²; the first is for the banded matrix, the second for the
  remainder, which one record moves by at most k·ρ: a further Gaussian release.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from sordino import checks
from sordino.accounting.calibration import calibrate, gaussian_guess
from sordino.accounting.events import Release, compose_events
from sordino.errors import InputError, Refused
from sordino.methods.correlated.sensitivity import column_norm, sensitivity
from sordino.methods.correlated.strategies import MOST_STEPS, Strategy

_SHARE = 2.0**-20  # share of the variance of Z that accounts for the truncation
_LARGEST = 1e11  # larger noise multipliers are accounted as this one


@dataclass(frozen=True)
class Pattern:
    """Who takes part: each record in the steps of one of `groups` groups, each time with probability `rate`."""

    groups: int
    rate: float = 1.0

    def __post_init__(self) -> None:
        checks.count("groups", self.groups)
        checks.probability("sampling_rate", self.rate, allow_one=True)

    def participations(self, steps: int) -> int:
        """The largest number of participations of one record."""
        return math.ceil(steps / self.groups)


@functools.lru_cache(256)
def moves(strategy: Strategy, pattern: Pattern, steps: int) -> float:
    """The l2 distance by which one record moves CX, in clip norms; per participation if batches are sampled.

    Raises:
        Refused: no theorem covers the strategy with this pattern.
    """
    if pattern.rate == 1:
        return sensitivity(strategy, steps=steps, separation=pattern.groups)
    if strategy.width is None or strategy.width > pattern.groups:
        raise Refused(
            f"{strategy} with sampled batches: amplification is proven if C has at most as many bands as there are "
            f"groups ({pattern.groups}), so that a record's participations move different rows; use a banded strategy "
            "with fewer bands, more groups, or batches that are whole groups"
        )
    return column_norm(strategy, steps=steps)


def releases(
    strategy: Strategy, pattern: Pattern, noise_multiplier: float, steps: int, total: int | None = None
) -> list[tuple[Release, int]]:
    """The releases of the first `steps` of `total` steps about one record; `noise_multiplier` is that of z."""
    total = steps if total is None else total
    if steps == 0:
        return []
    if total > MOST_STEPS:
        raise InputError(f"steps = {total}: correlated noise is accounted for {MOST_STEPS} steps at most")
    count, left = pattern.participations(steps), strategy.residue(total) * pattern.participations(steps)
    main = noise_multiplier * (math.sqrt(1 - _SHARE) if left else 1.0) / moves(strategy, pattern, steps)
    found = [(Release("gaussian", main), 1) if pattern.rate == 1 else (Release("gaussian", main, pattern.rate), count)]
    if not left:
        return found
    further = min(noise_multiplier * math.sqrt(_SHARE) / left, _LARGEST)  # less noise costs more
    return [*found, (Release("gaussian", further), 1)]


def theorem(pattern: Pattern, accountant: str) -> str:
    """The sentence for the guarantee."""
    how = {
        "gaussian": "in closed form (Balle & Wang 2018, Thm 8)",
        "pld": "as privacy loss distributions (Connect-the-Dots, Doroshenko et al. 2022; an upper bound)",
        "rdp": "in Rényi divergence (Canonne, Kamath & Steinke 2020, Prop. 12)",
    }[accountant]
    if pattern.rate == 1:
        return (
            "Gaussian matrix mechanism on adaptive inputs (Denisov et al. 2022, Thm 2.1) with records in a fixed "
            f"order: one Gaussian release of the whole run, exact sensitivity (docs/guarantees/correlated.md), {how}"
        )
    return (
        "banded Gaussian matrix mechanism with cyclic Poisson sampling (Choquette-Choo et al. 2023, Thm 4): one "
        f"sampled Gaussian release for each round through the groups, composed {how}"
    )


def calibrated(
    strategy: Strategy,
    pattern: Pattern,
    steps: int,
    epsilon: float,
    delta: float,
    relation: str = "add-remove",
    accountant: str = "pld",
) -> float:
    """The smallest noise multiplier of z whose ε is within the target."""
    moved = moves(strategy, pattern, steps)
    rounds = 1 if pattern.rate == 1 else pattern.participations(steps)
    guess = moved * gaussian_guess(pattern.rate, rounds, epsilon, delta) * (2 if relation == "replace-one" else 1)
    sigma, _ = calibrate(
        lambda s: compose_events(releases(strategy, pattern, s, steps)), epsilon, delta, relation, accountant,
        guess=guess,
    )  # fmt: skip
    return sigma


def pattern_of(records: int, batch: float, groups: int | None) -> Pattern:
    """The pattern of an expected batch: as many groups as batches, or fewer groups of which parts are sampled."""
    checks.count("records", records)
    if checks.positive("batch", batch) > records:
        raise InputError(f"batch ({batch:g}) exceeds records ({records})")
    if records / batch > MOST_STEPS:
        raise InputError(f"{records} records in batches of {batch:g} make more than {MOST_STEPS} groups")
    whole = math.ceil(records / batch - 1e-9)
    if groups is None or checks.count("groups", groups) == whole:
        return Pattern(whole)
    if groups > whole:
        raise InputError(f"groups = {groups}: {records} records in batches of {batch:g} make at most {whole} groups")
    return Pattern(groups, min(1.0, batch * groups / records))


def steps_of(records: int, batch: float, epochs: float | None, steps: int | None) -> int:
    """The number of steps: given, or that of the given epochs."""
    if (steps is None) == (epochs is None):
        raise InputError("give either steps or epochs")
    if steps is not None:
        return checks.count("steps", steps)
    return max(1, math.ceil(checks.positive("epochs", epochs) * math.ceil(records / batch - 1e-9) - 1e-9))


def check_relation(pattern: Pattern, relation: str) -> None:
    """Refuses replace-one if batches are sampled."""
    if relation == "replace-one" and pattern.rate < 1:
        raise Refused(
            "correlated noise with sampled batches is accounted under add-remove; use relation='add-remove', or "
            "batches that are whole groups (groups = records / expected batch)"
        )
