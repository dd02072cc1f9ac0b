"""ModelMix (Xiao, Wan & Devadas 2022, Algorithm 1): each step descends from a random mixture of the last two iterates.

Algorithm 1 computes, on each coordinate, w_k = a·w_{k−1} + (1−a)·w_{k−2} − η·(G + Δ) with a ~ U[0, 1], after the two
iterates were moved apart, about their mean, to a gap of at least τ_k. In distribution that is exactly

    w_k = (w_{k−1} + w_{k−2})/2 − η·(G + Δ + U),    U uniform of width max(|w_{k−1} − w_{k−2}|, τ_k)/η,

so `release()` adds Δ and U in one release, and everything after it is post-processing: for example, an average of the
iterates is allowed. The gradient is computed at w_{k−1}, before mixing. w_{−1} is w_0 (Xiao et al. do not specify it),
so the first step has the gap τ_1 everywhere.

Formal guarantee. Every release is P = N(0, s²) * U of width at least τ_k/η on each coordinate, shifted by a record of
norm at most c in l2 and c/√p in l∞: Thm 4.1 (p = 1) and Cor. 4.1 bound its Rényi divergence, and composition adds them
(docs/guarantees/modelmix.md). A wider U never protects less: uniform distributions increase in the dispersive order
with their width, adding log-concave noise preserves that order (Lewis and Thompson 1981), and for log-concave noise it
is the order of the trade-off curves.

Units. `tau_over_lr` is τ_k/η_k, a width in units of the gradient averaged over the plan's divisor; in a release, where
gradients are sums, the width is τ_k/η_k · divisor. The plan's margin for rounding (a record may move a computed sum by
a thousandth more than c) is covered by the same factor on shift, Gaussian scale and width: `least_width`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self, Unpack

from scipy.optimize import brentq

from sordino import checks
from sordino.accounting.account import checked_releases, composed_epsilon
from sordino.accounting.events import Release
from sordino.accounting.spent import growing_curve
from sordino.clipping import L2LinfClip
from sordino.errors import InputError, Refused, did_you_mean
from sordino.methods.modelmix.accountant import MixStep, account_modelmix, modelmix_epsilon
from sordino.methods.modelmix.audit import mixed_update
from sordino.methods.modelmix.calibration import calibrate_modelmix
from sordino.methods.modelmix.scores import MixedScorer
from sordino.methods.modelmix.widths import MixingUpdate
from sordino.methods.modelmix.words import WORDS
from sordino.plan.core import Plan
from sordino.plan.make import make_plan
from sordino.plan.method import Accounted, Assumption, Method, Request
from sordino.plan.options import PlanOptions, with_options
from sordino.registry import method_class
from sordino.schedule import Schedule, constant
from sordino.shown import up

if TYPE_CHECKING:
    from torch import Tensor, nn

    from sordino.audit.updates import AuditedUpdate
    from sordino.runs.recipe import Recipe

Steps = list[tuple[MixStep, int]]


@dataclass(frozen=True)
class ModelMix(Method):
    """Step sizes η_k, mixing thresholds τ_k/η_k and factors on the noise multiplier, all fixed before training."""

    lr: Schedule
    tau_over_lr: Schedule
    noise_factors: Schedule = field(default_factory=lambda: constant(1.0))
    name: ClassVar[str] = "modelmix"
    threat_model: ClassVar[str] = (
        "the adversary sees every iterate (equivalently every released gradient with its Gaussian and uniform noise) "
        "and the final model"
    )
    composes: ClassVar[bool] = False
    holds_update: ClassVar[bool] = True
    adds_uniform_noise: ClassVar[bool] = True

    @classmethod
    def plan(cls, **options: Any) -> Plan:
        return plan(**options)

    def check(self, plan: Plan) -> None:
        _check_sampling(plan.sampling.name)
        if plan.relation != "add-remove":
            raise Refused("ModelMix is proven for adding or removing one record, not for replacing one (Thm 4.1)")
        if isinstance(plan.clipping, L2LinfClip) and plan.clipping.p < 1:
            raise Refused(f"l2-linf clipping with p = {plan.clipping.p:g} bounds no coordinate; Cor. 4.1 needs p ≥ 1")
        for name in ("lr", "tau_over_lr", "noise_factors"):
            getattr(self, name).over(plan.steps)  # raises for a list of another length

    def noise_factor(self, step: int, steps: int) -> float:
        return float(self.noise_factors.over(steps)[step])

    def least_width(self, plan: Plan, step: int) -> float:
        """The narrowest uniform noise that the guarantee allows at this step, in units of the summed gradient."""
        margin = plan.sensitivity / plan.clipping.clip_norm
        return float(self.tau_over_lr.over(plan.steps)[step]) * plan.divisor * margin

    def steps(self, plan: Plan, which: Iterable[int] | None = None) -> Steps:
        """The mechanism of the steps `which` (None: all), with equal steps counted together."""
        taus, factors = self.tau_over_lr.over(plan.steps), self.noise_factors.over(plan.steps)
        sigma = plan.noise.noise_multiplier
        chosen = range(plan.steps) if which is None else which
        return list(Counter(MixStep(sigma * float(factors[k]), float(taus[k])) for k in chosen).items())

    def account(self, plan: Plan, delta: float) -> Accounted:
        return _accounted(plan, self.steps(plan), _further(plan), delta)

    def epsilons(self, plan: Plan, steps: Sequence[int]) -> list[float]:
        def after(count: int, last: bool) -> float:
            if count == 0:
                return _others_alone(_further(plan), plan.delta)
            done = self.steps(plan, range(count))
            return modelmix_epsilon(done, delta=plan.delta, further=_further(plan), **_setting(plan))

        return growing_curve(after, steps)

    def spent(self, plan: Plan, entries: Sequence[Mapping[str, Any]], delta: float) -> Accounted:
        """Every entry must be a step with the plan's noise and at least its width, or one of its statistics."""
        made = [entry for entry in entries if entry.get("purpose") == "gradient"]
        for entry in made:
            _check_entry(self, plan, entry)
        further = _statistics_spent(plan, [entry for entry in entries if entry.get("purpose") != "gradient"])
        return _accounted(plan, self.steps(plan, [entry["step"] for entry in made]), further, delta)

    def calibrated(self, plan: Plan, epsilon: float) -> Plan:
        """The smallest noise multiplier (before the factors) at the plan's τ_k."""
        factor, tau = self.noise_factors, self.tau_over_lr
        if factor.is_constant and tau.is_constant:
            first = factor.over(plan.steps)[0]
            found, _ = calibrate_modelmix(
                epsilon, solve="noise_multiplier", steps=plan.steps, tau_over_lr=float(tau.over(plan.steps)[0]),
                delta=plan.delta, further=_further(plan), **_setting(plan),
            )  # fmt: skip
            return plan.with_noise(found / float(first))
        sigma = _smallest(lambda sigma: self.epsilons(plan.with_noise(sigma), [plan.steps])[0], epsilon)
        return plan.with_noise(sigma)

    def assumptions(self, plan: Plan) -> tuple[Assumption, ...]:
        return (
            Assumption(
                "every trainable coordinate gets uniform noise of at least the plan's width at every step",
                "steps with a narrower width are refused before they are released; the ledger records the least width",
            ),
            Assumption(
                "step sizes, mixing thresholds and noise are fixed before training",
                "they are part of the plan, and training uses them from there",
            ),
            Assumption(
                "no gradient is worse than one that is concentrated on as few coordinates as clipping allows",
                "verified for these parameters on a grid, NOT proven between its points: docs/guarantees/modelmix.md; "
                "not needed if the accountant is pld",
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name} | {part.name: getattr(self, part.name).to_dict() for part in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        known = [part.name for part in fields(cls)]
        for key in values:
            if key not in known:
                raise InputError(f"the method {cls.name} has no option {key!r}: {did_you_mean(key, known)}")
        missing = [name for name in ("lr", "tau_over_lr") if name not in values]
        if missing:
            raise InputError(f"the method {cls.name} needs {', '.join(missing)}")
        return cls(**{key: Schedule.from_dict(value) for key, value in values.items()})

    def update(
        self, plan: Plan, model: nn.Module, loss: Callable[..., Tensor], public: Any = None
    ) -> MixingUpdate | None:
        self._refuse_public(public)
        return MixingUpdate(plan, model, loss, self.lr)

    @classmethod
    def check_recipe(cls, recipe: Recipe) -> None:
        checks.known_keys(recipe.method.options, WORDS.keys, "[method]")
        if "lr" not in recipe.method.options:
            raise InputError(
                f"[method] needs lr: the guarantee of {cls.name} depends on the step size, so the plan contains it"
            )
        if recipe.sampling.cap is not None:
            raise InputError("cap is an option of truncated-poisson sampling, which ModelMix's proof does not cover")

    @classmethod
    def from_recipe(cls, request: Request) -> Plan:
        options = request.recipe.method.options
        schedules: dict[str, Any] = {key: Schedule.from_dict(value) for key, value in options.items()}
        return plan(**request.arguments(), **schedules, relation=request.recipe.privacy.relation or "add-remove")

    def scorer(self, plan: Plan) -> MixedScorer:
        return MixedScorer.of(plan)

    def audited_update(self, plan: Plan, model: nn.Module, width_scale: float) -> tuple[Plan, AuditedUpdate]:
        return mixed_update(plan, model, width_scale)

    def narrowed(self, factor: float) -> ModelMix:
        """The method with all mixing thresholds multiplied by `factor`."""
        return replace(self, tau_over_lr=_times(self.tau_over_lr, factor))


@with_options(
    make_plan, "delta", "records", "expected_batch", "epsilon", "noise_multiplier", "epochs", "steps", "clip_norm",
    "clipping", "sampling", "relation", "insecure_seed", "statistics",
)  # fmt: skip
def plan(
    *,
    lr: Schedule | float,
    tau_over_lr: Schedule | float | None = None,
    noise_factors: Schedule | float = 1.0,
    **shared: Unpack[PlanOptions],
) -> Plan:
    """A ModelMix plan from two of `epsilon`, `noise_multiplier` and `tau_over_lr`; the third is computed.

    Given ε and τ: the smallest noise multiplier. Given ε and the noise: the smallest constant τ. Given the noise and τ:
    ε follows. Sampling is Poisson and the relation add-remove: the theorem covers no other. l2-linf clipping
    (Algorithm 2) is accounted with its p, any other l2 clipping with p = 1.

    Args:
        lr: The step size, or its schedule: the guarantee depends on it.
        tau_over_lr: The mixing threshold τ divided by the step size, or its schedule.
        noise_factors: Factors on the noise, step by step.

    Returns:
        The plan.

    Raises:
        InputError: a value is wrong, or not exactly two of the three are given.
        Refused: no theorem covers the combination.
    """
    epsilon, noise_multiplier = shared.pop("epsilon", None), shared.pop("noise_multiplier", None)
    if [epsilon, noise_multiplier, tau_over_lr].count(None) != 1:
        raise InputError("give two of epsilon, noise_multiplier and tau_over_lr; the third is computed")
    _check_sampling(shared.get("sampling", "poisson"))
    method = ModelMix(_schedule(lr), _schedule(1.0 if tau_over_lr is None else tau_over_lr), _schedule(noise_factors))
    shared["noise_multiplier"] = 1.0 if noise_multiplier is None else noise_multiplier
    shared["accountant"] = "rdp"
    made = make_plan(method, **shared)
    if epsilon is None:
        return made
    return made.calibrated(epsilon) if tau_over_lr is not None else _with_least_tau(made, method, epsilon)


def _check_sampling(name: str) -> None:
    if name != "poisson":
        raise Refused(
            f"ModelMix is proven for one Poisson draw per step (Thm 4.1), not for {name} sampling: choose sampling "
            "'poisson', or the method dpsgd"
        )


def averaging_control(plan: Plan) -> Plan:
    """DP-SGD whose Gaussian noise has the per-coordinate variance of the plan's Gaussian and uniform noise together.

    Args:
        plan: A ModelMix plan whose τ and noise are constant.

    Returns:
        The plan of the control. Train it with `AveragingSGD` and the step sizes of the ModelMix plan.

    Raises:
        InputError: the plan is not one of ModelMix, or its τ or noise is not constant.
    """
    method = plan.method
    if not isinstance(method, ModelMix):
        raise InputError(f"the averaging control is for a ModelMix plan, not for {method.name}")
    if not (method.tau_over_lr.is_constant and method.noise_factors.is_constant and plan.noise.name == "gaussian"):
        raise InputError("the averaging control has one noise multiplier: it needs constant tau_over_lr and noise")
    sigma = plan.noise.noise_multiplier * method.noise_factor(0, plan.steps)
    width = float(method.tau_over_lr.over(plan.steps)[0]) * plan.divisor / plan.clipping.clip_norm
    control = replace(plan, method=method_class("dpsgd")(), accountant="pld")
    return control.with_noise((sigma**2 + width**2 / 12) ** 0.5)


def _with_least_tau(plan: Plan, method: ModelMix, epsilon: float) -> Plan:
    if not method.noise_factors.is_constant:
        raise InputError("tau_over_lr is computed for constant noise only: give it, or leave out noise_factors")
    found, _ = calibrate_modelmix(
        checks.positive("epsilon", epsilon), solve="tau_over_lr", steps=plan.steps, delta=plan.delta,
        noise_multiplier=plan.noise_at(0).noise_multiplier, further=_further(plan), **_setting(plan),
    )  # fmt: skip
    return replace(plan, method=replace(method, tau_over_lr=constant(found)))


def _smallest(epsilon: Callable[[float], float], target: float) -> float:
    """The smallest noise multiplier, to a thousandth, whose ε does not exceed the target: a root in logarithms."""

    def gap(log_sigma: float) -> float:
        return math.log(epsilon(math.exp(log_sigma))) - math.log(target * (1 - 3e-4))

    low, high = -0.5, 0.5
    while gap(high) > 0:
        low, high = high, high + 2
        if high > 16:
            raise InputError(f"ε = {up(target)} can't be reached by any noise: the statistics alone may cost more")
    while gap(low) <= 0:
        low, high = low - 2, low
        if low < -5:
            return math.exp(high)
    found = float(brentq(gap, low, high, xtol=5e-5))
    while epsilon(math.exp(found)) > target:
        found += 1e-4
    return math.exp(found)


def _further(plan: Plan) -> list[tuple[Release, int]]:
    return [statistic.release() for statistic in plan.statistics]


def _setting(plan: Plan) -> dict[str, Any]:
    """What the accountant needs besides the steps. The divisor is the batch that the gradient is averaged over."""
    p = plan.clipping.p if isinstance(plan.clipping, L2LinfClip) else 1.0
    return {
        "sampling_rate": plan.sampling_rate,
        "clip_norm": plan.clipping.clip_norm,
        "expected_batch": plan.divisor,
        "linf_p": p,
        "mechanism": plan.noise.name,
    }


def _others_alone(further: Sequence[tuple[Release, int]], delta: float) -> float:
    """ε before the first step: of the statistics, or 0."""
    return composed_epsilon(checked_releases(further), delta, "add-remove", "pld")[0] if further else 0.0


def _accounted(plan: Plan, steps: Steps, further: Sequence[tuple[Release, int]], delta: float) -> Accounted:
    if not steps:
        return Accounted(_others_alone(further, delta), delta, "pld", "composition of the statistics; no step was made")
    found = account_modelmix(steps, delta=delta, further=further, **_setting(plan))
    beside = {"equal_variance_epsilon": found.equal_variance_epsilon, "epsilon_classic": found.epsilon_classic}
    return Accounted(found.epsilon, delta, found.accountant, found.theorem, found.epsilon, beside=beside)


def _check_entry(method: ModelMix, plan: Plan, entry: Mapping[str, Any]) -> None:
    step = checks.count("step", entry.get("step"), minimum=0)
    if step >= plan.steps:
        raise InputError(f"the ledger has step {step}, but the plan has {plan.steps} steps")
    expected = {
        "mechanism": plan.noise.name,
        "noise_multiplier": plan.noise_at(step).noise_multiplier,
        "sampling": plan.sampling.to_dict(),
        "relation": plan.relation,
    }
    for key, value in expected.items():
        if entry.get(key) != value:
            raise InputError(f"step {step} of the ledger has {key} {entry.get(key)!r}, but the plan has {value!r}")
    width = checks.real("least_width", entry.get("least_width", 0.0))
    if width < method.least_width(plan, step):
        raise InputError(
            f"step {step} of the ledger has uniform noise of width {width:g}, but the plan requires at least "
            f"{method.least_width(plan, step):g}: the gap was not enforced, and the plan's ε does not hold"
        )


def _statistics_spent(plan: Plan, entries: Sequence[Mapping[str, Any]]) -> list[tuple[Release, int]]:
    known = {statistic.purpose: statistic for statistic in plan.statistics}
    counts = Counter(str(entry.get("purpose")) for entry in entries)
    for entry in entries:
        statistic = known.get(str(entry.get("purpose")))
        if statistic is None or entry.get("noise_multiplier") != statistic.noise_multiplier:
            raise InputError(f"the plan has no statistic that explains the ledger's entry {dict(entry)!r}")
    for purpose, count in counts.items():
        if count > known[purpose].count:
            raise InputError(f"the ledger has {count} releases of {purpose!r}, the plan {known[purpose].count}")
    return [(known[purpose].release()[0], count) for purpose, count in counts.items()]


def _schedule(value: Schedule | float) -> Schedule:
    return value if isinstance(value, Schedule) else Schedule.from_dict(value)


def _times(schedule: Schedule, factor: float) -> Schedule:
    if schedule.kind == "pieces":
        return replace(schedule, values=tuple((start, value * factor) for start, value in schedule.values))  # type: ignore[misc]
    return replace(schedule, values=tuple(value * factor for value in schedule.values))  # type: ignore[operator]
