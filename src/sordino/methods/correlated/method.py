"""Correlated noise: step t releases x_t + Σ_j c′_j z_{t−j}, the noise C⁻¹z of a matrix mechanism.

Formal guarantee. Each record belongs to one group and takes part only in its group's steps (sampling "cyclic"). The
release is C⁻¹(CX + Z) with C lower triangular, a function of the Gaussian mechanism on CX, whose sensitivity is exact
(`sensitivity`). It holds for gradients that depend on earlier releases: row t of CX is a function of x_1 … x_t, and the
Gaussian mechanism with a lower triangular C has the same privacy for adaptive inputs (Denisov et al. 2022, arXiv
2202.08312, Thm 2.1). The proofs, and what a resumed run releases, are in docs/guarantees/correlated.md.

Units. `noise_multiplier` is the standard deviation of z, each step's own noise, divided by the clip norm, as in DP-SGD.
The noise multiplier of the mechanism is noise_multiplier/s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self, Unpack

from sordino import checks
from sordino.accounting.account import account
from sordino.accounting.events import Release
from sordino.errors import InputError, Refused
from sordino.methods.correlated.choose import best_setting, best_strategy
from sordino.methods.correlated.mechanism import Pattern, calibrated, check_relation, pattern_of, releases, theorem
from sordino.methods.correlated.scores import CorrelatedScorer
from sordino.methods.correlated.strategies import Strategy, strategy_from
from sordino.methods.correlated.words import WORDS
from sordino.methods.correlated.workloads import Workload, noise_in_weights, workload_from
from sordino.plan.core import Plan
from sordino.plan.explained import Explained
from sordino.plan.make import make_plan
from sordino.plan.method import Accounted, Assumption, Method, Request
from sordino.plan.options import SharedOptions, with_options
from sordino.sampling import Cyclic

if TYPE_CHECKING:
    from sordino.runs.recipe import Recipe


@dataclass(frozen=True)
class Correlated(Method):
    """C, and the update that it was chosen for (no guarantee depends on the update)."""

    strategy: Strategy
    workload: Workload = field(default_factory=Workload)
    name: ClassVar[str] = "correlated"
    threat_model: ClassVar[str] = (
        "the adversary sees every noisy sum that was released, hence every iterate and the final model, and knows in "
        "which steps each record may take part"
    )
    covers: ClassVar[frozenset[str]] = frozenset({"inner", "augmentation"})
    protects_users: ClassVar[bool] = True

    @classmethod
    def plan(cls, **options: Any) -> Plan:
        return plan(**options)

    def check(self, plan: Plan) -> None:
        pattern = _pattern(plan)
        check_relation(pattern, plan.relation)
        if plan.noise.name != "gaussian":
            raise Refused("correlated noise is proven for Gaussian noise only: use l2 clipping")
        releases(self.strategy, pattern, plan.noise.noise_multiplier, plan.steps)

    def releases(self, plan: Plan, steps: int) -> list[tuple[Release, int]]:
        return releases(self.strategy, _pattern(plan), plan.noise.noise_multiplier, steps, plan.steps)

    def earlier_noise(self, plan: Plan, step: int, first: int) -> Mapping[int, float]:
        terms = self.strategy.noise(plan.steps)
        return {step - lag: value for lag, value in terms.items() if lag > 0 and step - lag >= first}

    def account(self, plan: Plan, delta: float) -> Accounted:
        found = account(plan.event(), delta, plan.relation, plan.accountant)
        exact = self.strategy.residue(plan.steps) == 0  # otherwise the cost of truncation is included, and not attained
        said = theorem(_pattern(plan), found.accountant)
        below = found.epsilon_lower if exact and not plan.statistics else None
        return Accounted(found.epsilon, delta, found.accountant, said, found.epsilon_rdp, below)

    def spent(self, plan: Plan, entries: Sequence[Mapping[str, Any]], delta: float) -> Accounted:
        """Every entry must be a release that the plan declares; then ε is at most that of the plan's first steps.

        Steps that were left out, and noise that was restarted under another key, only make C smaller (section 5 of
        docs/guarantees/correlated.md).
        """
        try:
            Explained(plan, entries)
        except Refused as error:
            raise InputError(f"the plan does not explain the ledger: {error}") from error
        made = [entry["step"] for entry in entries if entry.get("purpose") == self.purpose]
        others = [entry for entry in entries if entry.get("purpose") != self.purpose]
        if others and len(others) != sum(statistic.count for statistic in plan.statistics):
            raise InputError("a ledger with some of the plan's statistics has no separate ε: finish the run")
        part = replace(plan, statistics=plan.statistics if others else ())
        done = max(made) + 1 if made else 0
        epsilon = self.epsilons(replace(part, delta=delta), [done])[0] if done or others else 0.0
        return Accounted(epsilon, delta, plan.accountant, "composition")

    def calibrated(self, plan: Plan, epsilon: float) -> Plan:
        if plan.statistics:
            return super().calibrated(plan, epsilon)
        found = calibrated(
            self.strategy, _pattern(plan), plan.steps, epsilon, plan.delta, plan.relation, plan.accountant
        )
        return plan.with_noise(found)

    def assumptions(self, plan: Plan) -> tuple[Assumption, ...]:
        terms = len(self.strategy.noise(plan.steps))
        return (
            Assumption(
                f"the noise of a step is that of the strategy {self.strategy}: up to {terms} Gaussians, each of which "
                "was added to an earlier step with another coefficient",
                "earlier noise is regenerated from its address, and the sum is rounded once, exactly; a release is "
                "refused if the ledger does not hold its earlier noise under the same key",
            ),
            Assumption(
                "the coefficients of C are non-negative and non-increasing",
                "verified when the plan was made, with a bound on their rounding",
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "strategy": self.strategy.to_dict(), "workload": self.workload.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        checks.known_keys(values, ("strategy", "workload"), f"the method {cls.name}")
        if "strategy" not in values:
            raise InputError(f"the method {cls.name} needs strategy")
        return cls(strategy_from(values["strategy"]), workload_from(values.get("workload", {})))

    @classmethod
    def check_recipe(cls, recipe: Recipe) -> None:
        checks.known_keys(recipe.method.options, WORDS.keys, f"[method] of {cls.name}")
        if recipe.sampling.name not in ("poisson", "cyclic") or recipe.sampling.cap is not None:
            raise Refused(f"[sampling] of the method {cls.name} is cyclic: leave out its name, or write cyclic")

    @classmethod
    def from_recipe(cls, request: Request) -> Plan:
        recipe = request.recipe
        options = dict(recipe.method.options)
        own = {"momentum": recipe.train.options.get("momentum", 0.0)}
        if isinstance(recipe.train.lr, int | float) and "weight_decay" in recipe.train.options:
            own["decay"] = min(float(recipe.train.lr) * float(recipe.train.options["weight_decay"]), 0.999)
        arguments = {key: value for key, value in request.arguments().items() if key != "sampling"}
        return plan(
            **arguments,
            **own
            | {key: options[key] for key in ("strategy", "bands", "groups", "momentum", "decay") if key in options},
            value=options.get("lambda"),
            relation=recipe.privacy.relation or "add-remove",
            accountant=recipe.privacy.accountant,
            unit=recipe.privacy.unit,
            rows_per_user=recipe.privacy.rows_per_user,
        )

    def scorer(self, plan: Plan) -> CorrelatedScorer:
        return CorrelatedScorer.of(plan, self.strategy.matrix(plan.steps))

    def noise_in_weights(self, plan: Plan) -> float:
        """The root mean square of the noise in the weights of plain SGD with step size 1, in clip norms."""
        return plan.noise.noise_multiplier * noise_in_weights(self.strategy, self.workload, plan.steps)


@with_options(
    make_plan, "delta", "records", "expected_batch", "epsilon", "noise_multiplier", "epochs", "steps", "clip_norm",
    "clipping", "accountant", "divisor", "insecure_seed", "statistics", "unit", "rows_per_user",
)  # fmt: skip
def plan(
    *,
    strategy: str | None = None,
    value: float | None = None,
    bands: int | None = None,
    groups: int | None = None,
    momentum: float = 0.0,
    decay: float = 0.0,
    relation: str = "add-remove",
    **shared: Unpack[SharedOptions],
) -> Plan:
    """A plan whose noise is correlated between steps; strategy and groups are chosen if they are not given.

    Args:
        strategy: identity, lambda, inverse-root, banded-root or banded-lambda; None: the one with the least noise in
            the weights.
        value: λ of lambda and banded-lambda.
        bands: The number of coefficients of C⁻¹ (inverse-root) or of C (banded-root, banded-lambda).
        groups: The number of groups into which the records are divided; the groups take turns. With as many groups as
            batches in an epoch, a batch is a whole group. With fewer, a part of the group is sampled, which amplifies
            privacy. None: chosen by the noise in the weights if `epsilon` is given, else as many as there are batches.
        momentum: The momentum of the update; used only to choose the strategy.
        decay: Step size times weight decay of the update; used only to choose the strategy.
        relation: add-remove, or replace-one if batches are whole groups.

    Returns:
        The plan; `plan.guarantee()` states what it guarantees.

    Raises:
        InputError: a value is wrong, or not exactly one of two alternatives is given.
        Refused: no theorem covers the combination.
    """
    epsilon, noise_multiplier = shared.pop("epsilon", None), shared.get("noise_multiplier")
    checks.exactly_one(epsilon=epsilon, noise_multiplier=noise_multiplier)
    if strategy is None and (value is not None or bands is not None):
        raise InputError("value and bands are options of a strategy: give its name")
    workload = Workload(momentum, decay)
    shared["noise_multiplier"], shared["sampling"] = noise_multiplier or 1.0, "cyclic"
    made = make_plan(Correlated(Strategy("identity"), workload), **shared, relation=relation)
    named = None if strategy is None else Strategy(strategy, value, bands)
    records, expected_batch = made.records, shared["expected_batch"]
    pattern = pattern_of(records, expected_batch, groups)
    if groups is None and epsilon is not None:
        found = best_setting(
            records=records, batch=expected_batch, steps=made.steps, epsilon=checks.positive("epsilon", epsilon),
            delta=made.delta, workload=workload, strategy=named, relation=relation,
        )  # fmt: skip
        pattern, named = found.pattern, found.strategy
    chosen = named or best_strategy(pattern, workload, made.steps)
    expected = records * pattern.rate / pattern.groups
    made = replace(
        made,
        method=Correlated(chosen, workload),
        sampling=Cyclic(pattern.groups, pattern.rate),
        divisor=expected if shared.get("divisor") is None else made.divisor,
    )
    return made if epsilon is None else made.calibrated(epsilon)


def _pattern(plan: Plan) -> Pattern:
    sampling = plan.sampling
    if not isinstance(sampling, Cyclic):
        raise Refused(
            f"correlated noise is proven for records that take part in a fixed order (cyclic sampling), not for "
            f"{sampling.name} sampling: a record that could take part in any step would have a larger sensitivity"
        )
    return Pattern(sampling.batches, sampling.sampling_rate)
