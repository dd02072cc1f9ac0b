"""ModelMix (Xiao, Wan & Devadas 2022): ε of T steps whose noise is Gaussian (or Laplace) plus uniform. Pure functions.

Mixing the last two iterates by α ~ U[0, 1] per coordinate *is* their average plus uniform noise as wide as their gap.
So one step releases, to an adversary who sees every iterate, the clipped sum plus noise plus a uniform of width at
least τ/η per coordinate. In units of the clip norm (expected batch B, clip norm c, noise multiplier σ):

    one record moves the sum by ≤ 1 in l2 and ≤ 1/√p in l∞ · noise N(0, σ²) · uniform of width W = (τ/η)·B/c

Guarantee: for add-remove neighbours, Poisson sampling with rate q and a memoryless update, (ε, δ)-DP holds for the ε
returned, by Thm 4.1 and Cor. 4.1 as corrected and completed in docs/guarantees/modelmix.md. Every ε is also at most
that of DP-SGD with the same noise (the uniform is post-processing).

    input                 answer
    τ = 0, or W < σ/1000  DP-SGD's (the uniform is ignored)
    σ·√p below 0.1        DP-SGD's (the moments leave the range of doubles)
    linf_p not whole      ⌊p⌋ coordinates at c/√p and one with the remainder
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Required, TypedDict, Unpack

import dp_accounting
import numpy as np
from dp_accounting.rdp import rdp_privacy_accountant as google_rdp
from scipy.optimize import minimize_scalar

from sordino import checks
from sordino.accounting.account import checked_releases, composed_epsilon
from sordino.accounting.events import Release
from sordino.accounting.grids import TOLERANCE
from sordino.errors import InputError, Refused
from sordino.methods.modelmix.mixture import Array
from sordino.methods.modelmix.sampled import MOST_ORDERS, SampledStep, classic, tight

_MOST_LEVELS = 4  # fractional orders up to 5 are verified and used; beyond, whole ones are as good
_MOST_KINDS = 16  # largest number of different steps that are accounted separately


@dataclass(frozen=True)
class MixStep:
    """One step: noise in clip norms; width τ/η of the uniform in units of the *averaged* gradient (sum / batch)."""

    noise_multiplier: float
    tau_over_lr: float


@dataclass(frozen=True)
class MixAccount:
    """ε of a run. `equal_variance_epsilon` is the control: DP-SGD whose Gaussian noise has the same variance."""

    epsilon: float
    epsilon_classic: float  # by ρ + log(1/δ)/(α−1), the conversion of Xiao et al. 2022
    equal_variance_epsilon: float
    order: float
    delta: float
    accountant: str  # "modelmix-rdp", or "pld" if DP-SGD's bound is smaller
    theorem: str
    checked: tuple[str, ...]


Steps = Sequence[tuple[MixStep, int]]
Releases = Sequence[tuple[Release, int]]


@dataclass(frozen=True)
class Run:
    """A checked run in clip norms: (noise multiplier, width of the uniform, number of steps) for each kind of step."""

    kinds: tuple[tuple[float, float, int], ...]
    rate: float
    p: float
    delta: float
    noise: Literal["gaussian", "laplace"]
    further: tuple[tuple[Release, int], ...]

    def releases(self, sigma: Callable[[float, float], float], mechanism: str) -> Releases:
        """DP-SGD with the same sampling; the noise of each step is `sigma` of its noise and its uniform."""
        own = [(Release(mechanism, sigma(s, w), self.rate), count) for s, w, count in self.kinds]
        return checked_releases([*own, *self.further])


class Setting(TypedDict, total=False):
    """What ε depends on besides the steps.

    Attributes:
        sampling_rate: The probability of a record to be in a batch.
        clip_norm: The bound of l2 clipping (Laplace noise: of l1 clipping).
        expected_batch: The number that sums are divided by.
        delta: δ in (0, 1).
        linf_p: p of Algorithm 2: coordinates are truncated at clip_norm/√p after l2 clipping; 1: no truncation.
        mechanism: "gaussian" or "laplace"; Laplace noise has no l∞ form.
        further: Other releases that are composed with the steps.
    """

    sampling_rate: Required[float]
    clip_norm: Required[float]
    expected_batch: Required[float]
    delta: Required[float]
    linf_p: float
    mechanism: str
    further: Releases


def account_modelmix(steps: Steps, **setting: Unpack[Setting]) -> MixAccount:
    """ε of the steps, composed with `further` releases, and ε of the control; both are upper bounds.

    Args:
        steps: The different steps, each with its number.
        setting: See `Setting`.

    Returns:
        The account.

    Raises:
        InputError: a value is wrong.
        Refused: no theorem covers the combination, or the moments can't be integrated precisely enough.
    """
    run = checked_run(steps, **setting)
    found = best_order(run, verify=True)
    plain = dpsgd_epsilon(run, found)
    variance = 1.0 if run.noise == "gaussian" else 2.0
    control = run.releases(lambda s, w: math.sqrt(variance * s**2 + w**2 / 12), "gaussian")
    beside = composed_epsilon(control, run.delta, "add-remove", "pld")[0]
    mixed = found.tight <= plain
    return MixAccount(
        epsilon=found.tight if mixed else plain,
        epsilon_classic=found.classic,
        equal_variance_epsilon=beside,
        order=found.order,
        delta=run.delta,
        accountant="modelmix-rdp" if mixed else "pld",
        theorem=_theorem(run, mixed),
        checked=found.checked,
    )


def modelmix_epsilon(steps: Steps, **setting: Unpack[Setting]) -> float:
    """The ε of account_modelmix, without the control."""
    run = checked_run(steps, **setting)
    found = best_order(run, verify=True)
    return min(found.tight, dpsgd_epsilon(run, found))


Point = tuple[float, float]  # an order α, and (α−1)·ρ(α) of the whole run


@dataclass(frozen=True)
class Best:
    tight: float
    classic: float
    order: float
    checked: tuple[str, ...]


def best_order(run: Run, *, verify: bool) -> Best:
    """The smallest ε over the orders: all whole ones first, then fractional ones around the best of them."""
    steps = [(SampledStep(run.noise, s, w, run.p, run.rate), count) for s, w, count in run.kinds]
    top = min([MOST_ORDERS, *(step.top for step, _ in steps)])
    if top < 2:
        return Best(math.inf, math.inf, math.inf, ("the uniform was ignored: its moments are out of range",))
    orders = np.arange(2.0, top + 1)
    totals = _further(run, orders)
    for step, count in steps:
        totals += count * step.whole_orders()[: len(orders)]
    points = [(float(a), float(t)) for a, t in zip(orders, totals, strict=True)]

    def cost(point: Point) -> float:
        return tight(point[0], point[1], run.delta) if point[1] < math.inf else math.inf

    start = min(points, key=cost)[0]
    levels, smallest = _levels(steps, int(start) if start <= _MOST_LEVELS + 1 else 0, verify)
    if start <= levels + 1:
        points += _fractional(run, steps, start, levels, cost)
    best = min(points, key=cost)
    if verify and max((step.quadrature_error(best[0]) for step, _ in steps), default=0.0) > 1e-9:
        raise Refused(
            "the moments of the mixture could not be integrated to nine digits for these parameters; "
            "use a smaller tau_over_lr or more noise, or account for the run as DP-SGD"
        )
    ordinary = min(classic(alpha, total, run.delta) for alpha, total in points)
    return Best(max(cost(best), 0.0), ordinary, best[0], _sentences(levels, smallest))


def _fractional(
    run: Run, steps: Sequence[tuple[SampledStep, int]], start: float, levels: int, cost: Callable[[Point], float]
) -> list[Point]:
    """(α, (α−1)·ρ(α)) at the orders that a search around `start` visits, below levels + 1."""
    points: list[Point] = []

    def at(log_order: float) -> float:
        alpha = 1 + math.exp(log_order)
        if abs(alpha - round(alpha)) < 1e-6:
            alpha += 2e-6
        total = sum(count * step.fractional(alpha) for step, count in steps)
        points.append((alpha, total + float(_further(run, np.array([alpha]))[0])))
        return cost(points[-1])

    bounds = math.log(start - 2 if start > 2 else 2e-3), math.log(min(start, levels))
    minimize_scalar(at, bounds=bounds, method="bounded", options={"xatol": 0.03, "maxiter": 16})
    return points


def _levels(steps: Sequence[tuple[SampledStep, int]], wanted: int, verify: bool) -> tuple[int, float]:
    if not verify:
        return wanted, math.inf
    found = [step.verified_levels(wanted) for step, _ in steps]
    return min([wanted, *(n for n, _ in found)]), min([math.inf, *(m for _, m in found)])


def _further(run: Run, orders: Array) -> Array:
    """(α−1)·ρ(α) of the other releases."""
    total = np.zeros(len(orders))
    for release, count in run.further:
        if release.mechanism == "gaussian" and release.cap is None and release.batch is None:
            step = SampledStep("gaussian", release.noise_multiplier, 0.0, 1.0, release.sampling_rate)
            whole = step.whole_orders()
            total += count * np.array(
                [whole[round(a) - 2] if a == round(a) else step.fractional(float(a)) for a in orders]
            )
        else:
            accountant = google_rdp.RdpAccountant(list(orders), dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
            accountant.compose(release.rdp_event("add-remove"), count)
            total += (np.maximum(accountant._rdp, 0.0) + count * 1e-14) * (orders - 1)
    return total


def dpsgd_epsilon(run: Run, mixed: Best, coarse: bool = False) -> float:
    """ε of DP-SGD with the same noise, if it can be the smaller one: the uniform is post-processing."""
    releases = run.releases(lambda s, _: s, run.noise)
    often = sum(count for _, _, count in run.kinds) * run.rate > 10  # otherwise PLDs are much tighter
    if run.noise == "gaussian" and often and mixed.order < MOST_ORDERS / 2:
        plain = replace(run, kinds=tuple((sigma, 0.0, count) for sigma, _, count in run.kinds))
        if mixed.tight < 0.5 * best_order(plain, verify=False).tight:  # PLDs are not that much tighter
            return math.inf
    try:
        tolerance = TOLERANCE * (10 if coarse else 1)
        return composed_epsilon(releases, run.delta, "add-remove", "pld", tolerance=tolerance)[0]
    except InputError:
        if math.isfinite(mixed.tight):
            return math.inf
        raise


def checked_run(
    steps: Steps,
    *,
    sampling_rate: float,
    clip_norm: float,
    expected_batch: float,
    delta: float,
    linf_p: float = 1.0,
    mechanism: str = "gaussian",
    further: Releases = (),
) -> Run:
    """The run in units of the clip norm, its values checked."""
    noise = checks.choice("mechanism", mechanism, ("gaussian", "laplace"))
    p = checks.real("linf_p", linf_p)
    if p < 1:
        raise InputError(f"linf_p must be at least 1 (coordinates are truncated at clip_norm/√p), got {p:g}")
    if noise == "laplace" and p != 1:
        raise Refused("Laplace noise needs l1 clipping, for which l∞ truncation has no theorem; use linf_p=1")
    scale = checks.positive("expected_batch", expected_batch) / checks.positive("clip_norm", clip_norm)
    kinds: dict[tuple[float, float], int] = {}
    for step, count in steps:
        tau = checks.real("tau_over_lr", step.tau_over_lr)
        if tau < 0:
            raise InputError(f"tau_over_lr must not be negative, got {tau:g}")
        kind = checks.noise_multiplier_value(step.noise_multiplier), min(tau * scale, 1e12)
        kinds[kind] = kinds.get(kind, 0) + checks.count("steps", count, minimum=0)
    further = tuple(checked_releases(further))
    for release, _ in further:
        if release.rdp_event("add-remove") is None:
            raise Refused(f"{release} has no Rényi bound under add-remove, so it does not compose with ModelMix")
    return Run(
        _few({kind: count for kind, count in kinds.items() if count}),
        checks.probability("sampling_rate", sampling_rate, allow_one=True),
        p,
        checks.delta_value(delta),
        "gaussian" if noise == "gaussian" else "laplace",
        further,
    )


def _few(kinds: dict[tuple[float, float], int]) -> tuple[tuple[float, float, int], ...]:
    """At most _MOST_KINDS kinds of steps: noise and width are rounded down, on coarser and coarser grids.

    Less noise and a narrower uniform are never better (docs/guarantees/modelmix.md), so this can only increase ε.
    """
    ratio, merged = 1.001, kinds
    while len(merged) > _MOST_KINDS:
        merged = {}
        for (sigma, width), count in kinds.items():
            kind = max(_down(sigma, ratio), 1e-3), _down(width, ratio)
            merged[kind] = merged.get(kind, 0) + count
        ratio = ratio**1.2
    return tuple((sigma, width, count) for (sigma, width), count in merged.items())


def _down(value: float, ratio: float) -> float:
    return min(value, ratio ** math.floor(math.log(value, ratio))) if value > 0 else 0.0


def _theorem(run: Run, mixed: bool) -> str:
    if not mixed:
        return "DP-SGD with the same noise, composed as privacy loss distributions: the uniform part is post-processing"
    name = "Cor. 4.1" if run.p > 1 else "Thm 4.1" if run.noise == "gaussian" else "Remark C.1"
    return (
        f"ModelMix (Xiao, Wan & Devadas 2022, {name}, corrected; docs/guarantees/modelmix.md), composed in Rényi "
        "divergence, tight conversion (Canonne, Kamath & Steinke 2020, Prop. 12)"
    )


def _sentences(levels: int, smallest: float) -> tuple[str, ...]:
    if math.isfinite(smallest):
        worst = f"criterion S verified numerically, margin {smallest:.2g}; orders up to {levels + 1} may be fractional"
    elif levels:
        worst = "without a uniform all vectors of the same length are equivalent"
    else:
        worst = "whole orders only, by the supremum over shifts"
    return (
        f"worst vector: {worst}",
        "moments: Gauss–Legendre, nine digits by halving the panels; contour error bounded and added",
        "width: a wider gap is never worse (dispersive order; Lewis & Thompson 1981), so the enforced gap is the worst",
    )
