"""The privacy cost of selection: many runs, of which the best is released.

Two statements about runs M₁ … M_k on the same records:

- **Everything is seen** (all results, or anything that depends on all of them, such as the best of a fixed number):
  composition of all the runs. It makes no difference that the metric is computed on public data, because the choice
  depends on all of the models.
- **A random number K of runs, each with settings drawn from the grid, and only the best is released** (Liu & Talwar
  2019; Papernot & Steinke 2022, arXiv 2110.03620v2): two or three times a single run's ε, whatever the grid. Let a
  run be (λ, ε(λ))-RDP. Then the released run is (λ, ε′)-RDP with

      K truncated negative binomial, shape η, γ   (Thm 2):  ε′ = ε(λ) + (1+η)·[(1 − 1/λ̂)·ε(λ̂) + log(1/γ)/λ̂]
                                                                 + log(E K)/(λ−1), for every λ̂
      K Poisson of mean μ                         (Thm 6):  ε′ = ε(λ) + μ·δ̂ + log(μ)/(λ−1),
                                                            where a run is (ε̂, δ̂)-DP with e^ε̂ ≤ 1 + 1/(λ−1)

  The settings of a run are drawn independently of the records, so a run is a mixture, whose divergence is at most the
  largest divergence of its components: the curves of different settings are combined by their maximum at each order.

Assumptions: K is secret and drawn independently of the records; no other run's result is released; runs have
independent noise; the metric is a function of the run's own output and of public data. ε′ is computed by dp-accounting,
as for its RepeatAndSelectDpEvent; K is drawn within a total variation of 2⁻⁴⁰ of its distribution, which δ pays for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from dp_accounting import dp_event
from dp_accounting.rdp import rdp_privacy_accountant as google_rdp

from sordino import checks
from sordino.accounting.account import checked_releases, composed_epsilon
from sordino.accounting.calibration import _bracket
from sordino.accounting.events import DpEvent
from sordino.accounting.grids import Releases
from sordino.accounting.rdp import ORDERS, rdp_curve, supports
from sordino.checks import SHAPES
from sordino.errors import InputError, Refused
from sordino.shown import up

if TYPE_CHECKING:
    from sordino.randomness import Stream

_DISTANCE = 2.0**-40  # bound on the total variation between the distribution of K and what is drawn
_SHARE = 1e-3  # share of δ that is reserved for that distance
_INVERSION = 1e-8  # bound on the relative error of γ, which dp-accounting computes from the mean to 1e-9
_MOST_RUNS = 1_000_000


@dataclass(frozen=True)
class Repetition:
    """The distribution of the number of runs K. Poisson may give K = 0; then nothing is released."""

    distribution: str = "geometric"
    mean_runs: float = 10.0

    def __post_init__(self) -> None:
        checks.choice("distribution", self.distribution, tuple(SHAPES))
        if not 1 < checks.positive("mean_runs", self.mean_runs) <= 10_000:
            raise InputError(f"mean_runs must be above 1 and at most 10,000, got {self.mean_runs:g}")

    @property
    def shape(self) -> float:
        return SHAPES[self.distribution]

    @property
    def gamma(self) -> float:
        """γ of the truncated negative binomial distribution (Papernot & Steinke 2022, Definition 1)."""
        if self.distribution == "poisson":
            raise InputError("the Poisson distribution has no γ")
        return float(google_rdp._gamma_truncated_negative_binomial(self.shape, self.mean_runs))

    def probabilities(self, most: int) -> list[float]:
        """P[K = 0], …, P[K = most]."""
        if self.distribution == "poisson":
            values = [math.exp(-self.mean_runs)]
            for k in range(most):
                values.append(values[-1] * self.mean_runs / (k + 1))
            return values
        keep = 1 - self.gamma
        first = keep / -math.log(self.gamma) if self.shape == 0 else keep / (1 / self.gamma - 1)  # shape is 0 or 1
        values = [0.0, first]
        for k in range(1, most):
            values.append(values[-1] * keep * (k + self.shape) / (k + 1))
        return values[: most + 1]

    def draw(self, stream: Stream) -> int:
        """Draws K, by inversion of its distribution function."""
        wanted = float(stream.uniform(1)[0])
        most = 64
        while most <= _MOST_RUNS:
            total = 0.0
            for k, value in enumerate(self.probabilities(most)):
                total += value
                if wanted < total:
                    return k
            if most > 4 * self.mean_runs and value < 2.0**-60:
                return most  # beyond the last representable quantile
            most *= 2
        raise InputError(f"more than {_MOST_RUNS:,} runs were drawn: give a smaller mean_runs")

    def event(self, run: DpEvent) -> DpEvent:
        """The whole selection as a dp-accounting event."""
        return dp_event.RepeatAndSelectDpEvent(run, self.mean_runs, self.shape)


def selection_epsilon(runs: Sequence[Releases], repetition: Repetition, delta: float, relation: str) -> float:
    """ε at δ of the best of K runs, each with the releases of one of `runs` (drawn by public randomness)."""
    delta = checks.delta_value(delta)
    checks.choice("relation", relation, checks.RELATIONS)
    if not runs:
        raise InputError("there are no runs to choose from")
    curves = []
    for releases in map(checked_releases, runs):
        if not supports(releases, relation):
            raise Refused(
                f"there is no Rényi bound for these releases under {relation}, which paying for a sweep requires: use "
                "Poisson sampling with Gaussian noise under add-remove, or without-replacement under replace-one"
            )
        curves.append(rdp_curve(releases, relation))
    worst = np.max(curves, axis=0)
    best = google_rdp._compute_rdp_repeat_and_select(ORDERS, worst, repetition.mean_runs, repetition.shape)
    # errors of γ and of log E K: both enter through a logarithm, with the factors of Thm 2
    slack = 0.0 if repetition.shape == math.inf else _INVERSION * (2 + repetition.shape)
    values = best + slack * (1 + 1 / (np.asarray(ORDERS) - 1))
    epsilon = float(google_rdp.compute_epsilon(ORDERS, values, delta * (1 - _SHARE))[0])
    if math.isfinite(epsilon) and (1 + math.exp(min(epsilon, 700.0))) * _DISTANCE > _SHARE * delta:
        return math.inf  # the distance of K from its distribution would cost more than the share of δ reserved for it
    return epsilon


def calibrate_selection(
    releases: Sequence[Callable[[float], Releases]], target: float, repetition: Repetition, delta: float, relation: str
) -> list[float]:
    """A noise multiplier for each kind of run, such that the best of K runs is (target, δ)-DP.

    `releases[i]` maps a noise multiplier to the releases of run i. Each kind is calibrated as if all runs were of that
    kind; if the maximum of the curves costs more than that, all targets are lowered until the selection meets it.
    """
    target = checks.positive("epsilon", target)

    def multiplier(kind: Callable[[float], Releases], goal: float, guess: float) -> float:
        def epsilon(sigma: float) -> float:
            return min(selection_epsilon([kind(sigma)], repetition, delta, relation), 1e6)

        return _bracket(epsilon, epsilon, goal, guess, gap=2e-4)[1][0]

    goal, found = target, [1.0] * len(releases)
    for _ in range(20):
        found = [multiplier(kind, goal, guess) for kind, guess in zip(releases, found, strict=True)]
        runs = [kind(sigma) for kind, sigma in zip(releases, found, strict=True)]
        whole = selection_epsilon(runs, repetition, delta, relation)
        if whole <= target:
            return found
        goal *= min(target / whole, 0.999)
    raise InputError(f"no noise was found for which the whole sweep meets ε = {up(target)}: use fewer kinds of runs")


@dataclass(frozen=True)
class Composed:
    """The cost if all runs are seen, and the rule by which it was computed."""

    epsilon: float
    delta: float
    relation: str | None  # None: the runs have different relations, so there is no common statement
    rule: str


def composed_cost(
    runs: Sequence[tuple[Releases | None, float, float, str]],
) -> Composed:
    """The joint cost of runs given as (releases if they describe the run completely, ε, δ, relation).

    By PLD where it applies, else by Σε and Σδ. Runs under different relations have no common (ε, δ); ε is infinite
    then.
    """
    relations = {relation for _, _, _, relation in runs}
    if len(relations) != 1:
        return Composed(math.inf, 1.0, None, "the runs have different relations: state their costs one by one")
    (relation,) = relations
    basic = Composed(
        math.fsum(e for _, e, _, _ in runs) * (1 + 1e-12), math.fsum(d for _, _, d, _ in runs), relation,
        "basic composition: sums of ε and of δ",
    )  # fmt: skip
    known = [releases for releases, _, _, _ in runs if releases is not None]
    deltas = {delta for _, _, delta, _ in runs}
    if len(known) < len(runs) or len(deltas) != 1:
        return basic
    together = checked_releases([one for releases in known for one in releases])
    try:
        value, name = composed_epsilon(together, min(deltas), relation, "pld")
    except InputError:
        return basic
    return Composed(value, min(deltas), relation, f"composition of all releases of all runs, {name} accountant")
