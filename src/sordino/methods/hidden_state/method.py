"""Hidden state: noisy gradient descent on a certified loss, of which only the last iterate is published.

    plan(loss=Softmax(10, cap=0.1), features=1296, records=60000, batch=128, epochs=100, regularisation=1e-6,
         epsilon=3.0, delta=1e-5)

The relation is replace-one. The guarantee is that of `accountant` (shifted interpolation for any schedule of step sizes
and noise, averaged over the record's hidden batch; composition if that is smaller). It holds against an adversary who
sees the published weights and nothing that depends on an earlier iterate.

Units. As in every plan, `noise_multiplier` is the standard deviation of the noise on the *summed* gradient divided by
the bound on one record, here S/2 with the certificate's S. σ_mul of Ye & Shokri 2022 is the same number: their noise on
the mean gradient is σ_mul·S/(2b). `noise_factors` multiply it step by step.

Rounding. A step is computed in double precision and rounded to a public grid by `release()`. Neither is a function of
the step's exact value, so the accountant counts both as a disparity of every step (`rounding`). To bound them in
advance the iterates are kept in a ball, whose projection is non-expansive, even if the user asks for none.

| refused                                            | why                                                        |
|----------------------------------------------------|------------------------------------------------------------|
| add-remove                                         | the batches are cut from a public number of records        |
| Poisson sampling                                   | no theorem for the last iterate; every iterate: dpsgd      |
| a step size above 2/M                              | a step may expand                                          |
| a clip norm other than S/2, another divisor than b | the run would not be the one that is accounted             |
| statistics that are not Gaussian or are sampled    | their cost does not add to the guarantee in squares        |
| momentum, Adam, averages of iterates               | not available: the update is the plan's                    |
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from sordino import checks
from sordino.clipping import FlatClip
from sordino.errors import InputError, Refused
from sordino.methods.hidden_state import audit, recipe, training
from sordino.methods.hidden_state.accountant import account_hidden_state, calibrate_hidden_state, hidden_epsilon_curve
from sordino.methods.hidden_state.certificate import Certificate, Geometry, certify
from sordino.methods.hidden_state.losses import Loss, loss_from_dict
from sordino.methods.hidden_state.recorded import (
    recorded_steps,
    statistic_releases,
    statistics_epsilon,
    step_values,
)
from sordino.methods.hidden_state.rounding import iterate_radius, step_error
from sordino.methods.hidden_state.run import HiddenRun
from sordino.plan.core import Plan, Statistic
from sordino.plan.make import make_sampling
from sordino.plan.method import Accounted, Assumption, Method, Request
from sordino.release import Gaussian, fine_rounding
from sordino.sampling import Partition, WithoutReplacement
from sordino.schedule import Schedule, constant

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from sordino.audit.one_run import AuditResult
    from sordino.runs.recipe import Recipe
    from sordino.training.job import Result

PURPOSE = training.PURPOSE


@dataclass(frozen=True)
class HiddenState(Method):
    """The update and its certificate. `features`: the number of inputs of the linear model, without the constant."""

    loss: Loss
    features: int
    regularisation: float
    lr: Schedule
    noise_factors: Schedule
    feature_norm: float = 1.0
    bias: float = 1.0
    radius: float | None = None
    unit: bool = False  # features are also scaled up to their norm
    name: ClassVar[str] = "hidden-state"
    threat_model: ClassVar[str] = (
        "the adversary sees the last iterate only: no earlier iterate, and no metric of one, is ever published"
    )

    composes: ClassVar[bool] = False
    holds_update: ClassVar[bool] = True
    publishes: ClassVar[str | None] = "the last iterate"
    purpose: ClassVar[str] = PURPOSE
    trained_by: ClassVar[str | None] = "sordino.methods.hidden_state.training.train_hidden"
    needs_shape: ClassVar[bool] = True
    bounded_by: ClassVar[str] = "no gradient of the loss is longer, for any record: see its certificate below"

    @classmethod
    def plan(cls, **options: Any) -> Plan:
        return plan(**options)

    def __post_init__(self) -> None:
        checks.count("features", self.features)
        self.certificate  # noqa: B018 (Refused where the loss can't show its constants)

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.feature_norm, self.bias, self.radius)

    @property
    def certificate(self) -> Certificate:
        return certify(self.loss, self.geometry, self.regularisation)

    @property
    def coordinates(self) -> int:
        """The number of coordinates of an iterate."""
        return self.loss.outputs * (self.features + (1 if self.bias else 0))

    def check(self, plan: Plan) -> None:
        if plan.relation != "replace-one":
            raise Refused("hidden state is proven for replace-one: the batches are cut from a public number of records")
        if not isinstance(plan.sampling, Partition | WithoutReplacement):
            raise Refused(
                f"there is no theorem for the last iterate under {plan.sampling.name} sampling: use partition or "
                "without-replacement, or dpsgd, whose guarantee covers every iterate"
            )
        if not isinstance(plan.noise, Gaussian):
            raise Refused("hidden state is proven for Gaussian noise")
        if plan.clipping != FlatClip(self.certificate.sensitivity / 2):
            raise Refused(
                f"the certificate bounds one record by S/2 = {self.certificate.sensitivity / 2:.6g} without clipping, "
                f"but the plan has {plan.clipping}: make the plan with sordino.hidden_state"
            )
        if plan.divisor != plan.sampling.batch:
            raise Refused(f"a step takes the mean over its batch of {plan.sampling.batch}, not over {plan.divisor:g}")
        largest = float(self.lr.over(plan.steps).max())
        if largest > self.certificate.largest_lr:
            raise Refused(
                f"a step of size {largest:.6g} on an objective of smoothness {self.certificate.smoothness:.6g} may "
                f"expand distances: step sizes must not exceed 2/M = {self.certificate.largest_lr:.6g}"
            )
        self.run(plan)
        statistic_releases(plan.statistics)

    def noise_factor(self, step: int, steps: int) -> float:
        return float(step_values(self.noise_factors, steps)[step])

    def run(self, plan: Plan) -> HiddenRun:
        """The run for the accountant: step sizes, noise, certificate, and a bound on the rounding of a step."""
        assert isinstance(plan.sampling, Partition | WithoutReplacement)
        assert isinstance(plan.noise, Gaussian)
        batch, full = plan.sampling.batch, plan.sampling.batch == plan.records
        sizes, factors = step_values(self.lr, plan.steps), step_values(self.noise_factors, plan.steps)
        unit = plan.noise.noise_multiplier * plan.sensitivity / batch
        certificate = self.certificate
        return HiddenRun(
            records=plan.records,
            batch=batch,
            sampling="full" if full else plan.sampling.name,
            step_sizes=sizes,
            noise_stds=unit * factors,
            strong_convexity=certificate.strong_convexity,
            smoothness=certificate.smoothness,
            sensitivity=2 * plan.sensitivity,  # the certificate's, with the plan's margin
            disparity_slack=self.rounding(plan),
        )

    def ball(self, plan: Plan) -> float:
        """The radius of the ball for iterates: the user's, or one that they do not reach."""
        sizes, factors = step_values(self.lr, plan.steps), step_values(self.noise_factors, plan.steps)
        stds = sizes * factors * (plan.noise.noise_multiplier * plan.sensitivity / plan.divisor)
        return iterate_radius(self.radius, float(stds.max()), float(sizes.max()) * plan.sensitivity)

    def rounding(self, plan: Plan) -> float:
        """The largest distance by which rounding may separate two runs in one step, in units of the iterate.

        Each run is moved before the noise (arithmetic, and half a grid spacing) and after it (half a spacing).
        """
        assert isinstance(plan.noise, Gaussian)
        sizes, factors = step_values(self.lr, plan.steps), step_values(self.noise_factors, plan.steps)
        largest = Gaussian(plan.noise.noise_multiplier * float(factors.max()))
        grid = fine_rounding(largest, plan.sensitivity, self.coordinates)
        size = float(sizes.max())
        arithmetic = step_error(
            self.loss, self.geometry, self.features, int(plan.divisor), size / plan.divisor, self.ball(plan)
        )
        return 2 * (grid * size / plan.divisor + arithmetic)

    def account(self, plan: Plan, delta: float) -> Accounted:
        found = account_hidden_state(self.run(plan), delta, further=statistic_releases(plan.statistics))
        beside = {"epsilon_of_the_worst_batch": found.epsilon_worst_position}
        if found.epsilon_composition is not None:
            beside["epsilon_if_every_iterate_were_seen"] = found.epsilon_composition
        return Accounted(found.epsilon, delta, found.accountant, found.theorem, beside=beside)

    def epsilons(self, plan: Plan, steps: Sequence[int]) -> list[float]:
        """ε of publishing only the iterate after t steps; t = 0: of the statistics."""
        wanted = sorted({t for t in steps if t > 0})
        curve = hidden_epsilon_curve(self.run(plan), plan.delta, wanted, statistic_releases(plan.statistics))
        found = dict(zip(wanted, curve, strict=True))
        return [found[t] if t else statistics_epsilon(plan, plan.delta) for t in steps]

    def spent(self, plan: Plan, entries: Sequence[Mapping[str, Any]], delta: float) -> Accounted:
        """ε of publishing the iterate after the recorded steps. A killed run has published none."""
        done = recorded_steps(plan, entries, PURPOSE)
        if done == 0:
            return Accounted(statistics_epsilon(plan, delta, entries), delta, "hidden-state", "statistics alone")
        found = account_hidden_state(self.run(plan).until(done), delta, further=statistic_releases(plan.statistics))
        return Accounted(found.epsilon, delta, found.accountant, found.theorem)

    def calibrated(self, plan: Plan, epsilon: float) -> Plan:
        further = statistic_releases(plan.statistics)
        slack_free = plan.with_noise(1.0)
        factor = 1.0
        for _ in range(4):  # rounding grows with the noise, by parts in a million: two rounds suffice
            run = self.run(slack_free.with_noise(factor))
            again, _ = calibrate_hidden_state(epsilon, run, plan.delta, further)
            factor *= again
            if abs(again - 1) < 1e-9:
                break
        while self.account(slack_free.with_noise(factor), plan.delta).epsilon > epsilon:
            factor *= 1 + 1e-7
        return plan.with_noise(factor)

    def assumptions(self, plan: Plan) -> tuple[Assumption, ...]:
        shown = self.certificate
        return (
            Assumption(
                f"every batch's objective is {shown.strong_convexity:.6g}-strongly convex", shown.how_strong_convexity
            ),
            Assumption(f"every batch's objective is {shown.smoothness:.6g}-smooth", shown.how_smoothness),
            Assumption(
                f"replacing a record moves a sum of gradients by at most {shown.sensitivity:.6g}", shown.how_sensitivity
            ),
            Assumption(
                "nobody sees an earlier iterate or anything computed from one",
                "they are kept in memory only: no checkpoint, no metric before the end, no resume",
            ),
            Assumption(
                f"rounding separates two runs by at most {self.rounding(plan):.3g} in a step",
                "bounded from the arithmetic and the grid of the release, and accounted as a disparity of every step",
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "loss": self.loss.to_dict(),
            "features": self.features,
            "regularisation": self.regularisation,
            "lr": self.lr.to_dict(),
            "noise_factors": self.noise_factors.to_dict(),
            "feature_norm": self.feature_norm,
            "bias": self.bias,
            "radius": self.radius,
            "unit": self.unit,
            "certificate": self.certificate.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of to_dict; the certificate is computed again and must equal the stored one."""
        given = dict(values)
        shown = given.pop("certificate", None)
        try:
            method = cls(
                **given
                | {
                    "loss": loss_from_dict(given["loss"]),
                    "lr": Schedule.from_dict(given["lr"]),
                    "noise_factors": Schedule.from_dict(given["noise_factors"]),
                }
            )
        except (TypeError, KeyError) as error:
            raise InputError(f"a hidden-state method has a missing or unknown key: {error}") from None
        if shown is not None and shown != method.certificate.to_dict():
            raise InputError("the certificate in the plan is not that of its loss: the plan was edited")
        return method

    def restored(
        self, plan: Plan, recipe: Recipe, folder: Path, shape: tuple[int, ...], classes: int
    ) -> tuple[nn.Module, None]:
        return training.ClippedLinear(self), None

    def train(self, plan: Plan, dataset: Any, **options: Any) -> Result:
        settings = options.pop("settings", None)
        return training.train_hidden(plan, dataset, progress=settings.progress if settings else None, **options)

    @classmethod
    def check_recipe(cls, recipe_: Recipe) -> None:
        recipe.check_recipe(recipe_)

    @classmethod
    def from_recipe(cls, request: Request) -> Plan:
        return plan(**recipe.arguments(request))

    def result_entries(self, metrics: Mapping[str, Any], noise_free: Mapping[str, Any] | None) -> dict[str, Any]:
        return {"certificate": self.certificate.to_dict()}

    def audit(self, plan: Plan, **options: Any) -> AuditResult:
        return audit.audit_last_iterate(plan, **options)

    def contraction(self, plan: Plan, step: int) -> float:
        """c of the step times the ratio of step sizes: a release is the iterate in units of its own step's sums."""
        run = self.run(plan)
        return float(run.shrink[step] * run.step_sizes[step - 1] / run.step_sizes[step])


def plan(
    *,
    loss: Loss,
    features: int,
    records: int,
    batch: int,
    delta: float,
    regularisation: float,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    sampling: str = "partition",
    feature_norm: float = 1.0,
    bias: float = 1.0,
    radius: float | None = None,
    unit: bool = False,
    lr: Schedule | float | None = None,
    noise_factors: Schedule | float = 1.0,
    insecure_seed: int | None = None,
    statistics: Sequence[Statistic] = (),
) -> Plan:
    """A plan that publishes the last iterate: for a target `epsilon`, or with a given `noise_multiplier`.

    The relation is replace-one. The loss must be certified: convex, smooth and Lipschitz for all rows and weights.

    Args:
        loss: One of the certified losses (`sordino.methods.hidden_state.losses`).
        features: The number of features of a row.
        records: The exact number of records.
        batch: Records in a step; sampling "full": all.
        delta: δ in (0, 1).
        regularisation: λ of the ridge term, which makes the loss strongly convex.
        epsilon: The target; or give `noise_multiplier`.
        noise_multiplier: Standard deviation of the noise on the summed gradient divided by the bound on one record.
        epochs: Passes of ⌊records/batch⌋ steps; or give `steps`.
        steps: The number of steps.
        sampling: "partition" (one secret shuffle), "without-replacement" or "full".
        feature_norm: Rows are clipped to this norm.
        bias: The constant feature that is appended.
        radius: Weights are projected into a ball of this radius; None: a radius that they do not reach.
        unit: Rows are scaled to norm `feature_norm` instead of clipped.
        lr: The step size or its schedule; None: the step size that contracts most, 2/(m + M) of the certificate.
        noise_factors: Factors on the noise, step by step.
        insecure_seed: Makes the run reproducible; there is no guarantee against anyone who knows the seed.
        statistics: Further Gaussian releases on all records that share the budget.

    Returns:
        The plan.

    Raises:
        InputError: a value is wrong, or not exactly one of two alternatives is given.
        Refused: no theorem covers the combination.
    """
    checks.exactly_one(epsilon=epsilon, noise_multiplier=noise_multiplier)
    checks.exactly_one(epochs=epochs, steps=steps)
    if sampling == "full" and batch != records:
        raise InputError(f"sampling = 'full' takes all records in every step: batch must be {records}, got {batch}")
    sampler = make_sampling("partition" if sampling == "full" else sampling, batch, checks.count("records", records))
    geometry = Geometry(feature_norm, bias, radius)
    certificate = certify(loss, geometry, regularisation)
    sizes = certificate.best_lr if lr is None else lr
    method = HiddenState(
        loss=loss,
        features=features,
        regularisation=float(regularisation),
        lr=sizes if isinstance(sizes, Schedule) else constant(checks.positive("lr", sizes)),
        noise_factors=noise_factors if isinstance(noise_factors, Schedule) else constant(float(noise_factors)),
        feature_norm=float(feature_norm),
        bias=float(bias),
        radius=radius,
        unit=unit,
    )
    per_epoch = records // checks.count("batch", batch)
    made = Plan(
        method=method,
        records=records,
        sampling=sampler,
        clipping=FlatClip(certificate.sensitivity / 2),
        noise=Gaussian(1.0 if noise_multiplier is None else checks.noise_multiplier_value(noise_multiplier)),
        steps=max(1, math.ceil(checks.positive("epochs", epochs) * per_epoch - 1e-9)) if steps is None else steps,
        delta=checks.delta_value(delta),
        divisor=float(batch),
        relation="replace-one",
        insecure_seed=insecure_seed,
        statistics=tuple(statistics),
    )
    return made if epsilon is None else made.calibrated(epsilon)
