"""The theorems of Ye & Shokri, "Differentially Private Learning Needs Hidden State" (2022), as printed.

Every function gives the Rényi divergence ρ(α) between the last iterates of two runs on datasets that differ in one
record's value (replace-one), for the algorithm θ ← θ − η·g + √(2ησ²)·N(0, I) with the gradient g averaged over a batch
of b records. `tight_epsilon` and `classic_epsilon` convert ρ to ε. The theorems are kept for comparison with the
published numbers; the ε of `account_hidden_state` is never above theirs (docs/guarantees/hidden_state.md).

If a theorem's conditions do not hold, it raises Refused. The printed condition on the step size is strict; the limit
itself is allowed here, as every term is continuous there. If b does not divide n, n/b is ⌊n/b⌋ (footnote 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize_scalar
from scipy.special import logsumexp

from sordino import checks
from sordino.errors import InputError, Refused

Array = npt.NDArray[np.float64]
Rdp = Callable[[Array], Array]

_HOPELESS = 1e4
_ROUNDED = 1 + 1e-12  # step sizes are rounded quotients: 2/(λ+β) itself must not be refused


@dataclass(frozen=True)
class Setting:
    """What the theorems depend on: λ, β, S_g of the loss; n, b, K, η, σ of the algorithm."""

    records: int
    batch: int
    epochs: int
    step_size: float
    strong_convexity: float
    smoothness: float
    sensitivity: float
    sigma: float

    def __post_init__(self) -> None:
        for name in ("records", "batch", "epochs"):
            checks.count(name, getattr(self, name))
        for name in ("step_size", "smoothness", "sensitivity", "sigma"):
            checks.positive(name, getattr(self, name))
        if self.batch > self.records:
            raise InputError(f"batch ({self.batch}) exceeds records ({self.records})")
        if not 0 <= checks.real("strong_convexity", self.strong_convexity) <= self.smoothness:
            raise InputError(f"strong_convexity must lie in [0, smoothness], got {self.strong_convexity}")

    @classmethod
    def from_noise(cls, noise_std: float, step_size: float, **rest: float) -> Setting:
        """The setting whose update has noise of standard deviation `noise_std` on the mean gradient: σ = s·√(η/2)."""
        return cls(step_size=step_size, sigma=noise_std * math.sqrt(step_size / 2), **rest)  # type: ignore[arg-type]

    @property
    def batches(self) -> int:
        return self.records // self.batch

    @property
    def step_cost(self) -> float:
        """ρ(α)/α of one step that uses the record: ηS_g²/(4σ²b²)."""
        return self.step_size * (self.sensitivity / (2 * self.sigma * self.batch)) ** 2


def convex_smooth(setting: Setting, orders: Array, position: int) -> Array:
    """Thm 4.3, eq. (9): convex smooth loss, fixed batches, a record of batch `position` (0 is the first)."""
    if setting.step_size > 2 / setting.smoothness * _ROUNDED:
        raise Refused(f"Thm 4.3 needs η < 2/β = {2 / setting.smoothness:.6g}, got {setting.step_size:g}")
    _check_position(setting, position)
    batches = setting.batches
    return orders * setting.step_cost * ((setting.epochs - 1) / batches + 1 / (batches - position))


def strongly_convex(setting: Setting, orders: Array, position: int) -> Array:
    """Thm 4.4, eq. (11): strongly convex smooth loss, fixed batches, a record of batch `position` (0 is the first)."""
    _check_contraction(setting, "Thm 4.4", batches=2)
    _check_position(setting, position)
    return orders * (_earlier_epochs(setting) + _one_epoch(setting, setting.batches - position))


def naive_dynamics(setting: Setting, orders: Array) -> Array:
    """Thm 4.5, eq. (13): the bound of Chourasia, Ye & Shokri 2021, without amplification by post-processing."""
    _check_contraction(setting, "Thm 4.5", batches=1)
    m, s = setting.strong_convexity, setting.sensitivity / (setting.sigma * setting.batch)
    return orders * s**2 / m * -math.expm1(-m * setting.step_size * setting.epochs / 2)


def shuffle_and_partition(setting: Setting, orders: Array) -> Array:
    """Thm 5.2, eq. (15): one secret shuffle, the same batches in every epoch; averaged over the record's batch."""
    _check_contraction(setting, "Thm 5.2", batches=2)
    last = np.array([_one_epoch(setting, j) for j in range(1, setting.batches + 1)])  # (n/b,)
    scaled = (orders - 1)[:, None] * orders[:, None] * last  # (orders, n/b)
    averaged: Array = (logsumexp(scaled, axis=1) - math.log(setting.batches)) / (orders - 1)
    return orders * _earlier_epochs(setting) + averaged


def without_replacement(setting: Setting, orders: Array) -> Array:
    """Thm 5.3, eqs. (18)-(21): a fresh subset of b records in every step; K·⌊n/b⌋ steps, on log S throughout."""
    _check_contraction(setting, "Thm 5.3", batches=1)
    rate = setting.batch / setting.records
    decay = (1 - setting.step_size * setting.strong_convexity) ** 2
    joined = math.log(rate) + (orders - 1) * orders * setting.step_cost
    apart = math.log1p(-rate) if rate < 1 else -math.inf
    log_s = np.zeros_like(orders)
    for _ in range(setting.epochs * setting.batches):
        following = np.logaddexp(joined + log_s, apart + decay * log_s)
        following[following > _HOPELESS * (orders - 1)] = np.inf  # this order is useless
        if (following <= log_s).all():  # S never decreases: a fixed point
            break
        log_s = following
    return log_s / (orders - 1)


def regularised_logistic(
    noise_multiplier: float,
    feature_norm: float,
    regularisation: float,
    *,
    records: int,
    batch: int,
    epochs: int,
    step_size: float,
) -> Rdp:
    """Cor. 6.3, eqs. (28)-(29): Thm 5.2 for softmax regression with features clipped to L and noise multiplier σ_mul.

    β = (L²+1)/2 + λ and the noise is σ_mul·S_g/(2b) on the mean gradient, so S_g cancels. The corollary depends on
    Prop. 6.2, which fails for three or more classes once clipping is active (docs/guarantees/hidden_state.md).
    """
    smoothness = (checks.positive("feature_norm", feature_norm) ** 2 + 1) / 2 + regularisation
    setting = Setting.from_noise(
        checks.positive("noise_multiplier", noise_multiplier) / (2 * batch),
        step_size,
        records=records,
        batch=batch,
        epochs=epochs,
        strong_convexity=regularisation,
        smoothness=smoothness,
        sensitivity=1.0,
    )
    return lambda orders: shuffle_and_partition(setting, orders)


def classic_epsilon(rdp: Rdp, delta: float) -> float:
    """min over α of ρ(α) + log(1/δ)/(α−1) (Mironov 2017, Prop. 3): the conversion that Ye & Shokri use."""
    return _best(lambda orders: rdp(orders) - math.log(delta) / (orders - 1))


def tight_epsilon(rdp: Rdp, delta: float) -> float:
    """min over α of ρ(α) + log(1−1/α) − (log δ + log α)/(α−1) (Canonne, Kamath & Steinke 2020, Prop. 12)."""
    return _best(lambda orders: rdp(orders) + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1))


def _best(epsilon: Rdp) -> float:
    """The smallest value over all orders α > 1: every order gives a valid ε, so the search may be approximate."""
    exponents = np.linspace(-4.0, 6.0, 241)  # α − 1 from 1e-4 to 1e6
    with np.errstate(over="ignore"):
        values = epsilon(1 + 10**exponents)
    k = int(np.nanargmin(values))
    ends = (exponents[max(k - 1, 0)], exponents[min(k + 1, len(exponents) - 1)])
    refined = minimize_scalar(
        lambda x: float(epsilon(np.array([1 + 10**x]))[0]), bounds=ends, method="bounded", options={"xatol": 1e-7}
    )
    return max(0.0, min(float(values[k]), float(refined.fun)))


def _earlier_epochs(setting: Setting) -> float:
    """The first term of (11) and (15), divided by α: the remaining contribution of the first K−1 epochs."""
    decay, half = 1 - setting.step_size * setting.strong_convexity, setting.batches // 2
    power = math.log(decay) * 2 * (setting.batches - half) if decay > 0 else -math.inf
    return _one_epoch(setting, half) * math.expm1(power * (setting.epochs - 1)) / math.expm1(power)


def _one_epoch(setting: Setting, steps: int) -> float:
    """ε₀^j(α)/α of (12) and (16): one use of the record, then j−1 steps without it."""
    square = (1 - setting.step_size * setting.strong_convexity) ** 2
    if square == 0:
        return setting.step_cost if steps == 1 else 0.0
    # q^(j−1) / Σ_{s<j} q^s, with both powers computed in logarithms
    power = math.log(square)
    return setting.step_cost * math.exp(power * (steps - 1)) * math.expm1(power) / math.expm1(power * steps)


def _check_contraction(setting: Setting, theorem: str, *, batches: int) -> None:
    if setting.strong_convexity == 0:
        raise Refused(f"{theorem} needs a strongly convex loss (λ > 0); Thm 4.3 covers convex ones")
    limit = 2 / (setting.strong_convexity + setting.smoothness)
    if setting.step_size > limit * _ROUNDED:
        raise Refused(f"{theorem} needs η < 2/(λ+β) = {limit:.6g}, got {setting.step_size:g}")
    if setting.batches < batches:
        raise Refused(f"{theorem} needs n/b ≥ {batches}, got {setting.batches}; use a smaller batch or the hull bound")


def _check_position(setting: Setting, position: int) -> None:
    if not 0 <= position < setting.batches:
        raise InputError(f"position must lie between 0 and {setting.batches - 1}, got {position}")
