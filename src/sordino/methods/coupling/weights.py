"""Rules as values, as named in a recipe: they map a step and public rows to the weight of the public gradient.

A rule sees a `Situation`: the plan, the step, and public rows at the current weights. It never sees a private row, so
its result is post-processing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol

from torch import nn

from sordino import checks
from sordino.errors import InputError, Refused, did_you_mean
from sordino.gradients import Rows
from sordino.methods.coupling import rules
from sordino.methods.coupling.estimates import lasting_error, loss_spread, moments, smoothness
from sordino.plan import Plan
from sordino.sampling import Poisson, TruncatedPoisson


@dataclass(frozen=True, eq=False)
class Situation:
    """What a rule may use."""

    plan: Plan
    step: int
    public_records: int
    public_batch: int
    model: nn.Module
    loss: Any
    draw: Callable[[int], Rows]  # that many public rows (all, if there are fewer), the same for the same step
    held_back: Callable[[int], Rows] | None = None  # the same for rows that are not used for public gradients
    scale: float = 1.0  # the factor on records before clipping (adaptive clipping)

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)


@dataclass(frozen=True)
class Weight:
    """alpha · public + (1 − alpha) · scale · private. The scale corrects the shortening by clipping; 1: unchanged."""

    alpha: float
    scale: float = 1.0


class Rule(Protocol):
    name: ClassVar[str]

    @property
    def every(self) -> int:
        """The number of steps between two calls; 0: once, at the first step."""

    def weight(self, at: Situation) -> Weight: ...


@dataclass(frozen=True)
class Constant:
    """The same α for every step."""

    alpha: float
    name: ClassVar[str] = "constant"
    every: ClassVar[int] = 0

    def __post_init__(self) -> None:
        rules.constant(self.alpha)

    def weight(self, at: Situation) -> Weight:
        return Weight(rules.constant(self.alpha))


@dataclass(frozen=True)
class OnlyPublic:
    """α = 1: released gradients are computed but not used."""

    name: ClassVar[str] = "only-public"
    every: ClassVar[int] = 0

    def weight(self, at: Situation) -> Weight:
        return Weight(rules.only_public())


@dataclass(frozen=True)
class OnlyPrivate:
    """α = 0: DP-SGD. Public rows are used for warm-up, thresholds, centring or projection, if at all."""

    name: ClassVar[str] = "only-private"
    every: ClassVar[int] = 0

    def weight(self, at: Situation) -> Weight:
        return Weight(rules.only_private())


@dataclass(frozen=True)
class AdaMix:
    """α = ½."""

    name: ClassVar[str] = "adamix"
    every: ClassVar[int] = 0

    def weight(self, at: Situation) -> Weight:
        return Weight(rules.adamix())


@dataclass(frozen=True)
class SampleMechanism:
    """α = n_pub / (n_pub + n_priv)."""

    name: ClassVar[str] = "sample-mechanism"
    every: ClassVar[int] = 0

    def weight(self, at: Situation) -> Weight:
        return Weight(rules.sample_mechanism(at.public_records, at.plan.records))


@dataclass(frozen=True)
class DPMD:
    """α_t = 1 − cos(π t / 2K). `period` is K; default: the number of steps."""

    period: float | None = None
    name: ClassVar[str] = "dpmd"
    every: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.period is not None:
            checks.positive("period", self.period)

    def weight(self, at: Situation) -> Weight:
        return Weight(rules.dpmd(at.step, self.period or at.plan.steps))


@dataclass(frozen=True)
class Equation5:
    """Corollary 4.3.2 of Liu et al. 2023 (`rules.equation_5`), at the weights before the first private step.

    Args:
        smoothness: L; None: measured.
        initial_loss: 𝓛₀; None: measured.
        rows: The number of public rows to measure on.
    """

    smoothness: float | None = None
    initial_loss: float | None = None
    rows: int = 512
    name: ClassVar[str] = "equation-5"
    every: ClassVar[int] = 0

    def __post_init__(self) -> None:
        for key in ("smoothness", "initial_loss"):
            if getattr(self, key) is not None:
                checks.positive(key, getattr(self, key))
        checks.count("rows", self.rows)

    def weight(self, at: Situation) -> Weight:
        rows = at.draw(self.rows)
        steep = smoothness(at.model, at.loss, rows) if self.smoothness is None else self.smoothness
        first = loss_spread(at.model, at.loss, rows)[0] if self.initial_loss is None else self.initial_loss
        alpha = rules.equation_5(
            batch=at.plan.expected_batch,
            noise_multiplier=at.plan.noise.noise_multiplier,
            parameters=at.parameters,
            smoothness=steep,
            loss=first,
        )
        return Weight(alpha)


@dataclass(frozen=True)
class Theorem31:
    """Theorem 3.1 of Liu et al. 2023 (`rules.theorem_3_1`), with Var[l] measured on public rows.

    Args:
        distance: ‖w₁ − w*‖. It is unknown in advance and must be given.
        vc_dimension: None: the number of weights, which is correct for linear classifiers only.
        rows: The number of public rows to measure on.
    """

    distance: float
    vc_dimension: float | None = None
    rows: int = 512
    name: ClassVar[str] = "theorem-3.1"
    every: ClassVar[int] = 0

    def __post_init__(self) -> None:
        checks.positive("distance", self.distance)
        if self.vc_dimension is not None:
            checks.positive("vc_dimension", self.vc_dimension)
        checks.count("rows", self.rows)

    def weight(self, at: Situation) -> Weight:
        _, variance = loss_spread(at.model, at.loss, at.draw(self.rows))
        mu = rules.gaussian_mu(
            sampling_rate=at.plan.sampling_rate,
            steps=at.plan.steps,
            noise_multiplier=at.plan.noise.noise_multiplier,
        )
        alpha = rules.theorem_3_1(
            public_records=at.public_records,
            private_records=at.plan.records,
            distance=self.distance,
            parameters=at.parameters,
            mu=mu,
            spread=math.sqrt(variance * (self.vc_dimension or at.parameters)),
        )
        return Weight(alpha)


@dataclass(frozen=True)
class LeastError:
    """The α of smallest mean squared error (docs/coupling.md), estimated from `rows` public rows at regular steps.

    A share of the public rows is `held_back`: they are used for these estimates only, not for public gradients. Rows
    that the model has fitted have short gradients, all alike, and would suggest that public gradients have hardly any
    error. With held_back = 0 the errors are estimated on the rows that also give the public gradients.

    Clipping shortens the public rows' gradients by the factor κ (`Moments.shrinkage`). The private gradient is first
    multiplied by 1/κ; the remaining bias counts as error. Without clipping κ = 1 and there is no bias. The rule assumes
    that public and private rows come from one distribution and are clipped alike.

    `horizon` is the number of steps over which errors average out; 1 is the error of a single step. A horizon of 1
    favours public gradients in long runs, where noise averages out and the public set's deviation does not.
    """

    every: int = 20
    rows: int = 512
    horizon: float = 1.0
    held_back: float = 0.2
    name: ClassVar[str] = "mse"

    def __post_init__(self) -> None:
        checks.count("every", self.every)
        checks.count("rows", self.rows, minimum=2)
        if checks.positive("horizon", self.horizon) < 1:
            raise InputError(f"horizon = {self.horizon:g} must be at least 1: errors average out over that many steps")
        if not 0 <= checks.real("held_back", self.held_back) < 1:
            raise InputError(f"held_back = {self.held_back:g} must lie in [0, 1): a share of the public rows")

    def weight(self, at: Situation) -> Weight:
        plan = at.plan
        if plan.noise.name != "gaussian":
            raise Refused(f"the mse rule is for Gaussian noise, not for {plan.noise.name} noise: use another rule")
        source = at.draw if at.held_back is None else at.held_back
        found = moments(at.model, at.loss, source(self.rows), plan.clipping, at.scale)
        lasting, trace = None, found.trace
        if at.held_back is not None:
            lasting, trace = lasting_error(at.model, at.loss, at.draw(self.rows), found, at.public_records)
        shortened = found.shrinkage * plan.expected_batch / plan.divisor
        poisson = isinstance(plan.sampling, (Poisson, TruncatedPoisson))
        private = rules.private_error(
            moment=(found.clipped_square if poisson else found.clipped_trace) / found.shrinkage**2,
            batch=plan.expected_batch,
            noise_multiplier=plan.noise_at(at.step).noise_multiplier,
            clip_norm=plan.sensitivity / found.shrinkage,
            parameters=at.parameters,
            bias=found.bias,
            horizon=self.horizon,
        )
        public = rules.public_error(
            trace=trace, batch=at.public_batch, records=at.public_records, horizon=self.horizon, lasting=lasting
        )
        return Weight(rules.least_error(private, public), at.scale / shortened)


RULES: Mapping[str, Callable[..., Rule]] = {
    rule.name: rule
    for rule in (
        Constant, OnlyPublic, OnlyPrivate, AdaMix, SampleMechanism, DPMD, Equation5, Theorem31, LeastError,
    )
}  # fmt: skip


BY_NUMBERS = (Constant, OnlyPublic, OnlyPrivate, AdaMix, SampleMechanism, DPMD)
"""Rules that follow from public numbers: they estimate nothing with the model."""


def rule_from_dict(values: Mapping[str, Any]) -> Rule:
    """The rule that a recipe names.

    Args:
        values: {"alpha": 0.3} for a constant weight, or {"rule": name, …} with the options of the rule; without
            either the rule is mse.

    Returns:
        The rule.

    Raises:
        InputError: a name or an option is unknown, or a value is wrong.
    """
    given = dict(values)
    name = given.pop("rule", "constant" if "alpha" in given else "mse")
    if not isinstance(name, str) or name not in RULES:
        raise InputError(f"method.rule = {name!r} is unknown: {did_you_mean(str(name), RULES)}")
    known = [field.name for field in fields(RULES[name])]  # type: ignore[arg-type]
    for key in given:
        if key not in known:
            raise InputError(f"unknown key in [method] with rule {name}: {key!r}: {did_you_mean(key, known)}")
    try:
        return RULES[name](**given)
    except TypeError as error:
        raise InputError(f"method.rule = {name!r}: {error}") from None
